"""Every kernel case, compiled for a GPU that is not present."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pallas_kernels
from eaglejax.aot import KernelResources, compile_for
from pallas_kernels.chips import Chip


@dataclass(frozen=True)
class KernelReport:
    """A case on a chip; the numbers of several launches are the largest, spills their sum.

    Attributes:
        op, case: which.
        gpu: name of the chip.
        compiles: the compiler took it.
        error: what it said otherwise.
        registers, spill_bytes, shared_bytes, blocks_per_multiprocessor, tensor_core_instructions:
            see `KernelResources`; the fewest blocks.
        bytes_moved, flops: that the case needs at least.
        bandwidth_seconds, compute_seconds: that the chip's memory and tensor cores take for them.
        compile_seconds: of tracing and compiling.
        launches: the kernels one by one.
    """

    op: str
    case: str
    gpu: str
    compiles: bool
    error: str | None
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_multiprocessor: int
    tensor_core_instructions: int
    bytes_moved: int
    flops: int
    bandwidth_seconds: float
    compute_seconds: float
    compile_seconds: float
    launches: tuple[KernelResources, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Program:
    """A kernel case as a function of shapes."""

    op: str
    case: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    bytes_moved: int
    flops: int


def programs(chip: Chip, wanted: Sequence[str] = ()) -> Iterator[Program]:
    """All cases of all ops as they run on a chip.

    Args:
        chip: decides the launch.
        wanted: parts of `op/case`, any of which will do; none for all.
    """
    for folder in pkgutil.iter_modules(pallas_kernels.__path__):
        module = f"pallas_kernels.{folder.name}.programs"
        if not folder.ispkg or importlib.util.find_spec(module) is None:
            continue
        for case, function, arguments, moved, flops in importlib.import_module(module).programs(
            chip
        ):
            name = f"{folder.name}/{case}"
            if not wanted or any(part in name for part in wanted):
                yield Program(folder.name, case, function, tuple(arguments), int(moved), int(flops))


def report(chip: Chip, program: Program) -> KernelReport:
    """Compiles one case; a compiler's refusal is a result, not an exception."""
    error, compiled = None, None
    try:
        compiled = compile_for(chip, program.function, *program.arguments)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}".strip()
    kernels = compiled.kernels if compiled else ()
    if compiled is not None and not kernels:
        error = "no Pallas kernel in the compiled program"
    return KernelReport(
        op=program.op,
        case=program.case,
        gpu=chip.name,
        compiles=error is None,
        error=error,
        registers=max((k.registers for k in kernels), default=0),
        spill_bytes=sum(k.spill_bytes for k in kernels),
        shared_bytes=max((k.shared_bytes for k in kernels), default=0),
        blocks_per_multiprocessor=min((k.blocks_per_multiprocessor for k in kernels), default=0),
        tensor_core_instructions=max((k.tensor_core_instructions for k in kernels), default=0),
        bytes_moved=program.bytes_moved,
        flops=program.flops,
        bandwidth_seconds=program.bytes_moved / chip.bandwidth,
        compute_seconds=program.flops / chip.bf16_flops,
        compile_seconds=compiled.seconds if compiled else 0.0,
        launches=kernels,
    )
