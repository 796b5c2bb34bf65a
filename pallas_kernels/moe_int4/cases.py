"""Named shapes of mixtures of experts, shared by tests, benchmarks and tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pallas_kernels.int4_matmul import cases as matmul_cases

TOKENS_SERVED = (1, 4, 64, 4096)


@dataclass(frozen=True)
class Case:
    """Experts `[layers, experts, ...]` of one size.

    Attributes:
        name: of the model, or what is odd.
        hidden: model width D.
        width: of an expert, F.
        experts: E, those on one device.
        top_k: experts of a token.
        group_size: inputs that share a scale.
        minimum: weights are `q * scale + minimum`; else symmetric.
        layers: L.
    """

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int
    group_size: int = 32
    minimum: bool = False
    layers: int = 1

    def __str__(self) -> str:
        return self.name

    def matrix(self, inputs: int, outputs: int) -> matmul_cases.Case:
        """One expert's matrix."""
        return matmul_cases.Case(
            self.name,
            inputs,
            outputs,
            group_size=self.group_size,
            minimum=self.minimum,
            layers=self.layers,
        )

    def weights(self, seed: int = 0) -> tuple[matmul_cases.Weights, ...]:
        """Random gate, up and down, each `[L, E, ...]`."""
        sizes = ((self.hidden, self.width), (self.hidden, self.width), (self.width, self.hidden))
        return tuple(
            self._experts(inputs, outputs, seed + 1000 * i)
            for i, (inputs, outputs) in enumerate(sizes)
        )

    def _experts(self, inputs: int, outputs: int, seed: int) -> matmul_cases.Weights:
        case = self.matrix(inputs, outputs)
        each = [case.weights(seed + e) for e in range(self.experts)]
        return matmul_cases.Weights(
            np.stack([w.values for w in each], 1),
            np.stack([w.scale for w in each], 1),
            np.stack([w.minimum for w in each if w.minimum is not None], 1)
            if self.minimum
            else None,
        )

    def routed(self, tokens: int, seed: int = 1) -> Routed:
        """Random tokens; experts drawn with replacement, some outside [0, E)."""
        rng = np.random.default_rng(seed)
        ids = rng.integers(-1, self.experts + 1, (tokens, self.top_k), np.int32)
        shares = rng.uniform(0, 1, ids.shape).astype(np.float32)
        return Routed(self.matrix(self.hidden, self.width).rows(tokens, seed), ids, shares)


class Routed(NamedTuple):
    """Tokens `[T, D]`, and their experts and shares `[T, k]`."""

    x: np.ndarray
    expert_ids: np.ndarray
    expert_weights: np.ndarray


SMALL = (
    Case("one-expert", 32, 32, 1, 1),
    Case("minimum-ragged", 96, 160, 5, 3, minimum=True, layers=2),
    Case("groups-64", 64, 192, 3, 2, group_size=64),
)
# All of a layer's experts on one device, and an eighth of them.
REAL = (Case("kimi", 7168, 2048, 384, 8), Case("kimi-ep8", 7168, 2048, 48, 8))
