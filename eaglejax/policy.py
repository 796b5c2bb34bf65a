"""Which plan the next step runs: never, always, below a batch size, or whatever pays.

A policy sees counts and times, never devices; the engine asks it before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from eaglejax.config import PLAIN, SpecPlan

SpecMode = Literal["off", "on", "threshold", "auto"]
MODES: tuple[SpecMode, ...] = ("off", "on", "threshold", "auto")

DWELL = 8  # steps between switches
GAIN = 1.03  # what a switch must promise
PROBE = 64  # plain steps between looks at what speculation would do
CONTEXTS = (512, 2048, 8192)  # upper ends of the ranges whose step times are kept apart
SMOOTH = 0.1  # weight of a new step time


@dataclass(frozen=True)
class Decision:
    """A plan, and in words why."""

    plan: SpecPlan
    reason: str


@dataclass
class Acceptance:
    """How often drafts are accepted, by position, over the last some thousand of them.

    Attributes:
        tried: entry i, how often a draft at position i came to the test, those before it accepted.
        right: how often it was accepted then. Both fade.
    """

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    # Before anything is known a draft is right as often as the one before it, the first four times
    # in ten; this is worth twenty tries.
    FIRST, PRIOR, MEMORY = 0.4, 20.0, 2000.0

    def observe(self, accepted: Sequence[int], depth: int) -> None:
        """Takes one step: accepted drafts of each slot that ran."""
        missing = [0.0] * (depth - len(self.tried))
        self.tried += missing
        self.right += missing
        for i in range(depth):
            if self.tried[i] > self.MEMORY:
                fade = self.MEMORY / self.tried[i]
                self.tried[i] *= fade
                self.right[i] *= fade
            self.tried[i] += sum(a >= i for a in accepted)
            self.right[i] += sum(a > i for a in accepted)

    def length(self, depth: int) -> float:
        """Expected committed tokens of one step, the bonus token included."""
        total, reached, rate = 1.0, 1.0, self.FIRST
        for i in range(depth):
            tried, right = (self.tried[i], self.right[i]) if i < len(self.tried) else (0.0, 0.0)
            rate = (right + self.PRIOR * rate) / (tried + self.PRIOR)
            reached *= rate
            total += reached
        return total


@dataclass
class StepTimes:
    """Seconds of a step by plan, slots run, and range of context; smoothed.

    A time that was never measured is that of the nearest measured range of context.
    """

    seconds: dict[tuple[SpecPlan, int, int], float] = field(default_factory=dict)

    def observe(self, plan: SpecPlan, size: int, context: float, seconds: float) -> None:
        key = (plan, size, _range(context))
        old = self.seconds.get(key)
        if old is None:
            self.seconds[key] = seconds
            return
        # One step that was held up by something else must not look like a change.
        seconds = min(seconds, 2 * old)
        self.seconds[key] = old + SMOOTH * (seconds - old)

    def get(self, plan: SpecPlan, size: int, context: float) -> float | None:
        wanted = _range(context)
        ranges = sorted(range(len(CONTEXTS) + 1), key=lambda r: abs(r - wanted))
        found = (self.seconds.get((plan, size, r)) for r in ranges)
        return next((seconds for seconds in found if seconds is not None), None)


def _range(context: float) -> int:
    return sum(context > end for end in CONTEXTS)


@dataclass
class Policy:
    """Chooses the plan of each step.

    Attributes:
        mode: "off", "on", "threshold" or "auto"; may be changed between steps.
        plan: what "on" and "threshold" run.
        menu: plans that "auto" chooses from, beside plain.
        threshold: with "threshold", more decoding requests than this run plainly; 0 never does.
        times, acceptance: what has been measured.
        reason: why the last step ran what it ran.
        switches: changes between plain and speculative so far.
        current: the plan of the last step that was not a probe.
    """

    mode: SpecMode
    plan: SpecPlan
    menu: tuple[SpecPlan, ...] = ()
    threshold: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    acceptance: dict[object, Acceptance] = field(default_factory=dict)
    reason: str = "nothing has run"
    switches: int = 0
    current: SpecPlan = field(init=False)
    _since: int = 0  # steps since the last switch; 0 before the first
    _plain: int = 0  # plain steps since the last speculative one

    def __post_init__(self) -> None:
        self.current = self.plan if self.mode in ("on", "threshold") else PLAIN

    def choose(self, decoding: int, size: int, context: float) -> Decision:
        """The plan of the next step.

        Args:
            decoding: requests that decode.
            size: slots that the step will be run for (the bucket).
            context: their mean committed tokens.
        """
        if self.mode == "off":
            decision = Decision(PLAIN, "speculation is off")
        elif self.mode == "on":
            decision = Decision(self.plan, "speculation is on")
        elif self.mode == "threshold":
            decision = self._by_threshold(decoding)
        else:
            decision = self._by_value(size, context)
        probing = decision.reason.startswith("probe")
        if decision.plan.is_plain != self.current.is_plain and not probing:
            self.switches += 1
            self._since = 0
        self._since += 1
        self._plain = self._plain + 1 if decision.plan.is_plain else 0
        if not probing:
            self.current = decision.plan
        self.reason = decision.reason
        return decision

    def observe_time(self, plan: SpecPlan, size: int, context: float, seconds: float) -> None:
        """Takes the time of one undisturbed step."""
        self.times.observe(plan, size, context, seconds)

    def observe_acceptance(self, plan: SpecPlan, accepted: Sequence[int]) -> None:
        """Takes how many drafts each slot of a step accepted."""
        self._record(plan).observe(accepted, plan.depth)

    def expected_length(self, plan: SpecPlan) -> float:
        """Expected acceptance length of a plan."""
        return self._record(plan).length(plan.depth)

    def _record(self, plan: SpecPlan) -> Acceptance:
        """A plan's record. Chains draft alike as far as they go: they share one."""
        return self.acceptance.setdefault("chain" if plan.width == 1 else plan, Acceptance())

    def _by_threshold(self, decoding: int) -> Decision:
        limit = self.threshold
        if limit == 0:
            return Decision(self.plan, "the threshold is 0: never plain")
        back = max(limit - max(1, limit // 8), 1)
        wants_plain = decoding > limit if not self.current.is_plain else decoding > back
        if wants_plain != self.current.is_plain and 0 < self._since < DWELL:
            return Decision(self.current, f"switched {self._since} steps ago")
        if wants_plain:
            return Decision(PLAIN, f"{decoding} requests decode, the threshold is {limit}")
        return Decision(self.plan, f"{decoding} requests decode, at most {limit} speculate")

    def _by_value(self, size: int, context: float) -> Decision:
        """The plan with most expected tokens a second; the current one unless another gains 3%."""
        times = {plan: self.times.get(plan, size, context) for plan in (PLAIN, *self.menu)}
        known = {plan: t for plan, t in times.items() if t is not None}
        for plan, t in times.items():  # every plan on the menu is measured once
            if t is None:
                return Decision(plan, f"probe: {plan} has not been measured at {size} slots")
        rates = {plan: self.expected_length(plan) / t for plan, t in known.items()}
        best = max(rates, key=lambda plan: rates[plan])
        current = self.current if self.current in rates else PLAIN
        if best != current and (
            rates[best] < GAIN * rates[current]
            or (best.is_plain != current.is_plain and 0 < self._since < DWELL)
        ):
            best = current
        if best.is_plain and self.menu and self._plain >= PROBE:
            likely = max(self.menu, key=lambda plan: rates[plan])
            return Decision(likely, f"probe: {PROBE} plain steps")
        gain = rates[best] / rates[PLAIN]
        return Decision(best, f"{best}: {gain:.2f}x plain expected at {size} slots")
