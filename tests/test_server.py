"""Protects the HTTP server: OpenAI's shapes and errors, stop strings, the queue, who gets freed.

Scenarios B39, B40, B42, B44, B45, B46 and B48 as far as this server goes. The engine is scripted.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi import FastAPI
from fastapi.testclient import TestClient

from eaglejax.commands.serve import listen, serve
from eaglejax.config import EngineConfig, SamplingParams
from eaglejax.engine.request import Chunk, Completion, RequestError, Stats
from eaglejax.engine.stops import StopStrings
from serving.app import create_app
from serving.errors import ApiError
from serving.worker import Worker

VOCAB, MAX_LENGTH, EOS = 256, 200, 0
PATIENCE = 30.0  # seconds; only a failure takes them
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
BOTH = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


class FakeEngine:
    """Says its script, one entry a step and one piece a token; a character of a prompt is a token.

    Attributes:
        script: steps of every request; a callable among them is called instead.
        ends: by end-of-text, or by the budget only.
        prompts, params: of the requests so far.
        closed: requests whose generator has ended, however it did.
    """

    def __init__(self, script: Sequence[Any] = (["Hello"], [",", " wor", "ld"]), ends: bool = True):
        self.script, self.ends = list(script), ends
        self.config = EngineConfig(max_length=MAX_LENGTH)
        self.models = SimpleNamespace(
            target=SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB))
        )
        self.tokenizer = SimpleNamespace(eos_ids=frozenset([EOS]))
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.closed = 0

    def encode(self, prompt: Any) -> list[int]:
        if prompt and isinstance(prompt[0], dict):
            prompt = "".join(f"<{m['role']}>{m['content']}" for m in prompt)
        ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        if not ids:
            raise RequestError("prompt is empty: expected at least one token")
        return ids

    def generate(self, prompts: Any, params: SamplingParams, *, stream: bool) -> Iterator[Chunk]:
        self.prompts.append(prompts[0])
        self.params.append(params)
        return self._run(params)

    def _run(self, params: SamplingParams) -> Iterator[Chunk]:
        count = 0
        try:
            for step in self.script:
                if callable(step):
                    step()
                    continue
                pieces = step[: params.max_tokens - count]
                count += len(pieces)
                if count == params.max_tokens:
                    yield chunk(pieces, finish="length")
                    return
                yield chunk(pieces)
            yield chunk([], finish="stop" if self.ends else "length")
        finally:
            self.closed += 1


def chunk(pieces: Sequence[str], finish: Any = None) -> Chunk:
    """One step; at a stop its last token is the stop token, which says nothing."""
    ids = [7] * len(pieces) + [EOS] * (finish == "stop")
    done = None
    if finish is not None:
        done = Completion("unused", (), finish, Stats(0, 0, 0, None, (), 0.0, 0.0))
        pieces = [*pieces, ""]
    return Chunk(0, tuple((piece, False) for piece in pieces), tuple(ids), done)


@contextmanager
def serving(engine: FakeEngine | None = None, **options: Any) -> Iterator[TestClient]:
    """A client of a server that is ready."""
    engine = engine or FakeEngine()
    worker = Worker(lambda: engine, **options)
    with TestClient(create_app(worker, "m"), raise_server_exceptions=False) as client:
        wait_for(lambda: client.get("/ready").status_code == 200)
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with serving() as client:
        yield client


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream; [DONE] is checked and left out."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(text.removeprefix("data: ")) for text in chunks]


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    choices = [choice for c in chunks for choice in c["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object, after checks that hold for all of them."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for python in ("None", "Traceback", "<class", "NoneType", "{'", "dictionary", "instance of"):
        assert python not in error["message"]
    return error


# --- answers ------------------------------------------------------------------------------------


def test_whole_answers(client: TestClient):
    body = client.post("/v1/chat/completions", json=CHAT).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "m"
    message = {"role": "assistant", "content": "Hello, world"}
    assert body["choices"] == [
        {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    ]
    # Four tokens and the stop token; the prompt is "<user>hi".
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
    body = client.post("/v1/completions", json=TEXT).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello, world", "finish_reason": "stop", "logprobs": None}
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


@pytest.mark.parametrize("max_tokens", [1, 3, 50])
def test_b48_streams_end_with_a_chunk_of_their_own(client: TestClient, max_tokens: int):
    for path, body in BOTH:
        body = {**body, "max_tokens": max_tokens}
        whole = client.post(path, json=body).json()
        chunks = events(client, path, body)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
        if "chat" in path:
            assert first["delta"] == {"role": "assistant", "content": ""}
            assert last["delta"] == {}
            expected = whole["choices"][0]["message"]["content"]
        else:
            assert last["text"] == ""
            expected = whole["choices"][0]["text"]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert last["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert last["finish_reason"] == ("stop" if max_tokens == 50 else "length")
        assert text_of(chunks) == expected
        assert not any("usage" in c for c in chunks)


def test_b39_usage_chunk_only_where_it_was_asked_for(client: TestClient):
    for path, body in BOTH:
        usage = client.post(path, json=body).json()["usage"]
        *chunks, last = events(client, path, {**body, "stream_options": {"include_usage": True}})
        assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks)
        assert last["choices"] == []
        assert last["usage"] == usage
        for absent in ({"include_usage": False}, {"include_usage": None}, {}, None):
            chunks = events(client, path, {**body, "stream_options": absent})
            assert not any("usage" in c for c in chunks)
        response = client.post(path, json={**body, "stream_options": {"include_usage": True}})
        assert error_of(response, 400)["param"] == "stream_options"


def test_b40_parts_are_joined_for_every_role():
    engine = FakeEngine()
    parts = [{"type": "text", "text": "You are "}, {"type": "text", "text": "helpful."}]
    with serving(engine) as client:
        for role in ("system", "user", "assistant"):
            for content in ("You are helpful.", parts):
                body = {**CHAT, "messages": [{"role": role, "content": content}]}
                assert client.post("/v1/chat/completions", json=body).status_code == 200
            assert engine.prompts[-1] == engine.prompts[-2]
            assert bytes(engine.prompts[-1]).decode() == f"<{role}>You are helpful."


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([], "messages[0].content"),
        (None, "messages[0].content"),
        (5, "messages[0].content"),
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "messages[0].content[0].type",
        ),
        ([{"type": "text"}], "messages[0].content[0].text"),
    ],
)
def test_b40_other_content_is_refused(client: TestClient, content: Any, field: str):
    body = {**CHAT, "messages": [{"role": "user", "content": content}]}
    assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == field


def test_b44_limits_and_null():
    engine = FakeEngine([["x"] * 10] * 15, ends=False)
    fields = ["max_tokens", "temperature", "top_p", "stop", "stream", "n", "seed", "logit_bias"]
    nothing = dict.fromkeys([*fields, "stream_options", "tools"])
    with serving(engine) as client:
        for path, body in BOTH:
            for limits, tokens in (
                ({"max_tokens": 8}, 8),
                ({"max_completion_tokens": 8}, 8),
                ({"max_completion_tokens": 8, "max_tokens": 4}, 8),
                ({"max_completion_tokens": None, "max_tokens": 4}, 4),
                (nothing, 150 if "chat" in path else 16),
                ({}, 150 if "chat" in path else 16),
            ):
                answer = client.post(path, json={**body, **limits}).json()
                assert answer["usage"]["completion_tokens"] == tokens
                assert answer["choices"][0]["finish_reason"] == "length"
                if tokens == 8:
                    assert text_of(events(client, path, {**body, **limits})) == "x" * tokens
            for field in ("max_tokens", "max_completion_tokens"):
                for value in (0, -1, 1.5, True):
                    response = client.post(path, json={**body, field: value})
                    assert error_of(response, 400)["param"] == field


def test_sampling_fields_reach_the_engine():
    engine = FakeEngine()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}
    with serving(engine) as client:
        client.post("/v1/completions", json=TEXT)
        client.post(
            "/v1/completions",
            json={**TEXT, **fields, "stop_token_ids": [9], "ignore_eos": True, "max_tokens": 4},
        )
    assert engine.params == [
        SamplingParams(temperature=1.0, max_tokens=16),
        SamplingParams(**fields, stop_token_ids=(9,), ignore_eos=True, max_tokens=4),
    ]


def test_values_that_ask_for_nothing_are_taken(client: TestClient):
    nothing = {"n": 1, "logprobs": False, "logit_bias": {}, "presence_penalty": 0.0, "tools": []}
    body = {**CHAT, **nothing, "response_format": {"type": "text"}, "frequency_penalty": 0}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_one_prompt_in_any_form():
    engine = FakeEngine()
    with serving(engine, max_queue=0) as client:  # enough for who waits for each answer
        for prompt in ("hi", ["hi"], [104, 105], [[104, 105]]):
            assert client.post("/v1/completions", json={**TEXT, "prompt": prompt}).is_success
    assert engine.prompts == [[104, 105]] * 4


# --- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["STOP"], "go STOP on", "go "),
        (["STOP"], "STO STOOP", "STO STOOP"),
        (["aab"], "aaab", "a"),
        (["abcd", "bc"], "xabcd", "xa"),  # complete first wins
        (["bc", "abc"], "xabc", "x"),  # of two at once, the longer
        (["\n\n"], "a\n\n", "a"),
        (["é☂"], "né☂x", "n"),
        ([], "plain", "plain"),
    ],
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    stops: list[str], text: str, expected: str
):
    for size in range(1, len(text) + 1):
        watcher, given = StopStrings(stops), ""
        for start in range(0, len(text), size):
            given += watcher.push(text[start : start + size])
            # Neither past a stop, nor anything that had to be taken back.
            assert expected.startswith(given)
            if watcher.found:
                break
        assert watcher.found == (text != expected)
        assert given + watcher.flush() == expected


def test_stop_string_across_chunks_ends_the_request_and_counts_to_its_token():
    engine = FakeEngine([["one"], [" t", "w", "o th", "ree"], ["four"]])
    with serving(engine) as client:
        for stop, text, tokens in (
            (["two"], "one ", 4),  # in the third of a step's four tokens
            ("e t", "on", 2),
            (["zzz", "o t"], "one tw", 4),
            (["four"], "one two three", 6),
        ):
            for path, body in BOTH:
                body = {**body, "stop": stop}
                choice = (answer := client.post(path, json=body).json())["choices"][0]
                given = choice["text"] if "text" in choice else choice["message"]["content"]
                assert (given, choice["finish_reason"]) == (text, "stop")
                assert answer["usage"]["completion_tokens"] == tokens
                usage = {"stream_options": {"include_usage": True}}
                *chunks, last = events(client, path, {**body, **usage})
                assert text_of(chunks) == text
                assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
                assert last["usage"] == answer["usage"]
    assert engine.closed == len(engine.prompts)


def test_held_back_text_comes_when_it_was_no_stop(client: TestClient):
    for path, body in BOTH:
        chunks = events(client, path, {**body, "stop": ["worldly", "dx"]})
        assert text_of(chunks) == "Hello, world"


# --- errors -------------------------------------------------------------------------------------

BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**32}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),  # B46
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(1, 17))}, "stop_token_ids"),  # no room for the model's own
    ({"stream_options": {"include_usage": True, "x": 1}, "stream": True}, "stream_options.x"),
    ({"max_tokens": 10_000}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"n": 0}, "n"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"logit_bias": {"64": 5}}, "logit_bias"),
    ({"temprature": 1}, "temprature"),
]
PROMPTS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": [5, 256]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": "x" * MAX_LENGTH}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
]
MESSAGES = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "hi", "name": "x"}]}, "messages[0].name"),
]


def cases() -> list[Any]:
    (chat, messages), (completions, prompt) = BOTH
    rows = [(path, {**body, **bad}, field) for path, body in BOTH for bad, field in BAD]
    rows += [(completions, {**prompt, **bad}, field) for bad, field in PROMPTS]
    rows += [(chat, {**messages, **bad}, field) for bad, field in MESSAGES]
    return [pytest.param(*row, id=f"{row[0][4:8]}-{row[2]}-{n}") for n, row in enumerate(rows)]


@pytest.mark.parametrize(("path", "body", "field"), cases())
def test_b45_what_does_not_fit_is_a_400_that_names_the_field(
    client: TestClient, path: str, body: dict[str, Any], field: str
):
    for stream in ({}, {"stream": True}):
        # Not `json=`: it would refuse to write NaN and lone surrogates, which clients may send.
        content = json.dumps({**body, **stream} if "stream" not in body else body)
        headers = {"Content-Type": "application/json"}
        error = error_of(client.post(path, content=content, headers=headers), 400)
        assert error["param"] == field
        assert error["type"] == "invalid_request_error"
        assert field.split("[")[0].split(".")[-1] in error["message"]


def test_messages_say_what_would_fit(client: TestClient):
    def said(path: str, body: dict[str, Any]) -> tuple[str, str]:
        error = error_of(client.post(path, json=body), 400)
        return error["message"], error["code"]

    (chat, messages), (completions, prompt) = BOTH
    assert said(chat, {**messages, "tools": [1]}) == (
        "tools: not supported yet",
        "unsupported_parameter",
    )
    assert said(chat, {**messages, "x": 1}) == ("x: unknown field", "unknown_parameter")
    assert said(completions, {**prompt, "max_tokens": 199}) == (
        "max_tokens: 2 prompt tokens and max_tokens = 199 make 201; a request may have 200",
        "context_length_exceeded",
    )
    assert said(completions, {**prompt, "prompt": [1, 300]}) == (
        "prompt[1] = 300: expected a token id from 0 to 255",
        "invalid_value",
    )


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "null", '"x"', "[" * 100_000])
def test_bodies_that_are_no_object(client: TestClient, content: str):
    for path, _ in BOTH:
        headers = {"Content-Type": "application/json"}
        error_of(client.post(path, content=content, headers=headers), 400)


def test_unknown_models_and_paths_are_404(client: TestClient):
    for path, body in BOTH:
        error = error_of(client.post(path, json={**body, "model": "gpt-4", "stream": True}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        odd = client.post(path, content=json.dumps({**body, "model": "\ud800"}))
        assert odd.status_code in (400, 404)  # without a content type: 400
        missing = {key: value for key, value in body.items() if key != "model"}
        assert error_of(client.post(path, json=missing), 400)["param"] == "model"
    error_of(client.post("/v1/nothing", json={}), 404)
    error_of(client.get("/v1/completions"), 405)
    assert client.get("/v1/models").json()["data"][0]["id"] == "m"


# --- the engine's thread ------------------------------------------------------------------------


def call(
    app: FastAPI, body: dict[str, Any], left: asyncio.Event | None = None
) -> tuple[Any, list[dict[str, Any]]]:
    """A task that makes a request over ASGI, and what it has been sent so far.

    Args:
        left: set when the client goes away.
    """
    left = left or asyncio.Event()
    content = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if content:
            return content.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    return asyncio.create_task(app(scope, receive, send)), sent


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@contextmanager
def thread(engine: FakeEngine, **options: Any) -> Iterator[tuple[Worker, FastAPI]]:
    """A worker and its application, without a server."""
    worker = Worker(lambda: engine, **options)
    worker.start()
    try:
        wait_for(lambda: takes_requests(worker))
        yield worker, create_app(worker, "m")
    finally:
        worker.stop(PATIENCE)
        assert not worker.alive


def takes_requests(worker: Worker) -> bool:
    try:
        return worker.engine() is not None
    except ApiError:
        return False


@pytest.mark.parametrize("stream", [True, False])
def test_b42_a_client_that_leaves_frees_the_engine(stream: bool):
    engine = FakeEngine([["x"], ["y"], ["z"], *([lambda: time.sleep(0.005), []] * 5000)])
    body = {**TEXT, "stream": stream}

    async def scenario(worker: Worker, app: FastAPI) -> None:
        left, waiting = asyncio.Event(), asyncio.Event()
        task, sent = call(app, body, left)
        await until(lambda: len(sent) > 3 if stream else len(engine.prompts) == 1)
        queued, nothing = call(app, body, waiting)
        await until(lambda: worker.waiting == 1)
        waiting.set()
        await queued
        assert engine.closed == 0
        left.set()
        await task
        await until(lambda: engine.closed == 1)
        engine.script = [["fine"]]
        task, sent = call(app, TEXT)
        await task
        assert json.loads(sent[1]["body"])["choices"][0]["text"] == "fine"
        # The one that left while it waited never ran.
        assert len(engine.prompts) == 2
        assert nothing[0]["status"] == 499

    with thread(engine) as (worker, app):
        asyncio.run(scenario(worker, app))


def test_queue_full_and_order_of_arrival():
    gate = threading.Event()
    engine = FakeEngine([["x"], gate.wait])

    async def scenario(worker: Worker, app: FastAPI) -> None:
        tasks = []
        for number in range(3):
            tasks.append(call(app, {**TEXT, "prompt": [number]}))
            await until(lambda: len(engine.prompts) == 1)
            await until(lambda number=number: worker.waiting == number)
        refused, sent = call(app, TEXT)
        await refused
        assert sent[0]["status"] == 429
        assert (b"retry-after", b"2") in sent[0]["headers"]
        assert json.loads(sent[1]["body"])["error"]["code"] == "queue_full"
        gate.set()
        for task, sent in tasks:
            await task
            assert sent[0]["status"] == 200
        assert engine.prompts == [[0], [1], [2]]

    with thread(engine, max_queue=2) as (worker, app):
        asyncio.run(scenario(worker, app))


def test_draining_finishes_the_running_request_and_sends_others_away():
    gate = threading.Event()
    engine = FakeEngine([["x"], gate.wait, ["y"]])

    async def scenario(worker: Worker, app: FastAPI) -> None:
        running, answer = call(app, TEXT)
        await until(lambda: bool(engine.prompts))
        waiting, refusal = call(app, TEXT)
        await until(lambda: worker.waiting == 1)
        worker.drain()
        await waiting
        late, late_refusal = call(app, TEXT)
        await late
        assert [refusal[0]["status"], late_refusal[0]["status"]] == [503, 503]
        gate.set()
        await running
        assert json.loads(answer[1]["body"])["choices"][0]["text"] == "xy"
        await until(lambda: not worker.alive)

    with thread(engine) as (worker, app):
        asyncio.run(scenario(worker, app))


def test_health_and_readiness_while_starting():
    gate = threading.Event()

    def build() -> FakeEngine:
        gate.wait(PATIENCE)
        return FakeEngine()

    with TestClient(create_app(Worker(build), "m")) as client:
        assert client.get("/health").status_code == 200
        assert "starting" in error_of(client.get("/ready"), 503)["message"]
        assert error_of(client.post("/v1/completions", json=TEXT), 503)["type"] == "server_error"
        gate.set()
        wait_for(lambda: client.get("/ready").status_code == 200)


def test_a_failed_start_is_never_ready():
    failed = threading.Event()

    def build() -> FakeEngine:
        raise ValueError("no such file")

    worker = Worker(build, start_failed=failed.set)
    with TestClient(create_app(worker, "m")) as client:
        assert failed.wait(PATIENCE)
        error_of(client.get("/ready"), 503)
        assert client.get("/health").status_code == 200
    assert str(worker.error) == "no such file"


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_breaks_is_not_used_again(stream: bool, caplog: pytest.LogCaptureFixture):
    def broken() -> None:
        raise RuntimeError("secret inside")

    with serving(FakeEngine([["x"], broken])) as client:
        response = client.post("/v1/completions", json={**TEXT, "stream": stream})
        if stream:  # it had begun: an error event, and no [DONE]
            *_, last, end = response.text.split("\n\n")
            assert end == ""
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            error = error_of(response, 500)
        assert error["type"] == "server_error"
        assert "secret" not in response.text
        error_of(client.get("/ready"), 503)
        error_of(client.post("/v1/completions", json=TEXT), 503)
        assert client.get("/health").status_code == 200
    assert "secret inside" in caplog.text


# --- the command --------------------------------------------------------------------------------


def test_addresses_that_others_can_reach_are_refused():
    for host in ("0.0.0.0", "::"):
        result = CliRunner().invoke(serve, ["--host", host, "--port", "0"])
        assert result.exit_code != 0
        assert "--allow-remote" in result.output
    with listen("127.0.0.1", 0, False) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(serve, ["--port", str(port)])
        assert result.exit_code != 0
        assert f"--port {port}: cannot be listened on" in result.output
