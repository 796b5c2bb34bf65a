"""Protects `eaglejax bench decode`: who is measured, in what order, and the promised JSON."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from click.testing import CliRunner, Result

from benchmarks import bandwidth, parts, rows
from benchmarks import decode as ours
from benchmarks.rows import Contender, PeerError, Run, Timing
from eaglejax.cli import commands
from eaglejax.commands import bench
from eaglejax.config import EngineConfig, SamplingParams, SpecPlan
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Completion, Stats
from eaglejax.steps import Params

PROMISED = [
    "engine",
    "mode",
    "plan",
    "batch",
    "tokens_per_second",
    "acceptance_length",
    "ratio_to_llamacpp",
]


def scripted(engine: str, mode: Any, plan: str | None, batch: int, values: list[Any]) -> Contender:
    """Gives its values one a run; an exception among them is raised."""
    left = list(values)

    def run() -> Run:
        value = left.pop(0)
        if isinstance(value, Exception):
            raise value
        return Run(value, None if plan is None else 1.5)

    return Contender(engine, mode, plan, batch, run)


def test_ratios_are_medians_of_ratios_within_a_repeat() -> None:
    measured, missing = rows.measure(
        [
            scripted("eaglejax", "plain", None, 1, [100.0, 10.0, 50.0]),
            scripted("eaglejax", "speculative", "3,1,4", 1, [200.0, 30.0, 200.0]),
            scripted("llama.cpp", "plain", None, 1, [50.0, 10.0, 100.0]),
            scripted("eaglejax", "plain", None, 16, [400.0, 400.0, 400.0]),
            scripted("eaglejax", "prefill", None, 1, [900.0, 900.0, 900.0]),
            scripted("llama.cpp", "prefill", None, 1, [300.0, 300.0, 300.0]),
        ],
        3,
    )
    assert not missing
    assert [row.tokens_per_second for row in measured] == [50.0, 200.0, 50.0, 400.0, 900.0, 300.0]
    assert measured[0].interval == (10.0, 100.0)
    # 2, 3, 4 times plain; 4, 3, 2 times llama.cpp: not the ratios of medians, 4 and 4.
    assert (measured[1].ratio_to_plain, measured[1].ratio_to_llamacpp) == (3.0, 3.0)
    assert (measured[2].ratio_to_plain, measured[2].ratio_to_llamacpp) == (1.0, 1.0)
    # Only the same number of requests compares, and prompts only with prompts.
    assert (measured[3].ratio_to_plain, measured[3].ratio_to_llamacpp) == (1.0, None)
    assert (measured[4].ratio_to_plain, measured[4].ratio_to_llamacpp) == (1.0, 3.0)
    assert [row.acceptance_length for row in measured] == [None, 1.5, None, None, None, None]


def test_contenders_run_in_turn_and_one_that_breaks_is_named() -> None:
    told: list[str] = []
    measured, missing = rows.measure(
        [
            scripted("eaglejax", "plain", None, 1, [1.0, 2.0]),
            scripted("llama.cpp", "plain", None, 1, [4.0, PeerError("it fell over")]),
            scripted("openvino", "plain", None, 1, [PeerError("no such operation")]),
        ],
        2,
        told.append,
    )
    assert [row.engine for row in measured] == ["eaglejax"]
    assert measured[0].ratio_to_llamacpp is None
    assert [(one.engine, one.reason) for one in missing] == [
        ("llama.cpp", "it fell over"),
        ("openvino", "no such operation"),
    ]
    assert told == [
        "repeat 1, eaglejax plain batch 1: 1.0 tokens/s",
        "repeat 1, llama.cpp plain batch 1: 4.0 tokens/s",
        "openvino plain batch 1: unavailable: no such operation",
        "repeat 2, eaglejax plain batch 1: 2.0 tokens/s",
        "llama.cpp plain batch 1: unavailable: it fell over",
    ]


def test_speed_and_acceptance_are_over_all_requests() -> None:
    timings = [Timing(11, 0.5, 2.0, 5), Timing(31, 0.5, 3.0, 25), Timing(1, 0.5, 0.0, 0)]
    assert rows.speed(timings, 1) == 40 / 5
    assert rows.speed(timings, 2) == 40 / 2.5
    assert rows.speed(timings, 16) == 40 / (5 / 3)  # never more in flight than there are
    assert rows.acceptance_length(timings) == 40 / 30
    assert rows.acceptance_length([Timing(11, 0.5, 2.0)]) is None


def test_reading_memory_gives_a_speed() -> None:
    assert bandwidth.usable_cores() >= 1
    assert 1e8 < bandwidth.read_bandwidth(2, size=1 << 22, repeats=2) < 1e13


# --- our own engine


class FakeEngine:
    """Remembers what it was asked; completions have 5 tokens, in 2 steps when speculating."""

    models = SimpleNamespace(target="target", drafter="drafter")
    params = SimpleNamespace(target="weights", drafter="more")
    tokenizer = template = None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.asked: list[tuple[int, int, str | None]] = []

    def generate(self, prompts: Any, params: SamplingParams, spec: str | None = None) -> list[Any]:
        self.asked.append((len(prompts), params.max_tokens, spec))
        steps = 2 if spec == "on" else 0
        stats = Stats(len(prompts[0]), 5, steps, None, (), 0.25, 0.5)
        return [Completion("", (), "length", stats)] * len(prompts)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    made: list[FakeEngine] = []

    def create(models: Any, params: Any, config: EngineConfig, *rest: Any) -> FakeEngine:
        made.append(FakeEngine(config))
        made[-1].models, made[-1].params = models, params
        return made[-1]

    monkeypatch.setattr(Engine, "create", create)
    monkeypatch.setattr(ours, "Models", lambda target: ("target only", target))
    monkeypatch.setattr(ours, "Params", lambda target: ("target only", target))
    return made


def test_plain_decoding_runs_without_the_drafter(engines: list[FakeEngine]) -> None:
    base: Any = FakeEngine(EngineConfig(max_slots=1))
    plans = [SpecPlan(3, 1, 4), SpecPlan(4, 4, 16)]
    params = SamplingParams(max_tokens=5)
    contenders = ours.decoding(base, plans, [[1], [2], [3], [4]], params, 2)
    assert [(c.mode, c.plan, c.batch) for c in contenders] == [
        ("plain", None, 2),
        ("speculative", "3,1,4", 2),
        ("speculative", "4,4,16", 2),
    ]
    assert [engine.config.spec for engine in engines] == ["off", "on", "on"]
    assert {engine.config.max_slots for engine in engines} == {2}
    assert engines[0].models == ("target only", "target")
    assert contenders[0].run() == Run(4 * 4 / (4 * 0.5 / 2), None)
    assert contenders[1].run() == Run(16.0, 2.0)
    # Warm with as many as in flight, before anything is timed.
    assert [engine.asked for engine in engines] == [
        [(2, 2, None), (4, 5, "off")],
        [(2, 2, None), (4, 5, "on")],
        [(2, 2, None)],
    ]


def test_prefill_counts_prompt_tokens(engines: list[FakeEngine]) -> None:
    base: Any = FakeEngine(EngineConfig(max_slots=4, max_length=100))
    contender = ours.prefill(base, list(range(512)))
    assert (contender.mode, contender.batch) == ("prefill", 1)
    assert contender.run().tokens_per_second == 512 / 0.25
    assert engines[0].config.max_length >= 513
    assert engines[0].config.max_slots == 1


# --- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def contenders(
        options: dict[str, Any], stack: contextlib.ExitStack
    ) -> tuple[list[Contender], int]:
        stack.callback(lambda: print("stopped"))
        runs = options["repeats"]
        made = [
            scripted("eaglejax", "plain", None, batch, [10.0] * runs)
            for batch in options["batches"]
        ]
        made.append(scripted("eaglejax", "speculative", "3,1,4", 1, [15.0] * runs))
        for peer in options["peers"]:
            value = PeerError("broken") if peer == "openvino" else 12.0
            made.append(scripted(peer, "plain", None, 1, [value] * runs))
        return made, 7

    monkeypatch.setattr(bench, "_contenders", contenders)
    monkeypatch.setattr("benchmarks.bandwidth.read_bandwidth", lambda: 2e10)
    monkeypatch.setattr("benchmarks.peers.setup.missing", lambda peer, folder: None)
    monkeypatch.setattr("benchmarks.peers.setup.has_programs", lambda folder: True)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(commands, ["bench", "decode", *arguments])

    return invoke


def test_the_json_line_is_the_contract(run: Callable[..., Result]) -> None:
    result = run("--peers", "llama.cpp,openvino", "--repeats", "3", "--json")
    assert result.exit_code == 0, result.output
    *before, last = result.stdout.splitlines()
    assert before == ["stopped"]  # what was started was stopped; the table is on stderr
    printed = json.loads(last)
    for row in printed["rows"]:
        assert all(key in row for key in PROMISED)
    speculative = printed["rows"][2]
    assert {key: speculative[key] for key in PROMISED} == {
        "engine": "eaglejax",
        "mode": "speculative",
        "plan": "3,1,4",
        "batch": 1,
        "tokens_per_second": 15.0,
        "acceptance_length": 1.5,
        "ratio_to_llamacpp": 1.25,
    }
    # With other engines, a request alone and sixteen.
    assert [(r["engine"], r["batch"]) for r in printed["rows"][:2]] == [
        ("eaglejax", 1),
        ("eaglejax", 16),
    ]
    assert printed["machine"]["read_gb_per_second"] == 20.0
    assert printed["unavailable"][0]["reason"] == "broken"
    assert "openvino plain, batch 1: unavailable: broken" in result.stderr
    assert "20.0 GB/s" in result.stderr


def test_without_peers_one_request_and_a_table(run: Callable[..., Result]) -> None:
    result = run("--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "1.50x" in result.stdout
    assert " 16 " not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--peers vllm", "vllm: expected some of llama.cpp, openvino"),
        ("--batch 0", "expected different numbers of 1 or more"),
        ("--batch 4,4", "expected different numbers of 1 or more"),
        ("--batch many", "expected numbers, like 1,16"),
        ("--plans 3,1,5", "depth + 1 = 4 for a chain"),
        ("--repeats 0", "--repeats 0: expected 1 or more"),
        ("--spec off", "No such option"),
    ],
)
def test_bad_options_are_refused(run: Callable[..., Result], arguments: str, message: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_an_engine_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("EAGLEJAX_PEERS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("benchmarks.peers.setup.importlib.util.find_spec", lambda name: None)
    arguments = ["bench", "decode", "--peers", "llama.cpp,openvino"]
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 1
    assert "llama.cpp: its programs are not built: `make peers`" in result.stderr
    assert "pip install 'eaglejax[peers]'" in result.stderr


def test_sigterm_ends_it_like_ctrl_c() -> None:
    def wait() -> Iterator[str]:
        with bench._exit_on_sigterm():
            signal.raise_signal(signal.SIGTERM)
            yield "not reached"

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        next(wait())
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_cost_of_a_plan_is_in_plain_steps() -> None:
    rows = [parts.Part("plain", parts.STEP, 4.0), parts.Part("3,1,4", "draft and absorb", 1.0)]
    assert parts.cost(rows[:1]) is None
    found = parts.cost([*rows, parts.Part("3,1,4", parts.STEP, 6.0)])
    assert found == parts.Cost(
        "3,1,4", 1.5, {"2.1": 350.0, "3.0": 500.0}, {"2.1": pytest.approx(1.4), "3.0": 2.0}
    )
    assert parts.Part("plain", "head", 2.0, 30.0).gb_per_second == 15.0


def test_parts_are_those_of_the_kernels() -> None:
    from tests.test_cpu_engine import packed_kit

    params = packed_kit().params
    engine = SimpleNamespace(params=params, config=EngineConfig(max_length=64))
    with pytest.raises(ValueError, match="context = 60: does not fit max_length = 64"):
        parts.measure(engine, context=60, repeats=1)  # type: ignore[arg-type]
    floats = {"params": {"embed": {"embedding": jnp.ones((4, 4))}}}
    engine.params = Params(floats)
    with pytest.raises(ValueError, match="those of the CPU kernels"):
        parts.measure(engine, context=8, repeats=1)  # type: ignore[arg-type]
