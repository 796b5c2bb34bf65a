"""The time of every kernel against what the chip's memory and tensor cores would need, and cuBLAS.

Cases are those of `eaglejax compile --kernels`: full size, with arrays made up here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.measure import device_times
from benchmarks.gpu.record import DRY, Record, Skip, run
from eaglejax import aot_kernels
from pallas_kernels import chips
from pallas_kernels.tree_attention import cases as attention_cases

CUBLAS = {"q": (4096, 4096), "gate-up": (4096, 14_336), "down": (14_336, 4096)}  # Llama-3.1-8B


def main(record: Record) -> None:
    """Kernels in the order of their bytes, then cuBLAS in bfloat16."""
    chip = chips.current()
    if DRY:
        raise Skip("full sizes take hours in the interpreter")
    if chip is None:
        kind = jax.devices()[0].device_kind
        raise Skip(f"{kind}: not among the chips whose numbers are known: {list(chips.CHIPS)}")
    record.note(chip=chip.name, bandwidth=chip.bandwidth, bf16_flops=chip.bf16_flops)
    for name, (inputs, outputs) in CUBLAS.items():
        for rows in (1, 16, 64, 512):

            def product(n: int = rows, k: int = inputs, m: int = outputs) -> dict[str, Any]:
                x, weight = _random((n, k), jnp.bfloat16), _random((k, m), jnp.bfloat16)
                multiply = jax.jit(jnp.matmul)
                return device_times(lambda: multiply(x, weight))

            record.attempt(product, op="cublas bf16", case=f"llama-8b-{name}", rows=rows)
    programs = sorted(aot_kernels.programs(chip), key=lambda program: program.bytes_moved)
    for program in programs:

        def timed(program: aot_kernels.Program = program) -> dict[str, Any]:
            arguments = example(program)
            function = jax.jit(program.function)
            times = device_times(lambda: function(*arguments))
            floor = max(program.bytes_moved / chip.bandwidth, program.flops / chip.bf16_flops)
            return {
                **times,
                "floor_seconds": floor,
                "share_of_floor": floor / max(times["seconds"], 1e-9),
            }

        record.attempt(timed, op=program.op, case=program.case, bytes_moved=program.bytes_moved)


def example(program: aot_kernels.Program) -> tuple[Any, ...]:
    """Arrays for a program's shapes: random numbers, layer 0, page tables and lengths that fit."""
    served = {case.name: case for case in attention_cases.SERVED}
    stacks = [leaf.shape for leaf in jax.tree.leaves(program.arguments) if leaf.ndim == 4]
    experts = stacks[0][1] if program.op == "moe_int4" else 1

    def array(path: Any, shape: Any) -> Any:
        name = str(getattr(path[-1], "key", getattr(path[-1], "name", "")))
        if name == "page_table":
            return jnp.arange(int(np.prod(shape.shape)), dtype=jnp.int32).reshape(shape.shape)
        if name == "lengths":
            return jnp.asarray(served[program.case].lengths, jnp.int32)
        if jnp.issubdtype(shape.dtype, jnp.bool_):
            return jnp.broadcast_to(jnp.tri(*shape.shape[-2:], dtype=bool), shape.shape)
        if name == "layer" or (jnp.issubdtype(shape.dtype, jnp.int32) and not shape.shape):
            return jnp.zeros(shape.shape, shape.dtype)
        return _random(shape.shape, shape.dtype, experts)

    return jax.tree_util.tree_map_with_path(array, program.arguments)


def _random(shape: tuple[int, ...], dtype: Any, below: int = 1) -> Any:
    """Made on the device: large arrays would take long to send. Integers are less than `below`."""
    key = jax.random.key(0)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.jit(lambda: (0.1 * jax.random.normal(key, shape)).astype(dtype))()
    if jnp.dtype(dtype).itemsize == 1:
        return jax.jit(lambda: jax.random.bits(key, shape, jnp.uint8).astype(dtype))()
    return jax.jit(lambda: jax.random.randint(key, shape, 0, below, dtype))()


if __name__ == "__main__":
    run("timing", main)
