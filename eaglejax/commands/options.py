"""Options and prompt files that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from eaglejax.config import SamplingParams
    from eaglejax.engine.engine import Engine
    from eaglejax.engine.request import Prompt

PROMPT_KEYS = ("prompt", "messages", "token_ids")
# What evaluation files carry beside the prompt; anything else is refused, not ignored.
LABEL_KEYS = ("id", "kind")


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which models, and how they run."""
    for option in reversed(
        [
            click.option(
                "--model", default="smollm2", show_default=True, help="Name or GGUF file."
            ),
            click.option(
                "--drafter",
                default="default",
                show_default=True,
                help="Drafter folder; 'default' is the shipped one, 'none' runs without.",
            ),
            click.option(
                "--spec",
                type=click.Choice(["off", "on", "threshold", "auto"]),
                default=None,
                help="Speculate: never, always, up to a batch size, or when it is measured to be "
                "faster. 'on' where there is a drafter.",
            ),
            click.option(
                "--spec-disable-batch-threshold",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                help="With --spec threshold: more decoding requests run plainly; 0 never does.",
            ),
            click.option(
                "--plan", default="3,1,4", show_default=True, help="depth,width,nodes of a step."
            ),
            click.option(
                "--kernels",
                type=click.Choice(["auto", "cpu", "triton", "reference"]),
                default="auto",
                show_default=True,
                help="Native CPU kernels, GPU kernels, or plain XLA.",
            ),
            click.option(
                "--weights",
                type=click.Choice(["auto", "float32", "int4"]),
                default="auto",
                show_default=True,
                help="float32 dequantises once; int4 is what 'auto' takes with the kernels.",
            ),
            click.option(
                "--activations",
                type=click.Choice(["auto", "int8", "bfloat16", "float32"]),
                default="auto",
                show_default=True,
                help="What INT4 weights meet in the kernels; float32 is exact and slower.",
            ),
        ]
    ):
        command = option(command)
    return command


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How requests sample; names and meanings of SamplingParams."""
    for option in reversed(
        [
            click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
            click.option("--top-k", default=0, show_default=True, help="0: no limit."),
            click.option("--top-p", default=1.0, show_default=True),
            click.option("--min-p", default=0.0, show_default=True),
            click.option("--seed", type=int, default=None, help="Same seed, same text; random."),
            click.option("--max-tokens", default=128, show_default=True),
            click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True),
            click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end."),
        ]
    ):
        command = option(command)
    return command


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """SamplingParams from the options above."""
    from eaglejax.config import SamplingParams

    names = "temperature top_k top_p min_p seed max_tokens stop_token_ids ignore_eos"
    return SamplingParams(**{name: options[name] for name in names.split()})


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file, each with exactly one of `prompt`, `messages`, `token_ids`.

    Raises:
        click.ClickException: the file cannot be read or a line is malformed; names the line.
    """
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise click.ClickException(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise click.ClickException(
                f"{path}, line {number}: expected an object, found {line[:50]}"
            )
        given = [key for key in PROMPT_KEYS if key in row]
        unknown = sorted(set(row) - set(PROMPT_KEYS) - set(LABEL_KEYS))
        if len(given) != 1 or unknown:
            raise click.ClickException(
                f"{path}, line {number}: expected exactly one of {', '.join(PROMPT_KEYS)} "
                f"(and {', '.join(LABEL_KEYS)} if you like), found {', '.join(row) or 'nothing'}"
            )
        if given[0] == "prompt" and not isinstance(row["prompt"], str):
            raise click.ClickException(f"{path}, line {number}: prompt: expected a string")
        if given[0] != "prompt" and not isinstance(row[given[0]], list):
            raise click.ClickException(f"{path}, line {number}: {given[0]}: expected a list")
        rows.append(row)
    if not rows:
        raise click.ClickException(f"{path}: holds no prompts")
    return rows


def prompt_of(row: dict[str, Any]) -> Prompt:
    """The prompt of a row of `read_prompts`."""
    return next(row[key] for key in PROMPT_KEYS if key in row)


def drafter_folder(options: dict[str, Any]) -> Path | None:
    """The drafter that `model_options` name; None for none."""
    from checkpoints.catalogue import shipped_drafter

    name = options["drafter"]
    if name == "default":
        return shipped_drafter(options["model"])
    return None if name == "none" else Path(name)


def open_engine(
    options: dict[str, Any],
    *,
    prompts: list[Any],
    slots: int,
    longest: int,
    max_length: int | None = None,
) -> Engine:
    """Loads models and starts an engine just long enough for the prompts.

    Args:
        options: of `model_options`.
        prompts: what will be run.
        slots: requests in flight.
        longest: most completion tokens.
        max_length: of a request; by default what prompts and completions need.
    """
    from checkpoints.catalogue import model_path
    from checkpoints.eagle3 import read_drafter
    from checkpoints.target import read_target
    from eaglejax.api import start
    from eaglejax.backend import resolve, stored_weights
    from eaglejax.config import EngineConfig, SpecPlan
    from eaglejax.engine.encode import encode_prompt

    model, folder = options["model"], drafter_folder(options)
    spec = options["spec"] or ("off" if folder is None else "on")
    config = resolve(
        EngineConfig(
            max_slots=slots,
            spec=spec,
            spec_disable_batch_threshold=options["spec_disable_batch_threshold"],
            plan=SpecPlan.parse(options["plan"]),
            kernels=options["kernels"],
            weights=options["weights"],
            activations=options["activations"],
        )
    )
    target = read_target(model_path(model), weights=stored_weights(config))
    drafted = None if folder is None else read_drafter(folder, target.config)
    if max_length is None:
        vocab_size = target.config.vocab_size
        ids = [encode_prompt(p, target.tokenizer, target.template, vocab_size) for p in prompts]
        need = max(len(prompt) for prompt in ids) + longest
        # Reference attention reads the whole page table: no longer than needed, in few sizes.
        max_length = max(need, min(-(-need // 256) * 256, target.config.max_position))
    return start(target, drafted, config.replace(max_length=max_length))
