"""Quantised products on NVIDIA GPUs: Pallas kernels for the Triton backend.

Weights are read as 32-bit words along the outputs: eight INT4 columns or four INT8 ones. Column t
of all words is one operand of a dot, so levels never move between threads; the products of the
columns are interleaved once a step, in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels import chips
from pallas_kernels.int4_matmul import launch
from pallas_kernels.int4_matmul.launch import FEW_ROWS, ROWS_PER_DOT, Config, Problem
from pallas_kernels.int4_matmul.stack import Stack

INPUTS_PER_DOT = 32


@dataclass(frozen=True)
class Shape:
    """The static side of a kernel.

    Attributes:
        problem: sizes.
        config: the launch.
        interpret: runs in Pallas' interpreter, which knows no inline PTX: the same operations in
            jnp.
    """

    problem: Problem
    config: Config
    interpret: bool

    @property
    def columns(self) -> int:
        """Columns in a 32-bit word."""
        return 32 // self.problem.bits

    @property
    def words(self) -> int:
        """Words in a row of a block."""
        return self.config.block_n // self.columns

    @property
    def steps(self) -> int:
        """Steps of the loop over all inputs."""
        return launch.steps(self.problem, self.config.block_k)


# --- levels ---------------------------------------------------------------------------------------


def _asm(code: str, args: Sequence[Array], dtype: Any, *, pack: int, constraint: str) -> Array:
    """Inline PTX that maps each element, `pack` elements at a time."""
    inputs = ",".join([constraint] * (len(args) * pack))
    [out] = pltriton.elementwise_inline_asm(
        code,
        args=args,
        constraints=f"={constraint},{inputs}",
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def int4_code(column: int, zero: int) -> str:
    """PTX for nibble `column` of two words to two bfloat16 levels.

    The bits 0x4300 | q are the bfloat16 128 + q, so one subtraction gives q - zero, exactly.
    """
    half, shift = ("0x5410", "0x7632")[column // 4], 4 * (column % 4)
    return (
        "{ .reg .b32 p, z; "
        f"prmt.b32 p, $1, $2, {half}; "
        f"shr.u32 p, p, {shift}; "
        "lop3.b32 p, p, 0x000F000F, 0x43004300, 0xEA; "
        f"mov.b32 z, {0x43004300 | zero << 16 | zero:#010x}; "
        "sub.rn.bf16x2 $0, p, z; }"
    )


def int8_code(column: int) -> str:
    """PTX for byte `column` of two words to two bfloat16 levels.

    128 + the low seven bits, less 128, or less 256 (bits 0x4380) where the sign is set.
    """
    return (
        "{ .reg .b32 p, z; "
        f"prmt.b32 p, $1, $2, 0x{column + 4}{column + 4}{column}{column}; "
        "lop3.b32 z, p, 0x00800080, 0x43004300, 0xEA; "
        "lop3.b32 p, p, 0x007F007F, 0x43004300, 0xEA; "
        "sub.rn.bf16x2 $0, p, z; }"
    )


def _levels(words: Array, column: int, shape: Shape, zero: int, dtype: Any) -> Array:
    """Column t of every word as levels less their zero, exact in bfloat16."""
    bits = shape.problem.bits
    if shape.interpret or dtype != jnp.bfloat16:
        signed = jax.lax.bitcast_convert_type(words, jnp.int32)
        if bits == 8:
            level = (signed << (24 - 8 * column)) >> 24
        else:
            level = ((signed >> (4 * column)) & 15) - zero
        return level.astype(jnp.float32).astype(dtype)
    code = int4_code(column, zero) if bits == 4 else int8_code(column)
    return _asm(code, [words], jnp.bfloat16, pack=2, constraint="r")


def _interleave(columns: Sequence[Array]) -> Array:
    """Columns t of all words, `[rows, words]` each, to `[rows, words * len(columns)]`."""
    rows, words = columns[0].shape
    count = len(columns)
    parts = list(columns)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack([parts[i], parts[i + half]], axis=-1) for i in range(half)]
    return parts[0].reshape(rows, words * count)


def _multiply_add(a: Array, b: Array, c: Array, shape: Shape) -> Array:
    """`a * b + c` in one instruction; the compiler may not contract the two itself."""
    if shape.interpret:
        return a * b + c
    return _asm("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], jnp.float32, pack=1, constraint="f")


def _dot(a: Array, b: Array) -> Array:
    """Product with float32 accumulation; float32 operands are never cut to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, precision=precision)


