"""A target's configuration as a Hugging Face folder: what tools ask for beside the weights.

Converters of other engines (llama.cpp's, for a drafter) read the target's `config.json` and its
tokenizer from such a folder, while the default model exists as a GGUF file only.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFFile
from checkpoints.gguf_target import target_config
from checkpoints.tokenizer import Tokenizer
from eaglejax.config import TargetConfig

Files = dict[str, dict[str, Any]]

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"


def write_config_folder(
    source: str | os.PathLike[str], folder: str | os.PathLike[str], *, force: bool = False
) -> list[Path]:
    """Writes config.json, tokenizer.json and tokenizer_config.json of a GGUF file; no weights.

    A new folder appears complete; in an existing one each file is replaced whole.

    Args:
        source: the GGUF file.
        folder: where to; it must not exist, or be empty.
        force: write into a folder that holds something; other files in it stay.

    Returns:
        The files written.

    Raises:
        CheckpointError: the source cannot be used, or the folder must not be written to.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError.mismatch(folder, "path", "a folder, or nothing yet", "a file")
    if folder.is_dir() and not force and any(folder.iterdir()):
        some = ", ".join(sorted(file.name for file in folder.iterdir())[:3])
        raise CheckpointError.mismatch(folder, "folder", "an empty one (or --force)", some)
    files = config_files(source)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        for name, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (staging / name).write_text(text, encoding="utf-8")
        if folder.exists():
            for name in files:
                os.replace(staging / name, folder / name)
        else:
            staging.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / name for name in files]


def config_files(source: str | os.PathLike[str]) -> Files:
    """Contents of the three files, by name, as JSON values.

    Raises:
        CheckpointError: the GGUF file is damaged or of a kind that is not supported.
    """
    path = Path(source)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a directory; expected a .gguf file")
    file = GGUFFile(path)
    metadata = file.metadata()
    config = target_config(metadata, path, tied="output.weight" not in file.by_name)
    tokenizer = Tokenizer.from_gguf(metadata, path)
    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("unk", "unknown"), ("pad", "padding"))
    }
    named = {
        "bos_token": tokenizer.bos_token or None,
        "eos_token": tokenizer.eos_token,
        **{f"{name}_token": _text(tokenizer, id_) for name, id_ in ids.items()},
    }
    return {
        CONFIG: _model_config(config, tokenizer, ids["pad"]),
        TOKENIZER: tokenizer.to_json(),
        TOKENIZER_CONFIG: {
            # Taken by name, this class reads tokenizer.json as it is; GPT2Tokenizer would put its
            # own way of cutting text in place of the one that the file states.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: text for name, text in named.items() if text is not None},
            "add_bos_token": tokenizer.add_bos,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position,
            **_template(metadata),
        },
    }


def _text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_bytes(token_id).decode()


def _template(metadata: dict[str, Any]) -> dict[str, str]:
    source = metadata.get("tokenizer.chat_template")
    return {} if source is None else {"chat_template": source}


def _model_config(c: TargetConfig, tokenizer: Tokenizer, pad_id: int | None) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM."""
    eos = sorted(tokenizer.eos_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        # GGUF stores float32: the shortest decimal that gives the same one is what was meant.
        "rms_norm_eps": float(str(np.float32(c.rms_norm_eps))),
        "max_position_embeddings": c.max_position,
        "rope_theta": float(str(np.float32(c.rope.theta))),
        "rope_scaling": (
            {"rope_type": "linear", "factor": c.rope.factor} if c.rope.kind == "linear" else None
        ),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": pad_id,
        "torch_dtype": "float32",
    }
