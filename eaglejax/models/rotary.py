"""Rotary position embedding, rotate-half form, with the context extensions of Llama checkpoints."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eaglejax.config import RopeConfig


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 `[head_dim/2]` and the factor on cos and sin.

    llama3 and yarn follow HF `modeling_rope_utils`; yarn's ramp bounds are those of the YaRN paper
    (arXiv 2309.00071, section 3.2).
    """
    half = np.arange(0, head_dim, 2, dtype=np.float64)
    inv = rope.theta ** -(half / head_dim)
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * np.pi / inv
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - low) / (high - low)
        smooth = np.clip(smooth, 0, 1)
        inv = (1 - smooth) * inv / rope.factor + smooth * inv
    elif rope.kind == "yarn":

        def bound(rotations: float) -> float:
            turns = rope.original_max_position / (2 * math.pi * rotations)
            return head_dim * math.log(turns) / (2 * math.log(rope.theta))

        low = max(math.floor(bound(rope.beta_fast)), 0)
        high = min(math.ceil(bound(rope.beta_slow)), head_dim - 1)
        high = high + 0.001 if high == low else high
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        inv = inv / rope.factor * ramp + inv * (1 - ramp)
        scale = _yarn_mscale(rope.factor, rope.mscale)
        if rope.mscale_all_dim:
            scale /= _yarn_mscale(rope.factor, rope.mscale_all_dim)
        return inv.astype(np.float32), scale
    return inv.astype(np.float32), 1.0


def rotary_angles(
    positions: Int[Array, "B N"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B N a"], Float[Array, "B N a"]]:
    """Cosine and sine per position, float32, a = head_dim/2."""
    inv, scale = inverse_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * inv[None, None]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rotary(
    x: Float[Array, "B N H h"], cos: Float[Array, "B N a"], sin: Float[Array, "B N a"]
) -> Float[Array, "B N H h"]:
    """Rotates the pairs (i, i + h/2) of each head, in float32; the result is of x's own type."""
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
