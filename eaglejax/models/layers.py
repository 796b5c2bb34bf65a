"""The building blocks shared by target and drafter, as Linen modules.

Every module of a layer stack owns the weights of *all* layers, `[L, ...]`, and takes the layer's
index: kernels get stack and index, so no layer is ever sliced out and copied before a call. Weights
are float arrays or QuantTensors; which one is decided by whoever built the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eaglejax.cache import CacheView
from eaglejax.models.rotary import apply_rotary
from eaglejax.quant import QuantTensor, take_columns
from pallas_kernels.implementation import Implementation
from pallas_kernels.int4_matmul.api import gated_matmul, int4_matmul
from pallas_kernels.int4_matmul.stack import Stack
from pallas_kernels.rms_norm.api import rms_norm
from pallas_kernels.swiglu.api import swiglu
from pallas_kernels.tree_attention.api import tree_attention

LayerIndex = Int[Array, ""] | int
DENSE_ROWS = 64  # rows of a bfloat16 product are padded to multiples of this


class FreshKV(struct.PyTreeNode):
    """Keys (rotary applied) and values of rows that are not in the cache.

    One layer: `[B, N, K, h]`; a layer stack: `[L, B, N, K, h]`.
    """

    k: Float[Array, "..."]
    v: Float[Array, "..."]

    def concat(self, other: FreshKV) -> FreshKV:
        """Rows of `other` after these (row axis: third from the end)."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-3), self, other)


def dense(
    x: Float[Array, "*rows K"], weight: Float[Array, "K N"], dtype: Any
) -> Float[Array, "*rows N"]:
    """`x @ weight` with float32 accumulation, for weights that are not quantised.

    Args:
        x: rows, float32 or bfloat16.
        weight: taken in x's own type.
        dtype: of the result.
    """
    if x.dtype != jnp.bfloat16:
        return jnp.matmul(x, weight, precision="highest").astype(dtype)
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    # One shape for 1 to 64 rows, so that decoding and verifying run the same program here and give
    # a row the same bits; the weights are read once either way.
    rows = jnp.pad(rows, ((0, -count % DENSE_ROWS), (0, 0)))
    out = jnp.matmul(rows, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return out[:count].astype(dtype).reshape(*x.shape[:-1], -1)


class Linear(nn.Module):
    """`x @ kernel[layer]` without bias; kernel `[L, K, N]`, float or quantised.

    Attributes:
        features: N.
        layers: L.
        dtype: of the result; None is x's own.
    """

    features: int
    layers: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*rows K"],
        layer: LayerIndex = 0,
        residual: Float[Array, "*rows N"] | None = None,
    ) -> Float[Array, "*rows N"]:
        """The product, and a residual stream added to it before it is rounded."""
        kernel = self._kernel(x.shape[-1])
        dtype = self.dtype or x.dtype
        if isinstance(kernel, QuantTensor):
            return int4_matmul(
                x,
                kernel.values,
                kernel.scale,
                kernel.minimum,
                layer,
                bits=kernel.bits,
                group_size=kernel.group_size,
                layout=kernel.layout,
                out_dtype=dtype,
                residual=residual,
            )
        out = dense(x, kernel[layer], dtype)
        return out if residual is None else residual + out

    def _kernel(self, inputs: int) -> Array | QuantTensor:
        # `self.param` would compare a QuantTensor with the float shape and refuse it.
        if self.has_variable("params", "kernel"):
            return self.get_variable("params", "kernel")
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        return self.param("kernel", init, (self.layers, inputs, self.features))


