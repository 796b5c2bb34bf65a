"""Protects: GGUF files become exactly the weights they store, or are refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints import safetensors_io
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFFile, HostQuant, rotary_order
from checkpoints.gguf_target import Weights, check_keys, target_config, target_params
from eaglejax.config import RopeConfig, TargetConfig
from eaglejax.models.target import Target
from eaglejax.quant import QuantTensor, dequantise, pack_int4

DATA = Path(__file__).parent / "data"
TINY = TargetConfig(
    vocab_size=40,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope=RopeConfig(theta=5000.0),
    tie_embeddings=True,
    max_position=512,
)
METADATA: dict[str, Any] = {
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.vocab_size": 40,
    "tokenizer.ggml.tokens": ["é", "", *(f"token {i}" for i in range(38))],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.add_bos_token": True,
}
Stored = tuple[np.ndarray, Type]


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stored(values: np.ndarray, kind: Type) -> Stored:
    return gguf.quants.quantize(values, kind), kind


def tiny_tensors(kind: Type = Type.F32, *, head: bool = False) -> dict[str, Stored]:
    """All tensors of `TINY` as `[out, in]`, matrices of one kind."""
    shapes = {"token_embd": (40, 64), "output_norm": (64,)}
    if head:
        shapes["output"] = (40, 64)
    for i in range(TINY.num_layers):
        shapes |= {
            f"blk.{i}.attn_norm": (64,),
            f"blk.{i}.attn_q": (64, 64),
            f"blk.{i}.attn_k": (32, 64),
            f"blk.{i}.attn_v": (32, 64),
            f"blk.{i}.attn_output": (64, 64),
            f"blk.{i}.ffn_norm": (64,),
            f"blk.{i}.ffn_gate": (96, 64),
            f"blk.{i}.ffn_up": (96, 64),
            f"blk.{i}.ffn_down": (64, 96),
        }
    return {
        f"{name}.weight": stored(random(shape, seed), kind if len(shape) == 2 else Type.F32)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def save(
    path: Path,
    tensors: dict[str, Stored],
    architecture: str = "llama",
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    **changes: Any,
) -> Path:
    """Writes a file with the official writer; a change to None leaves the key out."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    names = {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in (METADATA | names).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, weights: Weights = "float32") -> tuple[TargetConfig, dict[str, Any]]:
    """A file as a target; GGUF has no flag for a tied head: it stores one, or not."""
    file = GGUFFile(path)
    config = target_config(file.metadata(), path, tied="output.weight" not in file.by_name)
    return config, target_params(file, config, weights)["params"]


def test_metadata_is_what_gguf_itself_reads(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors())
    expected = {k: field.contents() for k, field in gguf.GGUFReader(path).fields.items()}
    file = GGUFFile(path)
    assert file.metadata() == expected
    assert expected["tokenizer.ggml.tokens"] == METADATA["tokenizer.ggml.tokens"]
    assert expected["tokenizer.ggml.scores"] == [0.5, -1.0]
    config, _ = load(path)
    assert dataclasses.replace(config, rms_norm_eps=1e-5) == TINY  # stored as float32


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1])
def test_every_type_decodes_as_gguf_dequantizes(tmp_path: Path, kind: Type) -> None:
    values = random((24, 96))
    values[3] = 0  # a block of zeros has the scale 0
    data, _ = stored(values, kind)
    if kind in (Type.Q4_0, Type.Q4_1, Type.Q8_0):
        # Any bytes are valid levels, so this reaches all of them.
        data = np.random.default_rng(1).integers(0, 256, data.shape, dtype=np.uint8)
        blocks = data.reshape(24, 3, -1)
        blocks[..., :2] = random((24, 3), 2).astype(np.float16).view(np.uint8).reshape(24, 3, 2)
        if kind == Type.Q4_1:
            blocks[..., 2:4] = random((24, 3), 3).astype(np.float16)[..., None].view(np.uint8)
    file = GGUFFile(save(tmp_path / "a.gguf", {"w": (data, kind)}))
    read = file.read("w", (24, 96))
    expected = gguf.quants.dequantize(data, kind)
    found = read.to_float().T if isinstance(read, HostQuant) else read
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


