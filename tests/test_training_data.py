"""Protects what training reads: token files, packing, the draft vocabulary and its export.

Scenarios B49 (nothing supervised), B51 (data of a resumed run) and B53 of the list of known faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoints.eagle3 import read_drafter, write_drafter
from eaglejax.config import DrafterConfig, TargetConfig
from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter
from eaglejax.train.data import DataError, PackedRows, TokenFile, draft_vocabulary
from tests.test_training import random_variables

VOCAB = 64


def arrays(chats: Sequence[tuple[Sequence[int], int]], **changes: Any) -> dict[str, np.ndarray]:
    """A token file's arrays from (ids, answer start) pairs."""
    fields = {
        "tokens": np.concatenate([np.asarray(ids, np.uint16) for ids, _ in chats]),
        "doc_start": np.cumsum([0, *[len(ids) for ids, _ in chats]]).astype(np.int64),
        "answer_start": np.asarray([start for _, start in chats], np.int32),
    }
    fields |= changes
    return {name: value for name, value in fields.items() if value is not None}


def write(folder: Path, chats: Sequence[tuple[Sequence[int], int]], **changes: Any) -> Path:
    path = folder / "tokens.safetensors"
    save_file(arrays(chats, **changes), path)
    return path


def token_file(
    folder: Path, chats: Sequence[tuple[Sequence[int], int]], **changes: Any
) -> TokenFile:
    return TokenFile.load(write(folder, chats, **changes), VOCAB)


CHATS = [([1, 2, 3, 4], 2), ([5, 6, 7], 1), ([8, 9, 10, 11, 12], 3)]

