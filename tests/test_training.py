"""Protects drafter training: the loss and its masks, memory, exact resume, and the command.

Scenarios B49, B51 and B54 of the list of known faults; B53 is in test_training_data.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from checkpoints.eagle3 import read_drafter
from eaglejax.commands.train import drafter_config
from eaglejax.commands.train import train as train_command
from eaglejax.config import ConfigError, DrafterConfig, TargetConfig
from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target
from eaglejax.train import teacher as teacher_module
from eaglejax.train.data import Batch, DataError, PackedRows, TokenFile
from eaglejax.train.loop import Trained, TrainingError, _record, train
from eaglejax.train.loss import DraftRows, UnrolledLoss, masked_mean, shift_left, unrolled_loss
from eaglejax.train.start import continued_params
from eaglejax.train.teacher import teach
from eaglejax.train.trainer import Frozen, TrainConfig, TrainState, train_step, update

TARGET = TargetConfig(64, 16, 3, 2, 1, 8, 32, tie_embeddings=True)
DRAFTER = drafter_config(TARGET, draft_vocab=8, intermediate=24)
IDS = np.array([0, 1, 2, 3, 9, 33, 40, 60])
UNROLL, DECAY, LENGTH = 3, 0.8, 12


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation() -> Iterator[None]:
    """Compiling takes longer than running here: half the time without LLVM's optimiser."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_variables(module: Any, first: jax.Array, seed: int = 0, scale: float = 1.0) -> Any:
    """Variables without running (and compiling) initialisers: matrices random, norms near 1."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(
        functools.partial(module.init, method="initialise"), jax.random.key(0), first, tokens
    )
    rng = np.random.default_rng(seed)

    def draw(s: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.arange(s.size, dtype=s.dtype).reshape(s.shape)
        fan = s.shape[-2] if len(s.shape) == 3 else 1
        noise = rng.standard_normal(s.shape).astype(np.float32)
        return jnp.asarray(scale * noise / np.sqrt(fan) if len(s.shape) == 3 else 1 + 0.3 * noise)

    return jax.tree.map(draw, shapes)


@functools.cache
def target_params() -> Any:
    params = random_variables(
        Target(TARGET, DRAFTER.feature_layers), jnp.zeros((1, 1), jnp.int32), scale=1.5
    )
    embedding = np.random.default_rng(5).standard_normal((64, 16))
    embedding[IDS] *= 2  # so that the arg-max is often a token that the drafter has
    params["params"]["embed"]["embedding"] = jnp.asarray(embedding, jnp.float32)
    return params


@functools.cache
def drafter_variables() -> Any:
    variables = random_variables(Drafter(DRAFTER), jnp.zeros((1, 1, DRAFTER.feature_size)), 1)
    embedding = target_params()["params"]["embed"]["embedding"]
    return {
        "params": variables["params"],
        "vocab": {"embedding": embedding, "target_ids": jnp.asarray(IDS, jnp.int32)},
    }


# --- the loss -----------------------------------------------------------------------------------


@functools.cache
def some_rows() -> DraftRows:
    """Two chats in row 0, one and padding in row 1; every row but the padding is supervised."""
    rng = np.random.default_rng(2)
    shape = (2, LENGTH)
    segments = np.array([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2])
    positions = np.array([[*range(7), *range(5)], [*range(10), 0, 0]])
    following = np.pad(segments, ((0, 0), (0, 1)))[:, 1:]
    rows = DraftRows(
        features=rng.standard_normal((*shape, DRAFTER.feature_size)).astype(np.float32),
        tokens=rng.integers(0, 64, shape),
        teacher=3 * rng.standard_normal((*shape, 8)).astype(np.float32),
        teacher_covered=np.ones(shape, bool),
        supervised=(segments > 0) & (segments == following),
        positions=positions,
        segments=segments,
    )
    return jax.tree.map(jnp.asarray, rows)


@functools.cache
def loss_and_gradient() -> Callable[[Any, DraftRows], tuple[Any, UnrolledLoss]]:
    vocab = drafter_variables()["vocab"]

    def loss(params: Any, rows: DraftRows) -> tuple[jax.Array, UnrolledLoss]:
        variables = {"params": params, "vocab": vocab}
        out = unrolled_loss(Drafter(DRAFTER), variables, rows, steps=UNROLL, decay=DECAY)
        return out.loss, out

    return jax.jit(jax.grad(loss, has_aux=True))


def supervise(*where: tuple[int, int]) -> DraftRows:
    mask = np.zeros((2, LENGTH), bool)
    for row, column in where:
        mask[row, column] = True
    return some_rows().replace(supervised=jnp.asarray(mask))


def test_the_mean_is_over_supervised_rows() -> None:
    losses, mask = jnp.array([[2.0, 4.0, 9.0, 9.0]]), jnp.array([[True, True, False, False]])
    assert masked_mean(losses, mask) == 3.0
    empty = jnp.concatenate([mask, jnp.zeros_like(mask)])
    assert masked_mean(jnp.concatenate([losses, 7 * losses]), empty) == 3.0
    value, gradient = jax.value_and_grad(masked_mean)(losses, mask & False)
    assert value == 0
    assert not gradient.any()


def test_the_loss_weighs_tokens_not_samples() -> None:
    params, run = drafter_variables()["params"], loss_and_gradient()
    one, three = supervise((0, 1)), supervise((1, 2), (1, 4), (1, 5))
    _, a = run(params, one)
    _, b = run(params, three)
    _, both = run(params, supervise((0, 1), (1, 2), (1, 4), (1, 5)))
    # Step i supervises what is i rows further; all of these rows have i predecessors in the chat.
    assert [out.rows.tolist() for out in (a, b, both)] == [[1, 1, 0], [3, 3, 3], [4, 4, 3]]
    np.testing.assert_allclose(
        both.losses, (a.losses * a.rows + b.losses * b.rows) / both.rows, rtol=1e-5
    )
    # Separate batches are put together with the same weights: means 2 and 4 of 1 and 3 tokens.
    ones = jnp.ones(UNROLL)
    micro = [
        UnrolledLoss(jnp.float32(0), mean * ones, 0 * ones, jnp.full(UNROLL, rows))
        for mean, rows in ((2.0, 1), (4.0, 3))
    ]
    record = _record(micro, TrainConfig(unroll=UNROLL), 2, 0.0, 0)
    assert record["kl"] == [3.5] * UNROLL
    assert record["supervised_rows"] == 4


def test_a_batch_without_supervision_changes_nothing_and_is_counted() -> None:
    params = drafter_variables()["params"]
    gradient, out = loss_and_gradient()(params, supervise())
    assert float(out.loss) == 0
    assert out.rows.tolist() == [0] * UNROLL
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
    optimiser = TrainConfig(warmup=0).optimiser()
    shapes = jax.eval_shape(optimiser.init, params)
    moments = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)
    before = TrainState(params, moments, jnp.int32(4), jnp.int32(1))
    noise = jax.tree.map(np.ones_like, params)  # not even a gradient could change anything
    after = jax.jit(functools.partial(update, optimiser=optimiser))(before, noise, out.rows[0])
    assert (int(after.step), int(after.skipped)) == (5, 2)
    same((after.params, after.opt_state), (before.params, before.opt_state))


def test_targets_outside_the_draft_vocabulary_are_not_taught() -> None:
    params, run = drafter_variables()["params"], loss_and_gradient()
    rows = supervise((0, 1), (0, 2), (0, 3))
    covered = rows.teacher_covered.at[0, 2].set(False)
    _, out = run(params, rows.replace(teacher_covered=covered))
    _, without = run(params, supervise((0, 1), (0, 3)))
    same(out, without)


def test_a_training_step_is_what_drafting_does() -> None:
    """Row t at step i equals a chain: true features up to t, then i rows on the drafter's own."""
    rows, variables = some_rows(), drafter_variables()
    forward = jax.jit(functools.partial(apply, Drafter(DRAFTER)))
    fused = np.asarray(apply(Drafter(DRAFTER), variables, rows.features, method="fuse"))
    tokens, teacher = np.asarray(rows.tokens), np.asarray(rows.teacher)
    chats = ((0, 0, 7), (0, 7, 12), (1, 0, 10))
    chains = [(row, start, t, end) for row, start, end in chats for t in range(start, end - 1)]
    # Padded to one length; causal rows do not see what comes after them.
    hidden = np.zeros((len(chains), LENGTH, 16), np.float32)
    ids = np.zeros((len(chains), LENGTH), np.int32)
    for n, (row, start, t, end) in enumerate(chains):
        hidden[n, : t - start + 1] = fused[row, start : t + 1]
        ids[n, : end - 1 - start] = tokens[row, start : end - 1]
    _, out = loss_and_gradient()(variables["params"], rows)
    assert out.rows.tolist() == [19, 16, 13]
    total = 0.0
    for i in range(UNROLL):
        output = forward(variables, hidden, ids, np.tile(np.arange(LENGTH), (len(chains), 1)))
        says, wanted, right = [], [], []
        for n, (row, start, t, end) in enumerate(chains):
            at = t - start + i
            if start + at < end - 1:
                says.append(output.logits[n, at])
                wanted.append(teacher[row, t + i])
                right.append(np.argmax(says[-1]) == np.argmax(wanted[-1]))
                hidden[n, at + 1] = output.hidden[n, at]
        p, q = jax.nn.log_softmax(np.array(wanted)), jax.nn.log_softmax(np.array(says))
        kl = float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))
        np.testing.assert_allclose(out.losses[i], kl, rtol=1e-5)
        np.testing.assert_allclose(out.accuracy[i], np.mean(right), rtol=1e-6)
        total += DECAY**i * kl
    np.testing.assert_allclose(out.loss, total, rtol=1e-5)


