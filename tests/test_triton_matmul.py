"""Protects: the GPU products compute what the reference says, and their launches fit every chip.

Kernels run in Pallas' interpreter, which fills what lies outside an array with not-a-number: a
missing mask shows. Run as a script (`python -m tests.test_triton_matmul`) it compiles a sample for
absent GPUs and prints what the compiler made of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import aot
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.int4_matmul import cases, launch, programs, reference, triton
from pallas_kernels.int4_matmul.api import gated_matmul, int4_matmul
from pallas_kernels.int4_matmul.stack import Stack
from tests import gpu_compiler

ROOT = Path(__file__).resolve().parent.parent
CASES = (*cases.RAGGED, cases.Case("whole-column-100", 100, 48, group_size=100, minimum=True))
IDS: Any = str
# Compiling takes longer than running: the interpreter's programs go without LLVM's optimiser.
QUICK = {"xla_backend_optimization_level": 0}


def stack(case: cases.Case, seed: int = 0) -> Stack:
    w = case.weights(seed)
    minimum = None if w.minimum is None else jnp.asarray(w.minimum)
    return Stack(jnp.asarray(w.values), jnp.asarray(w.scale), minimum)


def rows(case: cases.Case, count: int) -> jax.Array:
    """Activations that bfloat16 holds exactly."""
    if case.inputs % 32 == 0:
        return jnp.asarray(case.rows(count), jnp.bfloat16)
    x = np.random.default_rng(1).standard_normal((count, case.inputs))
    return jnp.asarray(x, jnp.bfloat16)


def multiply(case: cases.Case, x: Any, *stacks: Stack, layer: int | None = None, **kw: Any) -> Any:
    """The kernel, interpreted; float32 out unless said otherwise."""
    kw = {"out_dtype": jnp.float32, "interpret": True} | kw
    residual = kw.pop("residual", None)

    def call(x: Any, stacks: Any, layer: Any, residual: Any) -> Any:
        return triton.matmul(
            x,
            stacks,
            layer,
            bits=case.bits,
            group_size=case.group_size,
            residual=residual,
            **kw,
        )

    layer = case.layers - 1 if layer is None else layer
    return jax.jit(call, compiler_options=QUICK)(x, stacks or (stack(case),), layer, residual)


def matrix(case: cases.Case, layer: int, seed: int = 0) -> np.ndarray:
    """The weights in float64."""
    values, scale, minimum = stack(case, seed)
    w = reference.dequantise_arrays(
        values, scale, minimum, bits=case.bits, group_size=case.group_size
    )
    return np.asarray(w[layer], np.float64)


def exact(x: Any, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the size that rounding errors are measured by."""
    wide = np.asarray(x, np.float64)
    return wide @ weight, np.abs(wide) @ np.abs(weight)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_few_rows_are_exact_but_for_float32_sums(case: cases.Case) -> None:
    x = rows(case, 3)
    expected, size = exact(x, matrix(case, case.layers - 1))
    error = np.abs(np.asarray(multiply(case, x)) - expected)
    assert (error <= 1e-6 * size + 1e-30).all()


@pytest.mark.parametrize("case", [*CASES[:3], *CASES[-2:]], ids=IDS)
def test_many_rows_differ_by_rounding_weights_once(case: cases.Case) -> None:
    x = rows(case, 70)
    expected, size = exact(x, matrix(case, case.layers - 1))
    error = np.abs(np.asarray(multiply(case, x)) - expected)
    assert (error <= 2.0**-8 * size).all()


@pytest.mark.parametrize("count", [1, 5, 17, 33])
def test_ragged_rows_and_the_layer_that_is_asked_for(count: int) -> None:
    case = replace(CASES[1], inputs=32)
    poisoned = stack(case)
    # Any other layer shows as not-a-number.
    scale = poisoned.scale.at[jnp.array([0, 2])].set(jnp.nan)
    x = rows(case, count)
    expected, size = exact(x, matrix(case, 1))
    error = np.abs(
        np.asarray(multiply(case, x, poisoned._replace(scale=scale), layer=1)) - expected
    )
    assert (error <= 1e-6 * size + 1e-30).all()


@pytest.mark.parametrize("parts", [1, 5])
def test_a_row_has_the_same_bits_in_any_company(parts: int) -> None:
    case = cases.Case("split", 160, 72, minimum=True)
    x = rows(case, 64)

    def run(count: int) -> np.ndarray:
        problem = launch.Problem(
            rows=count, inputs=160, outputs=72, group_size=32, bits=4, matrices=1
        )
        config = replace(launch.choose(problem, None), split_k=parts)
        return np.asarray(multiply(case, x[:count], config=config))

    everything = run(64)
    expected, size = exact(x, matrix(case, 0))
    assert (np.abs(everything - expected) <= 1e-6 * size).all()
    for count in (1, 2, 5, 16, 17):
        np.testing.assert_array_equal(run(count), everything[:count])


