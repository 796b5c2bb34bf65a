"""llama.cpp through llama-cpp-python, where its own programs are not built: one plain request.

Slower than llama-server by what Python adds to every token, so only a stand-in for it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import worker
from benchmarks.rows import LLAMACPP, Contender, Timing


def contender(
    stack: contextlib.ExitStack,
    model: Path,
    threads: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
) -> Contender:
    """Plain decoding of one request at a time.

    Args:
        stack: stops the process.
        model: GGUF file.
        threads: for prompts and for decoding.
        prompts: token ids.
        max_tokens: most tokens of a completion.
    """
    arguments = (str(model), str(threads), str(max(map(len, prompts)) + max_tokens))
    started = worker.start(stack, __name__, *arguments, warm=[(prompts[0], 2)])
    run = worker.decoding(started, prompts, max_tokens)
    return Contender(LLAMACPP, "plain", None, 1, run)


def open_model(model: str, threads: int, length: int) -> worker.Complete:
    """The worker's engine."""
    import llama_cpp  # type: ignore[import-not-found]

    llm = llama_cpp.Llama(
        model, n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def complete(ids: list[int], max_tokens: int) -> Timing:
        llm.reset()  # or it would take over what the prompt shares with the last one
        times = [time.perf_counter()]
        for token in llm.generate(ids, top_k=1, temp=0.0):
            times.append(time.perf_counter())
            if token == llm.token_eos() or len(times) > max_tokens:
                break
        return Timing(len(times) - 1, times[1] - times[0], times[-1] - times[1])

    return complete


if __name__ == "__main__":
    worker.serve(lambda: open_model(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
