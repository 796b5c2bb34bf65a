"""Bodies of successful answers: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from serving.errors import ApiError
from serving.job import Delta


@dataclass(frozen=True)
class Reply:
    """What all bodies that answer one request have in common.

    Attributes:
        chat: chat completion, or plain completion.
        model: its served name.
        prompt_tokens: for the usage.
        id, created: the same in every chunk.
    """

    chat: bool
    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self, deltas: AsyncIterator[Delta]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        text, last = "", Delta("", 0)
        async for last in deltas:
            text += last.text
        choice: dict[str, Any] = {"index": 0, "finish_reason": last.finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self._usage(last)}

    async def events(
        self, first: Delta, deltas: AsyncIterator[Delta], *, usage: bool
    ) -> AsyncIterator[str]:
        """The events of a stream; one that breaks ends with an error instead of [DONE].

        Args:
            first: taken before, so that what goes wrong until then is an answer of its own.
            deltas: the rest.
            usage: end with a chunk that has the usage and no choices; in the others it is null.
        """
        more: dict[str, Any] = {"usage": None} if usage else {}
        if self.chat:
            yield _event(self._chunk({"role": "assistant", "content": ""}, None) | more)
        last = first
        try:
            if first.text:
                yield _event(self._text(first.text) | more)
            if first.finish_reason is None:
                async for last in deltas:
                    if last.text:
                        yield _event(self._text(last.text) | more)
        except ApiError as error:
            yield _event(error.body())
            return
        yield _event(self._chunk({} if self.chat else "", last.finish_reason) | more)
        if usage:
            yield _event({**self._head(self._kind), "choices": [], "usage": self._usage(last)})
        yield "data: [DONE]\n\n"

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _text(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text} if self.chat else text, None)

    def _chunk(self, content: dict[str, str] | str, reason: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta" if self.chat else "text": content,
            "logprobs": None,
            "finish_reason": reason,
        }
        return {**self._head(self._kind), "choices": [choice]}

    def _usage(self, last: Delta) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": last.completion_tokens,
            "total_tokens": self.prompt_tokens + last.completion_tokens,
        }


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
