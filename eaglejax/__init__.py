"""INT4 language models, faster by EAGLE-3 speculative decoding, in JAX.

The public names are loaded on first use: `checkpoints` imports `eaglejax.config`, so importing the
whole library here would be circular, and `eaglejax --help` need not wait for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglejax.api import generate, load
    from eaglejax.config import ConfigError, EngineConfig, SamplingParams, SpecPlan
    from eaglejax.engine.engine import Engine, StartError
    from eaglejax.engine.request import Chunk, Completion, RequestError, Stats

_HOMES = {
    "eaglejax.api": ("generate", "load"),
    "eaglejax.config": ("ConfigError", "EngineConfig", "SamplingParams", "SpecPlan"),
    "eaglejax.engine.engine": ("Engine", "StartError"),
    "eaglejax.engine.request": ("Chunk", "Completion", "RequestError", "Stats"),
}

__all__ = [
    "Chunk",
    "Completion",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "RequestError",
    "SamplingParams",
    "SpecPlan",
    "StartError",
    "Stats",
    "generate",
    "load",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'eaglejax' has no attribute {name!r}")
