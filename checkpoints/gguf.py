"""Reading GGUF files through the `gguf` package, with every access checked and named.

Quantised blocks never pass through floats: nibbles, scales and minima are only rearranged, from
`[out, in]` rows of blocks to the engine's `[in, out]`.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as ValueType

from checkpoints.errors import CheckpointError

BLOCK = 32
FLOAT_TYPES = {Type.F32: np.float32, Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}
BLOCK_TYPES = (Type.Q4_0, Type.Q4_1, Type.Q8_0)
SUPPORTED = ", ".join(kind.name for kind in (*FLOAT_TYPES, *BLOCK_TYPES))

Number = int | np.integer  # gguf-py passes on the numpy scalars that it reads


@dataclass(frozen=True)
class HostQuant:
    """A quantised matrix in numpy, `[K, N]` oriented, levels not yet packed."""

    levels: np.ndarray  # uint8 0..15 or int8, [K, N]
    scale: np.ndarray  # float32 [K/32, N]
    minimum: np.ndarray | None
    bits: int

    def rows(self, order: np.ndarray) -> HostQuant:
        """Reorders the outputs."""
        minimum = None if self.minimum is None else self.minimum[:, order]
        return HostQuant(self.levels[:, order], self.scale[:, order], minimum, self.bits)

    def to_float(self) -> np.ndarray:
        """float32 `[K, N]`: `(q - 8) * scale`, `q * scale` (INT8) or `q * scale + minimum`."""
        zero = 8 if self.bits == 4 and self.minimum is None else 0
        values = self.levels.astype(np.float32).reshape(-1, BLOCK, self.levels.shape[1])
        values -= zero
        values *= self.scale[:, None]
        if self.minimum is not None:
            values += self.minimum[:, None]
        return values.reshape(self.levels.shape)


def decode_blocks(data: np.ndarray, kind: Type) -> HostQuant:
    """Blocks of 32 inputs (ggml layouts Q4_0, Q4_1, Q8_0) `[out, bytes]` to `[in, out]` levels."""
    out_features = data.shape[0]
    size = {Type.Q4_0: 18, Type.Q4_1: 20, Type.Q8_0: 34}[kind]
    blocks = data.reshape(out_features, -1, size)
    scale = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    if kind is Type.Q8_0:
        levels = blocks[..., 2:].view(np.int8).reshape(out_features, -1)
        return HostQuant(np.ascontiguousarray(levels.T), scale.T.copy(), None, 8)
    start = 2 if kind is Type.Q4_0 else 4
    nibbles = blocks[..., start:]
    # Element i < 16 is the low nibble of byte i, element 16 + i the high one.
    levels = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(out_features, -1)
    minimum = None
    if kind is Type.Q4_1:
        minimum = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32).T.copy()
    return HostQuant(np.ascontiguousarray(levels.T), scale.T.copy(), minimum, 4)


def rotary_order(heads: int, head_dim: int) -> np.ndarray:
    """Row order that undoes llama.cpp's interleaved-pair permutation of q and k."""
    stored = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)


