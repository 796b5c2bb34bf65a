"""Which requests run, and on which pages. Nothing here knows a device.

Admission is by priority, then by arrival. When the pages run out, prefixes that nobody uses go
first, then the request that was admitted with the least right is preempted: its pages are freed and
it starts again later from all the tokens it has, so nothing that it said is lost or changed.
"""

from __future__ import annotations

import heapq

from eaglejax.engine.pages import ROOT, PagePool, page_key
from eaglejax.engine.request import FinishReason, Request


class Scheduler:
    """Requests that wait and requests that run.

    Attributes:
        pool: the pages of both caches.
        running: by slot.
        preemptions: so far.
    """

    def __init__(self, slots: int, pool: PagePool, *, drafter: bool) -> None:
        self.pool, self.drafter = pool, drafter
        self.running: dict[int, Request] = {}
        self.preemptions = 0
        self._slots = list(range(slots - 1, -1, -1))
        self._waiting: list[tuple[tuple[int, int], Request]] = []

    @property
    def waiting(self) -> list[Request]:
        """Requests without a slot, the next one first."""
        return [request for _, request in sorted(self._waiting, key=lambda entry: entry[0])]

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.running

    def add(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))

    def admit(self) -> list[Request]:
        """Gives slots and the pages of their prompts to as many waiting requests as fit, in order.

        The first that does not fit stops the rest: a large one is not passed for ever.
        """
        admitted = []
        while self._waiting and self._slots:
            request = self._waiting[0][1]
            ids = request.ids
            reused = self.pool.match(ids)
            fresh = self.pool.allocate(self._pages(len(ids)) - len(reused))
            if fresh is None:
                self.pool.release(reused)
                break
            heapq.heappop(self._waiting)
            request.slot = self._slots.pop()
            request.life += 1
            request.pages = reused + fresh
            start = len(reused) * self.pool.page_size
            request.goal, request.prefilled, request.length = len(ids), start, start
            request.absorbed, request.pending = start, 1
            request.ahead = request.surely = 0
            request.published, request.key = len(reused), ROOT
            for i in range(len(reused)):
                request.key = self._key(request, i)
            if not request.preempted:
                request.cached_tokens = start
            self.running[request.slot] = request
            admitted.append(request)
        return admitted

    def grow(self, request: Request, tokens: int) -> bool:
        """Lets a request own the pages of so many tokens, at most all it can ever have."""
        most = len(request.prompt_ids) + request.params.max_tokens
        missing = self._pages(min(tokens, most)) - len(request.pages)
        if missing > 0:
            pages = self.pool.allocate(missing)
            if pages is None:
                return False
            request.pages += pages
        return True

    def victim(self) -> Request:
        """The running request that gives way when the pages run out."""
        return max(self.running.values(), key=lambda request: request.order)

    def preempt(self, request: Request) -> None:
        """Takes everything from a running request and lets it wait."""
        self.preemptions += 1
        request.preempted += 1
        self._leave(request)
        self.add(request)

    def finish(self, request: Request) -> None:
        """Frees what a request has, running or waiting."""
        request.finished = True
        if request.slot is not None:
            self._leave(request)
            return
        self._waiting = [entry for entry in self._waiting if entry[1] is not request]
        heapq.heapify(self._waiting)

    def publish(self, request: Request) -> None:
        """Makes the request's full pages findable whose rows are committed for both models."""
        rows = min(request.absorbed, request.length) if self.drafter else request.length
        ids = request.ids
        full = min(rows, len(ids) - 1) // self.pool.page_size
        while request.published < full:
            request.key = self._key(request, request.published, ids)
            self.pool.publish(request.pages[request.published], request.key)
            request.published += 1

    def ended(self, now: float) -> list[tuple[Request, FinishReason]]:
        """Requests that were aborted or whose deadline is past."""
        found: list[tuple[Request, FinishReason]] = []
        for request in [*self.running.values(), *(entry[1] for entry in self._waiting)]:
            if request.aborted is not None:
                found.append((request, request.aborted))
            elif request.deadline is not None and now >= request.deadline:
                found.append((request, "deadline"))
        return found

    def _leave(self, request: Request) -> None:
        assert request.slot is not None
        del self.running[request.slot]
        self._slots.append(request.slot)
        self.pool.release(request.pages)
        request.slot, request.pages = None, []
        request.life += 1  # whatever it still has in flight is void

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _key(self, request: Request, page: int, ids: list[int] | None = None) -> bytes:
        ids = request.ids if ids is None else ids
        size = self.pool.page_size
        start, end = page * size, (page + 1) * size
        return page_key(request.key, ids[start:end], ids[end])
