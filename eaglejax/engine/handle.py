"""The caller's end of a request: read it as it grows, wait for it, or abort it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from eaglejax.engine.request import Chunk, Completion


class EngineError(RuntimeError):
    """The engine has stopped after an error; requests in flight are lost."""


class Handle:
    """One submitted request. Chunks can be read once, by one reader, from a thread or a loop.

    Attributes:
        id: unique within the engine.
    """

    def __init__(self, number: int, abort: Callable[[], None]) -> None:
        self.id = number
        self._abort = abort
        self._events: list[Chunk | BaseException] = []
        self._read = 0
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None

    def abort(self) -> None:
        """Ends the request after the step in flight; its completion says "abort". Idempotent."""
        self._abort()

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come; the last one carries the completion.

        Raises:
            EngineError: the engine died meanwhile.
        """
        while True:
            with self._changed:
                while self._read == len(self._events):
                    self._changed.wait()
                event = self._next()
            yield event
            if event.completion is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same within an event loop."""
        loop, came = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # RuntimeError: the loop is closed, and nobody left who could read.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(came.set)

        with self._changed:
            self._wake = wake
        while True:
            came.clear()
            while self._read < len(self._events):
                event = self._next()
                yield event
                if event.completion is not None:
                    return
            await came.wait()

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: it took longer; the request goes on.
            EngineError: the engine died meanwhile.
        """
        with self._changed:
            if not self._changed.wait_for(self._ended, timeout):
                raise TimeoutError(f"request {self.id} has not ended within {timeout} s")
            last = self._events[-1]
        if isinstance(last, BaseException):
            raise EngineError(str(last)) from last
        assert last.completion is not None
        return last.completion

    @property
    def done(self) -> bool:
        return self._ended()

    # --- the engine's end -----------------------------------------------------------------------

    def put(self, event: Chunk | BaseException) -> None:
        """Takes what a step added, or why the request cannot be finished."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def _ended(self) -> bool:
        if not self._events:
            return False
        last = self._events[-1]
        return isinstance(last, BaseException) or last.completion is not None

    def _next(self) -> Chunk:
        event = self._events[self._read]
        self._read += 1
        if isinstance(event, BaseException):
            raise EngineError(str(event)) from event
        return event
