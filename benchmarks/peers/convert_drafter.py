"""Converts an EAGLE-3 drafter folder to GGUF, with llama.cpp's own converter.

    python -m benchmarks.peers.convert_drafter           # what `make peers-drafter` runs

The converter needs PyTorch and transformers, which get an environment of their own in the folder of
the peers: nothing else here uses them. It reads the target's configuration and tokenizer from a
Hugging Face folder, which is written from the GGUF file.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import venv
from pathlib import Path

import click

from benchmarks.peers.build_llamacpp import SOURCE, run
from benchmarks.peers.setup import DRAFTER, RECORD, fingerprint, peers_folder
from checkpoints.catalogue import DEFAULT_MODEL, model_path, shipped_drafter
from checkpoints.hf_folder import write_config_folder

# transformers is the version that llama.cpp's requirements name.
REQUIREMENTS = ("transformers==4.57.6", "sentencepiece<0.3", "protobuf<7", "numpy<3")
CONVERTER = "convert_hf_to_gguf.py"


@click.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=peers_folder)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Name or GGUF file.")
@click.option("--drafter", default="default", show_default=True, help="Drafter folder.")
@click.option(
    "--torch", default="torch>=2.6", show_default=True, help="Requirement; a CPU build is enough."
)
@click.option(
    "--type", "kind", default="q8_0", show_default=True, help="Of the weights; ours run in INT8."
)
def main(folder: Path, model: str, drafter: str, torch: str, kind: str) -> None:
    """Write FOLDER/drafter.gguf."""
    folder = folder.resolve()
    script = folder / SOURCE / CONVERTER
    if not script.is_file():
        raise click.ClickException(f"{script} is missing: run `make peers` first")
    source = shipped_drafter(model) if drafter == "default" else Path(drafter)
    if source is None or not source.is_dir():
        raise click.ClickException(f"drafter {drafter!r}: no such folder")
    with tempfile.TemporaryDirectory(prefix="convert-", dir=folder) as scratch:
        place = Path(scratch)
        python = environment(folder / "converter", torch, place / "pip.log")
        write_config_folder(model_path(model), place / "target")
        command = [str(python), str(script), str(source), "--outtype", kind]
        command += ["--target-model-dir", str(place / "target")]
        run([*command, "--outfile", str(place / DRAFTER)], place / "convert.log")
        record = {"source": fingerprint(source), "type": kind}
        (place / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
        for name in (DRAFTER, RECORD):
            (place / name).replace(folder / name)
    click.echo(f"ready: {folder / DRAFTER}", err=True)


def environment(path: Path, torch: str, log: Path) -> Path:
    """The converter's interpreter; its packages are installed on first use."""
    python, stamp = path / "bin" / "python", path / ".installed"
    if not stamp.exists():
        click.echo("installing PyTorch and transformers for the converter", err=True)
        shutil.rmtree(path, ignore_errors=True)
        venv.create(path, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
        run([*pip, torch, *REQUIREMENTS], log)
        stamp.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
