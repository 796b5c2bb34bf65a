"""Attention over a paged prefix and a fresh block; chooses the implementation."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

import cpu_kernels
from pallas_kernels.implementation import Implementation
from pallas_kernels.tree_attention import reference


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
    *,
    implementation: Implementation = "reference",
) -> Float[Array, "B n H h"]:
    """See `reference.tree_attention`."""
    run = cpu_kernels.tree_attention if implementation == "cpu" else reference.tree_attention
    return run(q, fresh_k, fresh_v, ancestors, pages_k, pages_v, page_table, lengths, layer)
