"""The engine: takes requests from any thread, runs them together, gives their tokens back."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import jax
import numpy as np

from checkpoints.chat_template import ChatTemplate
from checkpoints.tokenizer import StreamDecoder, Tokenizer
from eaglejax.config import GREEDY, PLAIN, ConfigError, EngineConfig, SamplingParams, SpecPlan
from eaglejax.draft import Draft, eagle3
from eaglejax.engine.encode import encode_prompt
from eaglejax.engine.handle import EngineError, Handle
from eaglejax.engine.loop import Counts, Loop
from eaglejax.engine.pages import PagePool
from eaglejax.engine.programs import Programs
from eaglejax.engine.request import Chunk, Completion, Prompt, Request, RequestError
from eaglejax.engine.scheduler import Scheduler
from eaglejax.engine.stops import StopStrings
from eaglejax.models.apply import apply
from eaglejax.policy import MODES, Policy, SpecMode
from eaglejax.state import RING, EngineState, admission
from eaglejax.steps import Models, Params


class StartError(RuntimeError):
    """The engine could not start; the message names the stage and its cause."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing and has done.

    Attributes:
        running, waiting: requests with and without a slot.
        pages, free_pages, kept_pages: of the cache; kept ones hold a prefix that nobody uses now.
        mode, plan, reason, switches: of the speculation policy; the plan of the last step.
        preemptions: requests that gave their pages up and were computed again.
        compile_seconds: spent compiling.
        counts: what has run.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    kept_pages: int
    mode: SpecMode
    plan: SpecPlan
    reason: str
    switches: int
    preemptions: int
    compile_seconds: float
    counts: Counts