# --- loads ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """References to one matrix, and which block of it a program reads.

    Attributes:
        words: `[..., K, N/columns]` 32-bit words.
        scale: `[..., K/group, N]`.
        minimum: like scale, or None.
        at: leading indices: the layer, the expert.
        column: block of outputs.
        shape: sizes.
    """

    words: Any
    scale: Any
    minimum: Any
    at: tuple[Any, ...]
    column: Any
    shape: Shape

    def load_words(self, first: Any, end: Any, count: int) -> Array:
        """Words of `count` inputs, zero past the end of the group or of the matrix."""
        s = self.shape
        n = s.words
        ref = self.words.at[(*self.at, pl.ds(first, count), pl.ds(self.column * n, n))]
        mask = None if end is None else (first + jnp.arange(count) < end)[:, None]
        inside = self.inside(n, s.problem.outputs // s.columns)
        if inside is not None:
            mask = inside[None] if mask is None else mask & inside[None]
        return _load(ref, mask, jnp.uint32(0))

    def load_scales(self, step: Any) -> tuple[Array, ...]:
        """Scale, and minimum where there is one, of a step's group, in the stored type."""
        s = self.shape
        n = s.config.block_n
        group = _group(step, s)
        inside = self.inside(n, s.problem.outputs)
        refs = (self.scale,) if self.minimum is None else (self.scale, self.minimum)
        return tuple(
            _load(ref.at[(*self.at, group, pl.ds(self.column * n, n))], inside, 0.0) for ref in refs
        )

    def inside(self, size: int, limit: int) -> Array | None:
        """Which of `size` columns of this block exist; None if all do."""
        if limit % size == 0:
            return None
        return self.column * size + jnp.arange(size) < limit

    @property
    def zero(self) -> int:
        return 8 if self.minimum is None and self.shape.problem.bits == 4 else 0

    def levels(self, words: Array, dtype: Any) -> list[Array]:
        """Levels of each column of the words."""
        return [_levels(words, t, self.shape, self.zero, dtype) for t in range(self.shape.columns)]


def _load(ref: Any, mask: Array | None, other: Any) -> Array:
    if mask is None:
        return pltriton.load(ref)
    return pltriton.load(ref, mask=mask, other=other)


