"""Where a drafter starts: from the target it will imitate, or from an earlier drafter."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eaglejax.config import ConfigError, DrafterConfig, TargetConfig
from eaglejax.models.drafter import Drafter
from eaglejax.models.layers import lookup
from eaglejax.quant import QuantTensor


def head_rows(params: Any, config: TargetConfig, ids: Int[Array, " v"]) -> Float[Array, "v D"]:
    """Rows of the target's output head as floats, whatever form the weights have."""
    tree = params["params"]
    if config.tie_embeddings:
        return lookup(tree["embed"]["embedding"], ids)
    kernel = tree["head"]["kernel"]
    if isinstance(kernel, QuantTensor):
        return lookup(jax.tree.map(lambda leaf: leaf[0], kernel), ids)
    return jnp.take(kernel[0], ids, axis=1).T


@partial(jax.jit, static_argnums=0)
def _random(drafter: Drafter, key: Array) -> Any:
    features = jnp.zeros((1, 1, drafter.config.feature_size))
    return drafter.init(key, features, jnp.zeros((1, 1), jnp.int32), method="initialise")


def initial_params(
    config: DrafterConfig,
    target_config: TargetConfig,
    target_params: Any,
    target_ids: Int[Array, " v"],
    *,
    seed: int,
) -> dict[str, Any]:
    """Fresh parameters of a drafter that is as wide as the target.

    The head and the final norm are the target's (rows of the draft vocabulary), and the fusion
    starts as "take the high feature" plus noise.
    """
    params: dict[str, Any] = dict(_random(Drafter(config), jax.random.key(seed))["params"])
    rows = head_rows(target_params, target_config, target_ids)
    params["head"] = {"kernel": rows.T[None]}
    params["norm"] = {"scale": jnp.array(target_params["params"]["norm"]["scale"])}
    high = jnp.eye(config.hidden_size)
    low = jnp.zeros((config.feature_size - config.hidden_size, config.hidden_size))
    identity = jnp.concatenate([low, high])[None]
    params["fc"] = {"kernel": 0.1 * params["fc"]["kernel"] + identity}
    return params


def continued_params(
    fresh: dict[str, Any],
    target_ids: Int[np.ndarray, " v"],
    earlier: dict[str, Any],
    earlier_ids: Int[np.ndarray, " u"],
) -> dict[str, Any]:
    """An earlier drafter's parameters on a draft vocabulary that may be another.

    Rows of the head follow their tokens; tokens that the earlier drafter could not propose have the
    rows of `fresh`.

    Raises:
        ConfigError: another architecture, by the first parameter whose shape differs.
    """
    _, ours, theirs = np.intersect1d(target_ids, earlier_ids, return_indices=True)
    head = np.array(fresh["head"]["kernel"])
    head[..., ours] = np.asarray(earlier["head"]["kernel"])[..., theirs]
    merged = {**earlier, "head": {"kernel": jnp.asarray(head)}}

    def shapes(params: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    wanted, found = shapes(fresh), shapes(merged)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"the drafter to start from has another architecture: {name}: expected "
                f"{wanted.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
            )
    return merged
