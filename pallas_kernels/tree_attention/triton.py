"""Attention over a paged prefix and a fresh block on NVIDIA GPUs: Pallas kernels for Triton.

One program takes a tile of rows (nodes times the query heads of one kv head) of one sequence, and
one part of its prefix. It walks the part's tiles of keys with an online softmax; one of the parts
also takes the fresh block. A second kernel joins the parts by their log-sum-exp, in a fixed order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import chips
from pallas_kernels.chips import Chip
from pallas_kernels.tree_attention import launch
from pallas_kernels.tree_attention.launch import FEW_ROWS, FEWEST_TILES, Config, Piece, Problem

LOG2_E = 1.4426950408889634
WORD_BITS = 32
COMBINE_COLUMNS = 128
COMBINE_WARPS = 4

# Running maximum [bm], sum of weights [bm] and weighted values, a piece each [bm, w].
Carry = tuple[Array, Array, tuple[Array, ...]]


@dataclass(frozen=True)
class Shape:
    """The static side of a kernel.

    Attributes:
        problem: sizes.
        config: the launch.
        scale: of the scores, for powers of two.
    """

    problem: Problem
    config: Config
    scale: float

    @property
    def group_rows(self) -> int:
        """Rows that share a kv head."""
        return self.problem.rows * self.problem.group

    @property
    def values(self) -> tuple[Piece, ...]:
        return launch.pieces(0, self.problem.value_width)

    @property
    def keys(self) -> tuple[Piece, ...]:
        """Pieces of the keys; the first ones are the values where keys hold them."""
        problem = self.problem
        shared = problem.value_width if problem.shared_values else 0
        return launch.pieces(0, shared) + launch.pieces(shared, problem.head_dim - shared)


@dataclass(frozen=True)
class Refs:
    """References to the arrays of a call; None for what it has not."""

    q: Any  # [B, n, H, h]
    fresh_k: Any  # [B, m, K, h]
    fresh_v: Any = None  # [B, m, K, v]
    bits: Any = None  # [B, n, words]
    pages_k: Any = None  # [L, P, p, K, h]
    pages_v: Any = None  # [L, P, p, K, v]
    page_table: Any = None  # [B, S]
    lengths: Any = None  # [B]
    layer: Any = None  # [1]


# --- kernels --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """The rows of a program."""

    index: Any  # of the tile
    sequence: Any
    kv_head: Any
    row: Array  # [bm], among the rows of a kv head
    node: Array  # [bm]
    head: Array  # [bm], query head
    valid: Array  # [bm]


def _tile(shape: Shape) -> Tile:
    index, kv_head, sequence = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    row = index * shape.config.block_m + jnp.arange(shape.config.block_m)
    valid = row < shape.group_rows
    group = shape.problem.group
    node, head = jax.lax.div(row, group), kv_head * group + jax.lax.rem(row, group)
    return Tile(index, sequence, kv_head, row, node, head, valid)


def _dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """Product with float32 accumulation; float32 operands are never cut to TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision)


def _load_pieces(
    at: Callable[[Array], Any], live: Array, pieces: Sequence[Piece], dtype: Any
) -> tuple[Array, ...]:
    """Blocks `[rows, piece]`; zeros for rows that are not live and columns that are padding.

    Args:
        at: a reference, indexed by the columns `[1, piece]`.
        live: rows `[rows, 1]` that may be read.
        pieces: columns.
        dtype: to cast to.
    """
    blocks = []
    for piece in pieces:
        column = jnp.arange(piece.block)[None, :]
        mask = jnp.broadcast_to(live, (live.shape[0], piece.block))
        if piece.size < piece.block:
            mask &= column < piece.size
        blocks.append(pltriton.load(at(column + piece.start), mask=mask, other=0).astype(dtype))
    return tuple(blocks)


