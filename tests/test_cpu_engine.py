"""Protects: with the CPU kernels a token has the same bits, a text the same words, in every mode.

Tiny random models whose sizes fill the kernels' blocks; the default model at the end.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cpu_kernels
from checkpoints.target import read_target
from eaglejax.backend import drafter_weights, resolve, target_weights
from eaglejax.cache import CacheView, PagedCache, commit
from eaglejax.config import (
    PLAIN,
    ConfigError,
    DrafterConfig,
    EngineConfig,
    RopeConfig,
    SamplingParams,
    SpecPlan,
    TargetConfig,
    default_feature_layers,
)
from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter
from eaglejax.models.fused import fusable
from eaglejax.models.rotary import apply_rotary, rotary_angles
from eaglejax.models.target import Target
from eaglejax.quant import QuantTensor, pack_for_cpu, quantise
from eaglejax.state import EngineState
from eaglejax.steps import Models, Params
from tests import kit
from tests.kit import Kit, Runner

CPU = EngineConfig(kernels="cpu", weights="int4")
PAGE_SIZE = 4


@functools.cache
def packed_kit(tied: bool = True) -> Kit:
    """A target and a drafter in INT4; the head is INT8, or the tied embedding in INT4.

    With the tied head layers run as one call, else (heads of 16 fill no group) op by op.
    """
    head_dim = 32 if tied else 16
    config = TargetConfig(64, 64, 3, 6, 2, head_dim, 96, tie_embeddings=tied)
    features = (0, 1, 2)
    target, ids = Target(config, features, "cpu"), jnp.zeros((1, 1), jnp.int32)
    # The reference twin initialises: its parameters have the same names.
    weights = kit.random_weights(Target(config, features), ids, ids, seed=7)["params"]
    embedding = weights["embed"]["embedding"]

    def quantised(path: Any, leaf: Any) -> Any:
        names = [getattr(part, "key", None) for part in path]
        if names[-1] == "embedding" and tied:
            return quantise(leaf.T)
        if names[-1] != "kernel":
            return leaf
        return quantise(leaf, bits=8 if "head" in names else 4)

    weights = jax.tree_util.tree_map_with_path(quantised, weights)
    weights = target_weights({"params": weights}, CPU)
    drafting = DrafterConfig(64, 16, 64, 64, 4, 2, head_dim, 96, feature_layers=features)
    feature = jnp.zeros((1, 1, drafting.feature_size))
    variables = kit.random_weights(Drafter(drafting), feature, ids, seed=4)
    vocab = {"embedding": embedding, "target_ids": jnp.arange(16, dtype=jnp.int32) * 4}
    variables = drafter_weights({**variables, "vocab": vocab}, CPU)
    kinds = jax.tree.leaves([weights, variables["params"]], is_leaf=is_quantised)
    assert sum(is_quantised(leaf) and leaf.layout == "cpu8" for leaf in kinds) == 8 + 9
    for layer in (weights["params"]["layers"], variables["params"]):
        assert fusable("cpu", layer, head_dim) == tied
    return Kit(Models(target, Drafter(drafting, "cpu")), Params(weights, variables))


def is_quantised(leaf: Any) -> bool:
    return isinstance(leaf, QuantTensor)


# --- the same bits --------------------------------------------------------------------------------

# As an engine compiles: what XLA computes between the kernels must not change its bits either.


@functools.partial(jax.jit, static_argnames="target")
def forward(
    target: Target,
    variables: Any,
    tokens: Any,
    positions: Any,
    ancestors: Any = None,
    cache: CacheView | None = None,
) -> tuple[Any, ...]:
    """Logits, features, and keys and values (rows first) of a pass."""
    output = apply(target, variables, tokens, positions, ancestors, cache)
    logits = apply(target, variables, output.hidden, method="logits")
    fresh = output.fresh_kv
    return logits, output.features, fresh.k, fresh.v


committing = jax.jit(commit)


class Text:
    """A text being read in blocks, its cache in shuffled pages."""

    def __init__(self, tied: bool, tokens: np.ndarray) -> None:
        self.target, self.variables = (
            packed_kit(tied).models.target,
            packed_kit(tied).params.target,
        )
        config = self.target.config
        self.tokens, self.length = tokens, 0
        self.cache = PagedCache.create(
            layers=config.num_layers,
            pages=20,
            page_size=PAGE_SIZE,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        # Whatever is read without being committed shows.
        self.cache = jax.tree.map(lambda pool: pool + jnp.nan, self.cache)
        self.table = jnp.asarray(np.random.default_rng(0).permutation(20)[None], jnp.int32)

    def read(self, count: int) -> list[np.ndarray]:
        """Reads and commits the next tokens."""
        block = slice(self.length, self.length + count)
        lengths = jnp.asarray([self.length], jnp.int32)
        view = self.cache.view(self.table, lengths)
        positions = np.arange(block.start, block.stop)[None]
        found = forward(
            self.target, self.variables, self.tokens[None, block], positions, None, view
        )
        path = jnp.arange(count, dtype=jnp.int32)[None]
        counts = jnp.asarray([count], jnp.int32)
        self.cache = committing(self.cache, found[2], found[3], self.table, lengths, path, counts)
        self.length += count
        return rows_of(found)


def rows_of(found: tuple[Any, ...], sequence: int = 0) -> list[np.ndarray]:
    """Results of one sequence, each with its rows first."""
    logits, features, k, v = map(np.asarray, found)
    return [
        logits[sequence],
        features[sequence],
        k[:, sequence].swapaxes(0, 1),
        v[:, sequence].swapaxes(0, 1),
    ]


def same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


TOKENS = np.random.default_rng(5).integers(0, 64, 33)


@functools.cache
def whole(tied: bool = True) -> list[np.ndarray]:
    """TOKENS in one block, without a cache."""
    run, positions = packed_kit(tied), np.arange(len(TOKENS))[None]
    found = rows_of(forward(run.models.target, run.params.target, TOKENS[None], positions))
    assert all(np.isfinite(part).all() for part in found)
    return found


@pytest.mark.parametrize(("chunk", "tied"), [(1, True), (5, True), (5, False)])
def test_same_bits_in_chunks_and_token_by_token(chunk: int, tied: bool) -> None:
    text, found = Text(tied, TOKENS), []
    while text.length < len(TOKENS):
        found.append(text.read(min(chunk, len(TOKENS) - text.length)))
    same([np.concatenate(parts) for parts in zip(*found, strict=True)], whole(tied))


@pytest.mark.parametrize("rows", [1, 2, 7, 17])
def test_same_bits_for_every_number_of_rows(rows: int) -> None:
    run = packed_kit()
    positions = np.arange(rows)[None]
    found = forward(run.models.target, run.params.target, TOKENS[None, :rows], positions)
    same(rows_of(found), [part[:rows] for part in whole()])


def test_same_bits_in_a_batch() -> None:
    run = packed_kit()
    rng = np.random.default_rng(6)
    tokens = np.stack([rng.integers(0, 64, 33), TOKENS, rng.integers(0, 64, 33)])
    positions = np.broadcast_to(np.arange(33), tokens.shape)
    found = forward(run.models.target, run.params.target, tokens, positions)
    same(rows_of(found, 1), whole())


@pytest.mark.parametrize(("committed", "tied"), [(4, True), (16, True), (13, False)])
def test_same_bits_in_a_tree_among_siblings(committed: int, tied: bool) -> None:
    text, nodes = Text(tied, TOKENS), 16
    for _ in range(committed):
        text.read(1)
    rng = np.random.default_rng(committed)
    path = np.sort(rng.permutation(nodes)[:7])  # where the text's next tokens lie
    tokens, positions = rng.integers(0, 64, nodes), np.full(nodes, committed)
    mask = np.eye(nodes, dtype=bool)
    for depth, node in enumerate(path):
        tokens[node], positions[node] = TOKENS[committed + depth], committed + depth
        mask[node, path[:depth]] = True
    others = np.setdiff1d(np.arange(nodes), path)
    mask[others[-1], others[:-1]] = True
    view = text.cache.view(text.table, jnp.asarray([committed], jnp.int32))
    found = forward(text.target, text.variables, tokens[None], positions[None], mask[None], view)
    same(
        [part[path] for part in rows_of(found)],
        [part[committed : committed + 7] for part in whole(tied)],
    )


def test_same_bits_from_what_xla_computes_between_kernels() -> None:
    """Rotary angles and rotation, embedding lookup: in the real sizes, for any number of rows."""
    rope = RopeConfig(theta=100000.0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 64, 9, 64)).astype(np.float32)
    positions = rng.integers(0, 8192, (1, 64))
    levels = rng.standard_normal((64, 4096)).astype(np.float32)
    table = pack_for_cpu(quantise(jnp.asarray(levels))).values
    tokens = rng.integers(0, 4096, 64)

    @jax.jit
    def rotated(x: Any, positions: Any) -> Any:
        return apply_rotary(x, *rotary_angles(positions, rope, 64))

    lookup = jax.jit(cpu_kernels.unpack_columns)
    angles, embedded = rotated(x, positions), lookup(table, jnp.asarray(tokens))
    for rows in (1, 2, 3, 5, 7, 8, 17, 33):
        for first in (0, 64 - rows):
            part = slice(first, first + rows)
            np.testing.assert_array_equal(rotated(x[:, part], positions[:, part]), angles[:, part])
            np.testing.assert_array_equal(lookup(table, jnp.asarray(tokens[part])), embedded[part])


# --- the same text --------------------------------------------------------------------------------

MAX_TOKENS = 26
PROMPTS = kit.random_prompts(16, seed=2)
BOTH = PROMPTS + PROMPTS
GREEDY = SamplingParams(max_tokens=MAX_TOKENS)
SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_k=30, top_p=0.95)
SAMPLING = [GREEDY] * len(PROMPTS) + [SAMPLED] * len(PROMPTS)
SEEDS = list(range(100, 100 + len(BOTH)))


@functools.cache
def plain() -> list[list[int]]:
    return Runner(packed_kit()).generate(BOTH, SAMPLING, seeds=SEEDS).tokens


def test_text_is_worth_comparing() -> None:
    assert min(len(set(tokens)) for tokens in plain()) > 8, "the target repeats itself"
    assert all(a != b for a, b in zip(plain()[:16], plain()[16:], strict=True))


@pytest.mark.parametrize("plan", ["4,1,5", "4,4,16"])
def test_b01_speculative_text_is_plain_text(plan: str) -> None:
    run = Runner(packed_kit(), SpecPlan.parse(plan)).generate(BOTH, SAMPLING, seeds=SEEDS)
    assert run.tokens == plain()
    accepted = [step.accepted for steps in run.steps for step in steps]
    assert 0 < np.mean(accepted) < 1.5, "a drafter that is right now and then"


def test_b01_every_draft_accepted_same_text() -> None:
    texts = [prompt + tokens for prompt, tokens in zip(BOTH, plain(), strict=True)]
    runner = Runner(packed_kit(), SpecPlan(4, 1, 5), kit.scripted, kit.script(texts))
    run = runner.generate(BOTH, SAMPLING, seeds=SEEDS)
    assert run.tokens == plain()
    assert max(len(steps) for steps in run.steps) == -(-(MAX_TOKENS - 1) // 5)


@pytest.mark.parametrize("plan", [PLAIN, SpecPlan(4, 4, 16)], ids=str)
def test_b01_same_text_alone_and_in_other_chunks(plan: SpecPlan) -> None:
    alone = Runner(packed_kit(), plan, bucket=1, chunk=5)
    for i in (2, 21):
        run = alone.generate([BOTH[i]], [SAMPLING[i]], seeds=[SEEDS[i]], slots=[30])
        assert run.tokens == [plain()[i]]


# --- the default model ----------------------------------------------------------------------------

DATA = Path(__file__).parent / "data"
# Greedy continuations of smollm2_prompts.json, 64 tokens each, by transformers 5.19.0 in float32
# from the same file (end tokens do not stop it).
CONTINUATIONS = {
    "facts": """504 3575 282 4649 314 7042 28 441 7042 2581 28 564 2161 260 5671 8715 476 60 4808
        372 31006 18 527 18419 288 476 60 4808 85 18 281 3432 30 2 198 2 1 9690 198 2 198 1 4093
        198 57 5248 3946 288 7198 253 725 1406 281 260 2342 30 339 3543 2221 4329 253 1443 1566
        16031""",
    "code": """3725 5367 198 1604 314 79 30921 24 94 727 472 585 304 2067 216 34 42 448 1003 4178
        472 327 2056 281 1845 24 34 28 464 24 94 828 32 30 37 25 1232 216 33 727 448 585 304 2471
        2056 1758 216 32 42 629 1003 4178 472 1003 3635 198 3725 198 198 1348 1517 1806 411
        11160""",
    "maths": """33 30 378 808 1833 314 288 1042 260 2719 4052 12581 411 260 4445 30 198 34 30 378
        1796 1833 314 288 1042 260 3049 3547 282 260 4445 30 198 35 30 378 3464 1833 314 288 1042
        260 3049 3547 282 260 4445 411 15213 260 2719 4052 411 260 655 2473 30 198 36 30 378 8629
        1833 314""",
    "unicode": """51 1939 2756 28 304 272 2144 28 15486 46494 28 297 29 84 419 28 297 29 84 419 28
        297 29 84 419 28 297 29 84 419 28 297 29 84 419 28 297 29 84 419 28 297 29 84 419 28 297
        29 84 419 28 297 29 84 419 28 297 29 84 419 28 297 29 84""",
    "multiturn": """50 4123 359 1035 15048 30 1206 416 5697 601 327 4339 411 1015 253 11426 88 404
        29 9263 1114 30 669 2978 253 3412 282 8450 28 14021 28 284 253 1443 11426 29 9263 2109 30
        2 198 1 4093 198 57 5248 441 2090 732 288 536 351 260 1573 28364 30 1069 2316 1573 284 339
        1326 982 699""",
}


def teacher_forced(smollm2_gguf: Path, kernels: Any, activations: Any = "auto") -> list[np.ndarray]:
    """The likeliest token after every position of the prompts and their continuations."""
    weights: Any = "int4" if kernels == "cpu" else "float32"
    config = EngineConfig(kernels=kernels, weights=weights, activations=activations)
    checkpoint = read_target(smollm2_gguf, weights=weights)
    target = Target(checkpoint.config, default_feature_layers(30), kernels)
    params = target_weights(checkpoint.params, config)
    prompts = json.loads((DATA / "smollm2_prompts.json").read_text(encoding="utf-8"))["prompts"]
    texts = []
    for prompt in prompts:
        ids = prompt["prompt_ids"] + [int(x) for x in CONTINUATIONS[prompt["name"]].split()]
        padded = np.zeros((1, 192), np.int32)  # causal: what follows changes nothing
        padded[0, : len(ids)] = ids
        logits = forward(target, params, padded, np.arange(192)[None])[0]
        texts.append(np.asarray(logits[0, : len(ids)]).argmax(-1))
    return texts


@pytest.mark.slow
def test_default_model_agrees_with_float32_as_well_as_llamacpp_does(smollm2_gguf: Path) -> None:
    expected = teacher_forced(smollm2_gguf, "reference")
    for text, continuation in zip(expected, CONTINUATIONS.values(), strict=True):
        golden = [int(x) for x in continuation.split()]
        assert text[-65:-1].tolist() == golden, "the float32 path is not that of transformers"
    found = teacher_forced(smollm2_gguf, "cpu")
    agree = np.concatenate([a == b for a, b in zip(found, expected, strict=True)])
    print(f"teacher-forced top-1 agreement {agree.mean():.2%} of {agree.size}")
    assert agree.size == 711
    assert agree.mean() >= 0.974  # llama.cpp's own on these prompts, in INT8 activations too
    floats = teacher_forced(smollm2_gguf, "cpu", "float32")
    for text, reference in zip(floats, expected, strict=True):
        np.testing.assert_array_equal(text, reference)


def test_activations_are_quantised_by_the_kernels_only() -> None:
    assert resolve(EngineConfig(kernels="cpu")).activations == "int8"
    assert resolve(EngineConfig(kernels="cpu", weights="float32")).activations == "float32"
    assert resolve(EngineConfig(kernels="reference")).activations == "float32"
    with pytest.raises(ConfigError, match="activations = 'int8': only the CPU kernels"):
        resolve(EngineConfig(kernels="reference", activations="int8"))


@pytest.mark.parametrize("plan", [PLAIN, SpecPlan(3, 1, 4), SpecPlan(3, 2, 6)])
def test_no_step_copies_a_pool(plan: SpecPlan) -> None:
    """A pool that is read after it was written would be copied whole, in every step."""
    packed = packed_kit()
    config = CPU.replace(max_slots=3, max_length=64, page_size=PAGE_SIZE, plan=plan)
    state = EngineState.create(config, packed.target, packed.drafter)
    slots = np.zeros(1, np.int32)
    if plan.is_plain:
        lowered = kit.decode_jit.lower(packed.models, packed.params, state, slots)
    else:
        lowered = kit.spec_jit.lower(packed.models, packed.params, state, slots, plan)
    text = lowered.compile().as_text()
    assert state.draft is not None
    for pool in (state.target.k, state.draft.k):
        shape = f"f32[{','.join(map(str, pool.shape))}]"
        assert shape in text
        assert not [line for line in text.splitlines() if f"{shape}" in line and " copy(" in line]
