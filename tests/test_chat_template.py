"""Protects: prompts equal those of transformers; unusable messages and templates are refused."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.chat_template import ChatTemplate
from checkpoints.errors import CheckpointError

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "smollm2_tokenizer.json").read_text(encoding="utf-8"))
PROMPTS = json.loads((DATA / "smollm2_prompts.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "hi"}

# test_tokenizer.py checks that this is the template in the model file.
SMOLLM2 = ChatTemplate(PROMPTS["chat_template"], "<|im_start|>", "<|im_end|>")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", "toy.gguf")


@pytest.mark.parametrize("item", PROMPTS["prompts"], ids=lambda item: item["name"])
def test_golden_prompts(item: dict[str, Any]) -> None:
    assert SMOLLM2.render(item["messages"]) == item["rendered"]


@pytest.mark.parametrize("item", GOLDEN["chat"])
def test_golden_chats(item: dict[str, Any]) -> None:
    flag = item["add_generation_prompt"]
    assert SMOLLM2.render(item["messages"], add_generation_prompt=flag) == item["rendered"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "user", "content": parts}]
    assert SMOLLM2.render(messages) == SMOLLM2.render([USER])
    assert messages == [{"role": "user", "content": parts}]  # the caller's are left alone


def test_environment_is_that_of_transformers() -> None:
    # Block tags take the newline after them and the blanks before them.
    block = (
        "{% for m in messages %}\n  {% if m.role %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    assert template(block).render([USER, USER]) == "hi\nhi\n"
    assert template("{{ messages[0].content }}\n").render([USER]) == "hi"
    tojson = "{{ {'b': '<é&\\'>', 'a': 1} | tojson }}|{{ [1] | tojson(indent=1) }}"
    assert template(tojson).render([USER]) == """{"b": "<é&'>", "a": 1}|[\n 1\n]"""
    assert template("{{ strftime_now('%Y') }}").render([USER]) in {
        str(datetime.date.today().year - 1),  # the year may turn between the two calls
        str(datetime.date.today().year),
    }
    loop = "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}"
    assert template(loop).render([USER, USER]) == "user"
    assert (
        template("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}").render(
            [USER], add_generation_prompt=False
        )
        == "<s></s>False"
    )
    # Content is text, not HTML, and not a template.
    assert (
        template("{{ messages[0].content }}").render(
            [{"role": "user", "content": "<b>{{ 1 + 1 }}</b>"}]
        )
        == "<b>{{ 1 + 1 }}</b>"
    )


def test_variables_for_the_template() -> None:
    tools = template("{% if tools is not none %}{{ tools | tojson }}{% endif %}{{ thinking }}")
    assert tools.variables == {"tools", "thinking"}
    assert tools.render([USER]) == ""
    assert tools.render([USER], tools=[1], thinking=False) == "[1]False"
    with pytest.raises(ValueError, match=r"variable thinkin: .*toy\.gguf.* are: thinking, tools\)"):
        tools.render([USER], thinkin=True)
    with pytest.raises(ValueError, match=r"variable tools: .*those are: none"):
        SMOLLM2.render([USER], tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="variable bos_token"):
        template("{{ bos_token }}").render([USER], bos_token="x")
    assert SMOLLM2.render([USER], tools=None) == SMOLLM2.render([USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: expected at least one message, found an empty list"),
        (None, "messages: expected a list of messages, found nothing"),
        ("hi", "messages: expected a list of messages, found str"),
        ([USER, "hi"], r"messages\[1\]: expected an object, found str"),
        ([{"content": "hi"}], r"messages\[0\].role: expected a non-empty string, found nothing"),
        ([USER, {"role": 1, "content": ""}], r"messages\[1\].role: .*found int"),
        ([{"role": "", "content": ""}], r"messages\[0\].role: .*found an empty string"),
        ([{"role": "user"}], r"messages\[0\].content: expected a string or a list .*nothing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content: .*found nothing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: .*found int"),
        ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\].content: .*found dict"),
        ([{"role": "user", "content": []}], r"messages\[0\].content: expected at least one part"),
    ],
)
def test_bad_messages_name_index_and_field(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SMOLLM2.render(messages)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("hi", ": expected an object, found str"),
        ({"text": "hi"}, ".type: expected 'text' .*, found nothing"),
        ({"type": "image_url", "image_url": {}}, ".type: expected 'text' .*, found 'image_url'"),
        ({"type": "text"}, ".text: expected a string, found nothing"),
        ({"type": "text", "text": 5}, ".text: expected a string, found int"),
        ({"type": "text", "text": "hi", "cache": 1}, ": unknown field cache"),
    ],
)
def test_bad_parts_name_index_and_field(part: Any, message: str) -> None:
    content = [{"type": "text", "text": "a"}, part]
    with pytest.raises(ValueError, match=rf"^messages\[1\]\.content\[1\]{message}"):
        SMOLLM2.render([USER, {"role": "user", "content": content}])


def test_a_template_that_refuses() -> None:
    refusing = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate") as caught:
        refusing.render([USER, USER])
    assert not isinstance(caught.value, CheckpointError)  # the messages are at fault, not the file
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.at.all }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{% include 'other' %}", "TypeError"),
    ],
)
def test_a_template_that_fails(source: str, found: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^toy\.gguf: chat template: .*{found}") as caught:
        template(source).render([USER])
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("source", ["{% if %}", "a\n{% for m in messages %}", "{{ x | nope }}"])
def test_a_source_that_is_no_template(source: str) -> None:
    expected = r"^toy\.gguf: chat template: expected valid Jinja, found .+ at line \d"
    with pytest.raises(CheckpointError, match=expected) as caught:
        template(source)
    assert caught.value.__cause__ is not None
