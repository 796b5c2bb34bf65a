"""Where the time of one step goes, part by part.

Parts are timed alone, each as a program of its own; what they leave of the whole step is in the
last lines. One request, the CPU kernels, a given number of committed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cpu_kernels
from eaglejax.config import PLAIN, SamplingParams
from eaglejax.engine.engine import Engine
from eaglejax.models.apply import apply
from eaglejax.quant import QuantTensor
from eaglejax.sampling import greedy
from eaglejax.state import EngineState
from eaglejax.tree import Tree
from eaglejax.verify import accept_with

ALL_MATRICES = "all matrices, one row"
STEP = "step"
LENGTHS = (2.1, 3.0)  # acceptance lengths that a well trained drafter reaches


@dataclass(frozen=True)
class Part:
    """One line.

    Attributes:
        step: "plain", or the plan.
        name: what was timed.
        milliseconds: the fastest of the repeats.
        megabytes: weights it reads; None where it is no single stream of them.
    """

    step: str
    name: str
    milliseconds: float
    megabytes: float | None = None

    @property
    def gb_per_second(self) -> float | None:
        return None if self.megabytes is None else self.megabytes / self.milliseconds


@dataclass(frozen=True)
class Cost:
    """What a plan's step costs, and what it would give.

    Attributes:
        plan: depth,width,nodes.
        plain_steps: its time in plain steps: the acceptance length at which it begins to pay.
        tokens_per_second, gain: by acceptance length, and over plain decoding.
    """

    plan: str
    plain_steps: float
    tokens_per_second: dict[str, float]
    gain: dict[str, float]


def cost(parts: Sequence[Part]) -> Cost | None:
    """The cost of the plan among the parts of `measure`, or None without one."""
    steps = {part.step: part.milliseconds for part in parts if part.name == STEP}
    plain = steps.pop("plain")
    if not steps:
        return None
    ((plan, milliseconds),) = steps.items()
    return Cost(
        plan,
        milliseconds / plain,
        {str(length): 1e3 * length / milliseconds for length in LENGTHS},
        {str(length): length * plain / milliseconds for length in LENGTHS},
    )


def fastest(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of the fastest call after one that warms up."""
    jax.block_until_ready(run())
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


def measure(engine: Engine, *, context: int, repeats: int) -> list[Part]:
    """Parts of the plain step, then of the engine's speculative step where it has a drafter.

    Args:
        engine: of one slot, on the CPU kernels with INT4 weights.
        context: committed tokens of the request.
        repeats: calls timed a part.

    Raises:
        ValueError: the engine does not run the kernels, or cannot hold the context.
    """
    target = engine.params.target["params"]
    head = target["embed"]["embedding"] if "head" not in target else target["head"]["kernel"]
    if not isinstance(head, QuantTensor) or head.layout != "cpu8":
        raise ValueError("the parts are those of the CPU kernels on INT4 weights")
    if context + 2 * engine.config.plan.depth + 4 > engine.config.max_length:
        limit = engine.config.max_length
        raise ValueError(f"context = {context}: does not fit max_length = {limit}")
    state = _with_context(engine, context)
    parts = _plain(engine, state, head, context, repeats)
    if engine.models.drafter is not None:
        parts += _speculative(engine, _with_context(engine, context), repeats)
    return parts


