"""Specification of attention over a paged prefix and a fresh block: readable jnp, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    q: Float[Array, "B n H h"],
    fresh_k: Float[Array, "B m K h"],
    fresh_v: Float[Array, "B m K h"],
    ancestors: Bool[Array, "B n m"] | None,
    pages_k: Float[Array, "L P p K h"] | None = None,
    pages_v: Float[Array, "L P p K h"] | None = None,
    page_table: Int[Array, "B S"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int = 0,
) -> Float[Array, "B n H h"]:
    """Attends from n fresh rows to the committed prefix and to their ancestors in the fresh block.

    One op for prompt chunks, decoding, verification and drafting: only the mask differs. Query head
    `i` reads kv head `i // (H // K)`. Scores are scaled by `h**-0.5`; softmax over prefix and fresh
    rows together.

    Args:
        q: queries, rotary applied; the rows are the last n of the fresh block's m.
        fresh_k, fresh_v: keys and values of the fresh block, not in the cache.
        ancestors: which fresh rows a query sees (itself included), or None for causal.
        pages_k, pages_v: the layer-stacked page pool, or None where there is no prefix.
        page_table: pages of each sequence in order; out-of-range entries are clamped and must lie
            beyond `lengths`.
        lengths: committed tokens of each sequence; rows beyond are never read.
        layer: which layer of the pool.
    """
    batch, n, heads, width = q.shape
    m, kv_heads = fresh_k.shape[1:3]
    if ancestors is None:
        causal = jnp.arange(m)[None, :] <= (jnp.arange(n) + (m - n))[:, None]
        ancestors = jnp.broadcast_to(causal[None], (batch, n, m))
    keys, values, visible = fresh_k, fresh_v, ancestors
    if pages_k is not None:
        assert pages_v is not None and page_table is not None and lengths is not None  # noqa: PT018
        prefix_k, prefix_v = (
            pages.at[layer, page_table].get(mode="clip").reshape(batch, -1, kv_heads, width)
            for pages in (pages_k, pages_v)
        )
        committed = jnp.arange(prefix_k.shape[1])[None, :] < lengths[:, None]
        committed = jnp.broadcast_to(committed[:, None, :], (batch, n, committed.shape[1]))
        # A page beyond the length may hold anything, NaN too: clear it, since 0 * NaN is NaN.
        prefix_v = jnp.where(committed[:, 0, :, None, None], prefix_v, 0)
        keys = jnp.concatenate([prefix_k.astype(q.dtype), fresh_k], axis=1)
        values = jnp.concatenate([prefix_v.astype(q.dtype), fresh_v], axis=1)
        visible = jnp.concatenate([committed, ancestors], axis=2)

    grouped = q.reshape(batch, n, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bnkgh,bskh->bkgns", grouped, keys, precision="highest") * width**-0.5
    scores = jnp.where(visible[:, None, None], scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    # A row that sees nothing (padding) has all weights NaN; give it zeros instead.
    weights = jnp.where(visible[:, None, None], weights, 0)
    out = jnp.einsum("bkgns,bskh->bnkgh", weights, values, precision="highest")
    return out.reshape(batch, n, heads, width)
