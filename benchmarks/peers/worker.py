"""Another engine's Python API in a process of its own: one JSON line in, one JSON line out.

There it can neither keep threads of ours busy nor take the benchmark down with it, and it can be
stopped when it does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.rows import PeerError, Run, Timing, run_of

START_SECONDS = 300.0
REQUEST_SECONDS = 600.0
STOP_SECONDS = 10.0

Complete = Callable[[list[int], int], Timing]


@dataclass(frozen=True)
class Worker:
    """A running engine: prompts in, timings out."""

    process: subprocess.Popen[str]
    log: Path

    def complete(self, ids: Sequence[int], max_tokens: int) -> Timing:
        """Runs one greedy request.

        Raises:
            PeerError: it failed, ended, or took longer than `REQUEST_SECONDS`.
        """
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"ids": list(ids), "max_tokens": max_tokens}) + "\n")
            stdin.flush()
        except OSError as error:
            raise PeerError(f"it has ended: {error}; {self._end()}") from error
        return Timing(**self._answer(REQUEST_SECONDS))

    def _answer(self, seconds: float) -> dict[str, Any]:
        stdout = self.process.stdout
        assert stdout is not None
        # An answer is one short line, written at once: readable means complete.
        if not select.select([stdout], [], [], seconds)[0]:
            raise PeerError(f"no answer within {seconds:.0f} s; {self._end()}")
        line = stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise PeerError(
                f"it ended or printed no JSON ({line[:100]!r}); {self._end()}"
            ) from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _end(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "its stderr ends: " + " | ".join(lines[-5:])


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[Worker]:
    """Runs `python -m module arguments` while the context lasts; it must call `serve`.

    Raises:
        PeerError: it does not become ready within `START_SECONDS`.
    """
    with tempfile.TemporaryDirectory(prefix="eaglejax-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                bufsize=1,
            )
        try:
            worker = Worker(process, log)
            worker._answer(START_SECONDS)
            yield worker
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def start(
    stack: contextlib.ExitStack,
    module: str,
    *arguments: str,
    warm: Sequence[tuple[list[int], int]],
) -> Worker | PeerError:
    """A worker that the stack stops, warmed by requests of (ids, tokens); or why there is none."""
    try:
        worker = stack.enter_context(running(module, *arguments))
        for ids, max_tokens in warm:
            worker.complete(ids, max_tokens)
    except PeerError as error:
        return error
    return worker


def decoding(
    started: Worker | PeerError, prompts: Sequence[list[int]], max_tokens: int
) -> Callable[[], Run]:
    """Plain decoding of all prompts, one after the other, as a contender's run."""

    def run() -> Run:
        if isinstance(started, PeerError):
            raise started
        return run_of([started.complete(ids, max_tokens) for ids in prompts], 1)

    return run


def serve(open_engine: Callable[[], Complete]) -> None:
    """The worker's side: starts an engine and answers until stdin ends."""
    answers = _claim_stdout()
    try:
        complete = open_engine()
        _say(answers, {"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            _say(answers, asdict(complete(request["ids"], request["max_tokens"])))
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        sys.exit(1)


def _claim_stdout() -> IO[str]:
    """Keeps stdout for answers: what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: IO[str], value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
