"""Protects: arg-max, sampler, top-k and commit on CPUs are their references, row by row.

Instruction sets are compared in test_cpu_kernels.py, whole texts in test_cpu_engine.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import cpu_kernels
from eaglejax.cache import PagedCache, commit
from eaglejax.sampling import SamplingRows, inverse_cdf, process
from eaglejax.tree import _likeliest

# Sizes that fill no vector, one, and many; ids among equals, borders.
SIZES = (1, 8, 9, 1001)
PARAMETERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (0.8, 0, 1.0, 0.1),
    (2.0, 40, 0.5, 0.02),
    (1.0, 1, 1e-9, 0.0),
    (1.0, 1_000_000, 0.999, 1.0),
]


def logits_of(size: int, rows: int = 5, seed: int = 0) -> np.ndarray:
    """Rows that are flat, peaked, with ties, and with banned tokens."""
    rng = np.random.default_rng(seed)
    x = (3 * rng.standard_normal((rows, size))).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] *= 10
    x[3, rng.random(size) < 0.5] = -np.inf
    x[3, size // 2] = 1.0
    return x


def rows_of(parameters: Any, count: int = 1) -> SamplingRows:
    temperature, top_k, top_p, min_p = parameters
    fields = [
        np.full(count, value, dtype)
        for value, dtype in (
            (temperature, np.float32),
            (top_k, np.int32),
            (top_p, np.float32),
            (min_p, np.float32),
            (0, np.uint32),
        )
    ]
    return SamplingRows(*map(jnp.asarray, fields))


def sample(logits: np.ndarray, coins: np.ndarray, parameters: Any) -> np.ndarray:
    """Tokens of rows `[R, V]`, all with the same parameters."""
    rows = rows_of(parameters)
    arguments = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    found = cpu_kernels.sample(jnp.asarray(logits[None]), jnp.asarray(coins[None]), *arguments)
    return np.asarray(found)[0]


@pytest.mark.parametrize("size", SIZES)
def test_argmax(size: int) -> None:
    x = logits_of(size)
    np.testing.assert_array_equal(cpu_kernels.argmax(jnp.asarray(x)), x.argmax(-1))
    x[0], x[4] = -np.inf, np.inf
    x[2, size // 2] = np.nan
    np.testing.assert_array_equal(cpu_kernels.argmax(jnp.asarray(x)), x.argmax(-1))
    assert cpu_kernels.argmax(jnp.asarray(x[None, :2, None])).shape == (1, 2, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", [2, 4, 16])
def test_top_k(size: int, width: int) -> None:
    k = min(width, size)
    x = np.maximum(logits_of(size), -60)
    scores, ids = cpu_kernels.top_k(jnp.asarray(x), k)
    expected, expected_ids = jax.lax.top_k(jax.nn.log_softmax(jnp.asarray(x)), k)
    if width > 1:
        named, named_ids = _likeliest(jnp.asarray(x), k, "cpu") if k > 1 else (scores, ids)
        np.testing.assert_array_equal(named_ids, ids)
        np.testing.assert_array_equal(named, scores)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(scores, expected, atol=2e-5)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sampled_tokens_are_those_of_the_reference(size: int, parameters: Any) -> None:
    """Equal wherever the coin is not within rounding of a border between two tokens."""
    x = logits_of(size)
    probabilities = np.asarray(process(jnp.asarray(x[None]), rows_of(parameters)))[0]
    coins = np.random.default_rng(1).random((64, len(x))).astype(np.float32)
    coins[0], coins[1] = 0, 1 - 2**-24
    x, probabilities = np.tile(x, (64, 1)), np.tile(probabilities, (64, 1))
    coins = coins.reshape(-1)
    found = sample(x, coins, parameters)
    assert (probabilities[np.arange(len(x)), found] > 0).all(), "a token that was cut off"
    expected = np.asarray(inverse_cdf(jnp.asarray(probabilities[None]), jnp.asarray(coins[None])))
    borders = np.cumsum(probabilities.astype(np.float64), axis=-1)
    clear = np.abs(borders - coins[:, None]).min(-1) > 1e-5
    np.testing.assert_array_equal(found[clear], expected[0, clear])


def test_what_is_cut_off_is_never_drawn() -> None:
    """top_p keeps ties; the last token kept is drawn by the last coins."""
    x = np.log(np.array([[0.4, 0.1, 0.2, 0.1, 0.2]], np.float32))
    coins = np.linspace(0, 0.999, 400, dtype=np.float32)
    for top_p, kept in ((0.3, {0}), (0.5, {0, 2, 4}), (0.79, {0, 2, 4}), (0.85, {0, 1, 2, 3, 4})):
        found = {int(sample(x, coins[i : i + 1], (1.0, 0, top_p, 0.0))[0]) for i in range(400)}
        assert found == kept


def test_greedy_rows_and_rows_without_numbers() -> None:
    x = logits_of(100, rows=5)
    x[4] = -np.inf
    x[0, 13] = np.nan
    coins = np.full(5, 0.99, np.float32)
    np.testing.assert_array_equal(sample(x, coins, (0.0, 3, 0.5, 0.5)), x.argmax(-1))
    warm = sample(x, coins, (1.0, 0, 1.0, 0.0))
    assert (warm[0], warm[4]) == (13, 0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = logits_of(1001, rows=33)
    coins = np.random.default_rng(2).random(33).astype(np.float32)
    for parameters in PARAMETERS:
        together = sample(x, coins, parameters)
        alone = [sample(x[i : i + 1], coins[i : i + 1], parameters)[0] for i in range(33)]
        assert together.tolist() == alone


def test_draws_follow_the_distribution() -> None:
    """Chi-square over a toy vocabulary, with top_k, top_p and min_p at once."""
    rng = np.random.default_rng(3)
    x = (0.5 * rng.standard_normal(12)).astype(np.float32)
    parameters = (0.9, 10, 0.95, 0.05)
    p = np.asarray(process(jnp.asarray(x[None, None]), rows_of(parameters)))[0, 0].astype(float)
    count = 50_000
    coins = rng.random(count).astype(np.float32)
    found = np.bincount(sample(np.tile(x, (count, 1)), coins, parameters), minlength=12)
    assert (found[p == 0] == 0).all()
    kept = p > 0
    assert 4 < kept.sum() < 12
    assert stats.chisquare(found[kept], count * p[kept] / p[kept].sum()).pvalue > 1e-3


# --- commit -----------------------------------------------------------------------------------


def pools(kernels: Any) -> PagedCache:
    rng = np.random.default_rng(4)
    k, v = (jnp.asarray(rng.standard_normal((2, 6, 4, 3, 8)), jnp.float32) for _ in range(2))
    return PagedCache(k, v, kernels)


def test_commit_writes_what_the_reference_writes() -> None:
    """Pages shuffled, a table that ends, a page out of range, counts of 0 and beyond the path."""
    rng = np.random.default_rng(5)
    fresh = [jnp.asarray(rng.standard_normal((2, 4, 5, 3, 8)), jnp.float32) for _ in range(2)]
    table = jnp.asarray([[3, 1], [0, 5], [4, 6], [2, 2]], jnp.int32)
    lengths = jnp.asarray([2, 6, 3, 0], jnp.int32)
    path = jnp.asarray([[0, 2, 4], [0, 1, 3], [0, 1, 9], [0, 1, 2]], jnp.int32)
    count = jnp.asarray([3, 3, 2, 0], jnp.int32)
    written = [
        commit(pools(kernels), *fresh, table, lengths, path, count)
        for kernels in ("cpu", "reference")
    ]
    jax.tree.map(
        np.testing.assert_array_equal, (written[0].k, written[0].v), (written[1].k, written[1].v)
    )
    assert not np.array_equal(written[0].k, pools("cpu").k)


def test_commit_is_in_place() -> None:
    """Donated pools are not copied: the compiled program needs no memory of their size."""
    shape = jax.ShapeDtypeStruct((4, 1000, 16, 3, 64), jnp.float32)
    fresh = jax.ShapeDtypeStruct((4, 1, 4, 3, 64), jnp.float32)
    row, path = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    jitted = jax.jit(commit, donate_argnums=0)
    compiled = jitted.lower(
        PagedCache(shape, shape, "cpu"),  # type: ignore[arg-type]
        *(fresh, fresh, path, row, path, row),
    ).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * shape.size * 4
    assert memory.temp_size_in_bytes < shape.size


# --- bad input --------------------------------------------------------------------------------

F, I32 = np.float32, np.int32
BAD: dict[str, tuple[str, Any, tuple[Any, ...], str]] = {
    "argmax of halves": ("argmax", ((2,), I32), (np.ones((2, 8), np.float16),), "float32 logits"),
    "argmax of nothing": ("argmax", ((2,), I32), (np.ones((2, 0), F),), "V >= 1"),
    "argmax result": ("argmax", ((3,), I32), (np.ones((2, 8), F),), "result for each row"),
    "sample coins": (
        "sample",
        ((2, 3), I32),
        (np.ones((2, 4, 8), F), np.ones((2, 3), F), *[np.ones(2, t) for t in (F, I32, F, F)]),
        "coins",
    ),
    "sample parameters": (
        "sample",
        ((2, 3), I32),
        (np.ones((2, 3, 8), F), np.ones((2, 3), F), *[np.ones(2, t) for t in (F, F, F, F)]),
        "int32 top_k",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sizes_are_exceptions(name: str) -> None:
    op, (shape, dtype), arguments, message = BAD[name]
    cpu_kernels.instruction_set()
    call = jax.ffi.ffi_call(f"eaglejax_{op}", jax.ShapeDtypeStruct(shape, dtype))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*map(jnp.asarray, arguments)))


def test_bad_top_k_and_commit_are_exceptions() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="k = 9 of 8 logits"):
        jax.block_until_ready(cpu_kernels.top_k(jnp.ones((2, 8)), 9))
    cache, one = pools("cpu"), jnp.zeros(1, jnp.int32)
    unchecked = inspect.unwrap(cpu_kernels.commit)
    fresh = jnp.zeros((2, 1, 1, 3, 8))
    right = [cache.k, cache.v, fresh, fresh, one[None], one, one[None], one]
    jax.block_until_ready(unchecked(*right))
    for index, wrong, message in (
        (2, fresh[..., :4], "fresh rows"),
        (4, jnp.zeros((2, 1), jnp.int32), "page table"),
        (5, jnp.zeros(2, jnp.int32), "lengths"),
    ):
        arguments = list(right)
        arguments[index] = wrong
        if index == 2:
            arguments[3] = wrong
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(unchecked(*arguments))
