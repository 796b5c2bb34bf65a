"""Protects which plan runs: thresholds with hysteresis, and "auto" never far from the better."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eaglejax.config import PLAIN, SpecPlan
from eaglejax.policy import DWELL, GAIN, PROBE, Acceptance, Policy, StepTimes

CHAIN, SHORT = SpecPlan(3, 1, 4), SpecPlan(1, 1, 2)


def test_off_and_on_are_what_they_say():
    for decoding in (1, 7, 300):
        assert Policy("off", CHAIN).choose(decoding, decoding, 100).plan == PLAIN
        assert Policy("on", CHAIN).choose(decoding, decoding, 100).plan == CHAIN


def steps(policy: Policy, decoding: int, count: int) -> list[SpecPlan]:
    return [policy.choose(decoding, decoding, 100).plan for _ in range(count)]


def test_b19_a_threshold_counts_decoding_requests_and_0_never_disables():
    assert set(steps(Policy("threshold", CHAIN, threshold=0), 500, 3)) == {CHAIN}
    policy = Policy("threshold", CHAIN, threshold=16)
    assert set(steps(policy, 16, 20)) == {CHAIN}
    assert set(steps(policy, 17, 20)) == {PLAIN}


def test_b19_back_only_well_below_the_threshold():
    policy = Policy("threshold", CHAIN, threshold=16)
    steps(policy, 17, 20)
    assert set(steps(policy, 15, 20)) == {PLAIN}  # 16 - 16 // 8 = 14
    assert set(steps(policy, 14, 20)) == {CHAIN}
    assert policy.switches == 2


def test_a_batch_that_swings_around_the_threshold_switches_seldom():
    policy = Policy("threshold", CHAIN, threshold=4)
    plans = [policy.choose(decoding, decoding, 100).plan for decoding in (3, 5) * 200]
    switches = sum(a != b for a, b in itertools.pairwise(plans))
    assert policy.switches == switches
    assert switches <= 400 / DWELL
    runs = np.diff(np.flatnonzero([a != b for a, b in itertools.pairwise(plans)]))
    assert min(runs) >= DWELL


def test_a_threshold_of_one_speculates_for_one():
    policy = Policy("threshold", CHAIN, threshold=1)
    assert set(steps(policy, 1, 9)) == {CHAIN}
    assert set(steps(policy, 2, 9)) == {PLAIN}
    assert set(steps(policy, 1, 9)) == {CHAIN}


def simulate(
    seconds: dict[SpecPlan, float], rate: float, count: int = 4000
) -> tuple[float, Policy]:
    """Tokens a second of "auto" where every draft is right with a probability, times are noisy."""
    rng = np.random.default_rng(0)
    policy = Policy("auto", CHAIN, tuple(plan for plan in seconds if not plan.is_plain))
    tokens = elapsed = 0.0
    for _ in range(4000):
        plan = policy.choose(4, 4, 100).plan
        took = seconds[plan] * rng.lognormal(0, 0.1)
        policy.observe_time(plan, 4, 100, took)
        accepted = [int(np.argmin([*(rng.random(plan.depth) < rate), False])) for _ in range(4)]
        if not plan.is_plain:
            policy.observe_acceptance(plan, accepted)
        tokens += sum(accepted) + 4
        elapsed += took
    return tokens / elapsed, policy


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("cost", [1.05, 1.35, 2.0, 4.0])
def test_auto_is_within_three_percent_of_the_better(rate: float, cost: float):
    seconds = {PLAIN: 1.0, CHAIN: cost, SHORT: 1 + (cost - 1) / 3}
    got, policy = simulate(seconds, rate)
    value = {
        plan: 4 * sum(rate**i for i in range(plan.depth + 1)) / s for plan, s in seconds.items()
    }
    # The mean of a lognormal time is 0.5% above its median.
    assert got >= 0.97 * max(value.values()) / 1.005
    assert policy.switches < 40


def test_auto_notices_when_the_text_becomes_easy():
    policy = Policy("auto", CHAIN, (CHAIN,))
    for plan, seconds in ((PLAIN, 1.0), (CHAIN, 1.5)):
        policy.observe_time(plan, 1, 100, seconds)
    for _ in range(300):
        policy.observe_acceptance(CHAIN, [0])
    assert set(steps(policy, 1, PROBE)) == {PLAIN}
    took = 0
    while policy.choose(1, 1, 100).plan.is_plain or policy.reason.startswith("probe"):
        if policy.reason.startswith("probe"):
            policy.observe_acceptance(CHAIN, [3])
        took += 1
        assert took < 200 * PROBE
    assert policy.reason.startswith("3,1,4")


def test_an_unmeasured_plan_is_measured_once():
    policy = Policy("auto", CHAIN, (CHAIN,))
    first = policy.choose(2, 2, 100)
    assert (first.plan, first.reason.split(":")[0]) == (PLAIN, "probe")
    policy.observe_time(PLAIN, 2, 100, 1.0)
    assert policy.choose(2, 2, 100).plan == CHAIN
    policy.observe_time(CHAIN, 2, 100, 1.2)
    assert not policy.choose(2, 2, 100).reason.startswith("probe")


def test_a_small_gain_is_not_worth_a_switch():
    policy = Policy("auto", CHAIN, (CHAIN,))
    for _ in range(3000):
        policy.observe_acceptance(CHAIN, [1])
    policy.observe_time(PLAIN, 1, 100, 1.0)
    policy.observe_time(CHAIN, 1, 100, 2.0 / (GAIN - 0.01))
    assert set(steps(policy, 1, PROBE - 1)) == {PLAIN}
    policy.times.seconds.clear()
    policy.observe_time(PLAIN, 1, 100, 1.0)
    policy.observe_time(CHAIN, 1, 100, 2.0 / (GAIN + 0.02))
    assert CHAIN in steps(policy, 1, 2 * DWELL)


def test_step_times_are_kept_apart_by_context_and_found_nearby():
    times = StepTimes()
    times.observe(PLAIN, 1, 100, 1.0)
    assert times.get(PLAIN, 1, 5000) == 1.0
    times.observe(PLAIN, 1, 5000, 3.0)
    assert times.get(PLAIN, 1, 5000) == 3.0
    assert times.get(PLAIN, 1, 100) == 1.0
    assert times.get(PLAIN, 2, 100) is None
    times.observe(PLAIN, 1, 100, 1000.0)  # something else held it up
    assert times.get(PLAIN, 1, 100) == pytest.approx(1.1)


def test_chains_share_what_is_known_about_their_positions():
    policy = Policy("auto", CHAIN, (CHAIN, SHORT))
    for _ in range(1000):
        policy.observe_acceptance(CHAIN, [3])
    assert policy.expected_length(SHORT) == pytest.approx(2, abs=0.05)
    assert Acceptance().length(3) == pytest.approx(1 + 0.4 + 0.16 + 0.064)
    assert policy.expected_length(PLAIN) == 1
