"""One request on its way through the engine, and what its text grows by."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

from eaglejax.config import SamplingParams
from eaglejax.engine.request import Chunk, FinishReason, RequestError
from eaglejax.engine.stops import StopStrings
from serving.errors import ApiError
from serving.intake import TextEngine


@dataclass(frozen=True)
class Delta:
    """What a request's text grew by.

    Attributes:
        text: new text; nothing past a stop.
        completion_tokens: so far, the token that completed a stop included.
        finish_reason: with the last one.
    """

    text: str
    completion_tokens: int
    finish_reason: FinishReason | None = None


class Job:
    """One request. Made in the event loop that will iterate over its deltas."""

    def __init__(self, prompt_ids: list[int], params: SamplingParams, stops: Sequence[str]) -> None:
        self.prompt_ids, self.params, self.stops = prompt_ids, params, tuple(stops)
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | ApiError] = asyncio.Queue()

    def send(self, event: Delta | ApiError) -> None:
        """Hands over what happened; for any thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed, and nobody is left to read
            self.cancelled.set()

    def cancel(self) -> None:
        """Nobody wants the rest: whoever iterates is woken, the engine stops after its step."""
        self.cancelled.set()
        self.send(ApiError(499, "the client has left"))

    async def deltas(self) -> AsyncIterator[Delta]:
        """The deltas up to the last; leaving early cancels the job.

        Raises:
            ApiError: it could not be finished.
        """
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, ApiError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self.cancelled.set()

    def run(self, engine: TextEngine) -> Delta | ApiError | None:
        """Runs to the end, the first stop string, or until nobody wants it; in the engine's thread.

        Returns:
            What is to be sent last, now that the engine is free; None if nobody wants it.

        Raises:
            Exception: whatever the engine raises in the middle; it is not to be used again then.
        """
        if self.cancelled.is_set():
            return None
        try:
            chunks = engine.generate([self.prompt_ids], self.params, stream=True)
        except RequestError as error:  # nothing has run
            return ApiError(400, str(error))
        stops, tokens = StopStrings(self.stops), 0
        # Closing the generator frees the slot.
        with closing(cast("Generator[Chunk, None, None]", chunks)):
            for chunk in chunks:
                if self.cancelled.is_set():
                    return None
                text = ""
                for index, (piece, _) in enumerate(chunk.pieces, start=1):  # one a token
                    text += stops.push(piece)
                    if stops.found:
                        tokens += min(index, len(chunk.token_ids))
                        return Delta(text, tokens, "stop")
                tokens += len(chunk.token_ids)
                done = chunk.completion
                if done is not None:
                    return Delta(text + stops.flush(), tokens, done.finish_reason)
                if text:
                    self.send(Delta(text, tokens))
        raise RuntimeError("the engine ended a request without its completion")
