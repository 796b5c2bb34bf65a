"""This engine as a contender: decoding plainly and speculatively, and processing a prompt.

Decoding one token reads every weight once, so plain speed is bound by memory bandwidth; a
speculative step reads them once for several tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import rows
from benchmarks.rows import OURS, Contender, Run, Timing, run_of
from eaglejax.config import EngineConfig, SamplingParams, SpecPlan
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Completion, Prompt
from eaglejax.steps import Models, Params

PREFILL_PROMPTS = 3  # of one run; single ones are short enough to be hit by anything else


def timing_of(completion: Completion) -> Timing:
    """The figures that every engine is measured by."""
    stats = completion.stats
    return Timing(
        stats.completion_tokens, stats.prefill_seconds, stats.decode_seconds, stats.verify_steps
    )


def acceptance_length(completions: Sequence[Completion]) -> float | None:
    """Committed tokens a verify step over all completions."""
    return rows.acceptance_length([timing_of(c) for c in completions])


def plain_engine(engine: Engine, config: EngineConfig) -> Engine:
    """An engine on the same target without its drafter, which plain decoding would keep up to date.

    Args:
        engine: with the target and its weights.
        config: how it runs; `spec` is switched off.
    """
    models, params = Models(engine.models.target), Params(engine.params.target)
    off = config.replace(spec="off")
    return Engine.create(models, params, off, engine.tokenizer, engine.template)


def decoding(
    engine: Engine,
    plans: Sequence[SpecPlan],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch: int,
) -> list[Contender]:
    """Plain decoding and each plan, compiled and warm.

    Args:
        engine: with target, drafter and weights.
        plans: what to speculate by.
        prompts, params: what is generated.
        batch: requests in flight.
    """
    config = engine.config.replace(max_slots=batch)
    engines: dict[str | None, Engine] = {None: plain_engine(engine, config)}
    for plan in plans:
        parts = (engine.models, engine.params, config.replace(plan=plan))
        engines[str(plan)] = Engine.create(*parts, engine.tokenizer, engine.template)

    def contender(plan: str | None, one: Engine) -> Contender:
        def run() -> Run:
            done = one.generate(prompts, params, spec="off" if plan is None else "on")
            return run_of([timing_of(completion) for completion in done], batch)

        # As many as in flight: their programs are compiled, and the weights touched.
        one.generate(prompts[:batch], SamplingParams(max_tokens=2))
        return Contender(OURS, "plain" if plan is None else "speculative", plan, batch, run)

    return [contender(plan, one) for plan, one in engines.items()]


def prefill(engine: Engine, prompt: Sequence[int]) -> Contender:
    """Processing one prompt of token ids up to its first token, without a drafter."""
    one = plain_engine(engine, engine.config.replace(max_slots=1, max_length=len(prompt) + 16))
    params = SamplingParams(max_tokens=1)
    one.generate([prompt], params)

    def run() -> Run:
        done = one.generate([prompt] * PREFILL_PROMPTS, params)
        return Run(PREFILL_PROMPTS * len(prompt) / sum(c.stats.prefill_seconds for c in done))

    return Contender(OURS, "prefill", None, 1, run)


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
