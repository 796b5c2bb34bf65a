"""Where a new drafter starts: its head, norm and layer come from the target it will imitate."""

from __future__ import annotations

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


def initial_variables(
    config: DrafterConfig,
    target_config: TargetConfig,
    target_params: Any,
    target_ids: Int[Array, " v"],
    *,
    seed: int,
) -> dict[str, Any]:
    """Fresh drafter variables.

    The head and the final norm are the target's (rows of the draft vocabulary), the fusion starts
    as "take the high feature" plus noise, and the token embedding is the target's own array, which
    stays frozen.
    """
    drafter = Drafter(config)
    features = jnp.zeros((1, 1, config.feature_size))
    variables = drafter.init(
        jax.random.key(seed), features, jnp.zeros((1, 1), jnp.int32), method="initialise"
    )
    params = dict(variables["params"])
    if config.hidden_size == target_config.hidden_size:
        rows = jnp.take(target_head(target_params, target_config), target_ids, axis=0)
        params["head"] = {"kernel": rows.T[None]}
        params["norm"] = {"scale": jnp.array(target_params["params"]["norm"]["scale"])}
        high = jnp.eye(config.hidden_size)
        low = jnp.zeros((config.feature_size - config.hidden_size, config.hidden_size))
        identity = jnp.concatenate([low, high])[None]
        params["fc"] = {"kernel": 0.1 * params["fc"]["kernel"] + identity}
    embedding = target_params["params"]["embed"]["embedding"]
    return {"params": params, "vocab": {"embedding": embedding, "target_ids": target_ids}}
