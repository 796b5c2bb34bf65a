"""Draft trees: how a plan's nodes grow, and who is whose ancestor (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

import cpu_kernels
from eaglejax.config import SpecPlan
from pallas_kernels.implementation import Implementation


class Tree(struct.PyTreeNode):
    """Nodes to verify, the root (last committed token) first, parents before children.

    Attributes:
        tokens: target ids.
        parents: node number of the parent; the root is its own.
        ancestors: which nodes a node sees, itself included.
        depths: 0 for the root.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    ancestors: Bool[Array, "B N N"]
    depths: Int[Array, "B N"]

    @classmethod
    def build(cls, tokens: Int[Array, "B N"], parents: Int[Array, "B N"], depth: int) -> Tree:
        """Derives ancestors and depths from the parents."""
        nodes = tokens.shape[1]
        itself = jnp.eye(nodes, dtype=bool)[None]
        reach = itself | jax.nn.one_hot(parents, nodes, dtype=bool)
        # Each squaring doubles how far up a node sees.
        for _ in range(max(depth - 1, 0).bit_length()):
            reach = jnp.einsum("bij,bjk->bik", reach.astype(jnp.int32), reach.astype(jnp.int32)) > 0
        return cls(tokens, parents, reach, jnp.sum(reach, axis=-1) - 1)

    @classmethod
    def root_only(cls, root: Int[Array, " B"]) -> Tree:
        """The tree of plain decoding."""
        tokens = root[:, None]
        return cls.build(tokens, jnp.zeros_like(tokens), 0)


class Candidates(struct.PyTreeNode):
    """Everything drafted so far, level after level.

    Attributes:
        tokens: draft ids.
        scores: cumulative log-probability from the root.
        parents: index of the parent among the candidates, -1 for children of the root.
    """

    tokens: Int[Array, "B M"]
    scores: Float[Array, "B M"]
    parents: Int[Array, "B M"]

    def extend(self, other: Candidates) -> Candidates:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, other)


class Frontier(struct.PyTreeNode):
    """The k nodes of one level that are forwarded next.

    Attributes:
        tokens: draft ids.
        scores: cumulative log-probability.
        index: their index among the candidates.
        parent_slot: which node of the level before is the parent.
    """

    tokens: Int[Array, "B k"]
    scores: Float[Array, "B k"]
    index: Int[Array, "B k"]
    parent_slot: Int[Array, "B k"]


def _likeliest(
    logits: Float[Array, "*rows v"], width: int, kernels: Implementation
) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Log-probabilities and draft ids of the k likeliest tokens."""
    if width == 1:  # a chain never compares scores, and an arg-max is all it needs
        best = cpu_kernels.argmax(logits) if kernels == "cpu" else jnp.argmax(logits, axis=-1)
        tokens = best[..., None].astype(jnp.int32)
        return jnp.zeros(tokens.shape), tokens
    if kernels == "cpu":
        return cpu_kernels.top_k(logits, width)
    scores, tokens = jax.lax.top_k(jax.nn.log_softmax(logits), width)
    return scores, tokens


def first_level(
    logits: Float[Array, "B v"], width: int, *, kernels: Implementation = "reference"
) -> tuple[Candidates, Frontier]:
    """Children of the root: the k likeliest draft tokens."""
    scores, tokens = _likeliest(logits, width, kernels)
    nobody = jnp.full(tokens.shape, -1, jnp.int32)
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
    return Candidates(tokens, scores, nobody), Frontier(tokens, scores, index, 0 * index)


def next_level(
    logits: Float[Array, "B k v"],
    frontier: Frontier,
    candidates: Candidates,
    *,
    kernels: Implementation = "reference",
) -> tuple[Candidates, Frontier]:
    """Records k children of every frontier node; the k best of all are the next frontier."""
    batch, width = frontier.tokens.shape
    top, tokens = _likeliest(logits, width, kernels)
    scores = (top + frontier.scores[:, :, None]).reshape(batch, -1)
    tokens = tokens.reshape(batch, -1)
    first = candidates.tokens.shape[1]
    parents = jnp.repeat(frontier.index, width, axis=1)
    candidates = candidates.extend(Candidates(tokens, scores, parents))
    best, chosen = jax.lax.top_k(scores, width)
    chosen_tokens = jnp.take_along_axis(tokens, chosen, axis=1)
    return candidates, Frontier(chosen_tokens, best, first + chosen, chosen // width)


def select(candidates: Candidates, plan: SpecPlan) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
    """The plan's best candidates in the order recorded: draft ids and parents as node numbers.

    A child never scores above its parent, and of equals the one recorded first wins, so the choice
    is connected to the root.

    Returns:
        draft ids `[B, nodes-1]` and the parent of each as a node number (root 0).
    """
    _, best = jax.lax.top_k(candidates.scores, plan.nodes - 1)
    order = jnp.sort(best, axis=1)
    is_chosen = jnp.any(
        order[:, :, None] == jnp.arange(candidates.tokens.shape[1])[None, None], axis=1
    )
    number = jnp.cumsum(is_chosen, axis=1, dtype=jnp.int32)  # the root is node 0
    parent = jnp.take_along_axis(candidates.parents, order, axis=1)
    node = jnp.take_along_axis(number, jnp.maximum(parent, 0), axis=1)
    tokens = jnp.take_along_axis(candidates.tokens, order, axis=1)
    return tokens, jnp.where(parent < 0, 0, node)
