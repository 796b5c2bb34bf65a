"""Specification of the gated activation (arXiv 2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """`silu(gate) * up` in float32, rounded once to gate's own type."""
    wide = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return wide.astype(gate.dtype)
