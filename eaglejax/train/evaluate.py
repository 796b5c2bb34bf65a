"""Measured acceptance: what a drafter gains on prompts, with an interval.

Prompts, not tokens, are independent of each other, so the interval comes from resampling prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eaglejax.config import SamplingParams, SpecPlan
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Prompt, Stats

ALL, UNKNOWN = "all", "unknown"  # kinds: every prompt, and of a prompt that names none
DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Outcome:
    """What speculation did for one prompt.

    Attributes:
        kind: of the prompt.
        committed: tokens after the first one, which comes from the prompt's own pass.
        steps: verify steps; 0 where the first token was the last.
        accepted: entry i counts the steps that accepted more than i drafts.
    """

    kind: str
    committed: int
    steps: int
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, kind: str, stats: Stats) -> Outcome:
        """From a completion's statistics."""
        steps = stats.verify_steps
        committed = stats.completion_tokens - 1 if steps else 0
        return cls(kind, committed, steps, stats.accepted_per_position)


@dataclass(frozen=True)
class Row:
    """Acceptance over the prompts of one kind; the fields are those of `eval --json`.

    Attributes:
        plan: depth,width,nodes.
        temperature: 0 is greedy.
        kind: of the prompts; "all" is every prompt.
        acceptance_length: committed tokens a verify step, over all steps; None without a step.
        ci95: 95% bootstrap interval of it, over prompts; None without a step.
        accepted_per_position: entry i is the share (0 to 1) of verify steps that accepted more than
            i drafts.
        prompts: how many, those without a verify step included.
    """

    plan: str
    temperature: float
    kind: str
    acceptance_length: float | None
    ci95: tuple[float, float] | None
    accepted_per_position: tuple[float, ...]
    prompts: int


def run_prompts(
    engine: Engine,
    prompts: Sequence[tuple[str, Prompt]],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Completes prompts speculatively.

    Args:
        engine: with a drafter.
        prompts: kind and prompt.
        temperature: of all requests.
        max_tokens: of each completion.
        seed: of the first prompt; the others count on, each by its index.
        progress: called after each prompt.
    """
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=(seed + i) % 2**32)
        for i in range(len(prompts))
    ]
    outcomes: dict[int, Outcome] = {}
    stream = engine.generate([prompt for _, prompt in prompts], params, stream=True, spec="on")
    for chunk in stream:
        if chunk.completion is not None:
            outcomes[chunk.index] = Outcome.of(prompts[chunk.index][0], chunk.completion.stats)
            progress()
    return [outcomes[i] for i in range(len(prompts))]


def rows_of(outcomes: Sequence[Outcome], plan: SpecPlan, temperature: float) -> list[Row]:
    """One row for each kind, in alphabetical order, then one for all prompts."""
    kinds = [*sorted({outcome.kind for outcome in outcomes}), ALL]
    return [
        _row([o for o in outcomes if kind in (o.kind, ALL)], plan, temperature, kind)
        for kind in kinds
    ]


def _row(outcomes: Sequence[Outcome], plan: SpecPlan, temperature: float, kind: str) -> Row:
    ran = [outcome for outcome in outcomes if outcome.steps]
    if not ran:
        return Row(str(plan), temperature, kind, None, None, (), len(outcomes))
    committed = np.array([outcome.committed for outcome in ran])
    steps = np.array([outcome.steps for outcome in ran])
    accepted = np.array([outcome.accepted for outcome in ran]).sum(axis=0) / steps.sum()
    low, high = bootstrap(committed, steps)
    return Row(
        plan=str(plan),
        temperature=temperature,
        kind=kind,
        acceptance_length=round(float(committed.sum() / steps.sum()), 4),
        ci95=(round(low, 4), round(high, 4)),
        accepted_per_position=tuple(round(float(share), 4) for share in accepted),
        prompts=len(outcomes),
    )


def bootstrap(committed: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """95% percentile interval of sum(committed) / sum(steps) over resampled prompts.

    The draws are the same every time, so the same outcomes give the same interval.
    """
    draws = np.random.default_rng(0).integers(0, len(steps), (DRAWS, len(steps)))
    ratios = committed[draws].sum(axis=1) / steps[draws].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
