"""Pages of the KV caches: who owns which, and which hold a prefix that a later prompt may reuse.

Target and drafter share one page table, so one pool serves both caches. A page that holds a known
prefix stays after its owners have left, until the room is needed.

The drafter's row t depends on token t+1. A page's key therefore includes the token that follows it:
a prompt that diverges exactly at the end of a page does not reuse that page.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ROOT = b""  # the key before the first page


def page_key(parent: bytes, tokens: Sequence[int], following: int) -> bytes:
    """Key of a full page: the prefix before it, its tokens, and the token after them."""
    ids = np.asarray([*tokens, following], "<i4")
    return hashlib.blake2b(parent + ids.tobytes(), digest_size=16).digest()


class PagePool:
    """Reference counts and the prefix cache of `pages` pages of `page_size` tokens.

    A page is free, owned (by one request or, as a shared prefix, by several), or kept: owned by
    nobody, its prefix still known. Kept pages are given away again, the longest unused first.
    """

    def __init__(self, pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.pages, self.page_size, self.prefix_cache = pages, page_size, prefix_cache
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # in order of last use

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """Pages that nobody owns and whose prefix is known."""
        return len(self._kept)

    def allocate(self, count: int) -> list[int] | None:
        """Takes pages, forgetting unused prefixes where it must; None if there are not enough."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._kept.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._owners[page] = 1
            taken.append(page)
        return taken

    def match(self, ids: Sequence[int]) -> list[int]:
        """Takes the pages of the longest known prefix of a prompt, in order (possibly none)."""
        found: list[int] = []
        if not self.prefix_cache:
            return found
        key, size = ROOT, self.page_size
        for end in range(size, len(ids), size):  # the token after the page must exist
            key = page_key(key, ids[end - size : end], ids[end])
            page = self._page_of.get(key)
            if page is None:
                break
            self._owners[page] += 1
            self._kept.pop(page, None)
            found.append(page)
        return found

    def publish(self, page: int, key: bytes) -> None:
        """Makes a full, owned page findable; another page of the same prefix keeps its place."""
        if self.prefix_cache and key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back. The later pages of a prefix are forgotten before the earlier ones."""
        for page in reversed(list(pages)):
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def forget(self) -> int:
        """Empties the prefix cache; returns how many kept pages became free."""
        for page in self._kept:
            self._free.append(page)
        count = len(self._kept)
        self._kept.clear()
        self._page_of.clear()
        self._key_of.clear()
        return count

    def check(self) -> None:
        """Raises AssertionError if the books do not add up; for tests."""
        owned = {page for page, owners in enumerate(self._owners) if owners}
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & kept, "a free page is kept"
        assert not owned & (free | kept), "an owned page can be given away"
        assert len(owned) + len(free) + len(kept) == self.pages, "a page is lost"
        assert min(self._owners) >= 0, "released more often than taken"
        assert {self._page_of[key] for key in self._page_of} == set(self._key_of), "keys differ"
        assert kept <= set(self._key_of), "a kept page has no prefix"
