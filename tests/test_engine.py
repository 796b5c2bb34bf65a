"""Protects the engine: a text does not depend on company, mode, chunks, prefixes or preemption.

And its books: whatever ends a request, its slot and pages come back, and everybody is told.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import subprocess
import sys
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.config import PLAIN, ConfigError, EngineConfig, SamplingParams, SpecPlan
from eaglejax.engine import loop, programs
from eaglejax.engine.engine import Engine
from eaglejax.engine.handle import EngineError, Handle
from eaglejax.engine.programs import pack, unpack
from eaglejax.engine.request import Completion, RequestError
from eaglejax.policy import Decision, Policy
from eaglejax.steps import Models, StepOutput
from tests import kit

PATIENCE = 120.0  # seconds; only a failure takes them
CHAIN = SpecPlan(3, 1, 4)
BASE = EngineConfig(
    max_slots=4,
    max_length=64,
    page_size=4,
    pages=22,  # less than for four long requests: some give way now and then
    plan=CHAIN,
    kernels="reference",
    prefill_chunks=(4, 16),
    prefill_budget=8,
    spec="on",
)
COMPILED: dict[object, dict[Any, Any]] = {}  # programs are shared by engines of the same shapes


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer sizes to compile; what lies between is padded."""
    monkeypatch.setattr(programs, "BUCKETS", (1,))


