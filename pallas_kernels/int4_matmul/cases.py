"""Named shapes of the quantised product, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

ROWS = (1, 2, 3, 5, 7, 16, 17, 33)  # decoding, trees, batches; most fill no block
PREFILL_ROWS = 512


@dataclass(frozen=True)
class Case:
    """A stack of matrices `[layers, inputs, outputs]`.

    Attributes:
        name: model and projection, or what is odd about it.
        minimum: weights are `q * scale + minimum`; else symmetric.
    """

    name: str
    inputs: int
    outputs: int
    bits: Literal[4, 8] = 4
    group_size: int = 32
    minimum: bool = False
    layers: int = 1

    def __str__(self) -> str:
        return self.name

    def weights(self, seed: int = 0) -> Weights:
        """Random weights; scales and minima fit half precision exactly."""
        rng = np.random.default_rng(seed)
        shape = (self.layers, self.inputs, self.outputs)
        groups = (self.layers, self.inputs // self.group_size, self.outputs)

        def halves(low: float, high: float) -> np.ndarray:
            return rng.uniform(low, high, groups).astype(np.float16).astype(np.float32)

        if self.bits == 8:
            values = rng.integers(-128, 128, shape, np.int8)
            return Weights(values, halves(1e-3, 4e-3), None)
        levels = rng.integers(0, 16, shape, np.uint8)
        values = levels[..., 0::2] | levels[..., 1::2] << 4
        scale = halves(0.01, 0.04)
        return Weights(values, scale, halves(-0.3, -0.1) if self.minimum else None)

    def rows(self, count: int, seed: int = 1) -> np.ndarray:
        """Random activations `[count, inputs]`, loud and quiet groups, one group of zeros."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((count, self.inputs // 32, 32)) * rng.lognormal(
            size=(count, self.inputs // 32, 1)
        )
        x[count // 2, 0] = 0
        return x.reshape(count, self.inputs).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Weights:
    """Arrays as `reference.int4_matmul` takes them."""

    values: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None


def _model(
    name: str, hidden: int, intermediate: int, queries: int, keys: int, **kind: object
) -> tuple[Case, ...]:
    """The linear layers of a Llama-type block."""
    sizes = {
        "q": (hidden, queries),
        "kv": (hidden, keys),
        "o": (queries, hidden),
        "gate-up": (hidden, intermediate),
        "down": (intermediate, hidden),
    }
    base = Case(name, hidden, hidden)
    return tuple(
        dataclasses.replace(base, name=f"{name}-{part}", inputs=k, outputs=n, **kind)
        for part, (k, n) in sizes.items()
    )


SMOLLM2 = (
    *_model("smollm2", 576, 1536, 576, 192, minimum=True),
    Case("smollm2-head", 576, 49152, bits=8),
)
LLAMA_8B = (
    *_model("llama-8b", 4096, 14336, 4096, 1024, group_size=128),
    Case("llama-8b-head", 4096, 128256, bits=8),
)
# Sizes that fill no power of two, and every kind of weight.
RAGGED = (
    Case("minimum-one-block", 32, 8, minimum=True),
    Case("minimum-96x48", 96, 48, minimum=True, layers=3),
    Case("minimum-2560x200", 2560, 200, minimum=True),
    Case("symmetric-96x200", 96, 200, layers=2),
    Case("symmetric-groups-64", 192, 72, group_size=64),
    Case("symmetric-groups-128", 256, 24, group_size=128, layers=2),
    Case("minimum-groups-128", 384, 40, group_size=128, minimum=True),
    Case("symmetric-whole-column", 96, 16, group_size=96),
    Case("int8-one-block", 32, 8, bits=8),
    Case("int8-96x200", 96, 200, bits=8, layers=2),
    Case("int8-groups-64", 320, 56, bits=8, group_size=64),
)
# What served models multiply with, for compiling and timing. Llama's groups are AWQ's and GPTQ's,
# with zero points (as minima); Kimi-K2.5's dense projections are whole, not INT4, except its
# experts (`moe_int4`).
ROWS_SERVED = (1, 8, 64, 512)
LLAMA_8B_ZEROS = tuple(
    dataclasses.replace(case, name=case.name.replace("llama-8b", "llama-8b-zeros"), minimum=True)
    for case in LLAMA_8B[:5]
)
REAL = (*SMOLLM2, *LLAMA_8B, *LLAMA_8B_ZEROS)
