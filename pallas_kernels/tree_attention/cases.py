"""Named shapes of attention over a paged prefix and a fresh block, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LAYERS = 2


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: what it stands for.
        rows, fresh: query rows n, and rows m >= n of the fresh block.
        lengths: committed tokens of each sequence; their number is the batch.
        causal: a prompt chunk; else every row sees its own path in a random tree.
        pages: width of the page table; None for no prefix at all.
        value_width: of a value, where it is not that of a key.
        latent: values are the first entries of the keys (MLA).
        scale: of the scores, where it is not `head_dim**-0.5`.
        layers: of the pool.
    """

    name: str
    rows: int
    fresh: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    lengths: tuple[int, ...] = (0,)
    causal: bool = False
    pages: int | None = 4
    value_width: int | None = None
    latent: bool = False
    scale: float | None = None
    layers: int = LAYERS

    def __str__(self) -> str:
        return self.name

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of `reference.tree_attention` by name.

        Whatever no row may read is poisoned: pages that no sequence owns, rows past a length and
        other layers hold NaN, table entries past a length are out of range.
        """
        rng = np.random.default_rng(seed)

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        batch, width = len(self.lengths), self.head_dim
        widths = (width,) if self.latent else (width, self.value_width or width)
        fresh = (batch, self.fresh, self.kv_heads)
        arrays: dict[str, Any] = {
            "q": 2 * random(batch, self.rows, self.heads, width),
            **dict(zip(("fresh_k", "fresh_v"), (random(*fresh, w) for w in widths), strict=False)),
            "ancestors": None,
        }
        if self.latent:
            arrays |= {"fresh_v": None, "value_width": self.value_width}
        if self.scale is not None:
            arrays["scale"] = self.scale
        if not self.causal:
            trees = [tree_mask(self.fresh, rng)[-self.rows :] for _ in self.lengths]
            arrays["ancestors"] = np.stack(trees)
        if self.pages is None:
            return arrays
        total = batch * self.pages + 1
        shape = (self.layers, total, self.page_size, self.kv_heads)
        pools = [np.full((*shape, w), np.nan, np.float32) for w in widths]
        owned = rng.permutation(total)[: batch * self.pages].reshape(batch, self.pages)
        table = np.full((batch, self.pages), total + 7)
        for i, length in enumerate(self.lengths):
            used = -(-length // self.page_size)
            table[i, :used] = owned[i, :used]
            for pool in pools:
                for t in range(length):
                    page, row = owned[i, t // self.page_size], t % self.page_size
                    pool[-1, page, row] = random(*pool.shape[-2:])
        return arrays | {
            **dict(zip(("pages_k", "pages_v"), pools, strict=False)),
            "page_table": table.astype(np.int32),
            "lengths": np.asarray(self.lengths, np.int32),
            "layer": self.layers - 1,
        }


def tree_mask(nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Ancestors `[nodes, nodes]`, itself included, of a random tree; parents come first."""
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[rng.integers(node)]
    return mask


REAL = (
    Case("smollm2-decode", 1, 1, 9, 3, 64, lengths=(37, 61, 5)),
    Case("smollm2-verify", 16, 16, 9, 3, 64, lengths=(50,)),
    Case("smollm2-chunk", 33, 33, 9, 3, 64, lengths=(20, 0), causal=True),
    Case("smollm2-draft-level", 4, 11, 9, 3, 64, lengths=(33, 1)),
    Case("llama-8b-verify", 7, 7, 32, 8, 128, lengths=(18,)),
)
# B55: sizes that are no power of two, and blocks with fewer than 16 rows.
RAGGED = (
    Case("no-prefix", 5, 5, 4, 2, 16, pages=None),
    Case("no-prefix-causal", 7, 9, 4, 4, 16, causal=True, lengths=(0, 0), pages=None),
    Case("nothing-committed", 3, 5, 6, 2, 16, page_size=4, lengths=(0, 0)),
    Case("page-of-one", 7, 7, 4, 2, 80, page_size=1, lengths=(4, 3, 0)),
    Case("page-of-four", 3, 8, 9, 3, 96, page_size=4, lengths=(16, 15, 1)),
    Case("one-head", 2, 2, 1, 1, 64, lengths=(64,)),
    Case("many-queries-a-key", 5, 5, 12, 1, 16, page_size=4, lengths=(9,)),
    Case("queries-of-a-key-fill-no-tile", 3, 3, 26, 2, 16, page_size=4, lengths=(14, 2)),
    Case("odd-width", 5, 6, 4, 2, 20, page_size=4, lengths=(7, 2)),
    Case("narrow", 2, 3, 2, 2, 4, page_size=4, lengths=(3,)),
    Case("long-causal", 17, 21, 6, 3, 16, page_size=4, lengths=(14, 0, 3), causal=True),
)
CASES = REAL + RAGGED

