"""benchmarks/gpu_checks.sh: no part stops another, and what a part has found is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import record

ROOT = Path(__file__).parent.parent
STUB = """#!/bin/sh
# python -m benchmarks.gpu.PART FILE
case "$2" in
  *.environment) echo broken >&2; exit 3;;
  *.cases) echo '{"state": "running", "rows": [1]}' >"$3"; exec sleep 60;;
esac
echo '{"state": "finished"}' >"$3"
"""


def checks(out: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "benchmarks" / "gpu_checks.sh", *parts],
        env={**os.environ, "OUT": str(out), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_parts_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(STUB)
    python.chmod(0o755)
    run = checks(out, PYTHON=str(python), EAGLEJAX_GPU_SECONDS="6")
    assert run.returncode == 1
    summary = json.loads((out / "summary.json").read_text())["parts"]
    status = {part["part"]: part["status"] for part in summary}
    assert status["environment"] == 3
    assert status["cases"] in (124, 137)  # over the limit
    assert status["peers"] == -1  # no time was left
    assert "broken" in (out / "log.txt").read_text()
    assert json.loads((out / "cases.json").read_text())["rows"] == [1]
    assert len(list(out.iterdir())) <= 8


def test_a_dry_run_on_a_cpu_says_what_it_leaves_out(tmp_path: Path) -> None:
    run = checks(tmp_path, "environment", "graphs", PYTHON=sys.executable, EAGLEJAX_GPU_DRY="1")
    assert run.returncode == 0, run.stdout
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert (environment["state"], environment["platform"]) == ("finished", "cpu")
    graphs = json.loads((tmp_path / "graphs.json").read_text())
    assert graphs["state"] == "skipped"
    assert "GPUs only" in graphs["reason"]


def test_rows_are_on_disk_as_soon_as_they_are_known(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    kept = record.Record(file, "part")
    kept.add(case="first", ok=True)

    def fails() -> dict[str, object]:
        raise ValueError("no such shape")

    kept.attempt(fails, case="second")
    data = json.loads(file.read_text())
    assert data["state"] == "running"
    assert data["rows"] == [
        {"case": "first", "ok": True},
        {"case": "second", "error": "ValueError: no such shape"},
    ]


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_a_wrong_result_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ok: bool, status: int
) -> None:
    file = tmp_path / "part.json"
    monkeypatch.setattr(sys, "argv", ["part", str(file)])
    with pytest.raises(SystemExit) as end:
        record.run("part", lambda kept: kept.add(case="first", ok=ok))
    assert int(end.value.code or 0) == status
    assert json.loads(file.read_text())["failures"] == status
