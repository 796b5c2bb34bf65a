"""The drafter's side of a step: absorbing committed tokens, and growing the draft tree.

To absorb a token is to commit the drafter's key and value of the pair (true feature of position t,
token t+1). A one-layer drafter needs only its projections for that; query, attention, MLP and head
run for the last pair alone. Rows that the drafter makes from its own guesses are never committed.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from eaglejax.cache import PagedCache, commit
from eaglejax.config import SpecPlan
from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter
from eaglejax.models.layers import FreshKV
from eaglejax.state import EngineState, SlotRows
from eaglejax.tree import Tree, first_level, next_level, select


@runtime_checkable
class Draft(Protocol):
    """Grows a tree for each slot and absorbs what is pending.

    Returns:
        the tree (root included), the drafter's cache, and the absorbed lengths.
    """

    def __call__(
        self,
        drafter: Drafter | None,
        variables: Any,
        state: EngineState,
        slots: Int[Array, " B"],
        rows: SlotRows,
        plan: SpecPlan,
    ) -> tuple[Tree, PagedCache | None, Int[Array, " B"]]: ...


class Pending(struct.PyTreeNode):
    """The pending pairs of each slot, projected; the first `count` rows are real."""

    hidden: Float[Array, "B R D"]
    tokens: Int[Array, "B R"]
    positions: Int[Array, "B R"]
    kv: FreshKV
    count: Int[Array, " B"]

    @classmethod
    def read(
        cls,
        drafter: Drafter,
        variables: Any,
        state: EngineState,
        slots: Int[Array, " B"],
        rows: SlotRows,
        limit: int,
    ) -> Pending:
        """Reads up to `limit` pairs from the ring and projects their keys and values."""
        assert state.ring is not None
        number = jnp.arange(limit)[None]
        count = rows.lengths - rows.absorbed
        positions = rows.absorbed[:, None] + number
        features, tokens = state.ring.read(slots, positions)
        # What is not pending may be anything, NaN too: clear it, since 0 * NaN is NaN.
        features = jnp.where((number < count[:, None])[..., None], features, 0)
        hidden = apply(drafter, variables, features, method="fuse")
        kv = apply(drafter, variables, hidden, tokens, positions, method="project_kv")
        return cls(hidden, tokens, positions, kv, count)

    def commit(
        self, state: EngineState, rows: SlotRows, count: Int[Array, " B"]
    ) -> tuple[PagedCache, Int[Array, " B"]]:
        """Absorbs the first `count` pairs of each slot."""
        assert state.draft is not None
        path = jnp.broadcast_to(jnp.arange(self.tokens.shape[1])[None], self.tokens.shape)
        cache = commit(
            state.draft, self.kv.k, self.kv.v, rows.page_table, rows.absorbed, path, count
        )
        return cache, rows.absorbed + count


def absorb_chunk(
    drafter: Drafter,
    variables: Any,
    state: EngineState,
    slots: Int[Array, " B"],
    rows: SlotRows,
    features: Float[Array, "B C F"],
    tokens: Int[Array, "B C"],
    counts: Int[Array, " B"],
    following: Int[Array, " B"],
) -> tuple[EngineState, Int[Array, " B"]]:
    """Absorbs a prompt chunk; its last feature stays pending.

    The pairs of a chunk that starts at position s are those of positions s-1 .. s+C-2: the feature
    that the chunk before left pending, then the chunk's own, each with the chunk's token after it.

    Args:
        features, tokens, counts: the chunk.
        following: the token after the chunk where it is known (the sampled one).

    Returns:
        the state with new drafter cache and ring, and the absorbed lengths.
    """
    assert state.ring is not None
    assert state.draft is not None
    start = rows.lengths
    carried, _ = state.ring.read(slots, (start - 1)[:, None])
    shifted = jnp.concatenate([carried, features[:, :-1]], axis=1)
    steps = jnp.arange(tokens.shape[1])[None]
    positions = jnp.maximum(start[:, None] - 1 + steps, 0)
    hidden = apply(drafter, variables, shifted, method="fuse")
    kv = apply(drafter, variables, hidden, tokens, positions, method="project_kv")
    # A prompt's first token has no feature before it, and after a reused prefix the row of the
    # feature before the chunk is in the cache already: the first row is skipped.
    first = (rows.absorbed == start).astype(jnp.int32)
    count = jnp.maximum(counts - first, 0)
    path = steps + first[:, None]
    draft = commit(state.draft, kv.k, kv.v, rows.page_table, rows.absorbed, path, count)
    last = jnp.maximum(counts - 1, 0)
    feature = jnp.take_along_axis(features, last[:, None, None], axis=1)
    ring = state.ring.write(
        slots, start + last, feature, following[:, None], jnp.minimum(counts, 1)
    )
    return state.replace(draft=draft, ring=ring), rows.absorbed + count


def eagle3(
    drafter: Drafter | None,
    variables: Any,
    state: EngineState,
    slots: Int[Array, " B"],
    rows: SlotRows,
    plan: SpecPlan,
) -> tuple[Tree, PagedCache | None, Int[Array, " B"]]:
    """EAGLE-3 drafting: a chain for width 1, else the dynamic tree of EAGLE-2.

    Every draft row sees the absorbed prefix, the pending pairs, and its own path; its rotary
    position is the root's feature position plus its depth.
    """
    assert drafter is not None
    assert state.draft is not None
    pending = Pending.read(drafter, variables, state, slots, rows, plan.depth + 1)
    view = state.draft.view(rows.page_table, rows.absorbed)
    number = jnp.arange(plan.depth + 1)[None]
    last = jnp.maximum(pending.count - 1, 0)[:, None]

    # The last pair again, as a query: it sees the pairs before it and itself.
    hidden = jnp.take_along_axis(pending.hidden, last[..., None], axis=1)
    sees = jnp.concatenate([number < last, jnp.ones_like(last, bool)], axis=1)[:, None]
    at = jnp.take_along_axis(pending.positions, last, axis=1)
    output = apply(drafter, variables, hidden, rows.root[:, None], at, sees, view, pending.kv)

    candidates, frontier = first_level(output.logits[:, 0], plan.width, kernels=drafter.kernels)
    hidden = jnp.repeat(output.hidden, plan.width, axis=1)
    block = pending.kv
    # What a frontier row sees: all pending pairs, then its own path among the drafted rows.
    path = jnp.repeat((number <= last)[:, None], plan.width, axis=1)
    itself = jnp.repeat(jnp.eye(plan.width, dtype=bool)[None], len(slots), axis=0)
    for level in range(1, plan.depth):
        path = jnp.concatenate([path, itself], axis=2)
        output = apply(
            drafter,
            variables,
            hidden,
            apply(drafter, variables, frontier.tokens, method="to_target"),
            jnp.broadcast_to(at + level, frontier.tokens.shape),
            path,
            view,
            block,
        )
        block = block.concat(output.fresh_kv)
        candidates, frontier = next_level(
            output.logits, frontier, candidates, kernels=drafter.kernels
        )
        hidden = _gather_rows(output.hidden, frontier.parent_slot)
        path = _gather_rows(path, frontier.parent_slot)

    tokens, parents = select(candidates, plan)
    tokens = apply(drafter, variables, tokens, method="to_target")
    root = jnp.zeros_like(rows.root)[:, None]
    tree = Tree.build(
        jnp.concatenate([rows.root[:, None], tokens], axis=1),
        jnp.concatenate([root, parents], axis=1),
        plan.depth,
    )
    # No draft is negative, so this changes no value. It makes absorbing wait for the drafts, which
    # read the pool: XLA copies a pool that is written while something else may still read it.
    drafted = jnp.min(tokens, axis=1) >= 0
    cache, absorbed = pending.commit(
        state, rows, jnp.where(rows.active & drafted, pending.count, 0)
    )
    return tree, cache, absorbed


def _gather_rows(x: Array, index: Int[Array, "B k"]) -> Array:
    """`x[b, index[b]]` for x `[B, n, ...]`."""
    return jnp.take_along_axis(x, index[:, :, None], axis=1)
