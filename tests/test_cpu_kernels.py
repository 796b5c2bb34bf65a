"""Protects: CPU kernels compute what the references say, a row's bits depend on nothing else.

Run as a script (`python -m tests.test_cpu_kernels FILE`) it writes the result of every case to
FILE: so one instruction set is compared with another.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import cpu_kernels
from cpu_kernels import library
from cpu_kernels.packing import BLOCK_BYTES, pack
from eaglejax.quant import QuantTensor, dequantise, pack_for_cpu
from pallas_kernels.int4_matmul import cases as matmul_cases
from pallas_kernels.int4_matmul.reference import int4_matmul, pack_int4, unpack_int4
from pallas_kernels.rms_norm import reference as rms_norm
from pallas_kernels.swiglu import reference as swiglu
from pallas_kernels.tree_attention import cases as attention_cases
from pallas_kernels.tree_attention import reference as tree_attention

ROOT = Path(__file__).resolve().parent.parent
MATMULS = (*matmul_cases.RAGGED, *matmul_cases.SMOLLM2[:2], matmul_cases.SMOLLM2[4])
ROWS = matmul_cases.ROWS
IDS: Any = str

matmul_cases_marked = pytest.mark.parametrize("case", MATMULS, ids=IDS)
attention_cases_marked = pytest.mark.parametrize("case", attention_cases.CASES, ids=IDS)


def same(actual: Any, expected: Any) -> None:
    """Equal bits (any not-a-number equals any other)."""
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected), strict=True)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised(case: matmul_cases.Case) -> QuantTensor:
    w = case.weights()
    minimum = None if w.minimum is None else jnp.asarray(w.minimum)
    return QuantTensor(
        jnp.asarray(w.values),
        jnp.asarray(w.scale),
        minimum,
        bits=case.bits,
        group_size=case.group_size,
    )


@cache
def packed(case: matmul_cases.Case) -> QuantTensor:
    return pack_for_cpu(quantised(case))


# Compiling takes longer than running: the references go without LLVM's optimiser.
QUICK = {"xla_backend_optimization_level": 0}
reference_matmul = jax.jit(
    int4_matmul, static_argnames=("bits", "group_size"), compiler_options=QUICK
)
reference_attention = jax.jit(tree_attention.tree_attention, compiler_options=QUICK)
reference_norm = jax.jit(rms_norm.rms_norm, compiler_options=QUICK)
unpack_columns = jax.jit(cpu_kernels.unpack_columns, compiler_options=QUICK)


def product(case: matmul_cases.Case, x: np.ndarray, *, quantised: bool = True) -> np.ndarray:
    blocks, layer = packed(case).values, case.layers - 1
    return np.asarray(cpu_kernels.matmul(jnp.asarray(x), blocks, layer, quantised=quantised))


@cache
def matrix(case: matmul_cases.Case) -> np.ndarray:
    """The float32 matrix of the last layer."""
    levels, scale, minimum = last_layer(case)
    return levels.astype(np.float32) * scale.repeat(32, 0) + minimum.repeat(32, 0)


def last_layer(case: matmul_cases.Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels `[K, N]`, and scale and minimum `[K/32, N]`."""
    w, layer = case.weights(), case.layers - 1
    levels = w.values[layer]
    if case.bits == 4:
        levels = np.stack([levels & 15, levels >> 4], axis=-1).reshape(case.inputs, case.outputs)
    scale = w.scale[layer].repeat(case.group_size // 32, 0)
    if w.minimum is not None:
        return levels, scale, w.minimum[layer].repeat(case.group_size // 32, 0)
    return levels, scale, scale * np.float32(-8 if case.bits == 4 else 0)


def attend(arguments: dict[str, Any]) -> np.ndarray:
    arrays = {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    return np.asarray(cpu_kernels.tree_attention(**arrays))


# --- matmul ---------------------------------------------------------------------------------------


def w4a8(case: matmul_cases.Case, x: np.ndarray) -> np.ndarray:
    """The arithmetic of the kernels in numpy: every operation rounded to float32, in order."""
    values, scale, minimum = last_layer(case)
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    levels = np.rint(groups * inverse[..., None])
    activation = top / np.float32(127)
    total = activation * levels.sum(-1)
    out = np.zeros((len(x), case.outputs), np.float32)
    for g in range(groups.shape[1]):
        # Integers below 2**24: exact in float32 in any order.
        dots = levels[:, g] @ values[32 * g : 32 * g + 32].astype(np.float32)
        out = fma(dots * scale[g], activation[:, g, None], out)
        if case.bits == 4:
            out = fma(minimum[g], total[:, g, None], out)
    return out


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Float32 a * b + c, rounded once (a product of two float32 is exact in float64)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


@matmul_cases_marked
def test_matmul_is_w4a8_to_the_bit(case: matmul_cases.Case) -> None:
    x = case.rows(5)
    same(product(case, x), w4a8(case, x))


@matmul_cases_marked
def test_matmul_differs_from_the_reference_by_rounding_activations_only(
    case: matmul_cases.Case,
) -> None:
    x, weight, layer = case.rows(6), quantised(case), case.layers - 1
    expected = reference_matmul(
        jnp.asarray(x),
        weight.values,
        weight.scale,
        weight.minimum,
        layer,
        bits=case.bits,
        group_size=case.group_size,
    )
    # Half a level of each group's scale, times the weights it meets.
    half = np.abs(x.reshape(6, -1, 32)).max(-1) / 254
    sizes = np.abs(matrix(case)).reshape(-1, 32, case.outputs).sum(1)
    bound = half @ sizes
    error = np.abs(product(case, x) - expected)
    assert (error <= bound * 1.001 + 1e-4).all()
    assert error.mean() < 0.25 * bound.mean(), "errors of single activations cancel out"


@matmul_cases_marked
def test_matmul_row_has_the_same_bits_for_every_number_of_rows(case: matmul_cases.Case) -> None:
    x = case.rows(max(ROWS))
    everything = product(case, x)
    for rows in ROWS:
        same(product(case, x[:rows]), everything[:rows])
        same(product(case, x[-rows:]), everything[-rows:])
    same(product(case, x[None, :, None])[0, :, 0], everything)  # any leading shape


@matmul_cases_marked
def test_matmul_of_float_activations_is_the_reference(case: matmul_cases.Case) -> None:
    x, weight, layer = case.rows(33), quantised(case), case.layers - 1
    expected = reference_matmul(
        jnp.asarray(x[:6]),
        weight.values,
        weight.scale,
        weight.minimum,
        layer,
        bits=case.bits,
        group_size=case.group_size,
    )
    everything = product(case, x, quantised=False)
    scale = np.abs(x[:6]) @ np.abs(matrix(case))
    assert (np.abs(everything[:6] - expected) <= 2e-6 * scale + 1e-6).all()
    for rows in ROWS:
        same(product(case, x[:rows], quantised=False), everything[:rows])
        same(product(case, x[-rows:], quantised=False), everything[-rows:])


def test_matmul_of_a_prompt_chunk_and_of_single_rows() -> None:
    case = matmul_cases.SMOLLM2[0]
    x = case.rows(matmul_cases.PREFILL_ROWS)
    chunk = product(case, x)
    same(product(case, x[200:203]), chunk[200:203])
    same(product(case, x[-1:]), chunk[-1:])


def test_matmul_takes_the_layer_that_is_asked_for() -> None:
    case = next(case for case in MATMULS if case.layers == 3)
    x = jnp.asarray(case.rows(2))
    whole = packed(case).values
    traced = jax.jit(cpu_kernels.matmul)
    for layer in range(3):
        alone = cpu_kernels.matmul(x, whole[layer : layer + 1], 0)
        same(cpu_kernels.matmul(x, whole, layer), alone)
        same(traced(x, whole, jnp.int32(layer)), alone)


@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_extremes(bits: Any) -> None:
    case = replace(MATMULS[1], bits=bits, minimum=False)
    x = case.rows(6)
    x[0] = 0
    x[1] *= 1e-40  # below float32's normal range
    x[2] *= 1e30
    x[3, 40] = np.nan
    x[4, 70] = np.inf
    y = product(case, x)
    assert (y[0] == 0).all()
    assert np.isfinite(y[:3]).all()
    assert np.abs(y[1]).max() < 1e-34
    assert np.isnan(y[3]).all(), "not-a-number must stay visible"
    assert not np.isfinite(y[4]).any()
    same(y[5], product(case, x[5:])[0])


def test_one_nan_among_activations_is_visible_at_every_place() -> None:
    case = MATMULS[0]
    x = case.rows(64)
    for row in range(32):
        x[row, row] = -np.nan if row % 2 else np.nan
    y = product(case, x)
    assert np.isnan(y[:32]).all()
    assert np.isfinite(y[32:]).all()


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", matmul_cases.RAGGED, ids=IDS)
def test_unpacked_columns_are_the_dequantised_matrix(case: matmul_cases.Case) -> None:
    ids = np.random.default_rng(0).permutation(case.outputs).reshape(2, -1)
    columns = unpack_columns(packed(case).values[-1], jnp.asarray(ids))
    np.testing.assert_allclose(columns, matrix(case).T[ids], rtol=0, atol=2e-6)
    assert packed(case).shape == quantised(case).shape == (case.layers, *matrix(case).shape)


def test_packed_weights_are_those_that_dequantise_gives() -> None:
    case = MATMULS[1]
    np.testing.assert_allclose(dequantise(quantised(case))[-1], matrix(case), rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="layout 'cpu8' are not dequantised"):
        dequantise(packed(case))


def test_all_bytes_pack_and_unpack() -> None:
    every = jnp.arange(256, dtype=jnp.uint8)
    same(pack_int4(unpack_int4(every)), every)
    same(unpack_int4(jnp.asarray([0xF8], jnp.uint8)), np.asarray([8, 15], np.uint8))
    # Through the kernel's layout: input k of column c has level (k + 3c) mod 16 and so on.
    k, c = np.mgrid[:64, :16]
    kinds: list[tuple[np.ndarray, Literal[4, 8]]] = [
        (((k + 3 * c) % 16).astype(np.uint8), 4),
        ((7 * k + 5 * c).astype(np.uint8).view(np.int8), 8),
    ]
    for levels, bits in kinds:
        if bits == 8:
            assert set(levels.ravel()) == set(range(-128, 128))
        ones = np.ones((2, 16), np.float32)
        blocks = pack(levels, ones, 0 * ones if bits == 4 else None, bits)
        assert blocks.shape == (2, 2, BLOCK_BYTES[bits])
        columns = unpack_columns(jnp.asarray(blocks), jnp.arange(16))
        same(columns, levels.T.astype(np.float32))
        one_hot = 127 * np.eye(64, dtype=np.float32)
        same(cpu_kernels.matmul(jnp.asarray(one_hot), jnp.asarray(blocks)[None]), 127 * columns.T)


def test_unpackable_weights_are_refused() -> None:
    levels, scale = np.zeros((64, 16), np.uint8), np.ones((2, 16), np.float32)
    with pytest.raises(ValueError, match=r"\[100, 16\] does not fill blocks of 32 by 8"):
        pack(np.zeros((100, 16), np.uint8), scale, None, 4)
    with pytest.raises(ValueError, match=r"\[64, 12\] does not fill"):
        pack(levels[:, :12], scale[:, :12], None, 4)
    with pytest.raises(ValueError, match="INT8 weights with minima"):
        pack(levels.astype(np.int8), scale, scale, 8)
    with pytest.raises(ValueError, match="exceed half precision"):
        pack(levels, 1e6 * scale, None, 4)
    with pytest.raises(ValueError, match="exceed half precision"):
        pack(levels, scale, np.nan * scale, 4)


# --- rms_norm and swiglu --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 20, 576, 1001])
def test_rms_norm(width: int) -> None:
    x, scale = random(33, width), jnp.asarray(random(3, width, seed=1))

    def norm(rows: np.ndarray) -> np.ndarray:
        return np.asarray(cpu_kernels.rms_norm(jnp.asarray(rows), scale, 1, 1e-5))

    everything = norm(x)
    expected = reference_norm(x, scale, 1, 1e-5)
    np.testing.assert_allclose(everything, expected, rtol=2e-6, atol=1e-6)
    for rows in ROWS:
        same(norm(x[:rows]), everything[:rows])
        same(norm(x[-rows:]), everything[-rows:])
    same(norm(x.reshape(3, 11, width)).reshape(33, width), everything)


def test_rms_norm_extremes() -> None:
    x = random(6, 24)
    x[0], x[1], x[2, 5] = 0, 1e4, np.nan
    x[3] *= 1e30  # squares overflow: zeros, as in the reference
    scale = jnp.ones((1, 24))
    y = np.asarray(cpu_kernels.rms_norm(jnp.asarray(x), scale, 0, 1e-5))
    expected = reference_norm(x, scale, 0, 1e-5)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-6)
    assert np.isnan(y[2]).all()


def test_swiglu() -> None:
    edges = [0.0, -0.0, 1e-30, 20, 88, 89, 100, 104, 127, 128, 150, 177, 1e3, 1e4, 1e30]
    gate = np.concatenate([random(3000) * 20, edges, np.negative(edges)]).astype(np.float32)
    up = random(len(gate), seed=1)
    y = np.asarray(cpu_kernels.swiglu(jnp.asarray(gate), jnp.asarray(up)))
    exact = gate.astype(np.float64)
    exact = exact / (1 + np.exp(np.minimum(-exact, 700))) * up
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(y, swiglu.swiglu(jnp.asarray(gate), jnp.asarray(up)), atol=2e-5)


def test_swiglu_element_has_the_same_bits_wherever_it_lies() -> None:
    gate, up = random(3, 9000) * 9, random(3, 9000, seed=1)
    y = np.asarray(cpu_kernels.swiglu(jnp.asarray(gate), jnp.asarray(up)))
    for part in (np.s_[1:2], np.s_[:, 7:20], np.s_[2, 4321:4322], np.s_[:, 1:]):
        same(cpu_kernels.swiglu(jnp.asarray(gate[part]), jnp.asarray(up[part])), y[part])


@pytest.mark.parametrize("gate", [np.nan, 1.0, -1e4])
@pytest.mark.parametrize("position", [0, 3, 8, 10])
def test_swiglu_nan_is_visible(gate: float, position: int) -> None:
    g, u = random(11), random(11, seed=1)
    g[position], u[position] = gate, 1.0 if gate != gate else np.nan
    y = np.asarray(cpu_kernels.swiglu(jnp.asarray(g), jnp.asarray(u)))
    assert np.flatnonzero(np.isnan(y)).tolist() == [position]


# --- attention ------------------------------------------------------------------------------------


@attention_cases_marked
def test_attention_is_the_reference_and_reads_nothing_it_may_not(
    case: attention_cases.Case,
) -> None:
    arguments = case.arrays()
    y = attend(arguments)
    assert np.isfinite(y).all(), "a poisoned page leaks"
    layer = arguments.pop("layer", 0)
    expected = reference_attention(**arguments, layer=np.int32(layer))
    np.testing.assert_allclose(y, expected, atol=5e-6)


@attention_cases_marked
def test_attention_row_has_the_same_bits_in_every_company(case: attention_cases.Case) -> None:
    arguments = case.arrays()
    whole = attend(arguments)
    if case.causal:  # the same rows under an explicit mask
        rows, fresh = np.mgrid[: case.rows, : case.fresh]
        mask = np.broadcast_to(
            fresh <= rows + case.fresh - case.rows, (len(case.lengths), *rows.shape)
        )
        arguments["ancestors"] = np.array(mask)
        same(attend(arguments), whole)
    for sequence in range(len(case.lengths)):
        one = alone(arguments, sequence)
        same(attend(one)[0], whole[sequence])
        for row in {0, case.rows // 2, case.rows - 1}:
            part = one | {name: one[name][:, row : row + 1] for name in ("q", "ancestors")}
            same(attend(part)[0, 0], whole[sequence, row])


def alone(arguments: dict[str, Any], sequence: int) -> dict[str, Any]:
    """One sequence of a batch."""
    batched = {"q", "fresh_k", "fresh_v", "ancestors", "page_table", "lengths"}
    return {
        name: value[sequence : sequence + 1] if name in batched else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 20), (6, 1, 80)], ids=IDS)
def test_attention_of_a_token_has_the_same_bits_for_every_split(
    heads: tuple[int, int, int], page_size: int
) -> None:
    """Its ancestors lie in the cache, or scattered among siblings in the fresh block, or both."""
    rng = np.random.default_rng(page_size)
    queries, kv_heads, width = heads
    # A path of 11 tokens; each of the last 7 has siblings in the tree, before and after it.
    q, k, v = random(11, queries, width), *random(2, 11, kv_heads, width, seed=1)
    answers = []
    for committed in range(4, 11):
        nodes: list[int | None] = []  # the token of the path at each node, or a sibling
        for token in range(committed, 11):
            nodes += [None] * rng.integers(3) + [token] + [None] * rng.integers(3)
        m = len(nodes)
        tree_q, tree_k, tree_v = (np.full((1, m, *x.shape[1:]), 1e3, np.float32) for x in (q, k, v))
        mask = np.zeros((1, m, m), bool)
        for node, token in enumerate(nodes):
            mask[0, node, node] = True
            if token is not None:
                tree_q[0, node], tree_k[0, node], tree_v[0, node] = q[token], k[token], v[token]
                on_path = [other is not None and other <= token for other in nodes]
                mask[0, node] |= on_path
        pages = -(-11 // page_size)
        pool = np.full((2, 1, pages + 2, page_size, kv_heads, width), np.nan, np.float32)
        table = rng.permutation(pages + 2)[:pages].astype(np.int32)
        for token in range(committed):
            at = (slice(None), 0, table[token // page_size], token % page_size)
            pool[at] = k[token], v[token]
        y = attend(
            {
                "q": tree_q,
                "fresh_k": tree_k,
                "fresh_v": tree_v,
                "ancestors": mask,
                "pages_k": pool[0],
                "pages_v": pool[1],
                "page_table": table[None],
                "lengths": np.asarray([committed], np.int32),
            }
        )
        answers.append({token: y[0, node] for node, token in enumerate(nodes) if token})
    for earlier, later in pairwise(answers):
        for token, row in later.items():
            same(row, earlier[token])
    causal = attend(
        {"q": q[None], "fresh_k": k[None], "fresh_v": v[None], "ancestors": None}
    )  # nothing in the cache: a prompt chunk
    for token, row in answers[0].items():
        same(row, causal[0, token])


def test_attention_row_that_sees_nothing_is_zero() -> None:
    arguments = attention_cases.RAGGED[0].arrays()
    arguments["ancestors"][0, 2] = False
    assert (attend(arguments)[0, 2] == 0).all()


@pytest.mark.parametrize("poisoned", ["q", "fresh_k", "fresh_v", "pages_k", "pages_v"])
@pytest.mark.parametrize("token", [0, 1, 3])
def test_attention_nan_that_a_row_sees_is_visible(poisoned: str, token: int) -> None:
    case = attention_cases.Case("nan", 4, 4, 2, 2, 24, lengths=(5,), causal=True)
    arguments = case.arrays()
    if poisoned.startswith("pages"):
        arguments[poisoned][-1, arguments["page_table"][0, 0], token, 1, 17] = np.nan
    else:
        arguments[poisoned][0, token, 1, 17] = np.nan
    y = np.isnan(attend(arguments))
    seeing = {"q": slice(token, token + 1), "fresh_k": slice(token, None)}
    rows = seeing.get(poisoned.replace("_v", "_k"), slice(None))
    expected = np.zeros_like(y)
    expected[0, rows, 1, 17 if poisoned.endswith("_v") else slice(None)] = True
    same(y, expected)


def test_attention_of_scores_far_apart() -> None:
    q = np.full((1, 1, 1, 8), 100, np.float32)
    k = np.array([100, -100, 100 - 1e-5], np.float32)[None, :, None, None].repeat(8, -1)
    v = np.array([1, 7, 3], np.float32)[None, :, None, None].repeat(8, -1)
    sees = np.ones((1, 1, 3), bool)
    arguments = {"q": q, "fresh_k": k, "fresh_v": v, "ancestors": sees}
    np.testing.assert_allclose(attend(arguments), reference_attention(**arguments), 1e-5)


# --- instruction sets -----------------------------------------------------------------------------


def decoder_results() -> Iterator[np.ndarray]:
    """Two layers over three rows, the last of which sees only the first and itself."""
    cases = {
        name: matmul_cases.Case(name, inputs, outputs, minimum=name != "v", layers=2)
        for name, (inputs, outputs) in {
            "q": (64, 128),
            "k": (64, 64),
            "v": (64, 64),
            "o": (128, 64),
            "gate": (64, 96),
            "up": (64, 96),
            "down": (96, 64),
        }.items()
    }
    results = cpu_kernels.decoder(
        jnp.asarray(random(1, 3, 64)),
        jnp.asarray(random(1, 3, 16, seed=1)),
        jnp.asarray(random(1, 3, 16, seed=2)),
        jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool),
        {name: packed(case).values for name, case in cases.items()},
        jnp.asarray(random(2, 64, seed=3)),
        jnp.asarray(random(2, 64, seed=4)),
        eps=1e-5,
        feature_layers=(0,),
    )
    yield from map(np.asarray, results)


def every_result() -> Iterator[tuple[str, np.ndarray]]:
    """A result of every case, and of the extremes."""
    for case in MATMULS:
        x = case.rows(7)
        x[5, 3] = np.nan
        x[6] *= 1e-37
        yield f"matmul-{case}", product(case, x)
        yield f"float-matmul-{case}", product(case, x, quantised=False)
    for name, result in zip(("stream", "features", "k", "v"), decoder_results(), strict=True):
        yield f"decoder-{name}", result
    for case in attention_cases.CASES:
        yield f"attention-{case}", attend(case.arrays())
    x = jnp.asarray(np.concatenate([5 * random(6, 1001), 0 * random(1, 1001)]))
    yield "argmax", np.asarray(cpu_kernels.argmax(x))
    scores, ids = cpu_kernels.top_k(x, 7)
    yield from (("top_k-scores", np.asarray(scores)), ("top_k-ids", np.asarray(ids)))
    ones, coins = np.ones(1, np.float32), jnp.asarray(np.linspace(0, 0.99, 7, dtype=np.float32))
    for top_k, top_p, min_p in ((0, 1, 0), (50, 1, 0), (0, 0.9, 0), (40, 0.8, 0.01)):
        parameters = (ones, np.full(1, top_k, np.int32), top_p * ones, min_p * ones)
        tokens = cpu_kernels.sample(x[None], coins[None], *map(jnp.asarray, parameters))
        yield f"sample-{top_k}-{top_p}-{min_p}", np.asarray(tokens)
    values = jnp.asarray([*(random(2000) * 30), 1e4, -1e4, 88, -88, np.nan, np.inf, -np.inf, 0])
    up = jnp.asarray(random(len(values), seed=2))
    yield "swiglu", np.asarray(cpu_kernels.swiglu(values, up))
    for width in (7, 64, 1001):
        x, scale = jnp.asarray(random(3, width)), jnp.asarray(random(1, width, seed=1))
        yield f"rms_norm-{width}", np.asarray(cpu_kernels.rms_norm(x, scale, 0, 1e-5))


@pytest.mark.parametrize("name", ["portable", "avx2"])
def test_other_instruction_sets_give_the_same_bits(name: str, tmp_path: Path) -> None:
    if cpu_kernels.instruction_set() in ("portable", name):
        pytest.skip(f"{name} is what runs here, or this machine has nothing better")
    file = tmp_path / "results.npz"
    command = [sys.executable, "-m", "tests.test_cpu_kernels", str(file)]
    environment = os.environ | {"EAGLEJAX_CPU_ISA": name}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    with np.load(file) as other:
        assert str(other["instruction_set"]) == name
        for case, result in every_result():
            np.testing.assert_array_equal(other[case], result, err_msg=case, strict=True)


def test_an_unknown_instruction_set_is_named() -> None:
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1])\n"
        "library.eaglejax_isa.restype = library.eaglejax_isa_error.restype = ctypes.c_char_p\n"
        "print(library.eaglejax_isa(), library.eaglejax_isa_error())"
    )
    environment = os.environ | {"EAGLEJAX_CPU_ISA": "mmx"}
    command = [sys.executable, "-c", code, str(library.path())]
    output = subprocess.run(command, check=True, env=environment, capture_output=True).stdout
    assert output.decode().strip() == "None b'EAGLEJAX_CPU_ISA: expected avx512, avx2 or portable'"


