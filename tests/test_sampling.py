"""Protects sampling: tokens follow the processed distribution, with any drafts, in any batch.

Scenarios B24 and B25, the filters against plain numpy, and chi-square tests through `spec_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eaglejax.config import ConfigError, SamplingParams, SpecPlan
from eaglejax.sampling import (
    SamplingRows,
    greedy,
    inverse_cdf,
    process,
    sampled,
    uniform,
)
from eaglejax.state import admission
from eaglejax.tree import Tree
from eaglejax.verify import Verdict, lossless
from tests import kit
from tests.kit import Kit

DRAWS = 200_000


def rows_of(*params: SamplingParams, seeds: list[int] | None = None) -> SamplingRows:
    seeds = seeds or list(range(len(params)))
    return admission(params, seeds, [])["sampling"]


process_jit = jax.jit(process)
sampled_jit = jax.jit(sampled)


# B24: the rule

P = np.array([0.5, 0.3, 0.2])


@functools.partial(jax.jit, static_argnames="depth")
def verdicts(table, tokens, parents, seeds, depth) -> Verdict:
    """Verdicts for many seeds over one tree each; `table[t]` are the logits after token t."""
    count = len(seeds)
    ones = jnp.ones(count)
    rows = SamplingRows(ones, jnp.zeros(count, jnp.int32), ones, 0 * ones, seeds)
    tree = Tree.build(tokens, jnp.broadcast_to(parents[None], tokens.shape), depth)
    return lossless(table[tokens], tree, jnp.zeros(count, jnp.int32), rows, depth)


def draws(tokens: np.ndarray, parents: list[int], depth: int, p: np.ndarray = P) -> Verdict:
    """DRAWS seeds against a target that has distribution p after every token."""
    table = jnp.log(jnp.broadcast_to(jnp.asarray(p, jnp.float32), (len(p), len(p))))
    seeds = jnp.arange(DRAWS, dtype=jnp.uint32)
    return verdicts(table, jnp.asarray(tokens), jnp.asarray(parents), seeds, depth)


def first_tokens(verdict: Verdict, tokens: np.ndarray) -> np.ndarray:
    """The token after the root: the accepted child, or the bonus where none was."""
    accepted = np.asarray(verdict.count) > 1
    child = tokens[np.arange(len(tokens)), np.asarray(verdict.path)[:, 1]]
    return np.where(accepted, child, np.asarray(verdict.token))


def shares(tokens: np.ndarray, vocab: int = 3) -> np.ndarray:
    return np.bincount(tokens, minlength=vocab) / len(tokens)


def test_b24_drafts_from_q_leave_the_marginals_of_p():
    q = np.array([0.7, 0.2, 0.1])
    drafted = np.random.default_rng(0).choice(3, DRAWS, p=q)
    tokens = np.stack([np.zeros(DRAWS, int), drafted], axis=1)
    verdict = draws(tokens, [0, 0], 1)
    said = first_tokens(verdict, tokens)
    np.testing.assert_allclose(shares(said), P, atol=0.005)
    # Here the target's token is decided first, and the draft is accepted when it is that token:
    # sum(p * q) = 0.43. Rejection sampling, which decides by min(1, p/q), would accept
    # sum(min(p, q)) = 0.80 of drafts *drawn from q*, at the price of text that depends on the
    # draft. Our drafts are the likeliest tokens, not draws; for those both rules accept p(draft).
    accepted = np.asarray(verdict.count) > 1
    assert abs(accepted.mean() - (P * q).sum()) < 0.005
    # Given that the draft is rejected, the token follows p without it, renormalised.
    for token in range(3):
        rest = np.where(np.arange(3) == token, 0, P)
        rejected = said[(drafted == token) & ~accepted]
        np.testing.assert_allclose(shares(rejected), rest / rest.sum(), atol=0.01)


def test_b24_siblings_leave_the_marginals_of_p():
    tokens = np.tile([0, 0, 1], (DRAWS, 1))  # root, then 0 and 1 beside each other
    verdict = draws(tokens, [0, 0, 0], 1)
    np.testing.assert_allclose(shares(first_tokens(verdict, tokens)), P, atol=0.005)
    assert abs((np.asarray(verdict.count) > 1).mean() - 0.8) < 0.005  # p(0) + p(1)


def test_b24_second_level_is_independent_of_the_first():
    tokens = np.tile([0, 0, 1], (DRAWS, 1))  # a chain: 0, then 1
    verdict = draws(tokens, [0, 0, 1], 2)
    counts, bonus = np.asarray(verdict.count), np.asarray(verdict.token)
    np.testing.assert_allclose(
        np.bincount(counts, minlength=4)[1:] / DRAWS, [0.5, 0.5 * 0.7, 0.5 * 0.3], atol=0.005
    )
    np.testing.assert_allclose(shares(bonus[counts == 3]), P, atol=0.01)


def test_b24_impossible_token_is_never_accepted():
    p = np.array([0.0, 0.6, 0.0, 0.4, 0.0])
    tokens = np.tile([0, 0, 2, 4], (DRAWS, 1))  # all impossible, side by side
    verdict = draws(tokens, [0, 0, 0, 0], 1, p)
    assert (np.asarray(verdict.count) == 1).all()
    np.testing.assert_allclose(shares(first_tokens(verdict, tokens), 5), p, atol=0.005)


def test_b24_coin_of_exactly_zero_takes_the_first_possible_token():
    p = jnp.asarray([[[0.0, 0.0, 0.6, 0.4, 0.0]]])
    assert inverse_cdf(p, jnp.zeros((1, 1))).item() == 2


@pytest.mark.parametrize("vocab", [5, 1000, 49152])
def test_b24_largest_coin_takes_a_possible_token(vocab: int):
    # The prefix sums of a long row are rounded in no particular order.
    rng = np.random.default_rng(vocab)
    p = rng.random((200, 1, vocab), np.float32)
    p[:, :, rng.random(vocab) < 0.5] = 0
    p[:, :, -vocab // 3 :] = 0
    p[:, :, 0] = 0
    p /= p.sum(-1, keepdims=True)
    coin = jnp.full((200, 1), np.nextafter(np.float32(1), np.float32(0)))
    tokens = np.asarray(jax.jit(inverse_cdf)(jnp.asarray(p), coin))
    assert (np.take_along_axis(p, tokens[..., None], 2) > 0).all()
    last = vocab - 1 - np.argmax(p[:, 0, ::-1] > 0, axis=-1)
    assert (tokens[:, 0] >= last - vocab // 100 - 1).all()


def test_coins_depend_on_seed_and_position_alone():
    seeds = jnp.asarray([3, 3, 4, 2**32 - 1], jnp.uint32)
    positions = jnp.asarray([[5, 6, 7], [7, 5, 6], [5, 6, 7], [5, 6, 7]])
    coins = np.asarray(uniform(seeds, positions))
    assert ((coins >= 0) & (coins < 1)).all()
    np.testing.assert_array_equal(coins[0], coins[1, [1, 2, 0]])
    assert len(set(coins.ravel().tolist())) == 9
    many = np.asarray(
        jax.jit(uniform)(
            jnp.arange(100, dtype=jnp.uint32),
            jnp.arange(200)[None] + jnp.zeros((100, 1), jnp.int32),
        )
    )
    assert stats.kstest(many.ravel(), "uniform").pvalue > 1e-3


# B25: mixed batches


def mixed_batch() -> tuple[np.ndarray, SamplingRows]:
    """Rows at temperatures 0, 0.7, 1e-6 and 2; bans in rows 0 and 1; logits up to +-80."""
    rng = np.random.default_rng(2)
    logits = rng.uniform(-80, 80, (4, 6, 50)).astype(np.float32)
    best = np.sort(logits, -1)
    assert (best[..., -1] - best[..., -2] >= 0.01).all()
    for row in (0, 1):  # the best tokens of all are banned
        order = np.argsort(-logits[row], axis=-1)
        np.put_along_axis(logits[row], order[:, :4], -np.inf, axis=-1)
    temperatures = (0.0, 0.7, 1e-6, 2.0)
    return logits, rows_of(*(SamplingParams(temperature=t) for t in temperatures))


def test_b25_mixed_batch_is_finite_and_keeps_bans():
    logits, rows = mixed_batch()
    positions = jnp.arange(6)[None] + jnp.zeros((4, 1), jnp.int32)
    p = np.asarray(process_jit(logits, rows))
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
    assert (p[np.isneginf(logits)] == 0).all()
    tokens = np.asarray(sampled_jit(logits, positions, rows))
    for row in (0, 2):
        np.testing.assert_array_equal(tokens[row], np.argmax(logits[row], -1))
    chosen = np.take_along_axis(logits, tokens[..., None], -1)
    assert np.isfinite(chosen).all()


def test_b25_neighbours_change_no_bit():
    logits, rows = mixed_batch()
    positions = jnp.arange(6)[None] + jnp.zeros((4, 1), jnp.int32)
    p, tokens = process_jit(logits, rows), sampled_jit(logits, positions, rows)
    order = np.array([2, 0, 3, 1])
    mixed = jax.tree.map(lambda x: x[order], rows)
    np.testing.assert_array_equal(process_jit(logits[order], mixed), np.asarray(p)[order])
    np.testing.assert_array_equal(
        sampled_jit(logits[order], positions, mixed), np.asarray(tokens)[order]
    )
    # The same row among neighbours that have nothing but bans, and extreme logits.
    for row in range(4):
        other = np.full_like(logits, -np.inf)
        other[:, :, 3] = -80
        other[row] = logits[row]
        np.testing.assert_array_equal(process_jit(other, rows)[row], p[row])
        np.testing.assert_array_equal(sampled_jit(other, positions, rows)[row], tokens[row])


def test_b25_negative_temperature_is_refused():
    with pytest.raises(ConfigError, match=r"temperature = -0.1: expected a number of 0 or more"):
        SamplingParams(temperature=-0.1)


def test_greedy_ties_go_to_the_lowest_id():
    logits = jnp.asarray([[[1.0, 3.0, 3.0, 3.0]]])
    positions = jnp.zeros((1, 1), jnp.int32)
    rows = jax.tree.map(jnp.asarray, rows_of(SamplingParams(temperature=0)))
    assert sampled(logits, positions, rows).item() == 1
    assert greedy(logits, positions, rows).item() == 1


# filters


def naive_process(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """One row in float64; tokens tied with the last one kept are kept."""
    x = np.asarray(logits, np.float64) / temperature
    w = np.exp(x - x.max())
    if top_k > 0:
        w = np.where(w >= np.sort(w)[::-1][min(top_k, len(w)) - 1], w, 0)
    if top_p < 1:
        descending = np.sort(w)[::-1]
        last = np.argmax(np.cumsum(descending) >= top_p * w.sum())
        w = np.where(w >= descending[last], w, 0)
    w = np.where(w >= min_p * w.max(), w, 0)
    return w / w.sum()


@st.composite
def filtered_row(draw: st.DrawFn) -> tuple[list[int], float, int, float, float]:
    """Whole logits, so that ties are frequent and exact, bans, and thresholds off any sum."""
    logits = draw(st.lists(st.integers(-6, 6) | st.just(None), min_size=12, max_size=12))
    if all(x is None for x in logits):
        logits[0] = 0
    temperature = draw(st.sampled_from([0.25, 0.5, 1.0, 2.0]))
    top_k = draw(st.sampled_from([0, -1, 1, 2, 3, 5, 11, 12, 50]))
    top_p = draw(st.sampled_from([1.0, 0.0123, 0.3217, 0.7071, 0.9127, 0.9991]))
    min_p = draw(st.sampled_from([0.0, 0.0117, 0.1031, 0.5011, 1.0]))
    return logits, temperature, top_k, top_p, min_p


@given(filtered_row())
@settings(max_examples=300, deadline=None)
def test_filters_equal_numpy(case: tuple[list[int], float, int, float, float]):
    logits, temperature, top_k, top_p, min_p = case
    x = np.array([-np.inf if v is None else v for v in logits], np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = np.asarray(process_jit(x[None, None], rows_of(params)))[0, 0]
    expected = naive_process(x, temperature, top_k, top_p, min_p)
    np.testing.assert_array_equal(p > 0, expected > 0)
    np.testing.assert_allclose(p, expected, rtol=1e-5)


def test_filters_cut_nothing_when_off():
    x = np.random.default_rng(0).uniform(-60, 20, (1, 1, 1000)).astype(np.float32)
    p = np.asarray(process_jit(x, rows_of(SamplingParams(temperature=1.0))))
    assert (p > 0).all()


@pytest.mark.parametrize("top_k", [0, -1, 64, 10**9])
def test_no_limit_lets_every_token_occur(top_k: int):
    rows = rows_of(SamplingParams(temperature=1.0, top_k=top_k))
    positions = jnp.arange(5000)[None]
    tokens = sampled_jit(jnp.zeros((1, 5000, 64)), positions, rows)
    assert set(np.asarray(tokens).ravel().tolist()) == set(range(64))


# chi-square: three tokens through spec_step, for many seeds

VOCAB = 5
FILTERS = {
    "none": SamplingParams(temperature=1.0, max_tokens=3),
    "top_k": SamplingParams(temperature=0.8, top_k=3, max_tokens=3),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8, max_tokens=3),
    "min_p": SamplingParams(temperature=1.0, min_p=0.25, max_tokens=3),
    "all": SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1, max_tokens=3),
}
TABLE = np.random.default_rng(5).normal(0, 1.2, (VOCAB, VOCAB))
BATCH = 20_000


@functools.cache
def markov() -> Kit:
    return kit.bigram(TABLE)


def expected_joint(params: SamplingParams) -> np.ndarray:
    """Probability of each triple of tokens after the prompt [0]."""
    fields = (params.temperature, params.top_k, params.top_p, params.min_p)
    p = np.stack([naive_process(row, *fields) for row in TABLE])
    return p[0][:, None, None] * p[:, :, None] * p[None]


@functools.cache
def program(plan: SpecPlan) -> Callable:
    """Prefill and two steps at once: a speculative one, which gives 1 to 3 tokens, and another."""
    models, params = markov().models, markov().params
    # A fixed proposal, right by chance only: the same tokens at each position.
    text = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (BATCH, 12)), jnp.int32)
    told = {"text": text, "shift": jnp.int32(0), "branch": jnp.int32(0), "vocab": jnp.int32(VOCAB)}

    def run(state, fields):
        slots = jnp.arange(BATCH)
        one = jnp.ones(BATCH, jnp.int32)
        state = kit.admit(state, slots, **fields)
        state, first = kit.prefill_step(
            models, params, state, slots, 0 * one[:, None], one, one > 0
        )
        outputs = [first]
        for _ in range(2):
            state, report = kit.spec_step(
                models,
                kit.Params(params.target, {"script": told}),
                state,
                slots,
                plan,
                draft=kit.scripted,
            )
            outputs.append(report)
        return [(o.tokens, o.counts, o.accepted) for o in outputs]

    return jax.jit(run)


def triples(plan: SpecPlan, params: SamplingParams) -> tuple[np.ndarray, float]:
    """The first three tokens of DRAWS requests that differ in their seed, and drafts accepted."""
    engine = kit.EngineConfig(max_slots=BATCH, max_length=8, page_size=8, plan=plan)
    state = kit.EngineState.create(engine, markov().target, None)
    fields = admission([params], [0], [])
    fields = jax.tree.map(lambda x: np.repeat(np.asarray(x), BATCH, axis=0), fields)
    found, accepted = [], 0
    for start in range(0, DRAWS, BATCH):
        seeds = np.arange(start, start + BATCH, dtype=np.uint32)
        fields["sampling"] = fields["sampling"].replace(seed=seeds)
        out = np.zeros((BATCH, 3), np.int64)
        filled = np.zeros(BATCH, np.int64)
        for tokens, counts, drafted in jax.device_get(program(plan)(state, fields)):
            accepted += int(drafted.sum())
            for column in range(tokens.shape[1]):
                live = np.flatnonzero(column < counts)
                out[live, filled[live]] = tokens[live, column]
                filled[live] += 1
        assert (filled == 3).all()
        found.append(out)
    return np.concatenate(found), accepted / DRAWS


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("plan", ["2,1,3", "2,3,7"])
def test_chi_square_of_three_tokens(plan: str, name: str):
    tokens, accepted = triples(SpecPlan.parse(plan), FILTERS[name])
    assert accepted > 0.1, "without accepted drafts the test says nothing"
    expected = expected_joint(FILTERS[name]).ravel() * DRAWS
    observed = np.bincount(np.ravel_multi_index(tokens.T, (VOCAB,) * 3), minlength=VOCAB**3)
    possible = expected > 0
    assert observed[~possible].sum() == 0, "a token that the filters exclude"
    few = possible & (expected < 10)  # cells too small for chi-square go together
    many = possible & ~few
    pairs = [(observed[many], expected[many])]
    if few.any():
        pairs.append((observed[few].sum(keepdims=True), expected[few].sum(keepdims=True)))
    observed, expected = (np.concatenate(x) for x in zip(*pairs, strict=True))
    assert len(expected) > 5
    assert stats.chisquare(observed, expected, sum_check=False).pvalue > 1e-3


# parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
    ],
)
def test_bad_sampling_parameter_is_refused_by_name_and_value(field: str, value: object):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"{field} = {value!r}: expected ")


def test_greedy_flag():
    assert SamplingParams().greedy
    assert SamplingParams(temperature=0, top_k=5).greedy
    # One token is left, or several that are tied with it.
    assert not SamplingParams(temperature=1, top_k=1).greedy
