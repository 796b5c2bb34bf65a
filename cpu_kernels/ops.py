"""The kernels as JAX functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from cpu_kernels.library import load
from cpu_kernels.packing import matrix_shape

LayerIndex = Int[Array, ""] | int


def _index(layer: LayerIndex) -> Int[Array, ""]:
    return jnp.asarray(layer, jnp.int32)


def matmul(
    x: Float[Array, "*rows K"],
    blocks: UInt8[Array, "L tiles groups block"],
    layer: LayerIndex = 0,
) -> Float[Array, "*rows N"]:
    """`x @ matrix[layer]`, activations quantised to 8 bits in groups of 32.

    Args:
        x: activations.
        blocks: a layer stack as `cpu_kernels.packing` lays it out; the block size tells the bits.
        layer: which matrix.
    """
    load()
    result = jax.ShapeDtypeStruct((*x.shape[:-1], matrix_shape(blocks)[-1]), jnp.float32)
    return jax.ffi.ffi_call("eaglejax_matmul", result)(x, blocks, _index(layer))


def rms_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, "L D"], layer: LayerIndex, eps: float
) -> Float[Array, "*rows D"]:
    """`x / sqrt(mean(x**2) + eps) * scale[layer]`."""
    load()
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    call = jax.ffi.ffi_call("eaglejax_rms_norm", result)
    return call(x, scale, _index(layer), eps=np.float32(eps))


def swiglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """`silu(gate) * up`."""
    load()
    return jax.ffi.ffi_call("eaglejax_swiglu", jax.ShapeDtypeStruct(gate.shape, jnp.float32))(
        gate, up
    )


def tree_attention(
    q: Float[Array, "B n H h"],
    fresh_k: Float[Array, "B m K h"],
    fresh_v: Float[Array, "B m K h"],
    ancestors: Bool[Array, "B n m"] | None,
    pages_k: Float[Array, "L P p K h"] | None = None,
    pages_v: Float[Array, "L P p K h"] | None = None,
    page_table: Int[Array, "B S"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    layer: LayerIndex = 0,
) -> Float[Array, "B n H h"]:
    """See `pallas_kernels.tree_attention.reference`, the specification."""
    load()
    result = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    mask = jnp.zeros((0,), bool) if ancestors is None else ancestors
    if pages_k is None:
        return jax.ffi.ffi_call("eaglejax_attention_fresh", result)(q, fresh_k, fresh_v, mask)
    call = jax.ffi.ffi_call("eaglejax_attention_paged", result)
    prefix = (pages_k, pages_v, page_table, lengths, _index(layer))
    return call(q, fresh_k, fresh_v, mask, *prefix)
