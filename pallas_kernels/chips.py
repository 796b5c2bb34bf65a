"""GPUs that the kernels are tuned and compiled for, and the numbers that decide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """What a kernel's launch is chosen by. Sizes in bytes, rates a second.

    Attributes:
        name: as `--gpu` takes it.
        device_kind: as JAX and the driver name it.
        capability: CUDA compute capability.
        multiprocessors: how many.
        shared_memory_per_block: the most one block may ask for.
        shared_memory_per_multiprocessor: what its resident blocks share.
        threads_per_multiprocessor: the most resident threads.
        l2_bytes: size of the L2 cache.
        memory_bytes: of the device.
        bandwidth: of its memory.
        bf16_flops: dense, float32 accumulation.
        clock_hz: boost clock.
    """

    name: str
    device_kind: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    clock_hz: float

    @property
    def arch(self) -> str:
        """Name for ptxas, with the features of this generation alone: `sm_120a`."""
        major, minor = self.capability
        return f"sm_{major}{minor}a"


def _data_centre(name: str, kind: str, capability: tuple[int, int], **numbers: float) -> Chip:
    sizes = (232_448, 233_472, 2048)
    return Chip(name, kind, capability, int(numbers.pop("multiprocessors")), *sizes, **numbers)  # type: ignore[arg-type]


def _workstation(name: str, kind: str, **numbers: float) -> Chip:
    sizes = (101_376, 102_400, 1536)
    return Chip(name, kind, (12, 0), int(numbers.pop("multiprocessors")), *sizes, **numbers)  # type: ignore[arg-type]


MIB = 1 << 20
# NVIDIA's data sheets and white papers for Hopper and Blackwell.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _data_centre(
            "h100",
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            multiprocessors=132,
            l2_bytes=50 * MIB,
            memory_bytes=81_559 * MIB,
            bandwidth=3.35e12,
            bf16_flops=989e12,
            clock_hz=1.98e9,
        ),
        _data_centre(
            "h200",
            "NVIDIA H200",
            (9, 0),
            multiprocessors=132,
            l2_bytes=50 * MIB,
            memory_bytes=143_771 * MIB,
            bandwidth=4.8e12,
            bf16_flops=989e12,
            clock_hz=1.98e9,
        ),
        _data_centre(
            "b200",
            "NVIDIA B200",
            (10, 0),
            multiprocessors=148,
            l2_bytes=126 * MIB,
            memory_bytes=183_359 * MIB,
            bandwidth=8.0e12,
            bf16_flops=2250e12,
            clock_hz=1.965e9,
        ),
        _workstation(
            "rtx-pro-6000",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            multiprocessors=188,
            l2_bytes=128 * MIB,
            memory_bytes=97_887 * MIB,
            bandwidth=1.597e12,
            bf16_flops=503.8e12,
            clock_hz=2.6e9,
        ),
        _workstation(
            "rtx-5090",
            "NVIDIA GeForce RTX 5090",
            multiprocessors=170,
            l2_bytes=96 * MIB,
            memory_bytes=32_607 * MIB,
            bandwidth=1.792e12,
            bf16_flops=209.5e12,
            clock_hz=2.41e9,
        ),
    )
}


def find(name: str) -> Chip:
    """A chip by name.

    Raises:
        ValueError: no such chip; names those there are.
    """
    try:
        return CHIPS[name]
    except KeyError:
        raise ValueError(f"gpu {name!r}: expected one of {', '.join(CHIPS)}") from None


_TARGET: ContextVar[Chip | None] = ContextVar("target", default=None)


@contextlib.contextmanager
def compiling_for(chip: Chip | None) -> Iterator[None]:
    """Kernels traced inside choose their launches for this chip, which need not be present."""
    token = _TARGET.set(chip)
    try:
        yield
    finally:
        _TARGET.reset(token)


def current() -> Chip | None:
    """The chip compiled for, or the GPU that is present; None where neither is known here."""
    target = _TARGET.get()
    if target is not None or jax.default_backend() != "gpu":
        return target
    kind = jax.devices()[0].device_kind
    return next((chip for chip in CHIPS.values() if chip.device_kind == kind), None)
