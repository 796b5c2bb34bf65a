"""Choosing the implementation of the ops, once, and bringing weights into its form."""

from __future__ import annotations

import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import cpu_kernels
from eaglejax.config import ConfigError, EngineConfig
from eaglejax.quant import QuantTensor, dequantise, pack_for_cpu, quantise
from pallas_kernels.implementation import Implementation, activation_dtype

log = logging.getLogger("eaglejax")
DRAFTER_BITS = 4  # of a drafter's linear weights with the kernels; float32 without
LEAST_CAPABILITY = 8  # of NVIDIA's tensor cores that multiply bfloat16


def resolve(config: EngineConfig) -> EngineConfig:
    """Replaces every "auto" by what runs here.

    Raises:
        ConfigError: the kernels are asked for by name and cannot run here, or a setting needs them.
    """
    kernels, weights = config.kernels, config.weights
    own: Literal["cpu", "triton"] = "triton" if jax.default_backend() == "gpu" else "cpu"
    if kernels in ("cpu", "triton"):
        reason = _unavailable_reason(kernels)
        if reason is not None:
            raise ConfigError(f"kernels = {kernels!r}: {reason}")
    if kernels == "auto":
        reason = _unavailable_reason(own)
        kernels = own if reason is None else "reference"
        if reason is not None:
            log.warning("running on the slow reference path: %s", reason)
    if weights == "auto":
        weights = "float32" if kernels == "reference" else "int4"
    if kernels == "triton" and weights != "int4":
        raise ConfigError(f"weights = {weights!r}: the GPU kernels take 'int4' alone")
    activations = _activations(config.activations, kernels, weights)
    return config.replace(kernels=kernels, weights=weights, activations=activations)


def _activations(asked: str, kernels: str, weights: str) -> str:
    """The activations of otherwise resolved settings.

    Raises:
        ConfigError: what is asked for does not go with them.
    """
    packed = kernels == "cpu" and weights == "int4"
    here = f"here are kernels = {kernels!r}, weights = {weights!r}"
    if asked == "int8" and not packed:
        raise ConfigError(
            f"activations = 'int8': only the CPU kernels on INT4 weights quantise them; {here}"
        )
    if (asked == "bfloat16") != (kernels == "triton") and asked != "auto":
        raise ConfigError(
            f"activations = {asked!r}: the GPU kernels, and they alone, take 'bfloat16'; {here}"
        )
    if asked != "auto":
        return asked
    if kernels == "triton":
        return "bfloat16"
    return "int8" if packed else "float32"


def _unavailable_reason(kernels: Literal["cpu", "triton"]) -> str | None:
    """Why kernels cannot run on this process's devices; None where they can."""
    platform = jax.default_backend()
    if kernels == "cpu":
        if platform != "cpu":
            return "the platform is not a CPU"
        return cpu_kernels.unavailable_reason()
    if platform != "gpu":
        return f"the platform is {platform!r}, not an NVIDIA GPU"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    try:
        major = int(capability.split(".")[0])
    except ValueError:  # a GPU of another maker has no such number
        return f"{device.device_kind} is not an NVIDIA GPU"
    if major < LEAST_CAPABILITY:
        return (
            f"{device.device_kind} has compute capability {capability}; bfloat16 on tensor cores "
            f"needs {LEAST_CAPABILITY}.0"
        )
    return None


def implementation(config: EngineConfig) -> Implementation:
    """What the modules of a resolved configuration run on."""
    return "reference" if config.kernels == "auto" else config.kernels


def stored_weights(config: EngineConfig) -> Literal["float32", "int4"]:
    """The form in which a resolved configuration wants a checkpoint's quantised weights."""
    return "int4" if config.weights == "int4" else "float32"


def target_weights(params: Any, config: EngineConfig) -> Any:
    """A target's parameters for the kernels: every quantised matrix packed for them."""
    if config.kernels == "triton":
        return _for_gpu(params)
    if config.kernels != "cpu" or config.weights != "int4":
        return params

    def packed(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, QuantTensor):
            return leaf
        try:
            return pack_for_cpu(leaf, quantised=config.activations != "float32")
        except ValueError as error:
            log.warning("%s runs in float32, not INT4: %s", jax.tree_util.keystr(path), error)
            return _floats(path, leaf)

    return jax.tree_util.tree_map_with_path(packed, params, is_leaf=_is_quantised)


def drafter_weights(variables: Any, config: EngineConfig) -> Any:
    """A drafter's variables for the kernels: its matrices in INT4, rounded to nearest.

    What the drafter computes never changes the text, only how much of it is guessed right. A matrix
    whose sizes do not fill the kernels' blocks stays float.
    """
    if config.kernels not in ("cpu", "triton") or config.weights != "int4":
        return variables
    on_gpu = config.kernels == "triton"

    def packed(path: Any, leaf: Any) -> Any:
        *_, rows, columns = leaf.shape
        if getattr(path[-1], "key", None) != "kernel" or rows % 32 or columns % 8:
            return leaf
        quantised = quantise(leaf, bits=DRAFTER_BITS, group_size=32)
        if not on_gpu:
            return pack_for_cpu(quantised)
        halves = {"scale": quantised.scale, "minimum": quantised.minimum}
        return quantised.replace(**jax.tree.map(lambda x: x.astype(jnp.float16), halves))

    params = jax.tree_util.tree_map_with_path(packed, variables["params"])
    variables = {**variables, "params": params}
    return _for_gpu(variables) if on_gpu else variables


def _for_gpu(variables: Any) -> Any:
    """Quantised matrices in the GPU kernels' layout; float ones in bfloat16.

    Scales of norms stay float32: they are small, and multiply in float32.
    """
    dtype = activation_dtype("triton")

    def packed(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, QuantTensor):
            columns = leaf.shape[-1]
            if columns % (32 // leaf.bits) == 0:
                minimum = None if leaf.minimum is None else _compact(leaf.minimum)
                return leaf.replace(layout="triton", scale=_compact(leaf.scale), minimum=minimum)
            log.warning(
                "%s runs in bfloat16, not INT%d: %d outputs do not fill 32-bit words",
                jax.tree_util.keystr(path),
                leaf.bits,
                columns,
            )
            leaf = _floats(path, leaf)
        if getattr(path[-1], "key", None) in ("kernel", "embedding"):
            return leaf.astype(dtype)
        return leaf

    return jax.tree_util.tree_map_with_path(packed, variables, is_leaf=_is_quantised)


def _compact(scales: Any) -> Any:
    """Scales in half the bytes where that loses nothing, as for those of GGUF files (float16)."""
    wide = np.asarray(scales, np.float32)
    for dtype in (jnp.float16, jnp.bfloat16):
        with np.errstate(over="ignore"):
            half = wide.astype(dtype)
        if (half.astype(np.float32) == wide).all():
            return jnp.asarray(half)
    return scales


def _is_quantised(leaf: Any) -> bool:
    return isinstance(leaf, QuantTensor)


def _floats(path: Any, weight: QuantTensor) -> Any:
    """A quantised matrix as float32, as the module at this place takes it."""
    floats = dequantise(weight)
    # A float embedding is stored by rows, a quantised one like a head.
    return floats.T if getattr(path[-1], "key", None) == "embedding" else floats
