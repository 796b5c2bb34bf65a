"""A Llama-architecture GGUF file as a target: configuration, parameters, tokenizer, template."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf import BLOCK, GGUFFile, HostQuant, rotary_order
from eaglejax.config import ConfigError, RopeConfig, TargetConfig
from eaglejax.quant import QuantTensor

log = logging.getLogger("eaglejax")
Weights = Literal["float32", "int4"]

# Keys of a llama file that `target_config` reads; what other families or options would add changes
# results and is refused; bookkeeping is ignored; everything else is listed in one warning.
READ_KEYS = frozenset(
    f"llama.{name}"
    for name in [
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
    ]
)
REFUSED_KEYS = frozenset(
    f"llama.{name}"
    for name in [
        "expert_count",
        "expert_used_count",
        "attention.sliding_window",
        "attention.scale",
        "attention.clamp_kqv",
        "attention.max_alibi_bias",
        "logit_scale",
        "embedding_scale",
        "residual_scale",
        "use_parallel_residual",
        "rope.scaling.attn_factor",
        "rope.scale_linear",
    ]
)
INERT_PREFIXES = ("GGUF.", "general.", "quantize.", "tokenizer.")  # tokenizer.*: the tokenizer's
INERT_KEYS = frozenset({"llama.rope.scaling.original_context_length"})


def check_keys(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuses keys that would change results, and lists the unknown ones in one warning.

    Raises:
        CheckpointError: a setting that is not supported is in use.
    """
    for key in sorted(REFUSED_KEYS & metadata.keys()):
        if metadata[key]:
            raise CheckpointError.mismatch(
                path, key, "none or 0: it is not supported", metadata[key]
            )
    known = READ_KEYS | REFUSED_KEYS | INERT_KEYS
    unknown = [k for k in metadata if k not in known and not k.startswith(INERT_PREFIXES)]
    if unknown:
        log.warning("%s: metadata keys that are not used: %s", path, ", ".join(sorted(unknown)))


