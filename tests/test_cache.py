"""Protects the cache: committed tokens only, each written once, where prefill would write it.

Scenarios B06 (scattered tree nodes are compacted) and B18 (the drafter's rows come from the
target's true features), poisoned pages and padding, and a numpy model of `commit`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglejax.cache import PagedCache, commit
from eaglejax.config import PLAIN, SamplingParams, SpecPlan
from eaglejax.state import RING, EngineState
from tests import kit
from tests.kit import Kit, Run, Runner

TREE = SpecPlan.parse("3,2,7")
CHAIN = SpecPlan.parse("4,1")
PROMPTS = kit.random_prompts(6, seed=3)
TOKENS = 44


@functools.cache
def nospec() -> Run:
    return Runner(kit.tiny()).generate(PROMPTS, SamplingParams(max_tokens=TOKENS))


def texts() -> list[list[int]]:
    return [p + t for p, t in zip(PROMPTS, nospec().tokens, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _full_pass(module, variables, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return module.apply(variables, tokens, positions)


def fresh_prefill(models: Kit, text: list[int]):
    """Target output of one causal pass over a whole text, without any cache."""
    padded = np.zeros((1, kit.MAX_LENGTH), np.int32)
    padded[0, : len(text)] = text
    return _full_pass(models.models.target, models.params.target, padded)


def target_rows_are_fresh(run: Run, models: Kit, whole: list[list[int]]) -> None:
    """Committed keys and values of every slot equal a prefill of the same tokens."""
    for slot, text, length in zip(run.slots, whole, run.lengths(), strict=True):
        assert length == len(text) - 1  # all but the root
        fresh = fresh_prefill(models, text).fresh_kv
        k, v = kit.cached(run.state.target, run.state, slot, length)
        kit.assert_close(k, fresh.k[:, 0, :length])
        kit.assert_close(v, fresh.v[:, 0, :length])


# commit against a numpy model

LAYERS, PAGES, PAGE, ROWS, BATCH, SPAN, STEPS = 2, 7, 3, 5, 3, 3, 4
commit_jit = jax.jit(commit)


def naive_commit(pool, fresh, table, lengths, path, count):
    """Row by row; what falls outside is not written."""
    pool = pool.copy()
    for b in range(BATCH):
        for step in range(count[b]):
            page, offset = divmod(lengths[b] + step, PAGE)
            if page < SPAN and table[b][page] < PAGES:
                pool[:, table[b][page], offset] = fresh[:, b, path[b][step]]
    return pool


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_commit_equals_a_numpy_model(data: st.DataObject):
    pages = data.draw(st.permutations(range(PAGES)), "pages")
    # Sequences own two pages each; unknown ones lie out of range, as do lengths near the end.
    owned = st.sampled_from([PAGES, PAGES + 40, 2**30])
    table = [[pages[2 * b], pages[2 * b + 1], data.draw(owned, "outside")] for b in range(BATCH)]
    lengths = data.draw(st.lists(st.integers(0, PAGE * SPAN), min_size=BATCH, max_size=BATCH))
    count = data.draw(st.lists(st.integers(0, STEPS), min_size=BATCH, max_size=BATCH))
    rubbish = st.sampled_from([-1, -100, ROWS, 10**6])
    path = [
        [data.draw(st.integers(0, ROWS - 1) if s < count[b] else rubbish) for s in range(STEPS)]
        for b in range(BATCH)
    ]
    rng = np.random.default_rng(0)
    fresh = rng.standard_normal((2, LAYERS, BATCH, ROWS, 1, 2), np.float32)
    # NaN stands for "never written": equality below treats it as a value.
    pool = np.full((LAYERS, PAGES, PAGE, 1, 2), np.nan, np.float32)
    cache = commit_jit(
        PagedCache(jnp.asarray(pool), jnp.asarray(pool)),
        *fresh,
        *(np.asarray(x, np.int32) for x in (table, lengths, path, count)),
    )
    for got, rows in zip((cache.k, cache.v), fresh, strict=True):
        expected = naive_commit(pool, rows, table, lengths, path, count)
        np.testing.assert_array_equal(got, expected)


def test_commit_rounds_to_the_dtype_of_the_pool():
    cache = PagedCache.create(
        layers=1, pages=2, page_size=2, kv_heads=1, head_dim=2, dtype=jnp.float16
    )
    fresh = jnp.full((1, 1, 1, 1, 2), 1 / 3)
    zero = jnp.zeros(1, jnp.int32)
    cache = commit(cache, fresh, fresh, zero[:, None], zero, zero[:, None], zero + 1)
    assert cache.k.dtype == jnp.float16
    np.testing.assert_array_equal(cache.k[0, 0, :, 0, 0], np.float16([1 / 3, 0]))


# B06: the accepted nodes are scattered


@functools.cache
def second_siblings() -> Run:
    bare = kit.tiny().without_drafter()
    runner = Runner(bare, TREE, kit.scripted, kit.script(texts(), branch=1))
    return runner.generate(PROMPTS, SamplingParams(max_tokens=13))


def test_b06_second_sibling_at_every_level():
    run = second_siblings()
    assert run.tokens == [t[:13] for t in nospec().tokens]
    for steps in run.steps:
        assert [(s.count, s.accepted) for s in steps] == [(4, 3)] * 3
    # Rotary positions are root + depth: keys of nodes 2, 4 and 6 equal those of a prefill.
    whole = [p + t for p, t in zip(PROMPTS, run.tokens, strict=True)]
    target_rows_are_fresh(run, kit.tiny(), whole)


def test_b06_goes_on_as_nospec_afterwards():
    # Slots keep their state; 31 more tokens, decoded plainly and without a drafter.
    bare = kit.tiny().without_drafter()
    runner, run = Runner(bare), second_siblings()
    slots = kit.copied(run.state.slots)
    slots = slots.replace(active=slots.active.at[:6].set(True), remaining=slots.remaining + 31)
    state = kit.copied(run.state).replace(slots=slots)
    tokens = [list(t) for t in run.tokens]
    for _ in range(31):
        state, report = runner.step(state, run.slots, PLAIN)
        for i in range(6):
            tokens[i].append(int(report.tokens[i, 0]))
    assert tokens == nospec().tokens


def test_b06_tree_rows_of_a_real_drafter_are_compacted_too():
    run = Runner(kit.tiny(), SpecPlan.parse("4,4,16")).generate(
        PROMPTS, SamplingParams(max_tokens=TOKENS)
    )
    assert run.tokens == nospec().tokens
    target_rows_are_fresh(run, kit.tiny(), texts())


# B18: drafter rows


def drafter_rows_are_fresh(run: Run) -> None:
    """Absorbed rows equal the drafter's own prefill over the target's features."""
    models, params = kit.tiny().models, kit.tiny().params
    for slot, text in zip(run.slots, texts(), strict=True):
        count = int(run.state.slots.absorbed[slot])
        assert count >= len(text) - 1 - RING
        features = fresh_prefill(kit.tiny(), text).features[:, :count]
        hidden = models.drafter.apply(params.drafter, features, method="fuse")
        tokens = jnp.asarray(text[1 : count + 1])[None]  # row t: feature t, token t + 1
        rows = models.drafter.apply(
            params.drafter, hidden, tokens, jnp.arange(count)[None], method="project_kv"
        )
        k, v = kit.cached(run.state.draft, run.state, slot, count)
        kit.assert_close(k, rows.k[:, 0])
        kit.assert_close(v, rows.v[:, 0])


def test_b18_rows_of_accepted_drafts_come_from_true_features():
    # One text position in five is wrong, so steps accept 3 of 4, 4, and fewer.
    wrong = [[(t + 7 * (p % 5 == 4)) % 64 for p, t in enumerate(text)] for text in texts()]
    run = Runner(kit.tiny(), CHAIN, kit.scripted, kit.script(wrong)).generate(
        PROMPTS, SamplingParams(max_tokens=TOKENS)
    )
    assert run.tokens == nospec().tokens
    assert {s.accepted for steps in run.steps for s in steps} >= {3, 4}
    drafter_rows_are_fresh(run)


@pytest.mark.parametrize("plan", [PLAIN, SpecPlan.parse("4,4,16")], ids=str)
def test_b18_rows_of_every_mode_come_from_true_features(plan: SpecPlan):
    run = Runner(kit.tiny(), plan).generate(PROMPTS, SamplingParams(max_tokens=TOKENS))
    drafter_rows_are_fresh(run)


# Poison: what was never committed must not matter, and must not be touched


def poisoned() -> EngineState:
    """An empty state whose pages and rings hold NaN."""
    state = kit.tiny().state()

    def poison(tree):
        return jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            tree,
        )

    return state.replace(
        target=poison(state.target), draft=poison(state.draft), ring=poison(state.ring)
    )


@pytest.mark.parametrize("plan", [PLAIN, CHAIN, SpecPlan.parse("4,4,16")], ids=str)
def test_nan_in_unused_pages_and_rings_reaches_nothing(plan: SpecPlan):
    runner = Runner(kit.tiny(), plan)
    slots = [5, 0, 39, 2, 11, 20]
    run = runner.generate(PROMPTS, SamplingParams(max_tokens=TOKENS), slots=slots, state=poisoned())
    assert run.tokens == nospec().tokens
    clean = runner.generate(PROMPTS, SamplingParams(max_tokens=TOKENS), slots=slots)
    assert run.steps == clean.steps  # the same drafts were accepted
    lengths, absorbed = (np.asarray(run.state.slots.lengths), np.asarray(run.state.slots.absorbed))
    for slot in range(kit.MAX_SLOTS):
        for cache, count in ((run.state.target, lengths), (run.state.draft, absorbed)):
            rows = np.stack(kit.cached(cache, run.state, slot, kit.MAX_LENGTH))
            assert np.isfinite(rows[:, :, : count[slot]]).all()
            # Nothing was written past the committed tokens, nor for slots that never ran.
            assert np.isnan(rows[:, :, count[slot] :]).all()


def test_padding_leaves_no_trace():
    runner = Runner(kit.tiny(), CHAIN)
    params = [SamplingParams(max_tokens=TOKENS)] * 2
    state = runner.admit(runner.kit.state(), [3, 39], params, [1, 2])
    state, _, _ = runner.prefill(state, [3, 39], PROMPTS[:2])
    before = kit.copied(state)
    # All rows are padding, some far out of range; clamping would hit the last slot.
    padding = [kit.MAX_SLOTS, 10**6] * (kit.MAX_SLOTS // 2)
    for plan in (CHAIN, PLAIN):
        state, report = runner.step(state, padding, plan)
        assert not np.asarray(report.counts).any()
    state = runner.absorb(state, padding)
    # Even a caller who claims that padding has tokens writes nothing.
    tokens, counts = np.ones((len(padding), 8), np.int32), np.full(len(padding), 8, np.int32)
    state, report = runner.prefill_chunk(state, padding, tokens, counts, counts > 0)
    assert not np.asarray(report.counts).any()
    jax.tree.map(np.testing.assert_array_equal, before, state)


def test_idle_and_half_prefilled_slots_are_untouched_by_steps():
    runner = Runner(kit.tiny(), CHAIN)
    state = runner.admit(runner.kit.state(), [0, 1], [SamplingParams()] * 2, [1, 2])
    tokens = np.full((kit.MAX_SLOTS, 8), 5, np.int32)
    counts = np.zeros(kit.MAX_SLOTS, np.int32)
    counts[0] = 8  # half a prompt for slot 0; slot 1 is still empty
    state, _ = runner.prefill_chunk(state, [0, 1], tokens, counts, counts < 0)
    before = kit.copied(state)
    for plan in (CHAIN, PLAIN):
        state, report = runner.step(state, [0, 1], plan)
        assert not np.asarray(report.counts).any()
    state = runner.absorb(state, [0, 1])
    jax.tree.map(np.testing.assert_array_equal, before, state)


def test_aborted_request_leaves_no_trace_for_the_next_one():
    runner = Runner(kit.tiny(), SpecPlan.parse("4,4,16"))
    params = [SamplingParams(max_tokens=TOKENS)]
    state = runner.admit(runner.kit.state(), [2], params, [9])
    state, _, _ = runner.prefill(state, [2], [PROMPTS[5][::-1]])
    for _ in range(3):
        state, _ = runner.step(state, [2], SpecPlan.parse("4,4,16"))
    # The slot is given away in mid-request.
    run = runner.generate(PROMPTS[:1], params, slots=[2], state=state)
    assert run.tokens == nospec().tokens[:1]
    fresh = runner.generate(PROMPTS[:1], params, slots=[2])
    assert run.steps == fresh.steps


def test_page_tables_in_any_order():
    runner = Runner(kit.tiny(), CHAIN)
    state = runner.kit.state()
    table = np.random.default_rng(0).permutation(np.asarray(state.slots.page_table).ravel())
    table = table.reshape(state.slots.page_table.shape)
    state = state.replace(slots=state.slots.replace(page_table=jnp.asarray(table)))
    run = runner.generate(PROMPTS, SamplingParams(max_tokens=TOKENS), state=state)
    assert run.tokens == nospec().tokens
    target_rows_are_fresh(run, kit.tiny(), texts())
