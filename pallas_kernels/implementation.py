"""The implementations an op can have. Which one runs is decided once, when an engine starts."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp

Implementation = Literal["reference", "cpu", "triton"]


def activation_dtype(implementation: Implementation) -> jnp.dtype:
    """What an implementation's ops take and give, and what caches beside it hold."""
    return jnp.dtype(jnp.bfloat16 if implementation == "triton" else jnp.float32)
