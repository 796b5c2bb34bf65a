"""Protects the contract of `eaglejax eval`: its figures, their interval, its JSON, its errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from eaglejax.cli import commands
from eaglejax.config import SamplingParams, SpecPlan
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Chunk, Completion, Stats
from eaglejax.train.evaluate import Outcome, bootstrap, rows_of
from tests import kit

PLAN = SpecPlan(3, 1, 4)


def outcome(kind: str, accepted: Sequence[int]) -> Outcome:
    """Of verify steps that accepted so many drafts each, by the engine's own statistics."""
    request = kit.request([1])
    request.token_ids = [0] * (1 + sum(accepted) + len(accepted))
    request.accepted, request.verified = list(accepted), sum(accepted) + len(accepted)
    return Outcome.of(kind, request.stats(PLAN.depth))


def test_acceptance_is_over_all_steps_not_over_prompts() -> None:
    outcomes = [outcome("chat", [3, 3]), outcome("code", [0, 1, 0, 0]), outcome("chat", [2])]
    rows = rows_of(outcomes, PLAN, 0.7)
    assert [(row.kind, row.prompts) for row in rows] == [("chat", 2), ("code", 1), ("all", 3)]
    assert {(row.plan, row.temperature) for row in rows} == {("3,1,4", 0.7)}
    assert [row.acceptance_length for row in rows] == [3.6667, 1.25, 2.2857]
    shares = [row.accepted_per_position for row in rows]
    assert shares[0] == (1.0, 1.0, round(2 / 3, 4))
    assert shares[1] == (0.25, 0.0, 0.0)
    # Without a step that the budget cut, the two figures say the same.
    for row in rows:
        assert row.acceptance_length == pytest.approx(1 + sum(row.accepted_per_position), abs=2e-4)
        assert row.ci95 is not None
        assert row.ci95[0] <= row.acceptance_length <= row.ci95[1]


def test_a_prompt_without_a_verify_step_is_counted_and_adds_nothing() -> None:
    plain = Stats(5, 1, 0, None, (), 0.1, 0.0)
    one = Outcome.of("chat", plain)
    assert one == Outcome("chat", 0, 0, ())
    with_it, without = (
        rows_of(outcomes, PLAN, 0.0)[-1]
        for outcomes in ([one, outcome("chat", [1, 2])], [outcome("chat", [1, 2])])
    )
    assert (with_it.prompts, without.prompts) == (2, 1)
    assert with_it.acceptance_length == without.acceptance_length == 2.5
    assert with_it.ci95 == without.ci95 == (2.5, 2.5)
    nothing = rows_of([one], PLAN, 0.0)[-1]
    assert (nothing.acceptance_length, nothing.ci95, nothing.accepted_per_position) == (
        None,
        None,
        (),
    )


def test_the_interval_is_the_same_every_time_and_covers() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        steps = rng.integers(20, 60, 40)
        committed = steps + rng.binomial(3 * steps, 0.3)
        low, high = bootstrap(committed, steps)
        assert (low, high) == bootstrap(committed, steps)
        hits += low <= 1.9 <= high
    assert 180 <= hits <= 199
    wide, narrow = (np.diff(bootstrap(committed[:n], steps[:n]))[0] for n in (10, 40))
    assert wide > narrow > 0


# --- the command --------------------------------------------------------------------------------