def engine_of(config: EngineConfig = BASE, *, drafter: bool = True) -> Engine:
    """An engine on TINY, its check skipped: these are not the tests of the start."""
    tiny = kit.tiny() if drafter else kit.tiny().without_drafter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_check", lambda self: None)
        engine = Engine.create(tiny.models, tiny.params, config, kit.tokenizer(), None)
    engine.programs.compiler_options = kit.QUICK
    shapes = (config.max_slots, config.pages_per_slot, config.total_pages, drafter, config.plan)
    engine.programs._compiled = COMPILED.setdefault(shapes, {})
    return engine


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Half of them begin alike, so that prefixes are shared."""
    rng = np.random.default_rng(seed)
    common = rng.integers(1, 64, 13).tolist()
    own = [rng.integers(1, 64, rng.integers(1, 25)).tolist() for _ in range(count)]
    return [common + ids if i % 2 else ids for i, ids in enumerate(own)]


def params_of(count: int, seed: int = 0) -> list[SamplingParams]:
    rng = np.random.default_rng(seed)
    choices = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 9},
        {"temperature": 0.8, "top_p": 0.8, "min_p": 0.02},
    ]
    return [
        SamplingParams(max_tokens=int(rng.integers(1, 24)), seed=i, **choices[i % 4])  # type: ignore[arg-type]
        for i in range(count)
    ]


@functools.cache
def alone(count: int) -> list[Completion]:
    """Each of the prompts by itself, plainly, without overlap or a prefix cache."""
    engine = engine_of(dataclasses.replace(BASE, spec="off", overlap=False, prefix_cache=False))
    pairs = zip(prompts_of(count), params_of(count), strict=True)
    return [engine.generate([prompt], params)[0] for prompt, params in pairs]


def assert_books(engine: Engine) -> None:
    """Nothing runs, nothing waits, every page is free or keeps a prefix."""
    assert engine.drain(PATIENCE)
    pool = engine._loop.scheduler.pool
    pool.check()
    assert pool.available == pool.pages
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert len(engine._loop.scheduler._slots) == engine.config.max_slots


class Restless(Policy):
    """Changes its mind every few steps."""

    def choose(self, decoding: int, size: int, context: float) -> Decision:
        self._steps = getattr(self, "_steps", 0) + 1
        return Decision(CHAIN if self._steps // 3 % 2 else PLAIN, "restless")


def same_texts(engine: Engine, count: int = 24) -> None:
    """Submits all at random moments and compares with each alone."""
    rng = np.random.default_rng(1)
    handles: list[Handle] = []
    for prompt, params in zip(prompts_of(count), params_of(count), strict=True):
        handles.append(engine.submit(prompt, params))
        if rng.random() < 0.3:
            time.sleep(0.02)
    for i, (handle, expected) in enumerate(zip(handles, alone(count), strict=True)):
        got = handle.result(PATIENCE)
        assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason), i
        assert got.text == expected.text
    assert_books(engine)


MODES = {
    "off": {"spec": "off"},
    "on": {},
    "without-overlap": {"overlap": False},
    "threshold": {"spec": "threshold", "spec_disable_batch_threshold": 2},
    "auto": {"spec": "auto"},
    "chunks-of-1": {"prefill_chunks": (1,), "prefill_budget": 3},
    "chunks-of-7": {"prefill_chunks": (7,)},
    "chunks-of-64": {"prefill_chunks": (64,)},
    "no-prefix-cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_b07_same_text_in_company(mode: str):
    same_texts(engine_of(dataclasses.replace(BASE, **MODES[mode])))


def test_same_text_without_a_drafter():
    same_texts(engine_of(dataclasses.replace(BASE, spec="off"), drafter=False), 8)


def test_same_text_while_the_plan_changes_every_few_steps():
    engine = engine_of()
    engine.policy = engine._loop.policy = Restless("on", CHAIN)
    same_texts(engine)
    steps = engine.stats().counts.steps
    assert min(steps["0,1,1"], steps["3,1,4"]) > 5
    assert engine.stats().counts.absorb_steps > 0


def test_pages_run_out_and_nothing_is_lost():
    engine = engine_of()
    prompts = prompts_of(8, seed=5)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    each = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    assert engine.stats().preemptions == 0
    assert [c.token_ids for c in engine.generate(prompts, params)] == each
    assert engine.stats().preemptions > 0
    assert_books(engine)


def test_b13_acceptance_after_a_prefix_hit_and_after_plain_steps():
    """The oracle's tokens are accepted at once only if the drafter's rows are the true ones."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = (prompts_of(2)[1] + list(range(1, 40)))[:40]
    fresh = engine_of(dataclasses.replace(BASE, prefix_cache=False)).generate([prompt], params)[0]
    engine = engine_of()
    for _ in range(2):
        again = engine.generate([prompt], params)[0]
        assert again.token_ids == fresh.token_ids
        assert again.stats.accepted_per_position == fresh.stats.accepted_per_position
    assert engine.stats().counts.cached_tokens == 4 * ((len(prompt) - 1) // 4)


def test_neighbours_may_leave():
    count, engine = 24, engine_of()
    handles = [
        engine.submit(p, q) for p, q in zip(prompts_of(count), params_of(count), strict=True)
    ]
    for handle in handles[::3]:
        handle.abort()
    for i, (handle, expected) in enumerate(zip(handles, alone(count), strict=True)):
        got = handle.result(PATIENCE)
        if got.finish_reason == "abort":
            assert i % 3 == 0
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
        else:
            assert got.token_ids == expected.token_ids
    assert engine.stats().counts.finished["abort"] > 0
    assert_books(engine)


def test_a_deadline_ends_with_what_there_is():
    engine = engine_of()
    handle = engine.submit([1, 2], SamplingParams(max_tokens=60, ignore_eos=True), timeout=0.0)
    assert handle.result(PATIENCE).finish_reason == "deadline"
    assert_books(engine)


def test_b10_a_stop_string_ends_the_text_before_it():
    engine = engine_of()
    prompt, params = prompts_of(1)[0], SamplingParams(max_tokens=24, ignore_eos=True)
    whole = engine.generate([prompt], params)[0]
    stop = whole.text[5:8]
    cut = dataclasses.replace(params, stop=(stop,))
    chunks = list(engine.generate([prompt], cut, stream=True))
    done = chunks[-1].completion
    assert done is not None
    end = whole.text.index(stop)
    assert done.text == "".join(c.text for c in chunks) == whole.text[:end]
    assert done.finish_reason == "stop"
    assert done.token_ids == whole.token_ids[: end + len(stop)]
    assert sum(len(c.token_ids) for c in chunks) == len(done.token_ids)
    assert done.stats.acceptance_length == (end + len(stop) - 1) / done.stats.verify_steps
    assert_books(engine)


def test_the_more_important_goes_first():
    engine = engine_of()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ends: list[int] = []
    handles = [engine.submit([5, 6, 7 + i], params, priority=i) for i in range(12)]
    threads = [
        threading.Thread(target=lambda h=h, i=i: (h.result(PATIENCE), ends.append(i)))
        for i, h in enumerate(handles)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sum(ends[:6]) > sum(ends[6:])
    assert_books(engine)


def test_handles_can_be_read_in_an_event_loop():
    engine = engine_of()
    prompts, params = prompts_of(6), SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [c.token_ids for c in engine.generate(prompts, params)]

    async def read(prompt: list[int]) -> tuple[int, ...]:
        tokens: list[int] = []
        async for chunk in engine.submit(prompt, params):
            tokens += chunk.token_ids
        return tuple(tokens)

    async def everything() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(read, prompts))

    assert asyncio.run(everything()) == expected


def test_an_event_loop_that_ends_early_hurts_nobody_else():
    engine = engine_of()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    handle = engine.submit([1, 2, 3], params)

    async def first() -> None:
        await anext(aiter(handle))

    asyncio.run(first())
    assert len(handle.result(PATIENCE).token_ids) == 40
    assert_books(engine)


def test_several_threads_share_the_steps():
    engine = engine_of(dataclasses.replace(BASE, spec="off"))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts: dict[int, Any] = {}

    def run(i: int) -> None:
        texts[i] = engine.generate([prompts_of(4)[i]], params)[0].token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    expected = [c.token_ids for c in engine.generate(prompts_of(4), params)]
    assert [texts[i] for i in range(4)] == expected
    assert_books(engine)


def test_the_mode_of_a_call_ends_with_it():
    engine = engine_of()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = engine.generate(prompts_of(2), params, spec="off")
    assert engine.policy.mode == "on"
    assert all(c.stats.verify_steps == 0 for c in plain)
    stream = engine.generate(prompts_of(2), params, spec="off", stream=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.policy.mode == "on"
    assert_books(engine)
    handle = engine.submit([3, 4], SamplingParams(max_tokens=50, ignore_eos=True))
    with pytest.raises(RequestError, match="other requests are in flight"):
        engine.generate(prompts_of(1), params, spec="off")
    handle.abort()
    handle.result(PATIENCE)


def test_one_call_at_a_time_has_a_mode_of_its_own():
    engine = engine_of()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    stream = engine.generate([[1, 2]], params, spec="off", stream=True)
    next(stream)
    with pytest.raises(RequestError, match="other requests are in flight"):
        engine.generate([[3, 4]], params, spec="threshold")
    rest = list(stream)
    assert rest[-1].completion is not None
    assert rest[-1].completion.stats.verify_steps == 0
    assert engine.policy.mode == "on"
    assert engine.generate([[1, 2]], params, spec="off")[0].stats.verify_steps == 0
    assert engine.generate([[1, 2]], params)[0].stats.verify_steps > 0


# --- overlap ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_one_read_a_step_and_the_next_is_dispatched_before_it(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_of(dataclasses.replace(BASE, spec="off", overlap=overlap))
    events: list[str] = []
    dispatch, read = loop.Loop._fly, loop.Loop._read

    def flown(self: loop.Loop, packed: Any, rows: Any, plan: Any, size: int) -> None:
        events.append("dispatch")
        dispatch(self, packed, rows, plan, size)

    def seen(self: loop.Loop, flight: loop.Flight) -> None:
        events.append("read")
        read(self, flight)

    reads: list[Any] = []
    monkeypatch.setattr(loop.Loop, "_fly", flown)
    monkeypatch.setattr(loop.Loop, "_read", seen)
    monkeypatch.setattr(loop, "unpack", lambda array: (reads.append(array), unpack(array))[1])
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert_books(engine)
    assert events.count("dispatch") == events.count("read") == len(reads) == 20
    counts = engine.stats().counts
    if overlap:
        assert events[:4] == ["dispatch", "dispatch", "dispatch", "read"]  # the prompt's is first
        assert counts.overlapped == 19
    else:
        assert events[4:] == ["dispatch", "read"] * 18
        assert counts.overlapped <= 1
    assert sum(counts.steps.values()) == 19


def test_a_report_survives_the_journey():
    rng = np.random.default_rng(0)
    arrays = (
        rng.integers(0, 60000, (5, 4)),
        rng.integers(0, 5, 5),
        rng.integers(0, 4, 5),
        rng.random(5) < 0.5,
        rng.random(5) < 0.5,
    )
    report = StepOutput(*map(jnp.asarray, arrays))
    back = unpack(np.asarray(pack(report)))
    for field in dataclasses.fields(StepOutput):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(report, field.name))


def test_a_long_prompt_is_prefilled_between_steps():
    engine = engine_of(dataclasses.replace(BASE, prefill_budget=4, spec="off"))
    order: list[str] = []
    prefill, step = loop.Loop._prefill_chunk, loop.Loop._step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop.Loop,
            "_prefill_chunk",
            lambda self, request, size: (order.append("p"), prefill(self, request, size))[1],
        )
        patch.setattr(loop.Loop, "_step", lambda self: (order.append("s"), step(self))[1])
        first = engine.submit([1, 2], SamplingParams(max_tokens=60, ignore_eos=True))
        next(iter(first))
        second = engine.submit(list(range(1, 41)), SamplingParams(max_tokens=2))
        second.result(PATIENCE)
        first.result(PATIENCE)
    text = "".join(order)
    assert text.count("p") == 1 + 10
    assert "ppp" not in text  # at most one chunk a turn while the first decodes


