"""The steps of whole models, compiled for a GPU that is not present, without any weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from checkpoints.eagle3 import read_drafter
from checkpoints.gguf import GGUFFile, Type
from checkpoints.gguf_target import target_config
from eaglejax import hlo, sampling, verify
from eaglejax.aot import compile_for
from eaglejax.backend import DRAFTER_BITS
from eaglejax.config import (
    ConfigError,
    DrafterConfig,
    EngineConfig,
    RopeConfig,
    SpecPlan,
    TargetConfig,
    default_feature_layers,
)
from eaglejax.models.drafter import Drafter
from eaglejax.models.target import Target
from eaglejax.quant import QuantTensor
from eaglejax.state import EngineState
from eaglejax.steps import Models, Params, decode_step, prefill_step, spec_step
from pallas_kernels.chips import Chip
from pallas_kernels.implementation import activation_dtype

Struct = jax.ShapeDtypeStruct
DTYPE = activation_dtype("triton")
DRAFT_VOCAB = 32_000  # of published EAGLE-3 drafters for Llama


@dataclass(frozen=True)
class Quantisation:
    """How the matrices of a stack are stored: in groups, with a minimum or symmetric."""

    group_size: int
    minimum: bool = False
    bits: Literal[4, 8] = 4
    scales: Any = jnp.float16  # and minima

    def struct(self, shape: tuple[int, ...]) -> QuantTensor:
        """A QuantTensor of shapes for matrices `[..., K, N]`."""
        *lead, rows, columns = shape
        scale = Struct((*lead, rows // self.group_size, columns), self.scales)
        packed = (jnp.uint8, columns // 2) if self.bits == 4 else (jnp.int8, columns)
        return QuantTensor(
            Struct((*lead, rows, packed[1]), packed[0]),  # type: ignore[arg-type]
            scale,  # type: ignore[arg-type]
            scale if self.minimum else None,  # type: ignore[arg-type]
            bits=self.bits,
            group_size=self.group_size,
            layout="triton",
        )


@dataclass(frozen=True)
class ModelSpec:
    """A target and a drafter by their shapes.

    Attributes:
        name: as it was asked for.
        target, drafter: architectures.
        quantised: how matrices are stored, by their parameters' names (`q`, `down`, `embed`,
            `head`); one that is missing is bfloat16.
    """

    name: str
    target: TargetConfig
    drafter: DrafterConfig | None
    quantised: dict[str, Quantisation]


MATRICES: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
TARGETS: dict[str, tuple[TargetConfig, dict[str, Quantisation]]] = {
    "smollm2": (
        TargetConfig(
            vocab_size=49_152,
            hidden_size=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            rope=RopeConfig(theta=100_000.0),
            tie_embeddings=True,
            max_position=8192,
        ),
        # GGUF Q4_1, and Q8_0 for the embedding that is the head too
        {
            **dict.fromkeys(MATRICES, Quantisation(32, minimum=True)),
            "embed": Quantisation(32, bits=8),
        },
    ),
    "llama-3.1-8b": (
        TargetConfig(
            vocab_size=128_256,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14_336,
            rope=RopeConfig(theta=500_000.0, kind="llama3", factor=8.0),
            max_position=131_072,
        ),
        dict.fromkeys(
            MATRICES, Quantisation(128, scales=jnp.bfloat16)
        ),  # compressed-tensors W4A16, symmetric
    ),
}
LATER_MODELS = ("kimi-k2.5",)
DRAFTER_QUANTISATION = Quantisation(32, minimum=True)  # as `quantise` makes of a drafter
assert DRAFTER_BITS == 4


def model_spec(model: str, drafter: str) -> ModelSpec:
    """A model by name or GGUF file, and its drafter.

    Args:
        model: "smollm2", "llama-3.1-8b" or a path; of a file only the header is read.
        drafter: "llama" for one decoder layer of the target's own widths, "none", or the folder of
            a drafter.

    Raises:
        ConfigError: a name that is not known, or not supported yet.
        CheckpointError: a file that cannot be used.
    """
    if model in LATER_MODELS:
        raise ConfigError(f"model {model}: not supported yet: MLA and MoE come with a later part")
    if model in TARGETS:
        target, quantised = TARGETS[model]
    elif Path(model).is_file():
        target, quantised = _gguf(Path(model))
    else:
        known = ", ".join(TARGETS)
        raise ConfigError(f"model {model!r}: no such GGUF file, and no known name (known: {known})")
    return ModelSpec(model, target, _drafter(drafter, model, target), quantised)


def _drafter(drafter: str, model: str, target: TargetConfig) -> DrafterConfig | None:
    if drafter == "none":
        return None
    if drafter == "mla":
        raise ConfigError("drafter mla: not supported yet: MLA comes with a later part")
    if drafter != "llama":
        if not Path(drafter).is_dir():
            raise ConfigError(f"drafter {drafter!r}: expected llama, none or a drafter's folder")
        return read_drafter(drafter, target).config
    # The drafter that is shipped for the default model has half of the usual draft vocabulary.
    vocab = 16_384 if model == "smollm2" else min(DRAFT_VOCAB, target.vocab_size)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=vocab,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position=target.max_position,
        feature_layers=default_feature_layers(target.num_layers),
    )


GGUF_NAMES = {
    **{f"attn_{name}": name for name in ("q", "k", "v")},
    "attn_output": "o",
    **{f"ffn_{name}": name for name in ("gate", "up", "down")},
    "token_embd": "embed",
    "output": "head",
}
GGUF_KINDS = {
    Type.Q4_0: Quantisation(32),
    Type.Q4_1: Quantisation(32, minimum=True),
    Type.Q8_0: Quantisation(32, bits=8),
}


def _gguf(path: Path) -> tuple[TargetConfig, dict[str, Quantisation]]:
    """Architecture of a GGUF file, and which matrices are quantised alike in every layer."""
    file = GGUFFile(path)
    config = target_config(file.metadata(), path, tied="output.weight" not in file.by_name)
    quantised = {}
    for name, ours in GGUF_NAMES.items():
        kinds = {
            tensor.tensor_type
            for key, tensor in file.by_name.items()
            if key.split(".", 2)[-1] == f"{name}.weight" or key == f"{name}.weight"
        }
        if len(kinds) == 1 and kinds <= GGUF_KINDS.keys():
            quantised[ours] = GGUF_KINDS[kinds.pop()]
    return config, quantised


def modules(spec: ModelSpec) -> Models:
    """The modules, on the GPU kernels."""
    features = default_feature_layers(spec.target.num_layers)
    if spec.drafter is None:
        return Models(Target(spec.target, features, "triton"))
    target = Target(spec.target, spec.drafter.feature_layers, "triton")
    return Models(target, Drafter(spec.drafter, "triton"))


def parameters(spec: ModelSpec) -> Params:
    """Their variables as shapes, in the form that `eaglejax.backend` brings weights into."""
    one = Struct((1, 1), jnp.int32)
    target = Target(spec.target, (0,))
    variables = _init(target, one, one)

    def stored(path: Any, leaf: Struct) -> Any:
        keys = [entry.key for entry in path]
        if keys[-1] == "scale":
            return leaf
        quantisation = spec.quantised.get(keys[-2])
        if quantisation is None:
            return Struct(leaf.shape, DTYPE)
        # A quantised embedding is stored like a head.
        return quantisation.struct(leaf.shape[::-1] if keys[-1] == "embedding" else leaf.shape)

    target_variables = jax.tree_util.tree_map_with_path(stored, variables)
    embedding = target_variables["params"]["embed"]["embedding"]
    if spec.drafter is None:
        return Params(target_variables)
    drafter = Drafter(spec.drafter)
    feature = Struct((1, 1, spec.drafter.feature_size), jnp.float32)
    drafting = _init(drafter, feature, one)

    def drafted(path: Any, leaf: Struct) -> Any:
        if path[-1].key == "kernel":
            *_, rows, columns = leaf.shape
            if rows % 32 == 0 and columns % 8 == 0:
                return DRAFTER_QUANTISATION.struct(leaf.shape)
        return Struct(leaf.shape, DTYPE if path[-1].key in ("kernel", "embedding") else leaf.dtype)

    drafting = jax.tree_util.tree_map_with_path(drafted, drafting)
    if spec.drafter.hidden_size == spec.target.hidden_size:
        drafting["vocab"]["embedding"] = embedding
    return Params(target_variables, drafting)


def _init(module: Target | Drafter, *inputs: Struct) -> Any:
    init = partial(module.init, method="initialise")
    return jax.eval_shape(init, jax.eval_shape(jax.random.key, 0), *inputs)


@dataclass(frozen=True)
class ProgramReport:
    """One compiled step on one GPU.

    Attributes:
        name: of the step.
        batch: slots it runs.
        plan: of a speculative step.
        rows: tokens a slot that go through the target.
        argument_bytes: weights and state, all that an engine holds whether the step reads it or
            not; an embedding that target and drafter share counts once.
        temp_bytes, output_bytes: what the step needs besides; outputs that take the state's own
            memory do not count.
        collectives: of all kinds, a step.
        kernels: launches a step, about.
        kernels_in_command_buffers: the part of the Pallas kernels that are launched as part of a
            CUDA graph (each counted once however often it runs), 0 to 1.
        compile_seconds: of tracing and compiling.
        dequantised, copies: buffers that should not be, see `eaglejax.hlo`.
    """

    name: str
    batch: int
    plan: str | None
    rows: int
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    collectives: int
    kernels: int
    kernels_in_command_buffers: float
    compile_seconds: float
    dequantised: tuple[str, ...]
    copies: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


StepName = Literal["prefill_step", "decode_step", "spec_step"]


@dataclass(frozen=True)
class Setting:
    """How the model is served.

    Attributes:
        batch: slots.
        context: most tokens a request.
        plan: of speculative steps.
        pages: of the cache; None for `batch` requests of `context` tokens.
    """

    batch: int
    context: int
    plan: SpecPlan
    pages: int | None = None

    def engine(self) -> EngineConfig:
        return EngineConfig(
            max_slots=self.batch,
            max_length=self.context,
            plan=self.plan,
            kernels="triton",
            weights="int4",
            activations="bfloat16",
        )


def state(spec: ModelSpec, setting: Setting) -> EngineState:
    """The engine's state as shapes.

    Raises:
        ConfigError: the model has fewer positions.
    """
    if setting.context > spec.target.max_position:
        raise ConfigError(
            f"context = {setting.context}: expected at most the {spec.target.max_position} "
            f"positions of {spec.name}"
        )
    full = jax.eval_shape(partial(EngineState.create, setting.engine(), spec.target, spec.drafter))
    if setting.pages is None:
        return full

    def resized(pool: Any) -> Any:
        layers, _, *page = pool.shape
        return Struct((layers, setting.pages, *page), pool.dtype)

    draft = None if full.draft is None else jax.tree.map(resized, full.draft)
    return full.replace(target=jax.tree.map(resized, full.target), draft=draft)


@dataclass(frozen=True)
class Step:
    """A step as a function of (parameters, state, *arguments)."""

    name: StepName
    function: Callable[..., Any]
    arguments: tuple[Struct, ...]
    batch: int
    rows: int


def steps(spec: ModelSpec, setting: Setting) -> Iterator[Step]:
    """The greedy steps of an engine: a chunk of one prompt, and all slots."""
    models, engine = modules(spec), setting.engine()
    choose = partial(sampling.greedy, kernels="triton")

    def integers(*shape: int) -> Struct:
        return Struct(shape, jnp.int32)

    rows = min(engine.prefill_chunks[-1], setting.context)
    prefill = partial(prefill_step, models, choose=choose)
    prompt = (integers(1), integers(1, rows), integers(1), Struct((1,), jnp.bool_))
    yield Step("prefill_step", prefill, prompt, 1, rows)
    slots = (integers(setting.batch),)
    decode = partial(decode_step, models, choose=choose)
    yield Step("decode_step", decode, slots, setting.batch, 1)
    if spec.drafter is not None and not setting.plan.is_plain:
        accept = verify.accept_with(choose)

        def speculate(params: Params, state: EngineState, slots: Any) -> Any:
            return spec_step(models, params, state, slots, setting.plan, accept=accept)

        yield Step("spec_step", speculate, slots, setting.batch, setting.plan.nodes)


def report(chip: Chip, spec: ModelSpec, setting: Setting, step: Step) -> ProgramReport:
    """Compiles a step of `steps`.

    Raises:
        Exception: what the compiler says.
    """
    params, before = parameters(spec), state(spec, setting)
    compiled = compile_for(
        chip, step.function, params, before, *step.arguments, donate=(1,), inspect=False
    )
    memory: Any = compiled.executable.memory_analysis()
    module = hlo.Module(compiled.executable.as_text() or "")
    ours = [launch for launch in compiled.launches if launch.pallas]
    return ProgramReport(
        name=step.name,
        batch=step.batch,
        plan=str(setting.plan) if step.name == "spec_step" else None,
        rows=step.rows,
        argument_bytes=_nbytes(params, before, step.arguments),
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        collectives=sum(module.collectives().values()),
        kernels=module.launches(),
        kernels_in_command_buffers=sum(k.in_command_buffer for k in ours) / max(len(ours), 1),
        compile_seconds=compiled.seconds,
        dequantised=tuple(map(str, hlo.dequantised(module, matrices(params)))),
        copies=tuple(map(str, hlo.copies(module, stacks(params, before)))),
    )


def matrices(params: Params) -> set[tuple[int, int]]:
    """`[K, N]` of every quantised matrix."""
    return {(weight.shape[-2], weight.shape[-1]) for weight in _quantised(params)}


def stacks(params: Params, state: EngineState) -> list[Any]:
    """Everything that kernels read in place: packed weights and caches, `[L, ...]`."""
    weights = [weight.values for weight in _quantised(params)]
    caches = [state.target] if state.draft is None else [state.target, state.draft]
    return [*weights, *jax.tree.leaves(caches)]


def _quantised(params: Params) -> list[QuantTensor]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor))
    return [leaf for leaf in leaves if isinstance(leaf, QuantTensor)]


def _nbytes(*trees: Any) -> int:
    """Of all leaves; one that occurs twice, as an embedding that is shared, counts once."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(trees)}
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