@dataclass
class Engine:
    """A target, a drafter and the requests that run on them. Build it with `eaglejax.load`.

    Requests come from any thread or event loop, by `submit` or `generate`; they share every step.

    Attributes:
        models, params: modules and variables.
        config: how it runs.
        tokenizer, template: text in and out.
        programs: the compiled steps.
        policy: which plan the next step runs.
    """

    models: Models
    params: Params
    config: EngineConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    programs: Programs
    policy: Policy
    _loop: Loop
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _closed: bool = False
    # A lock belongs to no thread: a stream may be closed by another one than began it.
    _mode_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def create(
        cls,
        models: Models,
        params: Params,
        config: EngineConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        draft: Draft = eagle3,
    ) -> Engine:
        """Allocates the state, compiles the greedy programs, and checks them on a probe.

        Raises:
            ConfigError: the configuration does not fit the models.
            StartError: a program does not compile, or does not compute what it should.
        """
        if config.spec != "off" and models.drafter is None:
            raise ConfigError(
                f"spec = {config.spec!r}: expected a drafter; give one or set spec to 'off'"
            )
        for plan in {config.plan, *config.menu}:
            if plan.depth + 1 > RING:
                raise ConfigError(f"plan depth = {plan.depth}: expected at most {RING - 1}")
        if config.max_length > models.target.config.max_position:
            raise ConfigError(
                f"max_length = {config.max_length}: expected at most the model's "
                f"{models.target.config.max_position} positions"
            )
        drafter = None if models.drafter is None else models.drafter.config
        programs = Programs(models, params, config, draft)
        policy = Policy(config.spec, config.plan, config.menu, config.spec_disable_batch_threshold)
        pool = PagePool(config.total_pages, config.page_size, prefix_cache=config.prefix_cache)
        loop = Loop(
            programs,
            config,
            EngineState.create(config, models.target.config, drafter),
            Scheduler(config.max_slots, pool, drafter=drafter is not None),
            policy,
            sorted(tokenizer.eos_ids),
        )
        engine = cls(models, params, config, tokenizer, template, programs, policy, loop)
        engine._check()
        return engine

    def with_plan(self, plan: SpecPlan, draft: Draft | None = None) -> Engine:
        """Another engine on the same weights that drafts by another plan, or in another way."""
        return Engine.create(
            self.models,
            self.params,
            self.config.replace(plan=plan),
            self.tokenizer,
            self.template,
            self.programs.draft if draft is None else draft,
        )

    @property
    def state(self) -> EngineState:
        """The state on the device; the next step consumes it."""
        return self._loop.state

    def stats(self) -> EngineStats:
        """A look at what is going on; from any thread."""
        scheduler, policy = self._loop.scheduler, self.policy
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self._loop.arrived,
            pages=scheduler.pool.pages,
            free_pages=scheduler.pool.available,
            kept_pages=scheduler.pool.kept,
            mode=policy.mode,
            plan=policy.current,
            reason=policy.reason,
            switches=policy.switches,
            preemptions=scheduler.preemptions,
            compile_seconds=self.programs.compile_seconds,
            counts=self._loop.counts,
        )

    # --- requests -------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (see `encode_prompt`)."""
        vocab_size = self.models.target.config.vocab_size
        return encode_prompt(prompt, self.tokenizer, self.template, vocab_size)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Handle:
        """Starts a request, and returns.

        A step that was never compiled is compiled first, here: seconds, which do not count.

        Args:
            prompt: text, token ids or chat messages.
            params: how it samples.
            priority: higher ones run first; among equals the earlier.
            timeout: seconds, waiting included, until it is cut off with what it has; its finish
                reason is then "deadline".

        Raises:
            RequestError: it cannot be run; says why.
            EngineError: the engine has stopped or is closed.
        """
        self._check_open()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority = {priority!r}: expected an integer")
        if timeout is not None and not _is_duration(timeout):
            raise RequestError(f"timeout = {timeout!r}: expected seconds, 0 or more")
        request = self._request(0, prompt, params)
        handle = Handle(request.number, lambda: self._abort([request]))
        request.emit, request.priority = handle.put, priority
        self._compile_for([request])
        if timeout is not None:
            request.deadline = time.monotonic() + timeout
        self._loop.submit([request])
        return handle

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until every request has ended; False if that takes more than `timeout` seconds."""
        return self._loop.wait(timeout)

    def close(self) -> None:
        """Aborts what is in flight and takes no more requests. Idempotent."""
        self._closed = True
        self._loop.abort_all()
        self._loop.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self.encode(prompt)
        if len(ids) + params.max_tokens > self.config.max_length:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_tokens = {params.max_tokens} make "
                f"{len(ids) + params.max_tokens}, the engine's max_length is "
                f"{self.config.max_length}"
            )
        self._check_stop_ids(params)
        return Request(
            number=next(self._numbers),
            index=index,
            prompt_ids=ids,
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            priority=0,
            deadline=None,
            decoder=StreamDecoder(self.tokenizer),
            stops=StopStrings(params.stop),
            emit=lambda _: None,
            submitted=time.perf_counter(),
        )

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        requests = []
        for index, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            try:
                requests.append(self._request(index, prompt, p))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
        return requests

    def _check_stop_ids(self, params: SamplingParams) -> None:
        vocab_size = self.models.target.config.vocab_size
        unknown = [i for i in params.stop_token_ids if i >= vocab_size]
        if unknown:
            raise RequestError(f"stop_token_ids {unknown}: expected ids from 0 to {vocab_size - 1}")
        try:
            admission([params], [0], sorted(self.tokenizer.eos_ids))
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.aborted = request.aborted or "abort"

    # --- generation -----------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = ...,
        *,
        stream: Literal[False] = ...,
        spec: SpecMode | None = ...,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = ...,
        *,
        stream: Literal[True],
        spec: SpecMode | None = ...,
    ) -> Iterator[Chunk]: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        stream: bool = False,
        spec: SpecMode | None = None,
    ) -> list[Completion] | Iterator[Chunk]:
        """Completes prompts, at most `max_slots` of them in flight.

        Args:
            prompts: text, token ids or chat messages, one entry a prompt.
            params: one for all, or one each.
            stream: yield chunks as steps finish, instead of a list at the end. Closing the iterator
                aborts what is left.
            spec: the speculation mode from here on until the call ends; only while nothing else
                is in flight. None is the engine's own.

        Raises:
            RequestError: a prompt or parameter does not fit; nothing has run then.
            EngineError: the engine has stopped or is closed.
        """
        self._check_open()
        if isinstance(prompts, (str, bytes)):
            raise RequestError("prompts: expected a list of prompts, found one string")
        if spec is not None:
            if spec not in MODES:
                raise RequestError(f"spec = {spec!r}: expected one of {', '.join(MODES)}")
            if spec != "off" and self.models.drafter is None:
                raise RequestError(f"spec = {spec!r}: the engine has no drafter")
        chunks = self._run(self._requests(prompts, params), spec)
        if stream:
            return chunks
        done = {chunk.index: chunk.completion for chunk in chunks if chunk.completion is not None}
        return [done[index] for index in range(len(prompts))]

    def _run(self, requests: list[Request], spec: SpecMode | None) -> Iterator[Chunk]:
        """Submits requests together and yields what comes, in whichever order."""
        events: queue.SimpleQueue[Chunk | BaseException] = queue.SimpleQueue()
        for request in requests:
            request.emit = events.put
        left = len(requests)
        with self._in_mode(spec):
            try:
                self._compile_for(requests)
                if requests:
                    self._loop.submit(requests)
                while left:
                    event = events.get()
                    if isinstance(event, BaseException):
                        raise EngineError(f"the engine has stopped: {event}") from event
                    left -= event.completion is not None
                    yield event
            finally:
                if left:  # the consumer left: nothing of these requests may go on
                    self._abort(requests)
                    self._loop.wait()

    @contextlib.contextmanager
    def _in_mode(self, mode: SpecMode | None) -> Iterator[None]:
        """Another speculation mode from an idle engine until it is idle again; one at a time."""
        own = self.policy.mode
        if mode is None or mode == own:
            yield
            return
        refused = f"spec = {mode!r}: other requests are in flight; their mode is {own!r}"
        if not self._mode_lock.acquire(blocking=False):
            raise RequestError(refused)
        try:
            if self._loop.busy:
                raise RequestError(refused)
            self.policy.mode = mode
            yield
        finally:
            if self.policy.mode == mode:
                self._loop.wait()
                self.policy.mode = own
            self._mode_lock.release()

    # --- start ----------------------------------------------------------------------------------

    def _compile_for(self, requests: list[Request]) -> None:
        """Compiles what requests will need before their clock starts, in the caller's thread.

        Sizes a quarter apart do: a step runs at the smallest compiled size that holds it.
        """
        get, state, policy = self.programs.get, self.state, self.policy
        full = any(not request.params.greedy for request in requests)
        get("admit", 1, False, state)
        get("stop", 1, False, state)
        chunks = self.config.prefill_chunks
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        for size in chunks:
            get("prefill", size, full, state)
            if size >= longest:
                break
        plans = {"off": (PLAIN,), "on": (policy.plan,), "threshold": (PLAIN, policy.plan)}
        stats = self._loop.scheduler
        most = min(len(requests) + len(stats.running), self.config.max_slots)
        sizes = [self.programs.bucket(most)]
        while sizes[-1] > 1:
            sizes.append(self.programs.bucket(max(1, sizes[-1] // 4)))
        for size in sizes:
            for plan in plans.get(policy.mode, (PLAIN, *policy.menu)):
                get("decode" if plan.is_plain else "spec", size, full, state, plan)
                if plan.is_plain and self.models.drafter is not None:
                    get("absorb", size, False, state)

    def _check(self) -> None:
        """Compiles the greedy programs of a request alone and runs them on a 16-token probe.

        Logits must be finite, and the first tokens the same from plain and from speculative steps:
        a damaged model or a drafter that changes the text is found here, not by a user.
        """
        vocab = self.models.target.config.vocab_size
        room = max(1, min(16, self.config.max_length - 8))
        probe = [(7 + 31 * i) % vocab for i in range(room)]
        params = SamplingParams(max_tokens=min(8, self.config.max_length - room), ignore_eos=True)
        self._check_logits(probe)
        modes: list[Any] = ["off"] if self.models.drafter is None else ["off", "on"]
        texts = {}
        for mode in modes:
            try:
                texts[mode] = self.generate([probe], params, spec=mode)[0].token_ids
            except Exception as error:
                raise StartError(f"start-up check, speculation {mode}: {error}") from error
        if len(set(texts.values())) > 1:
            raise StartError(
                f"start-up check: speculation changes the text: {texts['off']} without it, "
                f"{texts['on']} with it"
            )

    def _check_logits(self, probe: list[int]) -> None:
        """One pass of the target over the probe gives finite logits that are not all the same."""
        target = self.models.target

        @jax.jit
        def logits(params: Any, tokens: Any) -> Any:
            positions = jax.numpy.arange(tokens.shape[1])[None]
            hidden = apply(target, params, tokens, positions).hidden
            return apply(target, params, hidden, method="logits")

        try:
            values = np.asarray(logits(self.params.target, np.asarray([probe], np.int32)))
        except Exception as error:
            raise StartError(f"start-up check, target: {error}") from error
        if not np.isfinite(values).all():
            bad = int((~np.isfinite(values)).sum())
            raise StartError(f"start-up check: {bad} of {values.size} logits are not finite")
        if (values.max(-1) == values.min(-1)).any():
            raise StartError("start-up check: all tokens have the same logit")


def _is_duration(seconds: object) -> bool:
    """A number of seconds that a clock can be asked about: not NaN, not infinite."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return False
    return math.isfinite(seconds) and seconds >= 0