def _group(step: Any, shape: Shape) -> Any:
    """The group of a step."""
    per_group = -(-shape.problem.group_size // shape.config.block_k)
    return step if per_group == 1 else step // per_group


def _inputs(step: Any, shape: Shape) -> tuple[Any, Any]:
    """First input of a step, and the end of its group."""
    size, k = shape.problem.group_size, shape.config.block_k
    if size % k == 0:
        return step * k, None
    group = _group(step, shape)
    first = group * size + (step - group * -(-size // k)) * k
    return first, (group + 1) * size


# --- few rows: weight streaming -------------------------------------------------------------------


def stream(
    blocks: Sequence[Block],
    load_rows: Sequence[Callable[[Any, Any, int], Array]],
    steps: tuple[Any, Any],
) -> list[list[Array]]:
    """Sums of products over some steps, for each matrix and each tile of 16 rows.

    The levels are multiplied as they are; each group's product is then scaled, and the minimum is
    added times the sum of the group's activations.

    Args:
        blocks: one block of outputs of each matrix.
        load_rows: for each tile, a function of a first input, its group's end (None where steps
            fill groups) and a count that loads `[16, count]` activations.
        steps: first step, and one past the last.
    """
    shape = blocks[0].shape
    last = shape.steps - 1

    def step(i: Any, carry: Any) -> Any:
        sums, scales = carry
        # Scales feed no dot, so the compiler does not load them ahead; the loop's carry does.
        following = [block.load_scales(jnp.minimum(i + 1, last)) for block in blocks]
        products = _group_products(i, blocks, load_rows)
        out = []
        for group_scales, tiles, totals in zip(scales, products, sums, strict=True):
            pairs = zip(tiles, totals, strict=True)
            out.append([_add_scaled(tile, group_scales, total, shape) for tile, total in pairs])
        return out, following

    zeros = jnp.zeros((ROWS_PER_DOT, shape.config.block_n), jnp.float32)
    start = (
        [[zeros] * len(load_rows) for _ in blocks],
        [block.load_scales(jnp.int32(steps[0])) for block in blocks],
    )
    return jax.lax.fori_loop(*steps, step, start)[0]


def _group_products(
    step: Any, blocks: Sequence[Block], load_rows: Sequence[Callable[[Any, Any, int], Array]]
) -> list[list[list[Array]]]:
    """Products of one step with the bare levels.

    For each matrix and tile: one `[16, words]` a column of the words, and where there are minima
    the sums of the activations, of the same shape: by the tensor cores, so that they come in the
    accumulators' layout.
    """
    first, end = _inputs(step, blocks[0].shape)
    size = blocks[0].shape.config.block_k
    # Short dots one after another: the levels of few inputs at a time are in registers.
    short = min(size, INPUTS_PER_DOT)
    products: list[list[list[Array]]] = [[[] for _ in load_rows] for _ in blocks]
    for offset in range(0, size, short):
        rows = [load(first + offset, end, short) for load in load_rows]
        for block, tiles in zip(blocks, products, strict=True):
            words = block.load_words(first + offset, end, short)
            operands = block.levels(words, rows[0].dtype)
            if block.minimum is not None:
                operands.append(jnp.ones(words.shape, rows[0].dtype))
            for t, x in enumerate(rows):
                dots = [_dot(x, operand) for operand in operands]
                seen = tiles[t] or [None] * len(dots)
                tiles[t] = [_sum(a, b) for a, b in zip(seen, dots, strict=True)]
    return products


def _sum(a: Array | None, b: Array) -> Array:
    return b if a is None else a + b


def _add_scaled(
    products: Sequence[Array], scales: tuple[Array, ...], total: Array, shape: Shape
) -> Array:
    """Adds a group's product times its scale, and its activations' sum times its minimum."""

    def wide(per_column: Array) -> Array:
        return jnp.broadcast_to(per_column.astype(jnp.float32)[None], total.shape)

    count = shape.columns
    if len(scales) == 2:
        sums = _interleave([products[count]] * count)
        total = _multiply_add(sums, wide(scales[1]), total, shape)
    return _multiply_add(_interleave(products[:count]), wide(scales[0]), total, shape)


def _few_kernel(layer_ref: Any, x_ref: Any, *refs: Any, shape: Shape, minima: bool) -> None:
    """One block of rows, one of outputs, one part of the inputs."""
    config = shape.config
    row_block, column, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    blocks, residual_ref, out_ref = unpack(refs, (layer_ref[0],), column, shape, minima)
    starts = [row_block * config.block_m + t for t in range(0, config.block_m, ROWS_PER_DOT)]
    loads = [functools.partial(_load_rows, x_ref, start, shape, ROWS_PER_DOT) for start in starts]
    each = shape.steps // config.split_k
    sums = stream(blocks, loads, (part * each, (part + 1) * each))
    columns = pl.ds(column * config.block_n, config.block_n)
    for tile, start in enumerate(starts):
        if config.split_k == 1:
            _write([tiles[tile] for tiles in sums], blocks[0], start, residual_ref, out_ref)
            continue
        mask = _out_mask(start, blocks[0])
        for m, tiles in enumerate(sums):
            ref = out_ref.at[part * len(sums) + m, pl.ds(start, ROWS_PER_DOT), columns]
            pltriton.store(ref, tiles[tile], mask=mask)


def _row_mask(start: Any, shape: Shape, count: int = ROWS_PER_DOT) -> Array | None:
    """Which rows of a tile exist, `[count, 1]`; None if all do."""
    if shape.problem.rows % shape.config.block_m == 0:
        return None
    return (start + jnp.arange(count) < shape.problem.rows)[:, None]


def _load_rows(
    x_ref: Any, start: Any, shape: Shape, rows: int, first: Any, end: Any, count: int
) -> Array:
    """Activations `[rows, count]` from row `start` on; zeros in rows that are none, and past the
    end of the group.
    """
    mask = _row_mask(start, shape, rows)
    if end is not None:
        within = (first + jnp.arange(count) < end)[None]
        mask = within if mask is None else mask & within
    return _load(x_ref.at[pl.ds(start, rows), pl.ds(first, count)], mask, 0.0)


def finish(sums: Sequence[Array]) -> Array:
    """Gate and up to `silu(gate) * up`; one matrix as it is."""
    if len(sums) == 1:
        return sums[0]
    gate, up = sums
    return gate / (1 + jnp.exp(-gate)) * up


def _out_mask(start: Any, block: Block, count: int = ROWS_PER_DOT) -> Array | None:
    """Which elements of an output tile exist; None if all do."""
    shape = block.shape
    mask = _row_mask(start, shape, count)
    inside = block.inside(shape.config.block_n, shape.problem.outputs)
    if inside is None:
        return None if mask is None else jnp.broadcast_to(mask, (count, shape.config.block_n))
    inside = jnp.broadcast_to(inside[None], (count, shape.config.block_n))
    return inside if mask is None else mask & inside


def _write(
    sums: Sequence[Array],
    block: Block,
    start: Any,
    residual_ref: Any,
    out_ref: Any,
) -> None:
    """Finishes and stores the tile of rows from `start` on."""
    count, size = sums[0].shape
    here = (pl.ds(start, count), pl.ds(block.column * size, size))
    mask = _out_mask(start, block, count)
    out = finish(sums)
    if residual_ref is not None:
        out = out + _load(residual_ref.at[here], mask, 0.0).astype(jnp.float32)
    pltriton.store(out_ref.at[here], out.astype(out_ref.dtype), mask=mask)


def unpack(
    refs: Sequence[Any], at: tuple[Any, ...], column: Any, shape: Shape, minima: bool
) -> tuple[list[Block], Any, Any]:
    """A kernel's last references: matrices, residual or None, output."""
    each = 3 if minima else 2
    count = shape.problem.matrices * each
    blocks = [
        Block(
            words=refs[m],
            scale=refs[m + 1],
            minimum=refs[m + 2] if minima else None,
            at=at,
            column=column,
            shape=shape,
        )
        for m in range(0, count, each)
    ]
    return blocks, refs[count] if len(refs) == count + 2 else None, refs[-1]


# --- many rows ------------------------------------------------------------------------------------


def dequantised(block: Block, step: Any, dtype: Any) -> Array:
    """Weights `[block_k, block_n]` of one step, rounded once to the activations' type."""
    words = block.load_words(*_inputs(step, block.shape), block.shape.config.block_k)
    levels = _interleave(block.levels(words, dtype)).astype(jnp.float32)
    scale, *minimum = (s.astype(jnp.float32)[None] for s in block.load_scales(step))
    weights = levels * scale
    return (weights + minimum[0] if minimum else weights).astype(dtype)


def product(blocks: Sequence[Block], load_rows: Callable[[Any, Any, int], Array]) -> list[Array]:
    """Products of many rows with one block of outputs of each matrix.

    Many rows share a weight, so it is dequantised once and the sums stay in the tensor cores.
    """
    shape = blocks[0].shape

    def step(i: Any, sums: Any) -> Any:
        x = load_rows(*_inputs(i, shape), shape.config.block_k)
        return [
            total + _dot(x, dequantised(block, i, x.dtype))
            for block, total in zip(blocks, sums, strict=True)
        ]

    zeros = jnp.zeros((shape.config.block_m, shape.config.block_n), jnp.float32)
    return jax.lax.fori_loop(0, shape.steps, step, [zeros for _ in blocks])


def _many_kernel(layer_ref: Any, x_ref: Any, *refs: Any, shape: Shape, minima: bool) -> None:
    """One block of rows, one of outputs."""
    row_block, column = pl.program_id(0), pl.program_id(1)
    blocks, residual_ref, out_ref = unpack(refs, (layer_ref[0],), column, shape, minima)
    start = row_block * shape.config.block_m
    load = functools.partial(_load_rows, x_ref, start, shape, shape.config.block_m)
    _write(product(blocks, load), blocks[0], start, residual_ref, out_ref)


# --- calls ----------------------------------------------------------------------------------------


def words(stack: Stack) -> tuple[Array, ...]:
    """A stack's arrays with the levels viewed as 32-bit words: no copy, the bytes stay in place."""
    values = stack.values
    view = jax.lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, 4), jnp.uint32)
    return (view, stack.scale) if stack.minimum is None else (view, stack.scale, stack.minimum)


def check(x: Array, stacks: Sequence[Stack], *, bits: int, group_size: int) -> Problem:
    """The problem that the arrays state.

    Raises:
        ValueError: sizes or types that the kernels do not take; names them.
    """
    first = stacks[0]
    rows, inputs = x.shape
    outputs = first.scale.shape[-1]
    columns = 32 // bits

    def refuse(what: str) -> None:
        raise ValueError(f"int4_matmul: {what}")

    if x.dtype not in (jnp.bfloat16, jnp.float32):
        refuse(f"activations of type {x.dtype}: expected bfloat16 or float32")
    if inputs % group_size:
        refuse(f"K = {inputs} inputs do not fill groups of {group_size}")
    if outputs % columns:
        refuse(f"N = {outputs} outputs: INT{bits} needs a multiple of {columns}")
    for stack in stacks:
        lead = first.values.shape[:-2]
        packed = (*lead, inputs, outputs * bits // 8)
        groups = (*lead, inputs // group_size, outputs)
        if stack.values.shape != packed:
            refuse(f"weights {stack.values.shape}: expected {packed} for INT{bits}")
        for array in (stack.scale, stack.minimum):
            if array is not None and array.shape != groups:
                refuse(f"scales or minima {array.shape}: expected {groups}")
        if (stack.minimum is None) != (first.minimum is None):
            refuse("gate and up: one has minima, the other has none")
    return Problem(
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        group_size=group_size,
        bits=bits,
        matrices=len(stacks),
    )


def matmul(
    x: Float[Array, "*rows K"],
    stacks: Sequence[Stack],
    layer: Int[Array, ""] | int,
    *,
    bits: int,
    group_size: int,
    out_dtype: Any = None,
    residual: Float[Array, "*rows N"] | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows N"]:
    """`x @ dequantise(stack[layer])`, or with two stacks `silu(x @ gate) * (x @ up)`.

    Args:
        x: activations, bfloat16; float32 ones are multiplied in float32, slowly.
        stacks: one matrix, or gate and up.
        layer: which matrix of the stack.
        bits: 4 or 8.
        group_size: inputs that share a scale.
        out_dtype: of the result; None is x's own.
        residual: added before the result is rounded.
        config: a launch; None chooses one for the chip.
        interpret: run in Pallas' interpreter.

    Raises:
        ValueError: sizes that the kernels do not take, or that do not fit the chip.
    """
    flat = x.reshape(-1, x.shape[-1])
    problem = check(flat, stacks, bits=bits, group_size=group_size)
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    out_shape = (*x.shape[:-1], problem.outputs)
    if not problem.rows:
        return jnp.zeros(out_shape, out_dtype)
    config = config or launch.choose(problem, chips.current())
    shape = Shape(problem, config, interpret)
    operands = [array for stack in stacks for array in words(stack)]
    rest = None if residual is None else residual.reshape(-1, problem.outputs)
    few = problem.rows <= FEW_ROWS
    grid = (-(-problem.rows // config.block_m), -(-problem.outputs // config.block_n))
    result = (problem.rows, problem.outputs)
    if few and config.split_k > 1:
        partial = jax.ShapeDtypeStruct((config.split_k * len(stacks), *result), jnp.float32)
        call = _call(_few_kernel, shape, (*grid, config.split_k), partial, stacks)
        parts = call(_index(layer), flat, *operands)
        return _combine(parts, len(stacks), rest).astype(out_dtype).reshape(out_shape)
    whole = jax.ShapeDtypeStruct(result, out_dtype)
    kernel, size = (_few_kernel, (*grid, 1)) if few else (_many_kernel, grid)
    call = _call(kernel, shape, size, whole, stacks)
    return call(_index(layer), flat, *operands, *(() if rest is None else (rest,))).reshape(
        out_shape
    )


def _call(
    kernel: Any,
    shape: Shape,
    grid: tuple[int, ...],
    out: jax.ShapeDtypeStruct,
    stacks: Sequence[Stack],
) -> Any:
    config = shape.config
    return pl.pallas_call(
        functools.partial(kernel, shape=shape, minima=stacks[0].minimum is not None),
        grid=grid,
        out_shape=out,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=shape.interpret,
        name="int4_matmul",
    )


def _index(layer: Int[Array, ""] | int) -> Int[Array, "1"]:
    return jnp.asarray(layer, jnp.int32).reshape(1)


def _combine(
    parts: Float[Array, "S M N"], matrices: int, residual: Float[Array, "M N"] | None
) -> Float[Array, "M N"]:
    """Sums the parts one after another, so that a row's bits do not depend on its company."""
    sums = [parts[m] for m in range(matrices)]
    for i in range(matrices, parts.shape[0]):
        sums[i % matrices] = sums[i % matrices] + parts[i]
    out = finish(sums)
    return out if residual is None else out + residual.astype(jnp.float32)
