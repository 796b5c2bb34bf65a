"""Protects: drafters of every dialect are read as their makers meant them, or refused by name."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array

from checkpoints import safetensors_io
from checkpoints.eagle3 import DrafterCheckpoint, read_drafter, write_drafter
from checkpoints.eagle3_config import check_fits
from checkpoints.errors import CheckpointError
from eaglejax.config import ConfigError, DrafterConfig, RopeConfig, TargetConfig
from eaglejax.models.drafter import Drafter, DrafterOutput
from eaglejax.models.layers import RMSNorm
from eaglejax.train.loss import DraftRows, UnrolledLoss, shift_left, unrolled_loss

DATA = Path(__file__).parent / "data"
DRAFTERS = ("g4_eagle3_a", "g4_eagle3_nbr")
LAYOUTS = ("speculators", "safeailab")

TARGET = TargetConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=6,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=32,
)
B29_IDS, B29_OFFSETS = [5, 9, 10, 40], [5, 8, 8, 37]


# --- the two reference drafters (made by speculators, see tests/data/g4_*/README.txt) ---


@dataclasses.dataclass(frozen=True)
class Golden:
    """A drafter as read, what it computes, and what its makers' library computed with it."""

    config: DrafterConfig
    checkpoint: DrafterCheckpoint
    variables: dict[str, Any]
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    fused: Array
    steps: list[DrafterOutput]  # the training-time steps, as `unrolled_loss` runs them
    chain: tuple[Array, Array, Array]  # target ids, states and logits of a drafted chain


def apply(module: Any, variables: Any, *args: Any, method: str | None = None) -> Any:
    """`module.apply`, whose own type is a union with the variables it may return."""
    return module.apply(variables, *args, method=method)


def training_steps(
    drafter: Drafter, variables: Any, features: Array, tokens: Array, positions: Array
) -> tuple[Array, list[DrafterOutput]]:
    """Fused features, and three steps: true features first, then the drafter's own states."""
    length = tokens.shape[1]
    ancestors = jnp.tril(jnp.ones((1, length, length), bool))
    diagonal = jnp.eye(length, dtype=bool)[None]
    fused = apply(drafter, variables, features, method="fuse")
    hidden, block, outputs = fused, None, []
    for i in range(3):
        if i:
            ancestors = jnp.concatenate([ancestors, diagonal], axis=-1)
        rows = (hidden, shift_left(tokens, i), positions + i, ancestors, None, block)
        outputs.append(apply(drafter, variables, *rows))
        hidden, kv = outputs[-1].hidden, outputs[-1].fresh_kv
        block = kv if block is None else block.concat(kv)
    return fused, outputs


def greedy_chain(
    drafter: Drafter, variables: Any, rows: DrafterOutput, position: Array
) -> tuple[Array, Array, Array]:
    """Five tokens: the last row's best, then each from the one before, fed back with its state."""
    hidden, logits, block = rows.hidden[:, -1:], rows.logits[:, -1:], rows.fresh_kv
    states, scores, tokens = [hidden], [logits], []
    for i in range(5):
        tokens.append(apply(drafter, variables, jnp.argmax(logits, -1), method="to_target"))
        if i == 4:
            break
        every = jnp.ones((1, 1, block.k.shape[2] + 1), bool)
        at = jnp.reshape(position + 1 + i, (1, 1))
        output = apply(drafter, variables, hidden, tokens[-1], at, every, None, block)
        hidden, logits, block = output.hidden, output.logits, block.concat(output.fresh_kv)
        states.append(hidden)
        scores.append(logits)
    ids, hidden, logits = (jnp.concatenate(x, axis=1)[0] for x in (tokens, states, scores))
    return ids, hidden, logits


@functools.partial(jax.jit, static_argnums=0)
def run(
    config: DrafterConfig, variables: Any, features: Array, tokens: Array, positions: Array
) -> tuple[Array, list[DrafterOutput], tuple[Array, Array, Array]]:
    drafter = Drafter(config)
    fused, steps = training_steps(drafter, variables, features, tokens, positions)
    return fused, steps, greedy_chain(drafter, variables, steps[0], positions[0, -1])


@functools.partial(jax.jit, static_argnums=(0, 3))
def loss_of(config: DrafterConfig, variables: Any, rows: DraftRows, decay: float) -> UnrolledLoss:
    return unrolled_loss(Drafter(config), variables, rows, steps=3, decay=decay)


