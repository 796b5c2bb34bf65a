"""Protects the promise: speculation changes neither greedy nor sampled text, whatever is drafted.

Scenarios B01 and B13, in float32, token for token.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from eaglejax.config import PLAIN, SamplingParams, SpecPlan
from eaglejax.draft import eagle3
from eaglejax.verify import lossless_greedy
from tests import kit
from tests.kit import Run, Runner

TOKENS = 64
PROMPTS = kit.random_prompts(20)
BOTH = PROMPTS + PROMPTS  # the first 20 greedy, the others sampled: one batch, one program
PLANS = [SpecPlan.parse(text) for text in ("1,1", "4,1", "4,4,16")]
TREE = PLANS[-1]


def sampling(i: int, **changes: object) -> SamplingParams:
    """Of prompt i in BOTH: greedy, temperature alone, then with the filters."""
    fields: dict[str, object] = {"max_tokens": TOKENS}
    if i >= len(PROMPTS):
        fields["temperature"] = 0.8
    if i >= len(PROMPTS) + 10:
        fields |= [{"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.05}][i % 3]
    if i >= len(PROMPTS) + 16:
        fields |= {"top_k": 30, "top_p": 0.95, "min_p": 0.02}
    return SamplingParams(**(fields | changes))


SAMPLING = [sampling(i) for i in range(len(BOTH))]
SEEDS = list(range(100, 100 + len(BOTH)))
SOME = [0, 7, 20, 29, 31, 35, 39]  # greedy, sampled, and each filter


@functools.cache
def nospec() -> Run:
    return Runner(kit.tiny()).generate(BOTH, SAMPLING, seeds=SEEDS)


@functools.cache
def with_real_drafter(plan: SpecPlan) -> Run:
    return Runner(kit.tiny(), plan).generate(BOTH, SAMPLING, seeds=SEEDS)


def texts() -> list[list[int]]:
    return [p + t for p, t in zip(BOTH, nospec().tokens, strict=True)]


def scripted(plan: SpecPlan, **script: int) -> Runner:
    return Runner(kit.tiny(), plan, kit.scripted, kit.script(texts(), **script))


def some(runner: Runner, slots: list[int] | None = None, **changes: object) -> list[list[int]]:
    """Completions of SOME, in other slots and company than in the whole batch."""
    return runner.generate(
        [BOTH[i] for i in SOME],
        [sampling(i, **changes) for i in SOME],
        seeds=[SEEDS[i] for i in SOME],
        slots=slots,
    ).tokens


def test_b01_reference_text_is_worth_comparing():
    tokens = nospec().tokens
    assert all(len(t) == TOKENS for t in tokens)
    assert min(len(set(t)) for t in tokens) > 10, "the target repeats itself"
    assert all(a != b for a, b in zip(tokens[:20], tokens[20:], strict=True))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_b01_real_drafter_same_text(plan: SpecPlan):
    run = with_real_drafter(plan)
    assert run.tokens == nospec().tokens
    assert run.lengths() == nospec().lengths()
    accepted = [step.accepted for steps in run.steps for step in steps]
    assert 0 < np.mean(accepted) < 0.9, "a drafter that is right now and then"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_b01_oracle_is_always_accepted(plan: SpecPlan):
    run = scripted(plan).generate(BOTH, SAMPLING, seeds=SEEDS)
    assert run.tokens == nospec().tokens
    whole, rest = divmod(TOKENS - 1, plan.depth + 1)  # the first token comes from prefill
    expected = [(plan.depth + 1, plan.depth)] * whole + [(rest, rest)] * (rest > 0)
    for steps in run.steps:
        assert [(s.count, s.accepted) for s in steps] == expected


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_b01_wrong_is_never_accepted(plan: SpecPlan):
    run = scripted(plan, shift=kit.WRONG).generate(BOTH, SAMPLING, seeds=SEEDS)
    assert run.tokens == nospec().tokens
    for steps in run.steps:
        assert [(s.count, s.accepted) for s in steps] == [(1, 0)] * (TOKENS - 1)


@pytest.mark.parametrize("plan", [PLAIN, TREE], ids=str)
def test_b01_same_text_alone_in_another_slot_and_chunk(plan: SpecPlan):
    alone = Runner(kit.tiny(), plan, bucket=1, chunk=32)
    for i, slot in ((3, 17), (36, 0)):
        run = alone.generate([BOTH[i]], [SAMPLING[i]], seeds=[SEEDS[i]], slots=[slot])
        assert run.tokens == [nospec().tokens[i]]


@pytest.mark.parametrize("plan", [PLAIN, TREE], ids=str)
def test_b01_same_text_in_other_company(plan: SpecPlan):
    tokens = some(Runner(kit.tiny(), plan), slots=[39, 0, 20, 5, 11, 38, 2], max_tokens=24)
    assert tokens == [nospec().tokens[i][:24] for i in SOME]


def test_b01_same_text_for_other_prefill_chunks():
    tokens = some(Runner(kit.tiny(), TREE, chunk=5), max_tokens=12)
    assert tokens == [nospec().tokens[i][:12] for i in SOME]


def test_b01_greedy_program_same_text():
    runner = Runner(kit.tiny(), PLANS[1], accept=lossless_greedy)
    assert runner.generate(PROMPTS, SAMPLING[:20]).tokens == nospec().tokens[:20]


def test_b01_other_seed_other_text():
    sampled = range(20, 40)
    run = Runner(kit.tiny()).generate(
        [BOTH[i] for i in sampled], [SAMPLING[i] for i in sampled], seeds=[8] * 20
    )
    assert all(a != b for a, b in zip(run.tokens, nospec().tokens[20:], strict=True))


def on_off_on(number: int) -> SpecPlan:
    """Spec, then 20 plain steps (more than the ring holds), then other plans by turns."""
    if number < 4:
        return TREE
    if number < 24:
        return PLAIN
    return [TREE, PLAIN, PLANS[1], TREE][number % 4]


@functools.cache
def switched() -> Run:
    return Runner(kit.tiny(), on_off_on).generate(BOTH, SAMPLING, seeds=SEEDS)


def test_b13_switching_in_mid_request_same_text():
    run = switched()
    assert run.tokens == nospec().tokens
    modes = [step.plan for step in run.steps[0]]
    assert modes.count(PLAIN) > 20
    assert {TREE, PLANS[1]} < set(modes)


def test_b13_drafter_cache_as_if_never_off():
    off, on = switched(), with_real_drafter(TREE)
    for slot in range(len(BOTH)):
        absorbed = [int(run.state.slots.absorbed[slot]) for run in (off, on)]
        assert min(absorbed) > len(BOTH[slot]) + TOKENS - 20
        a, b = (kit.cached(run.state.draft, run.state, slot, min(absorbed)) for run in (off, on))
        kit.assert_close(a, b)


def test_b13_acceptance_as_if_never_off():
    compared = accepted = 0
    for off, on in zip(switched().steps, with_real_drafter(TREE).steps, strict=True):
        # A tree depends on the committed text alone, so it is the same from the same root.
        never_off = {step.position: step for step in on}
        for step in off:
            if step.plan == TREE and step.position in never_off:
                other = never_off[step.position]
                compared, accepted = compared + 1, accepted + step.accepted
                # The budget may end the one run's step, never the other's: both end together.
                assert step == other
    assert compared > 200
    assert accepted > 20


def test_b13_oracle_with_a_real_drafter_beside_it_keeps_its_cache_valid():
    # Everything is accepted: absorbed rows come from the target's features all the same.
    run = scripted(PLANS[1]).generate(BOTH, SAMPLING, seeds=SEEDS)
    for slot in (0, 25):
        absorbed = int(run.state.slots.absorbed[slot])
        other = with_real_drafter(TREE)
        count = min(absorbed, int(other.state.slots.absorbed[slot]))
        a = kit.cached(run.state.draft, run.state, slot, count)
        b = kit.cached(other.state.draft, other.state, slot, count)
        kit.assert_close(a, b)


def test_steps_are_pure():
    runner = Runner(kit.tiny(), PLANS[1], eagle3)
    state = runner.kit.state()
    state = runner.admit(state, [0, 1], [SAMPLING[0], SAMPLING[30]], [1, 2])
    state, _, _ = runner.prefill(state, [0, 1], PROMPTS[:2])
    once = runner.step(kit.copied(state), [0, 1], PLANS[1])
    again = runner.step(kit.copied(state), [0, 1], PLANS[1])
    jax.tree.map(np.testing.assert_array_equal, once, again)
