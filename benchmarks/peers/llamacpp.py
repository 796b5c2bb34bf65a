"""llama.cpp: its own programs on the same GGUF file, with the same prompts and threads.

Requests go through llama-server and not through the Python binding: the server samples and keeps
its clock in C++, while the binding would add Python's time to every token. llama-bench measures
prompt processing. llama-batched-bench decodes a batch without sampling and without a server, as a
check that the server does not hold llama.cpp back.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import LLAMACPP, Contender, PeerError, Run, Timing, run_of
from eaglejax.config import SpecPlan

START_SECONDS = 120.0  # for a server to load its models
REQUEST_SECONDS = 600.0
PROGRAM_SECONDS = 600.0  # of llama-bench and llama-batched-bench
STOP_SECONDS = 10.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class LlamaCpp:
    """What is run, and on what.

    Attributes:
        programs: by name.
        model: GGUF file of the target.
        drafter: EAGLE-3 drafter as llama.cpp's converter writes it, or why there is none.
        threads: of every program, for prompts and for decoding.
    """

    programs: Mapping[str, Path]
    model: Path
    drafter: Path | PeerError
    threads: int

    def decoding(
        self,
        stack: contextlib.ExitStack,
        plans: Sequence[SpecPlan],
        prompts: Sequence[list[int]],
        max_tokens: int,
        batch: int,
    ) -> list[Contender]:
        """Plain decoding and each plan that is a chain, each in a server of its own.

        Args:
            stack: stops the servers.
            plans: trees are left out: llama.cpp drafts chains only.
            prompts: token ids.
            max_tokens: most tokens of a completion.
            batch: slots of the server, and requests sent at a time.
        """
        room = max(map(len, prompts)) + max_tokens + 32
        chains: list[SpecPlan | None] = [None]
        chains += [plan for plan in plans if plan.width == 1 and not plan.is_plain]
        contenders = []
        for plan in chains:
            try:
                if plan is not None and isinstance(self.drafter, PeerError):
                    raise self.drafter
                server: Server | PeerError = stack.enter_context(self._server(plan, batch, room))
                server.complete(prompts[:batch], 2)  # warm
            except PeerError as error:
                server = error
            contenders.append(_served(server, plan, prompts, max_tokens, batch))
        return contenders

    def prefill(self, length: int) -> Contender:
        """llama-bench's prompt processing (pp512 for length 512)."""
        command = [
            *(str(self.programs["llama-bench"]), "-m", str(self.model), "-o", "json"),
            *("-p", str(length), "-n", "0", "-r", "3", "-t", str(self.threads)),
        ]

        def run() -> Run:
            return Run(prompt_speed(output_of(command)))

        return Contender(LLAMACPP, "prefill", None, 1, run)

    def batched_bench(self, prompt: int, max_tokens: int, batch: int) -> Contender:
        """llama-batched-bench's generation: max_tokens a sequence after `prompt` tokens each."""
        context = batch * (prompt + max_tokens) + 64
        threads = str(self.threads)
        command = [
            *(str(self.programs["llama-batched-bench"]), "-m", str(self.model)),
            *("-c", str(context), "-b", "2048", "-ub", "512", "-t", threads, "-tb", threads),
            *("-npp", str(prompt), "-ntg", str(max_tokens), "-npl", str(batch)),
            *("--output-format", "jsonl"),
        ]

        def run() -> Run:
            return Run(batched_speed(output_of(command)))

        return Contender(LLAMACPP, "batched-bench", None, batch, run)

    def _server(
        self, plan: SpecPlan | None, slots: int, room: int
    ) -> contextlib.AbstractContextManager[Server]:
        threads = str(self.threads)
        command = [
            *(str(self.programs["llama-server"]), "--model", str(self.model), "--offline"),
            *("--threads", threads, "--threads-batch", threads),
            # A cache of its own for every slot, none of prompts: each one is processed anew.
            *("--parallel", str(slots), "--ctx-size", str(slots * room), "--no-kv-unified"),
            *("--no-cache-prompt", "--cache-ram", "0"),
        ]
        if plan is not None:
            command += [
                *("--spec-type", "draft-eagle3", "--model-draft", str(self.drafter)),
                # As here: always `depth` drafts, however unsure the drafter is.
                *("--spec-draft-n-max", str(plan.depth), "--spec-draft-n-min", "0"),
                *("--spec-draft-p-min", "0"),
            ]
        return serving(command)