@pytest.fixture(scope="module", params=[(d, n) for d in DRAFTERS for n in LAYOUTS], ids="-".join)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    name, layout = request.param
    folder = DATA / name
    raw = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    target = dataclasses.replace(
        TARGET, vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"]
    )
    source = read_drafter(folder, target)
    checkpoint, embedding = source, source.embedding
    if layout == "safeailab":
        path = folder / "safeailab"
        if not path.exists():  # that code has no norm_before_residual, so ours writes the layout
            path = tmp_path_factory.mktemp("written") / "drafter"
            write_drafter(
                path, source.config, source.params, source.target_ids, target_config=target
            )
        checkpoint = read_drafter(path, target)
        assert checkpoint.embedding is None
    arrays = safetensors_io.read_all(folder / "golden.safetensors")
    variables = checkpoint.variables(embedding)
    inputs = ("in.hidden_states", "in.input_ids", "in.position_ids")
    # The SafeAILab file names no layers; the arithmetic has none, and one program serves both.
    config = dataclasses.replace(checkpoint.config, feature_layers=source.config.feature_layers)
    assert config == source.config
    outputs = run(config, variables, *(jnp.asarray(arrays[key])[None] for key in inputs))
    facts = json.loads((folder / "golden.json").read_text())
    return Golden(config, checkpoint, variables, arrays, facts, *outputs)


def difference(found: Any, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.max(np.abs(np.asarray(found) - expected)))


def test_golden_rows_give_the_reference_states_and_logits(golden: Golden) -> None:
    arrays = golden.arrays
    assert difference(golden.fused[0], arrays["fc"]) < 1e-4
    # Step 0 is the served pass; steps 1 and 2 are the drafted rows of training.
    for i, output in enumerate(golden.steps):
        assert difference(output.hidden[0], arrays[f"step{i}.layer_out"]) < 1e-4, i
        assert difference(output.logits[0], arrays[f"step{i}.logits"]) < 1e-4, i
        best = np.argmax(output.logits[0], axis=-1)
        assert best.tolist() == arrays[f"step{i}.argmax_draft_ids"].tolist(), i


def test_golden_chain_drafts_the_reference_tokens(golden: Golden) -> None:
    tokens, states, logits = golden.chain
    assert difference(states, golden.arrays["chain.layer_out"]) < 1e-4
    assert difference(logits, golden.arrays["chain.logits"]) < 1e-4
    assert tokens.tolist() == golden.facts["chain_target_ids"]


def test_golden_losses_are_those_of_the_reference_trainer(golden: Golden) -> None:
    arrays, reference = golden.arrays, golden.facts["losses"]["kl_div"]
    ids = golden.checkpoint.target_ids
    norm = {"params": {"scale": jnp.asarray(arrays["verifier.norm.weight"])[None]}}
    normed = apply(RMSNorm(1e-5), norm, jnp.asarray(arrays["in.verifier_last_hidden"]))
    teacher = normed @ jnp.asarray(arrays["verifier.lm_head.weight"][ids]).T
    assert difference(teacher, arrays["target_logits_draft_vocab"]) < 1e-4

    supervised = jnp.asarray(arrays["in.loss_mask"] > 0)[None]
    rows = DraftRows(
        features=jnp.asarray(arrays["in.hidden_states"])[None],
        tokens=jnp.asarray(arrays["in.input_ids"], jnp.int32)[None],
        teacher=teacher[None],
        teacher_covered=jnp.ones_like(supervised),  # the reference restricts, and drops no row
        supervised=supervised,
        positions=jnp.asarray(arrays["in.position_ids"], jnp.int32)[None],
        segments=jnp.ones(supervised.shape, jnp.int32),
    )
    loss = loss_of(golden.config, golden.variables, rows, reference["decay"])
    metrics = reference["metrics"]
    for i in range(3):
        weighted = float(loss.losses[i]) * reference["decay"] ** i
        assert weighted == pytest.approx(metrics[f"loss_{i}_sum"], rel=1e-5), i
    assert float(loss.loss) == pytest.approx(reference["total"], rel=1e-5)
    assert int(loss.rows[0]) == metrics["full_acc_0_total"]


# --- tiny drafters, put together here ---


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json in the HF dialect; a change to None leaves the key out."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "vocab_size": 64,
        "draft_vocab_size": 4,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        "tie_word_embeddings": False,
    } | changes
    return {key: value for key, value in config.items() if value is not None}


def speculators_config(ids: list[int] | None, **layer: Any) -> dict[str, Any]:
    """config.json in the speculators dialect."""
    inner = tiny_config(eagle_config=None, draft_vocab_size=None, architectures=None) | layer
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 4,
        "norm_before_residual": True,
        "transformer_layer_config": inner,
    }
    return config if ids is None else config | {"eagle_aux_hidden_state_layer_ids": ids}


