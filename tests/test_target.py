"""Protects the models' arithmetic: target, features, rotary and INT4 against plain numpy."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.cache import PagedCache, commit
from eaglejax.config import DrafterConfig, RopeConfig, TargetConfig
from eaglejax.models.drafter import Drafter
from eaglejax.models.rotary import apply_rotary, inverse_frequencies, rotary_angles
from eaglejax.models.target import Target, TargetOutput
from eaglejax.quant import QuantTensor, dequantise, quantise, take_columns
from pallas_kernels.int4_matmul.reference import dequantise_arrays, pack_int4, unpack_int4
from tests import kit

IDS = jnp.zeros((1, 1), jnp.int32)
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 20)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0, compiler_options=kit.QUICK)
def run(target: Target, variables, tokens, positions, ancestors=None, cache=None):
    output = target.apply(variables, tokens, positions, ancestors, cache)
    return output, target.apply(variables, output.hidden, method="logits")


def whole(target: Target, variables: Any, tokens: np.ndarray) -> tuple[TargetOutput, jax.Array]:
    """One causal pass from position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return run(target, variables, tokens, positions)


# A Llama in float64, written from its papers, without any of the project's code.


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x: np.ndarray, angles: np.ndarray, mscale: float = 1.0) -> np.ndarray:
    """The pair (i, i + h/2) of each head as a complex number, turned by its angle."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1) * mscale


def llama(params: Any, c: TargetConfig, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits and the hidden states of one text: entry 0 the embedding, entry i+1 after layer i."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params["params"])
    layers, n = p["layers"], len(tokens)
    inverse = [c.rope.theta ** (-2 * i / c.head_dim) for i in range(c.head_dim // 2)]
    angles = np.outer(np.arange(n), inverse)
    x = p["embed"]["embedding"][tokens]
    states = [x]
    for i in range(c.num_layers):
        a = rms(x, layers["attention_norm"]["scale"][i], c.rms_norm_eps)
        q, k, v = (
            (a @ layers["attention"][name]["kernel"][i]).reshape(n, -1, c.head_dim)
            for name in "qkv"
        )
        q, k = rotate(q, angles), rotate(k, angles)
        heads = []
        for head in range(c.num_heads):
            group = head // (c.num_heads // c.num_kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(c.head_dim)
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        x = x + np.concatenate(heads, axis=-1) @ layers["attention"]["o"]["kernel"][i]
        m = rms(x, layers["mlp_norm"]["scale"][i], c.rms_norm_eps)
        gate, up, down = (layers["mlp"][name]["kernel"][i] for name in ("gate", "up", "down"))
        x = x + (m @ gate / (1 + np.exp(-(m @ gate))) * (m @ up)) @ down
        states.append(x)
    head = p["embed"]["embedding"].T if c.tie_embeddings else p["head"]["kernel"][0]
    return rms(x, p["norm"]["scale"][0], c.rms_norm_eps) @ head, states


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tied"), [(4, 2, True), (4, 1, False), (4, 4, False)]
)
def test_b38_six_layers_equal_float64_and_features_are_the_stated_states(
    heads: int, kv_heads: int, tied: bool
):
    config = TargetConfig(64, 32, 6, heads, kv_heads, 8, 48, tie_embeddings=tied)
    target = Target(config, (1, 3, 5))
    variables = kit.random_weights(target, IDS, IDS, seed=4, gain=1.0)
    output, logits = whole(target, variables, TOKENS)
    for row, tokens in enumerate(TOKENS):
        expected, states = llama(variables, config, tokens)
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)
        # The residual stream after layers 1, 3 and 5: not before them, and before the final norm.
        stated = np.concatenate([states[layer + 1] for layer in (1, 3, 5)], axis=-1)
        np.testing.assert_allclose(output.features[row], stated, atol=1e-4)


def test_features_come_in_the_order_asked_for():
    target, variables = kit.tiny(3).models.target, kit.tiny(3).params.target
    forwards, _ = whole(target, variables, TOKENS)
    backwards, _ = whole(Target(target.config, (2, 0)), variables, TOKENS)
    low, _, high = np.split(np.asarray(forwards.features), 3, axis=-1)
    np.testing.assert_array_equal(backwards.features, np.concatenate([high, low], axis=-1))


def paged(output: TargetOutput, lengths: list[int], config: TargetConfig):
    """A cache that holds the first `lengths` rows of each sequence, in scattered pages."""
    cache = PagedCache.create(
        layers=config.num_layers,
        pages=12,
        page_size=4,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    poison = jnp.full_like(cache.k, jnp.nan)
    table = jnp.asarray([[7, 2, 11, 0, 5], [1, 9, 3, 10, 8]])
    path = jnp.broadcast_to(jnp.arange(20)[None], (2, 20))
    zero = jnp.zeros(2, jnp.int32)
    count = jnp.asarray(lengths)
    fresh = output.fresh_kv
    cache = commit(PagedCache(poison, poison), fresh.k, fresh.v, table, zero, path, count)
    return cache.view(table, count)


def test_prefix_in_pages_and_fresh_block_equal_one_pass():
    target, variables = kit.tiny().models.target, kit.tiny().params.target
    output, logits = whole(target, variables, TOKENS)
    lengths = [13, 8]
    view = paged(output, lengths, target.config)
    block = jnp.asarray([TOKENS[i, n : n + 7] for i, n in enumerate(lengths)])
    positions = jnp.asarray(lengths)[:, None] + jnp.arange(7)[None]
    later, later_logits = run(target, variables, block, positions, None, view)
    for i, n in enumerate(lengths):
        kit.assert_close(later_logits[i], logits[i, n : n + 7])
        kit.assert_close(later.features[i], output.features[i, n : n + 7])
        kit.assert_close(later.fresh_kv.k[:, i], output.fresh_kv.k[:, i, n : n + 7])


def test_every_path_of_a_tree_equals_a_causal_pass():
    target, variables = kit.tiny().models.target, kit.tiny().params.target
    output, _ = whole(target, variables, TOKENS)
    lengths = [13, 8]
    view = paged(output, lengths, target.config)
    parents = [0, 0, 0, 1, 2, 2, 5]
    paths = {3: [0, 1, 3], 4: [0, 2, 4], 6: [0, 2, 5, 6]}
    ancestors, depths = np.eye(7, dtype=bool), np.zeros(7, np.int32)
    for node in range(1, 7):
        ancestors[node] |= ancestors[parents[node]]
        depths[node] = depths[parents[node]] + 1
    drafted = np.random.default_rng(1).integers(0, 64, (2, 7)).astype(np.int32)
    positions = np.asarray(lengths)[:, None] + depths[None]
    _, logits = run(target, variables, drafted, positions, np.stack([ancestors, ancestors]), view)
    for path in paths.values():
        for i, n in enumerate(lengths):
            text = np.zeros((2, 20), np.int32)
            text[i, :n] = TOKENS[i, :n]
            text[i, n : n + len(path)] = drafted[i, path]
            _, expected = whole(target, variables, text)
            kit.assert_close(logits[i, path], expected[i, n : n + len(path)])


# rotary

YARN = RopeConfig(theta=50000, kind="yarn", factor=32, original_max_position=4096)
ROPES = {
    "default": RopeConfig(theta=10000),
    "linear": RopeConfig(theta=10000, kind="linear", factor=4),
    "llama3": RopeConfig(theta=500000, kind="llama3", factor=8, original_max_position=8192),
    "yarn": YARN,
    "yarn_mscale": dataclasses.replace(YARN, mscale=1.0, mscale_all_dim=1.0),
    "yarn_narrow": dataclasses.replace(YARN, factor=64, beta_fast=1.0, mscale_all_dim=0.5),
}


def naive_rope(rope: RopeConfig, head_dim: int) -> tuple[list[float], float]:
    """Inverse frequencies and magnitude, one dimension after another, as the papers put it."""
    result, magnitude = [], 1.0
    for pair in range(head_dim // 2):
        inverse = 1 / rope.theta ** (2 * pair / head_dim)
        turns = rope.original_max_position * inverse / (2 * math.pi)  # over the old context
        if rope.kind == "linear":
            inverse /= rope.factor
        if rope.kind == "llama3":
            if turns < rope.low_freq_factor:
                inverse /= rope.factor
            elif turns < rope.high_freq_factor:
                share = turns - rope.low_freq_factor
                share /= rope.high_freq_factor - rope.low_freq_factor
                inverse = (1 - share) * inverse / rope.factor + share * inverse
        if rope.kind == "yarn":

            def dimension(rotations: float) -> float:
                wavelength = rope.original_max_position / rotations
                return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

            low = max(math.floor(dimension(rope.beta_fast)), 0)
            high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
            interpolated = min(max((pair - low) / max(high - low, 0.001), 0), 1)
            inverse = inverse * (1 - interpolated) + inverse / rope.factor * interpolated
        result.append(inverse)
    if rope.kind == "yarn":
        magnitude = 0.1 * rope.mscale * math.log(rope.factor) + 1
        if rope.mscale_all_dim:
            magnitude /= 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
    return result, magnitude


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_b38_rope_at_position_3000(name: str, head_dim: int):
    rope = ROPES[name]
    inverse, magnitude = naive_rope(rope, head_dim)
    found, scale = inverse_frequencies(rope, head_dim)
    np.testing.assert_allclose(found, inverse, rtol=1e-6)
    assert scale == pytest.approx(magnitude)
    positions = np.array([[0, 1, 2999, 3000]])
    cos, sin = rotary_angles(jnp.asarray(positions), rope, head_dim)
    angles = positions[..., None] * np.asarray(inverse)
    # float32 angles of 3000 are right to 2e-4, here as in every other implementation.
    np.testing.assert_allclose(cos, magnitude * np.cos(angles), atol=4e-4)
    np.testing.assert_allclose(sin, magnitude * np.sin(angles), atol=4e-4)


def test_rotation_turns_pairs_half_a_head_apart():
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 8))
    angles = np.random.default_rng(1).uniform(-3, 3, (1, 3, 4))
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    turned = apply_rotary(jnp.asarray(x, jnp.float32), cos, sin)
    np.testing.assert_allclose(turned[0], rotate(x[0], angles[0]), atol=1e-6)


# the drafter's inputs

DRAFTER = DrafterConfig(64, 16, 16, 12, 2, 1, 8, 24, rope=YARN, feature_layers=(0, 1, 2))


def drafter_parts(config: DrafterConfig) -> tuple[Drafter, Any, dict[str, np.ndarray]]:
    drafter = Drafter(config)
    variables = kit.random_weights(drafter, jnp.zeros((1, 1, 36)), IDS, seed=2, gain=1.0)
    vocab = {
        "embedding": jnp.asarray(np.random.default_rng(3).standard_normal((64, 16)), jnp.float32)
    }
    vocab["target_ids"] = jnp.arange(16, dtype=jnp.int32) * 4
    variables = {"params": variables["params"], "vocab": vocab}
    return drafter, variables, jax.tree.map(lambda x: np.asarray(x, np.float64), variables)


def test_b38_drafter_with_scaled_rope_at_position_3000():
    drafter, variables, p = drafter_parts(DRAFTER)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((1, 2, 16))
    tokens = np.array([[5, 9]])
    positions = np.array([[2999, 3000]])
    kv = drafter.apply(
        variables,
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(tokens),
        jnp.asarray(positions),
        method="project_kv",
    )
    weights = p["params"]
    embedding = rms(p["vocab"]["embedding"][tokens], weights["embedding_norm"]["scale"][0], 1e-5)
    row = np.concatenate([embedding, rms(hidden, weights["hidden_norm"]["scale"][0], 1e-5)], -1)
    inverse, magnitude = naive_rope(YARN, 8)
    k = (row[0] @ weights["attention"]["k"]["kernel"][0]).reshape(2, 1, 8)
    k = rotate(k, positions[0][:, None] * np.asarray(inverse), magnitude)
    np.testing.assert_allclose(kv.k[0, 0], k, atol=2e-3)
    v = (row[0] @ weights["attention"]["v"]["kernel"][0]).reshape(2, 1, 8)
    np.testing.assert_allclose(kv.v[0, 0], v, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "norm_before_fc", "fc_norm"])
def test_b38_feature_norms_before_the_projection(norm: str):
    config = dataclasses.replace(DRAFTER, **({} if norm == "none" else {norm: True}))
    drafter, variables, p = drafter_parts(config)
    features = np.random.default_rng(0).standard_normal((1, 3, 36)) * 5
    fused = drafter.apply(variables, jnp.asarray(features, jnp.float32), method="fuse")
    weights, x = p["params"], features
    if norm == "norm_before_fc":
        x = rms(x, weights["input_norm"]["scale"][0], 1e-5)
    if norm == "fc_norm":
        chunks = np.split(x, 3, axis=-1)
        scales = [weights[f"fc_norms_{i}"]["scale"][0] for i in range(3)]
        x = np.concatenate([rms(c, s, 1e-5) for c, s in zip(chunks, scales, strict=True)], axis=-1)
    np.testing.assert_allclose(fused, x @ weights["fc"]["kernel"][0], atol=2e-5)


def test_b38_next_row_gets_the_state_before_the_norm_unless_asked():
    plain, variables, p = drafter_parts(DRAFTER)
    normed, _, _ = drafter_parts(dataclasses.replace(DRAFTER, norm_output=True))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 16)), jnp.float32)
    tokens = jnp.asarray([[1, 2, 3]])
    before, after = (d.apply(variables, hidden, tokens, tokens) for d in (plain, normed))
    np.testing.assert_allclose(
        after.hidden,
        rms(np.asarray(before.hidden), p["params"]["norm"]["scale"][0], 1e-5),
        atol=1e-5,
    )
    np.testing.assert_array_equal(before.logits, after.logits)
    logits = np.asarray(after.hidden) @ p["params"]["head"]["kernel"][0]
    np.testing.assert_allclose(before.logits, logits, atol=1e-5)


# INT4


def test_b56_all_bytes_survive_unpacking():
    packed = jnp.arange(256, dtype=jnp.uint8)[None]
    nibbles = unpack_int4(packed)
    assert nibbles.dtype == jnp.uint8
    np.testing.assert_array_equal(pack_int4(nibbles), packed)
    byte = unpack_int4(jnp.asarray([0xF8], jnp.uint8))
    assert byte.tolist() == [8, 15]  # the even column in the low nibble
    weights = dequantise_arrays(
        jnp.asarray([[0xF8]], jnp.uint8), jnp.ones((1, 2)), None, bits=4, group_size=1
    )
    assert weights.tolist() == [[0.0, 7.0]]  # without a minimum, zero is 8


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_matrix_is_within_half_a_step(bits: int):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((3, 96, 10)), jnp.float32)
    weight = weight.at[0, :32, 3].set(0.25)  # a constant group has no scale
    q = quantise(weight, bits=bits, group_size=32)
    assert q.shape == weight.shape
    assert q.values.nbytes == weight.size * bits // 8
    step = np.repeat(np.asarray(q.scale), 32, axis=1)
    error = np.abs(np.asarray(dequantise(q)) - np.asarray(weight))
    assert (error <= step / 2 + 1e-6).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_are_those_of_the_whole_matrix(bits: int):
    weight = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)
    q = quantise(jnp.asarray(weight), bits=bits, group_size=32)
    ids = jnp.asarray([[0, 9, 4], [3, 3, 8]])
    expected = np.asarray(dequantise(q)).T[np.asarray(ids)]
    np.testing.assert_array_equal(take_columns(q, ids), expected)


@pytest.mark.parametrize(("shape", "bits"), [((33, 4), 4), ((32, 5), 4), ((40, 4), 8)])
def test_matrix_that_does_not_fill_groups_is_refused(shape: tuple[int, int], bits: int):
    with pytest.raises(ValueError, match=rf"cannot quantise a \[{shape[0]}, {shape[1]}\] matrix"):
        quantise(jnp.zeros(shape), bits=bits, group_size=32)


def test_int4_parameters_equal_their_dequantised_floats():
    # The tied head is INT8 and stored [D, V], as in GGUF files.
    target, variables = kit.tiny().models.target, kit.tiny().params.target

    def quantised(path: tuple, leaf: jax.Array) -> jax.Array | QuantTensor:
        if path[-1].key == "kernel":
            return quantise(leaf)
        return quantise(leaf.T, bits=8) if path[-1].key == "embedding" else leaf

    def floats(path: tuple, leaf: jax.Array | QuantTensor) -> jax.Array:
        if not isinstance(leaf, QuantTensor):
            return leaf
        weight = dequantise(leaf)
        return weight.T if path[-1].key == "embedding" else weight

    def is_quantised(leaf: object) -> bool:
        return isinstance(leaf, QuantTensor)

    map_leaves = functools.partial(jax.tree_util.tree_map_with_path, is_leaf=is_quantised)
    int4 = jax.jit(functools.partial(map_leaves, quantised))(variables)
    float32 = jax.jit(functools.partial(map_leaves, floats))(int4)
    assert sum(map(is_quantised, jax.tree.leaves(int4, is_leaf=is_quantised))) == 8
    (a, a_logits), (b, b_logits) = (whole(target, p, TOKENS) for p in (int4, float32))
    kit.assert_close(a.features, b.features)
    kit.assert_close(a_logits, b_logits)
