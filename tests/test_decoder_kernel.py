"""Protects: whole decoder layers in one CPU call compute what the single ops compose.

That a row's bits depend on nothing else is tested for whole models in test_cpu_engine.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cpu_kernels
from eaglejax.cache import PagedCache
from eaglejax.models import drafter as drafter_module
from eaglejax.models import target as target_module
from eaglejax.models.apply import apply
from eaglejax.models.layers import FreshKV
from tests.test_cpu_engine import packed_kit

PREFIX = (5, 0)  # committed tokens of the two sequences
NODES = 4


def ancestors(history: int = 0) -> Any:
    """A tree 0 -> 1, 0 -> 2 -> 3 after `history` rows that all nodes see."""
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    mask = np.concatenate([np.ones((NODES, history), bool), tree], axis=1)
    return jnp.asarray(np.stack([mask, mask]))


def random(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def view(config: Any, layers: int) -> Any:
    cache = PagedCache.create(
        layers=layers, pages=6, page_size=4, kv_heads=2, head_dim=config.head_dim
    )
    cache = jax.tree.map(lambda pool: random(*pool.shape, seed=len(pool)), cache)
    table = jnp.asarray([[4, 1, 0], [2, 3, 5]], jnp.int32)
    return cache.view(table, jnp.asarray(PREFIX, jnp.int32))


def alike(fused: Any, composed: Any) -> None:
    """Equal but for roundings, each of which may move an 8-bit level of a later product."""
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(composed), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        error = np.abs(a - b)
        assert error.max() < 0.03 * np.abs(b).max()
        assert np.median(error) < 1e-3 * np.abs(b).max()


@pytest.mark.parametrize("with_prefix", [False, True])
def test_target_layers(with_prefix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    models, params = packed_kit().models, packed_kit().params
    config = models.target.config
    cache = view(config, config.num_layers) if with_prefix else None
    tokens = jnp.asarray(np.arange(2 * NODES).reshape(2, NODES))
    positions = jnp.asarray([[5, 6, 6, 7], [0, 1, 1, 2]])

    def run() -> Any:
        return apply(models.target, params.target, tokens, positions, ancestors(), cache)

    fused = run()
    monkeypatch.setattr(target_module, "fusable", lambda *_: False)
    alike(fused, run())


@pytest.mark.parametrize("history", [0, 3])
def test_drafter_layer(history: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models, params = packed_kit().models, packed_kit().params
    assert models.drafter is not None
    config = models.drafter.config
    block = None
    if history:
        shape = (1, 2, history, config.num_kv_heads, config.head_dim)
        block = FreshKV(random(*shape, seed=1), random(*shape, seed=2))

    def run() -> Any:
        return apply(
            models.drafter,  # type: ignore[arg-type]
            params.drafter,
            random(2, NODES, config.hidden_size, seed=3),
            jnp.asarray(np.arange(2 * NODES).reshape(2, NODES)),
            jnp.asarray([[5, 6, 6, 7], [0, 1, 1, 2]]),
            ancestors(history),
            view(config, 1),
            block,
        )

    fused = run()
    assert fused.fresh_kv.k.shape == (1, 2, NODES, config.num_kv_heads, config.head_dim)
    monkeypatch.setattr(drafter_module, "fusable", lambda *_: False)
    alike(fused, run())


def arguments() -> dict[str, Any]:
    """A call that is right: two layers, one of which is a feature."""
    layers, hidden, width = 3, 64, 32
    weights = packed_kit().params.target["params"]["layers"]
    modules = {**weights["attention"], **weights["mlp"]}
    assert modules["q"]["kernel"].shape == (layers, hidden, 6 * width)
    return {
        "x": random(1, 2, hidden),
        "cos": random(1, 2, width // 2),
        "sin": random(1, 2, width // 2),
        "ancestors": None,
        "matrices": {name: modules[name]["kernel"].values for name in cpu_kernels.MATRICES},
        "attention_norm": jnp.ones((layers, hidden)),
        "mlp_norm": jnp.ones((layers, hidden)),
        "eps": 1e-5,
        "feature_layers": (1,),
    }


def test_features_are_the_stream_after_their_layers() -> None:
    right = arguments()
    two_layers = jax.tree.map(lambda a: a[:2], {k: right[k] for k in ("matrices", "mlp_norm")})
    norm = right["attention_norm"][:2]
    shorter = cpu_kernels.decoder(**right | two_layers | {"attention_norm": norm})
    _, features, k, _ = cpu_kernels.decoder(**right)
    np.testing.assert_array_equal(features, shorter[0])
    np.testing.assert_array_equal(features, shorter[1])
    np.testing.assert_array_equal(k[:2], shorter[2])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", random(1, 2, 40), "multiples of 32"),
        ("x", random(1, 2, 32), "attention norm|stack"),
        ("cos", random(1, 3, 16), "angles"),
        ("cos", random(1, 2, 8), "multiples of 32|stack"),
        ("ancestors", jnp.ones((1, 2, 3), bool), "ancestors"),
        ("attention_norm", jnp.ones((3, 32)), "attention norm"),
        ("mlp_norm", jnp.ones((2, 64)), "stack|norm"),
        ("feature_layers", (3,), "feature layer 3 of 3"),
        ("inputs", random(1, 2, 64), "input"),
        ("block", (random(1, 1, 2, 32), random(1, 1, 2, 32)), "block keys"),
    ],
)
def test_sizes_are_checked(name: str, value: Any, message: str) -> None:
    unchecked = inspect.unwrap(cpu_kernels.decoder)  # jaxtyping would refuse most of them first
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(unchecked(**arguments() | {name: value}))


def test_weights_and_pages_are_checked() -> None:
    right = arguments()
    cpu_kernels.decoder(**right)
    wrong = right["matrices"] | {"down": right["matrices"]["o"]}
    with pytest.raises(jax.errors.JaxRuntimeError, match="the stack down does not fit"):
        jax.block_until_ready(cpu_kernels.decoder(**right | {"matrices": wrong}))
    pool = jnp.zeros((3, 2, 4, 2, 32))
    for table, length, message in ((2, 1, "page id 2 of 2"), (0, 5, "exceeds its page table")):
        prefix = (pool, pool, jnp.full((1, 1), table, jnp.int32), jnp.asarray([length], jnp.int32))
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(cpu_kernels.decoder(**right | {"prefix": prefix}))
    short = (pool[:2], pool[:2], jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="layer 2 of 2"):
        jax.block_until_ready(cpu_kernels.decoder(**right | {"prefix": short}))
