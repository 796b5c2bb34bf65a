"""Where the other engines' programs and files lie, and what to install when they do not."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

from benchmarks.rows import LLAMACPP, OPENVINO, PeerError

VARIABLE = "EAGLEJAX_PEERS"
DRAFTER = "drafter.gguf"
PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench")
PEERS = (LLAMACPP, OPENVINO)

RECORD = "drafter.json"  # what drafter.gguf was converted from

INSTALL = {
    LLAMACPP: (
        "its programs are not built: `make peers` builds llama-server, llama-bench and "
        "llama-batched-bench from the source package of llama-cpp-python (some minutes); "
        f"or put them on PATH, or name the folder that has them in {VARIABLE}"
    ),
    OPENVINO: "it is not installed: pip install 'eaglejax[peers]' (or openvino-genai)",
}


def peers_folder() -> Path:
    """The folder of programs and converted drafters: $EAGLEJAX_PEERS, else .peers.

    `.peers` is looked for where the command runs and beside this package (a checkout); the first is
    where `make peers` puts it.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    here, checkout = Path(".peers"), Path(__file__).resolve().parents[2] / ".peers"
    return here if here.is_dir() or not checkout.is_dir() else checkout


def find_programs(folder: Path) -> dict[str, Path]:
    """llama.cpp's programs by name, from the folder or its `bin`, else from PATH."""
    found = {}
    for name in PROGRAMS:
        for place in (folder / "bin" / name, folder / name):
            if place.is_file() and os.access(place, os.X_OK):
                found[name] = place
                break
        else:
            on_path = shutil.which(name)
            if on_path:
                found[name] = Path(on_path)
    return found


def fingerprint(drafter: Path) -> str:
    """SHA-256 over the names and contents of a drafter folder's weights and configuration."""
    digest = hashlib.sha256()
    for file in sorted(drafter.iterdir()):
        if file.suffix in (".safetensors", ".json"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def converted_drafter(folder: Path, drafter: Path) -> Path | PeerError:
    """The GGUF form of a drafter folder, or why there is none: it must be of that very drafter."""
    file, record = folder / DRAFTER, folder / RECORD
    if not file.is_file() or not record.is_file():
        return PeerError(f"{file} is missing: `make peers-drafter` converts the drafter")
    if json.loads(record.read_text(encoding="utf-8")).get("source") != fingerprint(drafter):
        return PeerError(
            f"{file} was converted from another drafter than {drafter}: run `make peers-drafter` "
            "(for a drafter of your own, with ARGS='--drafter FOLDER')"
        )
    return file


def missing(peer: str, folder: Path) -> str | None:
    """What to do before this engine can be measured; None when it can."""
    modules = {LLAMACPP: "llama_cpp", OPENVINO: "openvino_genai"}
    there = importlib.util.find_spec(modules[peer]) is not None
    there = there or (peer == LLAMACPP and has_programs(folder))
    return None if there else f"{peer}: {INSTALL[peer]}"


def has_programs(folder: Path) -> bool:
    """All of llama.cpp's programs are there."""
    return len(find_programs(folder)) == len(PROGRAMS)
