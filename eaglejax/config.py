"""What a model, a plan, a request and an engine are: frozen, hashable, checked when constructed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


class ConfigError(ValueError):
    """A value that cannot be used; the message names the field, the value and what fits."""


def _require(condition: bool, field: str, found: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{field} = {found!r}: expected {expected}")


SIZES = (
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "target_hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position",
)


def _require_positive(config: object) -> None:
    """All sizes that a configuration has are positive integers."""
    for field in SIZES:
        value = getattr(config, field, 1)
        _require(isinstance(value, int) and value > 0, field, value, "a positive integer")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and optional context extension (names as in HF `rope_scaling`)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 1.0  # yarn
    mscale_all_dim: float = 0.0  # yarn

    def __post_init__(self) -> None:
        kinds = ("default", "linear", "llama3", "yarn")
        _require(self.kind in kinds, "rope kind", self.kind, f"one of {kinds}")
        _require(self.theta > 0, "rope theta", self.theta, "a positive number")
        _require(self.factor > 0, "rope factor", self.factor, "a positive number")


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The target layers whose outputs feed an EAGLE-3 drafter: 0-based, low, middle, high.

    EAGLE-3 captures the residual stream *before* layers 2, N//2 and N-3, which is the output of the
    layer below each. Models of fewer than five layers get the nearest layers that exist.
    """
    last = num_layers - 1
    low, middle, high = 1, num_layers // 2 - 1, num_layers - 4
    return tuple(min(max(i, 0), last) for i in (low, middle, high))  # type: ignore[return-value]


@dataclass(frozen=True)
class TargetConfig:
    """Architecture of a Llama-type target."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    max_position: int = 8192

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads = {self.num_heads}",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rotary pairs)")


@dataclass(frozen=True)
class DrafterConfig:
    """Architecture of a one-layer Llama-type EAGLE-3 / EAGLE-3.1 drafter (docs/formats.md)."""

    vocab_size: int  # of the target
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_position: int = 2048
    feature_layers: tuple[int, ...] = (1, 14, 26)  # 0-based: output of target layer i
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one RMSNorm over the concatenated features
    fc_norm: bool = False  # EAGLE-3.1: one RMSNorm per feature chunk
    norm_output: bool = False  # EAGLE-3.1: the next draft row gets the normed hidden state

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(
            self.draft_vocab_size <= self.vocab_size,
            "draft_vocab_size",
            self.draft_vocab_size,
            f"at most the target's vocab_size = {self.vocab_size}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads = {self.num_heads}",
        )
        _require(
            not (self.norm_before_fc and self.fc_norm),
            "fc_norm",
            self.fc_norm,
            "False when norm_before_fc is True (they exclude each other)",
        )
        _require(
            len(self.feature_layers) >= 1,
            "feature_layers",
            self.feature_layers,
            "at least one target layer",
        )

    @property
    def feature_size(self) -> int:
        """Width of one feature: the concatenated hidden states of the target's feature layers."""
        return len(self.feature_layers) * self.target_hidden_size


