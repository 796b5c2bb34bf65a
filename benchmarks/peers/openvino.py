"""OpenVINO GenAI on the same GGUF file: LLMPipeline, plain decoding of one request at a time.

The pipeline builds its graph from the GGUF file when it is loaded. Prompts go in as token ids.
Prefix caching is off, so every prompt is processed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers import worker
from benchmarks.rows import OPENVINO, Contender, PeerError, Run, Timing

PREFILL_PROMPTS = 3  # of one run, as ours


def contenders(
    stack: contextlib.ExitStack,
    model: Path,
    threads: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
    prompt: list[int],
) -> list[Contender]:
    """Plain decoding of one request, and prompt processing.

    Args:
        stack: stops the process.
        model: GGUF file.
        threads: of inference.
        prompts: token ids of what is decoded.
        max_tokens: most tokens of a completion.
        prompt: token ids of the prompt whose processing is measured.
    """
    arguments = (str(model), str(threads))
    started = worker.start(stack, __name__, *arguments, warm=[(prompts[0], 2), (prompt, 1)])

    def prefill() -> Run:
        if isinstance(started, PeerError):
            raise started
        done = [started.complete(prompt, 1) for _ in range(PREFILL_PROMPTS)]
        return Run(PREFILL_PROMPTS * len(prompt) / sum(t.prefill_seconds for t in done))

    decode = worker.decoding(started, prompts, max_tokens)
    return [
        Contender(OPENVINO, "plain", None, 1, decode),
        Contender(OPENVINO, "prefill", None, 1, prefill),
    ]


def open_pipeline(model: str, threads: int) -> worker.Complete:
    """The worker's engine."""
    import numpy as np

    # By name: type checkers run where the extra `peers` is not installed, too.
    openvino: Any = import_module("openvino")
    openvino_genai: Any = import_module("openvino_genai")
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=threads
    )

    def complete(ids: list[int], max_tokens: int) -> Timing:
        prompt = openvino.Tensor(np.asarray([ids], np.int64))
        answer = pipeline.generate(prompt, max_new_tokens=max_tokens, do_sample=False)
        metrics = answer.perf_metrics
        tokens = metrics.get_num_generated_tokens()
        # Both in milliseconds; the second is a mean over the tokens after the first.
        first, each = metrics.get_ttft().mean, metrics.get_tpot().mean
        decode = each * (tokens - 1) / 1e3 if tokens > 1 else 0.0
        return Timing(tokens, first / 1e3, decode)

    return complete


if __name__ == "__main__":
    worker.serve(lambda: open_pipeline(sys.argv[1], int(sys.argv[2])))