@pytest.mark.parametrize("count", [3, 70])
def test_gate_and_up_in_one_call(count: int) -> None:
    case = cases.Case("gated", 64, 40)
    gate, up = stack(case), stack(case, 7)
    x = rows(case, count)
    out = np.asarray(multiply(case, x, gate, up))
    g, u = exact(x, matrix(case, 0))[0], exact(x, matrix(case, 0, 7))[0]
    expected = g / (1 + np.exp(-g)) * u
    np.testing.assert_allclose(out, expected, rtol=2e-2, atol=2e-2 * np.abs(expected).max())
    if count == 3:
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    by_reference = gated_matmul(x, gate, up, 0, bits=4, group_size=32)
    assert by_reference.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(by_reference, np.float64), expected, rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize(("count", "parts"), [(3, 1), (3, 3), (70, 1)])
def test_the_residual_is_added_before_rounding(count: int, parts: int) -> None:
    case = cases.Case("residual", 96, 48)
    x, residual = rows(case, count), jnp.full((count, 48), 1000.0, jnp.bfloat16)
    problem = launch.Problem(rows=count, inputs=96, outputs=48, group_size=32, bits=4)
    config = replace(launch.choose(problem, None), split_k=parts)
    out = multiply(case, x, residual=residual, config=config)
    plain = multiply(case, x, config=config)
    np.testing.assert_allclose(np.asarray(out), np.asarray(plain) + 1000, rtol=1e-6)
    rounded = multiply(case, x, residual=residual, config=config, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rounded), np.asarray(out.astype(jnp.bfloat16)))


def test_float32_products_are_float32() -> None:
    """B59: TF32 would be wrong by 1e-4; the interpreter has none, so the operands' precision too
    is looked at.
    """
    case = cases.Case("uniform", 64, 64, bits=8)
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(64, 64)), jnp.float32)
    expected, size = exact(x, matrix(case, 0))
    assert (np.abs(np.asarray(multiply(case, x)) - expected) <= 1e-6 * size).all()
    for count in (64, 128):
        wide = jnp.concatenate([x, x])[:count]
        run = functools.partial(triton.matmul, bits=8, group_size=32, interpret=True)
        text = str(jax.make_jaxpr(run)(wide, [stack(case)], 0))
        precisions = re.findall(r"precision=(\S+)", text)
        assert precisions
        assert all("HIGHEST" in p for p in precisions)


def test_leading_dimensions_and_no_rows() -> None:
    case = cases.Case("shapes", 32, 8)
    x = rows(case, 6)
    flat = multiply(case, x)
    np.testing.assert_array_equal(
        np.asarray(multiply(case, x.reshape(2, 3, 32))), np.asarray(flat).reshape(2, 3, 8)
    )
    assert multiply(case, x[:0]).shape == (0, 8)
    assert multiply(case, x, out_dtype=None).dtype == jnp.bfloat16