class GGUFFile(gguf.GGUFReader):
    """A GGUF file whose every read is checked against its size; errors name the tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reading = "header"
        try:
            with self.path.open("rb") as stream:
                magic = stream.read(4)
            if magic != b"GGUF":
                raise CheckpointError.mismatch(self.path, "first bytes", b"GGUF", magic)
            super().__init__(self.path)
        except CheckpointError:
            raise
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no such file") from None
        except (ValueError, KeyError, IndexError, OSError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path}: not a readable GGUF file, {self.reading}: {error}"
            ) from error
        self.by_name = {tensor.name: tensor for tensor in self.tensors}

    def _get(
        self, offset: Number, dtype: Any, count: Number = 1, override_order: Any = None
    ) -> Any:
        self._check_end(int(offset) + np.dtype(dtype).itemsize * int(count))
        return super()._get(int(offset), dtype, int(count), override_order)

    def _check_end(self, end: int) -> None:
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path}: the file is cut: {self.reading} ends at byte {end}, "
                f"the file has {len(self.data)}"
            )

    def _build_fields(self, offs: Number, count: Number) -> int:
        if self.byte_order == "S":
            # Blocks are taken apart as this machine's bytes: swapped ones would be noise.
            raise CheckpointError.mismatch(
                self.path, "byte order", sys.byteorder, self.endianess.name.lower()
            )
        self.reading = "metadata"
        return super()._build_fields(int(offs), int(count))

    def _get_field_parts(
        self, orig_offs: Number, raw_type: Number
    ) -> tuple[int, list[Any], list[int], list[ValueType]]:
        """As gguf-py, but arrays in one go: it makes five views per item, 4 s for a vocabulary."""
        offset = int(orig_offs)
        if raw_type != ValueType.ARRAY:
            return super()._get_field_parts(offset, int(raw_type))
        head = [self._get(offset, np.uint32), self._get(offset + 4, np.uint64)]
        kind, count, start = ValueType(int(head[0][0])), int(head[1][0]), offset + 12
        if kind in self.gguf_scalar_to_np:
            items = [self._get(start, self.gguf_scalar_to_np[kind], count)]
            end = start + items[0].nbytes
        elif kind == ValueType.STRING:
            items, end = self._strings(start, count)
        else:
            return super()._get_field_parts(offset, int(raw_type))
        places = [len(head) + i for i in range(len(items))]
        return end - offset, head + items, places, [ValueType.ARRAY, kind]

    def _strings(self, offset: int, count: int) -> tuple[list[np.ndarray], int]:
        """The bytes of strings in a row, each after its length, and where they end."""
        data = np.asarray(self.data)  # slicing a memmap costs ten times as much
        strings = []
        for _ in range(count):
            self._check_end(offset + 8)
            start = offset + 8
            offset = start + int.from_bytes(data[offset:start].tobytes(), sys.byteorder)
            self._check_end(offset)
            strings.append(data[start:offset])
        return strings, offset

    def _build_tensor_info(self, offs: Number, count: Number) -> tuple[int, list[gguf.ReaderField]]:
        self.reading = "tensor list"
        return super()._build_tensor_info(int(offs), int(count))

    def _build_tensors(self, start_offs: Number, fields: list[gguf.ReaderField]) -> None:
        counts = Counter(field.name for field in fields)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise CheckpointError(f"{self.path}: tensors stored twice: {', '.join(twice)}")
        tensors = []
        for field in fields:
            self.reading = f"tensor {field.name}"
            kind = int(field.parts[4][0])
            if kind not in {known.value for known in Type}:
                raise CheckpointError.mismatch(
                    self.path, f"type of {self.reading}", f"one of {SUPPORTED}", kind
                )
            super()._build_tensors(int(start_offs), [field])
            tensors += self.tensors
        self.tensors = tensors

    def metadata(self) -> dict[str, Any]:
        """All metadata as Python values.

        Raises:
            CheckpointError: a text is not UTF-8.
        """
        values = {}
        for name, field in self.fields.items():
            try:
                values[name] = field.contents()
            except UnicodeDecodeError as error:
                raise CheckpointError.mismatch(
                    self.path, f"metadata key {name}", "UTF-8", error
                ) from error
        return values

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray | HostQuant:
        """One tensor: float32 in its stored orientation, or a quantised matrix turned to [in, out].

        Raises:
            CheckpointError: the tensor is missing, of another shape, or of a type not supported.
        """
        if name not in self.by_name:
            raise CheckpointError(
                f"{self.path}: tensor {name} is missing (expected shape {list(shape)})"
            )
        tensor = self.by_name[name]
        found = tuple(int(d) for d in reversed(tensor.shape))
        if found != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name}: expected shape {list(shape)}, found {list(found)}"
            )
        if tensor.tensor_type in FLOAT_TYPES:
            kind = FLOAT_TYPES[tensor.tensor_type]
            return tensor.data.view(kind).reshape(shape).astype(np.float32)
        if tensor.tensor_type in BLOCK_TYPES and len(shape) == 2:
            return decode_blocks(tensor.data, tensor.tensor_type)
        raise CheckpointError(
            f"{self.path}: tensor {name}: type {tensor.tensor_type.name} is not supported, "
            f"expected one of {SUPPORTED}"
        )