def _attend(
    q: Sequence[Array],
    keys: Sequence[Array],
    values: Sequence[Array],
    visible: Array,
    scale: float,
    carry: Carry,
) -> Carry:
    """One step of the online softmax over a tile of keys, visible `[bm, bkv]`."""
    top, total, sums = carry
    scores = _dot(q[0], keys[0], trans_b=True)
    for query, key in zip(q[1:], keys[1:], strict=True):
        scores += _dot(query, key, trans_b=True)
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    # A row that has seen nothing yet: any finite number keeps its weights at 2**-inf = 0.
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = jnp.exp2(top - base)
    weights = jnp.exp2(scores - base[:, None])
    total = total * fade + jnp.sum(weights, axis=1)
    weights = weights.astype(values[0].dtype)
    sums = tuple(s * fade[:, None] + _dot(weights, v) for s, v in zip(sums, values, strict=True))
    return new_top, total, sums


def _prefix_parts(length: Array, config: Config) -> tuple[Array, Array, Array]:
    """How a prefix is divided: its tiles, tiles of a part, and the part with the fresh block.

    A function of the length alone, so a row's bits do not depend on its company. The fresh block
    goes to the first part that has no prefix.
    """
    tiles = jax.lax.div(length + config.block_kv - 1, config.block_kv)
    tiles_of_part = jnp.maximum(jax.lax.div(tiles + config.splits - 1, config.splits), FEWEST_TILES)
    used = jax.lax.div(tiles + tiles_of_part - 1, tiles_of_part)
    return tiles, tiles_of_part, jnp.minimum(used, config.splits - 1)


def _length(refs: Refs, sequence: Any, shape: Shape) -> Array:
    return jnp.minimum(refs.lengths[sequence], shape.problem.table_width)


def _walk_prefix(shape: Shape, refs: Refs, tile: Tile, q: Sequence[Array], carry: Carry) -> Carry:
    """Attends to this program's part of the committed tokens."""
    part, config, page_size = pl.program_id(1), shape.config, shape.problem.page_size
    length, layer = _length(refs, tile.sequence, shape), refs.layer[0]
    tiles, tiles_of_part, _ = _prefix_parts(length, config)
    first = part * tiles_of_part

    def step(index: Array, carry: Carry) -> Carry:
        token = index * config.block_kv + jnp.arange(config.block_kv)
        committed = token < length
        # Entries past the length may be out of range, pages past it hold anything: neither is read.
        page = pltriton.load(
            refs.page_table.at[tile.sequence, jax.lax.div(token, page_size)],
            mask=committed,
            other=0,
        )[:, None]
        row, live = jax.lax.rem(token, page_size)[:, None], committed[:, None]

        def rows(pages: Any) -> Callable[[Array], Any]:
            return lambda column: pages.at[layer, page, row, tile.kv_head, column]

        keys = _load_pieces(rows(refs.pages_k), live, shape.keys, q[0].dtype)
        values = keys[: len(shape.values)]
        if refs.pages_v is not None:
            values = _load_pieces(rows(refs.pages_v), live, shape.values, q[0].dtype)
        visible = jnp.broadcast_to(committed[None, :], (config.block_m, config.block_kv))
        return _attend(q, keys, values, visible, shape.scale, carry)

    return jax.lax.fori_loop(first, jnp.minimum(first + tiles_of_part, tiles), step, carry)


