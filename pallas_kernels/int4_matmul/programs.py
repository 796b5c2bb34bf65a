"""The quantised products of served models as programs: to compile, to time, to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import chips
from pallas_kernels.chips import Chip
from pallas_kernels.int4_matmul import cases, launch, triton
from pallas_kernels.int4_matmul.stack import Stack

STORED = jnp.dtype(jnp.bfloat16)  # scales and minima


class Program(NamedTuple):
    """One case for one chip.

    Attributes:
        case: name, with the rows.
        function: of the arguments.
        arguments: shapes and types.
        bytes_moved: between memory and chip, at least.
        flops: of the products, two a multiply-add; padding not counted.
    """

    case: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes_moved: int
    flops: int


def stack(lead: tuple[int, ...], case: cases.Case) -> Stack:
    """Shapes of a case's weights with the given leading dimensions."""
    groups: Any = jax.ShapeDtypeStruct(
        (*lead, case.inputs // case.group_size, case.outputs), STORED
    )
    values: Any = jax.ShapeDtypeStruct(
        (*lead, case.inputs, case.outputs * case.bits // 8),
        jnp.uint8 if case.bits == 4 else jnp.int8,
    )
    return Stack(values, groups, groups if case.minimum else None)


def stack_bytes(case: cases.Case) -> int:
    """Of one matrix with its scales and minima."""
    groups = case.inputs // case.group_size * (2 if case.minimum else 1)
    return case.outputs * (case.inputs * case.bits // 8 + groups * STORED.itemsize)


def programs(chip: Chip | None) -> Iterator[Program]:
    """Every case of `cases.REAL`, at each number of rows.

    Args:
        chip: launches are chosen for it; None for the GPU that is present.
    """
    for case in cases.REAL:
        for rows in cases.ROWS_SERVED:
            if case.name.endswith("-head") and rows > launch.FEW_ROWS:
                continue  # logits are wanted of few rows
            yield program(case, rows, chip)


def program(case: cases.Case, rows: int, chip: Chip | None) -> Program:
    """One case: gate and up fused, down and o with their residual."""
    matrices = 2 if case.name.endswith("gate-up") else 1
    added = case.name.endswith(("-down", "-o"))
    out_dtype = jnp.float32 if case.name.endswith("-head") else jnp.bfloat16

    def function(
        layer: Array, x: Array, stacks: tuple[Stack, ...], residual: Array | None
    ) -> Array:
        with chips.compiling_for(chip):
            return triton.matmul(
                x,
                stacks,
                layer,
                bits=case.bits,
                group_size=case.group_size,
                out_dtype=out_dtype,
                residual=residual,
            )

    x = jax.ShapeDtypeStruct((rows, case.inputs), jnp.bfloat16)
    out = jax.ShapeDtypeStruct((rows, case.outputs), out_dtype)
    arguments = (
        jax.ShapeDtypeStruct((), jnp.int32),
        x,
        (stack((2,), case),) * matrices,
        out if added else None,
    )
    sides = x.size * 2 + out.size * out.dtype.itemsize * (2 if added else 1)
    return Program(
        f"{case} rows {rows}",
        function,
        arguments,
        stack_bytes(case) * matrices + sides,
        2 * rows * case.inputs * case.outputs * matrices,
    )