def tiny_tensors(**changes: Any) -> dict[str, np.ndarray]:
    """Tensors of `tiny_config`, SafeAILab names; "__" in a key stands for a dot, None removes."""
    shapes = {
        "fc.weight": (16, 48),
        "midlayer.self_attn.q_proj.weight": (24, 32),
        "midlayer.self_attn.k_proj.weight": (12, 32),
        "midlayer.self_attn.v_proj.weight": (12, 32),
        "midlayer.self_attn.o_proj.weight": (16, 24),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "norm.weight": (16,),
        "lm_head.weight": (4, 16),
    }
    tensors: dict[str, Any] = {name: random(shape) for name, shape in shapes.items()}
    tensors["d2t"] = np.array(B29_OFFSETS, np.int64)
    tensors["t2d"] = np.isin(np.arange(64), B29_IDS)
    tensors |= {name.replace("__", "."): array for name, array in changes.items()}
    return {name: array for name, array in tensors.items() if array is not None}


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors_io.write(folder / "model.safetensors", tensors)
    return folder


def test_parameters_are_the_tree_that_the_module_has(tmp_path: Path) -> None:
    variants = (
        {},
        {"fc_norm": True, "use_aux_norm": True, "norm_output": True},
        {"norm_before_fc": True},
    )
    for flags in variants:
        extra = {f"fc_norm.{i}.weight": random((16,), i) for i in range(3)}
        extra = extra if "fc_norm" in flags else {}
        if "norm_before_fc" in flags:
            extra["input_norm.weight"] = random((48,))
        tensors = tiny_tensors(**extra)
        checkpoint = read_drafter(save(tmp_path, tiny_config(**flags), tensors), TARGET)
        assert checkpoint.warnings == ()
        expected = own_params(checkpoint.config)
        found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), checkpoint.params)
        assert found == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), expected), flags
        # Every weight of the file is used exactly once.
        sizes = [tensor.size for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
        assert sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params)) == sum(sizes), flags


def test_names_with_prefix_or_numbered_layer_mean_the_same(tmp_path: Path) -> None:
    plain = read_drafter(save(tmp_path, tiny_config(), tiny_tensors()), TARGET)
    renamed = {
        f"model.{name.replace('midlayer.', 'layers.0.')}": array
        for name, array in tiny_tensors().items()
    }
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = random((3,))  # known to be inert
    again = read_drafter(save(tmp_path, tiny_config(), renamed), TARGET)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain.params, again.params))
    both = tiny_tensors() | {"model.norm.weight": random((16,))}
    with pytest.raises(CheckpointError, match=r"expected one norm\.weight, found "):
        read_drafter(save(tmp_path, tiny_config(), both), TARGET)


def test_b29_offsets_become_target_ids(tmp_path: Path) -> None:
    checkpoint = read_drafter(save(tmp_path, tiny_config(), tiny_tensors()), TARGET)
    assert checkpoint.target_ids.tolist() == B29_IDS
    assert checkpoint.target_ids.dtype == np.int32
    assert checkpoint.config.draft_vocab_size == 4
    variables = checkpoint.variables(jnp.zeros((64, 16)))
    ids = apply(Drafter(checkpoint.config), variables, jnp.arange(4), method="to_target")
    assert ids.tolist() == B29_IDS


@pytest.mark.parametrize("draft_vocab", [64, None])
def test_b29_equal_vocabularies_without_a_map_are_the_identity(
    tmp_path: Path, draft_vocab: int | None
) -> None:
    tensors = tiny_tensors(lm_head__weight=random((64, 16)), d2t=None, t2d=None)
    folder = save(tmp_path, tiny_config(draft_vocab_size=draft_vocab), tensors)
    assert read_drafter(folder, TARGET).target_ids.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"d2t": None}, r"tensor d2t: expected \[4\] offsets.* than the target's 64, found no"),
        (
            {},
            {"d2t": [5, 8, 8, 61]},
            r"d2t\[3\]: expected target ids 0 to 63 .* found 64 \(off.* 61",
        ),
        ({}, {"d2t": [5, -2, 8, 99]}, r"d2t\[1\]: expected target ids 0 to 63 .* found -1"),
        ({}, {"d2t": [5, 8, 7, 37]}, r"d2t\[2\]: expected distinct target ids, found 9 twice"),
        ({}, {"d2t": [5, 8, 8]}, r"tensor d2t: expected \[4\] \(draft_vocab_size .* found \[3\]"),
        (
            {"draft_vocab_size": 5},
            {},
            r"lm_head\.weight: expected \[5, 16\] \(draft_vocab_size rows\), found \[4, 16\]",
        ),
        # The size of the head is never taken from the target.
        (
            {"draft_vocab_size": None},
            {},
            r"lm_head\.weight: expected \[64, 16\] .* found \[4, 16\]",
        ),
        ({}, {"lm_head__weight": random((64, 16))}, r"expected \[4, 16\] .* found \[64, 16\]"),
        ({"draft_vocab_size": 65}, {}, "draft_vocab_size = 65: expected at most the target's"),
        ({}, {"t2d": np.arange(64) < 4}, r"t2d: expected true for exactly the 4 .* at id 0"),
        (
            {},
            {"t2d": np.arange(64) < 5},
            r"t2d: expected .* found 5 true, first difference at id 0",
        ),
        ({}, {"t2d": np.ones(63, bool)}, r"t2d: expected \[64\] \(vocab_size .* found \[63\]"),
    ],
)
def test_b29_maps_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in tensors.items()}
    folder = save(tmp_path, tiny_config(**config), tiny_tensors(**arrays))
    with pytest.raises(CheckpointError, match=message):
        read_drafter(folder, TARGET)


