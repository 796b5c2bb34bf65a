"""The routes of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from serving import errors
from serving.errors import ApiError
from serving.intake import accept
from serving.job import Job
from serving.replies import Reply
from serving.schema import ChatRequest, CompletionRequest, Generation
from serving.worker import Worker

STOP_SECONDS = 5.0  # what the engine's thread may take for its step in progress


def create_app(worker: Worker, model: str) -> FastAPI:
    """The application; it starts and stops the worker.

    Args:
        worker: not started yet.
        model: name under which the model is served.
    """
    created = int(time.time())
    watchers: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_in_threadpool(worker.stop, STOP_SECONDS)

    # The framework's own documentation pages would load scripts from another host.
    app = FastAPI(title="eaglejax", lifespan=lifespan, docs_url=None, redoc_url=None)
    _translate_errors(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process is alive."""
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """The engine has passed its start-up check and takes requests; else 503."""
        worker.engine()
        return {"status": "ready"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        entry = {"id": model, "object": "model", "created": created, "owned_by": "eaglejax"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continues a text or a list of token ids."""
        return await answer(request, body)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answers a conversation; the model's chat template makes the prompt."""
        return await answer(request, body)

    async def answer(request: Request, body: Generation) -> Response:
        if body.model != model:
            message = f"model: {body.model} is not served here; {model} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        ids, params = await run_in_threadpool(accept, worker.engine(), body)
        job = Job(ids, params, body.stop)
        worker.submit(job)
        watcher = asyncio.create_task(_cancel_on_disconnect(request, job))
        watchers.add(watcher)
        watcher.add_done_callback(watchers.discard)
        reply = Reply(isinstance(body, ChatRequest), model, len(ids))
        deltas = job.deltas()
        if not body.stream:
            return JSONResponse(await reply.whole(deltas))
        first = await anext(deltas)
        return StreamingResponse(
            reply.events(first, deltas, usage=body.usage_wanted),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    return app


async def _cancel_on_disconnect(request: Request, job: Job) -> None:
    """Ends when the answer is complete, too: the connection then has nothing more to say."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.cancel()


def _translate_errors(app: FastAPI) -> None:
    """Gives every answer other than 200 the shape of the OpenAI API."""

    def send(error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, dict(error.headers or {}))

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> Response:
        return send(error)

    @app.exception_handler(RequestValidationError)
    async def form(request: Request, error: RequestValidationError) -> Response:
        return send(errors.of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        return send(errors.of_http(error.status_code, error.detail, request.url.path))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return send(ApiError(500, "the server has failed at this request; its log says how"))
