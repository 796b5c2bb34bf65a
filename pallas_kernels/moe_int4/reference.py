"""Specification of a mixture of quantised experts: readable jnp, float32 throughout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.int4_matmul.reference import dequantise_arrays
from pallas_kernels.int4_matmul.stack import Stack


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
) -> Float[Array, "T D"]:
    """`sum_j weight_j * down_j(silu(gate_j(x)) * up_j(x))` over a token's k experts.

    Args:
        x: tokens.
        expert_ids: experts of each token; ids outside [0, E) contribute nothing (rows that are
            padding, experts of another device).
        expert_weights: what their results are multiplied with.
        gate: experts `[L, E, D, F]`, quantised.
        up: like gate.
        down: experts `[L, E, F, D]`, quantised.
        layer: which layer.
        bits: 4 or 8.
        group_size: inputs that share a scale.
    """
    experts = gate.scale.shape[1]

    def weights(stack: Stack) -> Float[Array, "E K N"]:
        minimum = None if stack.minimum is None else stack.minimum[layer]
        return dequantise_arrays(
            stack.values[layer], stack.scale[layer], minimum, bits=bits, group_size=group_size
        )

    wide = x.astype(jnp.float32)

    def product(rows: Array, stack: Stack, equation: str) -> Array:
        return jnp.einsum(equation, rows, weights(stack), precision="highest")

    gated = jax.nn.silu(product(wide, gate, "td,edf->tef")) * product(wide, up, "td,edf->tef")
    every = product(gated, down, "tef,efd->ted")
    chosen = expert_ids[..., None] == jnp.arange(experts)[None, None]
    shares = jnp.sum(jnp.where(chosen, expert_weights[..., None], 0.0), axis=1)
    return jnp.einsum("te,ted->td", shares, every, precision="highest").astype(x.dtype)
