"""One optimiser step of a drafter, jitted and data-parallel over all devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from checkpoints.eagle3 import DrafterCheckpoint
from eaglejax.config import ConfigError, DrafterConfig, TargetConfig
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target
from eaglejax.train.data import Batch
from eaglejax.train.loss import UnrolledLoss, unrolled_loss
from eaglejax.train.start import continued_params, initial_params
from eaglejax.train.teacher import teach
from pallas_kernels.implementation import Implementation


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained.

    Attributes:
        steps: optimiser steps in all.
        batch_size: packed rows a step, spread over as many devices as divide it.
        sequence_length: tokens of a row; longer chats are cut.
        learning_rate: peak, reached after `warmup` steps, held, then linear to 0.
        decay: share of the steps in the final fall.
        unroll: training-time steps (tokens drafted ahead).
        unroll_decay: loss weight of step i is `unroll_decay**i`.
        clip: global gradient norm.
        seed: of the first weights and of the order of the rows.
        save_minutes: time between checkpoints, which are taken at logged steps.
        keep: newest checkpoints that stay.
        log_every: steps that one record sums up.
    """

    steps: int = 2000
    batch_size: int = 1
    sequence_length: int = 512
    learning_rate: float = 2e-3
    warmup: int = 50
    decay: float = 0.2
    unroll: int = 3
    unroll_decay: float = 0.8
    clip: float = 0.5
    seed: int = 0
    save_minutes: float = 10.0
    keep: int = 2
    log_every: int = 10

    def __post_init__(self) -> None:
        least = dict.fromkeys(("steps", "batch_size", "unroll", "keep", "log_every"), 1)
        least |= {"sequence_length": 3, "warmup": 0, "seed": 0, "save_minutes": 0}
        for field, low in least.items():
            if not getattr(self, field) >= low:
                raise ConfigError(f"{field} = {getattr(self, field)}: expected at least {low}")
        for field in ("learning_rate", "unroll_decay", "clip"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ConfigError(f"{field} = {getattr(self, field)}: expected a positive number")
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay = {self.decay}: expected a share of the steps, 0 to 1")
        if self.unroll >= self.sequence_length:
            raise ConfigError(
                f"unroll = {self.unroll}: expected less than sequence_length = "
                f"{self.sequence_length}"
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


class Frozen(struct.PyTreeNode):
    """What a step reads only: arguments, so that the program holds no copies of big arrays.

    Attributes:
        target_params: variables of the target.
        vocab: the drafter's collection `vocab`.
    """

    target_params: Any
    vocab: Any


def train_step(
    config: TrainConfig,
    target: Target,
    drafter: Drafter,
    state: TrainState,
    batch: Batch,
    frozen: Frozen,
) -> tuple[TrainState, UnrolledLoss]:
    """Teach, unroll, update: one pure step; configuration and modules are static."""
    rows = teach(target, frozen.target_params, frozen.vocab["target_ids"], batch)

    def loss(params: Any) -> tuple[Float[Array, ""], UnrolledLoss]:
        variables = {"params": params, "vocab": frozen.vocab}
        out = unrolled_loss(
            drafter, variables, rows, steps=config.unroll, decay=config.unroll_decay
        )
        return out.loss, out

    grads, out = jax.grad(loss, has_aux=True)(state.params)
    return update(state, grads, out.rows[0], config.optimiser()), out


@dataclass(frozen=True, eq=False)
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
        *,
        kernels: Implementation = "reference",
        earlier: DrafterCheckpoint | None = None,
    ) -> tuple[Trainer, TrainState]:
        """A trainer and its state at step 0.

        Args:
            config: how to train.
            target_config: architecture of the teacher.
            target_params: its variables, in the form that `kernels` take.
            drafter_config: architecture of the drafter.
            target_ids: its draft vocabulary.
            kernels: what the teacher runs on.
            earlier: a drafter to start from, or None to start from the target.

        Raises:
            ConfigError: the drafter does not fit the target, or `earlier` is another architecture.
        """
        _check_pair(drafter_config, target_config)
        devices = jax.devices()
        used = max(n for n in range(1, len(devices) + 1) if config.batch_size % n == 0)
        mesh = Mesh(np.asarray(devices[:used]), ("data",))
        replicated = NamedSharding(mesh, PartitionSpec())
        target_params = jax.device_put(target_params, replicated)
        params = initial_params(
            drafter_config, target_config, target_params, jnp.asarray(target_ids), seed=config.seed
        )
        if earlier is not None:
            params = continued_params(params, target_ids, earlier.params, earlier.target_ids)
        params = jax.device_put(params, replicated)
        # The token embedding is the target's own array, and stays frozen.
        embedding = target_params["params"]["embed"]["embedding"]
        vocab = {"embedding": embedding, "target_ids": jnp.asarray(target_ids)}
        vocab = jax.device_put(vocab, replicated)
        # Two counters, not one array twice: the state is donated, and a buffer only once.
        state = TrainState(params, config.optimiser().init(params), jnp.int32(0), jnp.int32(0) + 0)
        state = jax.device_put(state, replicated)
        target = Target(target_config, drafter_config.feature_layers, kernels)
        drafter = Drafter(drafter_config)
        trainer = cls(config, target, target_params, drafter, vocab, mesh)
        return trainer, state

    def compile(
        self, state: TrainState, batch: Batch
    ) -> Callable[[TrainState, Batch], tuple[TrainState, UnrolledLoss]]:
        """The compiled step for states and batches shaped like these; it consumes the state."""
        frozen = Frozen(self.target_params, self.vocab)
        whole = NamedSharding(self.mesh, PartitionSpec())
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        jitted = jax.jit(
            train_step, static_argnums=(0, 1, 2), donate_argnums=3, out_shardings=whole
        )
        batch = jax.device_put(batch, rows)
        # What only the host reads must not make another program.
        config = replace(self.config, save_minutes=0.0, keep=1, log_every=1)
        compiled = jitted.lower(config, self.target, self.drafter, state, batch, frozen).compile()

        def run(state: TrainState, batch: Batch) -> tuple[TrainState, UnrolledLoss]:
            return compiled(state, jax.device_put(batch, rows), frozen)

        return run


def _check_pair(drafter: DrafterConfig, target: TargetConfig) -> None:
    """Refuses a drafter that cannot learn from this target, before anything is allocated."""
    pairs = {
        # It starts from the target's head and reads the target's token embedding.
        "hidden_size": (drafter.hidden_size, target.hidden_size),
        "target_hidden_size": (drafter.target_hidden_size, target.hidden_size),
        "vocab_size": (drafter.vocab_size, target.vocab_size),
    }
    for field, (found, expected) in pairs.items():
        if found != expected:
            raise ConfigError(f"drafter {field} = {found}: expected the target's {expected}")
    if not all(0 <= layer < target.num_layers for layer in drafter.feature_layers):
        raise ConfigError(
            f"drafter feature_layers = {drafter.feature_layers}: expected layers 0 to "
            f"{target.num_layers - 1} of the target"
        )