# --- bad input ------------------------------------------------------------------------------------

# Whatever reaches the library goes past Python's checks: these call it as a wrong caller would.


def call(
    target: str, shape: tuple[int, ...], *arguments: Any, dtype: Any = np.float32, **attrs: Any
):
    cpu_kernels.instruction_set()  # registers the handlers
    result = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype))
    return np.asarray(result(*map(jnp.asarray, arguments), **attrs))


F, I32 = np.float32, np.int32
ROW, BLOCKS, LAYER = np.ones((2, 64), F), np.zeros((3, 5, 2, 160), np.uint8), np.int32(1)
BAD_MATMULS = {
    "K": ((2, 40), (ROW[:, :32], BLOCKS, LAYER), "K = 32, N = 40 do not fit weights of K = 64"),
    "N": ((2, 48), (ROW, BLOCKS, LAYER), "N = 48 do not fit weights of K = 64, N = 40"),
    "rows": ((3, 40), (ROW, BLOCKS, LAYER), "expected rows"),
    "rank of rows": ((40,), (ROW, BLOCKS, LAYER), "expected rows"),
    "scalar": ((), (F(1), BLOCKS, LAYER), "expected rows"),
    "rank of weights": ((2, 40), (ROW, BLOCKS[0], LAYER), "expected rows"),
    "block": ((2, 40), (ROW, BLOCKS[..., :128], LAYER), "unknown block size"),
    "high layer": ((2, 40), (ROW, BLOCKS, np.int32(3)), "layer 3 of 3"),
    "negative layer": ((2, 40), (ROW, BLOCKS, np.int32(-1)), "layer -1 of 3"),
    "two layers": ((2, 40), (ROW, BLOCKS, np.ones(2, I32)), "one layer"),
    "half rows": ((2, 40), (ROW.astype(np.float16), BLOCKS, LAYER), "expected float32 rows"),
    "signed weights": ((2, 40), (ROW, BLOCKS.view(np.int8), LAYER), "uint8 weights"),
    "float layer": ((2, 40), (ROW, BLOCKS, F(1)), "an int32 layer"),
}