def _walk_fresh(
    shape: Shape, refs: Refs, tile: Tile, q: Sequence[Array], carry: Carry, taken: Array | bool
) -> Carry:
    """Attends to the rows of the fresh block that are seen, if this program has to."""
    config, nodes, rows = shape.config, shape.problem.nodes, shape.problem.rows
    words = () if refs.bits is None else _load_bits(shape, refs, tile)

    def step(index: Array, carry: Carry) -> Carry:
        fresh = index * config.block_kv + jnp.arange(config.block_kv)
        live = (fresh < nodes)[:, None]

        def at(block: Any) -> Callable[[Array], Any]:
            return lambda column: block.at[tile.sequence, fresh[:, None], tile.kv_head, column]

        keys = _load_pieces(at(refs.fresh_k), live, shape.keys, q[0].dtype)
        values = keys[: len(shape.values)]
        if refs.fresh_v is not None:
            values = _load_pieces(at(refs.fresh_v), live, shape.values, q[0].dtype)
        if words:
            visible = _visible(words, fresh, config.block_m)
        else:
            visible = fresh[None, :] <= (tile.node + (nodes - rows))[:, None]
        return _attend(q, keys, values, visible, shape.scale, carry)

    if config.deep(shape.problem):
        # No loop: its steps in flight would take more shared memory than those of the prefix.
        def steps(carry: Carry) -> Carry:
            for index in range(-(-nodes // config.block_kv)):
                carry = step(jnp.int32(index), carry)
            return carry

        return steps(carry) if taken is True else jax.lax.cond(taken, steps, lambda c: c, carry)
    last = jnp.int32(nodes)
    if not words:  # causal: no row of the tile sees beyond its last row's own
        last_row = jnp.minimum((tile.index + 1) * config.block_m, shape.group_rows) - 1
        last = jax.lax.div(last_row, shape.problem.group) + (nodes - rows + 1)
    tiles = jax.lax.div(last + (config.block_kv - 1), config.block_kv)
    return jax.lax.fori_loop(0, jnp.where(taken, tiles, 0), step, carry)


def _load_bits(shape: Shape, refs: Refs, tile: Tile) -> tuple[Array, ...]:
    """Words of ancestor bits `[bm]`."""
    return tuple(
        pltriton.load(refs.bits.at[tile.sequence, tile.node, word], mask=tile.valid, other=0)
        for word in range(-(-shape.problem.nodes // WORD_BITS))
    )


def _visible(words: Sequence[Array], fresh: Array, block_m: int) -> Array:
    """Which fresh rows `[bkv]` each row sees; none past the last bit."""
    block = (block_m, fresh.shape[0])
    place = jnp.broadcast_to((fresh % WORD_BITS)[None, :], block)

    def seen(number: int, word: Array) -> Array:
        bit = jax.lax.shift_right_logical(jnp.broadcast_to(word[:, None], block), place) & 1
        return (bit == 1) & (fresh // WORD_BITS == number)[None, :]

    # Not one word chosen by place: its choice spilled on B200.
    return functools.reduce(jnp.logical_or, itertools.starmap(seen, enumerate(words)))


def _walk(shape: Shape, refs: Refs, tile: Tile, taken: Array | bool) -> Carry:
    """Everything that a program attends to."""
    block_m = shape.config.block_m
    node, head = tile.node[:, None], tile.head[:, None]
    q = _load_pieces(
        lambda column: refs.q.at[tile.sequence, node, head, column],
        tile.valid[:, None],
        shape.keys,
        refs.q.dtype,
    )
    carry: Carry = (
        jnp.full((block_m,), -jnp.inf, jnp.float32),
        jnp.zeros((block_m,), jnp.float32),
        tuple(jnp.zeros((block_m, piece.block), jnp.float32) for piece in shape.values),
    )
    if refs.pages_k is not None:
        carry = _walk_prefix(shape, refs, tile, q, carry)
    return _walk_fresh(shape, refs, tile, q, carry, taken)


def _store_pieces(
    at: Callable[[Array], Any], live: Array, pieces: Sequence[Piece], blocks: Sequence[Array]
) -> None:
    for piece, block in zip(pieces, blocks, strict=True):
        column = jnp.arange(piece.block)[None, :]
        mask = jnp.broadcast_to(live, block.shape) & (column < piece.size)
        pltriton.store(at(column + piece.start), block, mask=mask)


def _whole_kernel(shape: Shape, refs: Refs, out_ref: Any) -> None:
    """Writes the result `[B, n, H, v]`: one part has it all."""
    tile = _tile(shape)
    _, total, sums = _walk(shape, refs, tile, True)
    divisor = jnp.where(total == 0, 1.0, total)[:, None]  # a row that sees nothing gets zeros
    node, head = tile.node[:, None], tile.head[:, None]
    _store_pieces(
        lambda column: out_ref.at[tile.sequence, node, head, column],
        tile.valid[:, None],
        shape.values,
        [(s / divisor).astype(out_ref.dtype) for s in sums],
    )


def _part_kernel(
    shape: Shape,
    refs: Refs,
    top_ref: Any,  # [B, K, parts, n*G]
    total_ref: Any,  # [B, K, parts, n*G]
    sums_ref: Any,  # [B, K, parts, n*G, v]
) -> None:
    """Writes one part's maximum, sum of weights and weighted values; idle parts write nothing."""
    tile, part = _tile(shape), pl.program_id(1)
    _, _, fresh_part = _prefix_parts(_length(refs, tile.sequence, shape), shape.config)
    top, total, sums = _walk(shape, refs, tile, part == fresh_part)
    live = tile.valid & (part <= fresh_part)
    where = (tile.sequence, tile.kv_head, part, tile.row)
    pltriton.store(top_ref.at[where], top, mask=live)
    pltriton.store(total_ref.at[where], total, mask=live)
    row = tile.row[:, None]
    _store_pieces(
        lambda column: sums_ref.at[tile.sequence, tile.kv_head, part, row, column],
        live[:, None],
        shape.values,
        sums,
    )


def _combine_kernel(
    shape: Shape,
    lengths_ref: Any,  # [B]
    top_ref: Any,  # [B, K, parts, n*G]
    total_ref: Any,  # [B, K, parts, n*G]
    sums_ref: Any,  # [B, K, parts, n*G, v]
    out_ref: Any,  # [B, n, H, v]
) -> None:
    """Joins the parts of some columns of one row."""
    config, problem = shape.config, shape.problem
    columns, row_of_all, sequence = (pl.program_id(i) for i in range(3))
    kv_head = jax.lax.div(row_of_all, shape.group_rows)
    row = jax.lax.rem(row_of_all, shape.group_rows)
    length = jnp.minimum(lengths_ref[sequence], problem.table_width)
    _, _, last = _prefix_parts(length, config)
    part = jnp.arange(_power_of_two(config.splits))
    live = part <= last
    where = (sequence, kv_head, part, row)
    top = pltriton.load(top_ref.at[where], mask=live, other=-jnp.inf)
    total = pltriton.load(total_ref.at[where], mask=live, other=0)
    highest = jnp.max(top, axis=0)
    weight = jnp.exp2(top - jnp.where(highest == -jnp.inf, 0.0, highest))
    divisor = jnp.sum(weight * total, axis=0)
    block = _combine_columns(problem)
    column = columns * block + jnp.arange(block)
    inside = column < problem.value_width
    sums = pltriton.load(
        sums_ref.at[sequence, kv_head, part[:, None], row, column[None, :]],
        mask=live[:, None] & inside[None, :],
        other=0,
    )
    out = jnp.sum(weight[:, None] * sums, axis=0) / jnp.where(divisor == 0, 1.0, divisor)
    node, head = jax.lax.div(row, problem.group), jax.lax.rem(row, problem.group)
    pltriton.store(
        out_ref.at[sequence, node, kv_head * problem.group + head, column],
        out.astype(out_ref.dtype),
        mask=inside,
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _combine_columns(problem: Problem) -> int:
    return min(_power_of_two(problem.value_width), COMBINE_COLUMNS)


# --- calls ----------------------------------------------------------------------------------------


def tree_attention(
    q: Float[Array, "B n H h"],
    fresh_k: Float[Array, "B m K h"],
    fresh_v: Float[Array, "B m K v"] | None,
    ancestors: Bool[Array, "B n m"] | None,
    pages_k: Float[Array, "L P p K h"] | None = None,
    pages_v: Float[Array, "L P p K v"] | None = None,
    page_table: Int[Array, "B S"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    layer: Int[Array, ""] | int = 0,
    *,
    value_width: int | None = None,
    scale: float | None = None,
    chip: Chip | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "B n H o"]:
    """See `reference.tree_attention`.

    Args:
        chip: what the launch is chosen for; by default the GPU that is present.
        config: the launch, in place of the heuristic's choice.
        interpret: run in Pallas' interpreter.

    Raises:
        ValueError: more nodes under a mask than there are bits, sizes that do not fit each other,
            or no launch within the chip's shared memory.
    """
    problem = _problem(q, fresh_k, fresh_v, ancestors, pages_k, page_table, value_width)
    config = config or launch.choose(problem, chip or chips.current())
    factor = problem.head_dim**-0.5 if scale is None else scale
    shape = Shape(problem, config, factor * LOG2_E)
    arrays = {
        "q": q,
        "fresh_k": fresh_k,
        "fresh_v": fresh_v,
        "bits": None if ancestors is None else pack_ancestors(ancestors),
        "pages_k": pages_k,
        "pages_v": pages_v,
        "page_table": page_table,
        "lengths": lengths,
        "layer": None if pages_k is None else jnp.asarray(layer, jnp.int32).reshape(1),
    }
    present = {name: array for name, array in arrays.items() if array is not None}
    result = jax.ShapeDtypeStruct((*q.shape[:3], problem.value_width), q.dtype)
    if config.splits == 1:
        [out] = _walk_call(shape, _whole_kernel, present, [result], interpret)
        return out
    parts = (problem.batch, problem.kv_heads, config.splits, shape.group_rows)
    results = [
        jax.ShapeDtypeStruct(size, jnp.float32)
        for size in (parts, parts, (*parts, problem.value_width))
    ]
    found = _walk_call(shape, _part_kernel, present, results, interpret)
    return pl.pallas_call(
        functools.partial(_combine_kernel, shape),
        out_shape=result,
        grid=(
            pl.cdiv(problem.value_width, _combine_columns(problem)),
            problem.kv_heads * shape.group_rows,
            problem.batch,
        ),
        compiler_params=pltriton.CompilerParams(num_warps=COMBINE_WARPS, num_stages=1),
        interpret=interpret,
        name="tree_attention_combine",
    )(present["lengths"], *found)


def _walk_call(
    shape: Shape,
    kernel: Callable[..., None],
    arrays: dict[str, Array],
    results: Sequence[jax.ShapeDtypeStruct],
    interpret: bool,
) -> Sequence[Array]:
    """Runs a kernel over (tiles of rows, parts, kv heads, sequences)."""
    problem, config = shape.problem, shape.config

    def body(*refs: Any) -> None:
        given = dict(zip(arrays, refs[: len(arrays)], strict=True))
        kernel(shape, Refs(**given), *refs[len(arrays) :])

    tiles = pl.cdiv(shape.group_rows, config.block_m)
    return pl.pallas_call(
        body,
        out_shape=list(results),
        grid=(tiles, config.splits, problem.kv_heads, problem.batch),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="tree_attention",
    )(*arrays.values())


def pack_ancestors(ancestors: Bool[Array, "B n m"]) -> Int[Array, "B n words"]:
    """Bit `j % 32` of word `j // 32` says whether a row sees fresh row j."""
    batch, rows, nodes = ancestors.shape
    words = -(-nodes // WORD_BITS)
    padded = jnp.pad(ancestors, ((0, 0), (0, 0), (0, words * WORD_BITS - nodes)))
    bits = padded.reshape(batch, rows, words, WORD_BITS).astype(jnp.uint32)
    place = jnp.arange(WORD_BITS, dtype=jnp.uint32).reshape(1, 1, 1, -1)
    packed = jnp.sum(bits << place, axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(packed, jnp.int32)


def _problem(
    q: Array,
    fresh_k: Array,
    fresh_v: Array | None,
    ancestors: Array | None,
    pages_k: Array | None,
    page_table: Array | None,
    value_width: int | None,
) -> Problem:
    """The sizes of a call; raises ValueError where they do not fit each other."""
    batch, rows, heads, width = q.shape
    nodes, kv_heads = fresh_k.shape[1:3]
    if ancestors is not None and nodes > FEW_ROWS:
        raise ValueError(
            f"tree_attention: {nodes} fresh rows under an ancestor mask, expected at most "
            f"{FEW_ROWS}"
        )
    if heads % kv_heads or nodes < rows:
        raise ValueError(
            f"tree_attention: {heads} query heads on {kv_heads} kv heads, {rows} rows of a block "
            f"of {nodes}: expected a multiple, and no more rows than the block has"
        )
    shared = fresh_v is None
    if shared == (value_width is None) or not 0 < (value_width or 1) <= width:
        raise ValueError(
            f"tree_attention: value_width {value_width} of keys of {width}: expected values, or "
            "how many of the keys' first entries they are"
        )
    page_size = 1 if pages_k is None else pages_k.shape[2]
    return Problem(
        batch=batch,
        rows=rows,
        nodes=nodes,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=width,
        value_width=value_width or (width if fresh_v is None else fresh_v.shape[-1]),
        shared_values=shared,
        page_size=page_size,
        table_width=0 if page_table is None else page_table.shape[1] * page_size,
        itemsize=q.dtype.itemsize,
    )
