"""The kernels as JAX functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    *,
    quantised: bool = True,
) -> Float[Array, "*rows N"]:
    """`x @ matrix[layer]`.

    Args:
        x: activations.
        blocks: a layer stack as `cpu_kernels.packing` lays it out; the block size tells the bits.
        layer: which matrix.
        quantised: activations are quantised to 8 bits in groups of 32; else they stay float32.
    """
    load()
    result = jax.ShapeDtypeStruct((*x.shape[:-1], matrix_shape(blocks)[-1]), jnp.float32)
    call = jax.ffi.ffi_call("eaglejax_matmul", result)
    return call(x, blocks, _index(layer), quantised=quantised)


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


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def decoder(
    x: Float[Array, "B n D"],
    cos: Float[Array, "B n a"],
    sin: Float[Array, "B n a"],
    ancestors: Bool[Array, "B n m"] | None,
    matrices: Mapping[str, UInt8[Array, "L tiles groups block"]],
    attention_norm: Float[Array, "L D"] | None,
    mlp_norm: Float[Array, "L D"],
    *,
    eps: float,
    feature_layers: Sequence[int] = (),
    inputs: Float[Array, "B n A"] | None = None,
    block: tuple[Float[Array, "B b K h"], Float[Array, "B b K h"]] | None = None,
    prefix: tuple[Array, Array, Array, Array] | None = None,
) -> tuple[
    Float[Array, "B n D"],
    Float[Array, "B n F"],
    Float[Array, "L B n K h"],
    Float[Array, "L B n K h"],
]:
    """A whole stack of Llama-type decoder layers over fresh rows, in one call.

    Args:
        x: the residual stream.
        cos, sin: rotary angles, a = h/2.
        ancestors: which of the m rows (block first, then the n own) each row sees; None is causal.
        matrices: packed stacks by name, `MATRICES`.
        attention_norm: scales, or None where `inputs` are given.
        mlp_norm: scales.
        eps: of the norms.
        feature_layers: layers whose residual stream is returned, side by side.
        inputs: what q, k and v of a single layer project in place of the normalised stream.
        block: keys and values of rows before the n own, in a single layer.
        prefix: pages of keys and of values `[L, P, p, K, h]`, page table `[B, S]`, lengths `[B]`.

    Returns:
        the residual stream after the last layer, the features, and the rows' keys and values.

    Raises:
        jax.errors.JaxRuntimeError: sizes that do not fit each other (hidden size, MLP width and
            head size must be multiples of 32), or a page id out of range.
    """
    load()
    batch, rows, hidden = x.shape
    width = 2 * cos.shape[-1]
    layers = mlp_norm.shape[0]
    fresh = (layers, batch, rows, matrix_shape(matrices["k"])[-1] // width, width)
    shapes = (x.shape, (batch, rows, len(feature_layers) * hidden), fresh, fresh)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    nothing = jnp.zeros((0,))
    none = (nothing, nothing)
    pages = (*none, *none) if prefix is None else prefix
    stream, features, k, v = jax.ffi.ffi_call("eaglejax_decoder", results)(
        x,
        nothing if inputs is None else inputs,
        cos,
        sin,
        jnp.zeros((0,), bool) if ancestors is None else ancestors,
        *(none if block is None else block),
        *pages,
        nothing if attention_norm is None else attention_norm,
        mlp_norm,
        *(matrices[name] for name in MATRICES),
        eps=np.float32(eps),
        feature_layers=np.asarray(feature_layers, np.int64),
    )
    return stream, features, k, v


def argmax(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The id of each row's largest logit, the lowest among equals; of the first not-a-number."""
    load()
    result = jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)
    return jax.ffi.ffi_call("eaglejax_argmax", result)(logits)


def top_k(
    logits: Float[Array, "*rows V"], k: int
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Log-probabilities and ids of the k likeliest, best first, the lower id among equals."""
    load()
    shape = (*logits.shape[:-1], k)
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    scores, ids = jax.ffi.ffi_call("eaglejax_top_k", results)(logits)
    return scores, ids


def sample(
    logits: Float[Array, "B N V"],
    coins: Float[Array, "B N"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> Int[Array, "B N"]:
    """A token for every row: `eaglejax.sampling.process` and `inverse_cdf` in one pass.

    Thresholds are found by a histogram over the bits of a float, so no vocabulary is sorted.
    Weights below exp(-87) of the largest count as 0. A row whose largest logit is not finite gives
    its arg-max, as a temperature below 1e-4 does.
    """
    load()
    result = jax.ShapeDtypeStruct(coins.shape, jnp.int32)
    call = jax.ffi.ffi_call("eaglejax_sample", result)
    return call(logits, coins, temperature, top_k, top_p, min_p)


def commit(
    pages_k: Float[Array, "L P p K h"],
    pages_v: Float[Array, "L P p K h"],
    fresh_k: Float[Array, "L B n K h"],
    fresh_v: Float[Array, "L B n K h"],
    page_table: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    path: Int[Array, "B m"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "L P p K h"], Float[Array, "L P p K h"]]:
    """See `eaglejax.cache.commit`; in place where the pools are donated."""
    load()
    pools = [jax.ShapeDtypeStruct(pool.shape, jnp.float32) for pool in (pages_k, pages_v)]
    call = jax.ffi.ffi_call("eaglejax_commit", pools, input_output_aliases={0: 0, 1: 1})
    integers = (x.astype(jnp.int32) for x in (page_table, lengths, path, count))
    k, v = call(pages_k, pages_v, fresh_k, fresh_v, *integers)
    return k, v