class FakeEngine(Engine):
    """Accepts as many drafts as the plan is deep, for as many steps as the prompt has tokens."""

    def __init__(self, plan: SpecPlan, calls: list[Any], drafter: bool = True) -> None:
        self.config = SimpleNamespace(plan=plan)
        self.models = SimpleNamespace(drafter="drafter" if drafter else None)
        self.calls = calls

    def with_plan(self, plan: SpecPlan) -> FakeEngine:
        return FakeEngine(plan, self.calls)

    def generate(  # type: ignore[override]
        self, prompts: list[list[int]], params: list[SamplingParams], *, stream: bool, spec: str
    ) -> Iterator[Chunk]:
        assert stream
        assert spec == "on"
        self.calls.append((str(self.config.plan), params))
        depth = self.config.plan.depth
        for i in reversed(range(len(prompts))):  # they need not end in order
            steps = len(prompts[i]) - 1
            counts = (steps,) * depth if steps else ()
            stats = Stats(len(prompts[i]), 1 + steps * (depth + 1), steps, None, counts, 0.0, 0.0)
            yield Chunk(i, (), (), None)
            yield Chunk(i, (), (), Completion("", (), "length", stats))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines were asked for; the first entry is how the first one was opened."""
    made: list[Any] = []

    def opened(options: dict[str, Any], **more: Any) -> FakeEngine:
        made.append(more)
        return FakeEngine(SpecPlan.parse(options["plan"]), made, options["drafter"] != "none")

    monkeypatch.setattr("eaglejax.commands.eval.open_engine", opened)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    lines = [
        {"kind": "code", "token_ids": [1, 2, 3]},
        {"token_ids": [1, 2]},
        {"kind": "code", "id": "x", "token_ids": [4]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def invoke(*arguments: str, prompts: Path = file) -> Result:
        return CliRunner().invoke(commands, ["eval", "--prompts", str(prompts), *arguments])

    return invoke


def test_the_json_line_is_the_contract(run: Callable[..., Result], calls: list[Any]) -> None:
    result = run("--plans", "3,1;2,2,4", "--temperatures", "0,0.7", "--seed", "5", "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    assert "acceptance" in result.stderr
    rows = json.loads(result.stdout)["rows"]
    keys = "plan temperature kind acceptance_length ci95 accepted_per_position prompts"
    assert all(" ".join(row) == keys for row in rows)
    groups = [(row["plan"], row["temperature"], row["kind"]) for row in rows]
    assert groups == [
        (plan, temperature, kind)
        for plan in ("3,1,4", "2,2,4")
        for temperature in (0.0, 0.7)
        for kind in ("code", "unknown", "all")
    ]
    assert rows[2] == {
        "plan": "3,1,4",
        "temperature": 0.0,
        "kind": "all",
        "acceptance_length": 4.0,
        "ci95": [4.0, 4.0],
        "accepted_per_position": [1.0, 1.0, 1.0],
        "prompts": 3,
    }
    opened, *runs = calls
    assert opened == {"prompts": [[1, 2, 3], [1, 2], [4]], "slots": 3, "longest": 128}
    # The engine of the first plan is opened, that of the other made from it; seeds go by index.
    assert [plan for plan, _ in runs] == ["3,1,4", "3,1,4", "2,2,4", "2,2,4"]
    assert [[p.seed for p in params] for _, params in runs] == [[5, 6, 7]] * 4
    assert [params[0].temperature for _, params in runs] == [0.0, 0.7] * 2


def test_without_json_the_table_is_on_stdout(run: Callable[..., Result], calls: list[Any]) -> None:
    result = run("--limit", "1", "--batch", "2", "--max-tokens", "9")
    assert result.exit_code == 0, result.output
    assert "3,1,4" in result.stdout
    assert calls[0] == {"prompts": [[1, 2, 3]], "slots": 1, "longest": 9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--plans 3,1,5", "depth + 1 = 4 for a chain"),
        ("--plans fast", "expected integers depth,width,nodes"),
        ("--plans 3,1,4;", "expected integers depth,width,nodes"),
        ("--plans 0,1,1", "drafts nothing"),
        ("--plans 3,1,4;3,1", "names a plan twice"),
        ("--temperatures 0,warm", "expected numbers"),
        ("--temperatures -1", "a number of 0 or more"),
        ("--temperatures 1,1.0", "names a temperature twice"),
        ("--drafter none", "give one with --drafter"),
        ("--plan 3,1,4", "No such option"),
        ("--spec off", "No such option"),
        ("--batch 0", "0 is not in the range"),
    ],
)
def test_bad_options_are_refused(
    run: Callable[..., Result], calls: list[Any], arguments: str, message: str
) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a", "kind": "all"}', "kind = 'all'"),
        ('{"prompt": "a", "kind": 3}', "kind = 3"),
        ('{"text": "a"}', "line 1"),
    ],
)
def test_bad_prompt_files_are_refused(
    run: Callable[..., Result], calls: list[Any], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    result = run(prompts=path)
    assert result.exit_code == 1
    assert message in result.stderr
    assert str(path) in result.stderr.replace("\n", "")
    assert calls == []
