"""Protects draft trees: plans, ancestors, and the dynamic tree as EAGLE's own code grows it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import safetensors_io
from checkpoints.eagle3 import read_drafter
from eaglejax.config import ConfigError, EngineConfig, SpecPlan, TargetConfig
from eaglejax.draft import Pending, eagle3
from eaglejax.models.drafter import Drafter
from eaglejax.state import RING, EngineState
from eaglejax.tree import Candidates, Tree, first_level, next_level, select
from tests import kit

GOLDEN = Path(__file__).parent / "data" / "g4_eagle3_a"
NODES = 12


# plans


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("3,1", (3, 1, 4)),
        ("3,1,4", (3, 1, 4)),
        ("0,1,1", (0, 1, 1)),
        ("4,4,16", (4, 4, 16)),
        (" 4, 4, 12", (4, 4, 12)),
        ("1,2,3", (1, 2, 3)),
    ],
)
def test_plan_is_parsed(text: str, plan: tuple[int, int, int]):
    parsed = SpecPlan.parse(text)
    assert parsed == SpecPlan(*plan)
    assert SpecPlan.parse(str(parsed)) == parsed
    assert parsed.is_plain == (plan[0] == 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"plan = '': expected integers"),
        ("a,1", r"plan = 'a,1': expected integers"),
        ("3", r"plan = '3': expected depth,width,nodes"),
        ("4,4", r"plan = '4,4': expected depth,width,nodes \(nodes may be left out for width 1"),
        ("3,1,4,1", r"expected depth,width,nodes"),
        ("3,1,5", r"plan nodes = 5: expected depth \+ 1 = 4 for a chain"),
        ("16,1", r"plan depth = 16: expected 0 to 15"),
        ("-1,1,0", r"plan depth = -1"),
        ("2,0,3", r"plan width = 0: expected 1 to 16"),
        ("0,2,1", r"plan depth = 0: expected at least 1 for a tree"),
        ("4,4,4", r"plan nodes = 4: expected 5 .* to 53"),
        ("2,2,8", r"plan nodes = 8: expected 3 .* to 7"),
        ("8,8,65", r"plan nodes = 65: expected 1 to 64"),
    ],
)
def test_plan_that_fits_nothing_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        SpecPlan.parse(text)


def test_recorded_candidates_are_those_of_eagle2():
    assert SpecPlan(4, 4, 12).recorded == 4 + 3 * 16
    assert SpecPlan(1, 5, 6).recorded == 5
    assert SpecPlan(0, 1, 1).recorded == 0


# ancestors


def walk_up(parents: list[int]) -> tuple[list[set[int]], list[int]]:
    """Each node's ancestors (itself included) and depth, one step at a time."""
    seen, depths = [], []
    for node in range(len(parents)):
        path = {node}
        while node != 0:
            node = parents[node]
            path.add(node)
        seen.append(path)
        depths.append(len(path) - 1)
    return seen, depths


@functools.partial(jax.jit, static_argnums=2, compiler_options=kit.QUICK)
def build(tokens, parents, depth):
    return Tree.build(tokens, parents, depth)


@given(st.tuples(*(st.integers(0, max(i - 1, 0)) for i in range(NODES))))
@settings(max_examples=100, deadline=None)
def test_ancestors_and_depths_equal_a_walk(parents: tuple[int, ...]):
    seen, depths = walk_up(list(parents))
    batch = jnp.asarray([parents, [0] * NODES])
    tree = build(jnp.zeros_like(batch), batch, NODES - 1)
    assert [set(np.flatnonzero(row)) for row in np.asarray(tree.ancestors[0])] == seen
    assert tree.depths[0].tolist() == depths
    assert tree.depths[1].tolist() == [0] + [1] * (NODES - 1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8, 9, 15])
def test_ancestors_of_a_chain_of_every_depth(depth: int):
    parents = jnp.asarray([[0, *range(depth)]])
    tree = build(0 * parents, parents, depth)
    np.testing.assert_array_equal(tree.ancestors[0], np.tri(depth + 1, dtype=bool))
    np.testing.assert_array_equal(tree.depths[0], np.arange(depth + 1))


def test_root_only():
    tree = Tree.root_only(jnp.asarray([5, 9]))
    assert tree.tokens.tolist() == [[5], [9]]
    assert tree.ancestors.tolist() == [[[True]], [[True]]]
    assert tree.depths.tolist() == [[0], [0]]


# growth


def naive_growth(levels: list[np.ndarray], plan: SpecPlan) -> tuple[list[int], list[int]]:
    """EAGLE-2 in plain Python: the tree's draft tokens and parents.

    Level i's log-probabilities come in rows, one for each frontier node.
    """
    k = plan.width

    def best(values, count):  # ties: the first wins
        return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]

    recorded: list[tuple[int, float, int]] = []  # token, score, parent
    frontier: list[int] = []
    for level in levels:
        fresh = []
        for row, parent in zip(level, frontier or [-1], strict=False):
            score = recorded[parent][1] if parent >= 0 else np.float32(0)
            fresh += [(t, row[t] + score, parent) for t in best(row, k)]
        start = len(recorded)
        recorded += fresh
        frontier = [start + i for i in best([f[1] for f in fresh], k)]
    kept = sorted(best([r[1] for r in recorded], plan.nodes - 1))
    number = {index: node for node, index in enumerate(kept, 1)}
    parents = [0 if recorded[i][2] < 0 else number[recorded[i][2]] for i in kept]
    return [recorded[i][0] for i in kept], parents


