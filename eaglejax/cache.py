"""The paged KV cache. It holds committed tokens only, and `commit` is its only writer.

A forward pass reads a `CacheView` and returns the keys and values of its own rows; nothing is ever
rolled back, and an aborted step leaves no trace.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

import cpu_kernels
from pallas_kernels.implementation import Implementation


class CacheView(struct.PyTreeNode):
    """What a forward pass may see: pages, whose they are, and how many tokens are committed."""

    k: Float[Array, "L P p K h"]
    v: Float[Array, "L P p K h"]
    page_table: Int[Array, "B S"]
    lengths: Int[Array, " B"]


class PagedCache(struct.PyTreeNode):
    """Keys and values of committed tokens in pages of p tokens, one pool for all layers.

    Attributes:
        k, v: the pools.
        kernels: what `commit` writes with.
    """

    k: Float[Array, "L P p K h"]
    v: Float[Array, "L P p K h"]
    kernels: Implementation = struct.field(pytree_node=False, default="reference")

    @classmethod
    def create(
        cls,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: jnp.dtype | type = jnp.float32,
        kernels: Implementation = "reference",
    ) -> PagedCache:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), kernels)

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]

    def view(self, page_table: Int[Array, "B S"], lengths: Int[Array, " B"]) -> CacheView:
        return CacheView(self.k, self.v, page_table, lengths)


def commit(
    cache: PagedCache,
    fresh_k: Float[Array, "L B n K h"],
    fresh_v: Float[Array, "L B n K h"],
    page_table: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    path: Int[Array, "B m"],
    count: Int[Array, " B"],
) -> PagedCache:
    """Writes fresh rows path[:, :count] as the tokens lengths, lengths+1, ... of each sequence.

    Args:
        cache: the pool.
        fresh_k, fresh_v: keys and values of a forward pass's own rows.
        page_table: pages of each sequence.
        lengths: committed tokens before this call.
        path: which fresh rows to commit, in order; entries past count are not read.
        count: how many; 0 leaves a sequence untouched.
    """
    if cache.kernels == "cpu":
        k, v = cpu_kernels.commit(
            cache.k, cache.v, fresh_k, fresh_v, page_table, lengths, path, count
        )
        return cache.replace(k=k, v=v)
    page_size, num_pages = cache.page_size, cache.num_pages
    steps = jnp.arange(path.shape[1])
    positions = lengths[:, None] + steps[None, :]
    pages = jnp.take_along_axis(page_table, positions // page_size, axis=1, mode="clip")
    # An out-of-range page makes the scatter drop the row; -1 would wrap round to the last page.
    inside = (steps[None, :] < count[:, None]) & (positions // page_size < page_table.shape[1])
    pages = jnp.where(inside, pages, num_pages)

    def write(pool: Array, fresh: Array) -> Array:
        rows = jnp.take_along_axis(fresh, path[None, :, :, None, None], axis=2, mode="clip")
        return pool.at[:, pages, positions % page_size].set(rows.astype(pool.dtype), mode="drop")

    return cache.replace(k=write(cache.k, fresh_k), v=write(cache.v, fresh_v))