# --- levels (B35, B56) ----------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "minimum"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize("count", [32, 96])
def test_all_256_bytes(bits: Any, minimum: bool, count: int) -> None:
    """Rows of the identity pick the levels out one by one."""
    raw = np.arange(256, dtype=np.uint8).reshape(1, 32, 8)
    values = raw if bits == 4 else raw.view(np.int8)
    outputs = 16 if bits == 4 else 8
    ones = jnp.ones((1, 1, outputs))
    case = cases.Case("bytes", 32, outputs, bits=bits, minimum=minimum)
    weights = Stack(jnp.asarray(values), ones, 100 * ones if minimum else None)
    eye = jnp.tile(jnp.eye(32, dtype=jnp.bfloat16), (count // 32, 1))
    out = np.asarray(multiply(case, eye, weights, layer=0))[:32].astype(int)
    if bits == 8:
        np.testing.assert_array_equal(out, values[0])
        return
    levels = np.stack([raw & 15, raw >> 4], -1).reshape(32, 16).astype(int)
    np.testing.assert_array_equal(out, levels + (100 if minimum else -8))


def bfloat16(bits: int) -> float:
    return struct.unpack(">f", struct.pack(">I", bits << 16))[0]


def run_ptx(code: str, inputs: tuple[int, int]) -> tuple[float, float]:
    """What the inline PTX of two elements gives: a machine of its five instructions."""
    registers: dict[str, Any] = {"$1": inputs[0], "$2": inputs[1]}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in code.strip("{} ").split(";"):
        op, _, rest = line.strip().partition(" ")
        to, *operands = (part.strip() for part in rest.split(","))
        if op in ("", ".reg"):
            continue
        a, *others = (value(o) for o in operands)
        if op == "mov.b32":
            registers[to] = a
        elif op == "shr.u32":
            registers[to] = a >> others[0]
        elif op == "prmt.b32":
            source = (others[0] << 32 | a).to_bytes(8, "little")
            picked = bytes(source[others[1] >> 4 * i & 7] for i in range(4))
            registers[to] = int.from_bytes(picked, "little")
        elif op == "lop3.b32":
            b, c, table = others
            assert table == (0xF0 & 0xCC) | 0xAA, "(a & b) | c"
            registers[to] = a & b | c
        else:
            assert op == "sub.rn.bf16x2", op
            halves = [(r >> shift & 0xFFFF) for shift in (0, 16) for r in (a, others[0])]
            low, high = halves[:2], halves[2:]
            registers[to] = tuple(bfloat16(x) - bfloat16(y) for x, y in (low, high))
    return registers["$0"]


@pytest.mark.parametrize("column", range(8))
@pytest.mark.parametrize("zero", [0, 8])
def test_ptx_of_every_nibble(column: int, zero: int) -> None:
    code = triton.int4_code(column, zero)
    rng = np.random.default_rng(column)
    for level in range(16):
        first, second = (int(n) for n in rng.integers(0, 2**32, 2))
        shift = 4 * column
        first = first & ~(15 << shift) | level << shift
        expected = (level - zero, (second >> shift & 15) - zero)
        assert run_ptx(code, (first, second)) == expected


@pytest.mark.parametrize("column", range(4))
def test_ptx_of_every_byte(column: int) -> None:
    code = triton.int8_code(column)
    rng = np.random.default_rng(column)
    for byte in range(256):
        first, second = (int(n) for n in rng.integers(0, 2**32, 2))
        shift = 8 * column
        second = second & ~(255 << shift) | byte << shift

        def signed(word: int, shift: int = shift) -> int:
            return (word >> shift & 255 ^ 128) - 128

        assert run_ptx(code, (first, second)) == (signed(first), signed(second))


# --- sizes that are refused (B55) -----------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "group": ({"inputs": 160, "group_size": 128}, "K = 160 inputs do not fill groups of 128"),
    "outputs": ({"outputs": 50}, "N = 50 outputs: INT4 needs a multiple of 8"),
    "outputs of INT8": ({"outputs": 50, "bits": 8}, "N = 50 outputs: INT8 needs a multiple of 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_sizes_that_do_not_fit_are_named(name: str) -> None:
    fields, message = BAD[name]
    case = replace(cases.Case("bad", 64, 64), **fields)
    x = jnp.zeros((1, case.inputs), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        triton.matmul(
            x, [programs.stack((1,), case)], 0, bits=case.bits, group_size=case.group_size
        )


def test_shapes_and_types_that_do_not_fit_are_named() -> None:
    case = cases.Case("bad", 64, 64)
    good = stack(case)
    x = jnp.zeros((1, 64), jnp.bfloat16)
    call = functools.partial(triton.matmul, layer=0, bits=4, group_size=32)
    with pytest.raises(ValueError, match=r"weights \(1, 32, 32\): expected \(1, 64, 32\)"):
        call(x, [good._replace(values=good.values[:, :32])])
    with pytest.raises(ValueError, match=r"scales or minima \(1, 1, 64\): expected \(1, 2, 64\)"):
        call(x, [good._replace(scale=good.scale[:, :1])])
    with pytest.raises(ValueError, match="one has minima"):
        call(x, [good, good._replace(minimum=good.scale)])
    with pytest.raises(ValueError, match="activations of type float16"):
        call(x.astype(jnp.float16), [good])
    with pytest.raises(ValueError, match="layout 'other'"):
        int4_matmul(x, *good, 0, bits=4, group_size=32, layout="other")


# --- launches (B58) -------------------------------------------------------------------------------


def problem(case: cases.Case, count: int) -> launch.Problem:
    return launch.Problem(
        rows=count,
        inputs=case.inputs,
        outputs=case.outputs,
        group_size=case.group_size,
        bits=case.bits,
        matrices=2 if case.name.endswith("gate-up") else 1,
    )


@pytest.mark.parametrize("limit", [101_376, 232_448])
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_launches_fit_the_shared_memory(limit: int, capability: tuple[int, int]) -> None:
    chip = replace(CHIPS["h200"], shared_memory_per_block=limit, capability=capability)
    for case in cases.REAL:
        chosen = []
        for count in (1, 16, 17, 64, 65, 4096):
            p = problem(case, count)
            config = launch.choose(p, chip)
            assert config.shared_bytes(p, chip) <= limit
            assert config.num_stages >= 2
            assert launch.steps(p, config.block_k) % config.split_k == 0
            if count <= launch.FEW_ROWS:
                chosen.append((config.block_n, config.block_k, config.split_k, config.num_warps))
        assert len(set(chosen)) == 1, "up to 64 rows a row is computed in one way"


def test_a_chip_that_is_too_small_is_refused_with_the_sizes() -> None:
    chip = replace(CHIPS["rtx-5090"], shared_memory_per_block=16_384)
    case = cases.LLAMA_8B[3]
    with pytest.raises(ValueError, match=r"inputs=4096.* bytes of shared memory.*has 16384"):
        launch.choose(problem(case, 8), chip)


def test_small_grids_are_split_and_large_ones_are_not() -> None:
    chip = CHIPS["h200"]
    assert launch.choose(problem(cases.LLAMA_8B[2], 1), chip).split_k > 1
    assert launch.choose(problem(cases.LLAMA_8B[5], 1), chip).split_k == 1


def test_a_tuned_table_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.LLAMA_8B[2]
    p = problem(case, 8)
    tuned = replace(launch.choose(p, CHIPS["h200"]), num_stages=3)
    table = {"few 4096x4096 int4 group 128 x1": dataclasses.asdict(tuned)}
    (tmp_path / "h200.json").write_text(json.dumps(table))
    monkeypatch.setattr(launch, "TUNED", tmp_path)
    launch._tuned.cache_clear()
    try:
        assert launch.choose(p, CHIPS["h200"]) == tuned
        assert launch.choose(p, CHIPS["b200"]) != tuned
    finally:
        launch._tuned.cache_clear()


def test_only_triton_files_import_the_deprecated_backend() -> None:
    files = [*(ROOT / "pallas_kernels").rglob("*.py"), *(ROOT / "eaglejax").rglob("*.py")]
    imports = re.compile(r"pallas\.triton|pallas import triton|_src\.pallas")
    found = {path.name for path in files if imports.search(path.read_text())}
    assert found == {"triton.py"}


# --- the GPU compiler -----------------------------------------------------------------------------


SAMPLE = ("smollm2-gate-up rows 8", "llama-8b-zeros-down rows 64", "llama-8b-q rows 512")
SAMPLE_CHIPS = ("h200", "b200", "rtx-pro-6000")


def compile_sample() -> list[dict[str, Any]]:
    found = []
    for name in SAMPLE_CHIPS:
        chip = CHIPS[name]
        sample = [p for p in programs.programs(chip) if p.case in SAMPLE]
        assert len(sample) == len(SAMPLE)
        for p in sample:
            found += report(chip, p.case, p.function, p.arguments)
        x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        weights = programs.stack((1,), cases.Case("float32", 64, 64))
        run = functools.partial(triton.matmul, layer=0, bits=4, group_size=32)
        found += report(chip, "float32", lambda x, w, run=run: run(x, [w]), (x, weights))
    return found


def report(chip: Chip, case: str, function: Any, arguments: Any) -> list[dict[str, Any]]:
    kernels = aot.compile_for(chip, function, *arguments).kernels
    return [
        dataclasses.asdict(k) | {"chip": chip.name, "case": case}
        for k in kernels
        if k.name.startswith("int4_matmul")
    ]


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """The sample, compiled in a process of its own: it loads the CUDA plugin."""
    return gpu_compiler.elsewhere("tests.test_triton_matmul")


@pytest.mark.aot
def test_kernels_compile_for_absent_gpus_without_spills(compiled: list[dict[str, Any]]) -> None:
    assert {(k["chip"], k["case"]) for k in compiled} == {
        (chip, case) for chip in SAMPLE_CHIPS for case in (*SAMPLE, "float32")
    }
    for kernel in compiled:
        limit = CHIPS[kernel["chip"]].shared_memory_per_block
        assert kernel["spill_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= limit, kernel
        # Float32 products on tensor cores would be TF32 (B59).
        assert (kernel["tensor_core_instructions"] > 0) == (kernel["case"] != "float32"), kernel


@pytest.mark.aot
def test_shared_memory_is_not_underestimated(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        if kernel["case"] == "float32":
            continue
        name, count = kernel["case"].split(" rows ")
        chip = CHIPS[kernel["chip"]]
        p = problem(next(c for c in cases.REAL if c.name == name), int(count))
        assert kernel["shared_bytes"] <= launch.choose(p, chip).shared_bytes(p, chip), kernel


if __name__ == "__main__":
    gpu_compiler.answer(compile_sample)
