"""From logits to tokens: a function of processed logits, seed and absolute position only.

Because nothing else enters (no step counter, no batch neighbour, no draft), a request gives the
same text plainly and speculatively, alone and in a batch, and after preemption.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

import cpu_kernels
from pallas_kernels.implementation import Implementation

TINY_TEMPERATURE = 1e-4  # below it the scaled gaps overflow float32; such rows are greedy


class SamplingRows(struct.PyTreeNode):
    """Sampling parameters of the sequences of a batch (`SamplingParams` as arrays)."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, " B"]


@runtime_checkable
class Choose(Protocol):
    """Picks the token that follows each row, given the absolute position that token will have."""

    def __call__(
        self,
        logits: Float[Array, "B N V"],
        positions: Int[Array, "B N"],
        rows: SamplingRows,
    ) -> Int[Array, "B N"]: ...


def greedy(
    logits: Float[Array, "B N V"],
    positions: Int[Array, "B N"],
    rows: SamplingRows,
    *,
    kernels: Implementation = "reference",
) -> Int[Array, "B N"]:
    """The likeliest token; the lowest id among equals. For batches without a sampling request."""
    if kernels == "cpu":
        return cpu_kernels.argmax(logits)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sampled(
    logits: Float[Array, "B N V"],
    positions: Int[Array, "B N"],
    rows: SamplingRows,
    *,
    kernels: Implementation = "reference",
) -> Int[Array, "B N"]:
    """Samples rows with a temperature, and takes the likeliest token in the others.

    The kernels compute the same probabilities and sum them in another order: where a coin falls
    within rounding of a border, an engine on the kernels may choose the token beside it.
    """
    coins = uniform(rows.seed, positions)
    if kernels == "cpu":
        return cpu_kernels.sample(
            logits, coins, rows.temperature, rows.top_k, rows.top_p, rows.min_p
        )
    probabilities = process(logits, rows)
    tokens = inverse_cdf(probabilities, coins)
    is_greedy = (rows.temperature < TINY_TEMPERATURE)[:, None]
    return jnp.where(is_greedy, greedy(logits, positions, rows), tokens)


def process(logits: Float[Array, "B N V"], rows: SamplingRows) -> Float[Array, "B N V"]:
    """Probabilities after temperature, then top_k, top_p and min_p.

    Banned tokens (logit -inf) keep probability 0. Tokens tied with the last one that top_k or top_p
    keeps are kept as well, so the result does not depend on the order of ids.
    """

    def per_row(x: Any) -> Any:
        return x[:, None, None]

    temperature = per_row(jnp.maximum(rows.temperature, TINY_TEMPERATURE))
    # Subtracting the maximum first keeps every quotient at or below 0 for any temperature.
    shifted = logits.astype(jnp.float32) - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(shifted / temperature)
    vocab = logits.shape[-1]
    limit = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    kept = weights >= _largest_threshold(
        weights, lambda mask, _: jnp.sum(mask, -1, keepdims=True) >= per_row(limit)
    )
    weights = jnp.where(kept, weights, 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # A top_p that float32 rounds to 0 must not be satisfied by an empty set.
    mass_wanted = jnp.maximum(rows.top_p, 1e-6)
    nucleus = weights >= _largest_threshold(
        weights,
        lambda _, mass: jnp.sum(mass, -1, keepdims=True) >= per_row(mass_wanted) * total,
    )
    # top_p = 1 keeps everything: rounding in the sum must not cut the tail off.
    weights = jnp.where(nucleus | per_row(rows.top_p >= 1), weights, 0.0)
    # The likeliest token has weight 1, so min_p compares weights directly.
    weights = jnp.where(weights >= per_row(rows.min_p), weights, 0.0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _largest_threshold(weights: Float[Array, "B N V"], enough: object) -> Float[Array, "B N 1"]:
    """The largest t such that the weights >= t are `enough(mask, masked weights)`; 0 if none is.

    Bisection on the bits of t (non-negative floats are ordered like their bits) finds it exactly in
    31 passes over the row, without sorting a vocabulary.
    """
    shape = (*weights.shape[:-1], 1)

    def narrow(bit: Int[Array, ""], bits: Int[Array, "B N 1"]) -> Int[Array, "B N 1"]:
        trial = bits | (jnp.int32(1) << (30 - bit))
        threshold = jax.lax.bitcast_convert_type(trial, jnp.float32)
        mask = weights >= threshold
        # NaN patterns compare false everywhere, so they are never enough.
        good = enough(mask, jnp.where(mask, weights, 0.0))  # type: ignore[operator]
        return jnp.where(good, trial, bits)

    bits = jax.lax.fori_loop(0, 31, narrow, jnp.zeros(shape, jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def uniform(seed: UInt32[Array, " B"], positions: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """One coin in [0, 1) for each (seed, absolute position)."""

    def coin(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(jax.vmap(coin, (None, 0)))(seed, positions)


def inverse_cdf(
    probabilities: Float[Array, "B N V"], coins: Float[Array, "B N"]
) -> Int[Array, "B N"]:
    """The first id, in id order, whose cumulative probability exceeds the coin."""
    cumulative = jnp.cumsum(probabilities, axis=-1)
    # Scaling the coin by the total makes rounding in the sum harmless: it never passes the end.
    goal = (coins * cumulative[..., -1])[..., None]
    possible = probabilities > 0
    exceeds = (cumulative > goal) & possible
    # A coin just below 1 can round up to the total, which nothing exceeds: the last possible token.
    last = probabilities.shape[-1] - 1 - jnp.argmax(possible[..., ::-1], axis=-1)
    first = jnp.argmax(exceeds, axis=-1)
    return jnp.where(jnp.any(exceeds, axis=-1), first, last).astype(jnp.int32)
