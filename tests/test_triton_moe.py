"""Protects: the experts' GPU kernels compute what the reference says, for any routing.

Kernels run in Pallas' interpreter, where what is never written is not-a-number. Run as a script
(`python -m tests.test_triton_moe`) it compiles a sample for absent GPUs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import aot
from pallas_kernels.chips import CHIPS
from pallas_kernels.int4_matmul.launch import Problem
from pallas_kernels.int4_matmul.stack import Stack
from pallas_kernels.moe_int4 import api, cases, launch, programs, reference, triton
from tests import gpu_compiler

IDS: Any = str
QUICK = {"xla_backend_optimization_level": 0}


@cache
def stacks(case: cases.Case) -> tuple[Stack, ...]:
    return tuple(
        Stack(
            jnp.asarray(w.values),
            jnp.asarray(w.scale),
            None if w.minimum is None else jnp.asarray(w.minimum),
        )
        for w in case.weights()
    )


def inputs(case: cases.Case, tokens: int) -> list[jax.Array]:
    """Routed tokens that bfloat16 holds exactly."""
    x, ids, shares = case.routed(tokens)
    return [jnp.asarray(x, jnp.bfloat16), jnp.asarray(ids), jnp.asarray(shares)]


def run(case: cases.Case, routed: Any, *weights: Stack, block_m: int | None = None) -> np.ndarray:
    def call(x: Any, ids: Any, shares: Any, gate: Any, up: Any, down: Any, layer: Any) -> Any:
        return triton.moe_int4(
            x,
            ids,
            shares,
            gate,
            up,
            down,
            layer,
            group_size=case.group_size,
            block_m=block_m,
            interpret=True,
        )

    compiled = jax.jit(call, compiler_options=QUICK)
    return np.asarray(compiled(*routed, *(weights or stacks(case)), case.layers - 1), np.float32)


def expect(case: cases.Case, routed: Any) -> np.ndarray:
    x, ids, shares = routed
    return np.asarray(
        reference.moe_int4(
            x.astype(jnp.float32),
            ids,
            shares,
            *stacks(case),
            case.layers - 1,
            group_size=case.group_size,
        )
    )


def close(actual: np.ndarray, expected: np.ndarray, bound: float) -> None:
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("case", cases.SMALL, ids=IDS)
@pytest.mark.parametrize("tokens", [1, 17])
def test_equals_the_reference(case: cases.Case, tokens: int) -> None:
    routed = inputs(case, tokens)
    # The hidden rows and the result are rounded to bfloat16.
    close(run(case, routed), expect(case, routed), 1e-2)


def test_float32_tokens_are_multiplied_in_float32() -> None:
    case = cases.SMALL[0]
    x, ids, shares = inputs(case, 5)
    routed = [x.astype(jnp.float32), ids, shares]
    close(run(case, routed), expect(case, routed), 1e-5)


def test_large_tiles() -> None:
    case = cases.SMALL[1]
    routed = inputs(case, 50)
    close(run(case, routed, block_m=64), expect(case, routed), 2e-2)


def test_one_expert_for_all_and_none_for_some() -> None:
    case = replace(cases.SMALL[0], experts=3, top_k=2)
    x, ids, shares = inputs(case, 20)
    ids = jnp.full_like(ids, 1).at[4:6].set(jnp.array([[-1, 3], [99, -7]]))
    out = run(case, [x, ids, shares])
    close(out, expect(case, [x, ids, shares]), 1e-2)
    assert (out[4:6] == 0).all(), "ids outside add nothing"
    assert np.abs(out).max(axis=1)[[0, 3, 19]].all()


def test_experts_that_nobody_chose_are_not_read() -> None:
    case = replace(cases.SMALL[0], experts=4, top_k=2)
    x, _, shares = inputs(case, 3)
    routed = [x, jnp.array([[0, 2], [2, 0], [2, 2]]), shares]
    poisoned = [
        s._replace(scale=s.scale.at[:, jnp.array([1, 3])].set(jnp.nan)) for s in stacks(case)
    ]
    np.testing.assert_array_equal(run(case, routed, *poisoned), run(case, routed))


def test_a_token_has_the_same_bits_in_any_company() -> None:
    case = replace(cases.SMALL[0], experts=3, top_k=2)
    routed = inputs(case, 64)
    everything = run(case, routed)
    assert np.abs(everything).max() > 0
    for tokens in (1, 2, 5, 16, 17):
        some = run(case, [a[:tokens] for a in routed])
        np.testing.assert_array_equal(some, everything[:tokens])


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (9, 3, 5), (200, 2, 3)])
def test_tiles_hold_every_assignment_once(
    tokens: int, top_k: int, experts: int, block_m: int
) -> None:
    rng = np.random.default_rng(tokens)
    for ids in (
        rng.integers(-1, experts + 1, (tokens, top_k)),
        np.full((tokens, top_k), experts - 1),
        np.full((tokens, top_k), experts),
    ):
        tiles = triton.sort_by_expert(jnp.asarray(ids), experts, block_m)
        order, expert, first, end = (np.asarray(a) for a in tiles)
        seen = []
        for e, start, stop in zip(expert, first, end, strict=True):
            places = order[start : min(stop, start + block_m)] if start < stop else []
            assert (ids.reshape(-1)[places] == e).all()
            seen += list(places)
        inside = (ids >= 0) & (ids < experts)
        assert sorted(seen) == list(np.flatnonzero(inside))


def test_no_tokens() -> None:
    case = cases.SMALL[0]
    routed = [a[:0] for a in inputs(case, 1)]
    assert run(case, routed).shape == (0, case.hidden)


def test_up_to_64_tokens_share_a_configuration_and_more_get_larger_tiles() -> None:
    for case in cases.REAL:
        blocks = {launch.block_rows(t, case.top_k, case.experts) for t in range(1, 65)}
        assert blocks == {16}
        assert launch.block_rows(4096, case.top_k, case.experts) == 64


@pytest.mark.parametrize("limit", [101_376, 232_448])
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_launches_fit_the_shared_memory(limit: int, capability: tuple[int, int]) -> None:
    chip = replace(CHIPS["h200"], shared_memory_per_block=limit, capability=capability)
    for block_m in (16, 64):
        for group_size in (32, 64, 128):
            p = Problem(
                rows=1, inputs=7168, outputs=2048, group_size=group_size, bits=4, matrices=2
            )
            config = launch.choose(p, block_m, chip)
            assert config.shared_bytes(p, chip) <= limit
            assert config.num_stages >= 2
    with pytest.raises(ValueError, match=r"inputs=7168.* bytes of shared memory.*has 4096"):
        launch.choose(p, 16, replace(chip, shared_memory_per_block=4096))


def test_an_implementation_that_is_not_there_is_refused() -> None:
    case = cases.SMALL[0]
    with pytest.raises(ValueError, match="moe_int4: implementation 'cpu'"):
        api.moe_int4(*inputs(case, 1), *stacks(case), 0, group_size=32, implementation="cpu")


# --- the GPU compiler -----------------------------------------------------------------------------

SAMPLE = ("kimi-ep8 tokens 4", "kimi-ep8 tokens 4096")
SAMPLE_CHIPS = ("h200", "b200", "rtx-pro-6000")


def compile_sample() -> list[dict[str, Any]]:
    found = []
    for name in SAMPLE_CHIPS:
        for p in programs.programs(CHIPS[name]):
            if p.case in SAMPLE:
                compiled = aot.compile_for(CHIPS[name], p.function, *p.arguments)
                found += [
                    dataclasses.asdict(k) | {"chip": name, "case": p.case}
                    for k in compiled.kernels
                    if k.name.startswith("moe_int4")
                ]
    return found


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """The sample, compiled in a process of its own: it loads the CUDA plugin."""
    return gpu_compiler.elsewhere("tests.test_triton_moe")


@pytest.mark.aot
def test_kernels_compile_for_absent_gpus_without_spills(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) == 2 * len(SAMPLE) * len(SAMPLE_CHIPS)
    for kernel in compiled:
        limit = CHIPS[kernel["chip"]].shared_memory_per_block
        assert kernel["spill_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= limit, kernel
        assert kernel["tensor_core_instructions"] > 0, kernel


if __name__ == "__main__":
    gpu_compiler.answer(compile_sample)
