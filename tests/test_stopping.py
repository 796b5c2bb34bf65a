"""Protects where a request ends: at its first confirmed stop token or budget, never a token later.

Scenarios B02, B04 and B09: a stop in the middle of an accepted block, a budget met in the same
step, a drafter that proposes the end-of-text token all the time.
"""

from __future__ import annotations

import numpy as np
import pytest

from eaglejax.config import MAX_STOP_IDS, SamplingParams, SpecPlan
from eaglejax.state import admission
from tests import kit
from tests.kit import Run, Runner

CHAIN = SpecPlan.parse("5,1")
TREE = SpecPlan.parse("3,2,7")
# The target counts upwards: after [15] it says 0 (from prefill), 1, 2, 3, ...
PROMPT = [15]
TEXT = [15, *range(16)] * 6
NOSPEC = Runner(kit.counting(), max_slots=8)
ORACLE = NOSPEC.but(
    plan=CHAIN, draft=kit.scripted, script=kit.script([TEXT] * 3, vocab=16, max_slots=8)
)
STOP = 3


def same_end(run: Run, nospec: Run) -> None:
    """Tokens, reason, committed lengths, budget left and root are those of plain decoding."""
    assert run.tokens == nospec.tokens
    assert run.finish == nospec.finish
    for field in ("lengths", "remaining", "root", "active"):
        a, b = (np.asarray(getattr(r.state.slots, field))[r.slots] for r in (run, nospec))
        np.testing.assert_array_equal(a, b, err_msg=field)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_b02_stop_in_the_middle_of_an_accepted_block(plan: SpecPlan):
    params = SamplingParams(max_tokens=12)
    run = ORACLE.but(plan=plan).generate([PROMPT], params, eos_ids=[STOP])
    assert run.tokens == [[0, 1, 2, 3]]
    assert run.finish == ["stop"]
    # All drafts were right; of the block, the three drafted tokens up to the stop count.
    assert [(s.count, s.accepted) for s in run.steps[0]] == [(3, 3)]
    # The stop token is the root: its keys and values were never committed.
    assert run.lengths() == [len(PROMPT) + 3]
    same_end(run, NOSPEC.generate([PROMPT], params, eos_ids=[STOP]))


def test_b02_ignore_eos_keeps_all_tokens_up_to_the_budget():
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    run = ORACLE.generate([PROMPT], params, eos_ids=[STOP])
    assert run.tokens == [[*range(12)]]
    assert run.finish == ["length"]
    assert [s.count for s in run.steps[0]] == [6, 5]
    same_end(run, NOSPEC.generate([PROMPT], params, eos_ids=[STOP]))


def test_b02_stop_token_ids_of_the_request_beside_the_models_own():
    own = SamplingParams(max_tokens=12, stop_token_ids=(9, 5))
    ignoring = SamplingParams(max_tokens=12, stop_token_ids=(9, 5), ignore_eos=True)
    run = ORACLE.generate([PROMPT] * 2, [own, ignoring], eos_ids=[STOP])
    assert run.tokens == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert run.finish == ["stop", "stop"]
    same_end(run, NOSPEC.generate([PROMPT] * 2, [own, ignoring], eos_ids=[STOP]))


@pytest.mark.parametrize(
    ("budget", "tokens", "finish"),
    [
        (5, [0, 1, 2], "stop"),
        (2, [0, 1], "length"),
        (3, [0, 1, 2], "stop"),  # a tie: the stop token is there, so it is a stop
        (1, [0], "length"),
    ],
)
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=str)
def test_b04_stop_and_budget_in_one_step(
    budget: int, tokens: list[int], finish: str, plan: SpecPlan
):
    params = SamplingParams(max_tokens=budget)
    run = ORACLE.but(plan=plan).generate([PROMPT], params, eos_ids=[2])
    assert (run.tokens, run.finish) == ([tokens], [finish])
    same_end(run, NOSPEC.generate([PROMPT], params, eos_ids=[2]))


@pytest.mark.parametrize(("budget", "finish"), [(6, "stop"), (3, "length"), (4, "stop")])
def test_b04_all_of_it_within_one_speculative_step(budget: int, finish: str):
    # One token more than above: the one that prefill gives.
    params = SamplingParams(max_tokens=budget)
    run = ORACLE.generate([PROMPT], params, eos_ids=[STOP])
    assert run.tokens == [[0, 1, 2, 3][:budget]]
    assert run.finish == [finish]
    assert len(run.steps[0]) == 1
    same_end(run, NOSPEC.generate([PROMPT], params, eos_ids=[STOP]))


def test_b04_stop_token_straight_from_prefill():
    run = ORACLE.generate([PROMPT], SamplingParams(max_tokens=5), eos_ids=[0])
    assert (run.tokens, run.finish, run.steps) == ([[0]], ["stop"], [[]])


def test_b09_drafter_proposes_the_end_in_every_step():
    # EOS is 14 and the texts end before it: only the drafter ever says it.
    eos = NOSPEC.but(
        plan=CHAIN, draft=kit.scripted, script=kit.script([[14] * 96] * 3, vocab=16, max_slots=8)
    )
    params = SamplingParams(max_tokens=12)
    for batch in (1, 3):
        run = eos.generate([PROMPT] * batch, params, eos_ids=[14])
        assert run.finish == ["length"] * batch
        assert [step.accepted for steps in run.steps for step in steps] == [0] * 11 * batch
        same_end(run, NOSPEC.generate([PROMPT] * batch, params, eos_ids=[14]))


def test_b09_the_same_end_confirmed_by_the_target_counts():
    eos = NOSPEC.but(
        plan=CHAIN, draft=kit.scripted, script=kit.script([[14] * 96] * 3, vocab=16, max_slots=8)
    )
    prompts = [[15], [12], [10]]  # two of the three come to 14 within the budget
    params = SamplingParams(max_tokens=8)
    run = eos.generate(prompts, params, eos_ids=[14])
    assert run.tokens == [[*range(8)], [13, 14], [11, 12, 13, 14]]
    assert run.finish == ["length", "stop", "stop"]
    same_end(run, NOSPEC.generate(prompts, params, eos_ids=[14]))


def test_requests_of_one_batch_end_on_their_own():
    params = [SamplingParams(max_tokens=n) for n in (1, 9, 4)]
    prompts = [[15], [15, 4, 15], [7, 15]]
    texts = [prompt + TEXT[1:] for prompt in prompts]
    oracle = ORACLE.but(script=kit.script(texts, vocab=16, max_slots=8))
    run = oracle.generate(prompts, params, eos_ids=[6])
    assert run.tokens == [[0], [*range(7)], [0, 1, 2, 3]]
    assert run.finish == ["length", "stop", "length"]
    same_end(run, NOSPEC.generate(prompts, params, eos_ids=[6]))


def test_stop_ids_of_admission():
    params = SamplingParams(stop_token_ids=(5, 2, 5))
    stops = admission([params, SamplingParams(ignore_eos=True)], [0, 0], [2, 7])["stop_ids"]
    assert stops.shape == (2, MAX_STOP_IDS)
    assert stops[0, :4].tolist() == [5, 2, 7, -1]
    assert (stops[1] == -1).all()


def test_more_stop_ids_than_a_slot_holds_are_refused():
    params = SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS)))
    admission([params], [0], [3])  # the model's own is among them
    with pytest.raises(ValueError, match=r"stop_token_ids: 17 ids.*at most 16"):
        admission([params], [0], [99])
