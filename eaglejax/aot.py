"""Compiling for a GPU that is not present, and reading what the compiler made of each kernel.

XLA's whole GPU compiler runs without a GPU when it is told the chip's numbers; it refuses a kernel
that asks for more shared memory than the chip has. `ptxas` then tells registers and spills, and
`cuobjdump` shows the machine code.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels.chips import Chip, compiling_for

EXTRA = "eaglejax[aot]"
REGISTERS_PER_MULTIPROCESSOR = 65_536
RESERVED_SHARED_BYTES = 1024  # of each resident block, by the driver
THUNK = re.compile(
    r"\s*\d+: k(?:Custom)?Kernel .*?\] (\S+) grid: \[(.*?)\] threads: \[(\d+).*shared_memory: (\d+)"
)
COMMAND_BUFFER = re.compile(r"^( *)\d+: kCommandBuffer")
NESTED = re.compile(r"^( *)\d+: ")
ENTRY = re.compile(r"\.entry (\w+)\(")
PALLAS = re.compile(r'\bname = "([^"]+)", num_stages = \d+ : i32, num_warps')
# Machine code: HMMA of Ampere and consumer Blackwell, HGMMA of Hopper, UTC*MMA of Blackwell B200.
TENSOR_CORE = re.compile(r"\b(?:[HIQOD]MMA|[HIQ]GMMA|UTC[A-Z]*MMA)\b")
# CUDA 12 and 13: the plugin, its package, the folder of ptxas below `nvidia`, and its package.
TOOLCHAINS = (
    ("xla_cuda12", "jax-cuda12-plugin", "cuda_nvcc/bin", "nvidia-cuda-nvcc-cu12"),
    ("xla_cuda13", "jax-cuda13-plugin", "cu13/bin", "nvidia-cuda-nvcc"),
)


class MissingCompiler(RuntimeError):
    """A package that compiling for a GPU needs is not installed; says which extra has it."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        name: of the `pallas_call`, or XLA's own for a fusion.
        grid: blocks.
        threads: a block.
        shared_bytes: a block.
        pallas: one of ours; else a fusion of XLA's.
        in_command_buffer: launched as part of a CUDA graph.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    pallas: bool
    in_command_buffer: bool


@dataclass(frozen=True)
class KernelResources(Launch):
    """What a launch takes of a multiprocessor.

    Attributes:
        registers: a thread.
        spill_bytes: stored to and loaded from local memory, a thread.
        blocks_per_multiprocessor: resident at once.
        tensor_core_instructions: in the machine code.
    """

    registers: int
    spill_bytes: int
    blocks_per_multiprocessor: int
    tensor_core_instructions: int


@dataclass(frozen=True)
class Compiled:
    """A program for an absent GPU.

    Attributes:
        executable: XLA's.
        seconds: that tracing and compiling took.
        launches: of all kernels, in order; the body of a loop once.
        kernels: our own kernels among them, where they were inspected.
    """

    executable: jax.stages.Compiled
    seconds: float
    launches: tuple[Launch, ...]
    kernels: tuple[KernelResources, ...]


def prepare() -> None:
    """Lets JAX load the CUDA compiler without a GPU. Call before anything uses a JAX device.

    JAX runs on the CPU from then on, also where there is a GPU.

    Raises:
        MissingCompiler: a package of the extra is missing.
    """
    toolchain()
    _disassembler()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # that there is no driver is known
    # XLA's Triton pipeline takes a stack trace for each kernel; to name its frames takes
    # llvm-symbolizer, where there is one, far longer than compiling.
    os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")
    jax.config.update("jax_platforms", "cpu")


def toolchain() -> Path:
    """The ptxas that goes with the installed plugin.

    Raises:
        MissingCompiler: there is no plugin, or no ptxas.
    """
    found = [t for t in TOOLCHAINS if _folders("jax_plugins." + t[0])]
    if not found:
        raise _missing(TOOLCHAINS[0][1])
    _, _, folder, package = found[0]
    for root in _folders("nvidia"):
        path = root / folder / "ptxas"
        if path.exists():
            return path
    raise _missing(package)


def _folders(module: str) -> list[Path]:
    """Where a package lies, without importing it; nowhere if it is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package above it
        return []
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def _missing(package: str) -> MissingCompiler:
    return MissingCompiler(f"{package} is not installed: pip install '{EXTRA}'")


def _disassembler() -> Path:
    for root in _folders("triton"):
        path = root / "backends" / "nvidia" / "bin" / "cuobjdump"
        if path.exists():
            return path
    raise _missing("triton (for its cuobjdump)")


def target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto of a chip, in text form."""
    major, minor = chip.capability
    return f"""
gpu_device_info {{
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {chip.shared_memory_per_block}
  shared_memory_per_core: {chip.shared_memory_per_multiprocessor}
  threads_per_core_limit: {chip.threads_per_multiprocessor}
  core_count: {chip.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)}
  l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {chip.clock_hz / 1e9}
  device_memory_size: {chip.memory_bytes}
  registers_per_core_limit: {REGISTERS_PER_MULTIPROCESSOR}
  registers_per_block_limit: {REGISTERS_PER_MULTIPROCESSOR}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{chip.device_kind}"
"""


