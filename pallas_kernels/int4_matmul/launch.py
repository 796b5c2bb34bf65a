"""Launch configurations of the quantised products: how a problem is cut for a chip.

Two regimes. Up to `FEW_ROWS` rows the weights' bytes decide, and the cut over inputs and outputs
is a function of the matrix and the chip alone, so a row has the same bits among any number of
others. Beyond, arithmetic decides and blocks grow.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.chips import CHIPS, Chip

FEW_ROWS = 64
MANY_BLOCK = 64  # rows of a program from which on weights are dequantised first
ROWS_PER_DOT = 16  # the fewest that a tensor-core product takes
COLUMNS_PER_WARP = 64  # eight columns of a product, eight levels of a 32-bit word
WARPS_PER_MULTIPROCESSOR = 8  # that keep enough loads in flight
PARTIAL_INPUTS = 512  # fewest inputs of one part, so that partial sums stay few beside weights
SCRATCH_BYTES = 2048  # of layout changes: scales on their way to the accumulators' layout
TUNED = Path(__file__).parent.parent / "tuned"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch is chosen for.

    Attributes:
        rows: of activations; only its regime and row blocks depend on them.
        inputs: K.
        outputs: N.
        group_size: inputs that share a scale.
        bits: 4 or 8.
        matrices: read by one call: 2 for gate and up.
    """

    rows: int
    inputs: int
    outputs: int
    group_size: int
    bits: int
    matrices: int = 1


@dataclass(frozen=True, kw_only=True)
class Config:
    """One launch.

    Attributes:
        block_m: rows of a program.
        block_n: outputs of a program.
        block_k: inputs of one step of its loop; never across two groups.
        split_k: parts of the inputs, summed in order afterwards.
        num_warps: of a program.
        num_stages: steps in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, problem: Problem, chip: Chip) -> int:
        """Upper bound of the shared memory of a program; a test holds the compiler to it."""
        count, scales = problem.matrices, 8 * self.block_n
        weights = self.block_k * self.block_n * problem.bits // 8 * count
        activations = self.block_m * self.block_k * 2
        if self.block_m < MANY_BLOCK:
            # The compiler keeps one step less than it has stages.
            staged = max(self.num_stages - 1, 1) * (weights + activations)
            return staged + SCRATCH_BYTES
        # Many rows: also scales, and dequantised blocks, which Hopper's and Blackwell's data-centre
        # tensor cores read from shared memory; the others only change their layout there.
        dequantised = self.block_k * self.block_n * 2 * (count if chip.capability[0] < 12 else 1)
        staged = self.num_stages * (weights + activations + scales * count) + dequantised
        return max(staged, self.block_m * self.block_n * 4) + SCRATCH_BYTES


def choose(problem: Problem, chip: Chip | None) -> Config:
    """A launch for a problem: from the chip's tuned table, else by the heuristic.

    Args:
        problem: sizes; valid for the kernel.
        chip: None stands for the least of all limits.

    Raises:
        ValueError: nothing fits the chip's shared memory; tells the sizes.
    """
    limits = chip or smallest()
    tuned = _tuned(limits.name).get(_key(problem)) if chip else None
    config = tuned or (_few if problem.rows <= FEW_ROWS else _many)(problem, limits)
    require_fit(config, problem, limits)
    return config


def smallest() -> Chip:
    """Stands in where no chip is known."""
    return min(CHIPS.values(), key=lambda chip: chip.shared_memory_per_block)


def require_fit(config: Config, problem: Problem, chip: Chip) -> None:
    """Stops before a launch that the chip would refuse.

    Raises:
        ValueError: the program needs more shared memory than a block may have.
    """
    needed = config.shared_bytes(problem, chip)
    if needed > chip.shared_memory_per_block:
        raise ValueError(
            f"int4_matmul: {problem} needs {needed} bytes of shared memory as {config}, "
            f"and {chip.name} has {chip.shared_memory_per_block} a block"
        )


def step_inputs(group_size: int, most: int = 128) -> int:
    """Inputs of one step: a power of two that divides the group, or one that covers it, masked."""
    divisor = min(group_size & -group_size, most)
    if divisor >= ROWS_PER_DOT:
        return divisor
    return min(max(1 << (group_size - 1).bit_length(), ROWS_PER_DOT), most)


def steps(problem: Problem, block_k: int) -> int:
    """Steps over all inputs."""
    return problem.inputs // problem.group_size * -(-problem.group_size // block_k)


def _few(problem: Problem, chip: Chip) -> Config:
    """Weight streaming: enough programs to fill the chip, few partial sums."""
    block_k = step_inputs(problem.group_size)
    count = steps(problem, block_k)
    splits = [
        s
        for s in range(1, 17)
        if count % s == 0 and (s == 1 or problem.inputs // s >= PARTIAL_INPUTS)
    ]
    columns = COLUMNS_PER_WARP * 4 // problem.bits
    wanted = chip.multiprocessors * WARPS_PER_MULTIPROCESSOR

    def cost(candidate: tuple[int, int]) -> float:
        """Bytes, inflated by the part of the chip that has nothing to do."""
        warps, split = candidate
        programs = -(-problem.outputs // (columns * warps)) * split
        weights = problem.inputs * programs // split * columns * warps * problem.bits / 8
        partials = 8 * ROWS_PER_DOT * split * problem.outputs * (split > 1)
        # Rows of a block shorter than a cache line of 128 bytes cost whole sectors and tags.
        short = 1 + 0.05 * (4 // warps - 1)
        return (weights * short + partials) / min(1.0, programs * warps / wanted)

    # Not two warps: the compiler then gives both the same columns.
    warps, split = min(((w, s) for w in (4, 1) for s in splits), key=cost)
    most = 2 // problem.matrices  # accumulators of more tiles of rows would not fit the registers
    tiles = min(1 << (-(-problem.rows // ROWS_PER_DOT) - 1).bit_length(), most)
    return fit(
        Config(
            block_m=ROWS_PER_DOT * tiles,
            block_n=columns * warps,
            block_k=block_k,
            split_k=split,
            num_warps=warps,
            num_stages=5 if block_k <= 32 else 4,
        ),
        problem,
        chip,
    )


def _many(problem: Problem, chip: Chip) -> Config:
    """Blocks large enough for the tensor cores."""
    return fit(
        Config(
            block_m=128,
            block_n=128,
            block_k=step_inputs(problem.group_size, 64),
            split_k=1,
            num_warps=8,
            num_stages=4,
        ),
        problem,
        chip,
    )


def fit(config: Config, problem: Problem, chip: Chip) -> Config:
    """Fewer stages until the shared memory suffices."""
    limit = chip.shared_memory_per_block
    while config.num_stages > 1 and config.shared_bytes(problem, chip) > limit:
        config = dataclasses.replace(config, num_stages=config.num_stages - 1)
    return config


def _key(problem: Problem) -> str:
    """Name of a problem in a tuned table; one bucket of rows up to `FEW_ROWS`."""
    p = problem
    bucket = "few" if p.rows <= FEW_ROWS else "many"
    return f"{bucket} {p.inputs}x{p.outputs} int{p.bits} group {p.group_size} x{p.matrices}"


@functools.cache
def _tuned(name: str) -> dict[str, Config]:
    """The chip's table `tuned/<name>.json`: problem to the fields of a Config; may be missing."""
    path = TUNED / f"{name}.json"
    if not path.exists():
        return {}
    return {key: Config(**fields) for key, fields in json.loads(path.read_text()).items()}
