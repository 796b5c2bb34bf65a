"""A mixture of quantised experts on NVIDIA GPUs: two grouped products over sorted tokens.

Assignments (token, expert) are sorted by expert on the device; a tile is up to `block_m` of one
expert. The first product gathers its tokens' rows and applies SwiGLU; the second writes each
assignment's result, already weighted, to its own row, and those are added in the order of the
token's choices: nothing is added atomically.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import chips
from pallas_kernels.int4_matmul import triton as matmul
from pallas_kernels.int4_matmul.launch import FEW_ROWS, ROWS_PER_DOT, Config
from pallas_kernels.int4_matmul.stack import Stack
from pallas_kernels.int4_matmul.triton import Block, Shape
from pallas_kernels.moe_int4 import launch


class Tiles(NamedTuple):
    """Assignments sorted by expert, cut into tiles of one expert each.

    Attributes:
        order: `[T * k]`: the assignment (token * k + choice) at each place of the sorted order.
        expert: `[tiles]`; an empty tile's is 0.
        first: `[tiles]`: a tile's first place.
        end: `[tiles]`: the end of its expert's places; an empty tile has end <= first.
    """

    order: Int[Array, "A"]
    expert: Int[Array, "tiles"]
    first: Int[Array, "tiles"]
    end: Int[Array, "tiles"]


def sort_by_expert(expert_ids: Int[Array, "T k"], experts: int, block_m: int) -> Tiles:
    """Sorts assignments on the device; ids outside [0, experts) come last, in no tile."""
    flat = expert_ids.reshape(-1).astype(jnp.int32)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    # One array to sort: the place is part of the key, which also makes the order unique.
    order = jnp.sort(flat * flat.size + jnp.arange(flat.size, dtype=jnp.int32)) % flat.size
    # Comparing all pairs is one fused kernel; a binary search or scatter would be several.
    ends = jnp.sum(flat[None] <= jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile_ends = jnp.cumsum(-(-(ends - starts) // block_m), dtype=jnp.int32)
    count = launch.most_tiles(flat.size, experts, block_m)
    tile = jnp.arange(count, dtype=jnp.int32)
    owner = jnp.sum(tile_ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.where(owner < experts, owner, 0)
    before = jnp.where(expert > 0, tile_ends[jnp.maximum(expert - 1, 0)], 0)
    first = starts[expert] + (tile - before) * block_m
    end = jnp.where(owner < experts, ends[expert], 0)
    return Tiles(order, expert, first, end)


# --- kernels --------------------------------------------------------------------------------------


def _grid(rows: Array, columns: Array, exists: Array) -> tuple[tuple[Array, Array], Array]:
    """Index arrays and mask `[rows, columns]` that gather or scatter whole rows."""
    size = (rows.shape[0], columns.shape[0])
    at = (jnp.broadcast_to(rows[:, None], size), jnp.broadcast_to(columns[None], size))
    return at, jnp.broadcast_to(exists[:, None], size)


def _gathered(ref: Any, source: Array, exists: Array, first: Any, end: Any, count: int) -> Array:
    """`[rows, count]` activations of the given source rows; zeros where there are none."""
    columns = first + jnp.arange(count)
    at, mask = _grid(source, columns, exists)
    if end is not None:
        mask = mask & jnp.broadcast_to((columns < end)[None], mask.shape)
    return pltriton.load(ref.at[at], mask=mask, other=0.0)


def _tile_sums(
    ref: Any, source: Array, exists: Array, blocks: Sequence[Block], shape: Shape
) -> list[Array]:
    """Products of a tile's rows with one block of outputs of each matrix."""
    load: Callable[..., Array] = functools.partial(_gathered, ref, source, exists)
    if shape.config.block_m == ROWS_PER_DOT:
        return [tiles[0] for tiles in matmul.stream(blocks, [load], (0, shape.steps))]
    return matmul.product(blocks, load)


def _gate_up_kernel(
    layer_ref: Any,
    order_ref: Any,  # [A]
    expert_ref: Any,  # [tiles]
    first_ref: Any,  # [tiles]
    end_ref: Any,  # [tiles]
    x_ref: Any,  # [T, D]
    *refs: Any,  # gate, up, out [A, F] in sorted order
    shape: Shape,
    minima: bool,
    top_k: int,
) -> None:
    tile, column = pl.program_id(0), pl.program_id(1)
    first, end = first_ref[tile], end_ref[tile]

    @pl.when(first < end)
    def _() -> None:
        at = (layer_ref[0], expert_ref[tile])
        blocks, _, out_ref = matmul.unpack(refs, at, column, shape, minima)
        place = first + jnp.arange(shape.config.block_m)
        exists = place < end
        token = pltriton.load(order_ref.at[place], mask=exists, other=0) // top_k
        sums = _tile_sums(x_ref, token, exists, blocks, shape)
        _store(out_ref, matmul.finish(sums), place, exists, blocks[0])


