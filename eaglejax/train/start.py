"""Where a new drafter starts: its head and final norm come from the target it will imitate."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eaglejax.config import DrafterConfig, TargetConfig
from eaglejax.models.drafter import Drafter
from eaglejax.quant import QuantTensor, dequantise


def target_head(params: Any, config: TargetConfig) -> Float[Array, "V D"]:
    """The target's output head as float rows, whatever form the weights have."""
    tree = params["params"]
    weight = tree["embed"]["embedding"] if config.tie_embeddings else tree["head"]["kernel"]
    if isinstance(weight, QuantTensor):
        weight = dequantise(weight)
        return weight.T if config.tie_embeddings else weight[0].T
    return weight if config.tie_embeddings else weight[0].T


@partial(jax.jit, static_argnums=0)
def _random(drafter: Drafter, key: Array) -> Any:
    features = jnp.zeros((1, 1, drafter.config.feature_size))
    return drafter.init(key, features, jnp.zeros((1, 1), jnp.int32), method="initialise")


def initial_variables(
    config: DrafterConfig,
    target_config: TargetConfig,
    target_params: Any,
    target_ids: Int[Array, " v"],
    *,
    seed: int,
) -> dict[str, Any]:
    """Fresh drafter variables; the drafter is as wide as the target.

    The head and the final norm are the target's (rows of the draft vocabulary), the fusion starts
    as "take the high feature" plus noise, and the token embedding is the target's own array, which
    stays frozen.
    """
    params: dict[str, Any] = dict(_random(Drafter(config), jax.random.key(seed))["params"])
    rows = jnp.take(target_head(target_params, target_config), target_ids, axis=0)
    params["head"] = {"kernel": rows.T[None]}
    params["norm"] = {"scale": jnp.array(target_params["params"]["norm"]["scale"])}
    high = jnp.eye(config.hidden_size)
    low = jnp.zeros((config.feature_size - config.hidden_size, config.hidden_size))
    identity = jnp.concatenate([low, high])[None]
    params["fc"] = {"kernel": 0.1 * params["fc"]["kernel"] + identity}
    embedding = target_params["params"]["embed"]["embedding"]
    return {"params": params, "vocab": {"embedding": embedding, "target_ids": target_ids}}
