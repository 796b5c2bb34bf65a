"""Protects: ids and text agree with llama.cpp, streams equal decode, bad files are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from checkpoints.errors import CheckpointError
from checkpoints.tokenizer import StreamDecoder, Tokenizer

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "smollm2_tokenizer.json").read_text(encoding="utf-8"))
PROMPTS = json.loads((DATA / "smollm2_prompts.json").read_text(encoding="utf-8"))

# GPT-2's printable character for each byte, written out independently of the code under test.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
SHIFTED = [byte for byte in range(256) if byte not in PRINTABLE]
CHAR_OF = {b: chr(b if b in PRINTABLE else 256 + SHIFTED.index(b)) for b in range(256)}

PRES = ("smollm", "gpt-2", "default", "llama-bpe", "qwen2")
ENDOFTEXT, USER_DEFINED, UNUSED = 256, 257, 258

# SmolLM2 has no token for these control characters, nor for the lead bytes of planes 4 to 11.
ABSENT = "\x04\x06\x13\x14\x16\x1d"
encodable = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=ABSENT)
tricky = st.sampled_from(["<|im_start|>", "<|im_end|", "  ", "12", " 3", "\n\n", "'s", "🙂", "é"])
texts = st.lists(st.text(encodable, max_size=8) | tricky, max_size=8).map("".join)
relaxed = settings(deadline=None)  # the machine may be busy


def toy_fields(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """Metadata: a token for each byte (id = byte), one of each type, a few merges, one unmerged."""
    merges = ["1 2", "12 3", "123 4", "Ġ Ġ", "h i", "' S", "! !", "!! !"]
    merges += ["Ġ !!!", "! hi"]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [CHAR_OF[b] for b in range(256)]
        + ["<|endoftext|>", "<tool >", "[PAD0]"]
        + [merge.replace(" ", "") for merge in merges]
        + ["abc"],
        "token_type": [1] * 256 + [3, 4, 5] + [1] * (len(merges) + 1),
        "merges": merges,
        "bos_token_id": ENDOFTEXT,
        "eos_token_id": ENDOFTEXT,
        "add_bos_token": False,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def toy(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(toy_fields(pre, **changes), "toy.gguf")


TOYS = {pre: toy(pre) for pre in PRES}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def fields(smollm2_gguf: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(smollm2_gguf)
    return {key: f.contents() for key, f in reader.fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="module")
def smollm2(fields: dict[str, Any], smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf(fields, smollm2_gguf)


# --- the default model


@pytest.mark.parametrize("item", GOLDEN["strings"], ids=lambda item: ascii(item["text"]))
def test_golden_strings(smollm2: Tokenizer, item: dict[str, Any]) -> None:
    assert smollm2.encode(item["text"]) == item["ids"]
    assert smollm2.decode(item["ids"], skip_special=False) == item["decoded"]
    assert smollm2.decode(item["ids"]) == item["decoded_skip_special"]


@pytest.mark.parametrize("item", GOLDEN["chat"])
def test_golden_chats(smollm2: Tokenizer, item: dict[str, Any]) -> None:
    assert smollm2.encode(item["rendered"], add_bos=False) == item["ids"]


@pytest.mark.parametrize("item", PROMPTS["prompts"], ids=lambda item: item["name"])
def test_golden_prompts(smollm2: Tokenizer, item: dict[str, Any]) -> None:
    assert smollm2.encode(item["rendered"], add_bos=False) == item["prompt_ids"]
    assert smollm2.decode(item["prompt_ids"], skip_special=False) == item["rendered"]


def test_what_the_file_declares(smollm2: Tokenizer, fields: dict[str, Any]) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == {2}  # <|endoftext|> (0) is not declared, so it does not count
    assert (smollm2.bos_id, smollm2.bos_token, smollm2.add_bos) == (1, "<|im_start|>", False)
    assert smollm2.eos_token == "<|im_end|>"
    assert smollm2.special_ids == set(range(17))
    assert smollm2.token_bytes(905) == b" world"
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    # test_chat_template.py renders with this copy of the file's template.
    assert fields["tokenizer.chat_template"] == PROMPTS["chat_template"]


@relaxed
@given(text=texts)
def test_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


@relaxed
@given(ids=st.lists(st.integers(17, 49151), max_size=12))
def test_decode_equals_the_library(
    smollm2: Tokenizer, fields: dict[str, Any], ids: list[int]
) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    assert smollm2.decode(ids) == decoders.ByteLevel().decode([tokens[i] for i in ids])


def test_bytes_without_a_token(smollm2: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    # Left out as llama.cpp does: the neighbours stay apart ("ab" would be one token).
    with caplog.at_level(logging.WARNING):
        ids = smollm2.encode("a\x06b")
    assert ids == [*smollm2.encode("a"), *smollm2.encode("b")] != smollm2.encode("ab")
    assert [r.getMessage() for r in caplog.records] == [
        f"1 bytes of the text have no token in {smollm2.path}: left out"
    ]


# --- streaming


@relaxed
@given(data=st.data(), skip_special=st.booleans())
def test_stream_equals_decode(smollm2: Tokenizer, data: st.DataObject, skip_special: bool) -> None:
    source = data.draw(
        st.lists(st.integers(0, 49151), max_size=12)
        | texts
        | st.lists(st.sampled_from(smollm2.encode("🙂東\u200dé<|im_end|>")), max_size=12)
    )
    # Encoded here: shape checks draw random numbers, which strategies must not do.
    ids = smollm2.encode(source) if isinstance(source, str) else source
    chunks = data.draw(st.lists(st.integers(0, 4), max_size=12))
    stream = StreamDecoder(smollm2, skip_special)
    out, start = "", 0
    for size in [*chunks, len(ids)]:
        out += stream.push(ids[start : start + size])
        start += size
        assert smollm2.decode(ids, skip_special).startswith(out)
    assert out + stream.flush() == smollm2.decode(ids, skip_special)


def test_stream_holds_back_a_partial_character() -> None:
    stream = StreamDecoder(TOYS["gpt-2"])
    smile = list("🙂".encode())
    assert [stream.push([b]) for b in smile] == ["", "", "", "🙂"]
    # A hidden special token in the middle ends nothing.
    assert [stream.push([i]) for i in [*smile[:2], ENDOFTEXT, *smile[2:]]] == ["", "", "", "", "🙂"]
    # What can no longer become a character comes out at once, the rest at the end.
    assert stream.push([*smile[:3], ord("a")]) == "\N{REPLACEMENT CHARACTER}a"
    assert stream.push(smile[:3]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""
    assert stream.push([ord("a")]) == "a"


def test_stream_takes_a_bad_chunk_not_at_all() -> None:
    stream = StreamDecoder(TOYS["gpt-2"])
    with pytest.raises(ValueError, match="token id 999"):
        stream.push([ord("a"), 999])
    assert stream.push([ord("b")]) == "b"


# --- pre-tokenizers and token types, on a vocabulary one can see through


@pytest.mark.parametrize("pre", PRES)
@relaxed
@given(text=st.text() | texts)
def test_round_trip_of_any_text(pre: str, text: str) -> None:
    tokenizer = TOYS[pre]
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize(
    ("text", "split"),
    [
        # the digits rule: one by one, all together, from the left in threes
        ("1234", {"smollm": "1|2|3|4", "qwen2": "1|2|3|4", "gpt-2": "1234", "llama-bpe": "123|4"}),
        ("12345", {"default": "123|4|5"}),
        # the run of spaces before a digit or letter
        ("   1", {"smollm": "  | |1", "gpt-2": "  | |1", "qwen2": "  | |1"}),
        ("  1", {"smollm": "  |1", "gpt-2": " | |1", "qwen2": " | |1"}),
        # capital contractions are one piece from llama 3 on, as is punctuation before a letter
        ("x'S", {"gpt-2": "x|'|S", "llama-bpe": "x|'S", "qwen2": "x|'S"}),
        ("!hi", {"gpt-2": "!|hi", "llama-bpe": "!hi", "qwen2": "!hi"}),
        # "default" cuts punctuation off first, so the space does not join it
        (" !!!", {"default": " |!!!", "smollm": " !!!", "gpt-2": " !!!", "llama-bpe": " !!!"}),
        # a whole piece that is a token, though no merges lead to it
        ("abc", {"llama-bpe": "abc", "qwen2": "a|b|c", "gpt-2": "a|b|c"}),
    ],
)
def test_pre_tokenizers(text: str, split: dict[str, str]) -> None:
    assert {pre: "|".join(pieces(TOYS[pre], text)) for pre in split} == split


def test_token_types() -> None:
    tokenizer = TOYS["gpt-2"]
    ids = tokenizer.encode("hi<|endoftext|><tool >[PAD0]")
    assert ids[1:3] == [ENDOFTEXT, USER_DEFINED]
    assert UNUSED not in ids
    # User-defined tokens are text; control tokens are not.
    assert tokenizer.decode(ids) == "hi<tool >[PAD0]"
    assert tokenizer.decode([UNUSED], skip_special=False) == ""


def test_bos_follows_the_file_and_the_call() -> None:
    assert toy(add_bos_token=True).encode("a") == [ENDOFTEXT, ord("a")]
    assert toy(add_bos_token=True).encode("a", add_bos=False) == [ord("a")]
    assert toy("llama-bpe", add_bos_token=None).add_bos  # llama.cpp's default for that name
    assert not toy("gpt-2", add_bos_token=None).add_bos
    without = toy(bos_token_id=None)
    assert (without.bos_id, without.bos_token) == (None, "")
    with pytest.raises(ValueError, match=r"add_bos=True, but toy\.gguf has no BOS"):
        without.encode("a", add_bos=True)


def test_eos_ids_are_those_declared() -> None:
    assert toy(eot_token_id=7, eom_token_id=8).eos_ids == {ENDOFTEXT, 7, 8}


# --- what is refused


@pytest.mark.parametrize("bad", [-1, 270, 10**12])
def test_ids_out_of_range(bad: int) -> None:
    tokenizer = TOYS["gpt-2"]
    for call in (tokenizer.token_bytes, lambda i: tokenizer.decode([65, i])):
        with pytest.raises(
            ValueError, match=rf"token id {bad} is outside .* 0\.\.269 of toy\.gguf"
        ):
            call(bad)


def test_numpy_ids_are_ids_and_floats_are_not() -> None:
    assert TOYS["gpt-2"].decode(np.array([104, ENDOFTEXT, 105], dtype=np.int32)) == "hi"
    with pytest.raises(TypeError):
        TOYS["gpt-2"].decode([1.0])  # type: ignore[list-item]


def test_lone_surrogates() -> None:
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud83d' at character 2"):
        TOYS["gpt-2"].encode("ab\ud83d")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "model: expected one of 'gpt2', found 'llama'"),
        ({"model": None}, "model: expected one of 'gpt2', found nothing"),
        ({"pre": "tekken"}, "pre: expected one of 'smollm', .*'qwen2', found 'tekken'"),
        ({"pre": None}, "pre: expected one of .*, found nothing"),
        ({"add_space_prefix": True}, "add_space_prefix: expected false .*, found True"),
        ({"add_eos_token": True}, "add_eos_token: expected false .*, found True"),
        ({"add_bos_token": 1}, "add_bos_token: expected true or false, found 1"),
        ({"tokens": None}, "tokens: expected a list of strings, found nothing"),
        ({"tokens": []}, "tokens: expected at least one token, found an empty list"),
        ({"tokens": ["a", "b", "a"]}, "tokens: expected distinct tokens, found 'a' twice"),
        ({"tokens": ["a", 5]}, r"tokens\[1\]: expected a string, found 5"),
        ({"token_type": None}, "token_type: expected a list .*, found nothing"),
        ({"token_type": [1]}, "token_type: expected 270 types, one a token, found 1"),
        ({"token_type": [6] * 270}, r"token_type\[0\]: expected a type in 1..5, found 6 \(byte\)"),
        ({"token_type": [1] * 270}, r"tokens\[257\]: expected characters of .*, found '<tool >'"),
        ({"merges": None}, "merges: expected a list of strings, found nothing"),
        ({"merges": ["12"]}, r"merges\[0\]: expected two tokens .*, found '12'"),
        ({"merges": ["a b"]}, r"merges\[0\]: expected 'ab' among the tokens, found 'a b'"),
        ({"eos_token_id": None}, "eos_token_id: expected a token id, found nothing"),
        ({"eos_token_id": 270}, r"eos_token_id: expected a token id in 0\.\.269, found 270"),
        ({"eot_token_id": -1}, r"eot_token_id: expected a token id in 0\.\.269, found -1"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id: expected a token id"),
    ],
)
def test_bad_metadata_names_file_key_expected_and_found(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^toy\.gguf: tokenizer\.ggml\.{message}"):
        toy(**changes)


def test_long_values_are_shortened_in_messages() -> None:
    error = CheckpointError.mismatch(Path("a/b.gguf"), "t", [1, 2], "x" * 1000)
    assert str(error) == f"a/b.gguf: t: expected [1, 2], found {'x' * 300}... (1000 chars)"
