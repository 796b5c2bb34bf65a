"""`eaglejax eval`: the acceptance of a drafter on prompts."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from eaglejax.commands.options import model_options, open_engine, prompt_of, read_prompts

if TYPE_CHECKING:
    from rich.console import Console

    from eaglejax.config import SpecPlan
    from eaglejax.engine.request import Prompt
    from eaglejax.train.evaluate import Outcome, Row


def _plans(context: click.Context, parameter: click.Parameter, text: str) -> list[SpecPlan]:
    from eaglejax.config import ConfigError, SpecPlan

    try:
        plans = [SpecPlan.parse(part) for part in text.split(";")]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    if any(plan.is_plain for plan in plans):
        raise click.BadParameter("plan 0,1,1 drafts nothing: there is no acceptance to measure")
    if len(set(plans)) < len(plans):
        raise click.BadParameter(f"{text!r} names a plan twice")
    return plans


def _temperatures(context: click.Context, parameter: click.Parameter, text: str) -> list[float]:
    from eaglejax.config import ConfigError, SamplingParams

    try:
        temperatures = [float(part) for part in text.split(",")]
        for temperature in temperatures:
            SamplingParams(temperature=temperature)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers, like 0,0.7,1") from None
    if len(set(temperatures)) < len(temperatures):
        raise click.BadParameter(f"{text!r} names a temperature twice")
    return temperatures


@click.command("eval", context_settings={"show_default": True})
@model_options
@click.option("--prompts", "prompts_file", required=True, help="JSONL; a line may name its kind.")
@click.option("--plans", default="3,1,4", callback=_plans, help="Plans, separated by semicolons.")
@click.option("--temperatures", default="0", callback=_temperatures, help="Separated by commas.")
@click.option("--max-tokens", default=128, type=click.IntRange(1), help="Of each completion.")
@click.option("--batch", default=8, type=click.IntRange(1), help="Prompts in flight.")
@click.option("--limit", type=click.IntRange(1), help="Take the first N prompts; all.")
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1), help="Of the first prompt.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line on stdout, nothing else.")
def evaluate(**options: Any) -> None:
    """Measure the acceptance of a drafter.

    Every prompt is completed with every plan and temperature. There is a row for each plan,
    temperature and kind of prompt, and one of kind "all". acceptance_length is tokens after the
    first, over verify steps (drafted and accepted, and the target's own token); ci95 its 95%
    interval, by bootstrap over prompts; accepted_per_position[i] the share (0 to 1) of verify steps
    that accepted more than i drafts. Prompts that end with their first token count in prompts only;
    a row without a verify step has null for acceptance_length and ci95.
    """
    from rich.console import Console

    from eaglejax.train.evaluate import rows_of

    prompts = _prompts(options["prompts_file"])[: options["limit"]]
    console = Console(stderr=True)
    rows = [
        row
        for plan, temperature, outcomes in _outcomes(options, prompts, console)
        for row in rows_of(outcomes, plan, temperature)
    ]
    _print_table(console if options["as_json"] else Console(), rows)
    if options["as_json"]:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}))


# Plans come as a list here, and a run without speculation has no acceptance.
evaluate.params = [p for p in evaluate.params if p.name not in ("plan", "spec")]


def _prompts(path: str) -> list[tuple[str, Prompt]]:
    """Kind and prompt of each line."""
    from eaglejax.train.evaluate import ALL, UNKNOWN

    prompts = []
    for number, row in enumerate(read_prompts(path)):
        kind = row.get("kind", UNKNOWN)
        if not isinstance(kind, str) or kind == ALL:
            raise click.ClickException(
                f"{path}, prompt {number}: kind = {kind!r}: expected a string other than {ALL!r}"
            )
        prompts.append((kind, prompt_of(row)))
    return prompts


def _outcomes(
    options: dict[str, Any], prompts: list[tuple[str, Prompt]], console: Console
) -> list[tuple[SpecPlan, float, list[Outcome]]]:
    """Runs all prompts with each plan and temperature; weights are read once."""
    from rich.progress import Progress

    from eaglejax.train.evaluate import run_prompts

    plans, temperatures = options["plans"], options["temperatures"]
    first = open_engine(
        {**options, "plan": str(plans[0]), "spec": None},
        prompts=[prompt for _, prompt in prompts],
        slots=min(options["batch"], len(prompts)),
        longest=options["max_tokens"],
    )
    if first.models.drafter is None:
        raise click.UsageError("eval measures a drafter: give one with --drafter")
    results = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(plans) * len(temperatures) * len(prompts))
        for plan in plans:
            engine = first if plan == first.config.plan else first.with_plan(plan)
            for temperature in temperatures:
                name = f"plan {plan}, temperature {temperature:g}"
                progress.update(task, description=name)
                outcomes = run_prompts(
                    engine,
                    prompts,
                    temperature=temperature,
                    max_tokens=options["max_tokens"],
                    seed=options["seed"],
                    progress=lambda: progress.advance(task),
                )
                results.append((plan, temperature, outcomes))
                if not console.is_terminal:
                    print(f"{name}: {len(prompts)} prompts done", file=console.file, flush=True)
    return results


def _print_table(console: Console, rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(title="acceptance")
    columns = ("plan", "temperature", "kind", "prompts", "acceptance length", "95% interval")
    for column in (*columns, "accepted at position 1, 2, ..."):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        interval = "-" if row.ci95 is None else f"{row.ci95[0]:.2f} to {row.ci95[1]:.2f}"
        length = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        shares = " ".join(f"{share:.2f}" for share in row.accepted_per_position)
        cells = (f"{row.temperature:g}", row.kind, str(row.prompts), length, interval, shares)
        table.add_row(row.plan, *cells)
    console.print(table)