def test_b31_tied_without_a_head_shares_the_embedding(tmp_path: Path) -> None:
    embedding = random((64, 16))
    tensors = tiny_tensors(lm_head__weight=None, d2t=None, t2d=None, embed_tokens__weight=embedding)
    config = tiny_config(tie_word_embeddings=True, draft_vocab_size=None)
    checkpoint = read_drafter(save(tmp_path, config, tensors), TARGET)
    assert np.array_equal(checkpoint.params["head"]["kernel"][0], embedding.T)
    assert checkpoint.embedding is not None
    assert np.array_equal(checkpoint.embedding, embedding)
    assert checkpoint.warnings == ()


def test_b31_tied_with_a_head_uses_the_embedding_and_warns_of_a_difference(tmp_path: Path) -> None:
    embedding = random((64, 16))
    config = tiny_config(tie_word_embeddings=True, draft_vocab_size=None)
    for head, warnings in ((embedding, 0), (embedding + 1, 1)):
        tensors = tiny_tensors(
            lm_head__weight=head, d2t=None, t2d=None, embed_tokens__weight=embedding
        )
        checkpoint = read_drafter(save(tmp_path, config, tensors), TARGET)
        assert np.array_equal(checkpoint.params["head"]["kernel"][0], embedding.T)
        assert len(checkpoint.warnings) == warnings
        assert all("lm_head.weight differs" in warning for warning in checkpoint.warnings)


def test_b31_untied_without_a_head_is_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny_tensors(lm_head__weight=None, embed_tokens__weight=random((64, 16)))
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight: expected \[4, 16\], found"):
        read_drafter(save(tmp_path, tiny_config(), tensors), TARGET)
    tied = tiny_config(tie_word_embeddings=True)  # the embedding is no head of 4 rows either
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight: expected \[4, 16\], since"):
        read_drafter(save(tmp_path, tied, tensors), TARGET)
    tensors = tiny_tensors(lm_head__weight=None, d2t=None, t2d=None)  # nothing to be tied to
    config = tiny_config(tie_word_embeddings=True, draft_vocab_size=None)
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight: expected \[64, 16\]"):
        read_drafter(save(tmp_path, config, tensors), TARGET)


def test_b31_tied_with_a_smaller_head_uses_that_head(tmp_path: Path) -> None:
    for changes in ({}, {"embed_tokens__weight": random((64, 16))}):
        tensors = tiny_tensors(**changes)
        folder = save(tmp_path, tiny_config(tie_word_embeddings=True), tensors)
        checkpoint = read_drafter(folder, TARGET)
        kernel = checkpoint.params["head"]["kernel"][0]
        assert np.array_equal(kernel, tensors["lm_head.weight"].T)
        (warning,) = checkpoint.warnings
        assert "tie_word_embeddings is true, but lm_head.weight is the drafter's own" in warning


