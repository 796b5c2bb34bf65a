"""Reading and writing one-layer Llama-type EAGLE-3 drafters in the Hugging Face folder layout.

Two dialects are read, told apart by config.json. The HF dialect (SafeAILab, SpecForge, TorchSpec,
NVIDIA ModelOpt) keeps everything at the top level and counts feature layers as "output of layer i",
from 0, as this project does. The speculators dialect (Red Hat, vLLM; `speculators_model_type`)
nests the architecture in `transformer_layer_config` and counts "captured before layer i", one more.
Tensor names do not tell: ModelOpt writes `layers.0.*` with HF configs. Written is SpecForge's form.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from checkpoints import safetensors_io
from checkpoints.errors import CheckpointError
from checkpoints.safetensors_io import SafetensorsCheckpoint
from eaglejax.config import (
    ConfigError,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    default_feature_layers,
)

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_KEY = "eaglejax"  # where write_drafter puts what only this project reads
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "LlamaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
# Keys that would change what the drafter computes, and the one value this drafter has.
LAYER_VALUES = {
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
EAGLE_VALUES = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
# Keys that change nothing here: bookkeeping, training settings, ids that the target decides.
# fmt: off
INERT = frozenset([
    "_name_or_path", "_torchspec_version", "attention_dropout", "auto_map", "bos_token_id",
    "dtype", "embed_requires_grad", "eos_token_id", "initializer_range", "max_window_layers",
    "pad_token_id", "parallel_draft_heads_num_layers", "pretraining_tp", "speculators_config",
    "speculators_version", "torch_dtype", "transformers_version", "use_cache",
    OWN_KEY,
])
# fmt: on
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
    config, tied, warnings = _read_config(path / "config.json", target)
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
    text = json.dumps(_config_json(config, dtype, extra or {}), indent=2) + "\n"
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


def check_fits(config: DrafterConfig, target: TargetConfig, path: str | os.PathLike[str]) -> None:
    """Compares a drafter's architecture with the target's.

    Raises:
        CheckpointError: they do not fit; `path` is what the message names.
    """
    pairs = {
        "vocab_size": (target.vocab_size, config.vocab_size),
        "target_hidden_size": (target.hidden_size, config.target_hidden_size),
    }
    for key, (expected, found) in pairs.items():
        if expected != found:
            raise CheckpointError.mismatch(path, key, f"the target's {expected}", found)
    for layer in config.feature_layers:
        if not 0 <= layer < target.num_layers:
            expected = f"outputs of the target's layers 0 to {target.num_layers - 1}"
            raise CheckpointError.mismatch(
                path, "feature layers", expected, list(config.feature_layers)
            )


# --- config.json ---


@dataclass(frozen=True)
class _Section:
    """An object in config.json; keys are ticked off as they are read, null counts as absent."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""
    read: set[str] = field(default_factory=set)

    def error(self, key: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError.mismatch(self.path, f"{self.prefix}{key}", expected, found)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, of the stated kind, or the default."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        # Exact types: a bool is an int to isinstance.
        if type(value) is not kind:
            raise self.error(key, kind.__name__, repr(value))
        return value

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise self.error(key, kind.__name__, "nothing (key missing)")
        return value

    def section(self, key: str) -> _Section:
        """An object inside, empty where it is absent."""
        return _Section(self.path, self.get(key, dict, {}), f"{self.prefix}{key}.")

    def fix(self, values: Mapping[str, Any]) -> None:
        """Refuses any other values of these keys; absent keys are taken to have them."""
        for key, expected in values.items():
            found = self.get(key, type(expected))
            if found is not None and found != expected:
                raise self.error(key, f"{expected!r} (no other is supported)", repr(found))

    def unread(self) -> list[str]:
        return [f"{self.prefix}{key}" for key in self.values if key not in self.read | INERT]


def _stated(key: str, kind: type, sections: Iterable[_Section]) -> Any:
    """The value that one or more sections state for a key, or None."""
    stated = [(s, value) for s in sections if (value := s.get(key, kind)) is not None]
    for section, value in stated[1:]:
        if value != stated[0][1]:
            first = f"{stated[0][0].prefix}{key} = {stated[0][1]!r}"
            raise section.error(key, f"the same as {first}", repr(value))
    return stated[0][1] if stated else None


def _read_config(file: Path, target: TargetConfig) -> tuple[DrafterConfig, bool, list[str]]:
    """The architecture, whether the head is declared tied, and warnings."""
    top = _Section(file, _load_json(file))
    speculators = "speculators_model_type" in top.values
    layer = top.section("transformer_layer_config") if speculators else top
    eagle = top.section("eagle_config")
    _check_values(top, layer, eagle, speculators)
    vocab, hidden = layer.require("vocab_size", int), layer.require("hidden_size", int)
    heads, both = layer.require("num_attention_heads", int), (top, eagle)
    draft_vocab = _stated("draft_vocab_size", int, both)
    if draft_vocab is None:
        draft_vocab = 32000 if speculators else vocab  # 32000: default of speculators' own class
    max_position = layer.get("max_position_embeddings", int, 2048)
    rope, rope_sections = _rope(layer, max_position)
    target_hidden = _stated("target_hidden_size", int, both)
    layers, warnings = _feature_layers(both, speculators, target, file)
    # use_aux_norm is SGLang's earlier name of fc_norm.
    fc_norm = [_stated(key, bool, both) for key in ("fc_norm", "use_aux_norm")]
    try:
        config = DrafterConfig(
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            hidden_size=hidden,
            # Files of drafters as wide as their target often say nothing; fc's width tells.
            target_hidden_size=target.hidden_size if target_hidden is None else target_hidden,
            num_heads=heads,
            num_kv_heads=layer.get("num_key_value_heads", int, heads),
            head_dim=layer.get("head_dim", int, hidden // max(heads, 1)),
            intermediate_size=layer.require("intermediate_size", int),
            rms_norm_eps=layer.get("rms_norm_eps", float, 1e-6),  # default of HF's LlamaConfig
            rope=rope,
            max_position=max_position,
            feature_layers=layers,
            norm_before_residual=bool(_stated("norm_before_residual", bool, both)),
            norm_before_fc=bool(_stated("norm_before_fc", bool, both)),
            fc_norm=any(fc_norm),
            norm_output=bool(_stated("norm_output", bool, both)),
        )
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    check_fits(config, target, file)
    # What the drafter says of itself counts before what was copied with the layer.
    tied = top.get("tie_word_embeddings", bool, layer.get("tie_word_embeddings", bool, False))
    sections = {s.prefix: s for s in (top, layer, eagle, *rope_sections)}.values()
    unread = sorted(key for section in sections for key in section.unread())
    if unread:
        warnings.append(f"{file}: keys not known here and not used: {', '.join(unread)}")
    return config, tied, warnings


def _load_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except ValueError as error:
        raise CheckpointError.mismatch(file, "text", "JSON", error) from error
    if not isinstance(values, dict):
        raise CheckpointError.mismatch(file, "text", "a JSON object", type(values).__name__)
    return values


def _check_values(top: _Section, layer: _Section, eagle: _Section, speculators: bool) -> None:
    """Refuses known settings that would change results and are not supported."""
    for name in top.get("architectures", list, []):
        if name not in ARCHITECTURES:
            raise top.error("architectures", f"one of {', '.join(ARCHITECTURES)}", name)
    if top.get("quantization_config", dict):
        found = top.values["quantization_config"]
        raise top.error("quantization_config", "none (drafters are read unquantised)", found)
    if speculators:
        top.fix({"speculators_model_type": "eagle3"})
        top.read.add("model_type")  # of the wrapper; the layer has its own
    layer.fix(LAYER_VALUES)
    eagle.fix(EAGLE_VALUES)
    window, in_use = layer.get("sliding_window", int), layer.get("use_sliding_window", bool)
    kinds = layer.get("layer_types", list)
    sliding = window is not None and in_use is not False
    if sliding if kinds is None else any(kind != "full_attention" for kind in kinds):
        raise layer.error("sliding_window", "none in use (full attention)", kinds or window)


def _feature_layers(
    sections: tuple[_Section, _Section], speculators: bool, target: TargetConfig, file: Path
) -> tuple[tuple[int, ...], list[str]]:
    """Feature layers as "output of layer i", and a warning where they are not stated."""
    stated = _stated(LAYER_IDS, list, sections)
    if not stated:  # ModelOpt's default is an empty list
        layers = default_feature_layers(target.num_layers)
        return layers, [f"{file}: no {LAYER_IDS}: taking outputs of layers {list(layers)}"]
    first, last = (1, target.num_layers) if speculators else (0, target.num_layers - 1)
    if not all(type(i) is int and first <= i <= last for i in stated):
        numbering = "captured before the layer" if speculators else "output of the layer"
        raise CheckpointError.mismatch(
            file,
            LAYER_IDS,
            f"layer numbers {first} to {last} ({numbering}; the target has {target.num_layers})",
            stated,
        )
    return tuple(i - first for i in stated), []


def _rope(layer: _Section, max_position: int) -> tuple[RopeConfig, list[_Section]]:
    """Rotary settings: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
    sections = [layer.section(key) for key in ("rope_parameters", "rope_scaling")]
    theta = _stated("rope_theta", float, (layer, *sections))
    theta = RopeConfig.theta if theta is None else theta
    used = [section for section in sections if section.values] or sections[:1]
    stated = [_scaling(section, theta, max_position) for section in used]
    if len(set(stated)) > 1:
        raise layer.error("rope_scaling", "the same as rope_parameters", sections[1].values)
    return stated[0], sections


def _scaling(section: _Section, theta: float, max_position: int) -> RopeConfig:
    """One `rope_scaling` or `rope_parameters` object."""
    kinds = [kind for key in ("rope_type", "type") if (kind := section.get(key, str)) is not None]
    kind = kinds[0] if kinds else "default"
    if kind not in ("default", "linear", "llama3", "yarn") or len(set(kinds)) > 1:
        raise section.error("rope_type", "default, linear, llama3 or yarn", ", ".join(kinds))
    section.fix({"partial_rotary_factor": 1.0})
    nested = [key for key, value in section.values.items() if isinstance(value, dict)]
    if nested:
        raise section.error(nested[0], "a plain value (one setting for all layers)", "an object")
    if kind == "default":
        section.fix({"factor": 1.0})
    values: dict[str, Any] = {}
    if kind in ("linear", "llama3", "yarn"):
        values["factor"] = section.require("factor", float)
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            values[key] = section.require(key, float)
        values["original_max_position"] = section.require("original_max_position_embeddings", int)
    if kind == "yarn":
        if section.get("attention_factor", float) is not None:
            raise section.error("attention_factor", "none", section.values["attention_factor"])
        section.fix({"truncate": True})
        original = section.get("original_max_position_embeddings", int, max_position)
        values["original_max_position"] = original
        values["beta_fast"] = section.get("beta_fast", float, 32.0)
        values["beta_slow"] = section.get("beta_slow", float, 1.0)
        mscales = [section.get(key, float) for key in ("mscale", "mscale_all_dim")]
        if all(mscales):  # as in transformers: one alone changes nothing
            values["mscale"], values["mscale_all_dim"] = mscales
    try:
        return RopeConfig(theta=theta, kind=kind, **values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise CheckpointError(f"{section.path}: {section.prefix}{error}") from error


def _config_json(config: DrafterConfig, dtype: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """config.json in SpecForge's form."""
    c = config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LAYER_VALUES,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position,
        "rope_theta": c.rope.theta,
        "rope_scaling": _scaling_json(c.rope),
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "tie_word_embeddings": False,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_config": {LAYER_IDS: list(c.feature_layers), "use_aux_hidden_state": True},
        "torch_dtype": dtype,
        OWN_KEY: dict(extra),
    }


def _scaling_json(rope: RopeConfig) -> dict[str, Any] | None:
    keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }[rope.kind]
    if not keys:
        return None
    values = {key: getattr(rope, key) for key in keys}
    if rope.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "yarn" and not rope.mscale_all_dim:
        if rope.mscale != 1:
            raise ConfigError(
                f"rope mscale = {rope.mscale}: expected 1 where mscale_all_dim is 0 "
                "(readers of the format ignore one without the other)"
            )
        del values["mscale"], values["mscale_all_dim"]
    return {"rope_type": rope.kind, **values}


# --- tensors ---


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
