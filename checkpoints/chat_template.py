"""Chat messages -> prompt text, with the Jinja template that a checkpoint carries.

The environment is the one transformers gives its templates (sandboxed and immutable, block
trimming, `raise_exception`, `strftime_now`, `tojson` without HTML escaping, loop controls), so a
model's own template renders to the same text. What a template would ignore is refused instead.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoints.errors import CheckpointError

Message = Mapping[str, Any]


class _Refusal(jinja2.TemplateError):
    """Raised by a template's own `raise_exception(...)`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes <, > and ' as escapes for HTML, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A compiled chat template; immutable, safe to share between threads."""

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        path: str | os.PathLike[str] = "chat template",
    ) -> None:
        """Compiles the template.

        Args:
            source: the Jinja source (`tokenizer.chat_template` of a GGUF file).
            bos_token: text of the BOS token, "" if there is none.
            eos_token: text of the EOS token.
            path: the file it comes from, for messages.

        Raises:
            CheckpointError: the source is not a valid template.
        """
        self._path = os.fspath(path)
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        env = _environment()
        try:
            read = jinja2.meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except jinja2.TemplateError as error:
            line = (
                f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise CheckpointError.mismatch(
                self._path, "chat template", "valid Jinja", f"{error.message}{line}"
            ) from error
        own = {"messages", "add_generation_prompt", *self._special, *env.globals}
        self.variables = frozenset(read - own)  # what render() can be given besides the messages

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Renders a conversation.

        Args:
            messages: dicts with `role` and `content`; content is a string or a list of
                `{"type": "text", "text": ...}` parts, which are joined as they are. Other keys of
                a message reach the template unchanged.
            add_generation_prompt: end with the opening of the assistant's turn.
            **kwargs: further variables for the template (`tools`, `enable_thinking`, ...); one
                that the template never reads is refused, unless it is None.

        Returns:
            The prompt, special tokens included (encode it with `add_bos=False`).

        Raises:
            ValueError: a message that does not fit (named by index and field), an unknown
                variable, or messages that the template itself refuses.
            CheckpointError: the template fails on these messages.
        """
        unread = [k for k, v in kwargs.items() if v is not None and k not in self.variables]
        if unread:
            readable = ", ".join(sorted(self.variables)) or "none"
            raise ValueError(
                f"chat template variable {', '.join(unread)}: not one that the template of"
                f" {self._path} can be given (those are: {readable})"
            )
        context = {
            # Templates test `tools is not none`, which an undefined variable would pass.
            "tools": None,
            "documents": None,
            **kwargs,
            **self._special,
            "messages": _checked(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except _Refusal as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # whatever a template's expressions raise, say whose fault it is
            raise CheckpointError.mismatch(
                self._path,
                "chat template",
                "a template that renders these messages",
                f"{type(error).__name__}: {error}",
            ) from error


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of the messages, each with a role and its content as one string."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: expected a list of messages, found {_kind(messages)}")
    if not messages:
        raise ValueError("messages: expected at least one message, found an empty list")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where}: expected an object, found {_kind(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            found = "an empty string" if role == "" else _kind(role)
            raise ValueError(f"{where}.role: expected a non-empty string, found {found}")
        content = _text(message.get("content"), f"{where}.content")
        checked.append({**message, "content": content})
    return checked


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, (bytes, Mapping)) or not isinstance(content, Sequence):
        raise ValueError(f"{where}: expected a string or a list of parts, found {_kind(content)}")
    if not content:
        raise ValueError(f"{where}: expected at least one part, found an empty list")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: expected an object, found {_kind(part)}")
    if part.get("type") != "text":
        found = "nothing" if part.get("type") is None else repr(part["type"])
        raise ValueError(f"{where}.type: expected 'text' (the only part supported), found {found}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text: expected a string, found {_kind(part.get('text'))}")
    unknown = ", ".join(str(key) for key in part if key not in ("type", "text"))
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown} (a text part has type and text)")
    return part["text"]


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
