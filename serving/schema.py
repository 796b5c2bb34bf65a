"""Requests of the OpenAI API, as far as they are supported.

A field that is null counts as absent. A field that is not supported is refused by name, unless its
value asks for what happens anyway (`n: 1`, `presence_penalty: 0`); nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from eaglejax.config import MAX_STOP_IDS, SamplingParams
from serving.not_yet import MESSAGE_FIELDS, REQUEST_FIELDS


class Body(BaseModel):
    """What all JSON objects that clients send have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_yet: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data

        def asks_nothing(field: str, value: Any) -> bool:
            neutral = cls.not_yet.get(field)
            # 0 is not False: `logprobs: 0` asks for one of the chosen token.
            return value is None or (
                value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            )

        return {k: v for k, v in data.items() if not asks_nothing(k, v)}


class StreamOptions(Body):
    """Further chunks of a stream."""

    include_usage: bool = False


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=16),
    BeforeValidator(_stop_list, json_schema_input_type=str | list[str]),
]


class Generation(Body):
    """What completions and chat completions share; names and defaults of the OpenAI API.

    `top_k`, `min_p`, `stop_token_ids` and `ignore_eos` are extensions, as other servers have them.
    """

    not_yet: ClassVar[Mapping[str, Any]] = REQUEST_FIELDS
    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: all the room there is

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopStrings = []
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_IDS)
    ] = []
    ignore_eos: bool = False

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the completion, and its value; max_completion_tokens wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def engine_prompt(self) -> str | list[int] | list[dict[str, str]]:
        """The prompt as the engine takes it."""
        raise NotImplementedError

    def sampling(self, max_tokens: int) -> SamplingParams:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
        values = {name: getattr(self, name) for name in names}
        stop_ids = tuple(self.stop_token_ids)
        return SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_ids, **values)


def _one_prompt(value: Any) -> Any:
    """A text or a list of ids; a list that holds just one of these is taken for it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is int and item >= 0 for item in value):
            return value
        if len(value) == 1 and isinstance(value[0], str | list):
            return _one_prompt(value[0])
        if all(isinstance(item, str | list) for item in value):
            raise PydanticCustomError(
                "several_prompts", "several prompts in one request are not supported yet: send one"
            )
    raise PydanticCustomError(
        "prompt_type", "expected a string or a list of token ids, with at least one token"
    )


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]

    def engine_prompt(self) -> str | list[int] | list[dict[str, str]]:
        return self.prompt


class TextPart(Body):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Body):
    """One turn of a conversation; parts are joined as they are, for every role alike."""

    not_yet: ClassVar[Mapping[str, Any]] = MESSAGE_FIELDS

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        Field(min_length=1),
        BeforeValidator(_parts, json_schema_input_type=str | list[TextPart]),
    ]


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    prompt_field: ClassVar[str] = "messages"
    default_max_tokens: ClassVar[int | None] = None

    messages: Annotated[list[Message], Field(min_length=1)]

    def engine_prompt(self) -> str | list[int] | list[dict[str, str]]:
        return [
            {"role": message.role, "content": "".join(part.text for part in message.content)}
            for message in self.messages
        ]
