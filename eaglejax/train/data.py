"""Token files as packed training batches, and the draft vocabulary of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int
from safetensors import SafetensorError
from safetensors.numpy import load_file

REQUIRED = {"tokens", "doc_start", "answer_start"}


class DataError(ValueError):
    """A token file that cannot be trained on; the message names the file and what is wrong."""


@dataclass(frozen=True)
class TokenFile:
    """Chats one after another as token ids.

    Attributes:
        tokens: all ids.
        doc_start: offsets of the chats, with the end appended.
        answer_start: offset inside each chat where its supervised answer begins.
        held_out: chats that must not be trained on.
    """

    tokens: np.ndarray
    doc_start: np.ndarray
    answer_start: np.ndarray
    held_out: np.ndarray

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> TokenFile:
        """Reads a safetensors token file (docs/training.md).

        Raises:
            DataError: the file is missing or damaged, an array is missing or does not fit, an id is
                outside the vocabulary, or nothing is supervised.
        """
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: not a readable token file: {error}") from error
        missing = REQUIRED - arrays.keys()
        if missing:
            raise DataError(f"{path}: arrays missing: {', '.join(sorted(missing))}")
        arrays.setdefault("held_out", np.zeros(arrays["answer_start"].size, np.uint8))
        for name in sorted({*REQUIRED, "held_out"}):
            array = arrays[name]
            if array.ndim != 1 or array.dtype.kind not in "iub":
                found = f"{array.dtype} {list(array.shape)}"
                raise DataError(f"{path}: {name}: expected a list of integers, found {found}")
        problem = _problem(arrays, vocab_size)
        if problem:
            raise DataError(f"{path}: {problem}")
        file = cls(
            arrays["tokens"].astype(np.int32),
            arrays["doc_start"].astype(np.int64),
            arrays["answer_start"].astype(np.int64),
            arrays["held_out"].astype(bool),
        )
        if not any(mask.any() for _, mask in file.chats(held_out=False)):
            raise DataError(f"{path}: no token is supervised, there is nothing to learn from")
        return file

    def chats(self, *, held_out: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and supervision mask of each training (or held-out) chat."""
        for i in np.flatnonzero(self.held_out == held_out):
            tokens = self.tokens[self.doc_start[i] : self.doc_start[i + 1]]
            yield tokens, np.arange(len(tokens)) >= self.answer_start[i]


def _problem(arrays: dict[str, np.ndarray], vocab_size: int) -> str:
    """What does not fit in a token file's arrays, or nothing."""
    tokens, starts = arrays["tokens"], arrays["doc_start"].astype(np.int64)
    answers, held_out = arrays["answer_start"], arrays["held_out"]
    if len(starts) != len(answers) + 1 or len(held_out) != len(answers):
        return (
            f"{len(answers)} answer starts need one more doc_start (found {len(starts)}) "
            f"and as many held_out (found {len(held_out)})"
        )
    if starts[0] != 0 or starts[-1] != len(tokens) or (np.diff(starts) < 0).any():
        return f"doc_start must rise from 0 to {len(tokens)} tokens"
    if len(answers) and int(answers.min()) < 0:
        return f"answer_start = {int(answers.min())}: expected 0 or more"
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        return f"token id {int(outside[0])} is outside the target's vocabulary of {vocab_size}"
    return ""


class Batch(struct.PyTreeNode):
    """Packed rows of chats.

    Attributes:
        tokens: ids, 0 where padded.
        positions: position inside the chat.
        segments: which chat of the row a token belongs to, from 1; 0 is padding.
        supervised: the token is part of an answer.
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    supervised: Bool[Array, "B T"]


@dataclass(frozen=True)
class PackedRows:
    """All rows of a token file, each filled with whole chats; chats longer than a row are cut.

    The order of the rows in an epoch is a function of seed and epoch, so a step number alone says
    which rows it trains on, and a resumed run sees the very same batches.
    """

    rows: Batch
    seed: int

    @classmethod
    def pack(cls, file: TokenFile, length: int, *, seed: int, held_out: bool = False) -> PackedRows:
        """Fills rows of `length` tokens with the training (or held-out) chats.

        Raises:
            DataError: no chat has a supervised token within a row.
        """
        chats = [(t[:length], m[:length]) for t, m in file.chats(held_out=held_out)]
        chats = [chat for chat in chats if len(chat[0]) > 2 and chat[1].any()]
        if not chats:
            raise DataError(
                f"no answer begins within the first {length} tokens of any "
                f"{'held-out' if held_out else 'training'} chat: longer rows are needed"
            )
        order = np.random.default_rng(seed).permutation(len(chats))
        rows: list[list[int]] = []
        space: list[int] = []
        for index in order:
            need = len(chats[index][0])
            # First fit among the last few open rows keeps rows full without reordering much.
            fits = [r for r in range(max(0, len(rows) - 32), len(rows)) if space[r] >= need]
            if fits:
                rows[fits[0]].append(index)
                space[fits[0]] -= need
            else:
                rows.append([index])
                space.append(length - need)
        fields = [np.zeros((len(rows), length), np.int32) for _ in range(3)]
        supervised = np.zeros((len(rows), length), bool)
        for r, members in enumerate(rows):
            start = 0
            for number, index in enumerate(members, start=1):
                tokens, mask = chats[index]
                span = slice(start, start + len(tokens))
                fields[0][r, span], supervised[r, span] = tokens, mask
                fields[1][r, span], fields[2][r, span] = np.arange(len(tokens)), number
                start += len(tokens)
        return cls(Batch(*fields, supervised), seed)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.rows.tokens)

    def batch(self, step: int, size: int) -> Batch:
        """The rows of one step; epochs follow each other without a gap."""
        index = []
        for item in range(step * size, (step + 1) * size):
            epoch, offset = divmod(item, len(self))
            if not index or offset == 0:
                order = np.random.default_rng((self.seed, epoch)).permutation(len(self))
            index.append(order[offset])
        rows = np.asarray(index)
        r = self.rows
        return Batch(r.tokens[rows], r.positions[rows], r.segments[rows], r.supervised[rows])


def draft_vocabulary(file: TokenFile, size: int, vocab_size: int) -> np.ndarray:
    """Target ids of the draft vocabulary, ascending: the commonest supervised tokens.

    Where fewer distinct tokens are supervised, the lowest unused ids fill up.

    Returns:
        int64 `[size]`.
    """
    counts = np.zeros(vocab_size, np.int64)
    for tokens, mask in file.chats(held_out=False):
        counts += np.bincount(tokens[mask], minlength=vocab_size)
    # A stable sort by falling count leaves ties, and unused tokens, in id order.
    commonest = np.argsort(-counts, kind="stable")[:size]
    return np.sort(commonest).astype(np.int64)