# --- the teacher --------------------------------------------------------------------------------


def some_batch(rows: int = 2, length: int = LENGTH) -> Batch:
    rng = np.random.default_rng(3)
    shape = (rows, length)
    segments = np.repeat([[1] * 5 + [2] * (length - 5)], rows, 0)
    positions = np.repeat([[*range(5), *range(length - 5)]], rows, 0)
    return Batch(
        jnp.asarray(rng.integers(0, 64, shape)),
        jnp.asarray(positions),
        jnp.asarray(segments),
        jnp.asarray(positions >= 2),
    )


def test_the_teacher_equals_the_dense_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """B54: loss, gradient and arg-max as from an array of all logits."""
    monkeypatch.setattr(teacher_module, "SLICE", 7)  # four slices, the last one not full
    batch, params = some_batch(), target_params()
    embedding = params["params"]["embed"]["embedding"]
    module = Target(TARGET, DRAFTER.feature_layers)
    rows = jax.jit(functools.partial(teach, module))(params, jnp.asarray(IDS), batch)

    same_chat = batch.segments[:, :, None] == batch.segments[:, None, :]
    causal = same_chat & jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool))
    output = jax.jit(functools.partial(apply, module))(
        params, batch.tokens, batch.positions, causal
    )
    logits = shift_left(jnp.einsum("btd,vd->btv", output.hidden, embedding), 1)
    last = np.asarray(shift_left(batch.segments, 1) != batch.segments)
    best = np.asarray(jnp.argmax(logits, -1))
    np.testing.assert_array_equal(rows.teacher_covered, np.isin(best, IDS))
    assert 0 < rows.teacher_covered.mean() < 1
    np.testing.assert_allclose(rows.teacher, logits[..., IDS], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(rows.features, output.features)
    np.testing.assert_array_equal(rows.tokens, shift_left(batch.tokens, 1))
    np.testing.assert_array_equal(rows.supervised, shift_left(batch.supervised, 1) & ~last)

    dense = rows.replace(teacher=logits[..., IDS], teacher_covered=jnp.isin(best, IDS))
    run = loss_and_gradient()
    params = drafter_variables()["params"]
    (g1, out), (g2, reference) = run(params, rows), run(params, dense)
    assert int(out.rows[0]) > 0
    np.testing.assert_allclose(out.loss, reference.loss, rtol=1e-5)
    np.testing.assert_array_equal(out.accuracy, reference.accuracy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), g1, g2)


