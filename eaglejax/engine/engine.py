"""The engine: admits requests into slots, runs steps, delivers tokens.

This loop is synchronous: a step is read before the next one is dispatched, and a waiting prompt is
prefilled as soon as a slot is free.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, overload

import jax
import numpy as np

from checkpoints.chat_template import ChatTemplate
from checkpoints.tokenizer import StreamDecoder, Tokenizer
from eaglejax.config import GREEDY, ConfigError, EngineConfig, SamplingParams, SpecPlan
from eaglejax.draft import Draft, eagle3
from eaglejax.engine.programs import Programs, padded
from eaglejax.engine.request import Chunk, Completion, Prompt, RequestError, Running
from eaglejax.models.apply import apply
from eaglejax.state import RING, EngineState, admission
from eaglejax.steps import Models, Params, StepOutput

SpecMode = Literal["off", "on"]


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
) -> list[int]:
    """Token ids of a prompt: text as it is, messages through the chat template, ids checked.

    Raises:
        RequestError: the prompt is empty or malformed, or an id is outside the vocabulary.
    """
    if isinstance(prompt, str):
        try:
            ids = tokenizer.encode(prompt)
        except ValueError as error:
            raise RequestError(f"prompt: {error}") from error
    elif isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"prompt: expected text, token ids or a list of messages, found {type(prompt).__name__}"
        )
    elif len(prompt) and isinstance(prompt[0], Mapping):
        if template is None:
            raise RequestError("messages: the model has no chat template; give text or ids")
        try:
            text = template.render(list(prompt))  # type: ignore[arg-type]
            ids = tokenizer.encode(text, add_bos=False)
        except ValueError as error:
            raise RequestError(f"messages: {error}") from error
    else:
        ids = cast("list[int]", list(prompt))
    for position, token in enumerate(ids):
        if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
            raise RequestError(
                f"token_ids[{position}] = {token!r}: expected an id from 0 to {vocab_size - 1}"
            )
    if not ids:
        raise RequestError("prompt is empty: expected at least one token")
    return [int(token) for token in ids]


class StartError(RuntimeError):
    """The engine could not start; the message names the stage and its cause."""


@dataclass
class Engine:
    """A target, a drafter and the state of their slots. Build it with `eaglejax.load`.

    Attributes:
        models, params: modules and variables.
        config: how it runs.
        tokenizer, template: text in and out.
        state: on the device; replaced by every step.
        programs: the compiled steps.
        busy: a `generate` call is running; there is one at a time.
    """

    models: Models
    params: Params
    config: EngineConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    state: EngineState
    programs: Programs
    busy: bool = False

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
        if config.spec == "on" and models.drafter is None:
            raise ConfigError("spec = 'on': expected a drafter; give one or set spec to 'off'")
        if config.plan.depth + 1 > RING:
            raise ConfigError(f"plan depth = {config.plan.depth}: expected at most {RING - 1}")
        if config.max_length > models.target.config.max_position:
            raise ConfigError(
                f"max_length = {config.max_length}: expected at most the model's "
                f"{models.target.config.max_position} positions"
            )
        drafter = None if models.drafter is None else models.drafter.config
        state = EngineState.create(config, models.target.config, drafter)
        engine = cls(
            models,
            params,
            config,
            tokenizer,
            template,
            state,
            Programs(models, params, config, draft),
        )
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

    # --- requests -------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (see `encode_prompt`)."""
        vocab_size = self.models.target.config.vocab_size
        return encode_prompt(prompt, self.tokenizer, self.template, vocab_size)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Running]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        requests = []
        for index, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            try:
                ids = self.encode(prompt)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
            if len(ids) + p.max_tokens > self.config.max_length:
                raise RequestError(
                    f"prompt {index}: {len(ids)} prompt tokens and max_tokens = {p.max_tokens} "
                    f"make {len(ids) + p.max_tokens}, the engine's max_length is "
                    f"{self.config.max_length}"
                )
            self._check_stop_ids(index, p)
            seed = secrets.randbits(32) if p.seed is None else p.seed
            requests.append(Running(index, ids, p, seed))
        return requests

    def _check_stop_ids(self, index: int, params: SamplingParams) -> None:
        vocab_size = self.models.target.config.vocab_size
        unknown = [i for i in params.stop_token_ids if i >= vocab_size]
        if unknown:
            raise RequestError(
                f"prompt {index}: stop_token_ids {unknown}: expected ids from 0 to {vocab_size - 1}"
            )
        try:
            admission([params], [0], sorted(self.tokenizer.eos_ids))
        except ValueError as error:
            raise RequestError(f"prompt {index}: {error}") from error

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
            stream: yield chunks as steps finish, instead of a list at the end.
            spec: "on" or "off" for this call; None is the engine's own setting.

        Raises:
            RequestError: a prompt or parameter does not fit; nothing has run then.
        """
        if isinstance(prompts, (str, bytes)):
            raise RequestError("prompts: expected a list of prompts, found one string")
        mode = self.config.spec if spec is None else spec
        if mode not in ("off", "on"):
            raise RequestError(f"spec = {mode!r}: expected 'off' or 'on'")
        if mode == "on" and self.models.drafter is None:
            raise RequestError("spec = 'on': the engine has no drafter")
        chunks = self._run(self._requests(prompts, params), speculate=mode == "on")
        if stream:
            return chunks
        done = {chunk.index: chunk.completion for chunk in chunks if chunk.completion is not None}
        return [done[index] for index in range(len(prompts))]

    def _run(self, requests: list[Running], *, speculate: bool) -> Iterator[Chunk]:
        """The loop: fill free slots, step all running ones, deliver."""
        if self.busy:
            raise RequestError("the engine is running another call: finish or close its stream")
        self.busy = True
        full = any(not request.params.greedy for request in requests)
        waiting, running = deque(requests), dict[int, Running]()
        decoders = {r.index: StreamDecoder(self.tokenizer) for r in requests}
        plain_steps = 0
        try:
            self._compile_for(requests, speculate, full)
            while waiting or running:
                for slot in range(self.config.max_slots):
                    if waiting and slot not in running:
                        request = waiting.popleft()
                        output = self._prefill(slot, request, full)
                        running[slot] = request
                        yield self._deliver(slot, 0, output, running, decoders, verified=False)
                if not running:
                    continue
                slots = sorted(running)
                size = self.programs.bucket(len(slots))
                where = padded(slots, size, self.config.max_slots)
                program = self.programs.get(
                    "spec" if speculate else "decode", size, full, self.state
                )
                self.state, output = program(self.state, where)
                output = _to_host(output)
                for row, slot in enumerate(slots):
                    yield self._deliver(slot, row, output, running, decoders, verified=speculate)
                plain_steps += not speculate
                # A pair a plain step is pending; the ring must not overflow.
                if self.models.drafter is not None and plain_steps % (RING - 1) == RING - 2:
                    absorb = self.programs.get("absorb", size, False, self.state)
                    self.state = absorb(self.state, where)
        finally:
            self.busy = False
            if running:  # the consumer left: nothing of these requests may go on
                self._deactivate()

    def _prefill(self, slot: int, request: Running, full: bool) -> StepOutput:
        """Runs a prompt chunk by chunk; the last chunk gives the first token."""
        request.started = time.perf_counter()
        get, max_slots = self.programs.get, self.config.max_slots
        where = padded([slot], 1, max_slots)
        eos = sorted(self.tokenizer.eos_ids)
        values = admission([request.params], [request.seed], eos)
        self.state = get("admit", 1, False, self.state)(self.state, where, values)
        ids, output, done = request.prompt_ids, None, 0
        for size in self._chunks(len(ids)):
            part = ids[done : done + size]
            done += len(part)
            tokens = np.zeros((1, size), np.int32)
            tokens[0, : len(part)] = part
            count, final = np.array([len(part)], np.int32), np.array([done == len(ids)])
            program = get("prefill", size, full, self.state)
            self.state, output = program(self.state, where, tokens, count, final)
        return _to_host(output)

    def _chunks(self, length: int) -> list[int]:
        """Chunk sizes for a prompt: the largest while they fill, then the smallest that fits."""
        sizes = self.config.prefill_chunks
        chunks = [sizes[-1]] * (length // sizes[-1])
        rest = length % sizes[-1]
        if rest:
            chunks.append(next(size for size in sizes if size >= rest))
        return chunks

    def _deliver(
        self,
        slot: int,
        row: int,
        output: StepOutput,
        running: dict[int, Running],
        decoders: dict[int, StreamDecoder],
        *,
        verified: bool,
    ) -> Chunk:
        """Takes one slot's tokens of a step; frees the slot when its request has ended."""
        request = running[slot]
        count, accepted = int(output.counts[row]), int(output.accepted[row])
        tokens = [int(token) for token in output.tokens[row, :count]]
        request.last_token = time.perf_counter()
        request.first_token = request.first_token or request.last_token
        request.token_ids += tokens
        if verified:
            request.accepted.append(accepted)
        finished, stopped = bool(output.finished[row]), bool(output.stopped[row])
        spoken = tokens[:-1] if stopped else tokens
        decoder = decoders[request.index]
        pieces = [(decoder.push([token]), i < accepted) for i, token in enumerate(spoken)]
        if not finished:
            return Chunk(request.index, tuple(pieces), tuple(tokens))
        pieces.append((decoder.flush(), False))
        del running[slot]
        ids = request.token_ids
        completion = Completion(
            text=self.tokenizer.decode(ids[:-1] if stopped else ids),
            token_ids=tuple(ids),
            finish_reason="stop" if stopped else "length",
            stats=request.stats(self.config.plan.depth),
        )
        return Chunk(request.index, tuple(pieces), tuple(tokens), completion)

    def _deactivate(self) -> None:
        rows = self.state.slots
        self.state = self.state.replace(slots=rows.replace(active=rows.active & False))

    # --- start ----------------------------------------------------------------------------------

    def _compile_for(self, requests: list[Running], speculate: bool, full: bool) -> None:
        """Compiles what a run will need before its clock starts."""
        get = self.programs.get
        get("admit", 1, False, self.state)
        for size in sorted({s for r in requests for s in self._chunks(len(r.prompt_ids))}):
            get("prefill", size, full, self.state)
        most = min(len(requests), self.config.max_slots)
        for size in self.programs.buckets:
            get("spec" if speculate else "decode", size, full, self.state)
            if not speculate and self.models.drafter is not None:
                get("absorb", size, False, self.state)
            if size >= most:
                break

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


def _to_host(output: Any) -> StepOutput:
    """The step's report as numpy arrays; waits for the step."""
    return jax.tree.map(np.asarray, output)
