"""PyTorch's own INT4 product and attention on the shapes of our kernels, where it is installed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.record import DRY, Record, Skip, run

REPEATS = 20
MATRICES = {"q": (4096, 4096), "gate-up": (4096, 14_336), "down": (14_336, 4096)}  # Llama-3.1-8B
ROWS = (1, 4, 16, 64, 512)
ATTENTION = ((1, 8192), (8, 8192), (4, 1024))  # sequences, committed tokens


def main(record: Record) -> None:
    """Median time of each call with a cold L2 cache, by CUDA events."""
    try:
        import torch  # type: ignore[import-not-found]
    except ImportError as error:
        raise Skip(f"torch is not installed: {error}") from None
    if DRY or not torch.cuda.is_available():
        raise Skip("torch sees no GPU")
    wash = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS + 3):
            wash.add_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return statistics.median(times[3:])

    for name, (inputs, outputs) in MATRICES.items():
        for rows in ROWS:
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")

            def int4(x: Any = x, inputs: int = inputs, outputs: int = outputs) -> dict[str, Any]:
                ops = torch.ops.aten
                levels = torch.randint(0, 255, (outputs, inputs // 2), device="cuda")
                packed = ops._convert_weight_to_int4pack(levels.to(torch.uint8), 8)
                scales = torch.rand(inputs // 128, outputs, 2, device="cuda").bfloat16()
                return {"seconds": seconds(lambda: ops._weight_int4pack_mm(x, packed, 128, scales))}

            def bf16(x: Any = x, inputs: int = inputs, outputs: int = outputs) -> dict[str, Any]:
                weight = torch.randn(inputs, outputs, dtype=torch.bfloat16, device="cuda")
                return {"seconds": seconds(lambda: x @ weight)}

            record.attempt(int4, peer="torch int4", case=f"llama-8b-{name}", rows=rows)
            record.attempt(bf16, peer="torch bf16", case=f"llama-8b-{name}", rows=rows)
    for batch, length in ATTENTION:

        def attend(batch: int = batch, length: int = length) -> dict[str, Any]:
            def random(heads: int, tokens: int) -> Any:
                shape = (batch, heads, tokens, 128)
                return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

            q, k, v = random(32, 4), random(8, length), random(8, length)
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return {"seconds": seconds(lambda: sdpa(q, k, v, enable_gqa=True))}

        record.attempt(attend, peer="torch SDPA", case=f"llama-8b {batch}x{length}", rows=4)


if __name__ == "__main__":
    run("peers", main)
