"""`eaglejax generate`: completions of one prompt or a file of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from eaglejax.commands.options import (
    model_options,
    open_engine,
    prompt_of,
    read_prompts,
    sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from eaglejax.engine.engine import Engine
    from eaglejax.engine.request import Completion


@click.command()
@model_options
@click.option("--prompt", help="Text to complete, taken as it is.")
@click.option("--message", help="A user's message; the model's chat template makes the prompt.")
@click.option("--prompts", "prompts_file", help="JSONL; a line has prompt, messages or token_ids.")
@click.option("--batch", default=1, show_default=True, help="Prompts in flight.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="One JSON line a prompt on stdout.")
@click.option("--compare", is_flag=True, help="Run plainly and speculatively, and compare.")
def generate(**options: Any) -> None:
    """Complete prompts, in the order given."""
    given = [name for name in ("prompt", "message", "prompts_file") if options[name] is not None]
    if len(given) != 1:
        raise click.UsageError("give exactly one of --prompt, --message and --prompts")
    if options["batch"] < 1:
        raise click.UsageError(f"--batch {options['batch']}: expected at least 1")
    if options["compare"] and options["batch"] > 1:
        raise click.UsageError("--compare runs one prompt at a time: drop --batch")
    if options["compare"] and (options["as_json"] or options["spec"] == "off"):
        raise click.UsageError(
            "--compare runs both modes and prints a table: drop --json and --spec"
        )
    if given == ["prompts_file"]:
        prompts = [prompt_of(row) for row in read_prompts(options["prompts_file"])]
    elif given == ["message"]:
        prompts = [[{"role": "user", "content": options["message"]}]]
    else:
        prompts = [options["prompt"]]
    params = sampling_params(options)
    slots = min(options["batch"], len(prompts))
    engine = open_engine(options, prompts=prompts, slots=slots, longest=params.max_tokens)
    if options["compare"]:
        _compare(engine, prompts, params, options["plan"])
    elif options["as_json"]:
        for completion in _in_order(engine.generate(prompts, params, stream=True)):
            print(json.dumps(completion.to_json()), flush=True)
    else:
        _print_texts(engine, prompts, params)


def _in_order(chunks: Any) -> Any:
    """Completions in input order, each as soon as it and all before it are done."""
    done: dict[int, Completion] = {}
    following = 0
    for chunk in chunks:
        if chunk.completion is not None:
            done[chunk.index] = chunk.completion
        while following in done:
            yield done.pop(following)
            following += 1


def _print_texts(engine: Engine, prompts: list[Any], params: Any) -> None:
    """Text to stdout as it comes (one prompt) or when done (several); statistics to stderr."""
    if len(prompts) == 1:
        completion = None
        for chunk in engine.generate(prompts, params, stream=True):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            completion = chunk.completion or completion
        print()
        assert completion is not None
        print(describe(completion), file=sys.stderr)
        return
    for number, completion in enumerate(_in_order(engine.generate(prompts, params, stream=True))):
        print(f"--- {number}\n{completion.text}", flush=True)
        print(describe(completion), file=sys.stderr)


def describe(completion: Completion) -> str:
    """One line of statistics for people."""
    s = completion.stats
    speed = "" if s.tokens_per_second is None else f", {s.tokens_per_second:.1f} tokens/s"
    spec = ""
    if s.acceptance_length is not None:
        spec = f", acceptance length {s.acceptance_length:.2f} over {s.verify_steps} verify steps"
    return (
        f"[{s.prompt_tokens} prompt tokens, {s.completion_tokens} completion tokens, "
        f"{completion.finish_reason}{speed}{spec}]"
    )


def _compare(engine: Engine, prompts: list[Any], params: Any, plan: str) -> None:
    """Runs everything twice in one process, plainly and speculatively, and prints both."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if engine.models.drafter is None:
        raise click.UsageError("--compare needs a drafter")
    if params.seed is None and not params.greedy:
        raise click.UsageError("--compare of sampled text needs a --seed")
    results: dict[str, list[Completion]] = {}
    for mode in ("off", "on"):
        results[mode] = []
        for prompt in prompts:
            console.rule(f"speculation {mode}" + (f", plan {plan}" if mode == "on" else ""))
            # Printed when done, so that the terminal's time is not the model's.
            chunks = list(engine.generate([prompt], params, stream=True, spec=mode))
            for piece, was_drafted in (piece for chunk in chunks for piece in chunk.pieces):
                console.print(Text(piece, style="bold green" if was_drafted else ""), end="")
            console.print()
            completion = chunks[-1].completion
            assert completion is not None
            results[mode].append(completion)
    same = all(
        a.token_ids == b.token_ids for a, b in zip(results["off"], results["on"], strict=True)
    )
    table = Table(title="what speculation gained (green text was drafted and accepted)")
    for column in ("", "tokens", "target passes", "acceptance length", "tokens/s", "speed-up"):
        table.add_column(column, justify="left" if not column else "right")
    speeds = {mode: _speed(done) for mode, done in results.items()}
    for mode, name in (("off", "plain"), ("on", f"speculative {plan}")):
        stats = [c.stats for c in results[mode]]
        tokens = sum(s.completion_tokens for s in stats)
        after_first = tokens - len(stats)
        passes = sum(s.verify_steps for s in stats) if mode == "on" else after_first
        table.add_row(
            name,
            str(tokens),
            str(passes),
            f"{after_first / passes:.2f}" if passes else "-",
            f"{speeds[mode]:.1f}",
            f"{speeds[mode] / speeds['off']:.2f}x" if speeds["off"] else "-",
        )
    console.print(table)
    console.print("the two texts are identical" if same else "[red]the two texts DIFFER[/red]")
    if not same:
        raise SystemExit(1)


def _speed(completions: list[Completion]) -> float:
    """Tokens after the first ones, per second of decoding."""
    tokens = sum(c.stats.completion_tokens - 1 for c in completions)
    seconds = sum(c.stats.decode_seconds for c in completions)
    return tokens / seconds if seconds else 0.0