def test_b32_incomplete_folders_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", tiny_config(), tiny_tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: size: expected .* found"):
        read_drafter(folder, TARGET)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors.* found config\.json"):
        read_drafter(folder, TARGET)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: text: expected JSON"):
        read_drafter(folder, TARGET)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: text: expected a JSON object"):
        read_drafter(folder, TARGET)
    with pytest.raises(CheckpointError, match=r"absent/config\.json: no such file"):
        read_drafter(tmp_path / "absent", TARGET)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tiny_config(), (1, 3, 5)),
        (tiny_config(eagle_config=None, eagle_aux_hidden_state_layer_ids=[0, 2, 5]), (0, 2, 5)),
        # speculators and vLLM count layers by their input: one more.
        (speculators_config([2, 4, 6]), (1, 3, 5)),
        (speculators_config([1, 4, 5]), (0, 3, 4)),
    ],
    ids=["nested", "top level", "speculators", "speculators first"],
)
def test_b38_feature_layers_follow_the_dialect(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    checkpoint = read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)
    assert checkpoint.config.feature_layers == expected
    assert checkpoint.warnings == ()


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(eagle_config=None),
        tiny_config(eagle_config={"eagle_aux_hidden_state_layer_ids": []}),
        speculators_config(None),
    ],
    ids=["missing", "empty", "speculators"],
)
def test_b38_missing_feature_layers_are_the_default_with_a_warning(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    checkpoint = read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)
    assert checkpoint.config.feature_layers == (1, 2, 2)  # of six layers: 1, N//2 - 1, N - 4
    (warning,) = checkpoint.warnings
    assert "no eagle_aux_hidden_state_layer_ids: taking outputs of layers [1, 2, 2]" in warning


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            tiny_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}),
            r"layer numbers 0 to 5 \(output of the layer; the target has 6\), found \[1, 3, 6\]",
        ),
        (tiny_config(eagle_aux_hidden_state_layer_ids=[-1, 3, 5], eagle_config=None), "0 to 5"),
        (speculators_config([0, 3, 6]), r"numbers 1 to 6 \(captured before .* found \[0, 3, 6\]"),
        (speculators_config([2, 4, 7]), "numbers 1 to 6"),
        (
            tiny_config(eagle_aux_hidden_state_layer_ids=[0, 3, 5]),
            r"same as eagle_config\.|same as",
        ),
        (tiny_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3.0, 5]}), "0 to 5"),
        (tiny_config(eagle_config={"eagle_aux_hidden_state_layer_ids": "1,3,5"}), "expected list"),
        (
            tiny_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5]}),
            r"fc\.weight: expected \[16, 32\] \(2 features of 16\), found \[16, 48\]",
        ),
    ],
)
def test_b38_feature_layers_that_do_not_fit_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def test_b38_norms_are_off_unless_stated(tmp_path: Path) -> None:
    checkpoint = read_drafter(save(tmp_path, tiny_config(), tiny_tensors()), TARGET)
    assert [getattr(checkpoint.config, flag) for flag in FLAGS] == [False] * 4
    config = speculators_config([2, 4, 6])
    del config["norm_before_residual"]  # speculators' own class says false; vLLM's shim does not
    checkpoint = read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)
    assert [getattr(checkpoint.config, flag) for flag in FLAGS] == [False] * 4


@pytest.mark.parametrize("nested", [False, True], ids=["top level", "eagle_config"])
def test_b38_norms_are_read_from_either_place(tmp_path: Path, nested: bool) -> None:
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    config = tiny_config(eagle_config=ids | flags) if nested else tiny_config(**flags)
    tensors = tiny_tensors(input_norm__weight=random((48,)))
    read = read_drafter(save(tmp_path, config, tensors), TARGET).config
    assert (read.norm_before_residual, read.norm_before_fc, read.norm_output) == (True,) * 3
    config = tiny_config(norm_output=True, eagle_config=ids | {"norm_output": False})
    with pytest.raises(CheckpointError, match=r"eagle_config\.norm_output: expected the same as"):
        read_drafter(save(tmp_path, config, tensors), TARGET)


def test_b38_norm_tensors_and_flags_must_agree(tmp_path: Path) -> None:
    norms = {f"fc_norm__{i}__weight": random((16,), i) for i in range(3)}
    with pytest.raises(CheckpointError, match=r"found also fc_norm\.0\.weight, fc_norm\.1"):
        read_drafter(save(tmp_path, tiny_config(), tiny_tensors(**norms)), TARGET)
    with pytest.raises(CheckpointError, match=r"tensor fc_norm\.0\.weight: expected \[16\]"):
        read_drafter(save(tmp_path, tiny_config(fc_norm=True), tiny_tensors()), TARGET)
    both = tiny_config(use_aux_norm=True, norm_before_fc=True)
    with pytest.raises(CheckpointError, match="fc_norm = True: expected False when norm_before_fc"):
        read_drafter(save(tmp_path, both, tiny_tensors(**norms)), TARGET)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_READ = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": 500000}, RopeConfig(500000.0)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}, LLAMA3_READ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}, LLAMA3_READ),
        ({"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}, LLAMA3_READ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {}},
            RopeConfig(10000.0, "linear", 4.0),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}},
            RopeConfig(10000.0, "yarn", 4.0, original_max_position=128),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 64.0,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                }
            },
            RopeConfig(
                10000.0,
                "yarn",
                64.0,
                original_max_position=4096,
                beta_fast=1.0,
                mscale_all_dim=1.0,
            ),
        ),
    ],
)
def test_b38_rope_is_never_dropped(
    tmp_path: Path, keys: dict[str, Any], expected: RopeConfig
) -> None:
    checkpoint = read_drafter(save(tmp_path, tiny_config(**keys), tiny_tensors()), TARGET)
    assert checkpoint.config.rope == expected
    assert checkpoint.warnings == ()
    checkpoint = read_drafter(
        save(tmp_path, speculators_config([2, 4, 6], **keys), tiny_tensors()), TARGET
    )
    assert checkpoint.config.rope == expected