class RMSNorm(nn.Module):
    """`x / rms(x) * scale[layer]`, variance in float32 (arXiv 1910.07467)."""

    eps: float
    layers: int = 1
    kernels: Implementation = "reference"

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"], layer: LayerIndex = 0) -> Array:
        scale = self.param("scale", nn.initializers.ones, (self.layers, x.shape[-1]))
        return rms_norm(x, scale, layer, self.eps, implementation=self.kernels)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))` (arXiv 2002.05202)."""

    intermediate_size: int
    layers: int = 1
    kernels: Implementation = "reference"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "*rows D"],
        layer: LayerIndex = 0,
        residual: Float[Array, "*rows D"] | None = None,
    ) -> Float[Array, "*rows D"]:
        params = self.variables.get("params", {})
        gate, up = (params.get(name, {}).get("kernel") for name in ("gate", "up"))
        if _one_kernel(gate, up):
            gated = gated_matmul(
                x,
                Stack(gate.values, gate.scale, gate.minimum),
                Stack(up.values, up.scale, up.minimum),
                layer,
                bits=gate.bits,
                group_size=gate.group_size,
                layout=gate.layout,
            )
        else:
            gate = Linear(self.intermediate_size, self.layers, name="gate")(x, layer)
            up = Linear(self.intermediate_size, self.layers, name="up")(x, layer)
            gated = swiglu(gate, up, implementation=self.kernels)
        return Linear(x.shape[-1], self.layers, name="down")(gated, layer, residual)


def _one_kernel(gate: Any, up: Any) -> bool:
    """Whether gate and up are weights that one GPU kernel reads together."""
    if not (isinstance(gate, QuantTensor) and isinstance(up, QuantTensor)):
        return False
    alike = (gate.bits, gate.group_size, gate.minimum is None) == (
        up.bits,
        up.group_size,
        up.minimum is None,
    )
    return alike and gate.layout == up.layout == "triton"


class Attention(nn.Module):
    """Grouped-query attention over committed pages and the fresh block (arXiv 2305.13245).

    The input may be wider than the output (a drafter's rows are [embedding | hidden]).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    out_features: int
    layers: int = 1
    kernels: Implementation = "reference"

    def setup(self) -> None:
        self.q = Linear(self.num_heads * self.head_dim, self.layers)
        self.k = Linear(self.num_kv_heads * self.head_dim, self.layers)
        self.v = Linear(self.num_kv_heads * self.head_dim, self.layers)
        self.o = Linear(self.out_features, self.layers)

    def project_kv(
        self,
        x: Float[Array, "B N D"],
        rotary: tuple[Float[Array, "B N a"], Float[Array, "B N a"]],
        layer: LayerIndex = 0,
    ) -> FreshKV:
        """Keys and values of rows, rotary applied to the keys."""
        heads = (*x.shape[:2], self.num_kv_heads, self.head_dim)
        k = apply_rotary(self.k(x, layer).reshape(heads), *rotary)
        return FreshKV(k, self.v(x, layer).reshape(heads))

    def __call__(
        self,
        x: Float[Array, "B n D"],
        rotary: tuple[Float[Array, "B n a"], Float[Array, "B n a"]],
        ancestors: Bool[Array, "B n m"] | None,
        cache: CacheView | None,
        block_kv: FreshKV | None = None,
        layer: LayerIndex = 0,
        residual: Float[Array, "B n O"] | None = None,
    ) -> tuple[Float[Array, "B n O"], FreshKV]:
        """Attends; returns the output, plus the residual, and the rows' own keys and values."""
        q = self.q(x, layer).reshape(*x.shape[:2], self.num_heads, self.head_dim)
        own = self.project_kv(x, rotary, layer)
        fresh = own if block_kv is None else block_kv.concat(own)
        prefix: tuple[Any, ...] = (
            () if cache is None else (cache.k, cache.v, cache.page_table, cache.lengths, layer)
        )
        out = tree_attention(
            apply_rotary(q, *rotary),
            fresh.k,
            fresh.v,
            ancestors,
            *prefix,
            implementation=self.kernels,
        ).astype(x.dtype)
        return self.o(out.reshape(*x.shape[:2], -1), layer, residual), own


def lookup(
    embedding: Float[Array, "V D"] | QuantTensor, ids: Int[Array, "*rows"]
) -> Float[Array, "*rows D"]:
    """Rows of an embedding table; a quantised table is stored as the tied head's `[D, V]`."""
    if isinstance(embedding, QuantTensor):
        return take_columns(embedding, ids)
    return jnp.take(embedding, ids, axis=0, mode="clip")


class Embed(nn.Module):
    """Token embedding `[V, D]`, or a quantised `[D, V]` that a tied head shares."""

    vocab_size: int
    features: int

    def setup(self) -> None:
        init: Callable = nn.initializers.normal(0.02)
        if self.has_variable("params", "embedding"):
            self.table = self.get_variable("params", "embedding")
        else:
            self.table = self.param("embedding", init, (self.vocab_size, self.features))

    def __call__(self, ids: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        return lookup(self.table, ids)

    def attend(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits of a head tied to this embedding, float32."""
        if isinstance(self.table, QuantTensor):
            table = self.table
            scale, minimum = (None if x is None else x[None] for x in (table.scale, table.minimum))
            return int4_matmul(
                x,
                table.values[None],
                scale,
                minimum,
                0,
                bits=table.bits,
                group_size=table.group_size,
                layout=table.layout,
                out_dtype=jnp.float32,
            )
        if x.dtype == jnp.bfloat16:
            return dense(x, self.table.T, jnp.float32)
        return jnp.einsum("...d,vd->...v", x, self.table, precision="highest")
