"""Specification of the quantised matrix product: readable jnp, float32 throughout."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, UInt8


def pack_int4(q: UInt8[Array, "*a N"]) -> UInt8[Array, "*a M"]:
    """Packs nibbles (0..15) along the last axis, the even column in the low nibble; M = N/2."""
    return (q[..., 0::2] & 15) | (q[..., 1::2] << 4)


def unpack_int4(packed: UInt8[Array, "*a M"]) -> UInt8[Array, "*a N"]:
    """The inverse of `pack_int4`."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def affine(
    q: Num[Array, "*a K N"],
    scale: Float[Array, "*a k N"],
    minimum: Float[Array, "*a k N"] | None,
    *,
    bits: int,
    group_size: int,
) -> Float[Array, "*a K N"]:
    """Levels to weights: `(q - zero) * scale`, or `q * scale + minimum` where one is given.

    Zero is 8 for INT4 and 0 for INT8. Each row of scale and minimum serves group_size rows of q.
    """
    levels = q.astype(jnp.float32)
    rows = jnp.repeat(scale, group_size, axis=-2)
    if minimum is None:
        return (levels - (8.0 if bits == 4 else 0.0)) * rows
    return levels * rows + jnp.repeat(minimum, group_size, axis=-2)


def dequantise_arrays(
    values: UInt8[Array, "..."] | Int[Array, "..."],
    scale: Float[Array, "*a k N"],
    minimum: Float[Array, "*a k N"] | None,
    *,
    bits: int,
    group_size: int,
) -> Float[Array, "*a K N"]:
    """Packed values to float32 weights."""
    q = unpack_int4(values) if bits == 4 else values
    return affine(q, scale, minimum, bits=bits, group_size=group_size)


def int4_matmul(
    x: Float[Array, "*rows K"],
    values: UInt8[Array, "L K M"] | Int[Array, "L K N"],
    scale: Float[Array, "L k N"],
    minimum: Float[Array, "L k N"] | None,
    layer: Int[Array, ""] | int,
    *,
    bits: int,
    group_size: int,
) -> Float[Array, "*rows N"]:
    """`x @ dequantise(weights[layer])` with float32 accumulation.

    Args:
        x: activations.
        values: layer stack of packed levels: INT4 uint8 `[L, K, N/2]`, INT8 int8 `[L, K, N]`.
        scale: scale per group of inputs.
        minimum: minimum per group, or None for symmetric weights.
        layer: which matrix of the stack.
        bits: 4 or 8.
        group_size: inputs that share a scale.
    """
    weight = dequantise_arrays(
        values[layer],
        scale[layer],
        None if minimum is None else minimum[layer],
        bits=bits,
        group_size=group_size,
    )
    return jnp.matmul(x.astype(jnp.float32), weight, precision="highest")