def scaling(**values: Any) -> dict[str, Any]:
    return {"rope_scaling": values}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
            "architectures: expected one of Llama",
        ),
        ({"model_type": "qwen3"}, "model_type: expected 'llama' .* found 'qwen3'"),
        ({"attention_bias": True}, "attention_bias: expected False .* found True"),
        ({"mlp_bias": True}, "mlp_bias: expected False"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' .* found 'gelu'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected 1 .* found 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0 .* found 0.5"),
        ({"sliding_window": 2048}, "sliding_window: expected none in use"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window: expected none in use"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected none"),
        ({"vocab_size": 72}, "vocab_size: expected the target's 64, found 72"),
        ({"target_hidden_size": 32}, "target_hidden_size: expected the target's 16, found 32"),
        ({"vocab_size": None}, r"vocab_size: expected int, found nothing \(key missing\)"),
        ({"hidden_size": "16"}, "hidden_size: expected int, found '16'"),
        ({"num_attention_heads": True}, "num_attention_heads: expected int, found True"),
        ({"num_key_value_heads": 0}, "num_kv_heads = 0: expected a positive integer"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: expected True"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm: expected False"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm: expected True"),
        (
            {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
            "eagle_config.use_input_layernorm_in_first_layer: expected True",
        ),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step: expected 1"),
        (scaling(rope_type="dynamic", factor=2.0), "rope_scaling.rope_type: .* found dynamic"),
        (scaling(type="longrope", factor=2.0), "rope_type: expected default, .* found longrope"),
        (scaling(rope_type="linear", type="yarn", factor=2.0), "rope_type: .* found linear, yarn"),
        (scaling(factor=2.0), "rope_scaling.factor: expected 1.0 .* found 2.0"),
        ({"rope_theta": -1.0}, "rope theta = -1.0: expected a positive number"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention: expected a plain value",
        ),
        (scaling(rope_type="linear"), "rope_scaling.factor: expected float, found nothing"),
        (scaling(rope_type="linear", factor=-1.0), "rope factor = -1.0: expected a positive"),
        (scaling(rope_type="llama3", factor=2.0), "rope_scaling.low_freq_factor: expected float"),
        (scaling(rope_type="yarn", factor=2.0, attention_factor=1.5), "attention_factor: .* 1.5"),
        (scaling(rope_type="yarn", factor=2.0, truncate=False), "truncate: expected True"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta: expected the same as rope_theta = 10000.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}} | scaling(rope_type="linear", factor=2.0),
            "rope_scaling: expected the same as rope_parameters",
        ),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save(tmp_path, tiny_config(**changes), tiny_tensors())
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        read_drafter(folder, TARGET)


def test_speculators_of_another_kind_are_refused(tmp_path: Path) -> None:
    config = speculators_config([2, 4, 6]) | {"speculators_model_type": "mlp"}
    with pytest.raises(CheckpointError, match="speculators_model_type: expected 'eagle3'"):
        read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)
    config = speculators_config([2, 4, 6], model_type="qwen3")
    with pytest.raises(CheckpointError, match=r"transformer_layer_config\.model_type: expected"):
        read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)


