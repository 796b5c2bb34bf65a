"""Protects: attention on GPUs computes what the reference says, and compiles well for every chip.

Values are checked in Pallas' interpreter. Run as a script (`python -m tests.test_triton_attention`)
it compiles a sample for each generation of chips and prints one JSON line a kernel.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import aot
from pallas_kernels.chips import CHIPS
from pallas_kernels.tree_attention import api, launch, reference
from pallas_kernels.tree_attention.cases import CASES, LATENT, SERVED, WIDE, Case
from pallas_kernels.tree_attention.launch import Config, Problem, pieces
from tests import gpu_compiler

with warnings.catch_warnings():
    # JAX 0.11 and later say so on import; what replaces the backend is in docs/kernels.md.
    warnings.filterwarnings("ignore", message=".*Pallas Triton", category=DeprecationWarning)
    from pallas_kernels.tree_attention import programs, triton

IDS: Any = str
BY_NAME = {case.name: case for case in (*CASES, *LATENT, *WIDE)}
# Small steps, so that short prefixes have several, and parts that stay idle.
PARTS = Config(block_m=16, block_kv=16, splits=4, num_warps=4, num_stages=2)
# Compiling takes longer than running: LLVM's optimiser is left out.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
# XLA's CPU compiler fuses a loop of one step otherwise than one of several, and contracts other
# multiplications with additions: without fusion, equal operations give equal bits.
BITWISE = QUICK | {"xla_disable_hlo_passes": "while-loop-simplifier,fusion"}


def compiled(function: Any, arguments: dict[str, Any], options: Any = None) -> np.ndarray:
    """Runs a function of the arrays among the arguments; the rest is static."""
    arrays = {k: jnp.asarray(v) for k, v in arguments.items() if isinstance(v, np.ndarray)}
    static = {k: v for k, v in arguments.items() if k not in arrays and k != "layer"}
    layer = {"layer": jnp.int32(arguments["layer"])} if "layer" in arguments else {}
    run = jax.jit(lambda a: function(**a, **static), compiler_options=options or QUICK)
    return np.asarray(run(arrays | layer))


def attend(
    arguments: dict[str, Any], config: Config | None = None, options: Any = None
) -> np.ndarray:
    def kernel(**given: Any) -> jax.Array:
        return triton.tree_attention(**given, config=config, interpret=True)

    return compiled(kernel, arguments, options)


@cache
def expected(case: Case) -> np.ndarray:
    return compiled(reference.tree_attention, case.arrays())


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BY_NAME.values(), ids=IDS)
def test_kernel_is_the_reference_and_reads_nothing_it_may_not(case: Case) -> None:
    y = attend(case.arrays())
    assert np.isfinite(y).all(), "a poisoned page leaks"
    np.testing.assert_allclose(y, expected(case), rtol=0, atol=5e-6)


JOINED = (
    "smollm2-chunk",
    "smollm2-draft-level",
    "page-of-one",
    "queries-of-a-key-fill-no-tile",
    "odd-width",
    "long-causal",
    "latent-verify",
    "latent-odd",
    "narrow-values",
    "192-wide",
    "big-pages",
)


@pytest.mark.parametrize("name", JOINED)
def test_parts_of_the_prefix_are_joined(name: str) -> None:
    case = BY_NAME[name]
    y = attend(case.arrays(), PARTS)
    assert np.isfinite(y).all(), "a poisoned page, or a part that has no tokens, leaks"
    np.testing.assert_allclose(y, expected(case), rtol=0, atol=5e-6)


def test_lengths_at_the_edges_of_pages_steps_and_parts() -> None:
    lengths = (0, 1, 15, 16, 17, 31, 32, 33, 64, 95, 96, 97, 127, 128)
    case = Case("edges", 2, 2, 3, 1, 16, lengths=lengths, pages=8)
    np.testing.assert_allclose(attend(case.arrays(), PARTS), expected(case), rtol=0, atol=5e-6)


@pytest.mark.parametrize("config", [None, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("name", ["smollm2-verify", "page-of-four", "latent-verify", "192-wide"])
def test_bfloat16(name: str, config: Config | None) -> None:
    case = BY_NAME[name]
    rounded = {
        name: np.asarray(jnp.asarray(x, jnp.bfloat16)) if is_float(x) else x
        for name, x in case.arrays().items()
    }
    wide = {name: x.astype(np.float32) if is_float(x) else x for name, x in rounded.items()}
    exact = compiled(reference.tree_attention, wide)
    y = attend(rounded, config)
    assert y.dtype == jnp.bfloat16
    # Weights are rounded before they meet the values, and so is the result: 2**-9 each.
    pools = ("fresh_k", "pages_k") if case.latent else ("fresh_v", "pages_v")
    largest = max(np.nanmax(np.abs(rounded[pool].astype(np.float32))) for pool in pools)
    assert np.abs(y.astype(np.float32) - exact).max() <= 2**-8 * largest


def is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind not in "ib"


TREE = Case("tree", 40, 40, 6, 2, 16, page_size=4, lengths=(37, 5), pages=16)


@pytest.mark.parametrize(
    ("dtype", "splits"),
    [
        pytest.param(jnp.float32, 1, id="float32-1"),
        pytest.param(jnp.float32, 4, id="float32-4", marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, 1, id="bfloat16-1", marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, 4, id="bfloat16-4", marks=pytest.mark.slow),
    ],
)
def test_row_has_the_same_bits_among_any_number_of_rows(splits: int, dtype: Any) -> None:
    arguments = TREE.arrays()
    for name in ("q", "fresh_k", "fresh_v", "pages_k", "pages_v"):
        arguments[name] = np.asarray(jnp.asarray(arguments[name], dtype))
    config = dataclasses.replace(launch.choose(problem(TREE), None), splits=splits, block_kv=16)
    whole = attend(arguments, config, BITWISE)
    for rows in (1, 16):
        some = arguments | {name: arguments[name][:, :rows] for name in ("q", "fresh_k", "fresh_v")}
        some["ancestors"] = arguments["ancestors"][:, :rows, :rows]
        np.testing.assert_array_equal(attend(some, config, BITWISE), whole[:, :rows])
    level = arguments | {name: arguments[name][:, -4:] for name in ("q", "ancestors")}
    np.testing.assert_array_equal(attend(level, config, BITWISE), whole[:, -4:])


def test_causal_is_the_mask_that_says_so() -> None:
    arguments = dataclasses.replace(TREE, causal=True).arrays()
    row, seen = np.mgrid[: TREE.rows, : TREE.fresh]
    masked = arguments | {"ancestors": np.array(np.broadcast_to(seen <= row, (2, *row.shape)))}
    np.testing.assert_array_equal(attend(arguments, None, BITWISE), attend(masked, None, BITWISE))


@pytest.mark.parametrize("config", [None, PARTS], ids=["whole", "parts"])
def test_row_that_sees_nothing_is_zero(config: Config | None) -> None:
    case = Case("blind", 3, 3, 2, 1, 16, lengths=(0,))
    arguments = case.arrays()
    arguments["ancestors"][0, 1] = False
    y = attend(arguments, config)
    assert (y[0, 1] == 0).all()
    assert (y[0, [0, 2]] != 0).all()


@pytest.mark.parametrize("poisoned", ["q", "fresh_k", "pages_k", "pages_v"])
def test_nan_that_a_row_sees_is_visible(poisoned: str) -> None:
    case = Case("nan", 3, 3, 2, 2, 16, page_size=4, lengths=(5,), causal=True)
    arguments = case.arrays()
    if poisoned.startswith("pages"):
        arguments[poisoned][-1, arguments["page_table"][0, 0], 3, 1] = np.nan
    else:
        arguments[poisoned][0, 1, 1] = np.nan
    y = np.isnan(attend(arguments))
    seeing = {"q": [1], "fresh_k": [1, 2]}.get(poisoned, [0, 1, 2])
    wanted = np.zeros_like(y)
    wanted[0, seeing, 1] = True
    np.testing.assert_array_equal(y, wanted)


def test_packed_ancestors_are_the_mask() -> None:
    mask = np.random.default_rng(0).random((2, 3, 40)) < 0.5
    mask[0, 0], mask[0, 1] = True, False
    words = np.asarray(triton.pack_ancestors(jnp.asarray(mask)))
    assert words.dtype == np.int32
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits[..., :40], mask)
    assert not bits[..., 40:].any()


# --- what cannot be done --------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name() -> None:
    many = Case("65", 65, 65, 2, 1, 16, pages=None).arrays()
    with pytest.raises(ValueError, match="65 fresh rows under an ancestor mask, expected at most"):
        attend(many)
    good = Case("good", 2, 2, 3, 1, 16, pages=None).arrays()
    with pytest.raises(ValueError, match="3 query heads on 2 kv heads, 2 rows of a block of 2"):
        attend(good | {n: good[n].repeat(2, 2) for n in ("fresh_k", "fresh_v")})
    with pytest.raises(ValueError, match="value_width None of keys of 16"):
        attend(good | {"fresh_v": None})
    with pytest.raises(ValueError, match="value_width 17 of keys of 16"):
        attend(good | {"fresh_v": None, "value_width": 17})
    with pytest.raises(ValueError, match="value_width 8 of keys of 16"):
        attend(good | {"value_width": 8})


def test_implementations_are_never_swapped_in_silence() -> None:
    arrays: Any = {n: None if x is None else jnp.asarray(x) for n, x in GOOD.arrays().items()}
    with pytest.raises(ValueError, match="interpret mode"):  # no GPU here
        api.tree_attention(**arrays, implementation="triton")
    with pytest.raises(ValueError, match=r"scale 0\.5: the CPU"):
        api.tree_attention(**arrays, scale=0.5, implementation="cpu")
    scaled = api.tree_attention(**arrays, scale=0.25)
    np.testing.assert_array_equal(scaled, api.tree_attention(**arrays))


GOOD = Case("good", 2, 2, 3, 1, 16, pages=None)


# --- launches -------------------------------------------------------------------------------------


def problem(case: Case, **changes: Any) -> Problem:
    values = case.value_width or case.head_dim
    sizes = Problem(
        batch=len(case.lengths),
        rows=case.rows,
        nodes=case.fresh,
        kv_heads=case.kv_heads,
        group=case.heads // case.kv_heads,
        head_dim=case.head_dim,
        value_width=values,
        shared_values=case.latent,
        page_size=case.page_size,
        table_width=(case.pages or 0) * case.page_size,
    )
    return dataclasses.replace(sizes, **changes)


@pytest.mark.parametrize("limit", [101_376, 232_448])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256, 576])
def test_launches_stay_within_shared_memory(head_dim: int, page_size: int, limit: int) -> None:
    latent = head_dim == 576
    for chip in CHIPS.values():
        limited = dataclasses.replace(chip, shared_memory_per_block=limit)
        for rows in (1, 16, 64, 512):
            case = Case("any", rows, rows, 8, 1, head_dim, page_size, pages=512, latent=latent)
            wanted = problem(case, value_width=512 if latent else head_dim)
            config = launch.choose(wanted, limited)
            assert config.shared_bytes(wanted, limited) <= limit
            assert {config.block_m, config.block_kv, config.splits} <= {2**i for i in range(10)}


def test_a_chip_without_room_is_told_the_sizes() -> None:
    chip = dataclasses.replace(CHIPS["b200"], shared_memory_per_block=8192)
    with pytest.raises(ValueError, match=r"head_dim=128.* bytes of shared memory .* has 8192 a"):
        launch.choose(problem(SERVED[4]), chip)


@pytest.mark.parametrize("case", [c for c in SERVED if c.rows <= 64], ids=IDS)
def test_launches_of_few_rows_do_not_depend_on_them(case: Case) -> None:
    for chip in (None, *CHIPS.values()):
        launches = {launch.choose(problem(case, rows=n, nodes=n), chip) for n in (1, 4, 17, 64)}
        assert len(launches) == 1


def test_a_long_prefix_of_one_sequence_fills_the_chip() -> None:
    case = next(c for c in SERVED if c.name == "llama-3.1-8b-decode-1")
    for chip in CHIPS.values():
        programs_of_decode = launch.choose(problem(case), chip).splits * case.kv_heads
        assert chip.multiprocessors <= programs_of_decode <= 2 * chip.multiprocessors


def test_pieces_are_powers_of_two_that_cover_the_head() -> None:
    assert [(p.start, p.block) for p in pieces(0, 576)] == [(0, 512), (512, 64)]
    for size in (4, 16, 20, 64, 80, 96, 100, 128, 192, 256):
        found = pieces(7, size)
        columns = [c for p in found for c in range(p.start, p.start + p.size)]
        assert columns == list(range(7, 7 + size))
        assert all(p.block >= 16 and p.block & (p.block - 1) == 0 for p in found)


def test_bytes_and_flops_of_a_known_case() -> None:
    case = Case("known", 2, 2, 4, 2, 8, lengths=(3, 5))
    # (3 + 2) + (5 + 2) keys, 2 heads, keys and values of 8; 16 queries and results of 8: bfloat16.
    assert programs.bytes_moved(case) == 2 * (12 * 2 * 16 + 16 * 16)
    # 2 rows see 5 and 7 keys: 24 pairs, 4 heads, two products of 8.
    assert programs.flops(case) == 2 * 24 * 4 * 16
    causal = dataclasses.replace(case, causal=True)
    assert programs.flops(causal) == 2 * 22 * 4 * 16


# --- machine code ---------------------------------------------------------------------------------

SAMPLE = ("smollm2-verify-16x8", "qwen-256-wide-verify-8x8", "kimi-64-heads-verify-4x8")
SAMPLE_CHIPS = ("h200", "b200", "rtx-pro-6000")


@pytest.fixture(scope="module")
def sample() -> list[dict[str, Any]]:
    """Kernels of the sample, compiled in a process of its own: it loads the CUDA plugin."""
    return gpu_compiler.elsewhere("tests.test_triton_attention")


@pytest.mark.aot
@pytest.mark.parametrize("chip", SAMPLE_CHIPS)
@pytest.mark.parametrize("case", SAMPLE)
def test_kernels_compile_without_spills(case: str, chip: str, sample: list[dict[str, Any]]) -> None:
    kernels = [k for k in sample if (k["case"], k["gpu"]) == (case, chip)]
    assert [k["name"] for k in kernels] == ["tree_attention", "tree_attention_combine"]
    for kernel in kernels:
        assert kernel["spill_bytes"] == 0
        assert kernel["shared_bytes"] <= CHIPS[chip].shared_memory_per_block
        assert kernel["blocks_per_multiprocessor"] >= 1
    walk = kernels[0]
    assert walk["tensor_core_instructions"] > 0
    assert walk["shared_bytes"] <= walk["shared_estimate"]
    assert walk["temporary_bytes"] < walk["layer_bytes"], "a layer of a pool is copied"


@pytest.mark.aot
def test_float32_is_never_cut_to_tf32(sample: list[dict[str, Any]]) -> None:
    [walk] = [k for k in sample if k["case"] == "float32"]
    assert walk["tensor_core_instructions"] == 0
    assert walk["spill_bytes"] == 0


def compile_sample() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def show(case: str, chip: str, function: Any, arguments: Any, **more: Any) -> None:
        made = aot.compile_for(CHIPS[chip], function, *arguments)
        memory: Any = made.executable.memory_analysis()
        more["temporary_bytes"] = memory.temp_size_in_bytes
        for kernel in made.kernels:
            if kernel.name.startswith("tree_attention"):
                found.append(dataclasses.asdict(kernel) | more | {"case": case, "gpu": chip})

    for chip in SAMPLE_CHIPS:
        for name, function, arguments, *_ in programs.programs(CHIPS[chip]):
            if name in SAMPLE:
                [case] = [c for c in SERVED if c.name == name]
                config = launch.choose(problem(case), CHIPS[chip])
                estimate = config.shared_bytes(problem(case), CHIPS[chip])
                layer = int(np.prod(arguments[0]["pages_k"].shape[1:])) * 2
                sizes = {"shared_estimate": estimate, "layer_bytes": layer}
                show(name, chip, function, arguments, **sizes)
    single = dataclasses.replace(SERVED[0], pages=None)
    [arrays] = programs.arguments(single)
    arrays = {
        name: x if x is None or x.dtype != jnp.bfloat16 else x.update(dtype=jnp.float32)
        for name, x in arrays.items()
        if not name.startswith("page") and name not in ("lengths", "layer")
    }
    show("float32", "h200", programs.function(single, CHIPS["h200"]), [arrays])
    return found


if __name__ == "__main__":
    gpu_compiler.answer(compile_sample)
