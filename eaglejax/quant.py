"""INT4 and INT8 weights as a pytree, and the arithmetic that defines them."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt8

from cpu_kernels.packing import matrix_shape, pack, unpack_columns
from pallas_kernels.int4_matmul.reference import affine, dequantise_arrays, pack_int4

Layout = Literal["kn", "cpu8", "cpu8-float", "triton"]


class QuantTensor(struct.PyTreeNode):
    """A matrix `[..., K, N]` (K inputs, N outputs) quantised in groups along K.

    `w = (q - zero) * scale` with zero 8 for INT4 and 0 for INT8, or `w = q * scale + minimum` where
    a minimum is stored (GGUF Q4_1). INT4 stays packed in memory, two columns a byte, the even one
    in the low nibble, so that an INT4 array never exists and kernels bitcast as they like.

    Attributes:
        values: INT4: uint8 `[..., K, N/2]`; INT8: int8 `[..., K, N]`.
        scale: float32 `[..., K/group, N]`.
        minimum: like scale, or None.
        bits: 4 or 8.
        group_size: inputs that share a scale.
        layout: how `values` lies in memory. "kn" is the row-major layout above; "cpu8" is that of
            `cpu_kernels.packing`, with scales and minima inside `values`, for activations quantised
            to 8 bits; "cpu8-float" is the same for activations that stay float32. "triton" is "kn"
            for the GPU kernels.
    """

    values: UInt8[Array, "..."] | Int[Array, "..."]
    scale: Float[Array, "..."] | None
    minimum: Float[Array, "..."] | None
    bits: Literal[4, 8] = struct.field(pytree_node=False)
    group_size: int = struct.field(pytree_node=False)
    layout: Layout = struct.field(pytree_node=False, default="kn")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that is meant, `[..., K, N]`."""
        if self.scale is None:
            return matrix_shape(self.values)
        return (*self.values.shape[:-1], self.scale.shape[-1])

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def quantise(
    weight: Float[Array, "... K N"], *, bits: Literal[4, 8] = 4, group_size: int = 32
) -> QuantTensor:
    """Rounds to nearest: INT4 with scale and minimum per group, INT8 symmetric.

    Raises:
        ValueError: K is no multiple of group_size, or N is odd for INT4.
    """
    *lead, rows, columns = weight.shape
    if rows % group_size or (bits == 4 and columns % 2):
        raise ValueError(
            f"cannot quantise a [{rows}, {columns}] matrix to INT{bits} in groups of {group_size}: "
            "inputs must fill whole groups, and INT4 needs an even number of outputs"
        )
    grouped = weight.astype(jnp.float32).reshape(*lead, -1, group_size, columns)
    if bits == 8:
        scale = jnp.max(jnp.abs(grouped), axis=-2) / 127
        q = jnp.round(grouped / jnp.maximum(scale, 1e-30)[..., None, :])
        values = q.astype(jnp.int8).reshape(weight.shape)
        return QuantTensor(values, scale, None, bits=8, group_size=group_size)
    minimum = jnp.min(grouped, axis=-2)
    scale = (jnp.max(grouped, axis=-2) - minimum) / 15
    q = jnp.round((grouped - minimum[..., None, :]) / jnp.maximum(scale, 1e-30)[..., None, :])
    values = pack_int4(jnp.clip(q, 0, 15).astype(jnp.uint8).reshape(weight.shape))
    return QuantTensor(values, scale, minimum, bits=4, group_size=group_size)


def pack_for_cpu(weight: QuantTensor, *, quantised: bool = True) -> QuantTensor:
    """The same weights in the CPU kernels' layout; groups are cut to 32 inputs.

    Args:
        weight: in the row-major layout.
        quantised: for activations quantised to 8 bits; else for float32 ones.

    Raises:
        ValueError: the sizes do not fill the layout's blocks (32 inputs by 8 outputs).
    """
    layout: Layout = "cpu8" if quantised else "cpu8-float"
    if weight.scale is None:
        return weight.replace(layout=layout)
    *lead, rows, columns = weight.shape
    levels = np.asarray(weight.values)
    if weight.bits == 4:
        levels = np.stack([levels & 15, levels >> 4], axis=-1)
    levels = levels.reshape(-1, rows, columns)

    def per_group(x: Array | None) -> np.ndarray | None:
        if x is None:
            return None
        repeats = weight.group_size // 32
        return np.asarray(x).reshape(-1, rows // weight.group_size, columns).repeat(repeats, 1)

    scale, minimum = per_group(weight.scale), per_group(weight.minimum)
    assert scale is not None
    blocks = np.stack(
        [
            pack(levels[i], scale[i], None if minimum is None else minimum[i], weight.bits)
            for i in range(len(levels))
        ]
    )
    blocks = jnp.asarray(blocks.reshape(*lead, *blocks.shape[1:]))
    return QuantTensor(blocks, None, None, bits=weight.bits, group_size=32, layout=layout)


def dequantise(weight: QuantTensor) -> Float[Array, "... K N"]:
    """The float32 matrix that a QuantTensor stands for.

    Raises:
        ValueError: it is packed for a kernel; dequantise before packing.
    """
    if weight.scale is None:
        raise ValueError(f"weights of layout {weight.layout!r} are not dequantised")
    return dequantise_arrays(
        weight.values,
        weight.scale,
        weight.minimum,
        bits=weight.bits,
        group_size=weight.group_size,
    )


def take_columns(weight: QuantTensor, ids: Int[Array, "..."]) -> Float[Array, "... K"]:
    """Dequantises single columns of a `[K, N]` matrix: the embedding lookup of a tied head."""
    if weight.scale is None:
        return unpack_columns(weight.values, ids)
    flat = ids.reshape(-1)

    def columns(array: Array, index: Array) -> Array:
        return jnp.take(array, index, axis=1, mode="clip")

    if weight.bits == 4:
        # Two columns share a byte; each id's own nibble becomes a one-column matrix.
        byte = columns(weight.values, flat // 2)
        values = jnp.where(flat[None] % 2 == 0, byte & 15, byte >> 4)
    else:
        values = columns(weight.values, flat)
    assert weight.scale is not None
    scale = columns(weight.scale, flat)
    minimum = None if weight.minimum is None else columns(weight.minimum, flat)
    rows = affine(values, scale, minimum, bits=weight.bits, group_size=weight.group_size).T
    return rows.reshape(*ids.shape, -1)
