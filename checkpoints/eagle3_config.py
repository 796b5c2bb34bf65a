"""config.json of EAGLE-3 drafters, both ways.

Two dialects are read, told apart by their keys. The HF dialect (SafeAILab, SpecForge, TorchSpec,
NVIDIA ModelOpt) keeps everything at the top level and counts feature layers as "output of layer i",
from 0, as this project does. The speculators dialect (Red Hat, vLLM; `speculators_model_type`)
nests the architecture in `transformer_layer_config` and counts "captured before layer i", one more.
Written is SpecForge's form.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.json_section import Section, load_json, stated_once
from eaglejax.config import (
    ConfigError,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    default_feature_layers,
)

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_KEY = "eaglejax"  # where write_drafter puts what only this project reads

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


def read_config(file: Path, target: TargetConfig) -> tuple[DrafterConfig, bool, list[str]]:
    """The architecture, whether the head is declared tied, and warnings."""
    top = Section(file, load_json(file))
    speculators = "speculators_model_type" in top.values
    layer = top.section("transformer_layer_config") if speculators else top
    eagle = top.section("eagle_config")
    _check_values(top, layer, eagle, speculators)
    vocab, hidden = layer.require("vocab_size", int), layer.require("hidden_size", int)
    heads, both = layer.require("num_attention_heads", int), (top, eagle)
    draft_vocab = stated_once("draft_vocab_size", int, both)
    if draft_vocab is None:
        draft_vocab = 32000 if speculators else vocab  # 32000: default of speculators' own class
    max_position = layer.get("max_position_embeddings", int, 2048)
    rope, rope_sections = _rope(layer, max_position)
    target_hidden = stated_once("target_hidden_size", int, both)
    layers, warnings = _feature_layers(both, speculators, target, file)
    # use_aux_norm is SGLang's earlier name of fc_norm.
    fc_norm = [stated_once(key, bool, both) for key in ("fc_norm", "use_aux_norm")]
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
            norm_before_residual=bool(stated_once("norm_before_residual", bool, both)),
            norm_before_fc=bool(stated_once("norm_before_fc", bool, both)),
            fc_norm=any(fc_norm),
            norm_output=bool(stated_once("norm_output", bool, both)),
        )
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    check_fits(config, target, file)
    # What the drafter says of itself counts before what was copied with the layer.
    tied = top.get("tie_word_embeddings", bool, layer.get("tie_word_embeddings", bool, False))
    sections = {s.prefix: s for s in (top, layer, eagle, *rope_sections)}.values()
    unread = sorted(key for section in sections for key in section.unread())
    unread = [key for key in unread if key.rpartition(".")[2] not in INERT]
    if unread:
        warnings.append(f"{file}: keys not known here and not used: {', '.join(unread)}")
    return config, tied, warnings


def _check_values(top: Section, layer: Section, eagle: Section, speculators: bool) -> None:
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
    sections: tuple[Section, Section], speculators: bool, target: TargetConfig, file: Path
) -> tuple[tuple[int, ...], list[str]]:
    """Feature layers as "output of layer i", and a warning where they are not stated."""
    stated = stated_once(LAYER_IDS, list, sections)
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


def _rope(layer: Section, max_position: int) -> tuple[RopeConfig, list[Section]]:
    """Rotary settings: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
    sections = [layer.section(key) for key in ("rope_parameters", "rope_scaling")]
    theta = stated_once("rope_theta", float, (layer, *sections))
    theta = RopeConfig.theta if theta is None else theta
    used = [section for section in sections if section.values] or sections[:1]
    stated = [_scaling(section, theta, max_position) for section in used]
    if len(set(stated)) > 1:
        raise layer.error("rope_scaling", "the same as rope_parameters", sections[1].values)
    return stated[0], sections


def _scaling(section: Section, theta: float, max_position: int) -> RopeConfig:
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


def config_json(config: DrafterConfig, dtype: str, extra: Mapping[str, Any]) -> dict[str, Any]:
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