def test_no_array_of_all_logits_is_made() -> None:
    """B54: the largest intermediate of a whole step has draft-vocabulary columns only."""
    length, vocab, draft = 2048, 128256, 32000
    c = TargetConfig(vocab, 8, 3, 1, 1, 8, 8, tie_embeddings=True)
    d = DrafterConfig(vocab, draft, 8, 8, 1, 1, 8, 8, feature_layers=(0, 1, 2))
    target, drafter, config = Target(c, d.feature_layers), Drafter(d), TrainConfig()
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    one, feature = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, d.feature_size))
    initialise = functools.partial(target.init, method="initialise")
    weights = jax.eval_shape(initialise, jax.random.key(0), one, one)
    initialise = functools.partial(drafter.init, method="initialise")
    variables = jax.eval_shape(initialise, jax.random.key(0), feature, one)
    moments = jax.eval_shape(config.optimiser().init, variables["params"])
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(variables["params"], moments, scalar, scalar)
    batch = Batch(ids, ids, ids, jax.ShapeDtypeStruct((1, length), jnp.bool_))  # type: ignore[arg-type]
    step = functools.partial(train_step, config, target, drafter)
    traced = jax.make_jaxpr(step)(state, batch, Frozen(weights, variables["vocab"]))
    sizes = {aval.shape: aval.size for aval in intermediates(traced.jaxpr)}
    largest = max(sizes, key=lambda shape: sizes[shape])
    assert sizes[largest] == length * draft, largest
    assert not [shape for shape in sizes if vocab in shape and length in shape]


