"""The loop that keeps the device busy: dispatch the next step, then read the one before it.

    host    | dispatch n+1 | read n, deliver n | dispatch n+2 | read n+1, deliver n+1 | ...
    device  | ... step n   |        step n+1                  |       step n+2        | ...

Everything that a step needs is on the device already (which slots still run, how far each is), so
step n+1 does not wait for what n says; a request that ended in n takes part in n+1 without doing
anything. Reading is the only synchronisation: one array a step, on its way to the host since its
dispatch. Prompts are prefilled in chunks between the steps, under a budget of tokens.

The host keeps bounds instead of facts. The device may be ahead of what has been read by the blocks
in flight, so a slot owns pages for two of them, and its ring is emptied before it could overflow.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eaglejax.config import PLAIN, EngineConfig, SpecPlan
from eaglejax.engine.handle import EngineError
from eaglejax.engine.programs import Programs, padded, unpack
from eaglejax.engine.request import Chunk, Completion, FinishReason, Request
from eaglejax.engine.scheduler import Scheduler
from eaglejax.policy import Policy
from eaglejax.state import RING, EngineState, admission
from eaglejax.steps import StepOutput


@dataclass(frozen=True)
class Flight:
    """A step or a prompt's last chunk whose report has not been read.

    Attributes:
        packed: the report, on the device.
        rows: the request of each row, and its life when the step was dispatched.
        plan: None for a prompt chunk.
        size: slots that the step ran for.
        context: mean committed tokens.
        dispatched: when.
    """

    packed: Any
    rows: tuple[tuple[Request, int], ...]
    plan: SpecPlan | None
    size: int
    context: float
    dispatched: float


@dataclass
class Counts:
    """What has run, since the start.

    Attributes:
        steps: decoding steps by plan ("0,1,1" is plain).
        overlapped: of them, dispatched while an earlier one was unread.
        seconds: of the device by plan, as far as it was the bottleneck.
        prefill_chunks, prompt_tokens, cached_tokens: prompts; cached tokens were not computed.
        absorb_steps: passes that empty rings.
        completion_tokens: read.
        verified, accepted: rows verified beside roots, and how many were accepted.
        finished: requests by reason.
        longest_gap: the longest that any request waited for its next tokens, in seconds.
    """

    steps: Counter[str] = field(default_factory=Counter)
    overlapped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    prefill_chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    absorb_steps: int = 0
    completion_tokens: int = 0
    verified: int = 0
    accepted: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    longest_gap: float = 0.0


LEAVE_SECONDS = 10.0  # what a step in flight may take when the process ends
_alive: weakref.WeakSet[Loop] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Ends what still runs: Python would take itself apart under a thread that is inside XLA."""
    loops = list(_alive)
    for loop in loops:
        loop.abort_all()
    for loop in loops:
        loop.wait(LEAVE_SECONDS)


