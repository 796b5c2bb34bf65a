"""Attention at full size as functions of shapes, to compile and to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import Chip
from pallas_kernels.tree_attention import triton
from pallas_kernels.tree_attention.cases import SERVED, Case

DTYPE = jnp.dtype(jnp.bfloat16)

Program = tuple[str, Callable[..., Any], tuple[Any, ...], int, int]


def programs(chip: Chip) -> Iterator[Program]:
    """Every served case: its name, a function, its arguments' shapes, bytes moved and flops.

    Bytes and flops are the least that the case needs: each committed key and value read once, each
    pair of a row and a key that it may see multiplied once.
    """
    for case in SERVED:
        yield case.name, function(case, chip), arguments(case), bytes_moved(case), flops(case)


def function(case: Case, chip: Chip) -> Callable[..., Any]:
    """The case's call of `arguments`."""

    def attend(arrays: dict[str, Any]) -> jax.Array:
        values = case.value_width if case.latent else None
        return triton.tree_attention(**arrays, value_width=values, scale=case.scale, chip=chip)

    return attend


def arguments(case: Case) -> tuple[dict[str, Any]]:
    """Shapes of the arrays of `reference.tree_attention`, by name."""
    batch, width = len(case.lengths), case.head_dim
    values = None if case.latent else case.value_width or width
    pages = case.pages or 0

    def shape(*sizes: int, dtype: Any = DTYPE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def fresh(width: int | None) -> Any:
        return width and shape(batch, case.fresh, case.kv_heads, width)

    def pool(width: int | None) -> Any:
        total = batch * pages
        return width and shape(case.layers, total, case.page_size, case.kv_heads, width)

    mask = None if case.causal else shape(batch, case.rows, case.fresh, dtype=jnp.bool_)
    return (
        {
            "q": shape(batch, case.rows, case.heads, width),
            "fresh_k": fresh(width),
            "fresh_v": fresh(values),
            "ancestors": mask,
            "pages_k": pool(width),
            "pages_v": pool(values),
            "page_table": shape(batch, pages, dtype=jnp.int32),
            "lengths": shape(batch, dtype=jnp.int32),
            "layer": shape(dtype=jnp.int32),
        },
    )


def bytes_moved(case: Case) -> int:
    """Queries, keys, values and results, each once."""
    values = case.value_width or case.head_dim
    of_key = case.head_dim + (0 if case.latent else values)
    keys = sum(case.lengths) + len(case.lengths) * case.fresh
    rows = len(case.lengths) * case.rows * case.heads
    return DTYPE.itemsize * (keys * case.kv_heads * of_key + rows * (case.head_dim + values))


def flops(case: Case) -> int:
    """Two products of each row with each key that it may see (of a tree: with all its nodes)."""
    values = case.value_width or case.head_dim
    fresh = case.rows * case.fresh
    if case.causal:
        fresh -= case.rows * (case.rows - 1) // 2
    pairs = sum(case.rows * length + fresh for length in case.lengths)
    return 2 * pairs * case.heads * (case.head_dim + values)