def _down_kernel(
    layer_ref: Any,
    order_ref: Any,  # [A]
    expert_ref: Any,  # [tiles]
    first_ref: Any,  # [tiles]
    end_ref: Any,  # [tiles]
    share_ref: Any,  # [A]
    h_ref: Any,  # [A, F] in sorted order
    *refs: Any,  # down, out [A, D] in the order of the assignments
    shape: Shape,
    minima: bool,
) -> None:
    tile, column = pl.program_id(0), pl.program_id(1)
    first, end = first_ref[tile], end_ref[tile]

    @pl.when(first < end)
    def _() -> None:
        at = (layer_ref[0], expert_ref[tile])
        blocks, _, out_ref = matmul.unpack(refs, at, column, shape, minima)
        place = first + jnp.arange(shape.config.block_m)
        exists = place < end
        # Rows that do not exist point past the end: no two rows of a store are the same.
        nowhere = share_ref.shape[0]
        assignment = pltriton.load(order_ref.at[place], mask=exists, other=nowhere)
        share = pltriton.load(share_ref.at[assignment], mask=exists, other=0.0)
        [total] = _tile_sums(h_ref, place, exists, blocks, shape)
        out = total * share[:, None].astype(jnp.float32)
        _store(out_ref, out, assignment, exists, blocks[0])


def _store(ref: Any, out: Array, row: Array, exists: Array, block: Block) -> None:
    """Writes a tile's rows to where they belong."""
    size = block.shape.config.block_n
    columns = block.column * size + jnp.arange(size)
    at, mask = _grid(row, columns, exists)
    inside = block.inside(size, block.shape.problem.outputs)
    if inside is not None:
        mask = mask & jnp.broadcast_to(inside[None], mask.shape)
    pltriton.store(ref.at[at], out.astype(ref.dtype), mask=mask)


# --- call -----------------------------------------------------------------------------------------


def moe_int4(
    x: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    expert_weights: Float[Array, "T k"],
    gate: Stack,
    up: Stack,
    down: Stack,
    layer: Int[Array, ""] | int,
    *,
    bits: int = 4,
    group_size: int,
    block_m: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """See `reference.moe_int4`.

    Args:
        x: tokens, bfloat16 (float32 ones are multiplied in float32, slowly).
        expert_ids: experts of each token; ids outside [0, E) contribute nothing.
        expert_weights: what their results are multiplied with.
        gate: experts `[L, E, D, F]`.
        up: like gate.
        down: experts `[L, E, F, D]`.
        layer: which layer.
        bits: 4 or 8.
        group_size: inputs that share a scale.
        block_m: rows of a tile, 16 or 64; None decides by their number.
        interpret: run in Pallas' interpreter.

    Raises:
        ValueError: sizes that the kernels do not take, or that do not fit the chip.
    """
    tokens, top_k = expert_ids.shape
    experts, width = gate.scale.shape[1], gate.scale.shape[-1]
    if not tokens:
        return x
    block_m = block_m or launch.block_rows(tokens, top_k, experts)
    tiles = sort_by_expert(expert_ids, experts, block_m)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    assignments = tokens * top_k

    def call(kernel: Any, rows: Array, stacks: Sequence[Stack], dtype: Any, *before: Array) -> Any:
        problem = matmul.check(rows, stacks, bits=bits, group_size=group_size)
        config = launch.choose(problem, block_m, chips.current())
        operands = [array for stack in stacks for array in matmul.words(stack)]
        return pl.pallas_call(
            functools.partial(
                kernel,
                shape=Shape(problem, config, interpret),
                minima=stacks[0].minimum is not None,
            ),
            grid=(tiles.expert.size, -(-problem.outputs // config.block_n)),
            out_shape=jax.ShapeDtypeStruct((assignments, problem.outputs), dtype),
            compiler_params=_params(config),
            interpret=interpret,
            name="moe_int4",
        )(index, *tiles, *before, rows, *operands)

    gate_up = functools.partial(_gate_up_kernel, top_k=top_k)
    hidden = call(gate_up, x, (gate, up), x.dtype)
    assert hidden.shape == (assignments, width)
    # Few tokens: exact sums. Many: half the bytes of the largest temporary.
    dtype = jnp.float32 if tokens <= FEW_ROWS else x.dtype
    share = expert_weights.reshape(-1).astype(jnp.float32)
    parts = call(_down_kernel, hidden, (down,), dtype, share)
    return _combine(parts.reshape(tokens, top_k, -1), expert_ids, experts).astype(x.dtype)


def _params(config: Config) -> pltriton.CompilerParams:
    return pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)


def _combine(
    parts: Float[Array, "T k D"], expert_ids: Int[Array, "T k"], experts: int
) -> Float[Array, "T D"]:
    """Adds a token's results one after another; those of no expert were never written."""
    valid = (expert_ids >= 0) & (expert_ids < experts)
    total = jnp.zeros((parts.shape[0], parts.shape[2]), jnp.float32)
    for j in range(parts.shape[1]):
        total = total + jnp.where(valid[:, j, None], parts[:, j].astype(jnp.float32), 0.0)
    return total