BAD = {
    "arrays missing: answer_start, doc_start": {"doc_start": None, "answer_start": None},
    "need one more doc_start": {"doc_start": np.array([0, 4, 12])},
    "as many held_out": {"held_out": np.zeros(2, np.uint8)},
    "doc_start must rise": {"doc_start": np.array([0, 7, 4, 12])},
    "from 0 to 12 tokens": {"doc_start": np.array([0, 4, 7, 11])},
    "answer_start = -1": {"answer_start": np.array([2, -1, 3])},
    "token id 64 is outside the target's vocabulary of 64": {"tokens": np.full(12, 64, np.uint16)},
    "token id -5 is outside": {"tokens": np.full(12, -5, np.int32)},
    "tokens: expected a list of integers, found float32": {"tokens": np.ones(12, np.float32)},
    "answer_start: expected a list of integers": {"answer_start": np.zeros((3, 1), np.int32)},
    "no token is supervised": {"answer_start": np.array([4, 3, 5])},
    "nothing to learn from": {"held_out": np.ones(3, np.uint8)},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_token_file_is_refused_by_name(tmp_path: Path, message: str) -> None:
    path = write(tmp_path, CHATS, **BAD[message])
    with pytest.raises(DataError, match=message) as error:
        TokenFile.load(path, VOCAB)
    assert str(path) in str(error.value)


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    cut = write(tmp_path, CHATS)
    cut.write_bytes(cut.read_bytes()[:-3])
    for path in (cut, tmp_path / "missing.safetensors"):
        with pytest.raises(DataError, match=str(path)):
            TokenFile.load(path, VOCAB)


def test_only_answers_are_supervised_and_held_out_chats_stay_out(tmp_path: Path) -> None:
    file = token_file(tmp_path, CHATS, held_out=np.array([0, 1, 0], np.uint8))
    trained = [(ids.tolist(), ids[mask].tolist()) for ids, mask in file.chats(held_out=False)]
    assert trained == [([1, 2, 3, 4], [3, 4]), ([8, 9, 10, 11, 12], [11, 12])]
    assert [ids.tolist() for ids, _ in file.chats(held_out=True)] == [[5, 6, 7]]
    assert not set(draft_vocabulary(file, 4, VOCAB)) & {6, 7}


def test_packing_keeps_every_chat_whole_and_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    chats = [(rng.integers(1, VOCAB, rng.integers(3, 14)).tolist(), 1) for _ in range(50)]
    packed = PackedRows.pack(token_file(tmp_path, chats), 12, seed=0)
    rows, found = packed.rows, []
    for r in range(len(packed)):
        for number in range(1, int(rows.segments[r].max()) + 1):
            own = rows.segments[r] == number
            found.append(rows.tokens[r, own].tolist())
            assert rows.positions[r, own].tolist() == list(range(own.sum()))
            assert rows.supervised[r, own].tolist() == [False] + [True] * (own.sum() - 1)
    assert sorted(found) == sorted(ids[:12] for ids, _ in chats)
    assert not rows.supervised[rows.segments == 0].any()
    assert np.mean(rows.segments > 0) > 0.8


def test_chats_whose_answer_is_cut_off_teach_nothing(tmp_path: Path) -> None:
    file = token_file(tmp_path, [([1] * 20, 15), ([2] * 20, 5)])
    packed = PackedRows.pack(file, 10, seed=0)
    assert packed.rows.tokens.tolist() == [[2] * 10]
    with pytest.raises(DataError, match="first 4 tokens of any training chat"):
        PackedRows.pack(file, 4, seed=0)
    with pytest.raises(DataError, match="held-out"):
        PackedRows.pack(file, 10, seed=0, held_out=True)


def test_a_step_number_alone_says_which_rows_it_sees(tmp_path: Path) -> None:
    chats = [([i + 1] * 8, 2) for i in range(7)]
    packed = PackedRows.pack(token_file(tmp_path, chats), 8, seed=3)
    assert len(packed) == 7
    seen = [packed.batch(step, 3).tokens[:, 0].tolist() for step in range(7)]
    again = PackedRows.pack(token_file(tmp_path, chats), 8, seed=3)
    assert again.batch(4, 3).tokens[:, 0].tolist() == seen[4]
    flat = [token for step in seen for token in step]
    epochs = [flat[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(1, 8)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    whole = packed.batch(1, 20).tokens[:, 0].tolist()  # more rows than there are
    assert sorted(whole[1:8]) == list(range(1, 8))


def test_draft_vocabulary_takes_the_commonest_answer_tokens(tmp_path: Path) -> None:
    # Prompt tokens (50) do not count; 9 and 4 tie, and the lower id wins.
    chats = [([50] * 9 + [7, 7, 7, 30, 30, 9, 4], 9)]
    ids = draft_vocabulary(token_file(tmp_path, chats), 3, VOCAB)
    assert ids.tolist() == [4, 7, 30]
    assert ids.dtype == np.int64


def test_draft_vocabulary_is_filled_up_where_the_corpus_is_poor(tmp_path: Path) -> None:
    chats = [([1, 2, 60, 9, 2, 40, 33], 2)]  # five distinct supervised tokens
    ids = draft_vocabulary(token_file(tmp_path, chats), 8, VOCAB)
    assert ids.tolist() == [0, 1, 2, 3, 9, 33, 40, 60]
    assert draft_vocabulary(token_file(tmp_path, chats), VOCAB, VOCAB).tolist() == list(
        range(VOCAB)
    )


@pytest.mark.parametrize(
    ("ids", "vocab"),
    [([0, 1, 2, 3, 9, 33, 40, 60], 64), ([0, 1, 2, 257, 40000, 65535, 65536, 128255], 128256)],
)
def test_export_keeps_the_vocabulary_map_unharmed(
    tmp_path: Path, ids: list[int], vocab: int
) -> None:
    """B53: bfloat16 would turn 257 into 256 and 128255 into 128000, int16 40000 into -25536."""
    target = TargetConfig(vocab, 8, 4, 1, 1, 8, 8)
    config = DrafterConfig(vocab, 8, 8, 8, 1, 1, 8, 8, feature_layers=(1, 1, 0))
    params = random_variables(Drafter(config), jnp.zeros((1, 1, config.feature_size)))["params"]
    folder = tmp_path / "drafter"
    write_drafter(folder, config, params, np.asarray(ids), target_config=target)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    assert (d2t.dtype, d2t.shape) == (np.int64, (8,))
    assert (d2t + np.arange(8)).tolist() == ids
    assert (t2d.dtype, t2d.shape) == (np.bool_, (vocab,))
    assert np.flatnonzero(t2d).tolist() == ids
    read = read_drafter(folder, target)
    variables = read.variables(jnp.zeros((vocab, 8)))
    mapped = apply(Drafter(read.config), variables, jnp.arange(8), method="to_target")
    assert mapped.tolist() == ids
