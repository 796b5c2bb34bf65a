"""Quantised matrix product. The weights' layout says which implementation they were packed for."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

import cpu_kernels
from pallas_kernels.int4_matmul import reference
from pallas_kernels.int4_matmul.stack import Stack
from pallas_kernels.swiglu.reference import swiglu

LAYOUTS = ("kn", "cpu8", "cpu8-float", "triton")


def int4_matmul(
    x: Float[Array, "*rows K"],
    values: UInt8[Array, "..."] | Int[Array, "..."],
    scale: Float[Array, "L k N"] | None,
    minimum: Float[Array, "L k N"] | None,
    layer: Int[Array, ""] | int,
    *,
    bits: int,
    group_size: int,
    layout: str = "kn",
    out_dtype: Any = None,
    residual: Float[Array, "*rows N"] | None = None,
) -> Float[Array, "*rows N"]:
    """`x @ dequantise(weights[layer])`; see `reference.int4_matmul`.

    Args:
        layout: "kn", the row-major layout of the reference; "triton", the same for the GPU kernels,
            with bfloat16 activations; "cpu8", the tiles of `cpu_kernels.packing`, whose product
            quantises the activations to 8 bits; "cpu8-float", the same tiles with float32
            activations.
        out_dtype: of the result. None: float32, or x's own type in the layout "triton".
        residual: added to the product, before it is rounded.

    Raises:
        ValueError: another layout, or sizes that the GPU kernels do not take.
    """
    if layout == "triton" and scale is not None:
        # Deferred: where nothing runs on it, the deprecated backend need not exist.
        from pallas_kernels.int4_matmul import triton

        return triton.matmul(
            x,
            [Stack(values, scale, minimum)],
            layer,
            bits=bits,
            group_size=group_size,
            out_dtype=out_dtype,
            residual=residual,
        )
    if layout in ("cpu8", "cpu8-float"):
        out = cpu_kernels.matmul(x, values, layer, quantised=layout == "cpu8")
    elif layout == "kn" and scale is not None:
        out = reference.int4_matmul(
            x, values, scale, minimum, layer, bits=bits, group_size=group_size
        )
    else:
        raise ValueError(
            f"int4_matmul: layout {layout!r}: expected 'kn' or 'triton' with scales, 'cpu8' or "
            "'cpu8-float'"
        )
    if residual is not None:
        out = out + residual
    return out if out_dtype is None else out.astype(out_dtype)


def gated_matmul(
    x: Float[Array, "*rows K"],
    gate: Stack,
    up: Stack,
    layer: Int[Array, ""] | int,
    *,
    bits: int,
    group_size: int,
    layout: str = "kn",
) -> Float[Array, "*rows N"]:
    """`silu(x @ gate[layer]) * (x @ up[layer])`; one kernel in the layout "triton".

    Args:
        x: activations.
        gate: quantised stack.
        up: like gate.
        layer: which layer.
        bits: 4 or 8.
        group_size: inputs that share a scale.
        layout: "kn" or "triton"; see `int4_matmul`.

    Raises:
        ValueError: another layout, or sizes that the GPU kernels do not take.
    """
    if layout == "triton":
        from pallas_kernels.int4_matmul import triton

        return triton.matmul(x, [gate, up], layer, bits=bits, group_size=group_size)
    products = (
        int4_matmul(x, *stack, layer, bits=bits, group_size=group_size, layout=layout)
        for stack in (gate, up)
    )
    return swiglu(*products).astype(jnp.result_type(x))
