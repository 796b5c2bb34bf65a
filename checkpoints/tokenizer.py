"""Text <-> token ids for byte-level BPE vocabularies stored in GGUF metadata.

Encoding is llama.cpp's, which is what a GGUF file is made for: the pre-tokenizer is the one that
`tokenizer.ggml.pre` names, no Unicode normalisation, and special tokens written in the text become
their ids. Decoding joins the bytes of the tokens, so it needs no library and streams exactly.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import logging
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

from checkpoints.errors import CheckpointError

_log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_HIDDEN = (_UNKNOWN, _CONTROL)  # not text: decode(skip_special=True) leaves them out
_PARSED = (*_HIDDEN, _USER_DEFINED)  # written in a text, they become their one id


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before BPE, and what llama.cpp takes for granted with that name.

    Each pattern cuts the pieces that the one before it left: matches and the gaps between them
    both become pieces. No merge crosses a cut.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a whole piece that is a token is taken as it is
    add_bos: bool = False  # when tokenizer.ggml.add_bos_token is absent


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _llama3_pattern(digits: str) -> str:
    # Contractions are spelled out: (?i:'s) would also match the long s, which llama.cpp does not.
    return (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
        rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _PreTokenizer((_llama3_pattern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    "qwen2": _PreTokenizer((_llama3_pattern(r"\p{N}"),)),
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, as character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """A vocabulary with its rules; immutable, safe to share between threads."""

    path: str  # the file it was read from, for messages
    special_ids: frozenset[int]  # control tokens: left out by decode(skip_special=True)
    eos_ids: frozenset[int]  # any of these ends a generation
    bos_id: int | None
    add_bos: bool  # encode() starts with bos_id
    _eos_id: int
    _bpe: BpeTokenizer
    _bytes: tuple[bytes, ...]  # of each id
    _absent_bytes: bytes  # bytes no token stands for

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], path: str | os.PathLike[str]) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes.

        `eos_ids` holds what the file declares: `eos_token_id` and, where present, `eot_token_id`
        and `eom_token_id`. Nothing is guessed from the names of tokens.

        Args:
            fields: metadata key -> Python value (`gguf.GGUFReader(...).fields[key].contents()`).
            path: the file, for messages.

        Raises:
            CheckpointError: a key is missing, has a value that does not fit, or asks for something
                that is not supported; the message names the file, the key and what would fit.
        """
        reader = _Fields(fields, os.fspath(path))
        reader.choice("model", ("gpt2",))
        pre = _PRE_TOKENIZERS[reader.choice("pre", tuple(_PRE_TOKENIZERS))]
        for key in ("add_space_prefix", "add_eos_token", "add_sep_token"):
            if reader.flag(key, False):
                raise reader.error(key, "false (true is not supported)", True)

        tokens, types = reader.vocabulary()
        bpe, absent_bytes = _build_bpe(reader, tokens, types, pre)
        eos_id = reader.token_id("eos_token_id", len(tokens))
        if eos_id is None:
            raise reader.error("eos_token_id", "a token id", "nothing (key missing)")
        others = (reader.token_id(key, len(tokens)) for key in ("eot_token_id", "eom_token_id"))
        bos_id = reader.token_id("bos_token_id", len(tokens))
        add_bos = reader.flag("add_bos_token", pre.add_bos)
        if add_bos and bos_id is None:
            raise reader.error("bos_token_id", "a token id (a BOS is to be added)", "nothing")
        return cls(
            path=reader.path,
            special_ids=frozenset(i for i, t in enumerate(types) if t in _HIDDEN),
            eos_ids=frozenset([eos_id, *(i for i in others if i is not None)]),
            bos_id=bos_id,
            add_bos=add_bos,
            _eos_id=eos_id,
            _bpe=bpe,
            _bytes=_token_bytes(reader, tokens, types),
            _absent_bytes=absent_bytes,
        )

    def __repr__(self) -> str:
        return f"Tokenizer({self.path!r}, vocab_size={self.vocab_size})"

    @property
    def vocab_size(self) -> int:
        """Number of ids; the model's own table may be padded to more rows."""
        return len(self._bytes)

    @property
    def bos_token(self) -> str:
        """Text of the BOS token, empty if there is none; what chat templates call `bos_token`."""
        return "" if self.bos_id is None else self.token_bytes(self.bos_id).decode()

    @property
    def eos_token(self) -> str:
        """Text of the token that `eos_token_id` names; chat templates call it `eos_token`."""
        return self.token_bytes(self._eos_id).decode()

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turns text into ids; special tokens written in the text become their ids.

        Bytes that no token stands for (SmolLM2 lacks a few control characters and some unassigned
        planes) are left out, as llama.cpp and Hugging Face do, with a warning in the log.

        Args:
            text: any Unicode text.
            add_bos: start with the BOS token; None follows the file. Pass False for a rendered
                chat template: it writes its own.

        Raises:
            ValueError: lone surrogates in the text, or a BOS asked for that does not exist.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode: lone surrogate {text[error.start]!r}"
                f" at character {error.start}"
            ) from error
        absent = len(data) - len(data.translate(None, self._absent_bytes))
        if absent:
            _log.warning("%d bytes of the text have no token in %s: left out", absent, self.path)
        ids = self._bpe.encode(text, add_special_tokens=False).ids
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise ValueError(f"add_bos=True, but {self.path} has no BOS token")
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[SupportsIndex], skip_special: bool = True) -> str:
        """Turns ids into text; bytes that are not UTF-8 become U+FFFD, nothing is cleaned up.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return self._join(ids, skip_special).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """The bytes a token adds to the text (its name, for a special token).

        Raises:
            ValueError: an id outside the vocabulary.
        """
        index = operator.index(token_id)
        # Checked here: a negative index would quietly count from the end.
        if not 0 <= index < len(self._bytes):
            raise ValueError(
                f"token id {index} is outside the vocabulary 0..{len(self._bytes) - 1}"
                f" of {self.path}"
            )
        return self._bytes[index]

    def to_json(self) -> dict[str, Any]:
        """The same tokenizer as a tokenizer.json of the `tokenizers` library, as JSON values.

        There control tokens are marked as special, decoding is byte-level, and a BOS that `encode`
        puts in front is put there by a post-processor.
        """
        stored = json.loads(self._bpe.to_str())
        for token in stored["added_tokens"]:
            token["special"] = token["id"] in self.special_ids
        stored["decoder"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        if self.add_bos and self.bos_id is not None:
            bos = self.bos_token
            template = processors.TemplateProcessing(
                single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, self.bos_id)]
            )
            stored["post_processor"] = json.loads(template.__getstate__())
        return stored

    def _join(self, ids: Iterable[SupportsIndex], skip_special: bool) -> bytes:
        hidden = self.special_ids if skip_special else frozenset()
        pieces = ((i, self.token_bytes(i)) for i in ids)
        return b"".join(piece for i, piece in pieces if operator.index(i) not in hidden)


class StreamDecoder:
    """Turns a growing stream of ids into text increments.

    A character whose bytes are not all there yet is held back, so what has been returned never has
    to be taken back; the increments joined are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """Takes the next ids, returns the text they complete (possibly none).

        Raises:
            ValueError: an id outside the vocabulary; none of `ids` has been taken then.
        """
        return self._utf8.decode(self._tokenizer._join(ids, self._skip_special))

    def flush(self) -> str:
        """Ends the stream: what is still incomplete comes out as U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _Fields:
    """Checked access to `tokenizer.ggml.*`; every refusal names file, key, expected and found."""

    def __init__(self, fields: Mapping[str, Any], path: str) -> None:
        self._fields = fields
        self.path = path

    def error(self, key: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError.mismatch(self.path, _PREFIX + key, expected, found)

    def get(self, key: str, expected: str) -> Any:
        value = self._fields.get(_PREFIX + key)
        if value is None:
            raise self.error(key, expected, "nothing (key missing)")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str:
        expected = f"one of {', '.join(map(repr, allowed))}"
        value = self.get(key, expected)
        if value not in allowed:
            raise self.error(key, expected, repr(value))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._fields.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", repr(value))
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        value = self._fields.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise self.error(key, f"a token id in 0..{vocab_size - 1}", repr(value))
        return value

    def strings(self, key: str) -> list[str]:
        value = list(self.get(key, "a list of strings"))
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise self.error(f"{key}[{index}]", "a string", repr(item))
        return value

    def vocabulary(self) -> tuple[list[str], list[int]]:
        """Texts and types of all tokens, in id order."""
        tokens = self.strings("tokens")
        if not tokens:
            raise self.error("tokens", "at least one token", "an empty list")
        if len(set(tokens)) != len(tokens):
            seen: set[str] = set()
            twice = next(t for t in tokens if t in seen or seen.add(t))
            raise self.error("tokens", "distinct tokens", f"{twice!r} twice")
        types = [int(t) for t in self.get("token_type", "a list with one type a token")]
        if len(types) != len(tokens):
            raise self.error("token_type", f"{len(tokens)} types, one a token", len(types))
        for index, kind in enumerate(types):
            if kind not in (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED):
                found = f"{kind} (byte)" if kind == _BYTE else kind
                raise self.error(f"token_type[{index}]", "a type in 1..5", found)
        return tokens, types


def _token_bytes(reader: _Fields, tokens: Sequence[str], types: Sequence[int]) -> tuple[bytes, ...]:
    """The bytes of each token: byte alphabet undone for normal ones, none for unused ones."""

    def convert(index: int, token: str, kind: int) -> bytes:
        if kind == _UNUSED:
            return b""
        if kind != _NORMAL:
            return token.encode("utf-8")
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError as error:
            raise reader.error(
                f"tokens[{index}]", "characters of the byte-level alphabet", repr(token)
            ) from error

    return tuple(convert(i, t, k) for i, (t, k) in enumerate(zip(tokens, types, strict=True)))


def _build_bpe(
    reader: _Fields, tokens: Sequence[str], types: Sequence[int], pre: _PreTokenizer
) -> tuple[BpeTokenizer, bytes]:
    """The `tokenizers` object that encodes, and the bytes that no token stands for."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = []
    for index, merge in enumerate(reader.strings("merges")):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise reader.error(f"merges[{index}]", "two tokens with one space between", repr(merge))
        for part in (left, right, left + right):
            if part not in vocab:
                raise reader.error(f"merges[{index}]", f"{part!r} among the tokens", repr(merge))
        merges.append((left, right))

    bpe = BpeTokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    absent = [char for char in _BYTE_OF if char not in vocab]
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if absent:
        # BPE drops a byte it has no token for; cut there first, or its neighbours would merge.
        one_of = "|".join(map(re.escape, absent))
        steps.append(pre_tokenizers.Split(Regex(one_of), behavior="isolated"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    # All of them are found in the text before it is cut; what decode() hides is decided there.
    parsed = (token for token, kind in zip(tokens, types, strict=True) if kind in _PARSED)
    bpe.add_tokens([AddedToken(token, normalized=False) for token in parsed])
    return bpe, bytes(_BYTE_OF[char] for char in absent)
