"""`eaglejax compile`: steps compile for absent GPUs and neither copy nor unpack what kernels read.

What compiles runs in processes of its own: JAX must be told before it starts that there is no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from eaglejax import aot, aot_kernels, aot_models, hlo
from eaglejax.backend import drafter_weights, target_weights
from eaglejax.cache import PagedCache, commit
from eaglejax.cli import commands
from eaglejax.config import ConfigError, EngineConfig, SpecPlan
from pallas_kernels import chips
from pallas_kernels.int4_matmul.reference import int4_matmul

Struct = jax.ShapeDtypeStruct


def compiled(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "eaglejax.cli", "compile", *options, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


# --- steps of models ------------------------------------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize(
    ("model", "least", "most"), [("smollm2", 0.08e9, 0.12e9), ("llama-3.1-8b", 5.5e9, 6.2e9)]
)
def test_a_speculative_step_reads_weights_and_caches_in_place(
    model: str, least: float, most: float
) -> None:
    report = compiled("--gpu", "rtx-pro-6000", "--model", model, "--step", "spec_step")
    assert {k: report[k] for k in ("model", "gpu", "tp")} == {
        "model": model,
        "gpu": "rtx-pro-6000",
        "tp": 1,
    }
    (step,) = report["programs"]
    assert (step["name"], step["batch"], step["plan"]) == ("spec_step", 8, "3,1,4")
    assert step["dequantised"] == []
    assert step["copies"] == []
    assert step["collectives"] == 0
    cache = report["pages"] * 16 * CACHE_BYTES[model]
    assert least < step["argument_bytes"] - cache < most  # weights are there, and packed
    # Logits of 32 rows are the largest that a step makes.
    assert step["temp_bytes"] < 0.2e9
    assert step["output_bytes"] < 1e6  # the state is donated
    assert step["kernels"] > 100


# Keys and values of a token, all layers and the drafter's.
CACHE_BYTES = {"smollm2": 31 * 2 * 3 * 64 * 2, "llama-3.1-8b": 33 * 2 * 8 * 128 * 2}


GPUS = ("h200", "b200", "rtx-pro-6000")  # sm_90, sm_100, sm_120
SAMPLE = (
    "smollm2-gate-up rows 8",
    "llama-8b-zeros-q rows 64",
    "llama-8b-down rows 512",
    "kimi-ep8 tokens 64",
    "llama-3.1-8b-verify-4x8",
    "kimi-64-heads-verify-4x8",
)


@pytest.mark.aot
def test_a_sample_of_the_kernels_compiles_for_each_generation_without_spills() -> None:
    options = [f"--gpu={gpu}" for gpu in GPUS] + [f"--case={case}" for case in SAMPLE]
    found = compiled("--kernels", *options)["kernels"]
    assert {one["op"] for one in found} == {"int4_matmul", "moe_int4", "tree_attention"}
    assert len(found) == len(GPUS) * len(SAMPLE)
    for one in found:
        chip = chips.find(one["gpu"])
        assert one["compiles"], one["error"]
        assert one["spill_bytes"] == 0, one
        assert 0 < one["shared_bytes"] <= chip.shared_memory_per_block, one
        assert 0 < one["registers"] <= 255, one
        assert one["tensor_core_instructions"] > 0, one
        assert one["bandwidth_seconds"] == one["bytes_moved"] / chip.bandwidth


# --- what may not be in a module ------------------------------------------------------------------


def module_of(function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()) -> Any:
    lowered = jax.jit(function, donate_argnums=donate).lower(*shapes)
    return hlo.Module(lowered.compile().as_text() or "")


X, PACKED = Struct((4, 64), jnp.float32), Struct((3, 64, 24), jnp.uint8)
SCALE = Struct((3, 2, 48), jnp.float32)


def product(x: Any, packed: Any, scale: Any, layer: Any = 1) -> Any:
    return int4_matmul(x, packed, scale, None, layer, bits=4, group_size=32)


def test_an_unpacked_matrix_is_found() -> None:
    module = module_of(product, X, PACKED, SCALE)
    assert hlo.dequantised(module, [(64, 48)])
    assert not hlo.dequantised(module, [(96, 48)])


def test_a_stack_that_is_unpacked_at_once_is_found() -> None:
    def whole(packed: Any) -> Any:
        return jax.lax.optimization_barrier((packed & 15).astype(jnp.float32)).sum()

    assert hlo.dequantised(module_of(whole, PACKED), [(64, 24)])


def test_a_layer_that_is_sliced_out_is_found_inside_loops_too() -> None:
    def layers(packed: Any) -> Any:
        def body(before: Any, layer: Any) -> tuple[Any, Any]:
            return packed[layer], before.max()

        return jax.lax.scan(body, jnp.zeros_like(packed[0]), jnp.arange(3))[1]

    found = hlo.copies(module_of(layers, PACKED), [PACKED])
    assert 3 in {one.times for one in found}


def test_a_pool_that_is_written_in_place_is_no_copy_and_one_that_is_read_later_is() -> None:
    cache = PagedCache(*[Struct((2, 5, 4, 3, 8), jnp.float32)] * 2)  # CPUs scatter no bfloat16
    fresh = Struct((2, 1, 2, 3, 8), jnp.float32)
    integers = [Struct(shape, jnp.int32) for shape in ((1, 2), (1,), (1, 2), (1,))]

    def write(cache: Any, fresh: Any, *rest: Any) -> Any:
        return commit(cache, fresh, fresh, *rest)

    def write_and_keep(cache: Any, fresh: Any, *rest: Any) -> Any:
        return commit(cache, fresh, fresh, *rest), cache.k[:, :, :, 0] * 2

    stacks = jax.tree.leaves(cache)
    assert not hlo.copies(module_of(write, cache, fresh, *integers, donate=(0,)), stacks)
    assert hlo.copies(module_of(write_and_keep, cache, fresh, *integers), stacks)


def test_launches_of_a_loop_count_as_often_as_it_turns() -> None:
    def loop(x: Any, turns: int) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.sort(y * 2), x)

    few, many = (module_of(lambda x, n=n: loop(x, n), X).launches() for n in (5, 50))
    assert many - few >= 45


def test_text_that_is_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.Module("HloModule nothing")


# --- shapes in place of weights -------------------------------------------------------------------


def test_the_shapes_compiled_for_are_those_of_the_real_weights(smollm2_gguf: Path) -> None:
    from checkpoints.catalogue import shipped_drafter
    from checkpoints.eagle3 import read_drafter
    from checkpoints.target import read_target

    config = EngineConfig(kernels="triton", weights="int4", activations="bfloat16")
    target = read_target(smollm2_gguf, weights="int4")
    weights = target_weights(target.params, config)
    folder = shipped_drafter("smollm2")
    assert folder is not None
    drafted = read_drafter(folder, target.config)
    variables = drafted.variables(weights["params"]["embed"]["embedding"])
    variables = drafter_weights(variables, config)
    for spec in (
        aot_models.model_spec("smollm2", "llama"),
        aot_models.model_spec(str(smollm2_gguf), str(folder)),
    ):
        eps = target.config.rms_norm_eps  # stored as float32
        assert dataclasses.replace(spec.target, rms_norm_eps=eps) == target.config
        assert spec.drafter is not None
        assert spec.drafter.draft_vocab_size == drafted.config.draft_vocab_size
        params = aot_models.parameters(spec)
        for found, expected in ((params.target, weights), (params.drafter, variables)):
            assert shapes(found) == shapes(expected)


def shapes(tree: Any) -> Any:
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_pages_are_for_all_tokens_of_all_slots_unless_told_otherwise() -> None:
    spec = aot_models.model_spec("smollm2", "llama")
    setting = aot_models.Setting(8, 8192, SpecPlan(3, 1, 4))
    state = aot_models.state(spec, setting)
    assert state.target.k.shape[1] * 16 >= 8 * 8192
    assert state.draft is not None
    assert state.draft.k.dtype == state.target.k.dtype == jnp.bfloat16
    few = aot_models.state(spec, aot_models.Setting(8, 8192, SpecPlan(3, 1, 4), pages=100))
    assert few.target.k.shape[:2] == (30, 100)
    assert few.slots.page_table.shape == state.slots.page_table.shape


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpu b200", "give either --kernels or --model"),
        ("--gpu b200 --kernels --model smollm2", "give either --kernels or --model"),
        ("--gpu b300 --kernels", "expected one of h100, h200, b200, rtx-pro-6000, rtx-5090"),
        ("--gpu b200 --kernels --tp 2", "--tp goes with --model"),
        ("--gpu b200 --kernels --step spec_step", "--step goes with --model"),
        ("--gpu b200 --model smollm2 --case x", "--case goes with --kernels"),
        ("--gpu b200 --gpu h200 --model smollm2", "takes one --gpu"),
        ("--gpu b200 --model kimi-k2.5", "kimi-k2.5: not supported yet"),
        ("--gpu b200 --model smollm2 --drafter mla", "mla: not supported yet"),
        ("--gpu b200 --model smollm2 --drafter nowhere", "expected llama, none or"),
        ("--gpu b200 --model smollm2 --tp 8", "tp = 8: expected 1"),
        ("--gpu b200 --model smollm2 --plan 3,1,7", "plan nodes = 7"),
        ("--gpu b200 --model smollm2 --context 9000", "at most the 8192 positions of smollm2"),
        ("--gpu b200 --model smollm2 --drafter none --step spec_step", "expected a drafter"),
        ("--gpu b200 --model nowhere.gguf", "no such GGUF file"),
    ],
)
def test_what_cannot_be_compiled_is_named(options: str, message: str) -> None:
    result = CliRunner().invoke(commands, ["compile", *options.split()])
    assert result.exit_code != 0
    said = result.output if isinstance(result.exception, SystemExit) else str(result.exception)
    assert message in " ".join(said.replace("│", " ").split())
    assert isinstance(result.exception, (SystemExit, ConfigError))


@pytest.mark.parametrize("what", ["--kernels", "--model smollm2"])
def test_a_missing_extra_is_named_and_nothing_is_installed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "TOOLCHAINS", (("nowhere", "jax-cuda12-plugin", "bin", "nvcc"),))
    result = CliRunner().invoke(commands, ["compile", "--gpu", "b200", *what.split()])
    assert isinstance(result.exception, aot.MissingCompiler)
    assert "jax-cuda12-plugin is not installed" in str(result.exception)
    assert "pip install 'eaglejax[aot]'" in str(result.exception)


def test_a_case_that_does_not_compile_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("needs 200000 bytes of shared memory")

    monkeypatch.setattr(aot_kernels, "compile_for", refuse)
    program = aot_kernels.Program("op", "case", abs, (), 800, 1600)
    report = aot_kernels.report(chips.find("b200"), program)
    assert not report.compiles
    assert "needs 200000 bytes" in str(report.error)
    assert report.bandwidth_seconds == 800 / 8.0e12