# --- what goes wrong ----------------------------------------------------------------------------


def test_a_step_that_fails_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch):
    engine = engine_of()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    submitted = threading.Event()

    def broken(self: loop.Loop) -> None:
        submitted.wait(PATIENCE)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(loop.Loop, "_step", broken)
    handles = [engine.submit(prompt, params) for prompt in prompts_of(6)]
    submitted.set()
    for handle in handles:
        with pytest.raises(EngineError, match="the device is gone"):
            handle.result(PATIENCE)
    with pytest.raises(EngineError, match="the device is gone"):
        engine.submit([1], params)


def test_a_closed_engine_takes_nothing_and_ends_what_runs():
    with engine_of() as engine:
        handle = engine.submit([1, 2], SamplingParams(max_tokens=60, ignore_eos=True))
    assert handle.result(PATIENCE).finish_reason in ("abort", "length")
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1])
    engine.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": 3}, "pages = 3: expected at least"),
        ({"spec_disable_batch_threshold": -1}, "spec_disable_batch_threshold = -1"),
        ({"prefill_budget": 0}, "prefill_budget = 0"),
        ({"plans": (PLAIN,)}, "plans"),
        ({"spec": "sometimes"}, "spec = 'sometimes'"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **change)


@pytest.mark.parametrize("mode", ["on", "threshold", "auto"])
def test_speculation_without_a_drafter_is_refused_at_start(mode: str):
    tiny = kit.tiny().without_drafter()
    config = dataclasses.replace(BASE, spec=mode)
    with pytest.raises(ConfigError, match="expected a drafter"):
        Engine.create(Models(tiny.models.target), tiny.params, config, kit.tokenizer(), None)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    with pytest.raises(RequestError, match=r"60 prompt tokens and max_tokens = 5 make 65.* 64"):
        engine_of().submit([1] * 60, SamplingParams(max_tokens=5))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"priority": True}, "priority = True: expected an integer"),
        ({"timeout": True}, "timeout = True: expected seconds"),
        ({"timeout": -1.0}, "timeout = -1.0"),
        ({"timeout": float("nan")}, "timeout = nan"),
        ({"timeout": float("inf")}, "timeout = inf"),
        ({"prompt": [True, 2]}, r"token_ids\[0\] = True"),
    ],
)
def test_a_bad_request_is_refused_where_it_is_made(bad: dict[str, Any], message: str):
    engine, params = engine_of(), SamplingParams(max_tokens=4, ignore_eos=True)
    with pytest.raises(RequestError, match=message):
        engine.submit(**{"prompt": [1], "params": params} | bad)
    assert len(engine.submit([1], params).result(PATIENCE).token_ids) == 4


@pytest.mark.parametrize("stop", [None, 3, ("",), (1,), {"a": 1}])
def test_stop_strings_are_strings(stop: Any):
    with pytest.raises(ConfigError, match="stop = "):
        SamplingParams(stop=stop)


LEAVING = """
import eaglejax
engine = eaglejax.load(max_slots=1, max_length=256)
handle = engine.submit("Once", eaglejax.SamplingParams(max_tokens=200, ignore_eos=True))
next(iter(handle))
print("leaving")
"""


def test_a_process_may_end_in_the_middle_of_a_request():
    run = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (run.returncode, run.stdout) == (0, "leaving\n"), run.stderr
