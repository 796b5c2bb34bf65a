"""Attention over a paged prefix and a fresh block; chooses the implementation."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

import cpu_kernels
from pallas_kernels.implementation import Implementation
from pallas_kernels.tree_attention import reference


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
    implementation: Implementation = "reference",
) -> Float[Array, "B n H o"]:
    """See `reference.tree_attention`.

    Raises:
        ValueError: what the implementation cannot do; names it.
    """
    prefix = (pages_k, pages_v, page_table, lengths, layer)
    if implementation == "cpu":
        if value_width is not None or scale is not None or fresh_v is None:
            raise ValueError(
                f"tree_attention: value_width {value_width} and scale {scale}: the CPU kernel "
                "has neither"
            )
        return cpu_kernels.tree_attention(q, fresh_k, fresh_v, ancestors, *prefix)
    run = reference.tree_attention
    if implementation == "triton":
        # Here, so that nothing but a GPU's engine loads the deprecated backend.
        from pallas_kernels.tree_attention import triton

        run = triton.tree_attention
    return run(q, fresh_k, fresh_v, ancestors, *prefix, value_width=value_width, scale=scale)
