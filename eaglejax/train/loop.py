"""The training loop: one jitted step, data-parallel over all devices, resumed exactly."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from eaglejax.config import ConfigError, DrafterConfig, TargetConfig
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target
from eaglejax.train.data import Batch, PackedRows, TokenFile, draft_vocabulary
from eaglejax.train.loss import UnrolledLoss, simulated_acceptance_length, unrolled_loss
from eaglejax.train.start import initial_variables, target_head
from eaglejax.train.teacher import TeacherHead, teach


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained.

    Attributes:
        steps: optimiser steps in all.
        batch_size: packed rows a step, a multiple of the number of devices.
        sequence_length: tokens of a row; longer chats are cut.
        learning_rate: peak, reached after `warmup` steps, held, then linear to 0.
        decay: share of the steps in the final fall.
        unroll: training-time steps (tokens drafted ahead).
        unroll_decay: loss weight of step i is `unroll_decay**i`.
        clip: global gradient norm.
        draft_vocab_size: most common answer tokens that the drafter can propose.
        save_minutes: time between checkpoints.
    """

    steps: int = 2000
    batch_size: int = 2
    sequence_length: int = 256
    learning_rate: float = 2e-3
    warmup: int = 50
    decay: float = 0.2
    unroll: int = 3
    unroll_decay: float = 0.8
    clip: float = 0.5
    draft_vocab_size: int = 8192
    intermediate_size: int | None = None
    seed: int = 0
    save_minutes: float = 10.0
    keep: int = 2

    def __post_init__(self) -> None:
        for field in ("steps", "batch_size", "sequence_length", "unroll", "draft_vocab_size", "keep"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} = {getattr(self, field)}: expected at least 1")
        if self.learning_rate <= 0 or not 0 <= self.decay <= 1:
            raise ConfigError(
                f"learning_rate = {self.learning_rate}, decay = {self.decay}: expected a positive "
                "rate and a decay share from 0 to 1"
            )

    def schedule(self) -> optax.Schedule:
        """Warm-up, constant, linear fall: the total may be changed on resume without a jump."""
        fall = max(1, round(self.steps * self.decay))
        pieces = [
            optax.linear_schedule(0.0, self.learning_rate, self.warmup),
            optax.constant_schedule(self.learning_rate),
            optax.linear_schedule(self.learning_rate, 0.0, fall),
        ]
        return optax.join_schedules(pieces, [self.warmup, max(self.warmup, self.steps - fall)])

    def optimiser(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule(), b1=0.9, b2=0.95, weight_decay=0.0),
        )


class TrainState(struct.PyTreeNode):
    """Everything that changes, in one pytree; the data order is a function of `step`.

    Attributes:
        params: the drafter's trained parameters, float32.
        opt_state: optimiser moments.
        step: batches consumed.
        skipped: batches without a supervised row, which change nothing.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    skipped: Int[Array, ""]


def update(
    state: TrainState,
    grads: Any,
    rows: Int[Array, ""],
    optimiser: optax.GradientTransformation,
) -> TrainState:
    """One optimiser step; a batch with no supervised row leaves weights and moments untouched."""
    updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    learnt = rows > 0
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(learnt, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    return TrainState(params, opt_state, state.step + 1, state.skipped + (rows == 0))


@dataclass(frozen=True)
class Trainer:
    """A target, a drafter and a configuration, ready to step."""

    config: TrainConfig
    target: Target
    target_params: Any
    drafter: Drafter
    vocab: dict[str, Any]
    mesh: Mesh

    @classmethod
    def create(
        cls,
        config: TrainConfig,
        target_config: TargetConfig,
        target_params: Any,
        drafter_config: DrafterConfig,
        target_ids: np.ndarray,
    ) -> tuple[Trainer, TrainState]:
        """A trainer and its state at step 0."""
        mesh = Mesh(np.asarray(jax.devices()), ("data",))
        if config.batch_size % mesh.size:
            raise ConfigError(
                f"batch_size = {config.batch_size}: expected a multiple of the {mesh.size} devices"
            )
        replicated = NamedSharding(mesh, PartitionSpec())
        target_params = jax.device_put(target_params, replicated)
        variables = initial_variables(
            drafter_config, target_config, target_params, jnp.asarray(target_ids), seed=config.seed
        )
        variables = jax.device_put(variables, replicated)
        params = variables["params"]
        # Two counters, not one array twice: the state is donated, and a buffer only once.
        state = TrainState(params, config.optimiser().init(params), jnp.int32(0), jnp.int32(0) + 0)
        state = jax.device_put(state, replicated)
        target = Target(target_config, drafter_config.feature_layers)
        drafter = Drafter(drafter_config)
        trainer = cls(config, target, target_params, drafter, dict(variables["vocab"]), mesh)
        return trainer, state

    def compile(self) -> Callable[[TrainState, Batch], tuple[TrainState, UnrolledLoss]]:
        """The jitted step: teach, unroll, update."""
        head = TeacherHead.create(
            target_head(self.target_params, self.target.config), self.vocab["target_ids"]
        )
        optimiser, c = self.config.optimiser(), self.config

        def step(
            state: TrainState, batch: Batch, target_params: Any, head: TeacherHead, vocab: Any
        ) -> tuple[TrainState, UnrolledLoss]:
            rows = teach(self.target, target_params, head, batch)

            def loss(params: Any) -> tuple[Float[Array, ""], UnrolledLoss]:
                variables = {"params": params, "vocab": vocab}
                out = unrolled_loss(
                    self.drafter, variables, rows, steps=c.unroll, decay=c.unroll_decay
                )
                return out.loss, out

            grads, out = jax.grad(loss, has_aux=True)(state.params)
            return update(state, grads, out.rows[0], optimiser), out

        jitted = jax.jit(step, donate_argnums=0)
        sharding = NamedSharding(self.mesh, PartitionSpec("data"))

        def run(state: TrainState, batch: Batch) -> tuple[TrainState, UnrolledLoss]:
            placed = jax.device_put(batch, sharding)
            return jitted(state, placed, self.target_params, head, self.vocab)

        return run