@pytest.mark.parametrize("plan", ["1,3,3", "4,4,16", "3,2,6", "3,2,11", "5,1,6"])
def test_growth_equals_a_naive_one(plan: str):
    spec = SpecPlan.parse(plan)
    rng = np.random.default_rng(1)
    logits = [
        3 * rng.standard_normal((20, 1 if level == 0 else spec.width, 9)).astype(np.float32)
        for level in range(spec.depth)
    ]
    candidates, frontier = first_level(jnp.asarray(logits[0][:, 0]), spec.width)
    for level in logits[1:]:
        candidates, frontier = next_level(jnp.asarray(level), frontier, candidates)
    assert candidates.tokens.shape[1] == spec.recorded
    tokens, parents = select(candidates, spec)
    for b in range(20):
        rows = [np.asarray(jax.nn.log_softmax(level[b])) for level in logits]
        assert naive_growth(rows, spec) == (tokens[b].tolist(), parents[b].tolist())


def test_of_equal_scores_the_parent_is_kept_before_its_child():
    # Probabilities of 1: scores are equal down the path.
    candidates = Candidates(
        tokens=jnp.arange(4)[None], scores=jnp.zeros((1, 4)), parents=jnp.asarray([[-1, 0, 1, 2]])
    )
    tokens, parents = select(candidates, SpecPlan(2, 2, 3))
    assert (tokens.tolist(), parents.tolist()) == ([[0, 1]], [[0, 1]])


# the reference drafter's own tree, through a real engine state


@dataclass(frozen=True, eq=False)
class Golden:
    drafter: Drafter
    variables: dict
    state: EngineState  # all 16 pairs pending in slot 1
    arrays: dict[str, np.ndarray]
    facts: dict


@pytest.fixture(scope="module")
def golden() -> Golden:
    target = TargetConfig(512, 64, 6, 4, 2, 16, 128)
    checkpoint = read_drafter(GOLDEN, target)
    arrays = safetensors_io.read_all(GOLDEN / "golden.safetensors")
    ids, features = arrays["raw.input_ids"], arrays["in.hidden_states"]
    assert len(features) == RING
    state = EngineState.create(
        EngineConfig(max_slots=2, max_length=64, page_size=4), target, checkpoint.config
    )
    slot = jnp.asarray([1])
    count = jnp.asarray([RING])
    ring = state.ring.write(
        slot, 0 * slot, jnp.asarray(features)[None], jnp.asarray(ids[1:], jnp.int32)[None], count
    )
    slots = state.slots.replace(
        lengths=state.slots.lengths.at[1].set(RING),
        root=state.slots.root.at[1].set(int(ids[-1])),
        active=state.slots.active.at[1].set(True),
    )
    return Golden(
        Drafter(checkpoint.config),
        checkpoint.variables(None),
        state.replace(ring=ring, slots=slots),
        arrays,
        json.loads((GOLDEN / "golden.json").read_text()),
    )


@functools.partial(jax.jit, static_argnums=(0, 4), compiler_options=kit.QUICK)
def draft_with(drafter, variables, state, pending, plan):
    """Drafts for slot 1 (and a row of padding) when the last `pending` pairs are not absorbed."""
    slots = jnp.asarray([1, 2])
    rows = state.slots.take(slots)
    rows_before = Pending.read(drafter, variables, state, slots, rows, RING)
    cache, absorbed = rows_before.commit(state, rows, jnp.where(rows.active, RING - pending, 0))
    return eagle3(
        drafter, variables, state.replace(draft=cache), slots, rows.replace(absorbed=absorbed), plan
    )


@pytest.mark.parametrize("pending", [1, 3, 5])
def test_golden_dynamic_tree(golden: Golden, pending: int):
    plan = SpecPlan.parse("4,4,12")  # its authors call it depth 3, top_k 4, total 12
    tree, _, absorbed = draft_with(golden.drafter, golden.variables, golden.state, pending, plan)
    assert absorbed.tolist() == [RING, 0]
    expected = {
        key: golden.arrays[f"safeailab_tree.{key}"]
        for key in ("draft_tokens", "tree_mask", "position_ids", "retrieve_indices")
    }
    np.testing.assert_array_equal(tree.tokens[0], expected["draft_tokens"])
    np.testing.assert_array_equal(tree.ancestors[0], expected["tree_mask"].astype(bool))
    np.testing.assert_array_equal(tree.depths[0], expected["position_ids"])
    parents = tree.parents[0].tolist()
    seen, depths = walk_up(parents)
    leaves = set(range(len(parents))) - {parents[i] for i in range(1, len(parents))}
    paths = {tuple(sorted(seen[leaf], key=lambda node: depths[node])) for leaf in leaves}
    assert paths == {tuple(i for i in row if i >= 0) for row in expected["retrieve_indices"]}


@pytest.mark.parametrize("pending", [1, 4])
def test_golden_chain(golden: Golden, pending: int):
    plan = SpecPlan.parse("5,1")
    tree, _, _ = draft_with(golden.drafter, golden.variables, golden.state, pending, plan)
    root = int(golden.arrays["raw.input_ids"][-1])
    assert tree.tokens[0].tolist() == [root, *golden.facts["chain_target_ids"]]
    assert tree.parents[0].tolist() == [0, 0, 1, 2, 3, 4]


def test_absorbing_gives_the_same_rows_however_it_is_cut(golden: Golden):
    plan = SpecPlan.parse("4,4,12")
    caches = [
        draft_with(golden.drafter, golden.variables, golden.state, pending, plan)[1]
        for pending in (1, 3, 5)
    ]
    for cache in caches[1:]:
        kit.assert_close(cache.k, caches[0].k)
        kit.assert_close(cache.v, caches[0].v)
