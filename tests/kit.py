"""The test kit: tiny targets, drafters that are right, wrong or scripted, a loop over the steps.

Words as in the project's list of known faults: TINY is a random float32 target with a random real
drafter; NOSPEC is plain decoding; ORACLE proposes what NOSPEC says, WRONG never does, SCRIPT
proposes what it is told; a bigram target's logits depend on the last token alone.

Compiled programs are shared by everything in one process that uses the same models and shapes, so
tests keep to the default `max_slots`, and pad.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE

from checkpoints.tokenizer import StreamDecoder, Tokenizer
from eaglejax.cache import PagedCache
from eaglejax.config import (
    PLAIN,
    DrafterConfig,
    EngineConfig,
    SamplingParams,
    SpecPlan,
    TargetConfig,
)
from eaglejax.draft import Draft, Pending, eagle3
from eaglejax.engine.request import Request
from eaglejax.engine.stops import StopStrings
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target
from eaglejax.sampling import Choose, sampled
from eaglejax.state import RING, EngineState, SlotRows, admission, admit
from eaglejax.steps import (
    Models,
    Params,
    StepOutput,
    absorb_step,
    decode_step,
    prefill_step,
    spec_step,
)
from eaglejax.tree import Tree
from eaglejax.verify import Accept, lossless

MAX_SLOTS = 40
MAX_LENGTH = 96
PAGE_SIZE = 4
DEEPEST = SpecPlan(5, 1, 6)  # of the plans that tests run; sizes the pages of all of them

# Compiling takes longer than running these models: half the time without LLVM's optimiser.
QUICK = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, eq=False)
class Kit:
    """Models, their variables and configurations."""

    models: Models
    params: Params

    @property
    def target(self) -> TargetConfig:
        return self.models.target.config

    @property
    def drafter(self) -> DrafterConfig | None:
        return None if self.models.drafter is None else self.models.drafter.config

    def without_drafter(self) -> Kit:
        return Kit(Models(self.models.target), Params(self.params.target))

    def state(self, max_slots: int = MAX_SLOTS, page_size: int = PAGE_SIZE) -> EngineState:
        engine = EngineConfig(
            max_slots=max_slots, max_length=MAX_LENGTH, page_size=page_size, plan=DEEPEST
        )
        return EngineState.create(engine, self.target, self.drafter)


def random_weights(module: Target | Drafter, *inputs: Array, seed: int, gain: float = 2.0) -> Any:
    """Variables of a module, random and louder than an initialisation: that repeats one token."""
    rng = np.random.default_rng(seed)

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        x = rng.standard_normal(leaf.shape)
        match path[-1].key:
            case "scale":
                x = 1 + 0.2 * x
            case "kernel":
                x *= gain / np.sqrt(leaf.shape[-2])
            case "embedding":
                x *= 0.5
        return jnp.asarray(x, leaf.dtype)

    init = functools.partial(module.init, method="initialise")
    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(init, jax.random.key(0), *inputs))


@functools.cache
def tiny(layers: int = 2, seed: int = 0) -> Kit:
    """TINY: vocabulary 64, grouped-query attention, random weights, and a random real drafter.

    The drafter knows every fourth token only, and is right now and then.
    """
    config = TargetConfig(64, 32, layers, 4, 2, 8, 64, tie_embeddings=True)
    features = tuple(range(layers))[-3:]
    target = Target(config, features)
    ids = jnp.zeros((1, 1), jnp.int32)
    weights = random_weights(target, ids, ids, seed=seed)
    drafter = Drafter(DrafterConfig(64, 16, 32, 32, 4, 2, 8, 64, feature_layers=features))
    feature = jnp.zeros((1, 1, drafter.config.feature_size))
    drafting = random_weights(drafter, feature, ids, seed=seed + 1)
    vocab = {
        "embedding": weights["params"]["embed"]["embedding"],
        "target_ids": jnp.arange(16, dtype=jnp.int32) * 4,
    }
    drafting = {**drafting, "vocab": vocab}
    return Kit(Models(target, drafter), Params(weights, drafting))


def bigram(table: np.ndarray) -> Kit:
    """A target whose logits after token t are `table[t]` `[V, V]`, to float32 rounding.

    Attention and MLP add nothing, so the head sees the (normed) one-hot embedding.
    """
    vocab = len(table)
    config = TargetConfig(vocab, vocab, 1, 1, 1, 4, 4)
    target = Target(config, (0, 0, 0))
    ids = jnp.zeros((1, 1), jnp.int32)
    weights = random_weights(target, ids, ids, seed=0)["params"]
    layer = weights["layers"]
    layer["attention"]["o"]["kernel"] *= 0
    layer["mlp"]["down"]["kernel"] *= 0
    weights["norm"]["scale"] = jnp.ones((1, vocab))
    weights["embed"]["embedding"] = jnp.eye(vocab) * 100  # large: rms_norm_eps vanishes
    weights["head"]["kernel"] = jnp.asarray(table / np.sqrt(vocab), jnp.float32)[None]
    return Kit(Models(target), Params({"params": weights}))


@functools.cache
def counting(vocab: int = 16) -> Kit:
    """A bigram target that counts upwards, whatever the temperature."""
    return bigram(80.0 * np.roll(np.eye(vocab), 1, axis=1))


# Drafters that need no weights. They are one compiled program: what they propose is data.


def script(
    texts: Sequence[Sequence[int]],
    slots: Sequence[int] | None = None,
    *,
    shift: int = 0,
    branch: int = 0,
    vocab: int = 64,
    max_slots: int = MAX_SLOTS,
) -> dict[str, Array]:
    """What `scripted` proposes: texts[i][p] (prompt included) at position p of slot slots[i].

    Args:
        texts: NOSPEC's own give ORACLE.
        slots: of each text.
        shift: added to every proposal; not 0 gives WRONG.
        branch: which sibling of each level is the text's token; the others are wrong.
        vocab: proposals are taken modulo this.
        max_slots: of the state.
    """
    table = np.zeros((max_slots, MAX_LENGTH + 32), np.int32)
    for slot, text in zip(slots or range(len(texts)), texts, strict=True):
        table[slot, : len(text)] = text
    scalars = {"shift": shift, "branch": branch, "vocab": vocab}
    return {"text": jnp.asarray(table), **{k: jnp.int32(v) for k, v in scalars.items()}}


WRONG = 20  # a shift that no sibling undoes


def siblings(plan: SpecPlan) -> list[int]:
    """Nodes on each level of a scripted tree: the plan's width while nodes last, at least one."""
    counts = []
    left = plan.nodes - 1
    for level in range(plan.depth):
        counts.append(min(plan.width, left - (plan.depth - level - 1)))
        left -= counts[-1]
    counts[-1] += left
    return counts


