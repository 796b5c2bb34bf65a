"""The default model end to end: plain and speculative, their texts, speed and acceptance."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.record import DRY, Record, Skip, run
from checkpoints.catalogue import DEFAULT_MODEL, model_path
from checkpoints.errors import CheckpointError

PROMPTS = Path(__file__).parent.parent / "prompts" / "eval.jsonl"
TOKENS = 8 if DRY else 96
COUNT = 1 if DRY else 8
KERNELS = "auto" if DRY else "triton"


def main(record: Record) -> None:
    """Start, agreement with the float32 reference, then plain and speculative decoding in turn."""
    try:
        model_path(DEFAULT_MODEL)
    except CheckpointError as error:
        raise Skip(str(error)) from None
    import eaglejax
    from eaglejax.config import SamplingParams

    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines() if line.strip()]
    prompts = [row.get("messages") or row.get("prompt") or row["token_ids"] for row in rows[:COUNT]]
    started = time.perf_counter()
    engine = eaglejax.load(kernels=KERNELS, max_length=512)
    record.note(start_seconds=time.perf_counter() - started, config=str(engine.config))
    record.attempt(lambda: agreement(engine), what="agreement with float32")
    params = SamplingParams(max_tokens=TOKENS)
    texts: dict[str, Any] = {}
    for spec in ("off", "on"):
        engine.generate(prompts[:1], SamplingParams(max_tokens=4), spec=spec)
    for repeat in range(1 if DRY else 3):
        for spec in ("off", "on"):

            def generate(spec: Any = spec) -> dict[str, Any]:
                done = engine.generate(prompts, params, spec=spec)
                texts[spec] = [list(one.token_ids) for one in done]
                seconds = sum(one.stats.decode_seconds for one in done)
                tokens = sum(one.stats.completion_tokens - 1 for one in done)
                steps = sum(one.stats.verify_steps for one in done)
                return {
                    "tokens_per_second": tokens / max(seconds, 1e-9),
                    "acceptance_length": tokens / steps if steps else None,
                }

            record.attempt(generate, what="decode", spec=spec, repeat=repeat)
    same = [a == b for a, b in zip(texts.get("off", []), texts.get("on", []), strict=False)]
    record.add(what="same text in both modes", ok=all(same) and bool(same), of=len(same))


def agreement(engine: Any) -> dict[str, Any]:
    """Logits of a 16-token probe against the float32 reference on dequantised weights."""
    from checkpoints.target import read_target
    from eaglejax.models.apply import apply
    from eaglejax.models.target import Target

    target = engine.models.target
    tokens = np.array([[(7 + 31 * i) % target.config.vocab_size for i in range(16)]], np.int32)
    reference = Target(target.config, target.feature_layers)
    weights = read_target(model_path(DEFAULT_MODEL), weights="float32").params

    def logits(module: Any, params: Any) -> np.ndarray:
        @jax.jit
        def forward(params: Any) -> Any:
            hidden = apply(module, params, tokens, np.arange(16)[None]).hidden
            return apply(module, params, hidden, method="logits")

        return np.asarray(forward(params), np.float64)[0]

    ours, exact = logits(target, engine.params.target), logits(reference, weights)
    norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(exact, axis=-1)
    cosine = (ours * exact).sum(-1) / norms
    top = np.sort(exact, axis=-1)
    clear = top[:, -1] - top[:, -2] > 1.0
    same = ours.argmax(-1) == exact.argmax(-1)
    good = bool(cosine.min() >= 0.995 and same[clear].all())
    return {"ok": good, "least_cosine": float(cosine.min()), "same_top_1": int(same.sum())}


if __name__ == "__main__":
    run("smollm2", main)