@pytest.mark.parametrize("name", BAD_MATMULS)
def test_bad_matmul_is_an_exception(name: str) -> None:
    shape, arguments, message = BAD_MATMULS[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"eaglejax: matmul: .*{message}"):
        call("eaglejax_matmul", shape, *arguments, quantised=True)


def test_bad_result_type_is_an_exception() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="float32 results"):
        call("eaglejax_matmul", (2, 40), ROW, BLOCKS, LAYER, dtype=np.float16, quantised=True)


BAD_NORMS = {
    "width": ((2, 64), (ROW, np.ones((3, 32), F), LAYER), "expected rows"),
    "result": ((2, 32), (ROW, np.ones((3, 64), F), LAYER), "expected rows"),
    "turned result": ((64, 2), (ROW, np.ones((3, 64), F), LAYER), "expected rows"),
    "rank": ((2, 64), (ROW, np.ones(64, F), LAYER), "expected rows"),
    "scalar": ((), (F(1), np.ones((3, 64), F), LAYER), "expected rows"),
    "layer": ((2, 64), (ROW, np.ones((3, 64), F), np.int32(7)), "layer 7 of 3"),
    "half": ((2, 64), (ROW, np.ones((3, 64), np.float16), LAYER), "float32 arrays"),
}


@pytest.mark.parametrize("name", BAD_NORMS)
def test_bad_rms_norm_is_an_exception(name: str) -> None:
    shape, arguments, message = BAD_NORMS[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"eaglejax: rms_norm: .*{message}"):
        call("eaglejax_rms_norm", shape, *arguments, eps=F(1e-5))


