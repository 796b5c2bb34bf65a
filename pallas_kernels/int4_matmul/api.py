"""Quantised matrix product. The weights' layout says which implementation they were packed for."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, UInt8

import cpu_kernels
from pallas_kernels.int4_matmul import reference


def int4_matmul(
    x: Float[Array, "*rows K"],
    values: UInt8[Array, "..."] | Int[Array, "..."],
    scale: Float[Array, "L k N"] | None,
    minimum: Float[Array, "L k N"] | None,
    layer: Int[Array, ""] | int,
    *,
    bits: int,
    group_size: int,
    layout: str = "kn",
) -> Float[Array, "*rows N"]:
    """`x @ dequantise(weights[layer])`; see `reference.int4_matmul`.

    Args:
        layout: "kn", the row-major layout of the reference, or "cpu8", the tiles of
            `cpu_kernels.packing`, whose product quantises the activations to 8 bits.

    Raises:
        ValueError: another layout.
    """
    if layout == "cpu8":
        return cpu_kernels.matmul(x, values, layer)
    if layout != "kn" or scale is None:
        raise ValueError(f"int4_matmul: layout {layout!r}: expected 'kn' with scales, or 'cpu8'")
    return reference.int4_matmul(x, values, scale, minimum, layer, bits=bits, group_size=group_size)
