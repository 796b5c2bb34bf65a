"""The target: a Llama-type decoder; one forward pass serves prefill, decoding, verification."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eaglejax.cache import CacheView
from eaglejax.config import TargetConfig
from eaglejax.models.fused import decoder_layers, fusable
from eaglejax.models.layers import MLP, Attention, Embed, FreshKV, Linear, RMSNorm
from eaglejax.models.rotary import rotary_angles
from pallas_kernels.implementation import Implementation, activation_dtype


class TargetOutput(struct.PyTreeNode):
    """What a pass over n rows gives.

    Attributes:
        hidden: after the final norm, the head's input.
        features: residual stream after each feature layer, concatenated; the drafter's input.
        fresh_kv: keys and values of the rows, for `commit`.
    """

    hidden: Float[Array, "B n D"]
    features: Float[Array, "B n F"]
    fresh_kv: FreshKV


class Block(nn.Module):
    """One decoder layer, called with the layer's index on weights of the whole stack."""

    config: TargetConfig
    kernels: Implementation = "reference"

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "B n D"], Int[Array, ""]],
        rotary: tuple[Array, Array],
        ancestors: Bool[Array, "B n m"] | None,
        cache: CacheView | None,
    ) -> tuple[tuple[Array, Array], tuple[Float[Array, "B n D"], FreshKV]]:
        # The index is carried, not scanned over: taking it out of an array would cost a GPU one
        # more small copy a layer, and end the command buffer (CUDA graph) there.
        x, layer = carry
        c, stack = self.config, self.config.num_layers
        normed = RMSNorm(c.rms_norm_eps, stack, self.kernels, name="attention_norm")(x, layer)
        attention = Attention(
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.hidden_size,
            stack,
            self.kernels,
            name="attention",
        )
        x, kv = attention(normed, rotary, ancestors, cache, layer=layer, residual=x)
        normed = RMSNorm(c.rms_norm_eps, stack, self.kernels, name="mlp_norm")(x, layer)
        x = MLP(c.intermediate_size, stack, self.kernels, name="mlp")(normed, layer, x)
        return (x, layer + 1), (x, kv)


class Target(nn.Module):
    """Llama-type decoder (arXiv 2302.13971) with EAGLE-3 features.

    Attributes:
        config: architecture.
        feature_layers: layers whose outputs are the feature, 0-based.
        kernels: which implementation of the ops runs.
    """

    config: TargetConfig
    feature_layers: tuple[int, ...]
    kernels: Implementation = "reference"

    def setup(self) -> None:
        c = self.config
        self.embed = Embed(c.vocab_size, c.hidden_size)
        # Weights are shared by all iterations and indexed inside, so no layer is copied out.
        scan = nn.scan(
            Block,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),  # type: ignore[arg-type]
            length=c.num_layers,
        )
        self.layers = scan(c, self.kernels)
        self.norm = RMSNorm(c.rms_norm_eps, kernels=self.kernels)
        if not c.tie_embeddings:
            self.head = Linear(c.vocab_size, dtype=jnp.float32)

    def __call__(
        self,
        tokens: Int[Array, "B n"],
        positions: Int[Array, "B n"],
        ancestors: Bool[Array, "B n n"] | None = None,
        cache: CacheView | None = None,
    ) -> TargetOutput:
        """Runs n fresh rows over the committed prefix; writes nothing.

        Args:
            tokens: ids of the rows.
            positions: absolute positions (for a tree: root + depth, never the row index).
            ancestors: which rows each row sees, itself included; None is causal.
            cache: the committed prefix, or None where there is none.
        """
        rotary = rotary_angles(positions, self.config.rope, self.config.head_dim)
        x = self.embed(tokens).astype(activation_dtype(self.kernels))
        stack = self.variables["params"].get("layers", {})
        if stack and fusable(self.kernels, stack, self.config.head_dim):
            x, features, kv = decoder_layers(
                stack,
                x,
                rotary,
                ancestors,
                cache,
                eps=self.config.rms_norm_eps,
                feature_layers=self.feature_layers,
            )
            return TargetOutput(self.norm(x), features, kv)
        start = (x, jnp.int32(0))
        (x, _), (outputs, fresh_kv) = self.layers(start, rotary, ancestors, cache)
        features = jnp.concatenate([outputs[i] for i in self.feature_layers], axis=-1)
        return TargetOutput(self.norm(x), features, fresh_kv)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Next-token logits of rows after the final norm, float32."""
        if self.config.tie_embeddings:
            return self.embed.attend(hidden)
        return self.head(hidden)

    def initialise(self, tokens: Int[Array, "B n"], positions: Int[Array, "B n"]) -> Array:
        """Touches every parameter; for `init` only."""
        return self.logits(self(tokens, positions).hidden)
