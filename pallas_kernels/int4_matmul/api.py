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
        layout: "kn", the row-major layout of the reference; "cpu8", the tiles of
            `cpu_kernels.packing`, whose product quantises the activations to 8 bits; "cpu8-float",
            the same tiles with float32 activations.

    Raises:
        ValueError: another layout.
    """
    if layout in ("cpu8", "cpu8-float"):
        return cpu_kernels.matmul(x, values, layer, quantised=layout == "cpu8")
    if layout != "kn" or scale is None:
        raise ValueError(
            f"int4_matmul: layout {layout!r}: expected 'kn' with scales, 'cpu8' or 'cpu8-float'"
        )
    return reference.int4_matmul(x, values, scale, minimum, layer, bits=bits, group_size=group_size)
