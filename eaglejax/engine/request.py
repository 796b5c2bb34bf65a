"""What goes into an engine and what comes out: requests, completions, their statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoints.tokenizer import StreamDecoder
from eaglejax.config import SamplingParams
from eaglejax.engine.stops import StopStrings

# "abort" and "deadline" are requests that were cut off from outside.
FinishReason = Literal["stop", "length", "abort", "deadline"]

# A prompt is text taken as it is, token ids, or chat messages that the model's template renders.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class RequestError(ValueError):
    """A request that cannot be run; the message names the field and what would fit."""


@dataclass(frozen=True)
class Stats:
    """How a completion came about (the CLI's JSON lines have the same fields).

    Attributes:
        prompt_tokens: ids of the prompt.
        completion_tokens: ids generated, a stop token included.
        verify_steps: speculative steps after prefill; 0 for plain decoding.
        acceptance_length: tokens of its verify steps over their number; None without one. Where all
            steps verify, that is (completion_tokens - 1) / verify_steps.
        accepted_per_position: entry i counts the steps that accepted more than i drafts.
        prefill_seconds: until the first token, compilation not counted.
        decode_seconds: from the first token to the last.
    """

    prompt_tokens: int
    completion_tokens: int
    verify_steps: int
    acceptance_length: float | None
    accepted_per_position: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first one, per second."""
        if self.completion_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.completion_tokens - 1) / self.decode_seconds


@dataclass(frozen=True)
class Completion:
    """A finished request: `token_ids` include a stop token, `text` does not."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats

    def to_json(self) -> dict[str, Any]:
        """The contract of the CLI's `--json` lines."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Chunk:
    """What one step added to one request while streaming.

    Attributes:
        index: which prompt.
        pieces: text increments with a flag, True where the token was drafted and accepted.
        token_ids: the tokens added.
        completion: the whole completion, with the last chunk.
    """

    index: int
    pieces: tuple[tuple[str, bool], ...]
    token_ids: tuple[int, ...]
    completion: Completion | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


@dataclass(eq=False)
class Request:
    """Host-side progress of one request; mutable, and touched by the engine's thread alone.

    Attributes:
        number: unique within the engine, in order of arrival.
        index: which prompt of its call.
        prompt_ids: what it was submitted with.
        params, seed: how it samples.
        priority: higher ones run first; among equals the earlier.
        deadline: `time.monotonic()` at which it is cut off, or None.
        decoder, stops: its text as it grows.
        emit: where its chunks go.

    The rest is progress. `token_ids` are the tokens read so far; the device may be a step ahead.
    """

    number: int
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int
    deadline: float | None
    decoder: StreamDecoder
    stops: StopStrings
    emit: Callable[[Chunk | BaseException], None]
    # Times, by time.perf_counter().
    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    # What it has said.
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    accepted: list[int] = field(default_factory=list)  # of each verify step
    verified: int = 0  # tokens committed by them
    preempted: int = 0
    cached_tokens: int = 0
    aborted: FinishReason | None = None
    finished: bool = False
    # Where it runs.
    slot: int | None = None
    life: int = 0  # counts admissions: what an earlier one still has in flight is void
    pages: list[int] = field(default_factory=list)
    published: int = 0  # how many of its pages are in the prefix cache
    key: bytes = b""  # of the last of them
    goal: int = 0  # tokens to prefill
    prefilled: int = 0  # of which so many are dispatched
    length: int = 0  # committed tokens as far as read
    ahead: int = 0  # tokens that the steps in flight may commit beyond it, at most
    surely: int = 0  # and at least
    absorbed: int = 0  # drafter rows committed, at least
    pending: int = 0  # pairs in the ring, at most

    @property
    def ids(self) -> list[int]:
        """All tokens known so far."""
        return self.prompt_ids + self.token_ids

    @property
    def decoding(self) -> bool:
        """Its prompt is dispatched as a whole, and its end is not known."""
        return self.slot is not None and self.prefilled == self.goal and not self.finished

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests: the first is admitted first and preempted last."""
        return -self.priority, self.number

    def stats(self, depth: int) -> Stats:
        steps = len(self.accepted)
        depth = max([depth, *self.accepted])
        positions = range(depth) if steps else ()
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.token_ids),
            verify_steps=steps,
            acceptance_length=self.verified / steps if steps else None,
            accepted_per_position=tuple(sum(a > i for a in self.accepted) for i in positions),
            prefill_seconds=max(self.first_token - self.started, 0.0),
            decode_seconds=self.last_token - self.first_token,
        )
