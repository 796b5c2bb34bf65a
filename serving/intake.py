"""From a request that has the right form to what the engine takes.

All that can be wrong with a request is found here, before it waits in the queue and before a
stream has begun: what reaches the engine's thread must not be able to stop it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from eaglejax.config import MAX_STOP_IDS, EngineConfig, SamplingParams
from eaglejax.engine.request import Chunk, Prompt
from serving.errors import ApiError
from serving.schema import Generation


@runtime_checkable
class TextEngine(Protocol):
    """The part of `eaglejax.Engine` that a server needs."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def models(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    def encode(self, prompt: Prompt) -> list[int]: ...

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, stream: Literal[True]
    ) -> Iterator[Chunk]: ...


def accept(engine: TextEngine, request: Generation) -> tuple[list[int], SamplingParams]:
    """Token ids and sampling parameters of a request.

    Raises:
        ApiError: a 400 that names the field.
    """
    if request.stream_options is not None and not request.stream:
        message = "stream_options: only together with stream = true"
        raise ApiError(400, message, param="stream_options")
    vocab_size = engine.models.target.config.vocab_size
    _in_vocabulary("stop_token_ids", request.stop_token_ids, vocab_size)
    own = () if request.ignore_eos else engine.tokenizer.eos_ids
    if (count := len({*request.stop_token_ids, *own})) > MAX_STOP_IDS:
        message = f"stop_token_ids: {count} ids with the model's own, at most {MAX_STOP_IDS} fit"
        raise ApiError(400, message, param="stop_token_ids")
    field, prompt = request.prompt_field, request.engine_prompt()
    if isinstance(prompt, list):
        _in_vocabulary(field, [i for i in prompt if isinstance(i, int)], vocab_size)
    try:
        ids = engine.encode(prompt)
    except ValueError as error:  # RequestError, or the tokenizer's own
        message = str(error) if str(error).startswith(field) else f"{field}: {error}"
        raise ApiError(400, message, param=field) from error
    limit = _limit(request, len(ids), engine.config.max_length)
    return ids, request.sampling(limit)


def _in_vocabulary(field: str, ids: Sequence[int], vocab_size: int) -> None:
    for index, token in enumerate(ids):
        if token >= vocab_size:
            message = f"{field}[{index}] = {token}: expected a token id from 0 to {vocab_size - 1}"
            raise ApiError(400, message, param=field)


def _limit(request: Generation, prompt_tokens: int, max_length: int) -> int:
    """Completion tokens the request may have."""
    code = "context_length_exceeded"
    room = max_length - prompt_tokens
    if room < 1:
        field = request.prompt_field
        message = (
            f"{field}: {prompt_tokens} tokens; a request may have {max_length}, "
            "prompt and completion together"
        )
        raise ApiError(400, message, param=field, code=code)
    field, limit = request.limit
    if limit is None:
        return min(request.default_max_tokens or room, room)
    if limit > room:
        message = (
            f"{field}: {prompt_tokens} prompt tokens and {field} = {limit} make "
            f"{prompt_tokens + limit}; a request may have {max_length}"
        )
        raise ApiError(400, message, param=field, code=code)
    return limit
