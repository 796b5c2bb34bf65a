"""A part's results, kept in its file as they come: what a time limit cuts short is not lost."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRY = os.environ.get("EAGLEJAX_GPU_DRY") == "1"  # on a CPU, a few small cases, to try the script


class Skip(Exception):
    """The part cannot run here, for a reason that is not its own."""


class Record:
    """Rows of one part.

    Attributes:
        path: the file.
        data: what it holds: `rows`, and `state` ("running", "finished", "skipped" or "failed").
    """

    def __init__(self, path: Path, part: str) -> None:
        self.path = path
        self.data: dict[str, Any] = {"part": part, "dry": DRY, "state": "running", "rows": []}
        self.started = time.perf_counter()
        self.save()

    def add(self, **row: Any) -> None:
        self.data["rows"].append(row)
        self.save()

    def note(self, **facts: Any) -> None:
        """Facts about the whole part."""
        self.data.update(facts)
        self.save()

    def save(self) -> None:
        self.data["seconds"] = round(time.perf_counter() - self.started, 2)
        staging = self.path.with_suffix(".tmp")
        staging.write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        staging.replace(self.path)

    def attempt(self, function: Callable[[], dict[str, Any]], **row: Any) -> None:
        """Adds a row with what the function returns, or with its error."""
        try:
            self.add(**row, **function())
        except Exception as error:
            traceback.print_exc()
            self.add(**row, error=f"{type(error).__name__}: {error}"[:2000])


def run(part: str, main: Callable[[Record], None]) -> None:
    """Runs a part as `python -m benchmarks.gpu.<part> FILE`; exit status 1 if anything failed."""
    record = Record(Path(sys.argv[1]), part)
    try:
        main(record)
        state = "finished"
    except Skip as reason:
        state = "skipped"
        record.note(reason=str(reason))
    except BaseException as error:
        traceback.print_exc()
        state = "failed"
        record.note(error=f"{type(error).__name__}: {error}"[:2000])
    failures = sum("error" in row or row.get("ok") is False for row in record.data["rows"])
    record.note(state=state, failures=failures)
    sys.exit(state == "failed" or failures > 0)
