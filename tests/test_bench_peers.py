"""Protects the comparison with other engines: what they print, and that they are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.peers import build_llamacpp, llamacpp, setup, worker
from benchmarks.peers.llamacpp import LlamaCpp
from benchmarks.rows import PeerError, Timing
from eaglejax.config import SpecPlan

# As llama-server of llama-cpp-python 0.3.36 answers.
ANSWER = {
    "content": " Paris.",
    "tokens": [7042, 30],
    "timings": {
        "cache_n": 0,
        "prompt_n": 37,
        "prompt_ms": 140.5,
        "predicted_n": 101,
        "predicted_ms": 800.0,
        "draft_n": 204,
        "draft_n_accepted": 32,
    },
}

# Answers /health and /completion; "drafts" like the real one when it is given a drafter.
SERVER = """
    import http.server, json, os, pathlib, signal, sys, time
    options = dict(zip(sys.argv[1:], sys.argv[2:]))
    place = pathlib.Path(__file__).resolve().parent
    mode = (place / "mode").read_text()
    with (place / "calls").open("a") as calls:
        print(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:]}), file=calls)
    if mode == "broken":
        print("loading\\nerror: the model is of another kind", file=sys.stderr)
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "slow":
        time.sleep(60)

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args): pass
        def answer(self, code, value):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())
        def do_GET(self):
            self.answer(200, {"status": "ok"})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with (place / "calls").open("a") as calls:
                print(json.dumps(body), file=calls)
            if body["prompt"] == [666]:
                return self.answer(400, {"error": "a bad number"})
            if body["prompt"] == [667]:
                os._exit(9)
            if body["prompt"] == [668]:
                time.sleep(60)
            count = body["n_predict"]
            timings = {"predicted_n": count, "predicted_ms": 10.0 * (count - 1), "prompt_ms": 5.0}
            if "--model-draft" in options:
                timings |= {"draft_n": 3 * count, "draft_n_accepted": (count - 1) // 2}
            self.answer(200, {"timings": timings})

    http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


def program(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    path.chmod(0o755)
    return path


@pytest.fixture
def fake(tmp_path: Path) -> LlamaCpp:
    """Programs that answer like llama.cpp's; `mode` says how the server misbehaves."""
    (tmp_path / "mode").write_text("")
    programs = {"llama-server": program(tmp_path / "llama-server", SERVER)}
    return LlamaCpp(programs, tmp_path / "model.gguf", tmp_path / "drafter.gguf", 2)


def calls(peer: LlamaCpp) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (peer.model.parent / "calls").read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- what the output means


def test_verify_steps_follow_from_what_was_accepted() -> None:
    timing = llamacpp.timing_of(ANSWER, speculative=True)
    # 100 tokens after the first, 32 of them drafted: 68 steps gave the others.
    assert timing == Timing(101, 0.1405, 0.8, 68)
    assert llamacpp.timing_of(ANSWER, speculative=False).verify_steps == 0


@pytest.mark.parametrize(
    ("tokens", "accepted", "steps"),
    [(1, 0, 0), (2, 0, 1), (5, 3, 1), (5, 4, 1), (5, None, 4)],
    ids=["no step", "no draft", "all", "behind the end", "not reported"],
)
def test_steps_at_the_edges(tokens: int, accepted: int | None, steps: int) -> None:
    times = {"predicted_n": tokens, "predicted_ms": 1.0, "prompt_ms": 1.0}
    if accepted is not None:
        times["draft_n_accepted"] = accepted
    assert llamacpp.timing_of({"timings": times}, speculative=True).verify_steps == steps


@pytest.mark.parametrize("answer", [{}, {"timings": None}, {"timings": {"predicted_n": 3}}])
def test_an_answer_without_timings_is_an_error(answer: dict[str, Any]) -> None:
    with pytest.raises(PeerError, match="no usable timings"):
        llamacpp.timing_of(answer, speculative=False)


def test_output_of_llama_bench() -> None:
    printed = (
        '[\n  {"n_prompt": 512, "n_gen": 0, "avg_ns": 1, "avg_ts": 641.25, "stddev_ts": 2.5}\n]'
    )
    assert llamacpp.prompt_speed(printed) == 641.25
    for wrong in ("", "[]", "not JSON", "[{}]", '[{"avg_ts": null}]'):
        with pytest.raises(PeerError, match="llama-bench printed no result"):
            llamacpp.prompt_speed(wrong)


def test_output_of_llama_batched_bench() -> None:
    line = {"n_kv_max": 2112, "pl": 16, "pp": 40, "tg": 128, "speed_pp": 600.0, "speed_tg": 310.5}
    assert llamacpp.batched_speed(f"main: n_kv_max = 2112\n\n{json.dumps(line)}\n") == 310.5
    for wrong in ("", "{}", "{cut", "|    PP |     TG |"):
        with pytest.raises(PeerError, match="llama-batched-bench printed no result"):
            llamacpp.batched_speed(wrong)


def test_requests_are_greedy_token_ids_without_a_cache() -> None:
    body = llamacpp.request_body([1, 2, 3], 128)
    assert body["prompt"] == [1, 2, 3]
    assert (body["n_predict"], body["samplers"], body["top_k"]) == (128, ["top_k"], 1)
    assert body["cache_prompt"] is False


# --- servers


def test_a_server_for_each_chain_and_none_left_behind(fake: LlamaCpp) -> None:
    plans = [SpecPlan(3, 1, 4), SpecPlan(4, 4, 16), SpecPlan(1, 1, 2)]
    with contextlib.ExitStack() as stack:
        contenders = fake.decoding(stack, plans, [[1, 2], [3]], 21, 2)
        assert [(c.mode, c.plan, c.batch) for c in contenders] == [
            ("plain", None, 2),
            ("speculative", "3,1,4", 2),
            ("speculative", "1,1,2", 2),
        ]
        plain, chain, _ = [contender.run() for contender in contenders]
        started = [call for call in calls(fake) if "pid" in call]
        assert all(alive(call["pid"]) for call in started)
    assert not any(alive(call["pid"]) for call in started)
    assert plain.tokens_per_second == pytest.approx(200.0)  # 20 tokens in 0.2 s, two at a time
    assert (plain.acceptance_length, chain.acceptance_length) == (None, 2.0)
    options = [" ".join(call["argv"]) for call in started]
    assert all("--host 127.0.0.1" in text and "--threads 2" in text for text in options)
    assert ["draft-eagle3" in text for text in options] == [False, True, True]
    assert "--spec-draft-n-max 3" in options[1]
    assert "--spec-draft-n-max 1" in options[2]


@pytest.mark.parametrize(
    ("mode", "message"),
    [("broken", "ended with 3; .*of another kind"), ("slow", "was not ready after 1 s")],
)
def test_a_server_that_does_not_start_is_a_reason_not_a_crash(
    fake: LlamaCpp, mode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake.model.parent / "mode").write_text(mode)
    monkeypatch.setattr(llamacpp, "START_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        [contender] = fake.decoding(stack, [], [[1]], 4, 1)
        with pytest.raises(PeerError, match=message):
            contender.run()
    assert not any(alive(call["pid"]) for call in calls(fake))


def test_a_server_that_refuses_or_dies_is_a_reason(fake: LlamaCpp) -> None:
    with contextlib.ExitStack() as stack:
        [contender] = fake.decoding(stack, [], [[1], [666]], 4, 1)
        with pytest.raises(PeerError, match=r"400.*a bad number"):
            contender.run()
        [contender] = fake.decoding(stack, [], [[1], [667]], 4, 1)
        with pytest.raises(PeerError, match="llama-server"):
            contender.run()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_server_is_stopped_whatever_happens(
    fake: LlamaCpp, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake.model.parent / "mode").write_text("stubborn")
    monkeypatch.setattr(llamacpp, "STOP_SECONDS", 0.2)

    def fail_while_serving() -> None:
        with contextlib.ExitStack() as stack:
            fake.decoding(stack, [], [[1]], 4, 1)
            raise error

    with pytest.raises(error):
        fail_while_serving()
    assert not any(alive(call["pid"]) for call in calls(fake) if "pid" in call)


def test_an_interrupt_does_not_wait_for_answers(fake: LlamaCpp) -> None:
    (fake.model.parent / "mode").write_text("stubborn")

    def interrupted() -> None:
        with contextlib.ExitStack() as stack:
            [contender] = fake.decoding(stack, [], [[1], [668]], 4, 1)
            here = threading.get_ident()
            threading.Timer(0.5, signal.pthread_kill, [here, signal.SIGINT]).start()
            contender.run()

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < 20
    assert not any(alive(call["pid"]) for call in calls(fake) if "pid" in call)


def test_without_a_drafter_only_plain_rows(fake: LlamaCpp) -> None:
    bare = LlamaCpp(fake.programs, fake.model, PeerError("no drafter: make peers-drafter"), 2)
    with contextlib.ExitStack() as stack:
        plain, chain = bare.decoding(stack, [SpecPlan(3, 1, 4)], [[1]], 4, 1)
        assert plain.run().tokens_per_second > 0
        with pytest.raises(PeerError, match="make peers-drafter"):
            chain.run()


def test_programs_that_run_once(fake: LlamaCpp, tmp_path: Path) -> None:
    echo = "import json, sys; print(json.dumps([{'avg_ts': 500.0, 'argv': sys.argv[1:]}]))"
    batched = "print('build: 1'); print('{\"speed_tg\": 77.0}')"
    programs = {
        "llama-bench": program(tmp_path / "llama-bench", echo),
        "llama-batched-bench": program(tmp_path / "llama-batched-bench", batched),
    }
    peer = LlamaCpp(programs, fake.model, PeerError("none"), 2)
    assert peer.prefill(512).run().tokens_per_second == 500.0
    contender = peer.batched_bench(40, 128, 16)
    assert (contender.mode, contender.batch) == ("batched-bench", 16)
    assert contender.run().tokens_per_second == 77.0
    program(
        tmp_path / "llama-bench", "import sys; print('no such model', file=sys.stderr); exit(1)"
    )
    with pytest.raises(PeerError, match="llama-bench ended with 1: no such model"):
        peer.prefill(512).run()


# --- workers

WORKER = """
    import sys, time
    from benchmarks.peers import worker
    from benchmarks.rows import Timing

    def open_engine():
        print("a library's chatter")
        if sys.argv[1] == "broken":
            raise RuntimeError("no such\\n  operation")
        def complete(ids, max_tokens):
            if ids == [666]:
                raise ValueError("a bad number")
            if ids == [667]:
                sys.stderr.write("falling over\\n")
                sys.stderr.flush()
                import os
                os._exit(9)
            if ids == [668]:
                time.sleep(60)
            return Timing(max_tokens, 0.5, 0.1 * (max_tokens - 1))
        return complete

    worker.serve(open_engine)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scripted_worker.py").write_text(textwrap.dedent(WORKER))
    root = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")
    return "scripted_worker"


def test_a_worker_answers_and_ends(module: str) -> None:
    with contextlib.ExitStack() as stack:
        started = worker.start(stack, module, "well", warm=[([1], 2)])
        assert isinstance(started, worker.Worker)
        run = worker.decoding(started, [[1, 2], [3]], 11)()
        assert (run.tokens_per_second, run.acceptance_length) == (pytest.approx(10.0), None)
        assert started.process.poll() is None
    assert started.process.poll() is not None


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([666], "ValueError: a bad number"),
        ([667], "ended or printed no JSON.*falling over"),
        ([668], "no answer within 1 s"),
    ],
)
def test_a_worker_that_fails_is_a_reason(
    module: str, ids: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "REQUEST_SECONDS", 1.0)
    with worker.running(module, "well") as started, pytest.raises(PeerError, match=message):
        started.complete(ids, 4)
    assert started.process.poll() is not None


def test_a_worker_that_does_not_start_is_a_reason(module: str) -> None:
    with contextlib.ExitStack() as stack:
        started = worker.start(stack, module, "broken", warm=[])
    run = worker.decoding(started, [[1]], 4)
    with pytest.raises(PeerError, match="RuntimeError: no such operation"):
        run()


# --- where they are


def test_programs_are_found_in_the_folder_its_bin_or_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("bin", "path"):
        (tmp_path / place).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("EAGLEJAX_PEERS", str(tmp_path))
    assert setup.peers_folder() == tmp_path
    first = program(tmp_path / "bin" / "llama-server", "")
    second = program(tmp_path / "llama-bench", "")
    assert setup.find_programs(tmp_path) == {"llama-server": first, "llama-bench": second}
    assert not setup.has_programs(tmp_path)
    third = program(tmp_path / "path" / "llama-batched-bench", "")
    assert setup.find_programs(tmp_path)["llama-batched-bench"] == third
    assert setup.missing("llama.cpp", tmp_path) is None


def test_a_converted_drafter_is_that_of_this_very_drafter(tmp_path: Path) -> None:
    drafter, folder = tmp_path / "drafter", tmp_path / "peers"
    drafter.mkdir()
    folder.mkdir()
    (drafter / "model.safetensors").write_bytes(b"weights")
    assert "make peers-drafter" in str(setup.converted_drafter(folder, drafter))
    (folder / "drafter.gguf").write_bytes(b"GGUF")
    assert "is missing" in str(setup.converted_drafter(folder, drafter))
    (folder / "drafter.json").write_text(json.dumps({"source": setup.fingerprint(drafter)}))
    assert setup.converted_drafter(folder, drafter) == folder / "drafter.gguf"
    (drafter / "README.md").write_text("a card")  # says nothing about the weights
    assert setup.converted_drafter(folder, drafter) == folder / "drafter.gguf"
    (drafter / "model.safetensors").write_bytes(b"trained further")
    assert "from another drafter" in str(setup.converted_drafter(folder, drafter))


CMAKE = """
    import pathlib, sys
    log = pathlib.Path(__file__).with_name("cmake.calls")
    with log.open("a") as calls:
        print(" ".join(sys.argv[1:]), file=calls)
    if "--build" in sys.argv:
        place = pathlib.Path(sys.argv[sys.argv.index("--build") + 1]) / "bin"
        place.mkdir(parents=True)
        start = sys.argv.index("--target") + 1
        for name in sys.argv[start : sys.argv.index("--parallel")]:
            (place / name).write_text("built")
            (place / name).chmod(0o755)
"""


def test_the_programs_are_built_and_put_where_the_benchmark_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "llama_cpp_python-0.0.1"
    (root / "vendor" / "llama.cpp").mkdir(parents=True)
    (root / "vendor" / "llama.cpp" / "convert_hf_to_gguf.py").write_text("")
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.add(root, root.name)
    cmake = program(tmp_path / "cmake", CMAKE)
    monkeypatch.setattr(build_llamacpp, "tool", {"cmake": str(cmake)}.get)
    arguments = ["--folder", str(tmp_path / "peers"), "--jobs", "1"]
    arguments += ["--sdist", str(tmp_path / "sdist.tar.gz")]
    for _ in range(2):  # again over what is there
        result = CliRunner().invoke(build_llamacpp.main, arguments)
        assert result.exit_code == 0, result.output
    assert setup.has_programs(tmp_path / "peers")
    assert sorted(path.name for path in (tmp_path / "peers").iterdir()) == ["bin", "source"]
    assert (tmp_path / "peers" / "source" / "convert_hf_to_gguf.py").is_file()
    configured, built, *_ = (tmp_path / "cmake.calls").read_text().splitlines()
    assert "-DGGML_NATIVE=ON" in configured
    assert built.endswith("llama-server llama-bench llama-batched-bench --parallel 1")
    program(cmake, "import sys; sys.exit('no compiler')")
    result = CliRunner().invoke(build_llamacpp.main, arguments)
    assert result.exit_code == 1
    assert "no compiler" in result.output
    assert setup.has_programs(tmp_path / "peers")  # the old ones stay


@pytest.mark.parametrize("script", ["build_llamacpp", "convert_drafter"])
def test_scripts_say_how_they_are_used(script: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.peers.{script}", "--help"]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--folder" in done.stdout
