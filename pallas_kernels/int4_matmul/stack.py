"""One quantised matrix of every layer, as kernels take it."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt8


class Stack(NamedTuple):
    """Weights of all layers (and experts) in the row-major layout of `reference`.

    Attributes:
        values: INT4: uint8 `[..., K, N/2]`, the even column in the low nibble; INT8: int8
            `[..., K, N]`.
        scale: `[..., K/group, N]`, float32, float16 or bfloat16.
        minimum: like scale, or None for symmetric weights.
    """

    values: UInt8[Array, "..."] | Int[Array, "..."]
    scale: Float[Array, "..."]
    minimum: Float[Array, "..."] | None = None