@pytest.mark.parametrize(
    ("shape", "gate", "up"),
    [
        ((2, 64), ROW, ROW[:1]),
        ((2, 64), ROW, ROW.reshape(64, 2)),
        ((2, 32), ROW, ROW),
        ((2, 64), ROW.astype(I32), ROW),
    ],
)
def test_bad_swiglu_is_an_exception(shape: tuple[int, ...], gate: Any, up: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="swiglu: expected float32 arrays of one"):
        call("eaglejax_swiglu", shape, gate, up)


def turned(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Swaps two axes of an argument: as many elements, another shape."""
    return lambda a: {name: a[name].swapaxes(-1, -3)}


# What is changed in a good call of two sequences, 3 of 5 rows, 4 pages of 4 tokens, 9 and 3 used.
GOOD = attention_cases.Case("good", 3, 5, 4, 2, 16, page_size=4, lengths=(9, 3), pages=4)
BAD_ATTENTION: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "page id": (lambda a: {"page_table": a["page_table"] + 9}, "page id [0-9]+ of 9"),
    "negative page id": (lambda a: {"page_table": a["page_table"] - 99}, "page id -[0-9]+ of 9"),
    "length": (lambda a: {"lengths": np.asarray([17, 3], I32)}, "length 17 of sequence 0 exceeds"),
    "negative length": (lambda a: {"lengths": np.asarray([9, -1], I32)}, "length -1 of sequence 1"),
    "layer": (lambda a: {"layer": 2}, "layer 2 of 2"),
    "negative layer": (lambda a: {"layer": -1}, "layer -1 of 2"),
    "width of keys": (lambda a: {"fresh_k": a["fresh_k"][..., :8]}, "expected queries"),
    "both widths": (
        lambda a: {name: a[name][..., :8] for name in ("fresh_k", "fresh_v")},
        "do not fit each other",
    ),
    "turned values": (turned("fresh_v"), "expected queries"),
    "kv heads": (
        lambda a: {name: a[name].repeat(2, 2)[:, :, :3] for name in ("fresh_k", "fresh_v")},
        "do not fit each other",
    ),
    "batch of keys": (
        lambda a: {name: a[name][:1] for name in ("fresh_k", "fresh_v")},
        "do not fit each other",
    ),
    "fewer keys than rows": (
        lambda a: {name: a[name][:, :2] for name in ("fresh_k", "fresh_v")},
        "do not fit each other",
    ),
    "rank of queries": (lambda a: {"q": a["q"][0]}, "expected queries"),
    "half queries": (lambda a: {"q": a["q"].astype(np.float16)}, "expected float32"),
    "mask": (lambda a: {"ancestors": a["ancestors"][:, :, :4]}, "expected ancestors"),
    "turned mask": (lambda a: {"ancestors": a["ancestors"].swapaxes(1, 2)}, "expected ancestors"),
    "mask of bytes": (lambda a: {"ancestors": a["ancestors"].view(np.int8)}, "expected ancestors"),
    "pages' width": (
        lambda a: {name: a[name][..., :8] for name in ("pages_k", "pages_v")},
        "do not fit",
    ),
    "pages of values": (lambda a: {"pages_v": a["pages_v"][:1]}, "do not fit"),
    "turned pages": (turned("pages_v"), "do not fit"),
    "rank of pages": (
        lambda a: {name: a[name][0] for name in ("pages_k", "pages_v")},
        "do not fit",
    ),
    "page table": (lambda a: {"page_table": a["page_table"][:1]}, "do not fit"),
    "lengths": (lambda a: {"lengths": a["lengths"][:1]}, "do not fit"),
    "half pages": (lambda a: {"pages_k": a["pages_k"].astype(np.float16)}, "float32 pages"),
    "small lengths": (lambda a: {"lengths": a["lengths"].astype(np.int16)}, "int32 page table"),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_bad_attention_is_an_exception(name: str) -> None:
    change, message = BAD_ATTENTION[name]
    good = GOOD.arrays()
    arguments = good | change(good)
    arguments["layer"] = np.int32(arguments["layer"])
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"eaglejax: attention: .*{message}"):
        call("eaglejax_attention_paged", arguments["q"].shape, *arguments.values())
    assert np.isfinite(attend(good)).all()  # and the process goes on


def test_nothing_to_do_is_no_error() -> None:
    assert call("eaglejax_matmul", (0, 40), ROW[:0], BLOCKS, LAYER, quantised=True).shape == (0, 40)
    assert call("eaglejax_swiglu", (0,), ROW[0, :0], ROW[0, :0]).shape == (0,)
    none = jnp.zeros((0, 1, 2, 8))
    assert cpu_kernels.tree_attention(none, none, none, None).shape == none.shape


def test_calls_from_several_threads() -> None:
    case = MATMULS[2]
    x = case.rows(17)
    expected = product(case, x)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            if not np.array_equal(product(case, x), expected):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- the library ----------------------------------------------------------------------------------


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Loads the library anew, before and after."""
    library.load.cache_clear()
    yield
    library.load.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libeaglejax_cpu.so")
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    message = r"libeaglejax_cpu.so is missing\): install again with a C\+\+ compiler"
    with pytest.raises(cpu_kernels.LibraryError, match=message):
        cpu_kernels.matmul(jnp.asarray(ROW), jnp.asarray(BLOCKS))
    assert "is missing" in str(cpu_kernels.unavailable_reason())
    monkeypatch.setenv(library.OVERRIDE, str(tmp_path / "other.so"))
    assert "other.so is missing" in str(cpu_kernels.unavailable_reason())


@pytest.mark.usefixtures("unloaded")
def test_what_is_no_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    monkeypatch.setenv(library.OVERRIDE, str(text))
    assert "text.so cannot be loaded" in str(cpu_kernels.unavailable_reason())
    other = next(Path(jaxlib.__file__).parent.rglob("*.so"))
    monkeypatch.setenv(library.OVERRIDE, str(other))
    assert "is not this project's library" in str(cpu_kernels.unavailable_reason())


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("version", [(0, 0), (1, 0), (0, 10**6)])
def test_ffi_versions_are_checked(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = ctypes.CDLL(str(library.path()))
    major, minor = built.eaglejax_ffi_api_major(), built.eaglejax_ffi_api_minor()
    monkeypatch.setattr(library, "_ffi_version", lambda: version)
    if version > (major, minor) and version[0] == major:
        assert cpu_kernels.unavailable_reason() is None  # built with older headers: runs
        return
    running = f"{version[0]}.{version[1]}"
    message = rf"was built for XLA FFI {major}\.{minor}, jaxlib [0-9.]+ has {running}$"
    with pytest.raises(cpu_kernels.LibraryError, match=message):
        cpu_kernels.instruction_set()


def test_the_running_ffi_version_is_known() -> None:
    assert library._ffi_version() >= (0, 1)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    results = dict(every_result())
    np.savez(sys.argv[1], instruction_set=cpu_kernels.instruction_set(), **results)  # type: ignore[arg-type]
