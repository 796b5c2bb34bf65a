"""Whole decoder layers in one native call, where the CPU kernels run.

The specification is what the modules compose of single ops; the call saves the dispatch of some
twenty small operations a layer and keeps its threads together from the first to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Array, Bool, Float

import cpu_kernels
from eaglejax.cache import CacheView
from eaglejax.models.layers import FreshKV
from eaglejax.quant import QuantTensor
from pallas_kernels.implementation import Implementation


def _matrices(layer: Mapping[str, Any]) -> dict[str, Any]:
    modules = {**layer["attention"], **layer["mlp"]}
    return {name: modules[name]["kernel"] for name in cpu_kernels.MATRICES}


def fusable(kernels: Implementation, layer: Mapping[str, Any], head_dim: int) -> bool:
    """Whether the layers with these parameters run as one call.

    Args:
        kernels: what the module runs on.
        layer: parameters `attention`, `mlp` and norms, as stacks.
        head_dim: size of a head.
    """
    if kernels != "cpu" or head_dim % 32:
        return False
    packed = _matrices(layer).values()
    return all(isinstance(m, QuantTensor) and m.layout == "cpu8" for m in packed)


def decoder_layers(
    layer: Mapping[str, Any],
    x: Float[Array, "B n D"],
    rotary: tuple[Float[Array, "B n a"], Float[Array, "B n a"]],
    ancestors: Bool[Array, "B n m"] | None,
    cache: CacheView | None,
    *,
    eps: float,
    feature_layers: Sequence[int] = (),
    inputs: Float[Array, "B n A"] | None = None,
    block_kv: FreshKV | None = None,
) -> tuple[Float[Array, "B n D"], Float[Array, "B n F"], FreshKV]:
    """Runs layers whose parameters are `fusable`; see `cpu_kernels.decoder`.

    Args:
        layer: parameters `attention`, `mlp`, `mlp_norm`, and `attention_norm` unless `inputs` are
            given.
        block_kv: rows between the prefix and the n own, one layer without its axis.

    Returns:
        the residual stream, the features, and the rows' keys and values `[L, B, n, K, h]`.
    """
    stream, features, k, v = cpu_kernels.decoder(
        x,
        *rotary,
        ancestors,
        {name: matrix.values for name, matrix in _matrices(layer).items()},
        None if inputs is not None else layer["attention_norm"]["scale"],
        layer["mlp_norm"]["scale"],
        eps=eps,
        feature_layers=feature_layers,
        inputs=inputs,
        block=None if block_kv is None else (block_kv.k, block_kv.v),
        prefix=None if cache is None else (cache.k, cache.v, cache.page_table, cache.lengths),
    )
    return stream, features, FreshKV(k, v)
