"""Rows of a benchmark: contenders run in turn, and what is said of them.

A shared machine is faster in one minute than in the next. So every contender runs once a repeat,
one after the other, ratios are taken within a repeat, and medians over the repeats are quoted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["plain", "speculative", "prefill", "batched-bench"]
OURS, LLAMACPP, OPENVINO = "eaglejax", "llama.cpp", "openvino"


class PeerError(RuntimeError):
    """Another engine could not be measured; the message says what it reported."""


@dataclass(frozen=True)
class Timing:
    """One request, whoever ran it.

    Attributes:
        tokens: generated, the first one (which the prompt's pass gives) and a stop token included.
        prefill_seconds: until the first token.
        decode_seconds: from the first token to the last.
        verify_steps: speculative steps after the first token; 0 for plain decoding.
    """

    tokens: int
    prefill_seconds: float
    decode_seconds: float
    verify_steps: int = 0


@dataclass(frozen=True)
class Run:
    """What one run of a contender came to: tokens a second, committed tokens a verify step."""

    tokens_per_second: float
    acceptance_length: float | None = None


@dataclass(frozen=True)
class Contender:
    """Something to be measured.

    Attributes:
        engine: whose.
        mode: "plain" or "speculative" decoding, "prefill" (prompt processing), or "batched-bench"
            (llama.cpp's own program of that name: decoding without sampling).
        plan: depth,width,nodes of a speculative one.
        batch: requests in flight.
        run: measures once. Raises PeerError.
    """

    engine: str
    mode: Mode
    plan: str | None
    batch: int
    run: Callable[[], Run]

    @property
    def name(self) -> str:
        """For progress lines."""
        return " ".join(
            [self.engine, self.mode, *([self.plan] if self.plan else []), f"batch {self.batch}"]
        )


def refusing(engine: str, mode: Mode, plan: str | None, batch: int, reason: str) -> Contender:
    """A contender that cannot run, so that it is named with its reason like one that broke."""

    def run() -> Run:
        raise PeerError(reason)

    return Contender(engine, mode, plan, batch, run)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        engine, mode, plan, batch: of the contender.
        tokens_per_second: median over the repeats, of all requests together; generated tokens with
            the prompts left out, or for "prefill" prompt tokens.
        interval: lowest and highest repeat.
        acceptance_length: committed tokens a verify step; None without speculation.
        ratio_to_plain: median over the repeats of the ratio to the same engine's plain decoding (or
            prefill) with as many requests, in the same repeat; None where that was not measured.
        ratio_to_llamacpp: the same ratio to llama.cpp's.
    """

    engine: str
    mode: Mode
    plan: str | None
    batch: int
    tokens_per_second: float
    interval: tuple[float, float]
    acceptance_length: float | None
    ratio_to_plain: float | None
    ratio_to_llamacpp: float | None


@dataclass(frozen=True)
class Unavailable:
    """A contender that gave no row, and why."""

    engine: str
    mode: Mode
    plan: str | None
    batch: int
    reason: str


def speed(timings: Sequence[Timing], batch: int) -> float:
    """Tokens a second while decoding: those after the first of each, over the time in flight."""
    tokens = sum(t.tokens - 1 for t in timings)
    seconds = sum(t.decode_seconds for t in timings) / min(batch, len(timings))
    return tokens / seconds


def acceptance_length(timings: Sequence[Timing]) -> float | None:
    """Committed tokens a verify step over all requests."""
    steps = sum(t.verify_steps for t in timings)
    return sum(t.tokens - 1 for t in timings) / steps if steps else None


def run_of(timings: Sequence[Timing], batch: int) -> Run:
    """Decoding speed and acceptance of requests that ran `batch` at a time."""
    return Run(speed(timings, batch), acceptance_length(timings))


def measure(
    contenders: Sequence[Contender],
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[Unavailable]]:
    """Runs every contender once a repeat, in turn.

    One that raises PeerError is not run again and gives no row; it is told to `progress` at once.

    Returns:
        Rows in the order of the contenders, and those without one.
    """
    runs: dict[int, list[Run]] = {index: [] for index in range(len(contenders))}
    failed: dict[int, str] = {}
    for repeat in range(repeats):
        for index, contender in enumerate(contenders):
            if index in failed:
                continue
            try:
                run = contender.run()
            except PeerError as error:
                failed[index] = str(error)
                progress(f"{contender.name}: unavailable: {error}")
                continue
            runs[index].append(run)
            progress(f"repeat {repeat + 1}, {contender.name}: {run.tokens_per_second:.1f} tokens/s")
    complete = [
        (contender, runs[index])
        for index, contender in enumerate(contenders)
        if index not in failed
    ]
    rows = [_row(contender, of, complete) for contender, of in complete]
    missing = [
        Unavailable(c.engine, c.mode, c.plan, c.batch, failed[index])
        for index, c in enumerate(contenders)
        if index in failed
    ]
    return rows, missing


def _row(contender: Contender, runs: list[Run], complete: list[tuple[Contender, list[Run]]]) -> Row:
    values = [run.tokens_per_second for run in runs]

    def ratio_to(engine: str) -> float | None:
        mode = "prefill" if contender.mode == "prefill" else "plain"
        for other, base in complete:
            if (other.engine, other.mode, other.batch) == (engine, mode, contender.batch):
                pairs = zip(values, base, strict=True)
                return round(statistics.median(v / b.tokens_per_second for v, b in pairs), 3)
        return None

    # Greedy text is the same in every repeat, and acceptance with it.
    accepted = runs[-1].acceptance_length
    return Row(
        engine=contender.engine,
        mode=contender.mode,
        plan=contender.plan,
        batch=contender.batch,
        tokens_per_second=round(statistics.median(values), 2),
        interval=(round(min(values), 2), round(max(values), 2)),
        acceptance_length=None if accepted is None else round(accepted, 3),
        ratio_to_plain=ratio_to(contender.engine),
        ratio_to_llamacpp=ratio_to(LLAMACPP),
    )


def as_json(
    rows: Sequence[Row], missing: Sequence[Unavailable], machine: dict[str, Any]
) -> dict[str, Any]:
    """The last line of `eaglejax bench decode --json`."""
    return {
        "rows": [asdict(row) for row in rows],
        "unavailable": [asdict(one) for one in missing],
        "machine": machine,
    }
