"""Every kernel case on the device, against the reference in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.record import DRY, Record, run
from pallas_kernels.int4_matmul import cases as matmul_cases
from pallas_kernels.int4_matmul import reference as matmul_reference
from pallas_kernels.int4_matmul.stack import Stack
from pallas_kernels.moe_int4 import cases as moe_cases
from pallas_kernels.moe_int4 import reference as moe_reference
from pallas_kernels.tree_attention import cases as attention_cases
from pallas_kernels.tree_attention import reference as attention_reference

# Of the largest result: sums are float32, the result bfloat16; with many rows, and in softmax
# weights, an operand is rounded to bfloat16 too.
BOUND = 0.02
ROWS = (1, 5, 33) if DRY else (1, 5, 64, 512)


def main(record: Record) -> None:
    """Products, attention, experts, and that float32 products are float32."""
    record.attempt(float32_product, op="jnp", case="float32 product of 64x64")
    matmuls = [*matmul_cases.RAGGED, *matmul_cases.SMOLLM2, *matmul_cases.LLAMA_8B]
    attention = [*attention_cases.CASES, *attention_cases.LATENT, *attention_cases.WIDE]
    if DRY:
        matmuls, attention = matmuls[1:3], attention[5:7]
    # The small and odd ones of both first: a time limit should cut off the large.
    for case in attention:
        record.attempt(lambda case=case: attend(case), op="tree_attention", case=case.name)
    for case in matmuls:
        record.attempt(lambda case=case: multiply(case), op="int4_matmul", case=case.name)
    for case in moe_cases.SMALL[: 1 if DRY else None]:
        record.attempt(lambda case=case: experts(case), op="moe_int4", case=case.name)


def on_device(x: np.ndarray | None) -> Any:
    """As a JAX array, where there is one."""
    return None if x is None else jnp.asarray(x)


def compared(ours: Any, exact: Any) -> dict[str, Any]:
    """Largest difference, by the largest result; NaN anywhere is a failure."""
    a, b = np.asarray(ours, np.float64), np.asarray(exact, np.float64)
    largest = max(float(np.abs(b).max(initial=0)), 1e-30)
    error = float(np.abs(a - b).max(initial=0)) / largest
    good = a.shape == b.shape and bool(np.isfinite(a).all()) and error <= BOUND
    return {"relative_error": error, "ok": good}


def multiply(case: matmul_cases.Case) -> dict[str, Any]:
    """All numbers of rows; each row's bits must not depend on how many there are, up to 64."""
    from pallas_kernels.int4_matmul import triton

    stack = Stack(*map(on_device, vars(case.weights()).values()))
    kind: Any = {"bits": case.bits, "group_size": case.group_size}
    layer = jnp.int32(case.layers - 1)

    @jax.jit
    def ours(x: Any, stack: Stack) -> Any:
        return triton.matmul(x, [stack], layer, **kind, interpret=DRY)

    @jax.jit
    def exact(x: Any, stack: Stack) -> Any:
        return matmul_reference.int4_matmul(
            x, stack.values, stack.scale, stack.minimum, layer, **kind
        )

    worst: dict[str, Any] = {"relative_error": 0.0, "ok": True}
    first_rows = []
    all_rows = jnp.asarray(case.rows(max(ROWS)), jnp.bfloat16)
    expected = np.asarray(exact(all_rows.astype(jnp.float32), stack))
    for rows in ROWS:
        got = np.asarray(ours(all_rows[:rows], stack), np.float32)
        result = compared(got, expected[:rows])
        worst["relative_error"] = max(worst["relative_error"], result["relative_error"])
        worst["ok"] = worst["ok"] and result["ok"]
        if rows <= 64:
            first_rows.append(got[0])
    same = all((row == first_rows[0]).all() for row in first_rows)
    return {**worst, "ok": worst["ok"] and same, "same_bits_for_any_rows": same}


def attend(case: attention_cases.Case) -> dict[str, Any]:
    """One case in bfloat16, against the reference on the same rounded inputs."""
    from pallas_kernels.tree_attention import triton

    arrays = case.arrays()
    static = {key: arrays.pop(key) for key in ("value_width", "scale") if key in arrays}

    def rounded(x: Any) -> Any:
        is_float = isinstance(x, np.ndarray) and x.dtype == np.float32
        return jnp.asarray(x, jnp.bfloat16) if is_float else x

    arrays = {key: rounded(x) for key, x in arrays.items()}
    wide = {
        key: x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.bfloat16 else x
        for key, x in arrays.items()
    }
    ours = jax.jit(lambda a: triton.tree_attention(**a, **static, interpret=DRY))(arrays)
    exact = jax.jit(lambda a: attention_reference.tree_attention(**a, **static))(wide)
    return compared(ours, exact)


def experts(case: moe_cases.Case) -> dict[str, Any]:
    """A few tokens and many; some chosen experts are on no device."""
    from pallas_kernels.moe_int4 import triton

    stacks = [Stack(*map(on_device, vars(weights).values())) for weights in case.weights()]
    layer = jnp.int32(case.layers - 1)
    worst: dict[str, Any] = {"relative_error": 0.0, "ok": True}
    for tokens in (3,) if DRY else (1, 5, 64, 300):
        x, *routing = map(on_device, case.routed(tokens))
        x = x.astype(jnp.bfloat16)
        arguments: Any = (*routing, *stacks, layer)
        group: Any = {"group_size": case.group_size}
        got = triton.moe_int4(x, *arguments, **group, interpret=DRY)
        exact = moe_reference.moe_int4(x.astype(jnp.float32), *arguments, bits=4, **group)
        result = compared(got.astype(jnp.float32), exact)
        worst["relative_error"] = max(worst["relative_error"], result["relative_error"])
        worst["ok"] = worst["ok"] and result["ok"]
    return worst


def float32_product() -> dict[str, Any]:
    """A float32 product with precision named: TF32 would be off by 1.6e-4."""
    x, y = np.random.default_rng(0).uniform(size=(2, 64, 64)).astype(np.float32)
    got = np.asarray(jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))(x, y))
    exact = x.astype(np.float64) @ y
    error = float(np.abs(got / exact - 1).max())
    return {"relative_error": error, "ok": error < 1e-5}


if __name__ == "__main__":
    run("cases", main)
