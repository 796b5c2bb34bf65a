"""Decoding speed of one request or a batch: plain and speculative, in one run, interleaved.

Decoding one token reads every weight once, so plain speed is bound by memory bandwidth; a
speculative step reads them once for several tokens. The baseline, plain decoding of the same
engine, is measured in the same run, mode after mode, and quoted as a ratio: absolute times on a
shared machine mean little.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from eaglejax.config import SamplingParams
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Completion, Prompt


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        engine: whose.
        mode: "plain" or "speculative".
        plan: depth,width,nodes; None when plain.
        batch: requests in flight.
        tokens_per_second: median over the repeats, of all requests together, prefill left out.
        interval: lowest and highest repeat.
        acceptance_length: committed tokens a verify step; None when plain.
        ratio_to_plain: median over the repeats of the ratio to plain decoding in the same repeat.
    """

    engine: str
    mode: str
    plan: str | None
    batch: int
    tokens_per_second: float
    interval: tuple[float, float]
    acceptance_length: float | None
    ratio_to_plain: float


def speed(completions: Sequence[Completion], batch: int) -> float:
    """Tokens per second of decoding: tokens after the first of each, over the time in flight."""
    tokens = sum(c.stats.completion_tokens - 1 for c in completions)
    seconds = sum(c.stats.decode_seconds for c in completions) / min(batch, len(completions))
    return tokens / seconds


def acceptance_length(completions: Sequence[Completion]) -> float | None:
    """Committed tokens a verify step over all completions."""
    steps = sum(c.stats.verify_steps for c in completions)
    return sum(c.stats.completion_tokens - 1 for c in completions) / steps if steps else None


def measure(
    engines: dict[str | None, Engine],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    batch: int,
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Runs every mode once a repeat, in turn.

    Args:
        engines: one for each plan; None is plain decoding and must be there.
        prompts, params: what every mode generates.
        batch: requests in flight.
        repeats: rounds.
        progress: told after every run.
    """
    speeds: dict[str | None, list[float]] = {plan: [] for plan in engines}
    accepted: dict[str | None, float | None] = {}
    for plan, engine in engines.items():  # compile and touch the weights before the clock
        engine.generate(prompts[:1], params, spec="off" if plan is None else "on")
    for repeat in range(repeats):
        for plan, engine in engines.items():
            done = engine.generate(prompts, params, spec="off" if plan is None else "on")
            speeds[plan].append(speed(done, batch))
            accepted[plan] = acceptance_length(done)
            progress(
                f"repeat {repeat + 1}, plan {plan or 'plain'}: {speeds[plan][-1]:.1f} tokens/s"
            )
    rows = []
    for plan, values in speeds.items():
        ratios = [v / p for v, p in zip(values, speeds[None], strict=True)]
        rows.append(
            Row(
                engine="eaglejax",
                mode="plain" if plan is None else "speculative",
                plan=plan,
                batch=batch,
                tokens_per_second=round(statistics.median(values), 2),
                interval=(round(min(values), 2), round(max(values), 2)),
                acceptance_length=_rounded(accepted[plan]),
                ratio_to_plain=round(statistics.median(ratios), 3),
            )
        )
    return rows


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [
                line.split(":", 1)[1].strip() for line in info if line.startswith("model name")
            ]
        model, cores = names[0], len(names)
    except (OSError, IndexError):
        cores = 0
    versions = {
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    return {"cpu": model, "cores": cores, **versions}


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The last line of `eaglejax bench decode --json`."""
    return {"rows": [asdict(row) for row in rows], "machine": machine()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