@dataclass(frozen=True)
class Server:
    """A running llama-server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def complete(self, prompts: Sequence[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Its answers to all prompts, as many in flight as it has slots, greedy.

        Raises:
            PeerError: it refused, broke or took longer than `REQUEST_SECONDS`.
        """
        requests = [request_body(ids, max_tokens) for ids in prompts]
        # Waiting requests cost it nothing: it takes one whenever a slot is free.
        with ThreadPoolExecutor(len(requests)) as pool:
            try:
                return list(pool.map(self._post, requests))
            except PeerError:
                raise
            except BaseException:
                # Ctrl-C or SIGTERM. The pool waits for its threads, and they for answers that a
                # server which got the signal too never gives: without it they end at once.
                self.process.kill()
                raise

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise PeerError(f"llama-server: {error}: {error.read(500).decode()}") from error
        except (OSError, ValueError) as error:
            raise PeerError(f"llama-server: {error}; {_last_lines(self.log)}") from error


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[Server]:
    """Runs a server on a free local port while the context lasts.

    Raises:
        PeerError: it does not become ready within `START_SECONDS`.
    """
    with tempfile.TemporaryDirectory(prefix="eaglejax-bench-") as folder:
        log, url = Path(folder) / "log", f"http://{HOST}:{(port := _free_port())}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*_dying_with_parent(), *command, "--host", HOST, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        try:
            _wait_until_ready(process, url, log)
            yield Server(process, url, log)
        finally:
            stop(process)


def _dying_with_parent() -> list[str]:
    """Has the kernel end a child when this process is killed and cannot (where setpriv exists)."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "TERM"]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process: asked first, killed when it does not listen."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise PeerError(f"llama-server ended with {process.returncode}; {_last_lines(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.1)
    raise PeerError(f"llama-server was not ready after {START_SECONDS:.0f} s; {_last_lines(log)}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]


def _last_lines(log: Path, count: int = 5) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "its log ends: " + " | ".join(lines[-count:])


def _served(
    server: Server | PeerError,
    plan: SpecPlan | None,
    prompts: Sequence[list[int]],
    max_tokens: int,
    batch: int,
) -> Contender:
    def run() -> Run:
        if isinstance(server, PeerError):
            raise server
        answers = server.complete(prompts, max_tokens)
        return run_of([timing_of(a, speculative=plan is not None) for a in answers], batch)

    mode = "plain" if plan is None else "speculative"
    return Contender(LLAMACPP, mode, None if plan is None else str(plan), batch, run)


# --- what goes in, and what comes out ---


def request_body(ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A greedy request. Keeping the one likeliest token is the cheapest way to be greedy."""
    return {
        "prompt": list(ids),
        "n_predict": max_tokens,
        "samplers": ["top_k"],
        "top_k": 1,
        "cache_prompt": False,
        "return_tokens": True,
    }


def timing_of(answer: Mapping[str, Any], *, speculative: bool) -> Timing:
    """A server's answer in our terms.

    `predicted_n` counts the first token, which the prompt's pass gives, and `predicted_ms` runs
    from that token to the last, so plain figures mean what ours do.

    Verify steps are not reported, but follow: every step commits the drafts it accepts and one
    token of the target's own, so steps = (predicted_n - 1) - draft_n_accepted, and the acceptance
    length is (predicted_n - 1) / steps, as ours. Steps that could draft nothing (for the last token
    of the budget) count in both engines. Only drafts that were accepted behind an end-of-text
    token, which are never delivered, are counted there and not here: at most depth - 1 a request.

    Raises:
        PeerError: the answer has no timings.
    """
    try:
        times = answer["timings"]
        tokens = int(times["predicted_n"])
        prefill, decode = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
        accepted = int(times.get("draft_n_accepted", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"llama-server's answer has no usable timings: {error!r}") from error
    steps = max(tokens - 1 - accepted, 1) if speculative and tokens > 1 else 0
    return Timing(tokens, prefill, decode, steps)


def prompt_speed(output: str) -> float:
    """Tokens a second that llama-bench's JSON reports for its one test.

    Raises:
        PeerError: it is not that.
    """
    try:
        [test] = json.loads(output)
        return float(test["avg_ts"])
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"llama-bench printed no result: {error!r} in {output[-300:]!r}") from error


def batched_speed(output: str) -> float:
    """Tokens a second of generation (`speed_tg`) in llama-batched-bench's JSON lines.

    Raises:
        PeerError: no line has it.
    """
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return float(json.loads(line)["speed_tg"])
    raise PeerError(f"llama-batched-bench printed no result: {output[-300:]!r}")


def output_of(command: Sequence[str]) -> str:
    """What a program prints on stdout.

    Raises:
        PeerError: it fails, or takes longer than `PROGRAM_SECONDS`.
    """
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{name}: {error}") from error
    if done.returncode:
        end = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise PeerError(f"{name} ended with {done.returncode}: {end}")
    return done.stdout
