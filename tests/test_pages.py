"""Protects the books of the page pool: no page is lost, shared by mistake, or given away in use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglejax.engine.pages import ROOT, PagePool, page_key

SIZE = 4


def publish(pool: PagePool, pages: list[int], ids: list[int]) -> None:
    """Makes every full page of a prompt findable."""
    key = ROOT
    for i, end in enumerate(range(SIZE, len(ids), SIZE)):
        key = page_key(key, ids[end - SIZE : end], ids[end])
        pool.publish(pages[i], key)


def owned(pool: PagePool, ids: list[int]) -> list[int]:
    """Matches a prompt and takes the rest of its pages."""
    reused = pool.match(ids)
    fresh = pool.allocate(-(-len(ids) // SIZE) - len(reused))
    assert fresh is not None
    return reused + fresh


def test_a_known_prefix_is_found_again_after_its_owner_has_left():
    pool, ids = PagePool(8, SIZE), list(range(11))
    pages = owned(pool, ids)
    publish(pool, pages, ids)
    pool.release(pages)
    assert pool.available == 8
    assert pool.kept == 2
    assert pool.match(ids) == pages[:2]
    assert pool.available == 6


def test_a_shared_page_stays_until_its_last_owner_has_left():
    pool, ids = PagePool(8, SIZE), list(range(9))
    first = owned(pool, ids)
    publish(pool, first, ids)
    second = owned(pool, ids)
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    pool.release(first)
    assert pool.allocate(7) is None
    pool.release(second)
    assert pool.available == 8


def test_b16_a_prompt_that_diverges_at_the_end_of_a_page_does_not_reuse_it():
    """The drafter's last row of a page knows the token after it."""
    pool, ids = PagePool(8, SIZE), list(range(9))
    publish(pool, owned(pool, ids), ids)
    assert len(pool.match([*ids[:8], 99])) == 1
    assert len(pool.match([*ids[:4], 99, 99, 99])) == 0
    assert len(pool.match(ids[:8])) == 1  # what follows is not known yet
    assert len(pool.match(ids[:4])) == 0


def test_the_longest_unused_prefix_goes_first_and_its_end_before_its_beginning():
    pool = PagePool(6, SIZE)
    old, new = list(range(9)), list(range(50, 59))
    for ids in (old, new):
        pages = owned(pool, ids)
        publish(pool, pages, ids)
        pool.release(pages)
    assert pool.allocate(3) is not None  # two free pages, and the end of the old prefix
    assert len(pool.match(old)) == 1
    assert len(pool.match(new)) == 2


def test_without_a_prefix_cache_nothing_is_kept():
    pool, ids = PagePool(4, SIZE, prefix_cache=False), list(range(9))
    pages = owned(pool, ids)
    publish(pool, pages, ids)
    pool.release(pages)
    assert pool.kept == 0
    assert pool.match(ids) == []


def test_forgetting_frees_what_nobody_uses():
    pool, ids = PagePool(4, SIZE), list(range(9))
    pages = owned(pool, ids)
    publish(pool, pages, ids)
    pool.release(pages)
    assert pool.forget() == 2
    assert pool.match(ids) == []
    pool.check()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("apr"), st.integers(0, 30)), max_size=60))
def test_the_books_add_up_whatever_happens(actions: list[tuple[str, int]]):
    """Random prompts over two tokens (so that prefixes are shared) come, publish and leave."""
    pool, live = PagePool(12, SIZE), []
    for action, n in actions:
        if action == "a":
            ids = np.random.default_rng(n).integers(0, 2, 1 + n % 13).tolist()
            reused = pool.match(ids)
            fresh = pool.allocate(-(-len(ids) // SIZE) - len(reused))
            if fresh is None:
                pool.release(reused)
            else:
                live.append((ids, reused + fresh))
        elif live and action == "p":
            ids, pages = live[n % len(live)]
            publish(pool, pages, ids)
        elif live:
            pool.release(live.pop(n % len(live))[1])
        pool.check()
        for ids, pages in live:  # a page of two owners holds the same prefix for both
            for other, others in live:
                for i, page in enumerate(pages):
                    if page in others:
                        end = (i + 1) * SIZE
                        assert others.index(page) == i
                        assert ids[:end] == other[:end]
    for _, pages in live:
        pool.release(pages)
    pool.check()
    assert pool.available == 12


def test_more_pages_than_there_are_cannot_be_taken():
    pool = PagePool(3, SIZE)
    assert pool.allocate(4) is None
    assert pool.available == 3
    assert sorted(pool.allocate(3) or []) == [0, 1, 2]


@pytest.mark.parametrize("other", [[1, 2, 3, 5], [4, 3, 2, 1]])
def test_keys_differ_by_tokens_order_and_what_follows(other: list[int]):
    ids = [1, 2, 3, 4]
    key = page_key(ROOT, ids, 9)
    assert page_key(ROOT, other, 9) != key
    assert page_key(ROOT, ids, 8) != key
    assert page_key(key, ids, 9) != key
