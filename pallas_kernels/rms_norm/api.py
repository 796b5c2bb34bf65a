"""RMSNorm; chooses the implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

import cpu_kernels
from pallas_kernels.implementation import Implementation
from pallas_kernels.rms_norm import reference


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, "L D"],
    layer: Int[Array, ""] | int,
    eps: float,
    *,
    implementation: Implementation = "reference",
) -> Float[Array, "*rows D"]:
    """See `reference.rms_norm`."""
    run = cpu_kernels.rms_norm if implementation == "cpu" else reference.rms_norm
    return run(x, scale, layer, eps)