def intermediates(jaxpr: Any) -> Iterator[Any]:
    """Abstract values of all equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in equation.outvars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from intermediates(inner)


# --- runs ---------------------------------------------------------------------------------------

# One configuration, one compiled step. A checkpoint at every record.
CONFIG = TrainConfig(
    steps=9,
    sequence_length=LENGTH,
    unroll=2,
    warmup=2,
    learning_rate=0.01,
    log_every=3,
    keep=9,
    save_minutes=0.0,
)


def corpus(seed: int = 0, low: int = 0, high: int = 30) -> TokenFile:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 14, 20)
    starts = np.cumsum([0, *lengths])
    tokens = rng.integers(low, high, starts[-1]).astype(np.int32)
    return TokenFile(tokens, starts, np.full(20, 2), np.zeros(20, bool))


def run(
    folder: Path,
    *,
    params: Any = None,
    drafter: DrafterConfig = DRAFTER,
    tokens: TokenFile | None = None,
    started: Callable[[int], None] = lambda step: None,
) -> Trained:
    params = target_params() if params is None else params
    tokens = corpus() if tokens is None else tokens
    return train(folder, CONFIG, TARGET, params, drafter, tokens, started=started)


def saved(folder: Path) -> list[int]:
    """Steps that have a checkpoint."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def same(a: Any, b: Any) -> None:
    """Equal to the bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "tokens_per_second"} for x in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """A run in one go."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C while a given step runs."""

    def at(stop: int) -> None:
        original = PackedRows.batch

        def batch(self: PackedRows, step: int, size: int) -> Batch:
            if step == stop and not asked:
                asked.append(step)
                signal.raise_signal(signal.SIGINT)
            return original(self, step, size)

        asked: list[int] = []
        monkeypatch.setattr(PackedRows, "batch", batch)

    return at


def test_a_stopped_run_goes_on_exactly(
    whole: tuple[Path, Trained], tmp_path: Path, stopping: Callable[[int], None]
) -> None:
    folder, reference = whole
    stopping(4)
    first = run(tmp_path)
    assert first.interrupted
    assert int(first.state.step) == 5
    assert saved(tmp_path) == [3, 5]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # What a killed process may leave: records of steps that will be run again, half a line.
    with open(tmp_path / "metrics.jsonl", "a") as log:
        log.write('{"step": 6, "kl": [99.0]}\n{"step": 9, "kl"')
    begins: list[int] = []
    second = run(tmp_path, started=begins.append)
    assert begins == [5]
    assert not second.interrupted
    same(second.state, reference.state)
    same(second.target_ids, reference.target_ids)
    ours, theirs = metrics(tmp_path), metrics(folder)
    assert [record["step"] for record in ours] == [3, 6, 9]
    assert [ours[0], ours[2]] == [theirs[0], theirs[2]]  # 6 sums up one step, not three
    assert theirs[-1]["kl"][0] < theirs[0]["kl"][0]


