"""Launch configurations of attention: how rows, keys and the prefix are cut for a chip.

Two regimes. Up to `FEW_ROWS` fresh rows the tiles and parts are a function of everything but the
number of rows, so that a token has the same bits in decoding and in verification. Beyond,
arithmetic decides: tiles grow, and the prefix is divided only as far as the chip has room.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from pallas_kernels.chips import CHIPS, Chip

FEW_ROWS = 64  # of the fresh block; also the most under a mask, the bits of two words
ROWS_PER_DOT = 16  # the fewest that a tensor-core product takes
WIDE_DOT_ROWS = 64  # from here on Hopper and B200 read operands of a product from shared memory
MOST_PARTS = 64
USUAL_NODES = 4  # of a verification, for the number of parts: many heads need no more programs
FEWEST_TILES = 2  # of a part: joining parts costs more than walking a tile
SCRATCH_BYTES = 2048  # of layout changes, reductions over warps and barriers


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch is chosen for.

    Attributes:
        batch: sequences.
        rows: n, query rows of a sequence.
        nodes: m, rows of the fresh block; up to `FEW_ROWS` neither number matters.
        kv_heads: K.
        group: query heads of one kv head.
        head_dim: width of a key.
        value_width: of a value.
        shared_values: values are the first entries of the keys.
        page_size: tokens of a page.
        table_width: tokens that a page table can hold; 0 where there is no prefix.
        itemsize: bytes of an entry.
    """

    batch: int
    rows: int
    nodes: int
    kv_heads: int
    group: int
    head_dim: int
    value_width: int
    shared_values: bool
    page_size: int
    table_width: int
    itemsize: int = 2

    @property
    def few(self) -> bool:
        """The keys' bytes decide, not arithmetic."""
        return self.nodes <= FEW_ROWS

    @property
    def exact(self) -> bool:
        """float32: without tensor cores, operands of a product lie in registers."""
        return self.itemsize > 2

    @property
    def latent(self) -> bool:
        """Heads so wide that they decide how much fits a program."""
        return self.head_dim > 256


@dataclass(frozen=True, kw_only=True)
class Config:
    """One launch.

    Attributes:
        block_m: rows of a program: nodes times query heads of one kv head.
        block_kv: keys of one step of its loop.
        splits: parts of the prefix at most, joined in order afterwards.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    block_m: int
    block_kv: int
    splits: int
    num_warps: int
    num_stages: int

    def deep(self, problem: Problem) -> bool:
        """Stages are for the prefix alone: the few rows of the fresh block are no loop.

        Page ids take every second stage, so it needs more than three to keep two steps of keys in
        flight; but a step outside a loop passes through registers.
        """
        return problem.few and self.num_stages > 3

    def shared_bytes(self, problem: Problem, chip: Chip) -> int:
        """Upper bound of the shared memory of a program."""
        width, value_width = (
            sum(piece.block for piece in pieces(0, n))
            for n in (problem.head_dim, problem.value_width)
        )
        read = width if problem.shared_values else width + value_width
        queries = self.block_m * width
        keys = self.block_kv * read
        in_flight = max(self.num_stages - 1, 1)
        if self.deep(problem):  # stages are shared out between page ids and the keys they lead to
            in_flight = -(-(self.num_stages - 2) // 2)
        if self.block_m >= WIDE_DOT_ROWS and chip.capability < (12, 0):
            # B200's tensor memory does not hold wide accumulators: they are rescaled through here.
            rescaled = problem.latent and chip.capability >= (10, 0)
            # One more, since such products still read while the next keys arrive.
            entries = (in_flight + 1) * keys + queries + rescaled * self.block_m * value_width
        else:
            entries = in_flight * keys + queries + self.block_m * self.block_kv
        return entries * problem.itemsize + SCRATCH_BYTES


@dataclass(frozen=True)
class Piece:
    """Columns of a head that one block holds: `size` of them from `start`, `block` with padding."""

    start: int
    size: int
    block: int


def pieces(start: int, size: int) -> tuple[Piece, ...]:
    """Cuts columns into blocks of a power of two, at least 16 wide: 576 is 512 + 64."""
    found = []
    while size:
        block = max(1 << (size.bit_length() - 1), ROWS_PER_DOT)
        found.append(Piece(start, min(size, block), block))
        start, size = start + block, max(size - block, 0)
    return tuple(found)


def choose(problem: Problem, chip: Chip | None) -> Config:
    """A launch for a problem.

    Args:
        problem: sizes.
        chip: None stands for the least of all limits.

    Raises:
        ValueError: nothing fits the chip's shared memory; tells the sizes.
    """
    chip = chip or min(CHIPS.values(), key=lambda c: c.shared_memory_per_block)
    most = _rows_of_a_program(problem, chip)
    for block_m, (block_kv, num_stages) in itertools.product(
        (most >> i for i in range((most // ROWS_PER_DOT).bit_length())), _steps(problem, chip)
    ):
        tiles = -(-(USUAL_NODES if problem.few else problem.rows) * problem.group // block_m)
        config = Config(
            block_m=block_m,
            block_kv=block_kv,
            splits=_parts(problem, block_kv, chip, tiles),
            num_warps=8 if problem.head_dim > 128 or block_m > 64 else 4,
            num_stages=num_stages,
        )
        needed = config.shared_bytes(problem, chip)
        if needed <= chip.shared_memory_per_block:
            return config
    raise ValueError(
        f"tree_attention: {problem} needs {needed} bytes of shared memory as {config}, and "
        f"{chip.name} has {chip.shared_memory_per_block} a block"
    )


def _rows_of_a_program(problem: Problem, chip: Chip) -> int:
    """Rows of 16 nodes fill a tile; wide heads leave room for fewer."""
    most = 64 if problem.few or problem.head_dim > 128 else 128
    if problem.latent and chip.capability >= (12, 0):
        most = 32
    if problem.exact:
        most = ROWS_PER_DOT
    nodes = ROWS_PER_DOT if problem.few else problem.rows
    return min(max(_power_of_two(nodes * problem.group), ROWS_PER_DOT), most)


def _steps(problem: Problem, chip: Chip) -> list[tuple[int, int]]:
    """Keys of a step and stages, the best first. With one stage keys would lie there twice."""
    consumer = chip.capability >= (12, 0)
    if problem.exact:
        return [(16, 3), (16, 2)]
    if problem.latent or (problem.head_dim > 128 and consumer):
        sizes = (32, 16)
    elif problem.head_dim <= 64 and not consumer:
        sizes = (128, 64, 32, 16)
    else:
        sizes = (64, 32, 16)
    # Wide heads and the warp-wide products of sm_120 have no registers left to be deep.
    deep = problem.few and not problem.latent and not consumer
    return list(itertools.product(sizes, (5, 3, 2) if deep else (3, 2)))


def _parts(problem: Problem, block_kv: int, chip: Chip, tiles: int) -> int:
    """Parts that fill the chip twice, so that a long one finds company."""
    programs = problem.batch * problem.kv_heads * tiles
    longest = problem.table_width // (block_kv * FEWEST_TILES)
    most = min(2 * chip.multiprocessors // programs, longest, MOST_PARTS)
    return 1 << (max(most, 1).bit_length() - 1)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
