"""Everything a target's checkpoint holds, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.chat_template import ChatTemplate
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFFile
from checkpoints.gguf_target import Weights, target_config, target_params
from checkpoints.tokenizer import Tokenizer
from eaglejax.config import TargetConfig


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target as read.

    Attributes:
        path: the file.
        config: architecture.
        params: variables of `eaglejax.models.target.Target`.
        tokenizer: text to ids and back.
        template: chat template, if the checkpoint has one.
    """

    path: Path
    config: TargetConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    template: ChatTemplate | None


def read_target(path: str | Path, *, weights: Weights = "float32") -> TargetCheckpoint:
    """Reads a GGUF file.

    Args:
        path: the file.
        weights: "float32" dequantises once; "int4" keeps quantised tensors as QuantTensors.

    Raises:
        CheckpointError: the file is damaged, incomplete or of a kind that is not supported.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a directory; expected a .gguf file")
    file = GGUFFile(path)
    metadata = file.metadata()
    config = target_config(metadata, path, tied="output.weight" not in file.by_name)
    tokenizer = Tokenizer.from_gguf(metadata, path)
    if tokenizer.vocab_size != config.vocab_size:  # padding rows would have to be masked
        raise CheckpointError.mismatch(
            path, "tokenizer.ggml.tokens", f"{config.vocab_size} tokens", tokenizer.vocab_size
        )
    source = metadata.get("tokenizer.chat_template")
    template = None
    if source is not None:
        template = ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token, str(path))
    return TargetCheckpoint(path, config, target_params(file, config, weights), tokenizer, template)