def test_inert_keys_are_silent_and_unknown_ones_in_one_warning(tmp_path: Path) -> None:
    config = tiny_config(
        use_cache=True,
        torch_dtype="bfloat16",
        attention_dropout=0.0,
        sliding_window=4096,
        use_sliding_window=False,
        layer_types=["full_attention"],
        eaglejax={"steps": 3},
        novelty=1,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "twist": 2},
        rope_scaling={"rope_type": "default", "bend": 0.5},
    )
    checkpoint = read_drafter(save(tmp_path, config, tiny_tensors()), TARGET)
    (warning,) = checkpoint.warnings
    names = warning.split("not used: ")[1]
    assert names == "eagle_config.twist, novelty, rope_scaling.bend"
    checkpoint = read_drafter(
        save(tmp_path, speculators_config([2, 4, 6], novelty=1), tiny_tensors()), TARGET
    )
    assert [w.split("not used: ")[1] for w in checkpoint.warnings] == [
        "transformer_layer_config.novelty"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm__weight": None}, r"tensor norm\.weight: expected \[16\], found no such tensor"),
        ({"norm__weight": random((15,))}, r"norm\.weight: expected \[16\], found \[15\]"),
        (
            {"midlayer__self_attn__q_proj__weight": random((24, 16))},
            r"midlayer\.self_attn\.q_proj\.weight: expected \[24, 32\], found \[24, 16\]",
        ),
        ({"fc__weight": random((16, 32))}, r"fc\.weight: expected \[16, 48\] \(3 features of 16\)"),
        ({"fc__bias": random((16,)), "x": random((1,))}, r"found also fc\.bias, x"),
        ({"layers__1__norm__weight": random((16,))}, r"found also layers\.1\.norm\.weight"),
        (
            {"midlayer__self_attn__q_norm__weight": random((6,))},
            r"found also midlayer\.self_attn\.q_norm\.weight",
        ),
        ({"norm__weight": np.ones(16, np.int8)}, r"type of tensor norm\.weight: .* found I8"),
        ({"embed_tokens__weight": random((60, 16))}, r"expected \[64, 16\], found \[60, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = save(tmp_path, tiny_config(), tiny_tensors(**changes))
    with pytest.raises(CheckpointError, match=rf"{tmp_path.name}.*{message}"):
        read_drafter(folder, TARGET)


def test_another_width_than_the_targets_needs_an_own_embedding(tmp_path: Path) -> None:
    wide = dataclasses.replace(TARGET, hidden_size=20)
    tensors = tiny_tensors(fc__weight=random((16, 60)))
    config = tiny_config(target_hidden_size=20)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: expected \[64, 16\], since"):
        read_drafter(save(tmp_path, config, tensors), wide)
    tensors["embed_tokens.weight"] = random((64, 16))
    checkpoint = read_drafter(save(tmp_path, config, tensors), wide)
    assert checkpoint.config.target_hidden_size == 20
    assert checkpoint.variables(None)["vocab"]["embedding"].shape == (64, 16)


# --- writing ---


def own_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "vocab_size": 64,
        "draft_vocab_size": 4,
        "hidden_size": 16,
        "target_hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "intermediate_size": 24,
        "feature_layers": (1, 3, 5),
    }
    return DrafterConfig(**(values | changes))


def own_params(config: DrafterConfig) -> dict[str, Any]:
    features = jnp.zeros((1, 1, config.feature_size))
    tokens = jnp.zeros((1, 1), jnp.int32)
    drafter = Drafter(config)
    shapes = jax.eval_shape(
        lambda key: drafter.init(key, features, tokens, method="initialise"), jax.random.key(0)
    )
    return jax.tree.map(lambda leaf: jnp.asarray(random(leaf.shape)), shapes["params"])


def equal(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))


YARN = RopeConfig(5e4, "yarn", 64.0, original_max_position=4096, beta_fast=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "rope": RopeConfig(5e5, "linear", 2.0)},
        {"fc_norm": True, "norm_output": True, "rope": LLAMA3_READ},
        {"norm_before_fc": True, "feature_layers": (0, 5), "rope": YARN},
        {"rms_norm_eps": 1e-6, "max_position": 77, "rope": RopeConfig(1e4, "yarn", 3.0)},
        {"hidden_size": 12, "draft_vocab_size": 64},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_drafters_come_back_equal(
    tmp_path: Path, changes: dict[str, Any], dtype: Any
) -> None:
    config = own_config(**changes)
    params = own_params(config)
    if dtype == "bfloat16":
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    ids = np.arange(64) if config.draft_vocab_size == 64 else np.array(B29_IDS)
    embedding = random((64, 12)) if config.hidden_size == 12 else None
    folder = tmp_path / "new" / "drafter"
    write_drafter(
        folder,
        config,
        params,
        ids,
        target_config=TARGET,
        embedding=embedding,
        extra={"steps": 3, "run": "a"},
        dtype=dtype,
    )
    checkpoint = read_drafter(folder, TARGET)
    assert checkpoint.config == config
    assert equal(checkpoint.params, params)
    assert checkpoint.target_ids.tolist() == ids.tolist()
    assert (checkpoint.embedding is None) == (embedding is None)
    assert checkpoint.warnings == ()
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["eaglejax"] == {"steps": 3, "run": "a"}
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [file.name for file in folder.parent.iterdir()] == ["drafter"]  # nothing half-done


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b53_the_map_is_in_the_file_and_no_cast_touches_it(tmp_path: Path, dtype: Any) -> None:
    """bfloat16 would turn 257 into 256 and 128255 into 128000, int16 40000 into -25536."""
    ids = np.array([257, 40000, 128255])
    target = dataclasses.replace(TARGET, vocab_size=128256)
    config = own_config(vocab_size=128256, draft_vocab_size=3)
    write_drafter(
        tmp_path / "d", config, own_params(config), ids, target_config=target, dtype=dtype
    )
    stored = safetensors_io.read_all(tmp_path / "d")
    assert stored["d2t"].dtype == np.int64
    assert stored["d2t"].tolist() == [257, 39999, 128253]
    assert stored["t2d"].dtype == np.bool_
    assert stored["t2d"].shape == (128256,)
    assert np.flatnonzero(stored["t2d"]).tolist() == ids.tolist()
    expected = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    assert stored["midlayer.self_attn.q_proj.weight"].dtype == expected
    checkpoint = read_drafter(tmp_path / "d", target)
    assert checkpoint.target_ids.tolist() == ids.tolist()
    variables = checkpoint.variables(jnp.zeros((128256, 16)))
    mapped = apply(Drafter(config), variables, jnp.arange(3), method="to_target")
    assert mapped.tolist() == ids.tolist()


