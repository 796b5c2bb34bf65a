"""Protects the default model: its float32 logits and greedy texts are those of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import safetensors_io
from checkpoints.gguf import GGUFFile
from checkpoints.gguf_target import target_config, target_params
from eaglejax.config import EngineConfig, SamplingParams, default_feature_layers
from eaglejax.models.target import Target
from eaglejax.sampling import greedy
from eaglejax.state import EngineState, admission, admit
from eaglejax.steps import Models, Params, decode_step, prefill_step

GOLDEN = Path(__file__).parent / "data" / "g1"
LONGEST = 192  # all texts are padded to one length: one compiled program


@dataclass(frozen=True, eq=False)
class Real:
    target: Target
    variables: dict


@pytest.fixture(scope="session")
def real(smollm2_gguf: Path) -> Real:
    file = GGUFFile(smollm2_gguf)
    tied = "output.weight" not in file.by_name
    config = target_config(file.metadata(), smollm2_gguf, tied=tied)
    target = Target(config, default_feature_layers(config.num_layers))
    return Real(target, target_params(file, config, "float32"))


@pytest.fixture(scope="session")
def prompts() -> list[dict]:
    return json.loads((GOLDEN / "prompts.json").read_text())["prompts"]


def test_teacher_forced_logits(real: Real, prompts: list[dict]):
    arrays = safetensors_io.read_all(GOLDEN / "logits.safetensors")
    texts = [p["prompt_ids"] + p["continuation_ids"] for p in prompts]
    tokens = np.zeros((len(texts), LONGEST), np.int32)
    top = np.zeros((len(texts), LONGEST, 10), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        top[row, : len(text)] = arrays[f"{prompts[row]['key']}.top10_ids"]

    @jax.jit
    def logits_of(variables, tokens, wanted):
        positions = jnp.arange(LONGEST)[None]
        hidden = real.target.apply(variables, tokens[None], positions).hidden
        logits = real.target.apply(variables, hidden, method="logits")[0]
        return jnp.take_along_axis(logits, wanted, axis=1), jnp.argmax(logits, axis=1)

    for row, text in enumerate(texts):
        found, best = (x[: len(text)] for x in logits_of(real.variables, tokens[row], top[row]))
        expected = arrays[f"{prompts[row]['key']}.top10_logits"]
        assert np.abs(np.asarray(found) - expected).max() < 1e-2
        clear = expected[:, 0] - expected[:, 1] > 1e-3
        assert clear.mean() > 0.95
        np.testing.assert_array_equal(np.asarray(best)[clear], top[row, : len(text), 0][clear])


def greedy_texts(real: Real, prompts: list[dict], tokens: int) -> list[list[int]]:
    """Continuations through the engine's own steps, end-of-text ignored."""
    batch, chunk = len(prompts), 64
    models, params = Models(real.target), Params(real.variables)
    state = EngineState.create(
        EngineConfig(max_slots=batch, max_length=LONGEST), real.target.config, None
    )
    slots = jnp.arange(batch)
    request = SamplingParams(max_tokens=tokens, ignore_eos=True)
    state = jax.jit(admit)(state, slots, **admission([request] * batch, [0] * batch, []))
    texts: list[list[int]] = [[] for _ in prompts]

    def deliver(report) -> None:
        counts = np.asarray(report.counts)
        for text, row, count in zip(texts, np.asarray(report.tokens), counts, strict=True):
            text.extend(row[:count].tolist())

    prefill = jax.jit(prefill_step, static_argnames=("models", "choose"), donate_argnames="state")
    decode = jax.jit(decode_step, static_argnames=("models", "choose"), donate_argnames="state")
    for start in range(0, max(len(p["prompt_ids"]) for p in prompts), chunk):
        parts = [p["prompt_ids"][start : start + chunk] for p in prompts]
        padded = np.array([part + [0] * (chunk - len(part)) for part in parts], np.int32)
        counts = np.array([len(part) for part in parts], np.int32)
        final = np.array([0 < len(p["prompt_ids"]) - start <= chunk for p in prompts])
        state, report = prefill(models, params, state, slots, padded, counts, final, choose=greedy)
        deliver(report)
    # The shorter prompts are not decoded before the longest is prefilled.
    for _ in range(tokens - 1):
        state, report = decode(models, params, state, slots, choose=greedy)
        deliver(report)
    assert not np.asarray(state.slots.active).any()
    return texts


def test_greedy_continuations_of_two_prompts(real: Real, prompts: list[dict]):
    chosen = prompts[:2]
    expected = [p["continuation_ids"][:32] for p in chosen]
    assert greedy_texts(real, chosen, 32) == expected


@pytest.mark.slow
def test_greedy_continuations_of_all_prompts(real: Real, prompts: list[dict]):
    assert greedy_texts(real, prompts, 64) == [p["continuation_ids"] for p in prompts]
