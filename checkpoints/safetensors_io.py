"""Reading and writing safetensors without torch: a single file, or shards with an index.

Opening checks every file as a whole (header, offsets, size) against itself and against the index,
so an incomplete download is refused by name before any tensor is used. Tensors come as numpy
arrays of their stored type; bfloat16 is that of ml_dtypes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - importing it gives numpy the bfloat16 that safetensors asks for
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_TYPES = ("F16", "BF16", "F32", "F64")
INTEGER_TYPES = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
NUMPY_TYPES = ("BOOL", *INTEGER_TYPES, *FLOAT_TYPES)


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies and what it is; nothing is read yet."""

    name: str
    file: Path
    dtype: str  # as safetensors writes it: F32, BF16, I64, ...
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """A complete checkpoint: every file was there and whole when it was opened.

    Attributes:
        path: what was opened.
        tensors: all tensors by name.
        metadata: of the headers, merged.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    _handles: Mapping[Path, Any]

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its stored type and shape.

        Raises:
            CheckpointError: there is none of that name, or numpy has no such type.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        tensor = self.tensors[name]
        if tensor.dtype not in NUMPY_TYPES:
            supported = f"one of {', '.join(NUMPY_TYPES)}"
            raise CheckpointError.mismatch(
                tensor.file, f"type of tensor {name}", supported, tensor.dtype
            )
        return self._handles[tensor.file].get_tensor(name)


def open_checkpoint(path: str | os.PathLike[str]) -> SafetensorsCheckpoint:
    """Opens a file, or a folder with `model.safetensors` or an index and its shards.

    Where an index exists it says which files belong to the checkpoint; others are ignored.

    Raises:
        CheckpointError: a file is missing, cut or damaged, or disagrees with the index.
    """
    path = Path(path)
    listed = _listed_tensors(path / INDEX) if (path / INDEX).is_file() else None
    if listed is None:
        files = [_single_file(path)]
    else:
        files = [path / shard for shard in sorted(set(listed.values()))]
    for file in files:  # all of them are there before the first is opened
        if not file.is_file():
            raise CheckpointError.mismatch(path, "checkpoint", f"the file {file.name}", "none")

    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    handles: dict[Path, Any] = {}
    for file in files:
        stored, handles[file] = _open_file(file)
        if listed is not None:
            expected = {name for name, shard in listed.items() if shard == file.name}
            _check_listed(path / INDEX, file, expected, set(stored))
        tensors |= stored
        metadata |= handles[file].metadata() or {}
    return SafetensorsCheckpoint(path, tensors, metadata, handles)


def read_all(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint by name."""
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes one file, whole or not at all: under another name first, then renamed."""
    path = Path(path)
    # safetensors writes the memory behind a view as if it were contiguous (and reads past its end).
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(arrays, unfinished, metadata=dict(metadata or {}))
        unfinished.chmod(mode)  # save_file lets nobody but the owner read it
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _single_file(path: Path) -> Path:
    """The one file of a checkpoint without an index."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    if (path / SINGLE).is_file():
        return path / SINGLE
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if len(found) == 1:
        return path / found[0]
    others = sorted(file.name for file in path.iterdir())
    expected = f"{SINGLE}, or {INDEX} and the shards it lists"
    raise CheckpointError.mismatch(
        path, "checkpoint", expected, ", ".join(found or others) or "an empty folder"
    )


def _listed_tensors(index: Path) -> dict[str, str]:
    """The index's map of tensor names to shards."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError.mismatch(
            index, "index", "JSON with a weight_map", f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError.mismatch(index, "weight_map", "tensor names and their shards", listed)
    for name, shard in listed.items():
        # A path would lead out of the checkpoint's folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError.mismatch(
                index, f"shard of tensor {name}", "the name of a file in the same folder", shard
            )
    return listed


def _check_listed(index: Path, file: Path, listed: set[str], stored: set[str]) -> None:
    """A shard holds the tensors that the index says it holds, neither fewer nor more."""
    if listed - stored:
        missing = ", ".join(sorted(listed - stored))
        raise CheckpointError.mismatch(
            file, "tensors", f"{missing} (as {index.name} says)", "a shard without"
        )
    if stored - listed:
        more = ", ".join(sorted(stored - listed))
        raise CheckpointError.mismatch(
            file, "tensors", f"only what {index.name} lists for it", f"also {more}"
        )


def _open_file(file: Path) -> tuple[dict[str, Tensor], Any]:
    """What the header says and the open file, once it is known to hold all of it."""
    size = file.stat().st_size
    if size < 8:
        raise CheckpointError.mismatch(file, "size", "at least 8 bytes", f"{size} bytes")
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise CheckpointError.mismatch(
                file, "header length", f"at most {size - 8}, the rest of the file", length
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
        tensors = {
            name: Tensor(name, file, str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError.mismatch(
            file, "header", "safetensors' JSON", f"{type(error).__name__}: {error}"
        ) from error
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise CheckpointError.mismatch(
            file, "size", f"{whole} bytes, as its header says", f"{size} bytes"
        )
    try:
        # Refuses what is left: overlaps, gaps, offsets that do not fit the shapes.
        return tensors, safe_open(file, framework="np")
    except SafetensorError as error:
        raise CheckpointError.mismatch(
            file, "header", "offsets that fit the data", error
        ) from error