# What the CPU kernels do not have: values within the keys, values narrower than keys, a scale.
LATENT = (
    Case("latent-decode", 1, 1, 8, 1, 576, lengths=(17, 0), pages=2, value_width=512, latent=True),
    Case("latent-verify", 4, 4, 20, 1, 576, lengths=(1,), pages=1, value_width=512, latent=True),
    Case("latent-odd", 3, 5, 5, 1, 36, 4, (7, 1), pages=2, value_width=20, latent=True, scale=0.1),
    Case("latent-no-prefix", 5, 5, 4, 1, 48, pages=None, value_width=32, latent=True),
    Case("narrow-values", 4, 4, 4, 2, 48, 4, (5, 8), causal=True, value_width=24, scale=0.3),
)
# Widths of heads, 64 nodes, lengths at the edges of pages and tiles.
WIDE = (
    Case("tree-of-64", 64, 64, 3, 1, 64, lengths=(17, 0), pages=2),
    Case("level-of-a-tree-of-64", 5, 64, 4, 2, 64, lengths=(31,), pages=2),
    Case("128-wide", 2, 2, 4, 1, 128, lengths=(16, 32), pages=2),
    Case("192-wide", 3, 3, 2, 1, 192, lengths=(15, 1), pages=1),
    Case("256-wide", 4, 4, 2, 1, 256, lengths=(64, 0)),
    Case("big-pages", 1, 1, 6, 2, 32, 64, (64, 65, 127, 0), pages=2),
    Case("chunk-of-70", 70, 70, 3, 1, 16, lengths=(33,), causal=True),
)

CONTEXT = {"page_size": 16, "pages": 512}  # 8192 tokens


def _smollm2(name: str, rows: int, batch: int, **other: Any) -> Case:
    full = (8192,) * batch
    return Case(
        f"smollm2-{name}", rows, rows, 9, 3, 64, lengths=full, layers=30, **CONTEXT, **other
    )


def _llama(name: str, rows: int, batch: int, **other: Any) -> Case:
    full = (8192,) * batch
    return Case(
        f"llama-3.1-8b-{name}", rows, rows, 32, 8, 128, lengths=full, layers=32, **CONTEXT, **other
    )


def _qwen(name: str, rows: int, batch: int, **other: Any) -> Case:
    full = (8192,) * batch
    return Case(
        f"qwen-256-wide-{name}", rows, rows, 16, 2, 256, lengths=full, layers=8, **CONTEXT, **other
    )


def _kimi(heads: int, name: str, rows: int, batch: int, **other: Any) -> Case:
    """Kimi K2.5: 64 query heads, or those that tensor parallelism leaves on a GPU."""
    return Case(
        f"kimi-{heads}-heads-{name}",
        rows,
        rows,
        heads,
        1,
        576,
        lengths=(8192,) * batch,
        value_width=512,
        latent=True,
        scale=192**-0.5,
        layers=61,
        **CONTEXT,
        **other,
    )


# Full size, for compiling and timing: contexts of 8192 tokens.
SERVED = (
    _smollm2("decode-1", 1, 1),
    _smollm2("decode-64", 1, 64),
    _smollm2("verify-16x8", 16, 8),
    _smollm2("chunk-512", 512, 1, causal=True),
    _llama("decode-1", 1, 1),
    _llama("decode-64", 1, 64),
    _llama("verify-4x8", 4, 8),
    _llama("verify-64x1", 64, 1),
    _llama("chunk-2048", 2048, 1, causal=True),
    _qwen("decode-16", 1, 16),
    _qwen("verify-8x8", 8, 8),
    _qwen("chunk-512", 512, 1, causal=True),
    _kimi(8, "verify-4x16", 4, 16),
    _kimi(16, "decode-32", 1, 32),
    _kimi(64, "decode-1", 1, 1),
    _kimi(64, "verify-4x8", 4, 8),
    _kimi(128, "verify-4x8", 4, 8),
    _kimi(64, "chunk-256", 256, 1, causal=True),
)
