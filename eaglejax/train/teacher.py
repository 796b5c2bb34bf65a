"""What the frozen target teaches: features, and logits on the draft vocabulary only.

The full-vocabulary logits are never one array: at 128k tokens they would be the largest thing in
memory by far. The arg-max over the vocabulary, which decides whether a row can be learnt at all,
is taken in slices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eaglejax.models.apply import apply
from eaglejax.models.target import Target, TargetOutput
from eaglejax.train.data import Batch
from eaglejax.train.loss import DraftRows, shift_left

SLICE = 4096  # vocabulary entries of one slice of the arg-max


class TeacherHead(struct.PyTreeNode):
    """The target's output head and the part of it that the draft vocabulary keeps.

    Attributes:
        full: one row a token.
        draft: the rows of the draft vocabulary.
        kept: which tokens are in it (t2d).
    """

    full: Float[Array, "V D"]
    draft: Float[Array, "v D"]
    kept: Bool[Array, " V"]

    @classmethod
    def create(cls, full: Float[Array, "V D"], target_ids: Int[Array, " v"]) -> TeacherHead:
        kept = jnp.zeros(full.shape[0], bool).at[target_ids].set(True)
        return cls(full, jnp.take(full, target_ids, axis=0), kept)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T v"]:
        return jnp.einsum("btd,vd->btv", hidden, self.draft, precision="highest")

    def covered(self, hidden: Float[Array, "B T D"]) -> Bool[Array, "B T"]:
        """Whether the arg-max over the full vocabulary is a token of the draft vocabulary."""
        vocab = self.full.shape[0]
        size = min(SLICE, vocab)

        def best_of(start: Int[Array, ""]) -> tuple[Array, Array]:
            part = jax.lax.dynamic_slice_in_dim(self.full, start, size, axis=0)
            logits = jnp.einsum("btd,vd->btv", hidden, part, precision="highest")
            return jnp.max(logits, axis=-1), start + jnp.argmax(logits, axis=-1)

        # The last slice may overlap the one before it; a maximum does not mind.
        starts = jnp.minimum(jnp.arange(-(-vocab // size)) * size, vocab - size)
        values, ids = jax.lax.map(best_of, starts)
        winner = jnp.argmax(values, axis=0)
        best = jnp.take_along_axis(ids, winner[None], axis=0)[0]
        return self.kept[best]


def teach(target: Target, params: Any, head: TeacherHead, batch: Batch) -> DraftRows:
    """Runs the target over packed chats and aligns everything to the drafter's rows."""
    same_chat = batch.segments[:, :, None] == batch.segments[:, None, :]
    length = batch.tokens.shape[1]
    ancestors = same_chat & jnp.tril(jnp.ones((1, length, length), bool))
    output: TargetOutput = apply(target, params, batch.tokens, batch.positions, ancestors)
    # Row t pairs the feature of t with what belongs to t+1; across a chat's end nothing is taught.
    hidden = shift_left(output.hidden, 1)
    within = shift_left(batch.segments, 1) == batch.segments
    rows = DraftRows(
        features=output.features,
        tokens=shift_left(batch.tokens, 1),
        teacher=head.logits(hidden),
        teacher_covered=head.covered(hidden),
        supervised=shift_left(batch.supervised, 1) & within,
        positions=batch.positions,
        segments=batch.segments,
    )
    return jax.lax.stop_gradient(rows)
