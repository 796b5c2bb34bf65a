"""The menu of compiled steps: choosing how to run is choosing a function, never a retrace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eaglejax import sampling, verify
from eaglejax.config import PLAIN, EngineConfig, SpecPlan
from eaglejax.draft import Draft, eagle3
from eaglejax.state import EngineState, admission, admit
from eaglejax.steps import (
    Models,
    Params,
    StepOutput,
    absorb_step,
    decode_step,
    prefill_step,
    spec_step,
)

Kind = Literal["admit", "stop", "prefill", "decode", "spec", "absorb"]
# Inactive rows cost what active ones do, so the sizes lie close together.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass
class Programs:
    """Compiled steps, made on first request and kept.

    Attributes:
        models, params, config: what the programs run.
        draft: how speculative steps draft.
        compiler_options: XLA's, beside its defaults.
        compile_seconds: spent compiling so far; never part of a request's own time.
    """

    models: Models
    params: Params
    config: EngineConfig
    draft: Draft = eagle3
    compiler_options: Mapping[str, bool | int] | None = None
    compile_seconds: float = 0.0
    _compiled: dict[tuple[Kind, int, bool, SpecPlan], Callable[..., Any]] = field(
        default_factory=dict
    )
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that steps are compiled for."""
        most = self.config.max_slots
        return (*(b for b in BUCKETS if b < most), most)

    def bucket(self, running: int) -> int:
        return next(b for b in self.buckets if b >= running)

    def size(self, kind: Kind, rows: int, full: bool = False, plan: SpecPlan = PLAIN) -> int:
        """The smallest size that holds so many rows and is compiled; the bucket if none is."""
        sizes = (b for b in self.buckets if b >= rows and (kind, b, full, plan) in self._compiled)
        return next(sizes, self.bucket(rows))

    def get(
        self, kind: Kind, size: int, full: bool, state: EngineState, plan: SpecPlan = PLAIN
    ) -> Callable[..., Any]:
        """The program of a kind, compiled for the state's shapes; from any thread.

        "admit" takes (state, slots, values), "stop" and "absorb" (state, slots); the others take
        (state, slots, tables), prefill (tokens, counts, final) too, and return the next state and
        the step's report packed by `pack`.

        Args:
            kind: which step.
            size: slots it runs; for prefill, tokens of the chunk (of one slot).
            full: with sampling; else greedy only.
            state: any state of this engine; only its shapes are used.
            plan: of a speculative step.
        """
        key = (kind, size, full, plan)
        found = self._compiled.get(key)
        if found is not None:
            return found
        with self._lock:
            if key not in self._compiled:
                started = time.perf_counter()
                function, arguments = self._build(kind, size, full, plan)
                jitted = jax.jit(function, donate_argnums=1)
                lowered = jitted.lower(self.params, _shapes(state), *arguments)
                options = dict(self.compiler_options or {})
                compiled = lowered.compile(compiler_options=options)  # type: ignore[arg-type]
                self._compiled[key] = partial(compiled, self.params)
                self.compile_seconds += time.perf_counter() - started
            return self._compiled[key]

    def _build(
        self, kind: Kind, size: int, full: bool, plan: SpecPlan
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step as a function of (params, state, arguments), and example arguments."""
        models, draft = self.models, self.draft
        choose = partial(
            sampling.sampled if full else sampling.greedy, kernels=models.target.kernels
        )
        accept = verify.accept_with(choose)
        slots = np.zeros(size, np.int32)
        if kind == "admit":
            values = admission([], [], ())
            values = jax.tree.map(lambda x: np.zeros((size, *x.shape[1:]), x.dtype), values)

            def start(params: Params, state: EngineState, slots: Any, values: Any) -> EngineState:
                return admit(state, slots, **values)

            return start, (slots, values)
        if kind == "stop":

            def stop(params: Params, state: EngineState, slots: Any) -> EngineState:
                active = state.slots.active.at[slots].set(False, mode="drop")
                return state.replace(slots=state.slots.replace(active=active))

            return stop, (slots,)
        if kind == "absorb":
            return partial(absorb_step, models), (slots,)
        pages = self.config.pages_per_slot
        if kind == "prefill":
            chunk = np.zeros((1, size), np.int32)
            one = np.zeros(1, np.int32)
            step = partial(prefill_step, models, choose=choose)
            return _with_tables(step), (one, np.zeros((1, pages), np.int32), chunk, one, one > 0)
        tables = np.zeros((size, pages), np.int32)
        if kind == "decode":
            return _with_tables(partial(decode_step, models, choose=choose)), (slots, tables)

        def speculate(params: Params, state: EngineState, slots: Any) -> Any:
            return spec_step(models, params, state, slots, plan, draft=draft, accept=accept)

        return _with_tables(speculate), (slots, tables)


def _with_tables(step: Callable[..., tuple[EngineState, StepOutput]]) -> Callable[..., Any]:
    """A step that first takes the page tables of its slots, and packs its report."""

    def run(params: Params, state: EngineState, slots: Any, tables: Any, *rest: Any) -> Any:
        table = state.slots.page_table.at[slots].set(tables, mode="drop")
        state = state.replace(slots=state.slots.replace(page_table=table))
        state, output = step(params, state, slots, *rest)
        return state, pack(output)

    return run


def pack(output: StepOutput) -> Int[Array, "B columns"]:
    """A step's report as one array `[B, n + 4]`: one copy to the host, not five."""
    columns = (output.counts, output.accepted, output.finished, output.stopped)
    numbers = jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)
    return jnp.concatenate([output.tokens.astype(jnp.int32), numbers], axis=1)


def unpack(packed: np.ndarray) -> StepOutput:
    """The report on the host; the width of the array tells its stride."""
    counts, accepted, finished, stopped = packed[:, -4:].T
    return StepOutput(packed[:, :-4], counts, accepted, finished != 0, stopped != 0)  # type: ignore[arg-type]


def _shapes(state: EngineState) -> EngineState:
    """Shapes alone: the arrays may be donated away by another thread meanwhile."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def padded(slots: list[int], size: int, max_slots: int) -> np.ndarray:
    """Slots of a step, filled up with the out-of-range index that every step ignores."""
    return np.asarray(slots + [max_slots] * (size - len(slots)), np.int32)