def _with_context(engine: Engine, context: int) -> EngineState:
    """A state whose only slot has that many committed tokens."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(1000, 2000, context - 3).tolist()
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    spec = "off" if engine.models.drafter is None else "on"
    engine.generate([prompt], params, spec=spec)
    state = jax.tree.map(jnp.copy, engine.state)  # the engine's own is consumed by its next step
    rows = state.slots
    return state.replace(
        slots=rows.replace(
            lengths=jnp.full_like(rows.lengths, context),
            absorbed=jnp.full_like(rows.absorbed, context - 1),
            active=jnp.ones_like(rows.active),
            remaining=jnp.full_like(rows.remaining, 1 << 20),
        )
    )


def _stream(stacks: Sequence[Any]) -> Callable[[], Any]:
    """A product of one row with every matrix of some stacks."""

    @jax.jit
    def run(stacks: Sequence[Any]) -> Any:
        total = jnp.float32(0)
        for stack in stacks:
            x = jnp.ones((1, cpu_kernels.matrix_shape(stack)[-2]))

            def body(layer: Any, total: Any, x: Any = x, stack: Any = stack) -> Any:
                return total + cpu_kernels.matmul(x, stack, layer)[0, 0]

            total = jax.lax.fori_loop(0, len(stack), body, total)
        return total

    return lambda: run(stacks)


def _plain(
    engine: Engine, state: EngineState, head: QuantTensor, context: int, repeats: int
) -> list[Part]:
    parts = []
    layer = engine.params.target["params"]["layers"]
    modules = {**layer["attention"], **layer["mlp"]}
    stacks = {f"matrices {name}": modules[name]["kernel"].values for name in cpu_kernels.MATRICES}
    blocks = head.values if head.values.ndim == 4 else head.values[None]
    stacks["head"] = blocks
    for name, stack in stacks.items():  # alone some fit the last-level cache, all together do not
        parts.append(Part("plain", name, fastest(_stream([stack]), repeats), stack.nbytes / 1e6))
    size = sum(part.megabytes or 0 for part in parts)
    everything = fastest(_stream(list(stacks.values())), repeats)
    parts.append(Part("plain", ALL_MATRICES, everything, size))

    rows = state.slots
    forward = jax.jit(partial(apply, engine.models.target))
    one = jnp.ones((1, 1), jnp.int32)
    layers = fastest(
        lambda: forward(engine.params.target, one, context * one, None, state.target_view(rows)),
        repeats,
    )
    parts.append(Part("plain", "all layers, with attention and norms", layers))
    hidden = jnp.ones((1, 1, engine.models.target.config.hidden_size))
    logits_of = jax.jit(partial(apply, engine.models.target, method="logits"))
    head_time = fastest(lambda: logits_of(engine.params.target, hidden), repeats)
    step, synced = _whole(engine, "decode", state, repeats)
    rest = step - layers - head_time
    parts.append(Part("plain", STEP, step))
    parts.append(Part("plain", "of it outside layers and head", rest))
    parts.append(Part("plain", "more when the host reads every step", synced - step))
    return parts


def _whole(engine: Engine, kind: Any, state: EngineState, repeats: int) -> tuple[float, float]:
    """Milliseconds of a step, dispatched one after another, and read by the host each time."""
    plan = engine.config.plan if kind == "spec" else PLAIN
    program = engine.programs.get(kind, 1, False, state, plan)
    slots, tables = np.zeros(1, np.int32), np.asarray(state.slots.page_table)
    fixed = state.slots

    def timed(read: bool) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(4):
            # Back to the same context each time: the state is consumed, its rows are copied.
            state = state.replace(slots=jax.tree.map(jnp.copy, fixed))
            state, report = program(state, slots, tables)
            if read:
                np.asarray(report)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / 4

    best = [min(timed(read) for _ in range(1 + repeats // 4)) for read in (False, True)]
    return 1e3 * best[0], 1e3 * best[1]


def _speculative(engine: Engine, state: EngineState, repeats: int) -> list[Part]:
    plan, models, params = engine.config.plan, engine.models, engine.params
    name = str(plan)
    slots, rows = jnp.zeros(1, jnp.int32), state.slots
    drafting = jax.jit(partial(engine.programs.draft, models.drafter), static_argnums=4)
    draft = fastest(lambda: drafting(params.drafter, state, slots, rows, plan), repeats)
    tree: Tree = drafting(params.drafter, state, slots, rows, plan)[0]
    forward = jax.jit(partial(apply, models.target))
    positions = rows.lengths[:, None] + tree.depths

    def verify() -> Any:
        view = state.target_view(rows)
        return forward(params.target, tree.tokens, positions, tree.ancestors, view)

    layers, hidden = fastest(verify, repeats), verify().hidden
    logits_of = jax.jit(partial(apply, models.target, method="logits"))
    head = fastest(lambda: logits_of(params.target, hidden), repeats)
    accept_greedy = accept_with(partial(greedy, kernels=models.target.kernels))
    accepting = jax.jit(partial(accept_greedy, depth=plan.depth))
    logits = logits_of(params.target, hidden)
    accept = fastest(lambda: accepting(logits, tree, rows.lengths, rows.sampling), repeats)
    step, synced = _whole(engine, "spec", state, repeats)
    return [
        Part(name, "draft and absorb", draft),
        Part(name, f"target layers, {plan.nodes} rows", layers),
        Part(name, f"head, {plan.nodes} rows", head),
        Part(name, "acceptance", accept),
        Part(name, STEP, step),
        Part(name, "of it outside these", step - draft - layers - head - accept),
        Part(name, "more when the host reads every step", synced - step),
    ]