def test_b53_a_map_that_was_cast_is_refused(tmp_path: Path) -> None:
    cast = np.array(B29_OFFSETS, ml_dtypes.bfloat16)
    folder = save(tmp_path, tiny_config(), tiny_tensors(d2t=cast))
    with pytest.raises(
        CheckpointError, match=r"type of tensor d2t: expected one of U8.*found BF16"
    ):
        read_drafter(folder, TARGET)


@pytest.mark.parametrize("ids", [[5, 9, 40, 10], [5, 9, 9, 40], [5, 9, 10, 64], [-1, 0, 1, 2], [5]])
def test_b53_ids_that_are_no_draft_vocabulary_are_not_written(
    tmp_path: Path, ids: list[int]
) -> None:
    config = own_config()
    with pytest.raises(CheckpointError, match="target_ids: expected 4 ascending ids from 0 to 63"):
        write_drafter(
            tmp_path / "d", config, own_params(config), np.array(ids), target_config=TARGET
        )
    assert list(tmp_path.iterdir()) == []


def test_writing_again_replaces_both_files_and_no_other(tmp_path: Path) -> None:
    config = own_config()
    params = own_params(config)
    folder = tmp_path / "d"
    write_drafter(folder, config, params, np.array(B29_IDS), target_config=TARGET)
    (folder / "README.md").write_text("kept")
    doubled = jax.tree.map(lambda x: 2 * x, params)
    other = own_config(norm_output=True)
    write_drafter(
        folder, other, doubled, np.array([0, 1, 2, 3]), target_config=TARGET, dtype="float32"
    )
    checkpoint = read_drafter(folder, TARGET)
    assert checkpoint.config == other
    assert equal(checkpoint.params, doubled)
    assert checkpoint.target_ids.tolist() == [0, 1, 2, 3]
    assert (folder / "README.md").read_text() == "kept"
    assert [file.name for file in tmp_path.iterdir()] == ["d"]


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    config = own_config()
    params, ids, folder = own_params(config), np.array(B29_IDS), tmp_path / "d"
    kernel = params["fc"]["kernel"]
    cases = [
        ({k: v for k, v in params.items() if k != "fc"}, r"expected fc/kernel, found no such leaf"),
        (params | {"fc": {"kernel": kernel[:, :8]}}, r"fc\.weight: expected \[16, 48\], found"),
        (params | {"fc": {"kernel": kernel, "bias": kernel[0]}}, "found fc/bias"),
    ]
    for tree, message in cases:
        with pytest.raises(CheckpointError, match=message):
            write_drafter(folder, config, tree, ids, target_config=TARGET)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_drafter(folder, config, params, ids, target_config=TARGET, extra={"x": object()})
    odd = own_config(rope=RopeConfig(1e4, "yarn", 2.0, mscale=0.5))
    with pytest.raises(ConfigError, match=r"rope mscale = 0\.5: expected 1"):
        write_drafter(folder, odd, params, ids, target_config=TARGET)
    with pytest.raises(CheckpointError, match="feature layers: expected outputs of the target's"):
        check_fits(own_config(feature_layers=(1, 3, 6)), TARGET, folder)
    narrow = own_config(hidden_size=12)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: expected \[64, 12\], since"):
        write_drafter(folder, narrow, own_params(narrow), ids, target_config=TARGET)
    assert list(tmp_path.iterdir()) == []

    folder.write_text("a file")
    with pytest.raises(CheckpointError, match="path: expected a folder, or nothing yet, found a"):
        write_drafter(folder, config, params, ids, target_config=TARGET)
    folder.unlink()
    folder.mkdir()
    (folder / safetensors_io.INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="expected no sharded checkpoint, found model"):
        write_drafter(folder, config, params, ids, target_config=TARGET)
