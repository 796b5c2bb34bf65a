"""`eaglejax train`: from token files to a drafter folder."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from eaglejax.config import DrafterConfig, TargetConfig
    from eaglejax.train.trainer import TrainConfig

# Options of this command -> fields of TrainConfig.
FIELDS = {
    "steps": "steps",
    "batch": "batch_size",
    "length": "sequence_length",
    "lr": "learning_rate",
    "warmup": "warmup",
    "decay": "decay",
    "unroll": "unroll",
    "unroll_decay": "unroll_decay",
    "clip": "clip",
    "seed": "seed",
    "save_minutes": "save_minutes",
}


@click.command(context_settings={"show_default": True})
@click.argument("token_file", type=click.Path(exists=True, dir_okay=False))
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Drafter folder.")
@click.option(
    "--run", "run_dir", type=click.Path(file_okay=False), help="Checkpoints and metrics; OUT.run."
)
@click.option("--model", default="smollm2", help="Target: a known name or a GGUF file.")
@click.option("--steps", default=2000, help="Optimiser steps in all.")
@click.option("--batch", default=1, help="Rows a step.")
@click.option("--length", default=512, help="Tokens a row; longer chats are cut.")
@click.option("--lr", default=2e-3, help="Peak learning rate.")
@click.option("--warmup", default=50, help="Steps to the peak.")
@click.option("--decay", default=0.2, help="Share of the steps in the final linear fall.")
@click.option("--unroll", default=3, help="Training-time steps.")
@click.option("--unroll-decay", default=0.8, help="Loss weight of step i is this to the power i.")
@click.option("--clip", default=0.5, help="Largest gradient norm.")
@click.option("--draft-vocab", default=8192, help="Tokens that the drafter can propose.")
@click.option("--intermediate", default=None, type=int, help="MLP width; the target's.")
@click.option(
    "--start-from",
    type=click.Path(exists=True, file_okay=False),
    help="Drafter folder to go on from; its draft vocabulary may be another.",
)
@click.option(
    "--kernels",
    type=click.Choice(["auto", "cpu", "reference"]),
    default="auto",
    help="What the target runs on; the drafter is trained on plain XLA.",
)
@click.option("--seed", default=0)
@click.option("--save-minutes", default=10.0, help="Time between checkpoints.")
def train(**options: Any) -> None:
    """Train an EAGLE-3 drafter on TOKEN_FILE (safetensors, docs/training.md).

    Stop it with Ctrl-C and run the same command again: it goes on where it was, from the newest
    checkpoint of the run folder. With --steps at or below what the run has done it only exports.
    """
    from rich.console import Console

    from checkpoints.catalogue import model_path
    from checkpoints.eagle3 import read_drafter, write_drafter
    from checkpoints.target import read_target
    from eaglejax.backend import implementation, resolve, stored_weights, target_weights
    from eaglejax.config import EngineConfig
    from eaglejax.train.data import TokenFile
    from eaglejax.train.loop import train
    from eaglejax.train.trainer import TrainConfig

    console = Console(stderr=True)
    config = TrainConfig(**{field: options[name] for name, field in FIELDS.items()})
    out = Path(options["out"])
    run_dir = Path(options["run_dir"] or f"{out}.run")
    _check_writable(out.absolute().parent, run_dir)
    engine = resolve(EngineConfig(kernels=options["kernels"]))
    target = read_target(model_path(options["model"]), weights=stored_weights(engine))
    earlier = options["start_from"] and read_drafter(options["start_from"], target.config)
    drafter = drafter_config(target.config, options["draft_vocab"], options["intermediate"])
    tokens = TokenFile.load(options["token_file"], target.config.vocab_size)
    logging.getLogger("absl").setLevel(logging.WARNING)
    display = (Bar if console.is_terminal else Lines)(console, config)
    with display:
        result = train(
            run_dir,
            config,
            target.config,
            target_weights(target.params, engine),
            drafter,
            tokens,
            kernels=implementation(engine),
            earlier=earlier or None,
            started=display.started,
            report=display.report,
        )
    steps = int(result.state.step)
    if result.interrupted:
        console.print(
            f"stopped after {steps} of {config.steps} steps; run the same command again to go on, "
            f"or with --steps {steps} to export the drafter as it is",
            highlight=False,
        )
        raise SystemExit(130)
    extra = {"training": dataclasses.asdict(config), "steps": steps}
    write_drafter(
        out,
        result.config,
        result.state.params,
        result.target_ids,
        target_config=target.config,
        extra=extra,
    )
    console.print(f"drafter written to {out} after {steps} steps", highlight=False)


def _check_writable(*folders: Path) -> None:
    """Makes the folders now: hours of training later is a bad time to find that they cannot be."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"{folder}: cannot be made: {error}") from error
        if not os.access(folder, os.W_OK):
            raise click.ClickException(f"{folder}: cannot be written to")


def drafter_config(c: TargetConfig, draft_vocab: int, intermediate: int | None) -> DrafterConfig:
    """A drafter shaped like one layer of the target."""
    from eaglejax.config import DrafterConfig, default_feature_layers

    return DrafterConfig(
        vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size if intermediate is None else intermediate,
        rms_norm_eps=c.rms_norm_eps,
        rope=c.rope,
        max_position=c.max_position,
        feature_layers=default_feature_layers(c.num_layers),
    )


class Lines:
    """One plain line a record, for logs."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        self.console, self.config = console, config

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def started(self, step: int) -> None:
        self._line(_start_text(step, self.config.steps))

    def report(self, record: dict[str, Any]) -> None:
        self._line(f"step {record['step']}/{self.config.steps}  {_text(record, self.config)}")

    def _line(self, text: str) -> None:
        # Not Console.print: it would wrap the line at 80 columns.
        print(text, file=self.console.file, flush=True)


class Bar:
    """A progress bar with the newest figures under it, for terminals."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        columns = (BarColumn(), MofNCompleteColumn(), Elapsed(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console)
        self.console, self.config = console, config

    def __enter__(self) -> None:
        self.progress.start()

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def started(self, step: int) -> None:
        total = self.config.steps
        self.console.print(_start_text(step, total), highlight=False)
        self.task = self.progress.add_task("compiling", total=total, completed=min(step, total))

    def report(self, record: dict[str, Any]) -> None:
        text = _text(record, self.config)
        self.progress.update(self.task, completed=record["step"], description=text)


def _start_text(step: int, total: int) -> str:
    if step >= total:
        return f"this run has done {step} steps already"
    return f"going on at step {step} of {total}" if step else f"starting, {total} steps to go"


def _text(record: dict[str, Any], config: TrainConfig) -> str:
    """The figures of a record, with the time that the remaining steps will take."""
    rate = record["tokens_per_second"]
    left = (config.steps - record["step"]) * config.batch_size * config.sequence_length
    minutes, seconds = divmod(round(left / rate) if rate else 0, 60)
    accuracy = " ".join(f"{share:.3f}" for share in record["accuracy"])
    skipped = record["skipped_batches"]
    return (
        f"loss {record['loss']:.3f}  accuracy {accuracy}  "
        f"simulated acceptance {record['simulated_acceptance_length']:.2f}  "
        f"{rate:.0f} tokens/s  {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
        + (f"  {skipped} batches skipped" if skipped else "")
    )