def test_query_and_key_rows_are_put_back_in_their_order(smollm2_gguf: Path) -> None:
    golden = safetensors_io.read_all(DATA / "smollm2_dequant.safetensors")
    file = GGUFFile(smollm2_gguf)
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight", "token_embd.weight"):
        shape = tuple(golden[f"{name}.shape"].tolist())
        read = file.read(name, shape)
        assert isinstance(read, HostQuant)
        rows = read.to_float().T
        assert np.array_equal(rows[:8], golden[f"{name}.rows0_8"])
        if f"{name}.row_sums" in golden:
            assert np.allclose(rows.sum(axis=1), golden[f"{name}.row_sums"], atol=1e-3)
    query = file.read("blk.0.attn_q.weight", (576, 576))
    assert isinstance(query, HostQuant)
    rows = query.rows(rotary_order(9, 64)).to_float().T
    assert np.array_equal(rows[:8], golden["hf.model.layers.0.self_attn.q_proj.weight.rows0_8"])


def test_rotary_order_undoes_the_converters_permutation() -> None:
    heads, head_dim = 3, 8
    rows = np.arange(heads * head_dim)
    # llama.cpp's converter: the halves of a head become pairs.
    permuted = rows.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
    assert np.array_equal(permuted[rotary_order(heads, head_dim)], rows)


def test_float_parameters_are_the_stored_rows(tmp_path: Path) -> None:
    tensors = tiny_tensors(head=True)
    config, params = load(save(tmp_path / "a.gguf", tensors))
    layers = params["layers"]
    for i in range(2):
        block = {name: tensors[f"blk.{i}.{name}.weight"][0] for name in ("attn_q", "attn_k")}
        for name, heads in (("q", 4), ("k", 2)):
            expected = block[f"attn_{name}"][rotary_order(heads, 16)].T
            assert np.array_equal(layers["attention"][name]["kernel"][i], expected)
        down = tensors[f"blk.{i}.ffn_down.weight"][0].T
        assert np.array_equal(layers["mlp"]["down"]["kernel"][i], down)
        norm = tensors[f"blk.{i}.ffn_norm.weight"][0]
        assert np.array_equal(layers["mlp_norm"]["scale"][i], norm)
    assert np.array_equal(params["embed"]["embedding"], tensors["token_embd.weight"][0])
    target = Target(config, (0,))
    tokens = jnp.zeros((1, 1), jnp.int32)
    expected = jax.eval_shape(
        lambda key: target.init(key, tokens, tokens, method="initialise"), jax.random.key(0)
    )["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
@pytest.mark.parametrize("head", [False, True], ids=["tied", "untied"])
def test_quantised_parameters_are_the_float_ones(tmp_path: Path, kind: Type, head: bool) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors(kind, head=head))
    (_, floats), (_, quantised) = load(path), load(path, "int4")
    embedding = quantised["embed"].pop("embedding")
    assert np.array_equal(dequantise(embedding).T, floats["embed"].pop("embedding"))

    def is_quant(leaf: Any) -> bool:
        return isinstance(leaf, QuantTensor)

    matrices = [leaf for leaf in jax.tree.leaves(quantised, is_leaf=is_quant) if is_quant(leaf)]
    assert len(matrices) == 7 + head
    assert {matrix.bits for matrix in matrices} == {8 if kind == Type.Q8_0 else 4}
    plain = jax.tree.map(lambda x: dequantise(x) if is_quant(x) else x, quantised, is_leaf=is_quant)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, floats))


def test_nibbles_are_packed_as_the_kernels_unpack_them(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors(Type.Q4_0))
    _, params = load(path, "int4")
    levels = GGUFFile(path).read("blk.1.ffn_up.weight", (96, 64))
    assert isinstance(levels, HostQuant)
    expected = pack_int4(jnp.asarray(levels.levels))
    assert np.array_equal(params["layers"]["mlp"]["up"]["kernel"].values[1], expected)


