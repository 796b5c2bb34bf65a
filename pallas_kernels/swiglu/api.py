"""The gated activation; chooses the implementation."""

from __future__ import annotations

from jaxtyping import Array, Float

import cpu_kernels
from pallas_kernels.implementation import Implementation
from pallas_kernels.swiglu import reference


def swiglu(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    *,
    implementation: Implementation = "reference",
) -> Float[Array, "*rows F"]:
    """See `reference.swiglu`."""
    return (cpu_kernels.swiglu if implementation == "cpu" else reference.swiglu)(gate, up)
