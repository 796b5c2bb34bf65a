"""The engine's thread, and the way to it and back.

The thread starts the engine, then runs one request at a time in the order of arrival. Requests
come from event loops, and what they produce goes back to the loop each came from.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from serving.errors import ApiError
from serving.intake import TextEngine
from serving.job import Job

log = logging.getLogger("eaglejax")
State = Literal["starting", "ready", "draining", "failed"]
_REASONS = {
    "starting": "the engine is starting",
    "draining": "the server is shutting down",
    "failed": "the engine has stopped after an error; the server's log has it",
}
RETRY_SECONDS = 2  # what a client is told to wait when the queue is full


class Worker:
    """Owns the engine and its thread."""

    def __init__(
        self,
        build: Callable[[], TextEngine],
        *,
        max_queue: int = 64,
        start_failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            build: makes the engine, checked and ready; called in the thread.
            max_queue: requests that may wait.
            start_failed: called in the thread if `build` raises; `error` holds what.
        """
        self._build, self._max_queue, self._start_failed = build, max_queue, start_failed
        self._engine: TextEngine | None = None
        self._state: State = "starting"
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.error: BaseException | None = None

    # --- for the event loop ---------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests in the queue, the running one not counted."""
        return len(self._waiting)

    def engine(self) -> TextEngine:
        """The engine, if it takes requests.

        Raises:
            ApiError: a 503 that says why it does not.
        """
        if self._state != "ready" or self._engine is None:
            raise ApiError(503, _REASONS[self._state])
        return self._engine

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            ApiError: 429 if the queue is full, 503 if the engine takes no requests.
        """
        with self._changed:
            self.engine()
            self._waiting = deque(j for j in self._waiting if not j.cancelled.is_set())
            if len(self._waiting) + (self._running is not None) > self._max_queue:
                message = f"the queue is full ({self._max_queue} may wait): try again later"
                raise ApiError(429, message, headers={"Retry-After": str(RETRY_SECONDS)})
            self._waiting.append(job)
            self._changed.notify_all()

    def drain(self) -> None:
        """No new requests, those that wait are sent away; the running one goes on."""
        with self._changed:
            if self._state != "failed":
                self._state = "draining"
            self._dismiss()

    def stop(self, seconds: float) -> None:
        """Ends the thread: drains, cuts the running request off, waits so long at most."""
        self.drain()
        with self._changed:
            if self._running is not None:
                self._running.send(ApiError(503, _REASONS["draining"]))
                self._running.cancelled.set()
        if self.alive:
            self._thread.join(seconds)

    # --- the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._engine = self._build()
        except BaseException as error:  # a missing file, a failed check, a bug: no start
            self._fail(error)
            self._start_failed()
            return
        with self._changed:
            if self._state == "starting":
                self._state = "ready"
        while (job := self._next()) is not None:
            try:
                end = job.run(self._engine)
            except BaseException as error:  # its state may be half a step old: never used again
                log.exception("the engine has stopped")
                self._fail(error)
                job.send(ApiError(500, _REASONS["failed"]))
                return
            with self._changed:
                self._running = None
            if end is not None:  # said only now: whoever hears it finds the engine free
                job.send(end)

    def _next(self) -> Job | None:
        """The next job; None when the server shuts down."""
        with self._changed:
            while not self._waiting:
                if self._state == "draining":
                    return None
                self._changed.wait()
            self._running = self._waiting.popleft()
            return self._running

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error, self._state, self._running = error, "failed", None
            self._dismiss()

    def _dismiss(self) -> None:
        for job in self._waiting:
            job.send(ApiError(503, _REASONS[self._state]))
        self._waiting.clear()
        self._changed.notify_all()