def test_matrices_that_cannot_stay_quantised_become_floats(tmp_path: Path) -> None:
    """Layers of different kinds, and INT4 with an odd number of outputs."""
    tensors = tiny_tensors(Type.Q4_1, head=True)
    tensors["blk.1.attn_v.weight"] = stored(random((32, 64)), Type.F16)
    tensors["blk.1.ffn_up.weight"] = stored(random((96, 64)), Type.Q8_0)
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = stored(random((39, 64)), Type.Q4_1)
    path = save(tmp_path / "a.gguf", tensors, llama__vocab_size=39)
    (_, floats), (_, mixed) = load(path), load(path, "int4")
    for place in (("attention", "v"), ("mlp", "up")):
        kernels = [tree["layers"][place[0]][place[1]]["kernel"] for tree in (floats, mixed)]
        assert np.array_equal(*kernels)
    assert np.array_equal(floats["head"]["kernel"], mixed["head"]["kernel"])
    assert np.array_equal(floats["embed"]["embedding"], mixed["embed"]["embedding"])
    assert isinstance(mixed["layers"]["attention"]["q"]["kernel"], QuantTensor)


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_b31_without_a_stored_head_the_embedding_is_the_head(
    tmp_path: Path, weights: Weights
) -> None:
    config, params = load(save(tmp_path / "a.gguf", tiny_tensors(Type.Q4_0)), weights)
    assert config.tie_embeddings
    assert "head" not in params
    embedding = gguf.quants.dequantize(*tiny_tensors(Type.Q4_0)["token_embd.weight"])
    hidden = jnp.asarray(random((1, 1, 64)))
    logits: Any = Target(config, (0,)).apply({"params": params}, hidden, method="logits")
    assert np.allclose(logits, hidden @ embedding.T, atol=1e-4)


def test_b31_a_stored_head_is_the_head(tmp_path: Path) -> None:
    """GGUF has no tie flag, so a stored head always counts, as in llama.cpp."""
    tensors = tiny_tensors(head=True)
    config, params = load(save(tmp_path / "a.gguf", tensors))
    assert not config.tie_embeddings
    assert np.array_equal(params["head"]["kernel"][0], tensors["output.weight"][0].T)


def test_b31_a_head_that_is_expected_and_absent_is_refused_by_name(tmp_path: Path) -> None:
    file = GGUFFile(save(tmp_path / "a.gguf", tiny_tensors()))
    untied = dataclasses.replace(TINY, tie_embeddings=False)
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor output\.weight is missing"):
        target_params(file, untied, "float32")
    file = GGUFFile(save(tmp_path / "b.gguf", tiny_tensors(head=True)))
    with pytest.raises(CheckpointError, match=r"b\.gguf: tensors .* not have: output\.weight"):
        target_params(file, TINY, "float32")


def test_b32_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.gguf", tiny_tensors(Type.Q4_1)).read_bytes()
    cut = tmp_path / "cut.gguf"
    end_of_metadata = whole.index(b"blk.0.attn_norm.weight")
    sizes = [*range(0, end_of_metadata, 37), *range(end_of_metadata, len(whole), 997)]
    for size in sizes:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: .* (\d+|b'G?U?G?F?')"):
            GGUFFile(cut)
    cut.write_bytes(whole[: len(whole) - 1000])
    message = r"the file is cut: tensor blk\.1\.ffn_down\.weight ends at byte (\d+), .* has (\d+)$"
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(cut)


