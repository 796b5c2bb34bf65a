"""A jitted loop over `spec_step` with an acceptance rule of one's own, which is not lossless."""

import jax
import jax.numpy as jnp
import numpy as np

import eaglejax
from eaglejax.state import admission, admit
from eaglejax.steps import prefill_step, spec_step
from eaglejax.verify import walk

K, PLAN, SLOT = 3, eaglejax.SpecPlan(3, 1, 4), jnp.array([0])
engine = eaglejax.load(plan=PLAN)


def top_k_accept(logits, tree, root_positions, rows, depth):
    """Accepts a draft that the target finds among its K likeliest tokens."""
    best, likely = jnp.argmax(logits, -1), jax.lax.top_k(logits, K)[1]
    drafts = tree.tokens[:, 1:]  # of a chain: the draft after each node but the last
    agrees = jnp.any(likely[:, :-1] == drafts[..., None], -1)
    return walk(best.at[:, :-1].set(jnp.where(agrees, drafts, best[:, :-1])), tree, depth)


@jax.jit
def run(params, state, prompt):
    """Prefills one prompt and takes 24 speculative steps without leaving the device."""
    whole = (jnp.array([prompt.shape[1]]), jnp.array([True]))
    state, first = prefill_step(engine.models, params, state, SLOT, prompt, *whole)
    step = lambda s, _: spec_step(engine.models, params, s, SLOT, PLAN, accept=top_k_accept)  # noqa: E731
    return first.tokens[0], jax.lax.scan(step, state, length=24)[1]


request = admission([eaglejax.SamplingParams(max_tokens=96)], [0], engine.tokenizer.eos_ids)
ids = engine.encode([{"role": "user", "content": "Why is the sky blue?"}])
first, steps = run(engine.params, admit(engine.state, SLOT, **request), jnp.array([ids]))
rows = [np.asarray(t)[0, : int(n[0])] for t, n in zip(steps.tokens, steps.counts, strict=True)]
print(engine.tokenizer.decode(np.concatenate([first, *rows]).tolist()))
print(f"{np.mean([len(row) for row in rows if len(row)]):.2f} tokens a step")
