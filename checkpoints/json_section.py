"""Objects of a JSON file, read key by key: types checked, what nobody read is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class Section:
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

    def section(self, key: str) -> Section:
        """An object inside, empty where it is absent."""
        return Section(self.path, self.get(key, dict, {}), f"{self.prefix}{key}.")

    def fix(self, values: Mapping[str, Any]) -> None:
        """Refuses any other values of these keys; absent keys are taken to have them."""
        for key, expected in values.items():
            found = self.get(key, type(expected))
            if found is not None and found != expected:
                raise self.error(key, f"{expected!r} (no other is supported)", repr(found))

    def unread(self) -> list[str]:
        """Keys that nobody asked for."""
        return [f"{self.prefix}{key}" for key in self.values if key not in self.read]


def stated_once(key: str, kind: type, sections: Iterable[Section]) -> Any:
    """The value that one or more sections state for a key, or None."""
    stated = [(s, value) for s in sections if (value := s.get(key, kind)) is not None]
    for section, value in stated[1:]:
        if value != stated[0][1]:
            first = f"{stated[0][0].prefix}{key} = {stated[0][1]!r}"
            raise section.error(key, f"the same as {first}", repr(value))
    return stated[0][1] if stated else None


def load_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except ValueError as error:
        raise CheckpointError.mismatch(file, "text", "JSON", error) from error
    if not isinstance(values, dict):
        raise CheckpointError.mismatch(file, "text", "a JSON object", type(values).__name__)
    return values
