"""How long kernels take on the device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REPEATS = 20
WASH_BYTES = 256 << 20  # written between two runs, so that no run finds its weights in the L2 cache


def device_times(run: Callable[[], Any], *, repeats: int = REPEATS) -> dict[str, Any]:
    """Seconds of one run on a GPU, with a cold L2 cache.

    The profiler's kernel times are taken where it gives any; else the clock around many runs, less
    that of as many washes, which holds the time to launch as well.

    Returns:
        `seconds` (median), `method`, and with the profiler `kernels`: name to seconds a run.
    """
    jax.block_until_ready(run())
    wash = jax.jit(lambda x: x + 1, donate_argnums=0)
    dirt = wash(jnp.zeros(WASH_BYTES // 4))
    jax.block_until_ready(dirt)
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(repeats):
                    dirt = wash(dirt)
                    jax.block_until_ready(run())
                jax.block_until_ready(dirt)
            kernels = _kernels(Path(folder), repeats)
        if kernels:
            return {"seconds": sum(kernels.values()), "method": "profiler", "kernels": kernels}
    except Exception as error:  # the profiler needs CUPTI, which may be missing or too old
        problem = f"{type(error).__name__}: {error}"[:200]
    else:
        problem = "no kernels in the trace"
    return {"seconds": _by_clock(run, wash, dirt, repeats), "method": f"clock ({problem})"}


def _kernels(folder: Path, repeats: int) -> dict[str, float]:
    """Seconds a run of each kernel but the wash, from a profile."""
    times: dict[str, list[float]] = {}
    for file in folder.rglob("*.xplane.pb"):
        profile = jax.profiler.ProfileData.from_file(str(file))
        for plane in profile.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    times.setdefault(event.name, []).append(event.duration_ns * 1e-9)
    # The wash moves half a gigabyte: it is the one that adds 1 to a long vector.
    names = [n for n in times if "add_fusion" not in n and "Memcpy" not in n and "memset" not in n]
    return {
        name: float(np.median(times[name])) * len(times[name]) / repeats
        for name in names
        if len(times[name]) >= repeats
    }


def _by_clock(run: Callable[[], Any], wash: Any, dirt: Any, repeats: int) -> float:
    def clock(with_run: bool) -> float:
        nonlocal dirt
        started = time.perf_counter()
        out = None
        for _ in range(repeats):
            dirt = wash(dirt)
            out = run() if with_run else None
        jax.block_until_ready((dirt, out))
        return (time.perf_counter() - started) / repeats

    clock(True)
    return max(0.0, float(np.median([clock(True) - clock(False) for _ in range(3)])))
