"""A mixture of quantised experts; chooses the implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.implementation import Implementation
from pallas_kernels.int4_matmul.stack import Stack
from pallas_kernels.moe_int4 import reference


def moe_int4(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    gate: Stack,
    up: Stack,
    down: Stack,
    layer: Int[Array, ""] | int,
    *,
    bits: int = 4,
    group_size: int,
    implementation: Implementation = "reference",
) -> Float[Array, "T D"]:
    """See `reference.moe_int4`.

    Raises:
        ValueError: an implementation that this op does not have.
    """
    arguments = (x, expert_ids, expert_weights, gate, up, down, layer)
    if implementation == "reference":
        return reference.moe_int4(*arguments, bits=bits, group_size=group_size)
    if implementation == "triton":
        # Deferred: where nothing runs on it, the deprecated backend need not exist.
        from pallas_kernels.moe_int4 import triton

        return triton.moe_int4(*arguments, bits=bits, group_size=group_size)
    raise ValueError(
        f"moe_int4: implementation {implementation!r}: expected 'reference' or 'triton'"
    )