def test_checkpoints_are_not_overtaken_by_the_next_step(
    whole: tuple[Path, Trained], tmp_path: Path
) -> None:
    """A checkpoint is written while training goes on in the buffers that it came from."""
    folder, reference = whole
    assert saved(folder) == [3, 6, 9]
    shutil.copytree(folder / "checkpoints" / "3", tmp_path / "checkpoints" / "3")
    same(run(tmp_path).state, reference.state)


def test_the_draft_vocabulary_is_kept_on_resume(
    whole: tuple[Path, Trained], tmp_path: Path
) -> None:
    """B51: data with other frequencies; each head row still stands for its own token."""
    folder, reference = whole
    shutil.copytree(folder / "checkpoints" / "6", tmp_path / "checkpoints" / "6")
    resumed = run(tmp_path, tokens=corpus(1, 34, 64))
    assert int(resumed.state.step) == 9
    assert resumed.target_ids.tolist() == reference.target_ids.tolist()
    assert max(resumed.target_ids) < 34
    again = run(tmp_path)
    assert again.target_ids.tolist() == reference.target_ids.tolist()


def test_another_drafter_is_refused(whole: tuple[Path, Trained]) -> None:
    folder, _ = whole
    wider = dataclasses.replace(DRAFTER, draft_vocab_size=9, intermediate_size=32)
    with pytest.raises(ConfigError, match=r"draft_vocab_size = 8 \(asked for: 9\), inter.*= 24"):
        run(folder, drafter=wider)


