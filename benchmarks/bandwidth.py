"""How fast this machine reads memory: the bound of plain decoding, which reads all weights.

Each thread sums its own float64 array, far larger than the caches. numpy's pairwise sum is
vectorised and releases the interpreter lock, so it waits for memory and for nothing else; other
reductions (integers, minimum) came out slower where this was tried.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES = 192 << 20  # a thread; the last-level caches of servers are smaller, or shared


def usable_cores() -> int:
    """Cores that this process may run on: the threads of every engine that is compared."""
    return len(os.sched_getaffinity(0))


def read_bandwidth(threads: int | None = None, *, size: int = BYTES, repeats: int = 8) -> float:
    """Bytes a second that all threads together read from memory; the best of the repeats.

    Args:
        threads: by default one a usable core.
        size: bytes that each thread reads, a multiple of 8.
        repeats: rounds; the best one counts, since others can only be slowed down.
    """
    threads = usable_cores() if threads is None else threads
    arrays = np.ones((threads, size // 8), np.float64)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            list(pool.map(np.add.reduce, arrays))
            best = min(best, time.perf_counter() - started)
    return arrays.nbytes / best
