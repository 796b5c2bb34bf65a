"""Compiling for absent GPUs in a process of its own: JAX must be told before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eaglejax import aot

ROOT = Path(__file__).parent.parent


def elsewhere(module: str) -> Any:
    """What `answer` says in a process that runs `module`."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=ROOT,
        # Triton remarks on each small dot, and LLVM symbolises the stack of each remark: minutes.
        env=os.environ | {"LLVM_DISABLE_SYMBOLIZATION": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def answer(function: Callable[[], Any]) -> None:
    """Runs a function that compiles for GPUs and prints its result."""
    aot.prepare()
    print(json.dumps(function()))
