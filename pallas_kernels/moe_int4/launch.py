"""Launch configurations of the experts' products."""

from __future__ import annotations

import dataclasses

from pallas_kernels.chips import Chip
from pallas_kernels.int4_matmul.launch import (
    COLUMNS_PER_WARP,
    FEW_ROWS,
    MANY_BLOCK,
    ROWS_PER_DOT,
    Config,
    Problem,
    fit,
    require_fit,
    smallest,
    step_inputs,
)


def most_tiles(assignments: int, experts: int, block_m: int) -> int:
    """Upper bound of the row tiles, whatever the router chooses: the grid is static.

    The sum over experts of ceil(count / block), where at most min(experts, assignments) have any.
    """
    busy = min(experts, assignments)
    return min(assignments, (assignments + busy * (block_m - 1)) // block_m)


def block_rows(tokens: int, top_k: int, experts: int) -> int:
    """Rows of a tile: up to `FEW_ROWS` tokens always the same, so a token keeps its bits."""
    if tokens <= FEW_ROWS or tokens * top_k <= ROWS_PER_DOT * experts:
        return ROWS_PER_DOT
    return MANY_BLOCK


def choose(problem: Problem, block_m: int, chip: Chip | None) -> Config:
    """A launch for one of the two products of the experts.

    Args:
        problem: sizes of one expert's product; `rows` is not looked at.
        block_m: `ROWS_PER_DOT` or `MANY_BLOCK`.
        chip: None stands for the least of all limits.

    Raises:
        ValueError: nothing fits the chip's shared memory; tells the sizes.
    """
    limits = chip or smallest()
    if block_m == ROWS_PER_DOT:
        warps, block_k = 4, step_inputs(problem.group_size)
        block_n, stages = COLUMNS_PER_WARP * 4 // problem.bits * warps, 5 if block_k <= 32 else 4
    else:
        warps, block_n, stages = 8, 128, 4
        block_k = step_inputs(problem.group_size, 64)
    config = Config(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        split_k=1,
        num_warps=warps,
        num_stages=stages,
    )
    problem = dataclasses.replace(problem, rows=block_m)
    config = fit(config, problem, limits)
    require_fit(config, problem, limits)
    return config
