"""A training run: steps, records, checkpoints, and going on exactly where it stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.eagle3 import DrafterCheckpoint
from eaglejax.config import ConfigError, DrafterConfig, RopeConfig, TargetConfig
from eaglejax.train.data import PackedRows, TokenFile, draft_vocabulary
from eaglejax.train.loss import UnrolledLoss, simulated_acceptance_length
from eaglejax.train.trainer import TrainConfig, Trainer, TrainState
from pallas_kernels.implementation import Implementation


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why."""


@dataclass(frozen=True)
class Trained:
    """A drafter as a run left it.

    Attributes:
        config: its architecture.
        target_ids: int64 `[v]`, the target id of each draft id.
        state: weights, moments and counters, saved in the run's newest checkpoint.
        interrupted: stopped before its last step, by Ctrl-C or a signal.
    """

    config: DrafterConfig
    target_ids: np.ndarray
    state: TrainState
    interrupted: bool


def train(
    run_dir: str | Path,
    config: TrainConfig,
    target_config: TargetConfig,
    target_params: Any,
    drafter_config: DrafterConfig,
    tokens: TokenFile,
    *,
    kernels: Implementation = "reference",
    earlier: DrafterCheckpoint | None = None,
    started: Callable[[int], None] = lambda step: None,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Trained:
    """Trains to `config.steps`, from the newest checkpoint of run_dir where there is one.

    The draft vocabulary is made once, from the first run's tokens, and kept on every resume, since
    each row of the head stands for one of its tokens.

    Args:
        run_dir: checkpoints and `metrics.jsonl`.
        config: how to train; on resume it may differ from the first run's.
        target_config: architecture of the teacher.
        target_params: its variables.
        drafter_config: architecture of the drafter; it must be the same on resume.
        tokens: training text.
        kernels: what the teacher runs on; its variables must be in their form.
        earlier: a drafter to start from, or None; a resumed run goes on from its checkpoint.
        started: called once with the first step to run, 0 or the checkpoint's.
        report: called with one record a logged step.

    Raises:
        ConfigError: the drafter does not fit the target, or the checkpoint or the drafter to start
            from is of another architecture.
        DataError: no row of the text can teach.
        TrainingError: the loss or a weight is not finite.
    """
    run_dir = Path(run_dir).absolute()
    rows = PackedRows.pack(tokens, config.sequence_length, seed=config.seed)
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep, enable_async_checkpointing=True)
    with ocp.CheckpointManager(run_dir / "checkpoints", options=options) as manager:
        newest = manager.latest_step()
        if newest is None:
            size = drafter_config.draft_vocab_size
            target_ids = draft_vocabulary(tokens, size, drafter_config.vocab_size)
        else:
            target_ids = _kept_vocabulary(manager, newest, drafter_config, run_dir)
        trainer, state = Trainer.create(
            config,
            target_config,
            target_params,
            drafter_config,
            target_ids,
            kernels=kernels,
            earlier=earlier if newest is None else None,
        )
        if newest is not None:
            state = _restore(manager, newest, state)
        meta = {"drafter": _as_json(drafter_config), "target_ids": target_ids.tolist()}

        copied = jax.jit(partial(jax.tree.map, jnp.copy))

        def save(state: TrainState) -> None:
            # The loss of the last step says nothing of what its update did.
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)):
                raise TrainingError(_hopeless(int(state.step), "the weights are not finite"))
            # A copy: orbax may still be writing while the next step reuses the donated buffers.
            state = copied(state)
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
            )
            manager.save(int(state.step), args=args)

        started(int(state.step))
        state = _steps(trainer, state, rows, run_dir / "metrics.jsonl", save, report)
        done = int(state.step)
        if manager.latest_step() != done:
            save(state)
    return Trained(drafter_config, target_ids, state, done < config.steps)


