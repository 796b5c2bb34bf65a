"""The step functions: pure maps from state to state, jitted with the state donated.

All of them are the same forward pass with another mask: a prompt chunk is a causal block, decoding
one row, verification a tree. Caches are written by `commit` alone, with committed tokens alone.
A step takes `slots`, the rows of the state it runs, padded with `max_slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from eaglejax.cache import commit
from eaglejax.config import SpecPlan
from eaglejax.draft import Draft, Pending, absorb_chunk, eagle3
from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target, TargetOutput
from eaglejax.sampling import Choose, sampled
from eaglejax.state import RING, EngineState, SlotRows
from eaglejax.verify import Accept, Verdict, lossless


@dataclass(frozen=True)
class Models:
    """The two modules; static under jit."""

    target: Target
    drafter: Drafter | None = None


class Params(struct.PyTreeNode):
    """Their variables."""

    target: Any
    drafter: Any = None


class StepOutput(struct.PyTreeNode):
    """What a step tells the host; it carries its own stride n.

    Attributes:
        tokens: committed tokens, `counts` of each row.
        counts: 0 for a slot that did not run.
        accepted: how many of them were drafted.
        finished: the request has ended.
        stopped: it ended by a stop token (else by its budget).
    """

    tokens: Int[Array, "B n"]
    counts: Int[Array, " B"]
    accepted: Int[Array, " B"]
    finished: Bool[Array, " B"]
    stopped: Bool[Array, " B"]


def prefill_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " B"],
    tokens: Int[Array, "B C"],
    counts: Int[Array, " B"],
    final: Bool[Array, " B"],
    *,
    choose: Choose = sampled,
) -> tuple[EngineState, StepOutput]:
    """Runs one chunk of each prompt; the final chunk samples the first completion token.

    Args:
        tokens: the chunk, `counts` of each row valid; `counts` 0 leaves a slot untouched.
        final: the prompt ends with this chunk.
    """
    rows = state.slots.take(slots)
    counts = jnp.where(slots < state.slots.active.shape[0], counts, 0)
    steps = jnp.arange(tokens.shape[1])[None]
    positions = rows.lengths[:, None] + steps
    output = apply(models.target, params.target, tokens, positions, None, state.target_view(rows))
    last = jnp.maximum(counts - 1, 0)[:, None]
    hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
    logits = apply(models.target, params.target, hidden, method="logits")
    token = choose(logits, (rows.lengths + counts)[:, None], rows.sampling)[:, 0]

    absorbed = rows.absorbed
    if models.drafter is not None:
        state, absorbed = absorb_chunk(
            models.drafter,
            params.drafter,
            state,
            slots,
            rows,
            output.features,
            tokens,
            counts,
            token,
        )
    path = jnp.broadcast_to(steps, tokens.shape)
    target = _commit_target(state, rows, output, path, counts)
    ends = final & (counts > 0)
    rows = rows.replace(
        lengths=rows.lengths + counts, absorbed=absorbed, root=jnp.where(ends, token, rows.root)
    )
    one = jnp.ones_like(counts)
    rows, report = _finish(rows, token[:, None], one, 0 * one, running=ends)
    rows = rows.replace(active=jnp.where(counts > 0, ends & ~report.finished, rows.active))
    return state.replace(target=target, slots=state.slots.put(slots, rows)), report


def decode_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " B"],
    *,
    choose: Choose = sampled,
) -> tuple[EngineState, StepOutput]:
    """One token for every active slot, without drafting."""
    rows = state.slots.take(slots)
    output = apply(
        models.target,
        params.target,
        rows.root[:, None],
        rows.lengths[:, None],
        None,
        state.target_view(rows),
    )
    logits = apply(models.target, params.target, output.hidden, method="logits")
    token = choose(logits, rows.lengths[:, None] + 1, rows.sampling)[:, 0]
    alone = jnp.zeros_like(slots)
    return _advance(state, slots, rows, output, Verdict(alone[:, None], alone + 1, token), None)


def absorb_step(
    models: Models, params: Params, state: EngineState, slots: Int[Array, " B"]
) -> EngineState:
    """Absorbs all pending pairs but the last, so that plain decoding can go on for ever."""
    assert models.drafter is not None
    rows = state.slots.take(slots)
    pending = Pending.read(models.drafter, params.drafter, state, slots, rows, RING)
    keep = jnp.where(rows.active, jnp.maximum(pending.count - 1, 0), 0)
    draft, absorbed = pending.commit(state, rows, keep)
    rows = rows.replace(absorbed=absorbed)
    return state.replace(draft=draft, slots=state.slots.put(slots, rows))


def spec_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " B"],
    plan: SpecPlan,
    *,
    draft: Draft = eagle3,
    accept: Accept = lossless,
) -> tuple[EngineState, StepOutput]:
    """Absorb, draft a tree, verify it in one target pass, commit what the target agrees with.

    At most `plan.depth + 1` pairs of a slot may be pending, which holds after prefill and after
    steps of this plan or a shallower one; after others the host runs `absorb_step` first. More
    would leave gaps in the drafter's cache: the text stays right, acceptance does not.

    Args:
        plan: static; one compiled program each.
        draft: grows the tree and absorbs what is pending, `eaglejax.draft.eagle3` or your own.
        accept: the acceptance rule, `eaglejax.verify.lossless` or your own.
    """
    rows = state.slots.take(slots)
    tree, draft_cache, absorbed = draft(models.drafter, params.drafter, state, slots, rows, plan)
    positions = rows.lengths[:, None] + tree.depths
    output = apply(
        models.target,
        params.target,
        tree.tokens,
        positions,
        tree.ancestors,
        state.target_view(rows),
    )
    logits = apply(models.target, params.target, output.hidden, method="logits")
    verdict = accept(logits, tree, rows.lengths, rows.sampling, plan.depth)
    state = state.replace(draft=draft_cache)
    rows = rows.replace(absorbed=absorbed)
    return _advance(state, slots, rows, output, verdict, tree.tokens)


def _advance(
    state: EngineState,
    slots: Int[Array, " B"],
    rows: SlotRows,
    output: TargetOutput,
    verdict: Verdict,
    drafted: Int[Array, "B N"] | None,
) -> tuple[EngineState, StepOutput]:
    """Commits a verdict: cache rows of the path, its features to the ring, the bonus as root."""
    path, count = verdict.path, verdict.count
    tokens = verdict.token[:, None]
    if drafted is not None:  # the drafts below the root, then the bonus after the last accepted one
        following = jnp.take_along_axis(drafted, path[:, 1:], axis=1)
        tokens = jnp.concatenate([following, tokens], axis=1)
        is_bonus = jnp.arange(path.shape[1])[None] == count[:, None] - 1
        tokens = jnp.where(is_bonus, verdict.token[:, None], tokens)
    rows, report = _finish(rows, tokens, count, count - 1, running=rows.active)
    target = _commit_target(state, rows, output, path, report.counts)
    ring = state.ring
    if ring is not None:  # node i of the path and the token after it are a pair to absorb
        features = jnp.take_along_axis(output.features, path[..., None], axis=1)
        ring = ring.write(slots, rows.lengths, features, tokens, report.counts)
    last = jnp.maximum(report.counts - 1, 0)[:, None]
    newest = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    rows = rows.replace(
        lengths=rows.lengths + report.counts,
        root=jnp.where(report.counts > 0, newest, rows.root),
        active=rows.active & ~report.finished,
    )
    return state.replace(target=target, ring=ring, slots=state.slots.put(slots, rows)), report


def _finish(
    rows: SlotRows,
    tokens: Int[Array, "B n"],
    count: Int[Array, " B"],
    accepted: Int[Array, " B"],
    *,
    running: Bool[Array, " B"],
) -> tuple[SlotRows, StepOutput]:
    """Cuts a committed block at its first stop token or at the budget, whichever comes first."""
    count = jnp.where(running, jnp.minimum(count, rows.remaining), 0)
    steps = jnp.arange(tokens.shape[1])[None]
    is_stop = jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
    is_stop = is_stop & (steps < count[:, None])
    stopped = jnp.any(is_stop, axis=1)
    count = jnp.where(stopped, jnp.argmax(is_stop, axis=1) + 1, count)
    remaining = rows.remaining - count
    finished = running & (stopped | (remaining == 0))
    report = StepOutput(tokens, count, jnp.minimum(accepted, count), finished, stopped)
    return rows.replace(remaining=remaining), report


def _commit_target(
    state: EngineState,
    rows: SlotRows,
    output: TargetOutput,
    path: Int[Array, "B n"],
    count: Int[Array, " B"],
) -> Any:
    fresh = output.fresh_kv
    return commit(state.target, fresh.k, fresh.v, rows.page_table, rows.lengths, path, count)
