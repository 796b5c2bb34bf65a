"""Everything about running requests that lives on the device, indexed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eaglejax.cache import CacheView, PagedCache
from eaglejax.config import MAX_STOP_IDS, DrafterConfig, EngineConfig, SamplingParams, TargetConfig
from eaglejax.sampling import SamplingRows
from pallas_kernels.implementation import activation_dtype

RING = 16  # pending pairs a slot can hold; a plan's depth + 1 must fit
NO_TOKEN = -1  # pads stop ids: no token has it


class SlotRows(struct.PyTreeNode):
    """Per-request values, one row a slot (`B` is max_slots in the state, fewer when gathered).

    Attributes:
        page_table: cache pages of the slot, for target and drafter alike.
        lengths: tokens whose target keys and values are committed.
        absorbed: rows whose drafter keys and values are committed; the rest up to lengths pends.
        root: the last committed token; its keys and values are not in the cache yet.
        active: the request is decoding.
        remaining: completion tokens that may still come.
        stop_ids: tokens that end the request, padded with NO_TOKEN.
        sampling: how it samples.
    """

    page_table: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    absorbed: Int[Array, " B"]
    root: Int[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    stop_ids: Int[Array, "B stops"]
    sampling: SamplingRows

    def take(self, slots: Int[Array, " B"]) -> SlotRows:
        """Rows of the slots a step runs; a slot out of range is padding and never active."""
        real = slots < self.active.shape[0]
        rows = jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), self)
        # Padding attends to nothing: it costs no time, whatever the slot that it stands in for.
        lengths, absorbed = (jnp.where(real, x, 0) for x in (rows.lengths, rows.absorbed))
        return rows.replace(active=rows.active & real, lengths=lengths, absorbed=absorbed)

    def put(self, slots: Int[Array, " B"], rows: SlotRows) -> SlotRows:
        """Writes rows back; padding is dropped."""
        return jax.tree.map(lambda x, new: x.at[slots].set(new, mode="drop"), self, rows)


class PendingRing(struct.PyTreeNode):
    """Pairs (feature of position t, token t+1) not absorbed yet, at index t % RING."""

    features: Float[Array, "slots R F"]
    tokens: Int[Array, "slots R"]

    def write(
        self,
        slots: Int[Array, " B"],
        positions: Int[Array, " B"],
        features: Float[Array, "B n F"],
        tokens: Int[Array, "B n"],
        count: Int[Array, " B"],
    ) -> PendingRing:
        """Stores pairs `positions + 0 .. count-1` of each slot."""
        steps = jnp.arange(tokens.shape[1])[None]
        # Entries past count go to a row that does not exist, and are dropped.
        index = jnp.where(steps < count[:, None], (positions[:, None] + steps) % RING, RING)
        where = (slots[:, None], index)
        return PendingRing(
            self.features.at[where].set(features.astype(self.features.dtype), mode="drop"),
            self.tokens.at[where].set(tokens, mode="drop"),
        )

    def read(
        self, slots: Int[Array, " B"], positions: Int[Array, "B n"]
    ) -> tuple[Float[Array, "B n F"], Int[Array, "B n"]]:
        """Pairs at given positions of each slot."""
        where = (slots[:, None], positions % RING)
        return self.features.at[where].get(mode="clip"), self.tokens.at[where].get(mode="clip")


class EngineState(struct.PyTreeNode):
    """The whole state of an engine; every step takes one and returns the next.

    Attributes:
        target: the target's cache.
        slots: per-request values.
        draft: the drafter's cache, one layer, addressed by the same page table; None without one.
        ring: pairs the drafter has still to absorb; None without a drafter.
    """

    target: PagedCache
    slots: SlotRows
    draft: PagedCache | None
    ring: PendingRing | None

    def target_view(self, rows: SlotRows) -> CacheView:
        return self.target.view(rows.page_table, rows.lengths)

    @classmethod
    def create(
        cls, engine: EngineConfig, target: TargetConfig, drafter: DrafterConfig | None
    ) -> EngineState:
        """An empty state; slot i has pages i*n .. (i+1)*n - 1 where there are enough.

        Caches and pending features are of the type that the engine's kernels compute in.
        """
        dtype = activation_dtype("triton" if engine.kernels == "triton" else "reference")
        count, per_slot, pages = engine.max_slots, engine.pages_per_slot, engine.total_pages
        table = jnp.arange(count * per_slot, dtype=jnp.int32).reshape(count, per_slot) % pages

        def pool(layers: int, config: TargetConfig | DrafterConfig) -> PagedCache:
            return PagedCache.create(
                layers=layers,
                pages=pages,
                page_size=engine.page_size,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                kernels="cpu" if engine.kernels == "cpu" else "reference",
            )

        def zeros(dtype: Any = jnp.int32) -> Array:
            return jnp.zeros(count, dtype)

        slots = SlotRows(
            page_table=table,
            lengths=zeros(),
            absorbed=zeros(),
            root=zeros(),
            active=zeros(bool),
            remaining=zeros(),
            stop_ids=jnp.full((count, MAX_STOP_IDS), NO_TOKEN, jnp.int32),
            sampling=SamplingRows(
                zeros(jnp.float32),
                zeros(),
                zeros(jnp.float32) + 1,
                zeros(jnp.float32),
                zeros(jnp.uint32),
            ),
        )
        ring = None
        if drafter is not None:
            ring = PendingRing(
                jnp.zeros((count, RING, drafter.feature_size), dtype),
                jnp.zeros((count, RING), jnp.int32),
            )
        return cls(
            target=pool(target.num_layers, target),
            slots=slots,
            draft=None if drafter is None else pool(1, drafter),
            ring=ring,
        )


def admission(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    eos_ids: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    said: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Host arrays that `admit` writes for new requests.

    Args:
        params, seeds: how each samples.
        eos_ids: the model's own stop ids.
        lengths: tokens of each prompt that the cache holds already; none by default.
        said: completion tokens that each prompt ends with, of a request that starts again.

    Raises:
        ValueError: more stop ids than a slot holds.
    """
    stops = np.full((len(params), MAX_STOP_IDS), NO_TOKEN, np.int32)
    for row, p in enumerate(params):
        ids = [*p.stop_token_ids, *(() if p.ignore_eos else eos_ids)]
        ids = list(dict.fromkeys(ids))
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids: {len(ids)} ids with the model's own, at most {MAX_STOP_IDS}"
            )
        stops[row, : len(ids)] = ids
    int32 = np.iinfo(np.int32).max
    done = [0] * len(params) if said is None else said
    known = [0] * len(params) if lengths is None else lengths
    return {
        "lengths": np.array(known, np.int32),
        "remaining": np.array(
            [p.max_tokens - n for p, n in zip(params, done, strict=True)], np.int32
        ),
        "stop_ids": stops,
        "sampling": SamplingRows(
            temperature=np.array([p.temperature for p in params], np.float32),  # type: ignore[arg-type]
            top_k=np.array([min(p.top_k, int32) for p in params], np.int32),  # type: ignore[arg-type]
            top_p=np.array([p.top_p for p in params], np.float32),  # type: ignore[arg-type]
            min_p=np.array([p.min_p for p in params], np.float32),  # type: ignore[arg-type]
            seed=np.array(seeds, np.uint32),  # type: ignore[arg-type]
        ),
    }


def admit(
    state: EngineState,
    slots: Int[Array, " B"],
    lengths: Int[Array, " B"],
    remaining: Int[Array, " B"],
    stop_ids: Int[Array, "B stops"],
    sampling: SamplingRows,
) -> EngineState:
    """Gives slots to new requests, inactive until their prompt is prefilled.

    Args:
        lengths: tokens at the start of the prompt that the pages hold already, target rows and
            drafter rows.
    """
    rows = state.slots.take(slots)
    rows = rows.replace(
        lengths=lengths,
        absorbed=lengths,
        active=jnp.zeros_like(rows.active),
        remaining=remaining,
        stop_ids=stop_ids,
        sampling=sampling,
    )
    return state.replace(slots=state.slots.put(slots, rows))
