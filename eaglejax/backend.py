"""Choosing the implementation of the ops, once, and bringing weights into its form."""

from __future__ import annotations

import logging
from typing import Any, Literal

import jax

import cpu_kernels
from eaglejax.config import ConfigError, EngineConfig
from eaglejax.quant import QuantTensor, dequantise, pack_for_cpu, quantise

log = logging.getLogger("eaglejax")
DRAFTER_BITS = 4  # of a drafter's linear weights with the kernels; float32 without


def resolve(config: EngineConfig) -> EngineConfig:
    """Replaces every "auto" by what runs here.

    Raises:
        ConfigError: the kernels are asked for by name and cannot run here, or a setting needs them.
    """
    kernels, weights = config.kernels, config.weights
    on_cpu = jax.default_backend() == "cpu"
    reason = "the platform is not a CPU" if not on_cpu else cpu_kernels.unavailable_reason()
    if kernels == "cpu" and reason is not None:
        raise ConfigError(f"kernels = 'cpu': {reason}")
    if kernels == "auto":
        kernels = "cpu" if reason is None else "reference"
        if reason is not None:
            log.warning("running on the slow reference path: %s", reason)
    if weights == "auto":
        weights = "int4" if kernels == "cpu" else "float32"
    packed = kernels == "cpu" and weights == "int4"
    activations = config.activations
    if activations == "int8" and not packed:
        raise ConfigError(
            f"activations = 'int8': only the CPU kernels on INT4 weights quantise them; here are "
            f"kernels = {kernels!r}, weights = {weights!r}"
        )
    if activations == "auto":
        activations = "int8" if packed else "float32"
    return config.replace(kernels=kernels, weights=weights, activations=activations)


def stored_weights(config: EngineConfig) -> Literal["float32", "int4"]:
    """The form in which a resolved configuration wants a checkpoint's quantised weights."""
    return "int4" if config.weights == "int4" else "float32"


def target_weights(params: Any, config: EngineConfig) -> Any:
    """A target's parameters for the kernels: every quantised matrix packed for them."""
    if config.kernels != "cpu" or config.weights != "int4":
        return params

    def packed(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, QuantTensor):
            return leaf
        try:
            return pack_for_cpu(leaf, quantised=config.activations != "float32")
        except ValueError as error:
            log.warning("%s runs in float32, not INT4: %s", jax.tree_util.keystr(path), error)
            floats = dequantise(leaf)
            # A float embedding is stored by rows, a quantised one like a head.
            return floats.T if getattr(path[-1], "key", None) == "embedding" else floats

    def is_quantised(leaf: Any) -> bool:
        return isinstance(leaf, QuantTensor)

    return jax.tree_util.tree_map_with_path(packed, params, is_leaf=is_quantised)


def drafter_weights(variables: Any, config: EngineConfig) -> Any:
    """A drafter's variables for the kernels: its matrices in INT4, rounded to nearest.

    What the drafter computes never changes the text, only how much of it is guessed right. A matrix
    whose sizes do not fill the kernels' blocks stays float32.
    """
    if config.kernels != "cpu" or config.weights != "int4":
        return variables

    def packed(path: Any, leaf: Any) -> Any:
        *_, rows, columns = leaf.shape
        if getattr(path[-1], "key", None) != "kernel" or rows % 32 or columns % 8:
            return leaf
        return pack_for_cpu(quantise(leaf, bits=DRAFTER_BITS, group_size=32))

    params = jax.tree_util.tree_map_with_path(packed, variables["params"])
    return {**variables, "params": params}
