"""Protects: a target's Hugging Face folder says what its GGUF file says, and no folder is hurt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer as Library

from checkpoints.hf_folder import config_files, write_config_folder
from checkpoints.tokenizer import Tokenizer
from eaglejax.cli import commands
from tests.test_gguf_files import save
from tests.test_tokenizer import ENDOFTEXT, GOLDEN, toy, toy_fields

NAMES = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> dict[str, dict[str, Any]]:
    return config_files(smollm2_gguf)


@pytest.fixture(scope="module")
def library(files: dict[str, dict[str, Any]]) -> Library:
    return Library.from_str(json.dumps(files["tokenizer.json"]))


@pytest.mark.parametrize("item", GOLDEN["strings"], ids=lambda item: ascii(item["text"]))
def test_golden_strings(library: Library, item: dict[str, Any]) -> None:
    assert library.encode(item["text"]).ids == item["ids"]
    assert library.decode(item["ids"], skip_special_tokens=False) == item["decoded"]
    assert library.decode(item["ids"]) == item["decoded_skip_special"]


@pytest.mark.parametrize("item", GOLDEN["chat"])
def test_golden_chats(library: Library, item: dict[str, Any]) -> None:
    assert library.encode(item["rendered"]).ids == item["ids"]


def test_the_default_models_configuration(files: dict[str, dict[str, Any]]) -> None:
    assert files["config.json"] == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    tokens = files["tokenizer_config.json"]
    assert tokens.pop("chat_template").startswith("{% for message in messages %}")
    assert tokens == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }


def test_scaled_rotary_several_ends_and_a_bos_in_front(tmp_path: Path) -> None:
    fields = toy_fields("llama-bpe", add_bos_token=True, eot_token_id=ENDOFTEXT + 1)
    vocab = len(fields["tokenizer.ggml.tokens"])
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    changes = {**fields, **scaling, "llama.vocab_size": vocab, "tokenizer.ggml.scores": None}
    files = config_files(save(tmp_path / "toy.gguf", {}, **changes))
    assert files["config.json"]["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert files["config.json"]["eos_token_id"] == [ENDOFTEXT, ENDOFTEXT + 1]
    assert files["config.json"]["pad_token_id"] is None
    assert "pad_token" not in files["tokenizer_config.json"]
    assert "chat_template" not in files["tokenizer_config.json"]
    assert files["tokenizer_config.json"]["add_bos_token"] is True
    ours = Tokenizer.from_gguf(fields, "toy.gguf")
    library = Library.from_str(json.dumps(files["tokenizer.json"]))
    for text in ("", "hi 1234", "<|endoftext|>hi<tool >"):
        assert library.encode(text).ids == ours.encode(text)
        assert library.encode(text, add_special_tokens=False).ids == ours.encode(
            text, add_bos=False
        )


def test_only_hidden_tokens_are_special() -> None:
    special = {token["content"]: token["special"] for token in toy().to_json()["added_tokens"]}
    assert special == {"<|endoftext|>": True, "<tool >": False}


# --- the command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["convert", *map(str, arguments)])


def test_a_new_folder_and_an_empty_one_are_filled(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "deep", tmp_path / "empty"):
        result = run(smollm2_gguf, "--to", "hf", folder, "--config-only")
        assert result.exit_code == 0, result.output
        assert result.stdout.split() == [str(folder / name) for name in sorted(NAMES)]
        assert {file.name for file in folder.iterdir()} == NAMES
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 49152
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]  # no scraps


def test_a_folder_in_use_is_refused_unless_forced(smollm2_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "used"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("mine")
    arguments = (smollm2_gguf, "--to", "hf", folder, "--config-only")
    error = run(*arguments).exception
    assert isinstance(error, ValueError)
    assert "expected an empty one (or --force), found config.json, model.safetensors" in str(error)
    assert (folder / "config.json").read_text() == "mine"
    assert run(*arguments, "--force").exit_code == 0
    assert {file.name for file in folder.iterdir()} == {*NAMES, "model.safetensors"}
    assert (folder / "model.safetensors").read_text() == "mine"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_weights_are_not_written_and_it_says_so(smollm2_gguf: Path, tmp_path: Path) -> None:
    result = run(smollm2_gguf, "--to", "hf", tmp_path / "new")
    assert result.exit_code == 2
    assert "no weights: say so with --config-only" in result.stderr
    assert not (tmp_path / "new").exists()
    assert "'gguf' is not 'hf'" in run(smollm2_gguf, "--to", "gguf", tmp_path / "new").stderr


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"{}", "folder"])
def test_a_source_that_cannot_be_used_writes_nothing(
    tmp_path: Path, content: bytes | str | None
) -> None:
    source, folder = tmp_path / "model.gguf", tmp_path / "new"
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content:
        source.mkdir()
    error = run(source, "--to", "hf", folder, "--config-only").exception
    assert isinstance(error, ValueError)
    assert "model.gguf" in str(error)
    assert not folder.exists()


def test_a_file_in_the_folders_place_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="expected a folder, or nothing yet, found a file"):
        write_config_folder(smollm2_gguf, tmp_path / "file", force=True)
    with pytest.raises(ValueError, match="cannot be written"):
        write_config_folder(smollm2_gguf, tmp_path / "file" / "below")