def test_b32_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(CheckpointError, match=r"a\.gguf: no such file"):
        GGUFFile(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(CheckpointError, match=r"first bytes: expected b'GGUF', found b'PK"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(64))
    with pytest.raises(CheckpointError, match=r"not a readable GGUF file, header: .* version 99"):
        GGUFFile(path)
    with pytest.raises(CheckpointError, match="not a readable GGUF file, header: "):
        GGUFFile(tmp_path)
    save(path, tiny_tensors(), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(CheckpointError, match="byte order: expected little, found big"):
        GGUFFile(path)
    save(path, tiny_tensors(), llama__note="remark")
    path.write_bytes(path.read_bytes().replace(b"remark", b"\xff" * 6))
    with pytest.raises(CheckpointError, match=r"metadata key llama\.note: expected UTF-8, found"):
        GGUFFile(path).metadata()


def test_tensors_stored_twice_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors())
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(CheckpointError, match=r"stored twice: blk\.0\.attn_k\.weight"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("blk.1.attn_v.weight", None, r"tensor blk\.1\.attn_v\.weight is missing .* \[32, 64\]"),
        (
            "output_norm.weight",
            stored(random((60,)), Type.F32),
            r"tensor output_norm\.weight: expected shape \[64\], found \[60\]",
        ),
        (
            "blk.0.ffn_up.weight",
            stored(random((64, 96)), Type.Q4_0),
            r"tensor blk\.0\.ffn_up\.weight: expected shape \[96, 64\], found \[64, 96\]",
        ),
        (
            "blk.0.attn_q.weight",
            stored(random((64, 64)), Type.Q5_0),
            r"blk\.0\.attn_q\.weight: type Q5_0 is not supported, expected one of F32, .* Q8_0",
        ),
        (
            "rope_freqs.weight",
            stored(random((8,)), Type.F32),
            r"tensors that the llama architecture does not have: rope_freqs\.weight",
        ),
        (
            "blk.2.attn_q.weight",
            stored(random((64, 64)), Type.F32),
            r"does not have: blk\.2\.attn_q\.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, replacement: Stored | None, message: str
) -> None:
    tensors: dict[str, Any] = tiny_tensors() | {name: replacement}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = save(tmp_path / "a.gguf", kept)
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{message}"):
        load(path)


def test_a_type_that_gguf_does_not_know_is_refused_by_tensor(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors())
    content = bytearray(path.read_bytes())
    # name, dimensions (uint32 count, uint64 each), then the type
    at = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    content[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    message = r"a\.gguf: type of tensor blk\.0\.ffn_up\.weight: expected .*Q4_1.*, found 999"
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": None}, r"metadata key llama\.block_count is missing"),
        (
            {"llama__rope__scaling__type": "yarn"},
            r"scaling\.type: expected none or linear, found y",
        ),
        ({"llama__attention__value_length": 32}, r"value_length: expected the head size 16, found"),
        (
            {"llama__rope__dimension_count": 8},
            r"dimension_count: expected the head size 16, found 8",
        ),
        ({"llama__attention__head_count_kv": 3}, "num_kv_heads = 3: expected a divisor of"),
        (
            {"llama__vocab_size": 41},
            r"token_embd\.weight: expected shape \[41, 64\], found \[40, 64",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors(), **changes)
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{message}"):
        load(path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", tiny_tensors(), architecture="qwen3")
    with pytest.raises(
        CheckpointError, match=r"general\.architecture: expected llama, found qwen3"
    ):
        load(path)


def test_linear_rope_scaling_and_the_vocabulary_by_its_tokens(tmp_path: Path) -> None:
    path = save(
        tmp_path / "a.gguf",
        tiny_tensors(),
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
        llama__vocab_size=None,
    )
    config, _ = load(path)
    assert config.rope == RopeConfig(theta=5000.0, kind="linear", factor=4.0)
    assert config.vocab_size == 40


def test_unknown_metadata_keys_are_listed_in_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    metadata = {
        "general.name": "x",
        "llama.new_thing": 1,
        "llama.other": 2,
        "llama.expert_count": 0,
    }
    check_keys(metadata, tmp_path)
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}: metadata keys that are not used: llama.new_thing, llama.other"
    ]


def test_metadata_that_would_change_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llama\.expert_count: expected none or 0.*found 8"):
        check_keys({"llama.expert_count": 8}, tmp_path)
