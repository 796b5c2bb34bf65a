"""The menu of compiled steps: choosing how to run is choosing a function, never a retrace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import sampling, verify
from eaglejax.config import EngineConfig
from eaglejax.draft import Draft, eagle3
from eaglejax.state import EngineState, admission, admit
from eaglejax.steps import Models, Params, absorb_step, decode_step, prefill_step, spec_step

Kind = Literal["admit", "prefill", "decode", "spec", "absorb"]
BUCKETS = (1, 4, 16, 64, 256)


@dataclass
class Programs:
    """Compiled steps, made on first request and kept.

    Attributes:
        models, params, config: what the programs run.
        draft: how speculative steps draft.
        compile_seconds: spent compiling so far; never part of a request's own time.
    """

    models: Models
    params: Params
    config: EngineConfig
    draft: Draft = eagle3
    compile_seconds: float = 0.0
    _compiled: dict[tuple[Kind, int, bool], Callable[..., Any]] = field(default_factory=dict)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that steps are compiled for."""
        most = self.config.max_slots
        return (*(b for b in BUCKETS if b < most), most)

    def bucket(self, running: int) -> int:
        return next(b for b in self.buckets if b >= running)

    def get(self, kind: Kind, size: int, full: bool, state: EngineState) -> Callable[..., Any]:
        """The program of a kind, compiled for the state's shapes.

        Args:
            kind: which step.
            size: slots it runs; for prefill, tokens of the chunk (of one slot).
            full: with sampling; else greedy only.
            state: any state of this engine; only its shapes are used.
        """
        key = (kind, size, full)
        if key not in self._compiled:
            started = time.perf_counter()
            function, arguments = self._build(kind, size, full)
            jitted = jax.jit(function, donate_argnums=1)
            compiled = jitted.lower(self.params, state, *arguments).compile()
            self._compiled[key] = partial(compiled, self.params)
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key]

    def _build(
        self, kind: Kind, size: int, full: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step as a function of (params, state, arguments), and example arguments."""
        models, plan, draft = self.models, self.config.plan, self.draft
        choose = partial(
            sampling.sampled if full else sampling.greedy, kernels=models.target.kernels
        )
        accept = verify.accept_with(choose)
        slots = np.zeros(size, np.int32)
        if kind == "admit":
            values = admission([], [], ())
            values = jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), values)

            def start(params: Params, state: EngineState, slots: Any, values: Any) -> EngineState:
                return admit(state, slots, **values)

            return start, (slots, values)
        if kind == "prefill":
            chunk = np.zeros((1, size), np.int32)
            one = np.zeros(1, np.int32)
            return partial(prefill_step, models, choose=choose), (one, chunk, one, one > 0)
        if kind == "decode":
            return partial(decode_step, models, choose=choose), (slots,)
        if kind == "absorb":
            return partial(absorb_step, models), (slots,)

        def speculate(params: Params, state: EngineState, slots: Any) -> Any:
            return spec_step(models, params, state, slots, plan, draft=draft, accept=accept)

        return speculate, (slots,)


def padded(slots: list[int], size: int, max_slots: int) -> Any:
    """Slots of a step, filled up with the out-of-range index that every step ignores."""
    return jnp.asarray(slots + [max_slots] * (size - len(slots)), jnp.int32)
