"""Acceptance: which drafted tokens the target itself would have said.

`lossless` needs no draft probabilities. The target's token after every node is already decided by
logits, seed and position (eaglejax/sampling.py); a drafted child is accepted when it *is* that
token. Greedy text is therefore identical with and without speculation, and sampled text too, which
makes it exactly distributed as the target's.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from eaglejax.sampling import Choose, SamplingRows, greedy, sampled
from eaglejax.tree import Tree


class Verdict(struct.PyTreeNode):
    """What a step keeps.

    Attributes:
        path: nodes from the root down the accepted path; entries past `count` repeat it harmlessly.
        count: committed tokens, accepted drafts and the bonus token.
        token: the bonus token, the target's own after the last accepted node.
    """

    path: Int[Array, "B n"]
    count: Int[Array, " B"]
    token: Int[Array, " B"]


@runtime_checkable
class Accept(Protocol):
    """An acceptance rule: logits of all nodes, the tree, root positions, sampling parameters."""

    def __call__(
        self,
        logits: Float[Array, "B N V"],
        tree: Tree,
        root_positions: Int[Array, " B"],
        rows: SamplingRows,
        depth: int,
    ) -> Verdict: ...


def walk(tokens: Int[Array, "B N"], tree: Tree, depth: int) -> Verdict:
    """Follows the target's own tokens down the tree.

    Args:
        tokens: the target's token after each node.
        tree: what was drafted; siblings are distinct, so at most one child of a node matches.
        depth: the deepest a path can be.
    """
    parent_says = jnp.take_along_axis(tokens, tree.parents, axis=1)
    matches = (parent_says == tree.tokens) | (tree.depths == 0)
    # A node is accepted when it and all its ancestors match.
    accepted = jnp.all(matches[:, None, :] | ~tree.ancestors, axis=-1)
    at_depth = accepted[:, None, :] & (
        tree.depths[:, None, :] == jnp.arange(depth + 1)[None, :, None]
    )
    path = jnp.argmax(at_depth, axis=-1)
    count = jnp.sum(jnp.any(at_depth, axis=-1), axis=-1)
    last = jnp.take_along_axis(path, count[:, None] - 1, axis=1)
    token = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    return Verdict(path, count, token)


def accept_with(choose: Choose) -> Accept:
    """The lossless rule for a way to choose tokens."""

    def accept(
        logits: Float[Array, "B N V"],
        tree: Tree,
        root_positions: Int[Array, " B"],
        rows: SamplingRows,
        depth: int,
    ) -> Verdict:
        # The token after a node at position p has position p + 1.
        tokens = choose(logits, root_positions[:, None] + tree.depths + 1, rows)
        return walk(tokens, tree, depth)

    return accept


lossless: Accept = accept_with(sampled)
lossless_greedy: Accept = accept_with(greedy)