def scripted(
    drafter: Drafter | None,
    variables: Any,
    state: EngineState,
    slots: Int[Array, " B"],
    rows: SlotRows,
    plan: SpecPlan,
) -> tuple[Tree, PagedCache | None, Int[Array, " B"]]:
    """A Draft that proposes `variables["script"]`; a drafter that is present absorbs as always."""
    told = variables["script"]
    tokens, parents = [rows.root[:, None]], [jnp.zeros(1, jnp.int32)]
    parent, first = jnp.int32(0), 1
    for level, count in enumerate(siblings(plan), 1):
        right = jnp.minimum(told["branch"], count - 1)
        says = told["text"].at[slots, rows.lengths + level].get(mode="clip")
        offsets = told["shift"] + jnp.arange(count) - right
        tokens.append((says[:, None] + offsets[None]) % told["vocab"])
        parents.append(jnp.full(count, parent))
        parent, first = first + right, first + count
    tokens = jnp.concatenate(tokens, axis=1)
    tree = Tree.build(
        tokens, jnp.broadcast_to(jnp.concatenate(parents)[None], tokens.shape), plan.depth
    )
    if drafter is None:
        return tree, None, rows.absorbed
    pending = Pending.read(drafter, variables, state, slots, rows, plan.depth + 1)
    return tree, *pending.commit(state, rows, jnp.where(rows.active, pending.count, 0))


# The steps, compiled as an engine compiles them: state donated, plan static.

admit_jit = jax.jit(admit, donate_argnames="state", compiler_options=QUICK)
prefill_jit = jax.jit(
    prefill_step,
    static_argnames=("models", "choose"),
    donate_argnames="state",
    compiler_options=QUICK,
)
decode_jit = jax.jit(
    decode_step,
    static_argnames=("models", "choose"),
    donate_argnames="state",
    compiler_options=QUICK,
)
absorb_jit = jax.jit(
    absorb_step, static_argnames="models", donate_argnames="state", compiler_options=QUICK
)
spec_jit = jax.jit(
    spec_step,
    static_argnames=("models", "plan", "draft", "accept"),
    donate_argnames="state",
    compiler_options=QUICK,
)