@dataclass(frozen=True)
class SpecPlan:
    """How much to draft: `depth` tokens on a path, `width` children a level, `nodes` rows verified.

    `nodes` counts the root (SGLang's num_draft_tokens, EAGLE's total_token). A chain is
    (d, 1, d+1); (0, 1, 1) is plain decoding. EAGLE's own "depth 3, top_k 4, total 12" is
    (4, 4, 12) here.
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        _require(0 <= self.depth <= 15, "plan depth", self.depth, "0 to 15")
        _require(1 <= self.width <= 16, "plan width", self.width, "1 to 16")
        _require(1 <= self.nodes <= 64, "plan nodes", self.nodes, "1 to 64")
        if self.width == 1:
            expected = f"depth + 1 = {self.depth + 1} for a chain"
            _require(self.nodes == self.depth + 1, "plan nodes", self.nodes, expected)
        else:
            _require(self.depth >= 1, "plan depth", self.depth, "at least 1 for a tree")
            most = self.recorded + 1
            expected = f"{self.depth + 1} (root and one path) to {most} (root and all drafted)"
            _require(self.depth + 1 <= self.nodes <= most, "plan nodes", self.nodes, expected)

    @property
    def recorded(self) -> int:
        """Candidates recorded while the tree grows: k + (depth-1) k^2 (EAGLE-2 section 4.1)."""
        if self.depth == 0:
            return 0
        return self.width + (self.depth - 1) * self.width * self.width

    @property
    def is_plain(self) -> bool:
        return self.depth == 0

    @classmethod
    def parse(cls, text: str) -> SpecPlan:
        """Reads `depth,width,nodes`; `nodes` may be left out for chains (width 1)."""
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"plan = {text!r}: expected integers depth,width,nodes") from None
        if len(numbers) == 2 and numbers[1] == 1:
            numbers.append(numbers[0] + 1)
        if len(numbers) != 3:
            raise ConfigError(
                f"plan = {text!r}: expected depth,width,nodes (nodes may be left out for width 1)"
            )
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.depth},{self.width},{self.nodes}"


PLAIN = SpecPlan(0, 1, 1)
MAX_STOP_IDS = 16


@dataclass(frozen=True)
class SamplingParams:
    """How one request samples. Order: temperature, top_k, top_p, min_p (docs/sampling.md).

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all; tokens tied with the k-th are kept.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p.
        min_p: keep tokens at least min_p times as likely as the likeliest.
        seed: of the request; None draws one. The same seed gives the same text in every mode.
        max_tokens: completion budget, stop token included.
        stop_token_ids: further ids that end the text, beside the model's own.
        ignore_eos: the model's own end-of-text ids do not stop (stop_token_ids still do).
        stop: strings that end the text; they are not part of it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        finite = isinstance(self.temperature, (int, float)) and math.isfinite(self.temperature)
        _require(
            finite and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a number of 0 or more",
        )
        _require(
            isinstance(self.top_k, int) and self.top_k >= -1,
            "top_k",
            self.top_k,
            "a positive integer, or 0 or -1 for no limit",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0, at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(
            self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**32),
            "seed",
            self.seed,
            "an integer from 0 to 2**32 - 1",
        )
        _require(
            isinstance(self.max_tokens, int) and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "a positive integer",
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(
            all(isinstance(i, int) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids of 0 or more",
        )
        strings = (self.stop,) if isinstance(self.stop, str) else self.stop
        several = isinstance(strings, (tuple, list))
        _require(
            several and all(isinstance(s, str) and s for s in strings),
            "stop",
            strings,
            "non-empty strings",
        )
        object.__setattr__(self, "stop", tuple(strings))

    @property
    def greedy(self) -> bool:
        """Nothing is drawn: the likeliest token always."""
        return self.temperature == 0


GREEDY = SamplingParams()


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs its models.

    Attributes:
        max_slots: requests in flight.
        max_length: most tokens a request may have, prompt and completion.
        page_size: tokens a cache page holds.
        pages: cache pages of all requests together; None is room for max_slots of max_length. With
            fewer, requests wait for room, and the youngest gives way and is computed again.
        prefix_cache: prompts reuse the pages of a known prefix.
        spec: speculate ("on"), decode plainly ("off"), speculate up to a batch size ("threshold"),
            or do what is measured to be faster ("auto").
        spec_disable_batch_threshold: with "threshold", more decoding requests than this run
            plainly; 0 never does.
        plan: what one speculative step drafts.
        plans: with "auto", the plans to choose from beside plain; empty is `plan` alone.
        overlap: dispatch a step before the one before it has been read.
        kernels: "cpu" runs the native CPU kernels, "triton" the GPU kernels, "reference" plain XLA;
            "auto" takes the kernels where they run, which is decided and logged once, at start.
        weights: "float32" dequantises once, at load; "int4" keeps quantised weights as they are;
            "auto" is "int4" with the kernels and "float32" without.
        activations: what INT4 weights meet in the kernels: "int8" quantises activations to 8 bits
            in groups of 32 (W4A8), "float32" does not and is slower; "auto" is "int8" there. The
            GPU kernels know "bfloat16" alone, for activations and caches.
        prefill_chunks: chunk sizes a prompt is cut into, each one compiled program.
        prefill_budget: prompt tokens between two steps while requests decode; at least one chunk
            of the smallest size is run.
    """

    max_slots: int = 1
    max_length: int = 1024
    page_size: int = 16
    pages: int | None = None
    prefix_cache: bool = True
    spec: Literal["off", "on", "threshold", "auto"] = "on"
    spec_disable_batch_threshold: int = 0
    plan: SpecPlan = SpecPlan(3, 1, 4)
    plans: tuple[SpecPlan, ...] = ()
    overlap: bool = True
    kernels: Literal["auto", "cpu", "triton", "reference"] = "auto"
    weights: Literal["auto", "float32", "int4"] = "auto"
    activations: Literal["auto", "int8", "bfloat16", "float32"] = "auto"
    prefill_chunks: tuple[int, ...] = (32, 128, 512)
    prefill_budget: int = 128

    def __post_init__(self) -> None:
        for field in ("max_slots", "max_length", "page_size", "prefill_budget"):
            value = getattr(self, field)
            _require(isinstance(value, int) and value > 0, field, value, "a positive integer")
        modes = ("off", "on", "threshold", "auto")
        _require(self.spec in modes, "spec", self.spec, f"one of {', '.join(modes)}")
        limit = self.spec_disable_batch_threshold
        _require(
            isinstance(limit, int) and limit >= 0,
            "spec_disable_batch_threshold",
            limit,
            "0 (never disable) or a positive integer",
        )
        object.__setattr__(self, "plans", tuple(self.plans))
        for plan in self.plans:
            _require(
                isinstance(plan, SpecPlan) and not plan.is_plain, "plans", plan, "speculative plans"
            )
        for field, choices in (
            ("kernels", ("auto", "cpu", "triton", "reference")),
            ("weights", ("auto", "float32", "int4")),
            ("activations", ("auto", "int8", "bfloat16", "float32")),
        ):
            value = getattr(self, field)
            _require(value in choices, field, value, f"one of {', '.join(choices)}")
        _require(isinstance(self.plan, SpecPlan), "plan", self.plan, "a SpecPlan")
        chunks = tuple(sorted(self.prefill_chunks))
        _require(
            bool(chunks) and chunks[0] >= 1, "prefill_chunks", chunks, "at least one positive size"
        )
        object.__setattr__(self, "prefill_chunks", chunks)
        if self.pages is not None:
            _require(
                isinstance(self.pages, int) and self.pages >= self.pages_per_slot,
                "pages",
                self.pages,
                f"at least {self.pages_per_slot}, what one request of max_length needs",
            )

    @property
    def menu(self) -> tuple[SpecPlan, ...]:
        """Every speculative plan that this engine may run."""
        return self.plans or (self.plan,) if self.spec == "auto" else (self.plan,)

    @property
    def depth(self) -> int:
        """The deepest plan's."""
        return max(plan.depth for plan in self.menu)

    @property
    def pages_per_slot(self) -> int:
        """Pages that hold max_length tokens and the longest block written beyond them."""
        return -(-(self.max_length + self.depth + 1) // self.page_size)

    @property
    def total_pages(self) -> int:
        return self.max_slots * self.pages_per_slot if self.pages is None else self.pages

    def replace(self, **changes: object) -> EngineConfig:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
