"""`eaglejax compile`: kernels and whole steps through the real GPU compiler, without a GPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from eaglejax.aot_kernels import KernelReport
    from eaglejax.aot_models import ProgramReport
    from pallas_kernels.chips import Chip

STEPS = ("prefill_step", "decode_step", "spec_step")
TABLE_WIDTH = 150  # columns, where the output is no terminal
MODEL_OPTIONS = {name: name for name in ("drafter", "plan", "batch", "context", "pages", "tp")}
MODEL_OPTIONS["only"] = "step"


@click.command("compile")
@click.option("--gpu", "gpus", multiple=True, required=True, help="b200, rtx-pro-6000, ...")
@click.option("--kernels", is_flag=True, help="Every case of every kernel.")
@click.option(
    "--case", "wanted", multiple=True, help="With --kernels: only cases whose op/name holds this."
)
@click.option("--model", default=None, help="smollm2, llama-3.1-8b or a GGUF file.")
@click.option("--drafter", default="llama", show_default=True, help="llama, none or a folder.")
@click.option("--plan", default="3,1,4", show_default=True, help="depth,width,nodes of a step.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Slots.")
@click.option(
    "--context", type=click.IntRange(1), default=8192, show_default=True, help="Tokens a request."
)
@click.option("--pages", type=click.IntRange(1), help="Of the cache; else for batch x context.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="GPUs.")
@click.option(
    "--step",
    "only",
    multiple=True,
    type=click.Choice(STEPS),
    help="With --model: only this step.",
)
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def compile_command(
    gpus: tuple[str, ...],
    kernels: bool,
    wanted: tuple[str, ...],
    model: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile for GPUs that are not here, and say what the compiler made of it.

    With --kernels: registers, spills, shared memory and tensor-core instructions of every case, on
    one --gpu or several. With --model: the memory that prefill_step, decode_step and spec_step
    need, without any weights. Nothing is installed; what is missing is named.
    """
    if kernels == (model is not None):
        raise click.UsageError("give either --kernels or --model")
    if wanted and not kernels:
        raise click.UsageError("--case goes with --kernels")
    given = click.get_current_context().get_parameter_source
    if kernels:
        default = click.core.ParameterSource.DEFAULT
        named = [f"--{option}" for name, option in MODEL_OPTIONS.items() if given(name) != default]
        if named:
            raise click.UsageError(f"{', '.join(named)} goes with --model")
    elif len(gpus) > 1:
        raise click.UsageError("--model takes one --gpu")
    if kernels:
        _kernels(_chips(gpus), wanted, as_json)
    else:
        _model(_chips(gpus)[0], str(model), options, as_json)


def _chips(names: tuple[str, ...]) -> list[Chip]:
    from pallas_kernels import chips

    try:
        return [chips.find(name) for name in dict.fromkeys(names)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpu") from None


def _kernels(chips: list[Chip], wanted: tuple[str, ...], as_json: bool) -> None:
    from eaglejax import aot

    aot.prepare()
    from eaglejax import aot_kernels

    reports = []
    for chip in chips:
        for program in aot_kernels.programs(chip, wanted):
            reports.append(aot_kernels.report(chip, program))
            _progress(f"{chip.name}: {program.op}/{program.case}")
    _progress("")
    if not reports:
        raise click.UsageError(f"no kernel case holds {' or '.join(wanted)}")
    _print_kernels(reports)
    if as_json:
        click.echo(json.dumps({"kernels": [report.as_json() for report in reports]}))
    failed = [report for report in reports if not report.compiles]
    if failed:
        for one in failed:
            click.echo(f"{one.op}/{one.case} on {one.gpu}: {one.error}", err=True)
        sys.exit(1)


def _model(chip: Chip, model: str, options: dict[str, Any], as_json: bool) -> None:
    from eaglejax.config import ConfigError, SpecPlan

    if options["tp"] > 1:
        raise ConfigError(
            f"tp = {options['tp']}: expected 1: sharding over GPUs comes with a later part"
        )
    plan = SpecPlan.parse(options["plan"])
    from eaglejax import aot, aot_models

    spec = aot_models.model_spec(model, options["drafter"])
    setting = aot_models.Setting(options["batch"], options["context"], plan, options["pages"])
    pages = aot_models.state(spec, setting).target.num_pages
    steps = [s for s in aot_models.steps(spec, setting) if s.name in (options["only"] or STEPS)]
    if not steps:
        raise ConfigError("step spec_step: expected a drafter and a plan that drafts")
    aot.prepare()
    reports = []
    for step in steps:
        _progress(f"{chip.name}: {step.name}")
        reports.append(aot_models.report(chip, spec, setting, step))
    _progress("")
    _print_programs(chip, model, setting.context, pages, reports)
    if as_json:
        record = {
            "model": model,
            "drafter": options["drafter"],
            "gpu": chip.name,
            "tp": options["tp"],
            "context": setting.context,
            "pages": pages,
            "memory_bytes": chip.memory_bytes,
            "programs": [report.as_json() for report in reports],
        }
        click.echo(json.dumps(record))


def _progress(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=TABLE_WIDTH)


def _print_kernels(reports: list[KernelReport]) -> None:
    from rich.table import Table

    table = Table(title="Kernels", caption="µs: what the chip's memory alone takes")
    for name in ("op", "case", "gpu"):
        table.add_column(name, overflow="fold")
    for name in ("registers", "spills", "shared", "blocks/SM", "tensor", "MB", "µs"):
        table.add_column(name, justify="right")
    for one in reports:
        if one.compiles:
            numbers = (
                f"{one.registers}",
                f"{one.spill_bytes}",
                f"{one.shared_bytes}",
                f"{one.blocks_per_multiprocessor}",
                f"{one.tensor_core_instructions}",
            )
        else:
            numbers = ("refused", "", "", "", "")
        floor = (f"{one.bytes_moved / 1e6:.3f}", f"{1e6 * one.bandwidth_seconds:.2f}")
        table.add_row(one.op, one.case, one.gpu, *numbers, *floor)
    _console().print(table)


def _print_programs(
    chip: Chip, model: str, context: int, pages: int, reports: list[ProgramReport]
) -> None:
    from rich.table import Table

    title = f"{model} on one {chip.name}: {context} tokens a request, {pages} pages"
    table = Table(title=title)
    table.add_column("step")
    for name in ("slots", "rows", "arguments", "temporaries", "outputs", "of memory"):
        table.add_column(name, justify="right")
    for name in ("collectives", "kernels", "in graphs", "seconds"):
        table.add_column(name, justify="right")
    for one in reports:
        sizes = (one.argument_bytes, one.temp_bytes, one.output_bytes)
        table.add_row(
            one.name if one.plan is None else f"{one.name} {one.plan}",
            f"{one.batch}",
            f"{one.rows}",
            *(_size(size) for size in sizes),
            f"{one.total_bytes / chip.memory_bytes:.0%}",
            f"{one.collectives}",
            f"{one.kernels}",
            f"{one.kernels_in_command_buffers:.0%}",
            f"{one.compile_seconds:.1f}",
        )
    console = _console()
    console.print(table)
    for one in reports:
        for what, buffers in (("unpacked weights", one.dequantised), ("copy", one.copies)):
            for buffer in buffers:
                console.print(f"{one.name}: {what}: {buffer}", markup=False)
    if any(one.total_bytes > chip.memory_bytes for one in reports):
        console.print(f"does not fit: {chip.name} has {_size(chip.memory_bytes)}")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