def absent_devices(chip: Chip, count: int = 1) -> Sequence[Any]:
    """Devices to compile for and to shard over; nothing can run on them."""
    topology = f"1x1x{count}"
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology,
        topology=topology,
        target_config=target_config(chip),
    )
    return described.devices


def compile_for(
    chip: Chip,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    inspect: bool = True,
) -> Compiled:
    """Compiles a function for one GPU.

    Args:
        chip: which.
        function: of arrays; Python values are static when closed over.
        arguments: arrays or `jax.ShapeDtypeStruct`s, in pytrees.
        donate: argument numbers whose buffers the result may take.
        inspect: look at the machine code of our kernels too, which takes seconds for each.

    Raises:
        Exception: what the compiler says; a kernel over the chip's shared memory is one.
    """
    mesh = jax.sharding.Mesh(absent_devices(chip), ("device",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    jitted = jax.jit(function, donate_argnums=donate)
    started = time.perf_counter()
    with compiling_for(chip):
        lowered = jitted.lower(*jax.tree.map(shape, arguments))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_emitter_re": ".*"}
        executable = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - started
        names = frozenset(PALLAS.findall(executable.as_text() or ""))
        launched = launches(Path(folder), names)
        ours = [one for one in launched if one.pallas] if inspect else []
        return Compiled(executable, seconds, launched, _resources(chip, Path(folder), ours))


def launches(dump: Path, pallas_names: frozenset[str]) -> tuple[Launch, ...]:
    """Kernel launches of a program, from the folder that XLA dumped it to.

    Args:
        dump: of one compilation, `--xla_dump_to` with `--xla_dump_emitter_re=.*`.
        pallas_names: of our own kernels.
    """
    found = []
    # The second file is written only where a pass (command buffers) changed the first.
    sequences = list(dump.glob("*thunk_sequence_after_thunk_passes.txt"))
    for sequence in sequences or dump.glob("*thunk_sequence.txt"):
        for line, in_graph in _with_command_buffers(sequence.read_text()):
            launch = THUNK.match(line)
            if launch is None:
                continue
            name, grid, threads, shared = launch.groups()
            # XLA numbers kernels that share a name.
            ours = name in pallas_names or re.sub(r"_+\d+$", "", name) in pallas_names
            x, y, z = (int(n) for n in grid.split(","))
            found.append(Launch(name, (x, y, z), int(threads), int(shared), ours, in_graph))
    return tuple(found)


def _resources(chip: Chip, dump: Path, ours: Sequence[Launch]) -> tuple[KernelResources, ...]:
    """What ptxas and cuobjdump tell of launched kernels."""
    names = {launch.name for launch in ours}
    compiled: dict[str, tuple[int, int, int]] = {}
    for ptx in sorted(dump.glob("*.ptx")):
        if names & set(ENTRY.findall(ptx.read_text())):
            compiled |= _machine_code(chip, ptx)
    return tuple(_with_code(chip, launch, compiled[launch.name]) for launch in ours)


def _with_command_buffers(sequence: str) -> list[tuple[str, bool]]:
    """Lines of a thunk sequence, and whether each lies inside a command buffer."""
    lines, depth = [], None
    for line in sequence.splitlines():
        start = NESTED.match(line)
        indent = len(start[1]) if start else 0
        if depth is not None and indent <= depth:
            depth = None
        if COMMAND_BUFFER.match(line):
            depth = indent
        lines.append((line, depth is not None))
    return lines


def _with_code(chip: Chip, launch: Launch, code: tuple[int, int, int]) -> KernelResources:
    registers, spills, tensor = code
    resident = min(
        chip.threads_per_multiprocessor // launch.threads,
        REGISTERS_PER_MULTIPROCESSOR // (launch.threads * -(-registers // 8) * 8),
        chip.shared_memory_per_multiprocessor // (launch.shared_bytes + RESERVED_SHARED_BYTES),
    )
    return KernelResources(
        **vars(launch),
        registers=registers,
        spill_bytes=spills,
        blocks_per_multiprocessor=resident,
        tensor_core_instructions=tensor,
    )


def _machine_code(chip: Chip, ptx: Path) -> dict[str, tuple[int, int, int]]:
    """Registers, spilled bytes and tensor-core instructions of each kernel of a PTX file."""
    cubin = ptx.with_suffix(".cubin")
    log = _run(toolchain(), "-v", f"-arch={chip.arch}", "-o", cubin, ptx).stderr
    functions = _run(_disassembler(), "-sass", cubin).stdout.split("Function : ")[1:]
    tensor = {f.split(None, 1)[0]: len(TENSOR_CORE.findall(f)) for f in functions}
    report: dict[str, tuple[int, int, int]] = {}
    for name, rest in re.findall(
        r"entry function '(\w+)'(.*?)(?=ptxas info\s+: Compiling entry|\Z)", log, re.DOTALL
    ):
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", rest)]
        used = re.search(r"Used (\d+) registers", rest)
        assert used is not None, log
        report[name] = (int(used[1]), sum(spills), tensor[name])
    return report


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)