class Loop:
    """Runs requests while there are any, in a thread of its own that ends when there are none.

    Attributes:
        state: on the device; replaced by every step.
        counts: what has run.
        error: what stopped it for good, or None.
    """

    def __init__(
        self,
        programs: Programs,
        config: EngineConfig,
        state: EngineState,
        scheduler: Scheduler,
        policy: Policy,
        eos_ids: list[int],
    ) -> None:
        self.programs, self.config, self.state = programs, config, state
        self.scheduler, self.policy = scheduler, policy
        self.counts = Counts()
        self.error: BaseException | None = None
        self._eos_ids = eos_ids
        self._flights: deque[Flight] = deque()
        self._arrived: list[Request] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._last_read = 0.0
        _alive.add(self)

    # --- for other threads ----------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        """Queues requests; starts the thread if it is not running."""
        with self._changed:
            if self.error is not None:
                raise EngineError(f"the engine has stopped: {self.error}") from self.error
            self._arrived += requests
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="eaglejax", daemon=True)
                self._thread.start()

    def abort_all(self) -> None:
        with self._changed:
            running = [*self.scheduler.running.values(), *self.scheduler.waiting]
            for request in [*running, *self._arrived]:
                request.aborted = request.aborted or "abort"

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._arrived) or not self.scheduler.idle

    @property
    def arrived(self) -> int:
        """Requests that the thread has not seen yet."""
        return len(self._arrived)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing runs or waits; False if that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    for request in self._arrived:
                        self.scheduler.add(request)
                    self._arrived.clear()
                    if self.scheduler.idle and not self._flights:
                        self._thread = None
                        self._changed.notify_all()
                        return
                self._turn()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Tells everybody; the state may be half a step old and is never used again."""
        with self._changed:
            self.error, self._thread = error, None
            lost = [*self.scheduler.running.values(), *self.scheduler.waiting, *self._arrived]
            self._arrived.clear()
            self._flights.clear()
            self._changed.notify_all()
        for request in lost:
            request.finished = True
            request.emit(error)

    def _turn(self) -> None:
        """Dispatches what comes next, then reads what came before."""
        for request, reason in self.scheduler.ended(time.monotonic()):
            self._end(request, reason, still_active=request.slot is not None)
        self._admit()
        before = len(self._flights)
        self._prefill()
        self._step()
        # Without overlap, what was just dispatched is read too.
        unread = len(self._flights) - before if self.config.overlap else 0
        while len(self._flights) > unread:
            self._read(self._flights.popleft())

    def _admit(self) -> None:
        """Gives slots to waiting requests, in one call of the smallest program that fits."""
        requests = self.scheduler.admit()
        if not requests:
            return
        now = time.perf_counter()
        for request in requests:
            request.started = request.started or now
            self.counts.prompt_tokens += request.goal
            self.counts.cached_tokens += request.prefilled
        size, most = self._size("admit", len(requests)), self.config.max_slots
        fill = [requests[0]] * (size - len(requests))  # ignored: their slots are out of range
        rows = requests + fill
        values = admission(
            [r.params for r in rows],
            [r.seed for r in rows],
            self._eos_ids,
            lengths=[r.prefilled for r in rows],
            said=[len(r.token_ids) for r in rows],
        )
        slots = padded([r.slot for r in requests if r.slot is not None], size, most)
        self.state = self._program("admit", size)(self.state, slots, values)

    def _prefill(self) -> None:
        """Runs prompt chunks: all while nothing decodes, else up to the budget."""
        running = sorted(self.scheduler.running.values(), key=lambda r: r.order)
        prompts = [r for r in running if r.prefilled < r.goal]
        decoding = any(r.decoding for r in running)
        budget = self.config.prefill_budget if decoding else max(self.config.prefill_chunks)
        for request in prompts:
            while request.prefilled < request.goal:
                size = self._chunk(request.goal - request.prefilled, budget)
                if size is None:
                    return
                self._prefill_chunk(request, size)
                budget -= size

    def _chunk(self, rest: int, budget: int) -> int | None:
        """Size of a prompt's next chunk; None if the budget has no room for one.

        The smallest that holds the rest, unless more than half of it would be empty; else the
        largest that the rest fills.
        """
        sizes = [size for size in self.config.prefill_chunks if size <= budget]
        if not sizes:
            # Any chunk may be larger than the whole budget: then one is run.
            smallest = self.config.prefill_chunks[0]
            return smallest if budget == self.config.prefill_budget < smallest else None
        holds = next((size for size in sizes if size >= rest), None)
        if holds is not None and (2 * rest > holds or holds == sizes[0]):
            return holds
        return [size for size in sizes if size <= rest][-1]

    def _prefill_chunk(self, request: Request, size: int) -> None:
        assert request.slot is not None
        ids, start = request.ids, request.prefilled
        part = ids[start : min(start + size, request.goal)]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(part)] = part
        last = start + len(part) == request.goal
        full = not request.params.greedy
        self.state, packed = self._program("prefill", size, full)(
            self.state,
            np.array([request.slot], np.int32),
            self._tables([request], 1),
            tokens,
            np.array([len(part)], np.int32),
            np.array([last]),
        )
        self.counts.prefill_chunks += 1
        request.prefilled = request.length = start + len(part)
        request.absorbed = request.length - 1
        if last:
            request.surely += 1
            self._fly(packed, [request], None, 1)

    def _step(self) -> None:
        """Dispatches one decoding step for every request that may want another token."""
        requests = [
            r
            for r in self.scheduler.running.values()
            if r.decoding and len(r.token_ids) + r.surely < r.params.max_tokens
        ]
        if not requests:
            return
        size = self._size("decode", len(requests))
        context = sum(r.length for r in requests) / len(requests)
        plan = self.policy.choose(len(requests), size, context).plan
        block = plan.depth + 1
        requests = self._make_room(requests, block)
        if not requests:
            return
        full = any(not r.params.greedy for r in requests)
        kind = "decode" if plan.is_plain else "spec"
        size = self._size(kind, len(requests), full, plan)
        if self.scheduler.drafter:
            # A speculative step takes depth + 1 pending pairs, a plain one adds another.
            room = RING - 1 if plan.is_plain else block
            self._absorb([r for r in requests if r.pending > room])
        slots = [r.slot for r in requests if r.slot is not None]
        self.state, packed = self._program(kind, size, full, plan)(
            self.state, padded(slots, size, self.config.max_slots), self._tables(requests, size)
        )
        self.counts.steps[str(plan)] += 1
        self.counts.overlapped += bool(self._flights)
        for request in requests:
            request.ahead += block
            request.surely += 1
            request.pending = request.pending + 1 if plan.is_plain else block
        self._fly(packed, requests, plan, size)

    def _make_room(self, requests: list[Request], block: int) -> list[Request]:
        """Gives each request the pages of its next block; preempts others where there are none."""
        for request in sorted(requests, key=lambda r: r.order):
            while request.slot is not None and not self.scheduler.grow(
                request, request.length + request.ahead + block
            ):
                victim = self.scheduler.victim()
                self._stop(victim)
                self.scheduler.preempt(victim)
        return [r for r in requests if r.slot is not None]

    def _absorb(self, requests: list[Request]) -> None:
        if not requests:
            return
        size = self._size("absorb", len(requests))
        slots = [r.slot for r in requests if r.slot is not None]
        absorb = self._program("absorb", size)
        self.state = absorb(self.state, padded(slots, size, self.config.max_slots))
        self.counts.absorb_steps += 1
        for request in requests:
            request.pending = 1
            request.absorbed = max(request.absorbed, request.length - 1)

    def _stop(self, request: Request) -> None:
        """Tells the device that a slot is not decoding any more."""
        assert request.slot is not None
        stop = self._program("stop", 1)
        self.state = stop(self.state, np.array([request.slot], np.int32))

    def _fly(self, packed: Any, requests: list[Request], plan: SpecPlan | None, size: int) -> None:
        packed.copy_to_host_async()
        rows = tuple((r, r.life) for r in requests)
        context = sum(r.length for r in requests) / len(requests)
        self._flights.append(Flight(packed, rows, plan, size, context, time.perf_counter()))

    # --- reading --------------------------------------------------------------------------------

    def _read(self, flight: Flight) -> None:
        """Waits for a report and delivers it."""
        late = flight.packed.is_ready()
        output = unpack(np.asarray(flight.packed))
        now = time.perf_counter()
        seconds = now - max(flight.dispatched, self._last_read)
        if flight.plan is not None:
            name, spent = str(flight.plan), self.counts.seconds
            spent[name] = spent.get(name, 0.0) + seconds
            if not late:  # else the time is the host's own
                self.policy.observe_time(flight.plan, flight.size, flight.context, seconds)
        self._last_read = now
        accepted = []
        for row, (request, life) in enumerate(flight.rows):
            if request.life != life or request.finished:
                continue
            self._deliver(request, flight.plan, output, row, now)
            if output.counts[row]:
                accepted.append(int(output.accepted[row]))
        if flight.plan is not None and not flight.plan.is_plain:
            self.counts.verified += flight.plan.depth * len(accepted)
            self.counts.accepted += sum(accepted)
            if accepted:
                self.policy.observe_acceptance(flight.plan, accepted)

    def _deliver(
        self, request: Request, plan: SpecPlan | None, output: StepOutput, row: int, now: float
    ) -> None:
        """Takes one request's tokens of a step; ends it where it has ended."""
        count, accepted = int(output.counts[row]), int(output.accepted[row])
        request.surely -= 1
        if plan is not None:
            request.ahead -= plan.depth + 1
            if not plan.is_plain:
                request.absorbed = max(request.absorbed, request.length)
                if count:
                    request.accepted.append(accepted)
            request.length += count
        if not count:  # it had ended in the step before
            return
        tokens = [int(token) for token in output.tokens[row, :count]]
        self.counts.completion_tokens += count
        if request.first_token:
            self.counts.longest_gap = max(self.counts.longest_gap, now - request.last_token)
        request.last_token = now
        request.first_token = request.first_token or now
        stopped = bool(output.stopped[row])
        pieces: list[tuple[str, bool]] = []
        for i, token in enumerate(tokens):
            request.token_ids.append(token)
            request.verified += plan is not None and not plan.is_plain
            is_end = stopped and i == count - 1
            text = "" if is_end else request.stops.push(request.decoder.push([token]))
            request.text += text
            if not is_end:
                pieces.append((text, plan is not None and i < accepted))
            if request.stops.found:
                active = not output.finished[row]
                self._end(request, "stop", tokens[: i + 1], pieces, still_active=active)
                return
        if output.finished[row]:
            self._end(request, "stop" if stopped else "length", tokens, pieces)
            return
        self.scheduler.publish(request)
        request.emit(Chunk(request.index, tuple(pieces), tuple(tokens)))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        tokens: list[int] | None = None,
        pieces: list[tuple[str, bool]] | None = None,
        *,
        still_active: bool = False,
    ) -> None:
        """Frees a request's slot and gives its completion."""
        pieces = [] if pieces is None else pieces
        if not request.stops.found:
            rest = request.stops.push(request.decoder.flush()) + request.stops.flush()
            request.text += rest
            pieces.append((rest, False))
        if request.slot is not None:
            self.scheduler.publish(request)
            if still_active:
                self._stop(request)
        self.scheduler.finish(request)
        self.counts.finished[reason] += 1
        completion = Completion(
            text=request.text,
            token_ids=tuple(request.token_ids),
            finish_reason=reason,
            stats=request.stats(self.config.plan.depth),
        )
        request.emit(Chunk(request.index, tuple(pieces), tuple(tokens or ()), completion))

    # --- programs -------------------------------------------------------------------------------

    def _tables(self, requests: list[Request], size: int) -> np.ndarray:
        """Page tables of a step's rows; what no page is allocated for points at page 0, unread."""
        tables = np.zeros((size, self.config.pages_per_slot), np.int32)
        for row, request in enumerate(requests):
            tables[row, : len(request.pages)] = request.pages
        return tables

    def _program(self, kind: Any, size: int, full: bool = False, plan: SpecPlan = PLAIN) -> Any:
        return self.programs.get(kind, size, full, self.state, plan)

    def _size(self, kind: Any, rows: int, full: bool = False, plan: SpecPlan = PLAIN) -> int:
        """The smallest compiled size that holds so many rows; compiling one only if none does."""
        return self.programs.size(kind, rows, full, plan)
