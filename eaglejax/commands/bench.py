"""`eaglejax bench`: measured speed, a table for people and one JSON line for programs."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import click

from eaglejax.commands.options import (
    drafter_folder,
    model_options,
    open_engine,
    prompt_of,
    read_prompts,
)

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.rows import Contender, Row
    from eaglejax.config import SpecPlan
    from eaglejax.engine.engine import Engine

PEER_BATCHES = "1,16"  # with --peers: a request alone, and what llama.cpp gains by batching
PREFILL_LENGTH = 512  # llama-bench's pp512
TABLE_WIDTH = 110  # columns


@click.group()
def bench() -> None:
    """Measure speed, always against plain decoding in the same run."""


def _batches(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    if text is None:
        text = PEER_BATCHES if context.params.get("peers") else "1"
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected numbers, like 1,16") from None
    if min(batches) < 1 or len(set(batches)) < len(batches):
        raise click.BadParameter(f"{text!r}: expected different numbers of 1 or more")
    return batches


def _peers(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    from benchmarks.peers import setup

    peers = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [peer for peer in peers if peer not in setup.PEERS]
    if unknown:
        known = ", ".join(setup.PEERS)
        raise click.BadParameter(f"{', '.join(unknown)}: expected some of {known}")
    return list(dict.fromkeys(peers))


def _plans(context: click.Context, parameter: click.Parameter, text: str) -> list[SpecPlan]:
    from eaglejax.config import ConfigError, SpecPlan

    try:
        return [SpecPlan.parse(part) for part in text.split(";")]
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


@bench.command()
@model_options
@click.option(
    "--peers",
    default="",
    callback=_peers,
    is_eager=True,  # the default of --batch depends on it
    help="Other engines on the same file, in turn with ours: llama.cpp,openvino.",
)
@click.option("--prompts", "prompts_file", help="JSONL; the evaluation prompts by default.")
@click.option(
    "--limit", default=20, show_default=True, help="Prompts taken, spread evenly over the file."
)
@click.option(
    "--plans",
    default="1,1,2;3,1,4;4,4,16",
    show_default=True,
    callback=_plans,
    help="Plans to compare.",
)
@click.option(
    "--batch",
    "batches",
    callback=_batches,
    help=f"Requests in flight, one number or several; 1, with --peers {PEER_BATCHES}.",
)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON line on stdout, last.")
def decode(**options: Any) -> None:
    """Decoding: plain and speculative, greedy, interleaved; and processing a 512-token prompt."""
    from benchmarks import rows as benchmark
    from benchmarks.bandwidth import read_bandwidth, usable_cores
    from benchmarks.decode import machine
    from checkpoints.catalogue import model_path

    for name in ("limit", "repeats", "max_tokens"):
        if options[name] < 1:
            raise click.UsageError(
                f"--{name.replace('_', '-')} {options[name]}: expected 1 or more"
            )
    console = _console(stderr=True)

    def progress(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    _check_installed(options["peers"], progress)

    bandwidth = read_bandwidth()
    size = model_path(options["model"]).stat().st_size
    progress(
        f"memory: {bandwidth / 1e9:.1f} GB/s read by {usable_cores()} threads; the model's file is "
        f"{size / 1e6:.0f} MB, so plain decoding of one request can reach "
        f"{bandwidth / size:.0f} tokens/s at most"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_exit_on_sigterm())
        contenders, count = _contenders(options, stack)
        rows, missing = benchmark.measure(contenders, options["repeats"], progress)
    for one in missing:
        what = f"{one.engine} {one.mode} {one.plan or ''}".strip()
        progress(f"no row for {what}, batch {one.batch}: unavailable: {one.reason}")
    table = f"{count} prompts, up to {options['max_tokens']} tokens each, greedy"
    _print_table(console if options["as_json"] else _console(stderr=False), table, rows)
    if options["as_json"]:
        facts = machine() | {
            "threads": usable_cores(),
            "read_gb_per_second": round(bandwidth / 1e9, 2),
            "model_bytes": size,
        }
        print(json.dumps(benchmark.as_json(rows, missing, facts)))


# Plans come as a list here, and both modes are always run.
decode.params = [p for p in decode.params if p.name not in ("plan", "spec")]


def _check_installed(peers: list[str], progress: Callable[[str], None]) -> None:
    """Fails before anything is loaded when an engine that was asked for is not there."""
    from benchmarks.peers import setup
    from benchmarks.rows import LLAMACPP

    folder = setup.peers_folder()
    advice = [text for peer in peers if (text := setup.missing(peer, folder)) is not None]
    if advice:
        raise click.ClickException("\n".join(advice))
    if LLAMACPP in peers and not setup.has_programs(folder):
        progress(
            f"{LLAMACPP}: measured through its Python binding, one plain request only, since "
            f"{setup.INSTALL[LLAMACPP]}"
        )


def _contenders(
    options: dict[str, Any], stack: contextlib.ExitStack
) -> tuple[list[Contender], int]:
    """All that is measured, compiled and warm, and how many prompts each one gets."""
    from benchmarks import decode as ours
    from benchmarks.bandwidth import usable_cores
    from benchmarks.peers import binding, llamacpp, openvino, setup
    from benchmarks.rows import LLAMACPP, OPENVINO, refusing
    from checkpoints.catalogue import model_path
    from eaglejax.config import SamplingParams

    source = drafter_folder(options)
    if source is None:
        raise click.UsageError("bench decode compares with speculation: it needs a drafter")
    path = options["prompts_file"] or str(resources.files("benchmarks") / "prompts" / "eval.jsonl")
    every = [prompt_of(row) for row in read_prompts(path)]
    limit = min(options["limit"], len(every))
    chosen = [every[i * len(every) // limit] for i in range(limit)]
    plans, peers, longest = options["plans"], options["peers"], options["max_tokens"]
    engine = open_engine(
        {**options, "plan": str(plans[0]), "spec": None}, prompts=chosen, slots=1, longest=longest
    )
    # As ids, so that every engine gets the same ones whatever it thinks of templates.
    prompts = [engine.encode(prompt) for prompt in chosen]
    params = SamplingParams(max_tokens=longest)
    long_prompt = _long_prompt(engine)
    model = model_path(options["model"])
    folder, threads = setup.peers_folder(), usable_cores()
    rival = None
    if LLAMACPP in peers and setup.has_programs(folder):
        programs = setup.find_programs(folder)
        drafter = setup.converted_drafter(folder, source)
        rival = llamacpp.LlamaCpp(programs, model, drafter, threads)

    contenders = []
    for batch in dict.fromkeys(min(batch, limit) for batch in options["batches"]):
        # Whole rounds only: slots that run empty at the end would blur what a batch gains.
        some = prompts[: limit // batch * batch]
        contenders += ours.decoding(engine, plans, some, params, batch)
        if rival is not None:
            contenders += rival.decoding(stack, plans, some, longest, batch)
            if batch > 1:
                typical = sum(map(len, some)) // len(some)
                contenders.append(rival.batched_bench(typical, longest, batch))
        elif LLAMACPP in peers and batch == 1:
            contenders.append(binding.contender(stack, model, threads, some, longest))
        elif LLAMACPP in peers:
            contenders.append(refusing(LLAMACPP, "plain", None, batch, setup.INSTALL[LLAMACPP]))
        if OPENVINO in peers and batch == 1:
            contenders += openvino.contenders(stack, model, threads, some, longest, long_prompt)
        elif OPENVINO in peers:
            reason = "it is measured with one request at a time only"
            contenders.append(refusing(OPENVINO, "plain", None, batch, reason))
    contenders.append(ours.prefill(engine, long_prompt))
    if rival is not None:
        contenders.append(rival.prefill(len(long_prompt)))
    return contenders, limit


@bench.command()
@model_options
@click.option("--plans", default="3,1,4;5,1,6", show_default=True, callback=_plans)
@click.option("--context", default=200, show_default=True, help="Committed tokens of the request.")
@click.option(
    "--repeats", default=20, show_default=True, help="Calls timed a part; the best counts."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line on stdout, last.")
def step(**options: Any) -> None:
    """Where a step's time goes, part by part, and what each plan's step costs."""
    from dataclasses import asdict

    from rich import box
    from rich.table import Table

    from benchmarks import parts as benchmark
    from benchmarks.bandwidth import read_bandwidth, usable_cores
    from benchmarks.decode import machine

    for name in ("context", "repeats"):
        if options[name] < 4:
            raise click.UsageError(f"--{name} {options[name]}: expected 4 or more")
    bandwidth = read_bandwidth() / 1e9
    first = open_engine(
        {**options, "plan": str(options["plans"][0]), "spec": None},
        prompts=[[1]],
        slots=1,
        longest=1,
        max_length=options["context"] + 64,
    )
    found, costs = [], []
    for plan in options["plans"]:
        try:
            parts = benchmark.measure(
                first.with_plan(plan), context=options["context"], repeats=options["repeats"]
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        found += [
            part for part in parts if part not in found and (part.step != "plain" or not found)
        ]
        cost = benchmark.cost(parts)
        costs += [] if cost is None else [cost]
    console = _console(stderr=options["as_json"])
    table = Table(title=f"one request, {options['context']} tokens", box=box.SIMPLE_HEAD)
    for column in ("step", "part"):
        table.add_column(column)
    for column in ("ms", "MB", "GB/s"):
        table.add_column(column, justify="right")
    for part in found:
        size, speed = part.megabytes, part.gb_per_second
        cells = ["" if x is None else f"{x:.1f}" for x in (size, speed)]
        table.add_row(part.step, part.name, f"{part.milliseconds:.3f}", *cells)
    console.print(table)
    stream = next(p.gb_per_second for p in found if p.name == benchmark.ALL_MATRICES) or 0.0
    console.print(
        f"memory: {bandwidth:.1f} GB/s read by {usable_cores()} threads; the matrices' stream "
        f"reaches {stream / bandwidth:.0%} of it",
        highlight=False,
    )
    for cost in costs:
        gains = ", ".join(
            f"{cost.tokens_per_second[length]:.0f} tokens/s ({gain:.2f}x) at length {length}"
            for length, gain in cost.gain.items()
        )
        text = f"plan {cost.plan}: a step costs {cost.plain_steps:.2f} plain ones: {gains}"
        console.print(text, highlight=False)
    if options["as_json"]:
        facts = machine() | {"read_gb_per_second": round(bandwidth, 2), "threads": usable_cores()}
        rows = [asdict(part) | {"gb_per_second": part.gb_per_second} for part in found]
        print(json.dumps({"parts": rows, "plans": list(map(asdict, costs)), "machine": facts}))


def _long_prompt(engine: Engine) -> list[int]:
    """Ids of no special meaning, since only their number matters; always the same ones."""
    vocab = engine.models.target.config.vocab_size
    return [vocab // 8 + 7919 * i % (vocab // 2) for i in range(PREFILL_LENGTH)]


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the command as Ctrl-C does, so that servers are stopped too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _console(*, stderr: bool) -> Console:
    """Wide enough for the table in a file or a pipe, where rich would take 80 columns."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if terminal else TABLE_WIDTH)


def _print_table(console: Console, title: str, rows: list[Row]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in ("engine", "mode"):
        table.add_column(column)
    for column in ("batch", "tokens/s", "interval", "acceptance", "to plain", "to llama.cpp"):
        table.add_column(column, justify="right")

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    for row in rows:
        low, high = row.interval
        accepted = "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}"
        table.add_row(
            *(row.engine, f"{row.mode} {row.plan or ''}", str(row.batch)),
            *(f"{row.tokens_per_second:.1f}", f"{low:.1f} to {high:.1f}", accepted),
            *(ratio(row.ratio_to_plain), ratio(row.ratio_to_llamacpp)),
        )
    console.print(table)
