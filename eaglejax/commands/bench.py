"""`eaglejax bench`: measured speed, a table for people and one JSON line for programs."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import click

from eaglejax.commands.options import (
    model_options,
    open_engine,
    prompt_of,
    read_prompts,
)


@click.group()
def bench() -> None:
    """Measure speed, always against plain decoding in the same run."""


@bench.command()
@model_options
@click.option("--prompts", "prompts_file", help="JSONL; the evaluation prompts by default.")
@click.option("--limit", default=8, show_default=True, help="Prompts taken from the file.")
@click.option("--plans", default="1,1,2;3,1,4;4,4,16", show_default=True, help="Plans to compare.")
@click.option("--batch", default=1, show_default=True, help="Requests in flight.")
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON line on stdout, last.")
def decode(**options: Any) -> None:
    """Decoding: plain and speculative, greedy, interleaved."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks import decode as benchmark
    from eaglejax.config import SamplingParams, SpecPlan

    for name in ("limit", "batch", "repeats", "max_tokens"):
        if options[name] < 1:
            raise click.UsageError(
                f"--{name.replace('_', '-')} {options[name]}: expected 1 or more"
            )
    path = options["prompts_file"] or str(resources.files("benchmarks") / "prompts" / "eval.jsonl")
    prompts = [prompt_of(row) for row in read_prompts(path)[: options["limit"]]]
    plans = [SpecPlan.parse(text) for text in options["plans"].split(";")]
    params = SamplingParams(max_tokens=options["max_tokens"])
    slots = min(options["batch"], len(prompts))
    first = open_engine(
        {**options, "plan": str(plans[0]), "spec": None},
        prompts=prompts,
        slots=slots,
        longest=params.max_tokens,
    )
    if first.models.drafter is None:
        raise click.UsageError("bench decode compares with speculation: it needs a drafter")
    engines: dict[str | None, Any] = {None: first}
    engines |= {str(plan): first.with_plan(plan) for plan in plans}
    console = Console(stderr=True)
    rows = benchmark.measure(
        engines,
        prompts,
        params,
        batch=slots,
        repeats=options["repeats"],
        progress=lambda line: console.print(line, highlight=False),
    )
    table = Table(title=f"decoding, {len(prompts)} prompts, {slots} in flight, greedy")
    for column in ("mode", "plan", "tokens/s", "interval", "acceptance length", "ratio to plain"):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row.interval
        accepted = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        cells = (f"{row.tokens_per_second:.1f}", f"{low:.1f} to {high:.1f}", accepted)
        table.add_row(row.mode, row.plan or "-", *cells, f"{row.ratio_to_plain:.2f}x")
    (console if options["as_json"] else Console()).print(table)
    if options["as_json"]:
        print(json.dumps(benchmark.as_json(rows)))
