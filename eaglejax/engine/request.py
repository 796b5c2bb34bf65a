"""What goes into an engine and what comes out: requests, completions, their statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eaglejax.config import SamplingParams

FinishReason = Literal["stop", "length"]

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
        acceptance_length: committed tokens a verify step; None without one.
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


@dataclass
class Running:
    """Host-side progress of one request; the only mutable thing in here."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # of each verify step
    stopped: bool = False

    def stats(self, depth: int) -> Stats:
        steps = len(self.accepted)
        positions = range(depth) if steps else ()
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.token_ids),
            verify_steps=steps,
            acceptance_length=(len(self.token_ids) - 1) / steps if steps else None,
            accepted_per_position=tuple(sum(a > i for a in self.accepted) for i in positions),
            prefill_seconds=self.first_token - self.started,
            decode_seconds=self.last_token - self.first_token,
        )
