"""The EAGLE-3 drafter: one decoder layer over the target's features (arXiv 2503.01840)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eaglejax.cache import CacheView
from eaglejax.config import DrafterConfig
from eaglejax.models.fused import decoder_layers, fusable
from eaglejax.models.layers import MLP, Attention, FreshKV, Linear, RMSNorm, lookup
from eaglejax.models.rotary import rotary_angles
from pallas_kernels.implementation import Implementation, activation_dtype


class DrafterOutput(struct.PyTreeNode):
    """What a pass over n rows gives.

    Attributes:
        hidden: the input of the next draft row (before the final norm, after it with norm_output).
        logits: over the draft vocabulary.
        fresh_kv: keys and values of the rows, stacked as one layer.
    """

    hidden: Float[Array, "B n D"]
    logits: Float[Array, "B n v"]
    fresh_kv: FreshKV


class Drafter(nn.Module):
    """Row t takes the feature of position t and token t+1, at rotary position t.

    The variables come in two collections: `params` is trained; `vocab` holds the token embedding
    (the target's own array where it is shared) and `target_ids`, the target id of each draft id.
    """

    config: DrafterConfig
    kernels: Implementation = "reference"

    def setup(self) -> None:
        c = self.config
        self.fc = Linear(c.hidden_size)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(c.rms_norm_eps, kernels=self.kernels)
        if c.fc_norm:
            self.fc_norms = [
                RMSNorm(c.rms_norm_eps, kernels=self.kernels) for _ in c.feature_layers
            ]
        self.embedding_norm = RMSNorm(c.rms_norm_eps, kernels=self.kernels)
        self.hidden_norm = RMSNorm(c.rms_norm_eps, kernels=self.kernels)
        self.attention = Attention(
            c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, kernels=self.kernels
        )
        self.mlp_norm = RMSNorm(c.rms_norm_eps, kernels=self.kernels)
        self.mlp = MLP(c.intermediate_size, kernels=self.kernels)
        self.norm = RMSNorm(c.rms_norm_eps, kernels=self.kernels)
        self.head = Linear(c.draft_vocab_size, dtype=jnp.float32)
        self.embedding = self.variable(
            "vocab", "embedding", lambda: jnp.zeros((c.vocab_size, c.hidden_size))
        )
        self.target_ids = self.variable(
            "vocab", "target_ids", lambda: jnp.arange(c.draft_vocab_size)
        )

    def fuse(self, features: Float[Array, "B n F"]) -> Float[Array, "B n D"]:
        """Target features to the drafter's width; the hidden state of a row with a true feature."""
        features = features.astype(activation_dtype(self.kernels))
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            chunks = jnp.split(features, len(self.fc_norms), axis=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norms, chunks, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return self.fc(features)

    def to_target(self, draft_ids: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Draft ids to target ids."""
        return jnp.take(self.target_ids.value, draft_ids, mode="clip")

    def project_kv(
        self,
        hidden: Float[Array, "B n D"],
        tokens: Int[Array, "B n"],
        positions: Int[Array, "B n"],
    ) -> FreshKV:
        """Only the keys and values of rows: all that absorbing a committed token needs."""
        row, rotary = self._inputs(hidden, tokens, positions)
        return _as_stack(self.attention.project_kv(row, rotary))

    def __call__(
        self,
        hidden: Float[Array, "B n D"],
        tokens: Int[Array, "B n"],
        positions: Int[Array, "B n"],
        ancestors: Bool[Array, "B n m"] | None = None,
        cache: CacheView | None = None,
        block_kv: FreshKV | None = None,
    ) -> DrafterOutput:
        """Runs n rows; row t predicts the token after `tokens[t]`.

        Args:
            hidden: fused features, or an earlier draft row's output.
            tokens: target ids.
            positions: rotary positions.
            ancestors: which of the m rows (block_kv first, then the n own) each row sees; None is
                causal.
            cache: absorbed rows, or None.
            block_kv: rows that are neither absorbed nor among the n.
        """
        row, rotary = self._inputs(hidden, tokens, positions)
        residual = self.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        block = None if block_kv is None else FreshKV(block_kv.k[0], block_kv.v[0])
        layer = self.variables["params"]
        if not self.is_initializing() and fusable(self.kernels, layer, self.config.head_dim):
            x, _, kv = decoder_layers(
                layer,
                residual,
                rotary,
                ancestors,
                cache,
                eps=self.config.rms_norm_eps,
                inputs=row,
                block_kv=block,
            )
        else:
            x, own = self.attention(row, rotary, ancestors, cache, block, residual=residual)
            x = self.mlp(self.mlp_norm(x), residual=x)
            kv = _as_stack(own)
        normed = self.norm(x)
        following = normed if self.config.norm_output else x
        return DrafterOutput(following, self.head(normed), kv)

    def initialise(self, features: Float[Array, "B n F"], tokens: Int[Array, "B n"]) -> Array:
        """Touches every parameter; for `init` only."""
        positions = jnp.zeros(tokens.shape, jnp.int32)
        return self(self.fuse(features), tokens, positions).logits

    def _inputs(
        self, hidden: Array, tokens: Array, positions: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """The layer's input, [normed embedding | normed hidden], and rotary angles."""
        embedding = lookup(self.embedding.value, tokens).astype(hidden.dtype)
        row = [self.embedding_norm(embedding), self.hidden_norm(hidden)]
        rotary = rotary_angles(positions, self.config.rope, self.config.head_dim)
        return jnp.concatenate(row, axis=-1), rotary


def _as_stack(kv: FreshKV) -> FreshKV:
    """Adds the layer axis that `commit` expects."""
    return FreshKV(kv.k[None], kv.v[None])
