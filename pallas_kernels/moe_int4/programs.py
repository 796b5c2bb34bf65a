"""Mixtures of experts of served models as programs: to compile, to time, to compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.chips import Chip
from pallas_kernels.int4_matmul.programs import Program, stack, stack_bytes
from pallas_kernels.moe_int4 import cases, triton


def programs(chip: Chip | None) -> Iterator[Program]:
    """Every case of `cases.REAL`, at each number of tokens.

    Args:
        chip: launches are chosen for it; None for the GPU that is present.
    """
    for case in cases.REAL:
        for tokens in cases.TOKENS_SERVED:
            yield program(case, tokens, chip)


def program(case: cases.Case, tokens: int, chip: Chip | None) -> Program:
    """One case. Its bytes assume that no two choices fall on one expert while there are others."""

    def function(*arguments: Any) -> Any:
        with chips.compiling_for(chip):
            return triton.moe_int4(*arguments, group_size=case.group_size)

    lead = (case.layers, case.experts)
    inner, outer = case.matrix(case.hidden, case.width), case.matrix(case.width, case.hidden)
    chosen = (tokens, case.top_k)
    arguments = (
        jax.ShapeDtypeStruct((tokens, case.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct(chosen, jnp.int32),
        jax.ShapeDtypeStruct(chosen, jnp.float32),
        stack(lead, inner),
        stack(lead, inner),
        stack(lead, outer),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    assignments = tokens * case.top_k
    busy = min(case.experts, assignments)
    weights = busy * (2 * stack_bytes(inner) + stack_bytes(outer))
    sides = 2 * 2 * tokens * case.hidden
    return Program(
        f"{case} tokens {tokens}",
        function,
        arguments,
        weights + sides,
        6 * assignments * case.hidden * case.width,
    )
