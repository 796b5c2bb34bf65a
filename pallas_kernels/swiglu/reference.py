"""Specification of the gated activation (arXiv 2002.05202)."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """`silu(gate) * up`."""
    return jax.nn.silu(gate) * up
