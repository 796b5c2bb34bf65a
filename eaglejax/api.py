"""`load` and `generate`: the Python way in."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from checkpoints.catalogue import DEFAULT_MODEL, model_path, shipped_drafter
from checkpoints.eagle3 import DrafterCheckpoint, read_drafter
from checkpoints.target import TargetCheckpoint, read_target
from eaglejax.backend import (
    drafter_weights,
    implementation,
    resolve,
    stored_weights,
    target_weights,
)
from eaglejax.config import GREEDY, EngineConfig, SamplingParams, default_feature_layers
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Completion, Prompt
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target
from eaglejax.steps import Models, Params

log = logging.getLogger("eaglejax")


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    drafter: str | os.PathLike[str] | None = "default",
    config: EngineConfig | None = None,
    **fields: object,
) -> Engine:
    """Reads a target and a drafter and starts an engine.

    Args:
        model: a known name ("smollm2") or a path to a GGUF file.
        drafter: a drafter folder, "default" for the one shipped for the model (none if there is
            none), or None (or "none").
        config: how to run; fields given by name override it. Without a drafter `spec` must be
            "off", which is then the default.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit.
        ConfigError: a setting does not fit.
        StartError: the engine does not compute what it should.
    """
    path = model_path(os.fspath(model))
    base = config or EngineConfig()
    folder = {"default": shipped_drafter(os.fspath(model)), "none": None}.get(str(drafter), drafter)
    if folder is None and config is None and "spec" not in fields:
        base = base.replace(spec="off")
    engine_config = base.replace(**fields)
    engine_config = resolve(engine_config)
    target = read_target(path, weights=stored_weights(engine_config))
    drafted = None if folder is None else read_drafter(Path(folder), target.config)
    return start(target, drafted, engine_config)


def start(
    target: TargetCheckpoint, drafter: DrafterCheckpoint | None, config: EngineConfig
) -> Engine:
    """An engine from checkpoints that are already read.

    Args:
        target: read with `stored_weights(config)`.
        drafter: or None.
        config: how to run; "auto" values are resolved here if they were not before.
    """
    config = resolve(config)
    kernels = implementation(config)
    features = default_feature_layers(target.config.num_layers)
    weights = target_weights(target.params, config)
    if drafter is None:
        modules = Models(Target(target.config, features, kernels))
        return _engine_of(modules, Params(weights), target, config)
    for warning in drafter.warnings:
        log.warning(warning)
    modules = Models(
        Target(target.config, drafter.config.feature_layers, kernels),
        Drafter(drafter.config, kernels),
    )
    variables = drafter.variables(weights["params"]["embed"]["embedding"])
    params = Params(weights, drafter_weights(variables, config))
    return _engine_of(modules, params, target, config)


def _engine_of(
    modules: Models, params: Params, target: TargetCheckpoint, config: EngineConfig
) -> Engine:
    return Engine.create(modules, params, config, target.tokenizer, target.template)


@lru_cache(maxsize=1)
def _engine(model: str, drafter: str | None, config: EngineConfig) -> Engine:
    return load(model, drafter=drafter, config=config)


def generate(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    model: str = DEFAULT_MODEL,
    drafter: str | None = "default",
    config: EngineConfig | None = None,
) -> list[Completion]:
    """Completes prompts in one call; the engine stays loaded for the next call like it.

    See `Engine.generate` for prompts and parameters, `load` for the rest.
    """
    if config is None:
        has_drafter = drafter is not None and (drafter != "default" or shipped_drafter(model))
        config = EngineConfig(spec="on" if has_drafter else "off")
    return _engine(model, drafter, config).generate(prompts, params)
