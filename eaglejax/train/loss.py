"""EAGLE-3's training-time test: the drafter unrolled on its own states (arXiv 2503.01840).

The served forward pass is the trained one. Step i runs all rows again with the keys of earlier
steps as `block_kv`: a row sees step 0 causally (true features, as the cache holds them) and, of
every later step, only its own row (the drafted path that leads to it).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter, DrafterOutput


class DraftRows(struct.PyTreeNode):
    """Rows as the drafter sees them: feature of position t, everything else of token t+1.

    Attributes:
        features: target features.
        tokens: token of the row, `x[t+1]`.
        teacher: target logits *at* that token, restricted to the draft vocabulary.
        teacher_covered: the target's own arg-max there is in the draft vocabulary.
        supervised: the token belongs to an answer.
        positions: rotary positions.
        segments: chats of a packed row; 0 is padding.
    """

    features: Float[Array, "B T F"]
    tokens: Int[Array, "B T"]
    teacher: Float[Array, "B T v"]
    teacher_covered: Bool[Array, "B T"]
    supervised: Bool[Array, "B T"]
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]


class UnrolledLoss(struct.PyTreeNode):
    """Loss and metrics per training-time step i.

    Attributes:
        loss: sum over steps of `decay**i` times the mean loss.
        losses: mean KL(target || draft) over the supervised rows of each step.
        accuracy: share of supervised rows whose arg-max is the target's.
        rows: supervised rows of each step.
    """

    loss: Float[Array, ""]
    losses: Float[Array, " steps"]
    accuracy: Float[Array, " steps"]
    rows: Int[Array, " steps"]


def shift_left(x: Array, by: int, axis: int = 1) -> Array:
    """Row t gets what row t+by had; zeros follow at the end."""
    if by == 0:
        return x
    kept = jax.lax.slice_in_dim(x, by, x.shape[axis], axis=axis)
    padding = [(0, by if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(kept, padding)


def masked_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean over the masked rows; 0 (with zero gradient) where there are none."""
    count = jnp.sum(mask)
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(count, 1)


def kl_divergence(
    teacher: Float[Array, "B T v"], logits: Float[Array, "B T v"]
) -> Float[Array, "B T"]:
    """KL(softmax(teacher) || softmax(logits)) over the draft vocabulary."""
    target_log, draft_log = jax.nn.log_softmax(teacher), jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(target_log) * (target_log - draft_log), axis=-1)


def unrolled_loss(
    drafter: Drafter, variables: Any, rows: DraftRows, *, steps: int, decay: float
) -> UnrolledLoss:
    """Runs `steps` training-time steps.

    Args:
        drafter: the module.
        variables: its collections `params` and `vocab`.
        rows: aligned rows (see DraftRows).
        steps: how many tokens ahead the drafter learns to draft.
        decay: weight of step i is `decay**i`.
    """
    length = rows.tokens.shape[1]
    same_chat = rows.segments[:, :, None] == rows.segments[:, None, :]
    # The keys of step 0 start with the feature of their own row, so causal within a chat.
    causal = same_chat & jnp.tril(jnp.ones((1, length, length), bool))
    diagonal = jnp.broadcast_to(jnp.eye(length, dtype=bool)[None], causal.shape)

    hidden = apply(drafter, variables, rows.features, method="fuse")
    block_kv, ancestors = None, causal
    losses, accuracy, counts = [], [], []
    for i in range(steps):
        if i:
            ancestors = jnp.concatenate([ancestors, diagonal], axis=-1)
        output: DrafterOutput = apply(
            drafter,
            variables,
            hidden,
            shift_left(rows.tokens, i),
            rows.positions + i,
            ancestors,
            None,
            block_kv,
        )
        teacher = shift_left(rows.teacher, i)
        in_chat = shift_left(rows.segments, i) == rows.segments
        mask = shift_left(rows.supervised & rows.teacher_covered, i) & in_chat
        mask = mask & (rows.segments > 0)
        right = jnp.argmax(output.logits, -1) == jnp.argmax(teacher, -1)
        losses.append(masked_mean(kl_divergence(teacher, output.logits), mask))
        accuracy.append(masked_mean(right.astype(jnp.float32), mask))
        counts.append(jnp.sum(mask))
        hidden = output.hidden
        block_kv = output.fresh_kv if block_kv is None else block_kv.concat(output.fresh_kv)

    each = jnp.stack(losses)
    weights = decay ** jnp.arange(steps, dtype=jnp.float32)
    return UnrolledLoss(jnp.sum(weights * each), each, jnp.stack(accuracy), jnp.stack(counts))


def simulated_acceptance_length(accuracy: Float[Array, " steps"]) -> Float[Array, ""]:
    """1 + sum over i of the product of the accuracies up to i: committed tokens a step, chain."""
    return 1.0 + jnp.sum(jnp.cumprod(accuracy))
