"""Reading GGUF files through the `gguf` package, with every access checked and named.

Quantised blocks never pass through floats: nibbles, scales and minima are only rearranged, from
`[out, in]` rows of blocks to the engine's `[in, out]`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Type

from checkpoints.errors import CheckpointError

BLOCK = 32
FLOAT_TYPES = {Type.F32: np.float32, Type.F16: np.float16, Type.BF16: ml_dtypes.bfloat16}
BLOCK_TYPES = (Type.Q4_0, Type.Q4_1, Type.Q8_0)


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
        levels = self.levels.astype(np.float32) - zero
        values = levels * self.scale.repeat(BLOCK, axis=0)
        return values if self.minimum is None else values + self.minimum.repeat(BLOCK, axis=0)


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
    """A GGUF file whose every read is checked against its size, with errors that name the tensor."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reading = "header"
        try:
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

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path}: the file is cut: {self.reading} ends at byte {end}, "
                f"the file has {len(self.data)}"
            )
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> int:
        self.reading = "metadata"
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[gguf.ReaderField]]:
        self.reading = "tensor list"
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        counts = Counter(field.name for field in fields)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise CheckpointError(f"{self.path}: tensors stored twice: {', '.join(twice)}")
        tensors = []
        for field in fields:
            self.reading = f"tensor {field.name}"
            super()._build_tensors(start_offs, [field])
            tensors += self.tensors
        self.tensors = tensors

    def metadata(self) -> dict[str, Any]:
        """All metadata as Python values."""
        return {name: field.contents() for name, field in self.fields.items()}

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
        supported = [kind.name for kind in (*FLOAT_TYPES, *BLOCK_TYPES)]
        raise CheckpointError(
            f"{self.path}: tensor {name}: type {tensor.tensor_type.name} is not supported, "
            f"expected one of {', '.join(supported)}"
        )
