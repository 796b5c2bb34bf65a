"""Reading and writing one-layer Llama-type EAGLE-3 drafters in the Hugging Face folder layout.

config.json is the matter of `eagle3_config`. Tensor names do not tell the dialect: ModelOpt writes
`layers.0.*` with HF configs. Written are SpecForge's names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from checkpoints import safetensors_io
from checkpoints.eagle3_config import check_fits, config_json, read_config
from checkpoints.errors import CheckpointError
from checkpoints.safetensors_io import SafetensorsCheckpoint
from eaglejax.config import DrafterConfig, TargetConfig

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
INERT_TENSORS = (  # recomputed, or copies of the target's
    "layers.0.self_attn.rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter that fits its target.

    Attributes:
        config: its architecture.
        params: the `params` collection of `Drafter`, float32.
        target_ids: int32 `[v]`, the target id of each draft id.
        embedding: its own token embedding `[V, D]`, or None where it uses the target's.
        warnings: what the reader of a log should know.
    """

    config: DrafterConfig
    params: dict[str, Any]
    target_ids: Int[np.ndarray, " v"]
    embedding: Float[Array, "V D"] | None
    warnings: tuple[str, ...]

    def variables(self, target_embedding: Any) -> dict[str, Any]:
        """The collections of `Drafter`, on the target's embedding where the drafter has none."""
        embedding = target_embedding if self.embedding is None else self.embedding
        vocab = {"embedding": embedding, "target_ids": jnp.asarray(self.target_ids)}
        return {"params": self.params, "vocab": vocab}


def read_drafter(path: str | os.PathLike[str], target: TargetConfig) -> DrafterCheckpoint:
    """Reads a drafter folder and checks that it fits the target, before any weight is used.

    Where config.json names no feature layers, `default_feature_layers` of the target are taken,
    with a warning. A stored embedding is used, since it may have been trained.

    Raises:
        CheckpointError: a file, tensor or setting that is missing, damaged, unsupported or does
            not fit; named, with what was expected and found.
    """
    path = Path(path)
    config, tied, warnings = read_config(path / "config.json", target)
    file = safetensors_io.open_checkpoint(path)
    names = _stored_names(file)
    _check_tensors(file, names, config, tied)
    target_ids = _target_ids(file, names, config)

    def read(name: str) -> np.ndarray:
        return file.read(names[name]).astype(np.float32)

    embedding = jnp.asarray(read(EMBEDDING)) if EMBEDDING in names else None
    params: dict[str, Any] = {}
    for name, (place, _) in _tensor_table(config).items():
        if name != HEAD:
            _put(params, place, jnp.asarray(read(name).T[None]))
    own = jnp.asarray(read(HEAD)) if HEAD in names else None
    head, warning = _choose_head(own, embedding, target_ids, config, tied)
    _put(params, ("head", "kernel"), head.T[None])
    warnings += [f"{path}: {warning}"] if warning else []
    return DrafterCheckpoint(config, params, target_ids, embedding, tuple(warnings))


