"""What the frozen target teaches: features, and logits on the draft vocabulary only.

The full-vocabulary logits of a row of text are never one array: at 128k tokens they would be the
largest thing in memory by far. They are made for a slice of the tokens at a time, and of each slice
only the draft vocabulary's columns stay, and whether the arg-max is one of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eaglejax.models.apply import apply
from eaglejax.models.target import Target, TargetOutput
from eaglejax.train.data import Batch
from eaglejax.train.loss import DraftRows, shift_left

SLICE = 64  # tokens whose full logits exist at once


def draft_logits(
    target: Target, params: Any, hidden: Float[Array, "B T D"], target_ids: Int[Array, " v"]
) -> tuple[Float[Array, "B T v"], Bool[Array, "B T"]]:
    """Logits on the draft vocabulary, and whether the arg-max over the full one is in it.

    Args:
        target: the module.
        params: its variables.
        hidden: the head's inputs.
        target_ids: the draft vocabulary.
    """
    kept = jnp.zeros(target.config.vocab_size, bool).at[target_ids].set(True)
    rows = hidden.reshape(-1, hidden.shape[-1])
    count = len(rows)
    size = min(SLICE, count)
    slices = jnp.pad(rows, ((0, -count % size), (0, 0))).reshape(-1, size, rows.shape[-1])

    def one(rows: Float[Array, "s D"]) -> tuple[Float[Array, "s v"], Bool[Array, " s"]]:
        logits = apply(target, params, rows, method="logits")
        return jnp.take(logits, target_ids, axis=-1), kept[jnp.argmax(logits, axis=-1)]

    logits, covered = jax.lax.map(one, slices)
    shape = hidden.shape[:-1]
    logits = logits.reshape(-1, len(target_ids))[:count]
    return logits.reshape(*shape, -1), covered.reshape(-1)[:count].reshape(shape)


def teach(target: Target, params: Any, target_ids: Int[Array, " v"], batch: Batch) -> DraftRows:
    """Runs the target over packed chats and aligns everything to the drafter's rows."""
    same_chat = batch.segments[:, :, None] == batch.segments[:, None, :]
    length = batch.tokens.shape[1]
    ancestors = same_chat & jnp.tril(jnp.ones((1, length, length), bool))
    output: TargetOutput = apply(target, params, batch.tokens, batch.positions, ancestors)
    # Row t pairs the feature of t with what belongs to t+1; across a chat's end nothing is taught.
    logits, covered = draft_logits(target, params, shift_left(output.hidden, 1), target_ids)
    within = shift_left(batch.segments, 1) == batch.segments
    rows = DraftRows(
        features=output.features,
        tokens=shift_left(batch.tokens, 1),
        teacher=logits,
        teacher_covered=covered,
        supervised=shift_left(batch.supervised, 1) & within,
        positions=batch.positions,
        segments=batch.segments,
    )
    return jax.lax.stop_gradient(rows)