def copied(tree: Any) -> Any:
    """A copy that survives donation."""
    return jax.tree.map(jnp.copy, tree)


@dataclass(frozen=True)
class Step:
    """One step of one request: its plan, the root's position, what came of it."""

    plan: SpecPlan
    position: int
    count: int
    accepted: int


@dataclass(frozen=True, eq=False)
class Run:
    """What `Runner.generate` returns, one entry a prompt.

    Attributes:
        tokens: completions, stop token included.
        steps: after prefill.
        finish: "stop" or "length".
        slots: the slot of each prompt.
        state: at the end.
    """

    tokens: list[list[int]]
    steps: list[list[Step]]
    finish: list[str]
    slots: list[int]
    state: EngineState

    def lengths(self) -> list[int]:
        """Committed tokens."""
        return np.asarray(self.state.slots.lengths)[self.slots].tolist()


@dataclass(frozen=True, eq=False)
class Runner:
    """Drives the steps for a batch of prompts.

    Attributes:
        kit: what runs.
        plan: of every step after prefill, or a schedule: step number -> plan.
        draft, script: the Draft and what it proposes.
        choose, accept: how tokens are chosen, and drafts accepted.
        chunk: prompt tokens a prefill step takes.
        bucket: rows a step runs, padded with slots out of range; None is all slots.
        max_slots: of the state.
    """

    kit: Kit
    plan: SpecPlan | Callable[[int], SpecPlan] = PLAIN
    draft: Draft = eagle3
    script: dict[str, Array] | None = None
    choose: Choose = sampled
    accept: Accept = lossless
    chunk: int = 8
    bucket: int | None = None
    max_slots: int = MAX_SLOTS

    def but(self, **changes: Any) -> Runner:
        return dataclasses.replace(self, **changes)

    @property
    def params(self) -> Params:
        if self.script is None:
            return self.kit.params
        drafter = self.kit.params.drafter or {}
        return Params(self.kit.params.target, {**drafter, "script": self.script})

    def rows(self, slots: Sequence[int]) -> Int[np.ndarray, " B"]:
        """Slots padded to the bucket."""
        padded = np.full(self.bucket or self.max_slots, self.max_slots, np.int32)
        padded[: len(slots)] = slots
        return padded

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        eos_ids: Sequence[int] = (),
        state: EngineState | None = None,
    ) -> Run:
        """Admits, prefills and decodes the prompts until all have finished."""
        slots = list(slots if slots is not None else range(len(prompts)))
        seeds = list(seeds if seeds is not None else range(7, 7 + len(prompts)))
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        state = self.kit.state(self.max_slots) if state is None else copied(state)
        state = self.admit(state, slots, sampling, seeds, eos_ids)
        state, tokens, ended = self.prefill(state, slots, prompts)
        steps: list[list[Step]] = [[] for _ in prompts]
        pending = 1  # at most, in any slot
        number = 0
        while None in ended:
            plan = self.plan if isinstance(self.plan, SpecPlan) else self.plan(number)
            room = RING - 1 if plan.is_plain else plan.depth + 1
            if pending > room and self.kit.models.drafter is not None:
                state = self.absorb(state, slots)
                pending = 1
            positions = np.asarray(state.slots.lengths)[slots]
            state, report = self.step(state, slots, plan)
            pending = pending + 1 if plan.is_plain else plan.depth + 1
            number += 1
            for i, (new, accepted, reason) in enumerate(self._read(report, len(slots))):
                if new:
                    assert ended[i] is None, "a finished request went on"
                    tokens[i] += new
                    steps[i].append(Step(plan, int(positions[i]), len(new), accepted))
                    ended[i] = reason
            assert number <= 4 * MAX_LENGTH, "a request never ended"
        return Run(tokens, steps, [str(reason) for reason in ended], slots, state)

    def admit(
        self,
        state: EngineState,
        slots: Sequence[int],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        eos_ids: Sequence[int] = (),
    ) -> EngineState:
        padding = len(self.rows(slots)) - len(slots)
        fields = admission(
            [*sampling, *[SamplingParams()] * padding], [*seeds, *[0] * padding], eos_ids
        )
        return admit_jit(state, self.rows(slots), **fields)

    def prefill(
        self, state: EngineState, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> tuple[EngineState, list[list[int]], list[str | None]]:
        """Runs the prompts chunk by chunk; returns first tokens and reasons of those that end."""
        size = len(self.rows(slots))
        firsts: list[list[int]] = [[] for _ in prompts]
        ended: list[str | None] = [None] * len(prompts)
        for start in range(0, max(map(len, prompts)), self.chunk):
            tokens = np.zeros((size, self.chunk), np.int32)
            counts, final = np.zeros(size, np.int32), np.zeros(size, bool)
            for i, prompt in enumerate(prompts):
                part = prompt[start : start + self.chunk]
                tokens[i, : len(part)] = part
                counts[i] = len(part)
                final[i] = 0 < len(prompt) - start <= self.chunk
            state, report = self.prefill_chunk(state, slots, tokens, counts, final)
            for i, (new, _, reason) in enumerate(self._read(report, len(prompts))):
                assert bool(new) == final[i]
                firsts[i] += new
                ended[i] = reason or ended[i]
        return state, firsts, ended

    def prefill_chunk(
        self,
        state: EngineState,
        slots: Sequence[int],
        tokens: Int[np.ndarray, "B C"],
        counts: Int[np.ndarray, " B"],
        final: Bool[np.ndarray, " B"],
    ) -> tuple[EngineState, StepOutput]:
        models, rows = self.kit.models, self.rows(slots)
        return prefill_jit(
            models, self.kit.params, state, rows, tokens, counts, final, choose=self.choose
        )

    def absorb(self, state: EngineState, slots: Sequence[int]) -> EngineState:
        return absorb_jit(self.kit.models, self.kit.params, state, self.rows(slots))

    def step(
        self, state: EngineState, slots: Sequence[int], plan: SpecPlan
    ) -> tuple[EngineState, StepOutput]:
        models, rows = self.kit.models, self.rows(slots)
        if plan.is_plain:
            return decode_jit(models, self.kit.params, state, rows, choose=self.choose)
        return spec_jit(
            models, self.params, state, rows, plan, draft=self.draft, accept=self.accept
        )

    @staticmethod
    def _read(report: StepOutput, rows: int) -> list[tuple[list[int], int, str | None]]:
        """New tokens, accepted drafts and the reason to end of each row."""
        r = jax.device_get(report)
        assert not r.counts[rows:].any(), "padding produced tokens"
        assert not r.finished[rows:].any(), "padding finished"
        return [
            (
                r.tokens[i, : r.counts[i]].tolist(),
                int(r.accepted[i]),
                ("stop" if r.stopped[i] else "length") if r.finished[i] else None,
            )
            for i in range(rows)
        ]


def cached(
    cache: PagedCache, state: EngineState, slot: int, count: int
) -> tuple[Float[np.ndarray, "L T K h"], Float[np.ndarray, "L T K h"]]:
    """Keys and values of a slot's first `count` rows, in order."""
    table = np.asarray(state.slots.page_table)[slot]

    def rows(pool: Array) -> np.ndarray:
        array = np.asarray(pool)
        pages = array[:, table].reshape(array.shape[0], -1, *array.shape[3:])
        return pages[:, :count]

    return rows(cache.k), rows(cache.v)


def assert_close(a: Any, b: Any) -> None:
    """The largest difference is under 1e-5 of the largest value (or of 1).

    Two passes over the same tokens differ in last bits, and TINY makes 100 times that of it; rows
    that really differ do so by their own size.
    """
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(np.abs(b).max())))


@functools.cache
def tokenizer() -> Tokenizer:
    """A vocabulary of 64 whose text is one character a token; 0 is its end of text."""
    letters = tuple(bytes([48 + i]) for i in range(64))
    bpe = BpeTokenizer(BPE())
    return Tokenizer("tiny", frozenset(), frozenset([0]), None, False, 0, bpe, letters, b"")


def request(
    prompt: Sequence[int], params: SamplingParams | None = None, number: int = 0
) -> Request:
    """A request as an engine makes it, going nowhere."""
    return Request(
        number=0,
        index=0,
        prompt_ids=list(prompt),
        params=params or SamplingParams(),
        seed=0,
        priority=0,
        deadline=None,
        decoder=StreamDecoder(tokenizer()),
        stops=StopStrings(()),
        emit=lambda _: None,
    )


def random_prompts(count: int, seed: int = 0, vocab: int = 64) -> list[list[int]]:
    """Prompts of 3 to 22 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, rng.integers(3, 23)).tolist() for _ in range(count)]