def target_config(metadata: Mapping[str, Any], path: Path, *, tied: bool) -> TargetConfig:
    """The architecture that a file's metadata states.

    Raises:
        CheckpointError: another architecture, a missing key, or a setting that is not supported.
    """

    def get(key: str, *default: Any) -> Any:
        if key in metadata:
            return metadata[key]
        if default:
            return default[0]
        raise CheckpointError(f"{path}: metadata key {key} is missing")

    architecture = get("general.architecture")
    if architecture != "llama":
        raise CheckpointError.mismatch(path, "general.architecture", "llama", architecture)
    check_keys(metadata, path)
    scaling = get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise CheckpointError.mismatch(path, "llama.rope.scaling.type", "none or linear", scaling)
    heads, hidden = get("llama.attention.head_count"), get("llama.embedding_length")
    head_dim = get("llama.attention.key_length", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise CheckpointError.mismatch(path, key, f"the head size {head_dim}", metadata[key])
    try:
        return TargetConfig(
            vocab_size=get("llama.vocab_size", len(get("tokenizer.ggml.tokens", ()))),
            hidden_size=hidden,
            num_layers=get("llama.block_count"),
            num_heads=heads,
            num_kv_heads=get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=get("llama.feed_forward_length"),
            rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon"),
            rope=RopeConfig(
                theta=get("llama.rope.freq_base", 10000.0),
                kind="linear" if scaling == "linear" else "default",
                factor=get("llama.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
            ),
            tie_embeddings=tied,
            max_position=get("llama.context_length"),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: metadata: {error}") from error


# Engine name -> (GGUF name in a block, [out, in] shape as functions of the configuration).
BLOCK_TENSORS = {
    ("attention", "q"): ("attn_q", lambda c: (c.num_heads * c.head_dim, c.hidden_size)),
    ("attention", "k"): ("attn_k", lambda c: (c.num_kv_heads * c.head_dim, c.hidden_size)),
    ("attention", "v"): ("attn_v", lambda c: (c.num_kv_heads * c.head_dim, c.hidden_size)),
    ("attention", "o"): ("attn_output", lambda c: (c.hidden_size, c.num_heads * c.head_dim)),
    ("mlp", "gate"): ("ffn_gate", lambda c: (c.intermediate_size, c.hidden_size)),
    ("mlp", "up"): ("ffn_up", lambda c: (c.intermediate_size, c.hidden_size)),
    ("mlp", "down"): ("ffn_down", lambda c: (c.hidden_size, c.intermediate_size)),
}
BLOCK_NORMS = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}


def target_params(file: GGUFFile, config: TargetConfig, weights: Weights) -> dict[str, Any]:
    """Reads every tensor into the parameter tree of `Target`, each exactly once.

    Raises:
        CheckpointError: a tensor is missing, misshapen, of an unsupported type, or left over.
    """
    known = {"token_embd.weight", "output_norm.weight"}
    known |= set() if config.tie_embeddings else {"output.weight"}
    for gguf_name in [name for name, _ in BLOCK_TENSORS.values()] + list(BLOCK_NORMS.values()):
        known |= {f"blk.{i}.{gguf_name}.weight" for i in range(config.num_layers)}
    unknown = sorted(set(file.by_name) - known)
    if unknown:
        raise CheckpointError(
            f"{file.path}: tensors that the llama architecture does not have: {', '.join(unknown)}"
        )

    def stack(gguf_name: str, shape: tuple[int, ...], order: np.ndarray | None = None) -> Any:
        names = [f"blk.{i}.{gguf_name}.weight" for i in range(config.num_layers)]
        return _stack([_oriented(file.read(name, shape), order) for name in names], weights)

    orders = {
        "q": rotary_order(config.num_heads, config.head_dim),
        "k": rotary_order(config.num_kv_heads, config.head_dim),
    }
    layers: dict[str, Any] = {"attention": {}, "mlp": {}}
    for (module, name), (gguf_name, shape) in BLOCK_TENSORS.items():
        kernel = stack(gguf_name, shape(config), orders.get(name))
        layers[module][name] = {"kernel": kernel}
    for name, gguf_name in BLOCK_NORMS.items():
        layers[name] = {"scale": stack(gguf_name, (config.hidden_size,))}

    table_shape = (config.vocab_size, config.hidden_size)
    table = _oriented(file.read("token_embd.weight", table_shape))
    params: dict[str, Any] = {
        "embed": {"embedding": _embedding(table, weights)},
        "layers": layers,
        "norm": {"scale": jnp.asarray(file.read("output_norm.weight", table_shape[1:]))[None]},
    }
    if not config.tie_embeddings:
        head = _oriented(file.read("output.weight", table_shape))
        params["head"] = {"kernel": _stack([head], weights)}
    return {"params": params}


def _oriented(
    tensor: np.ndarray | HostQuant, order: np.ndarray | None = None
) -> np.ndarray | HostQuant:
    """Turns a float matrix to [in, out] (quantised ones are) and reorders its outputs."""
    if isinstance(tensor, HostQuant):
        return tensor if order is None else tensor.rows(order)
    if tensor.ndim == 1:
        return tensor
    return tensor.T if order is None else tensor[order].T


def _stack(parts: list[np.ndarray | HostQuant], weights: Weights) -> jax.Array | QuantTensor:
    """One array or QuantTensor for all layers.

    Quantised values are kept only where every layer has the same kind; INT4 also needs an even
    number of outputs, since two share a byte (a head of odd vocabulary becomes float32).
    """
    quantised = [part for part in parts if isinstance(part, HostQuant)]
    kept = len({(q.bits, q.minimum is None) for q in quantised}) == 1
    kept = kept and not any(q.bits == 4 and q.levels.shape[1] % 2 for q in quantised)
    if weights == "float32" or len(quantised) < len(parts) or not kept:
        floats = [p.to_float() if isinstance(p, HostQuant) else p for p in parts]
        return jnp.asarray(np.stack(floats))
    bits = quantised[0].bits
    levels = np.stack([q.levels for q in quantised])
    if bits == 4:
        # As pack_int4, but in numpy: JAX would compile a program for each shape.
        levels = levels[..., 0::2] | levels[..., 1::2] << 4
    minimum = None
    if quantised[0].minimum is not None:
        minimum = jnp.asarray(np.stack([q.minimum for q in quantised if q.minimum is not None]))
    return QuantTensor(
        jnp.asarray(levels),
        jnp.asarray(np.stack([q.scale for q in quantised])),
        minimum,
        bits=4 if bits == 4 else 8,
        group_size=BLOCK,
    )


def _embedding(table: np.ndarray | HostQuant, weights: Weights) -> jax.Array | QuantTensor:
    """Float tables are `[V, D]` for cheap lookups, quantised ones `[D, V]` like a head."""
    stacked = _stack([table], weights)
    if isinstance(stacked, QuantTensor):
        return jax.tree.map(lambda leaf: leaf[0], stacked)
    return stacked[0].T
