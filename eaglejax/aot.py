"""Compiling for a GPU that is not present, and reading what the compiler made of each kernel.

XLA's whole GPU compiler runs without a GPU when it is told the chip's numbers; it refuses a kernel
that asks for more shared memory than the chip has. `ptxas` then tells registers and spills.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels.chips import Chip

EXTRA = "eaglejax[aot]"
REGISTERS_PER_MULTIPROCESSOR = 65_536
RESERVED_SHARED_BYTES = 1024  # of each resident block, by the driver
THUNK = re.compile(
    r"^\s*\d+: kCustomKernel .*?\] (\S+) grid: \[(.*?)\] threads: \[(\d+).*shared_memory: (\d+)",
    re.MULTILINE,
)
TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


class MissingCompiler(RuntimeError):
    """A package that compiling for a GPU needs is not installed; says which extra has it."""


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel takes of a multiprocessor.

    Attributes:
        name: of the `pallas_call`, or XLA's own for a fusion.
        grid: blocks launched.
        threads: a block.
        registers: a thread.
        spill_bytes: stored to and loaded from local memory, a thread.
        shared_bytes: a block.
        blocks_per_multiprocessor: resident at once.
        tensor_core_instructions: in the machine-independent code.
    """

    name: str
    grid: tuple[int, int, int]
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_multiprocessor: int
    tensor_core_instructions: int


@dataclass(frozen=True)
class Compiled:
    """A program for an absent GPU: XLA's executable and every kernel that it launches, in order."""

    executable: jax.stages.Compiled
    kernels: tuple[KernelResources, ...]


def prepare() -> None:
    """Lets JAX load the CUDA compiler without a GPU. Call before anything uses a JAX device.

    Raises:
        MissingCompiler: a package of the extra is missing.
    """
    for module, package in (("jax_plugins.xla_cuda12", "jax-cuda12-plugin"),):
        if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec(module):
            raise MissingCompiler(f"{package} is not installed: pip install '{EXTRA}'")
    _ptxas()
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


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
    chip: Chip, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> Compiled:
    """Compiles a function for one GPU.

    Args:
        chip: which.
        function: of arrays; Python values are static when closed over.
        arguments: arrays or `jax.ShapeDtypeStruct`s, in pytrees.
        donate: argument numbers whose buffers the result may take.

    Raises:
        Exception: what the compiler says; a kernel over the chip's shared memory is one.
    """
    mesh = jax.sharding.Mesh(absent_devices(chip), ("device",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    jitted = jax.jit(function, donate_argnums=donate)
    lowered = jitted.lower(*jax.tree.map(shape, arguments))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_emitter_re": ".*"}
        executable = lowered.compile(compiler_options=options)
        return Compiled(executable, _resources(chip, Path(folder)))


def _resources(chip: Chip, dump: Path) -> tuple[KernelResources, ...]:
    """Reads XLA's dump: launches from the thunk sequence, the rest from ptxas."""
    compiled: dict[str, tuple[int, int, int]] = {}
    for ptx in sorted(dump.glob("*.ptx")):
        if ptx.stat().st_size:
            compiled |= _ptxas_report(chip, ptx)
    found = []
    for sequence in dump.glob("*thunk_sequence.txt"):
        for name, grid, threads, shared in THUNK.findall(sequence.read_text()):
            found.append(_kernel(chip, name, grid, int(threads), int(shared), compiled[name]))
    return tuple(found)


def _kernel(
    chip: Chip, name: str, grid: str, threads: int, shared: int, code: tuple[int, int, int]
) -> KernelResources:
    registers, spills, tensor = code
    x, y, z = (int(n) for n in grid.split(","))
    resident = min(
        chip.threads_per_multiprocessor // threads,
        REGISTERS_PER_MULTIPROCESSOR // (threads * -(-registers // 8) * 8),
        chip.shared_memory_per_multiprocessor // (shared + RESERVED_SHARED_BYTES),
    )
    return KernelResources(name, (x, y, z), threads, registers, spills, shared, resident, tensor)


def _ptxas_report(chip: Chip, ptx: Path) -> dict[str, tuple[int, int, int]]:
    """Registers, spilled bytes and tensor-core instructions of each kernel of a PTX file."""
    run = subprocess.run(
        [_ptxas(), "-v", f"-arch={chip.arch}", "-o", os.devnull, ptx],
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, tuple[int, int, int]] = {}
    text = ptx.read_text()
    bodies = {
        match[1]: body
        for match, body in (
            (re.match(r"\s*(\w+)\(", part), part) for part in text.split(".visible .entry")[1:]
        )
        if match
    }
    for name, rest in re.findall(
        r"entry function '(\w+)'(.*?)(?=ptxas info\s+: Compiling entry|\Z)", run.stderr, re.DOTALL
    ):
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", rest)]
        used = re.search(r"Used (\d+) registers", rest)
        assert used is not None, run.stderr
        report[name] = (int(used[1]), sum(spills), len(TENSOR_CORE.findall(bodies[name])))
    return report


def _ptxas() -> str:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / "cuda_nvcc" / "bin" / "ptxas"
        if path.exists():
            return str(path)
    raise MissingCompiler(f"nvidia-cuda-nvcc-cu12 is not installed: pip install '{EXTRA}'")
