"""Protects: safetensors are read exactly, without torch, and never from an incomplete download."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import safetensors_io
from checkpoints.errors import CheckpointError
from checkpoints.safetensors_io import INDEX, SINGLE, open_checkpoint, read_all, write

# Name -> (safetensors type, shape, bytes, values).
EXACT: dict[str, tuple[str, list[int], bytes, Any]] = {
    "bf16": ("BF16", [4], bytes.fromhex("803F4940F7C280FF"), [1.0, 3.140625, -123.5, -np.inf]),
    "f16": ("F16", [2], struct.pack("<2e", 0.1, -65504), np.array([0.1, -65504], np.float16)),
    "f32": ("F32", [1, 2], struct.pack("<2f", 0.1, 1e-40), np.array([[0.1, 1e-40]], np.float32)),
    "i32": ("I32", [2], struct.pack("<2i", -(2**31), 2**31 - 1), [-(2**31), 2**31 - 1]),
    "i64": ("I64", [2], struct.pack("<2q", -(2**63), 2**53 + 1), [-(2**63), 2**53 + 1]),
    "bool": ("BOOL", [3], b"\x01\x00\x01", [True, False, True]),
    "scalar": ("F32", [], struct.pack("<f", 2.5), 2.5),
    "empty": ("F32", [0, 3], b"", np.zeros((0, 3))),
}
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "i32": np.int32,
    "i64": np.int64,
    "bool": np.bool_,
}


def build(tensors: dict[str, tuple[str, list[int], bytes, Any]]) -> bytes:
    """A safetensors file, put together without the library under test."""
    header, data = {}, b""
    for name, (dtype, shape, content, _) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A checkpoint of two shards; the second stands for quantised weights."""
    write(tmp_path / "a.safetensors", {"w": np.ones((4, 4), np.float32)})
    packed = np.arange(4096, dtype=np.int32)
    write(tmp_path / "b.safetensors", {"weight_packed": packed, "x": np.ones(2, np.float32)})
    weight_map = {"w": "a.safetensors", "weight_packed": "b.safetensors", "x": "b.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def edit_map(folder: Path, changes: dict[str, Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_b33_every_type_is_read_exactly(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(build(EXACT))
    read = read_all(tmp_path)
    assert read.keys() == EXACT.keys()
    for name, (_, shape, _, values) in EXACT.items():
        assert read[name].dtype == DTYPES.get(name, np.float32), name
        assert list(read[name].shape) == shape, name
        assert np.array_equal(read[name], np.asarray(values, read[name].dtype)), name


def test_b33_bfloat16_needs_neither_torch_nor_jax(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(build({"bf16": EXACT["bf16"]}))
    script = (
        "import sys; from checkpoints.safetensors_io import read_all\n"
        f"read = read_all({str(tmp_path)!r})['bf16']\n"
        "print(read.dtype, read.tolist(), 'torch' in sys.modules, 'jax' in sys.modules)"
    )
    # A process of its own: here JAX has taught numpy the type already.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=os.getcwd()
    )
    assert done.stdout.strip() == "bfloat16 [1.0, 3.140625, -123.5, -inf] False False", done.stderr


def test_b33_written_tensors_come_back_with_type_and_shape(tmp_path: Path) -> None:
    tensors = {name: np.asarray(values, DTYPES.get(name)) for name, (*_, values) in EXACT.items()}
    write(tmp_path / SINGLE, tensors, {"made by": "a test"})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata == {"made by": "a test"}
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (array.dtype, array.shape), name
        assert np.array_equal(read, array), name


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    """The library itself writes the memory behind a view, and reads past its end."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    views = {"transposed": base.T, "reversed": base[:, ::-1], "columns": base[:, ::2]}
    write(tmp_path / SINGLE, views)
    for name, array in read_all(tmp_path).items():
        assert np.array_equal(array, views[name]), name


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write(tmp_path / SINGLE, {"a": np.ones(3)})
    assert (tmp_path / SINGLE).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"a": np.ones(3)})
    before = (tmp_path / SINGLE).read_bytes()
    with pytest.raises(Exception, match="dtype"):
        write(tmp_path / SINGLE, {"a": np.array(["text"])})
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]
    assert (tmp_path / SINGLE).read_bytes() == before


def test_b32_shards_are_read_as_one_and_strays_ignored(two_shards: Path) -> None:
    (two_shards / "stray.safetensors").write_bytes(b"not a checkpoint at all")
    write(two_shards / SINGLE, {"w": np.zeros((4, 4), np.float32)})  # not in the index either
    read = read_all(two_shards)
    assert read.keys() == {"w", "weight_packed", "x"}
    assert read["w"].all()
    assert np.array_equal(read["weight_packed"], np.arange(4096))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "b.safetensors").unlink(), "expected the file b.safetensors, found none"),
        (
            lambda d: os.truncate(d / "b.safetensors", (d / "b.safetensors").stat().st_size - 1024),
            r"b.safetensors: size: expected 16\d+ bytes, as its header says, found 15\d+ bytes",
        ),
        (
            lambda d: (d / "b.safetensors").write_bytes(b""),
            "b.safetensors: size: expected at least 8 bytes, found 0 bytes",
        ),
        (
            lambda d: (d / "b.safetensors").write_bytes(struct.pack("<Q", 10**6) + b"{}"),
            "b.safetensors: header length: expected at most 2, .* found 1000000",
        ),
        (
            lambda d: (d / "b.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope"),
            "b.safetensors: header: expected safetensors' JSON, found JSONDecodeError",
        ),
    ],
    ids=["deleted", "cut", "empty", "header", "json"],
)
def test_b32_incomplete_shards_are_refused_when_opened(
    two_shards: Path, damage: Any, message: str
) -> None:
    damage(two_shards)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(two_shards)


@pytest.mark.parametrize("size", [0, 7, 8, 40, -1])
def test_b32_single_file_cut_anywhere_is_refused(tmp_path: Path, size: int) -> None:
    whole = build(EXACT)
    (tmp_path / SINGLE).write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=f"{SINGLE}: (size|header length): expected .* found"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [([0, 8], [3]), ([8, 16], [2]), ([4, 0], [1]), ([-8, 8], [2])],
    ids=["too short", "gap", "backwards", "negative"],
)
def test_b32_offsets_that_do_not_fit_are_refused(
    tmp_path: Path, offsets: list[int], shape: list[int]
) -> None:
    text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(max(offsets[1], 0))
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{SINGLE}: (header|size): expected"):
        open_checkpoint(tmp_path)


def test_b32_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.* found an empty folder"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    for name in ("one", "two"):  # shards whose index did not arrive
        write(tmp_path / f"{name}.safetensors", {name: np.ones(1)})
    with pytest.raises(CheckpointError, match=r"found one\.safetensors, two\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": "b.safetensors"}, r"b\.safetensors: tensors: expected y \(as"),
        ({"x": "a.safetensors"}, r"a\.safetensors: tensors: expected x \(as"),
        ({"x": None}, r"b\.safetensors: tensors: expected only .* found also x"),
        ({"x": "../b.safetensors"}, "shard of tensor x: expected the name of a file"),
        ({"x": 3}, "shard of tensor x: expected the name of a file"),
    ],
    ids=["absent", "elsewhere", "unlisted", "outside", "number"],
)
def test_b32_index_and_shards_must_agree(
    two_shards: Path, changes: dict[str, Any], message: str
) -> None:
    edit_map(two_shards, changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(two_shards)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_b32_index_without_a_map_is_refused(two_shards: Path, text: str) -> None:
    (two_shards / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX}: (index|weight_map): expected"):
        open_checkpoint(two_shards)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(build({"w": ("F8_E4M3", [4], bytes(4), None)}))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"type of tensor w: expected one of .* found F8_E4M3"
    ):
        checkpoint.read("w")
    with pytest.raises(CheckpointError, match="tensor v is missing"):
        checkpoint.read("v")


def test_a_file_can_be_opened_by_its_own_name(tmp_path: Path) -> None:
    write(tmp_path / "drafter.safetensors", {"w": np.ones(2)})
    assert safetensors_io.read_all(tmp_path / "drafter.safetensors").keys() == {"w"}
    assert read_all(tmp_path).keys() == {"w"}  # the only one in the folder