def _steps(
    trainer: Trainer,
    state: TrainState,
    rows: PackedRows,
    metrics: Path,
    save: Callable[[TrainState], None],
    report: Callable[[dict[str, Any]], None],
) -> TrainState:
    """Runs the remaining steps, or fewer where a signal asks to stop."""
    config = trainer.config
    first = int(state.step)
    _forget_after(metrics, first)
    if first >= config.steps:
        return state
    run = trainer.compile(state, rows.batch(first, config.batch_size))
    schedule = config.schedule()
    last_save = window_start = time.monotonic()
    window: list[UnrolledLoss] = []
    with open(metrics, "a", encoding="utf-8") as log, _stop_requests() as stop:
        for step in range(first, config.steps):
            if stop.is_set():
                break
            state, out = run(state, rows.batch(step, config.batch_size))
            window.append(out)
            done = step + 1
            if done % config.log_every and done != config.steps:
                continue
            record = _record(
                window, config, done, float(np.asarray(schedule(step))), int(state.skipped)
            )
            seconds = time.monotonic() - window_start
            consumed = len(window) * config.batch_size * config.sequence_length
            record["tokens_per_second"] = round(consumed / seconds, 1)
            window_start, window = time.monotonic(), []
            log.write(json.dumps(record) + "\n")
            log.flush()
            report(record)
            if time.monotonic() - last_save >= 60 * config.save_minutes:
                save(state)
                last_save = time.monotonic()
    return state


def _record(
    window: list[UnrolledLoss], config: TrainConfig, step: int, rate: float, skipped: int
) -> dict[str, Any]:
    """Row-weighted means over the steps since the last record.

    Raises:
        TrainingError: the loss is not finite.
    """
    zeros = np.zeros(config.unroll)
    counts = sum((np.asarray(out.rows) for out in window), zeros)

    def mean(field: str) -> np.ndarray:
        weighted = (np.asarray(getattr(out, field)) * np.asarray(out.rows) for out in window)
        return sum(weighted, zeros) / np.maximum(counts, 1)

    kl, accuracy = mean("losses"), mean("accuracy")
    loss = float(np.sum(config.unroll_decay ** np.arange(config.unroll) * kl))
    if not math.isfinite(loss):
        raise TrainingError(_hopeless(step, f"the loss is {loss}"))
    return {
        "step": step,
        "learning_rate": rate,
        "loss": round(loss, 4),
        "kl": [round(float(x), 4) for x in kl],
        "accuracy": [round(float(x), 4) for x in accuracy],
        "simulated_acceptance_length": round(
            float(simulated_acceptance_length(jnp.asarray(accuracy))), 4
        ),
        "supervised_rows": int(counts[0]),
        "skipped_batches": skipped,
    }


def _hopeless(step: int, why: str) -> str:
    return (
        f"step {step}: {why}; nothing was saved since the last checkpoint: run again with a lower "
        "learning rate to go on from there"
    )


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or SIGTERM) sets; a second one interrupts as usual.

    An exception would not do: raised between a step and the assignment of its result, it would
    leave only the old state, whose buffers the step has consumed.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in signals}

    def request(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(number, before[number])

    for number in signals:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number in signals:
            signal.signal(number, before[number])


def _forget_after(metrics: Path, step: int) -> None:
    """Drops records of steps that will be run again, and what a killed process half wrote."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    staging = metrics.with_name(f".{metrics.name}.tmp")
    staging.write_text("".join(kept), encoding="utf-8")
    os.replace(staging, metrics)


def _as_json(config: DrafterConfig) -> dict[str, Any]:
    """The configuration as JSON gives it back (tuples are lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _kept_vocabulary(
    manager: ocp.CheckpointManager, step: int, config: DrafterConfig, run_dir: Path
) -> np.ndarray:
    """The draft vocabulary of a checkpoint, once its architecture is known to be the same."""
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    meta = manager.restore(step, args=args)["meta"]
    # Fields that did not exist when it was written have their defaults.
    found = dict(meta["drafter"])
    found |= {"rope": RopeConfig(**found["rope"]), "feature_layers": tuple(found["feature_layers"])}
    saved, asked = dataclasses.asdict(DrafterConfig(**found)), dataclasses.asdict(config)
    differing = [f"{k} = {saved[k]} (asked for: {asked[k]})" for k in asked if saved[k] != asked[k]]
    if differing:
        raise ConfigError(
            f"{run_dir}: its checkpoint holds another drafter: {', '.join(differing)}"
        )
    return np.asarray(meta["target_ids"], np.int64)


def _restore(manager: ocp.CheckpointManager, step: int, like: TrainState) -> TrainState:
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
    return manager.restore(step, args=args)["state"]