def write_drafter(
    path: str | os.PathLike[str],
    config: DrafterConfig,
    params: Mapping[str, Any],
    target_ids: Int[np.ndarray, " v"],
    *,
    target_config: TargetConfig,
    embedding: Any = None,
    extra: Mapping[str, Any] | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> None:
    """Writes a drafter folder that SGLang, SpecForge and `read_drafter` load.

    A new folder appears complete; in an existing one each of the two files is replaced whole.

    Args:
        path: the folder.
        config: architecture.
        params: the `params` collection of `Drafter`.
        target_ids: target id of each draft id, ascending; stored as int64 offsets, never cast.
        target_config: the target that the drafter was made for.
        embedding: own token embedding `[V, D]`; needed where the target's has another width.
        extra: what else to record, as JSON values; goes under the key `eaglejax`.
        dtype: of the stored weights.

    Raises:
        CheckpointError: the parts do not fit each other or the target.
    """
    path = Path(path).resolve()
    check_fits(config, target_config, path)
    tensors = _weights(path, config, params, DTYPES[dtype])
    if embedding is not None:
        expected = (config.vocab_size, config.hidden_size)
        tensors[EMBEDDING] = _cast(path, EMBEDDING, embedding, expected, DTYPES[dtype])
    elif config.hidden_size != target_config.hidden_size:
        raise _missing_embedding(path, config)
    tensors |= _vocabulary_map(path, config, target_ids)
    text = json.dumps(config_json(config, dtype, extra or {}), indent=2) + "\n"
    if path.exists() and not path.is_dir():
        raise CheckpointError.mismatch(path, "path", "a folder, or nothing yet", "a file")
    if (path / safetensors_io.INDEX).exists():  # readers would go on using the old shards
        raise CheckpointError.mismatch(
            path, "folder", "no sharded checkpoint", safetensors_io.INDEX
        )

    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        staging.mkdir(parents=True)
        safetensors_io.write(staging / safetensors_io.SINGLE, tensors, {"format": "pt"})
        (staging / "config.json").write_text(text, encoding="utf-8")
        if path.exists():
            for name in (safetensors_io.SINGLE, "config.json"):
                os.replace(staging / name, path / name)
        else:
            staging.rename(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _tensor_table(c: DrafterConfig) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Stored name -> (place in the parameter tree, stored shape); matrices are `[out, in]`."""
    width, heads, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention, mlp = "layers.0.self_attn.", "layers.0.mlp."
    table: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "fc.weight": (("fc", "kernel"), (width, c.feature_size)),
        f"{attention}q_proj.weight": (("attention", "q", "kernel"), (heads, 2 * width)),
        f"{attention}k_proj.weight": (("attention", "k", "kernel"), (kv, 2 * width)),
        f"{attention}v_proj.weight": (("attention", "v", "kernel"), (kv, 2 * width)),
        f"{attention}o_proj.weight": (("attention", "o", "kernel"), (width, heads)),
        f"{mlp}gate_proj.weight": (("mlp", "gate", "kernel"), (c.intermediate_size, width)),
        f"{mlp}up_proj.weight": (("mlp", "up", "kernel"), (c.intermediate_size, width)),
        f"{mlp}down_proj.weight": (("mlp", "down", "kernel"), (width, c.intermediate_size)),
        "layers.0.input_layernorm.weight": (("embedding_norm", "scale"), (width,)),
        "layers.0.hidden_norm.weight": (("hidden_norm", "scale"), (width,)),
        "layers.0.post_attention_layernorm.weight": (("mlp_norm", "scale"), (width,)),
        "norm.weight": (("norm", "scale"), (width,)),
        HEAD: (("head", "kernel"), (c.draft_vocab_size, width)),
    }
    if c.norm_before_fc:
        table["input_norm.weight"] = (("input_norm", "scale"), (c.feature_size,))
    if c.fc_norm:
        for i in range(len(c.feature_layers)):
            place = (f"fc_norms_{i}", "scale")
            table[f"fc_norm.{i}.weight"] = (place, (c.target_hidden_size,))
    return table


def _put(tree: dict[str, Any], place: tuple[str, ...], leaf: jax.Array) -> None:
    for name in place[:-1]:
        tree = tree.setdefault(name, {})
    tree[place[-1]] = leaf


def _stored_names(file: SafetensorsCheckpoint) -> dict[str, str]:
    """Name of the table -> name in the file."""
    names: dict[str, str] = {}
    for stored in file.tensors:
        name = stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if name in names:
            raise CheckpointError.mismatch(
                file.path, "tensors", f"one {name}", f"{names[name]} and {stored}"
            )
        names[name] = stored
    return names


def _missing_embedding(path: Path, config: DrafterConfig) -> CheckpointError:
    shape = [config.vocab_size, config.hidden_size]
    expected = f"{shape}, since the target's embedding is {config.target_hidden_size} wide"
    return CheckpointError.mismatch(path, f"tensor {EMBEDDING}", expected, "no such tensor")


def _check_tensors(
    file: SafetensorsCheckpoint, names: Mapping[str, str], config: DrafterConfig, tied: bool
) -> None:
    """Every tensor is there, of the right shape and type, and none is left over."""
    table = {name: shape for name, (_, shape) in _tensor_table(config).items()}
    required = set(table)
    if tied and HEAD not in names and EMBEDDING in names:
        if config.draft_vocab_size != config.vocab_size:
            expected = (
                f"{list(table[HEAD])}, since the draft vocabulary is smaller than the embedding "
                "that tie_word_embeddings would share"
            )
            raise CheckpointError.mismatch(file.path, f"tensor {HEAD}", expected, "no such tensor")
        required.remove(HEAD)
    table[EMBEDDING] = (config.vocab_size, config.hidden_size)
    table["d2t"], table["t2d"] = (config.draft_vocab_size,), (config.vocab_size,)
    unknown = sorted(names[name] for name in set(names) - {*table, *INERT_TENSORS})
    if unknown:
        raise CheckpointError.mismatch(
            file.path,
            "tensors",
            "those of a one-layer EAGLE-3 drafter with these settings",
            f"also {', '.join(unknown)}",
        )
    for name, shape in table.items():
        if name in required and name not in names:
            raise CheckpointError.mismatch(
                file.path, f"tensor {name}", list(shape), "no such tensor"
            )
    if EMBEDDING not in names and config.hidden_size != config.target_hidden_size:
        raise _missing_embedding(file.path, config)
    for name, shape in table.items():
        if name in names:
            _check_tensor(file.tensors[names[name]], name, shape, config)


def _check_tensor(
    tensor: safetensors_io.Tensor, name: str, shape: tuple[int, ...], config: DrafterConfig
) -> None:
    notes = {
        "fc.weight": f" ({len(config.feature_layers)} features of {config.target_hidden_size})",
        HEAD: " (draft_vocab_size rows)",
        "d2t": " (draft_vocab_size entries)",
        "t2d": " (vocab_size entries)",
    }
    if tensor.shape != shape:
        expected = f"{list(shape)}{notes.get(name, '')}"
        raise CheckpointError.mismatch(
            tensor.file, f"shape of tensor {tensor.name}", expected, list(tensor.shape)
        )
    # Ids that once passed through a float type are not the same ids any more.
    types = {
        "d2t": safetensors_io.INTEGER_TYPES,
        "t2d": ("BOOL", *safetensors_io.INTEGER_TYPES),
    }.get(name, safetensors_io.FLOAT_TYPES)
    if tensor.dtype not in types:
        raise CheckpointError.mismatch(
            tensor.file, f"type of tensor {tensor.name}", f"one of {', '.join(types)}", tensor.dtype
        )


def _target_ids(
    file: SafetensorsCheckpoint, names: Mapping[str, str], config: DrafterConfig
) -> np.ndarray:
    """Target id of each draft id, int32: draft id plus the offset that d2t holds."""
    draft_ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    if "d2t" in names:
        ids = draft_ids + file.read(names["d2t"]).astype(np.int64)
    elif config.draft_vocab_size == config.vocab_size:
        ids = draft_ids
    else:
        raise CheckpointError.mismatch(
            file.path,
            "tensor d2t",
            f"[{config.draft_vocab_size}] offsets, since the draft vocabulary is smaller than "
            f"the target's {config.vocab_size}",
            "no such tensor",
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if wrong.size:
        expected = f"target ids 0 to {config.vocab_size - 1} (draft id + offset)"
        found = f"{ids[wrong[0]]} (offset {ids[wrong[0]] - wrong[0]})"
        raise CheckpointError.mismatch(file.path, f"d2t[{wrong[0]}]", expected, found)
    first_of = np.unique(ids, return_index=True)[1]
    if first_of.size < ids.size:
        again = np.setdiff1d(draft_ids, first_of)[0]
        raise CheckpointError.mismatch(
            file.path, f"d2t[{again}]", "distinct target ids", f"{ids[again]} twice"
        )
    if "t2d" in names:
        kept = np.flatnonzero(file.read(names["t2d"]))
        unlike = np.setxor1d(kept, ids)
        if unlike.size:
            raise CheckpointError.mismatch(
                file.path,
                "tensor t2d",
                f"true for exactly the {ids.size} target ids that d2t gives",
                f"{kept.size} true, first difference at id {unlike[0]}",
            )
    return ids.astype(np.int32)


def _choose_head(
    own: jax.Array | None,
    embedding: jax.Array | None,
    target_ids: np.ndarray,
    config: DrafterConfig,
    tied: bool,
) -> tuple[jax.Array, str | None]:
    """Rows of the head, and a warning where tie_word_embeddings and the tensors disagree."""
    if own is not None and not tied:
        return own, None
    if own is not None and (embedding is None or config.draft_vocab_size < config.vocab_size):
        return own, f"tie_word_embeddings is true, but {HEAD} is the drafter's own: using it"
    assert embedding is not None  # _check_tensors
    shared = embedding[target_ids]
    if own is not None and not jnp.array_equal(own, shared):
        return shared, f"tie_word_embeddings is true: {EMBEDDING} is the head, {HEAD} differs"
    return shared, None


def _cast(path: Path, name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    array = np.asarray(array, np.float32)
    if array.shape != shape:
        raise CheckpointError.mismatch(path, f"tensor {name}", list(shape), list(array.shape))
    return array.astype(dtype)


def _weights(
    path: Path, config: DrafterConfig, params: Mapping[str, Any], dtype: Any
) -> dict[str, np.ndarray]:
    """The parameter tree as stored tensors, each leaf exactly once."""
    leaves = {
        tuple(key.key for key in keys): leaf  # type: ignore[union-attr]
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    tensors: dict[str, np.ndarray] = {}
    for name, (place, shape) in _tensor_table(config).items():
        if place not in leaves:
            raise CheckpointError.mismatch(path, "parameters", "/".join(place), "no such leaf")
        stored = name.replace("layers.0.", "midlayer.", 1)
        leaf = np.asarray(leaves.pop(place), np.float32)
        tensors[stored] = _cast(path, stored, leaf[0].T, shape, dtype)
    if leaves:
        more = ", ".join("/".join(place) for place in leaves)
        raise CheckpointError.mismatch(path, "parameters", "those of the configuration", more)
    return tensors


def _vocabulary_map(
    path: Path, config: DrafterConfig, target_ids: np.ndarray
) -> dict[str, np.ndarray]:
    """d2t (int64 offsets) and t2d (bool), which no cast of the weights touches."""
    ids = np.asarray(target_ids).astype(np.int64)
    ascending = ids.shape == (config.draft_vocab_size,) and bool(np.all(np.diff(ids) > 0))
    if not ascending or ids[0] < 0 or ids[-1] >= config.vocab_size:
        expected = f"{config.draft_vocab_size} ascending ids from 0 to {config.vocab_size - 1}"
        raise CheckpointError.mismatch(path, "target_ids", expected, ids.tolist())
    kept = np.zeros(config.vocab_size, np.bool_)
    kept[ids] = True
    return {"d2t": ids - np.arange(ids.size, dtype=np.int64), "t2d": kept}
