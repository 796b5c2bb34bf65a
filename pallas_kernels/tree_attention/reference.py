"""Specification of attention over a paged prefix and a fresh block: readable jnp, float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def tree_attention(
    q: Float[Array, "B n H h"],
    fresh_k: Float[Array, "B m K h"],
    fresh_v: Float[Array, "B m K v"] | None,
    ancestors: Bool[Array, "B n m"] | None,
    pages_k: Float[Array, "L P p K h"] | None = None,
    pages_v: Float[Array, "L P p K v"] | None = None,
    page_table: Int[Array, "B S"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int = 0,
    *,
    value_width: int | None = None,
    scale: float | None = None,
) -> Float[Array, "B n H o"]:
    """Attends from n fresh rows to the committed prefix and to their ancestors in the fresh block.

    One op for prompt chunks, decoding, verification and drafting: only the mask differs. Query head
    `i` reads kv head `i // (H // K)`. Softmax over prefix and fresh rows together. Values may be
    the first entries of the keys: latent attention (MLA, arXiv 2405.04434) in its absorbed form is
    one kv head with keys of 512 + 64 entries, of which the 512 are the values.

    Everything is float32 inside; the result has q's dtype.

    Args:
        q: queries, rotary applied; the rows are the last n of the fresh block's m.
        fresh_k, fresh_v: keys and values of the fresh block, not in the cache; no values where
            `value_width` is given.
        ancestors: which fresh rows a query sees (itself included), or None for causal.
        pages_k, pages_v: the layer-stacked page pool, or None where there is no prefix (and no
            `pages_v` where `value_width` is given).
        page_table: pages of each sequence in order; out-of-range entries are clamped and must lie
            beyond `lengths`.
        lengths: committed tokens of each sequence; rows beyond are never read.
        layer: which layer of the pool.
        value_width: values are this many first entries of the keys.
        scale: of the scores; by default `h**-0.5`.
    """
    batch, n, heads, width = q.shape
    m, kv_heads = fresh_k.shape[1:3]
    factor = width**-0.5 if scale is None else scale
    if fresh_v is None:
        fresh_v, pages_v = fresh_k[..., :value_width], pages_k
    value_width = fresh_v.shape[-1]
    if ancestors is None:
        causal = jnp.arange(m)[None, :] <= (jnp.arange(n) + (m - n))[:, None]
        ancestors = jnp.broadcast_to(causal[None], (batch, n, m))
    keys, values, visible = fresh_k, fresh_v, ancestors
    if pages_k is not None:
        assert pages_v is not None and page_table is not None and lengths is not None  # noqa: PT018
        prefix_k, prefix_v = (
            pages.at[layer, page_table].get(mode="clip").reshape(batch, -1, kv_heads, columns)
            for pages, columns in ((pages_k, width), (pages_v, pages_v.shape[-1]))
        )
        prefix_v = prefix_v[..., :value_width]
        committed = jnp.arange(prefix_k.shape[1])[None, :] < lengths[:, None]
        committed = jnp.broadcast_to(committed[:, None, :], (batch, n, committed.shape[1]))
        # A page beyond the length may hold anything, NaN too: clear it, since 0 * NaN is NaN.
        prefix_v = jnp.where(committed[:, 0, :, None, None], prefix_v, 0)
        keys = jnp.concatenate([prefix_k.astype(q.dtype), fresh_k], axis=1)
        values = jnp.concatenate([prefix_v.astype(q.dtype), fresh_v], axis=1)
        visible = jnp.concatenate([committed, ancestors], axis=2)

    grouped = q.reshape(batch, n, kv_heads, heads // kv_heads, width)
    # Products and sums in float32, whatever the arrays are: their dtype alone would round scores.
    wide: Any = {"precision": "highest", "preferred_element_type": jnp.float32}
    scores = jnp.einsum("bnkgh,bskh->bkgns", grouped, keys, **wide) * factor
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    # A row that sees nothing (padding) has all weights NaN; give it zeros instead.
    weights = jnp.where(visible[:, None, None], weights, 0)
    out = jnp.einsum("bkgns,bskh->bnkgh", weights, values.astype(jnp.float32), **wide)
    return out.reshape(batch, n, heads, value_width).astype(q.dtype)