def test_a_drafter_that_does_not_fit_the_target_is_refused(tmp_path: Path) -> None:
    for change in ({"hidden_size": 8}, {"vocab_size": 65}, {"feature_layers": (0, 1, 3)}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            run(tmp_path, drafter=dataclasses.replace(DRAFTER, **change))


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    bad = UnrolledLoss(jnp.float32(0), jnp.array([1.0, jnp.nan]), jnp.zeros(2), jnp.ones(2, int))
    with pytest.raises(TrainingError, match="step 7: the loss is nan"):
        _record([bad], CONFIG, 7, 0.1, 0)


def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, stopping: Callable[[int], None]
) -> None:
    params = target_params()["params"]
    layers = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params["layers"])
    broken = {"params": {**params, "layers": layers}}
    tokens = corpus(high=8)  # the arg-max of nothing but NaN is 0, which the drafter has here
    with pytest.raises(TrainingError, match="step 3: the loss is nan; nothing was saved"):
        run(tmp_path, params=broken, tokens=tokens)
    stopping(1)
    with pytest.raises(TrainingError, match="step 2: the weights are not finite"):
        run(tmp_path, params=broken, tokens=tokens)
    assert saved(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"decay": 1.5},
        {"warmup": -1},
        {"sequence_length": 2},
        {"unroll": 12},
        {"clip": 0.0},
        {"save_minutes": -1.0},
    ],
)
def test_settings_are_checked(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(CONFIG, **change)


def test_the_learning_rate_warms_up_holds_and_falls() -> None:
    config = TrainConfig(steps=100, warmup=10, learning_rate=1.0, decay=0.2)
    rates = np.asarray(jax.vmap(config.schedule())(jnp.arange(101)))
    np.testing.assert_allclose(rates[:11], np.arange(11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[10:81], 1.0)
    np.testing.assert_allclose(rates[80:], np.arange(20, -1, -1) / 20, atol=1e-6)


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`eaglejax train` on the tiny target and the corpus above."""
    checkpoint = SimpleNamespace(config=TARGET, params=target_params())
    monkeypatch.setattr("checkpoints.target.read_target", lambda path, weights: checkpoint)
    model = tmp_path / "model.gguf"
    model.touch()
    file = corpus()
    tokens = tmp_path / "tokens.safetensors"
    arrays = {"tokens": file.tokens, "doc_start": file.doc_start, "answer_start": file.answer_start}
    save_file(arrays, tokens)
    fixed = (
        "--steps 9 --length 12 --unroll 2 --draft-vocab 8 --intermediate 24 --warmup 2 --lr 0.01 "
        "--kernels reference"
    )
    base = [str(tokens), "--model", str(model), "--out", str(tmp_path / "out"), *fixed.split()]

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(train_command, [*base, *arguments])

    return invoke


def test_the_command_trains_exports_and_goes_on(
    command: Callable[..., Any], tmp_path: Path, stopping: Callable[[int], None]
) -> None:
    stopping(1)
    stopped = command()
    assert stopped.exit_code == 130, stopped.output
    assert "stopped after 2 of 9 steps" in stopped.stderr
    assert not (tmp_path / "out").exists()
    done = command()
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert "going on at step 2 of 9" in lines
    record = next(line for line in lines if line.startswith("step 9/9"))
    for word in ("loss", "accuracy", "simulated acceptance", "tokens/s", "0:00:00 left"):
        assert word in record
    drafter = read_drafter(tmp_path / "out", TARGET)
    assert drafter.config.draft_vocab_size == 8
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())["eaglejax"]
    assert recorded["steps"] == 9
    assert recorded["training"]["sequence_length"] == 12
    again = command("--steps", "2", "--out", str(tmp_path / "copy"), "--run", f"{tmp_path}/out.run")
    assert again.exit_code == 0
    assert "has done 9 steps already" in again.stderr
    copied = read_drafter(tmp_path / "copy", TARGET)
    same(copied.params, drafter.params)


def test_an_earlier_drafter_goes_on_with_another_vocabulary() -> None:
    """Each row of the head follows its token; only tokens that it did not know start afresh."""
    earlier = drafter_variables()["params"]
    ids = np.array([1, 3, 7, 40, 60])
    fresh = jax.tree.map(jnp.zeros_like, {**earlier, "head": {"kernel": jnp.zeros((1, 16, 5))}})
    params = continued_params(fresh, ids, earlier, IDS)
    head, before = np.asarray(params["head"]["kernel"]), np.asarray(earlier["head"]["kernel"])
    for column, token in enumerate(ids):
        known = np.flatnonzero(token == IDS)
        expected = before[..., known[0]] if len(known) else np.zeros((1, 16))
        np.testing.assert_array_equal(head[..., column], expected)
    same({**params, "head": None}, {**earlier, "head": None})
    wider = {**fresh, "fc": {"kernel": jnp.zeros((1, 48, 20))}}
    with pytest.raises(ConfigError, match=r"\['fc'\]\['kernel'\]: expected \(1, 48, 20\), found"):
        continued_params(wider, ids, earlier, IDS)


def test_the_command_starts_from_a_drafter(command: Callable[..., Any], tmp_path: Path) -> None:
    assert command("--steps", "2").exit_code == 0
    first = read_drafter(tmp_path / "out", TARGET)
    start = ("--start-from", str(tmp_path / "out"), "--warmup", "9", "--lr", "1e-9")
    done = command(*start, "--out", str(tmp_path / "more"), "--draft-vocab", "12")
    assert done.exit_code == 0, done.output
    more = read_drafter(tmp_path / "more", TARGET)
    assert set(first.target_ids) < set(more.target_ids)
    body, start_body = ({**d.params, "head": None} for d in (more, first))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), body, start_body)


def test_the_command_refuses_bad_input(command: Callable[..., Any], tmp_path: Path) -> None:
    too_many = command("--draft-vocab", "65")
    assert isinstance(too_many.exception, ConfigError)
    assert "draft_vocab_size = 65: expected at most" in str(too_many.exception)
    short = command("--length", "3", "--unroll", "3")
    assert "unroll = 3" in str(short.exception)
    zero = command("--intermediate", "0")
    assert "intermediate_size = 0" in str(zero.exception)
    (tmp_path / "file").touch()
    blocked = command("--out", str(tmp_path / "file" / "out"))
    assert blocked.exit_code == 1
    assert "cannot be made" in blocked.stderr
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nonsense")
    arguments = [str(bad), "--out", str(tmp_path / "out"), "--draft-vocab", "8"]
    arguments += ["--model", str(tmp_path / "model.gguf")]
    unreadable = CliRunner().invoke(train_command, arguments)
    assert isinstance(unreadable.exception, DataError)
    assert str(bad) in str(unreadable.exception)
