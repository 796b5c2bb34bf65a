"""The kernels' weight layout: tiles of 8 columns, read from memory in one stream.

A matrix `[K, N]` is cut into N/8 tiles; a tile holds K/32 blocks, one a group of inputs. A block is

- INT4: 128 bytes of levels, 8 half-precision scales, 8 half-precision minima (160 bytes). Byte
  `32 j + 4 c + i` holds, for column c, the level of input `8 j + i` in its low nibble and of input
  `8 j + 4 + i` in its high one (j, i < 4);
- INT8: 256 bytes, byte `32 j + 4 c + i` the level of input `4 j + i` (j < 8), then 8 scales
  (272 bytes).

Symmetric INT4 (`(q - 8) * scale`) is stored with minimum `-8 * scale`.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

LANES, GROUP = 8, 32
BLOCK_BYTES = {4: 160, 8: 272}


def pack(
    levels: np.ndarray,
    scale: np.ndarray,
    minimum: np.ndarray | None,
    bits: Literal[4, 8],
) -> np.ndarray:
    """Packs one matrix on the host.

    Args:
        levels: `[K, N]`, uint8 0..15 (INT4) or int8.
        scale: `[K/32, N]`.
        minimum: like scale; None is symmetric.
        bits: 4 or 8.

    Returns:
        uint8 `[N/8, K/32, block]`.

    Raises:
        ValueError: the sizes do not fill whole blocks, scales do not fit half precision, or an INT8
            matrix has minima.
    """
    rows, columns = levels.shape
    if rows % GROUP or columns % LANES:
        raise ValueError(f"[{rows}, {columns}] does not fill blocks of {GROUP} by {LANES}")
    if bits == 8 and minimum is not None:
        raise ValueError("INT8 weights with minima have no packed layout")
    groups, tiles = rows // GROUP, columns // LANES
    if bits == 4:
        # [groups, j, half, i, tiles, c] -> [tiles, groups, j, c, i], two halves in one byte
        split = levels.reshape(groups, 4, 2, 4, tiles, LANES).transpose(4, 0, 1, 5, 3, 2)
        body = split[..., 0] | (split[..., 1] << 4)
        parts = [scale, -8 * scale if minimum is None else minimum]
    else:
        body = levels.reshape(groups, 8, 4, tiles, LANES).transpose(3, 0, 1, 4, 2)
        parts = [scale]
    pieces = [np.ascontiguousarray(body).reshape(tiles, groups, -1).view(np.uint8)]
    for part in parts:
        with np.errstate(over="ignore"):
            half = part.astype(np.float16)
        if not np.isfinite(half).all():
            raise ValueError("scales or minima exceed half precision")
        by_tile = half.reshape(groups, tiles, LANES).transpose(1, 0, 2)
        pieces.append(np.ascontiguousarray(by_tile).view(np.uint8))
    return np.concatenate(pieces, axis=-1)


def matrix_shape(blocks: UInt8[Array, "*lead tiles groups block"]) -> tuple[int, ...]:
    """`[..., K, N]` of the matrices that packed blocks stand for."""
    *lead, tiles, groups, _ = blocks.shape
    return (*lead, groups * GROUP, tiles * LANES)


def unpack_columns(
    blocks: UInt8[Array, "tiles groups block"], ids: Int[Array, "*rows"]
) -> Float[Array, "*rows K"]:
    """Dequantises single columns of one matrix: the embedding lookup of a tied head."""
    flat = ids.reshape(-1)
    tile, lane = flat // LANES, flat % LANES
    bits = 4 if blocks.shape[-1] == BLOCK_BYTES[4] else 8
    blocks = jnp.take(blocks, tile, axis=0, mode="clip")
    count, groups = blocks.shape[:2]
    size = 128 if bits == 4 else 256
    body = blocks[:, :, :size].reshape(count, groups, size // 32, LANES, 4)
    body = jnp.take_along_axis(body, lane[:, None, None, None, None], axis=3)[:, :, :, 0]

    def halves(start: int) -> Float[Array, "n k"]:
        pairs = blocks[:, :, start : start + 2 * LANES].reshape(count, groups, LANES, 2)
        column = jnp.take_along_axis(pairs, lane[:, None, None, None], axis=2)[:, :, 0]
        return jax.lax.bitcast_convert_type(column, jnp.float16).astype(jnp.float32)

    if bits == 4:
        levels = jnp.stack([body & 15, body >> 4], axis=3).reshape(count, groups, GROUP)
        values = levels.astype(jnp.float32) * halves(size)[..., None] + halves(size + 16)[..., None]
    else:
        signed = jax.lax.bitcast_convert_type(body, jnp.int8).reshape(count, groups, GROUP)
        values = signed.astype(jnp.float32) * halves(size)[..., None]
    return values.reshape(*ids.shape, groups * GROUP)
