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
        arrays: dict[str, Any] = {
            "q": 2 * random(batch, self.rows, self.heads, width),
            "fresh_k": random(batch, self.fresh, self.kv_heads, width),
            "fresh_v": random(batch, self.fresh, self.kv_heads, width),
            "ancestors": None,
        }
        if not self.causal:
            trees = [tree_mask(self.fresh, rng)[-self.rows :] for _ in self.lengths]
            arrays["ancestors"] = np.stack(trees)
        if self.pages is None:
            return arrays
        total = batch * self.pages + 1
        shape = (LAYERS, total, self.page_size, self.kv_heads, width)
        pages_k, pages_v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        owned = rng.permutation(total)[: batch * self.pages].reshape(batch, self.pages)
        table = np.full((batch, self.pages), total + 7)
        for i, length in enumerate(self.lengths):
            used = -(-length // self.page_size)
            table[i, :used] = owned[i, :used]
            for pool in (pages_k, pages_v):
                for t in range(length):
                    page, row = owned[i, t // self.page_size], t % self.page_size
                    pool[-1, page, row] = random(self.kv_heads, width)
        return arrays | {
            "pages_k": pages_k,
            "pages_v": pages_v,
            "page_table": table.astype(np.int32),
            "lengths": np.asarray(self.lengths, np.int32),
            "layer": LAYERS - 1,
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
