"""Specification of RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, "L D"],
    layer: Int[Array, ""] | int,
    eps: float | Float[Array, ""],
) -> Float[Array, "*rows D"]:
    """`x / sqrt(mean(x**2) + eps) * scale[layer]` in float32, rounded once to x's own type."""
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + eps)
    return (normed * scale[layer].reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
