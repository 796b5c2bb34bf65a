"""The property that matters most, over many real prompts: speculation never changes the output.

Every mode must give the tokens of plain decoding: chains and trees, alone and in a batch, greedy
and sampled, with the real drafter and with drafters that are always right, never right, or right
most of the time, which reach every way a step can end.

`python -m benchmarks.lossless --out FILE` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import eaglejax
from benchmarks.decode import acceptance_length, machine
from eaglejax.cache import PagedCache
from eaglejax.commands.options import prompt_of, read_prompts
from eaglejax.config import SamplingParams, SpecPlan
from eaglejax.draft import Draft, Pending
from eaglejax.engine.engine import Engine
from eaglejax.engine.request import Completion, Prompt
from eaglejax.models.apply import apply
from eaglejax.models.drafter import Drafter
from eaglejax.sampling import process, uniform
from eaglejax.state import EngineState, SlotRows, admission
from eaglejax.tree import Tree

PLANS = ("1,1,2", "3,1,4", "5,1,6", "4,4,16")
PROMPTS = Path(__file__).parent / "prompts" / "eval.jsonl"
# User turns of self-chats of the default model that no drafter was trained on, as token ids.
HELD_OUT = PROMPTS.with_name("held_out.jsonl")


BORDER = 1e-4  # of probability


@dataclass(frozen=True)
class Row:
    """One mode against plain decoding.

    Attributes:
        drafter: "real", "right", "never" or "mostly".
        plan, temperature, batch, kernels: how it ran.
        prompts, tokens: how much was compared.
        identical: prompts whose tokens are those of plain decoding.
        borderline: sampled texts that differ, where the coin fell within `BORDER` of the border
            between the two tokens. XLA's sums depend on the number of rows in their last bits; the
            kernels' do not, and have none of these.
        acceptance_length: committed tokens a verify step.
    """

    drafter: str
    plan: str
    temperature: float
    batch: int
    kernels: str
    prompts: int
    tokens: int
    identical: int
    borderline: int
    acceptance_length: float | None


def scripted_draft(known: Int[np.ndarray, "prompts T"], vocab_size: int, kind: str) -> Draft:
    """A drafter that knows the text; a request's seed says which prompt it is.

    Args:
        known: prompt and plain completion of every prompt.
        vocab_size: of the target.
        kind: "right" proposes the text, "never" something else, "mostly" errs at every third
            position. In a tree the text is the last of each level's siblings.
    """
    table = jnp.asarray(known)

    def draft(
        drafter: Drafter | None,
        variables: Any,
        state: EngineState,
        slots: Int[Array, " B"],
        rows: SlotRows,
        plan: SpecPlan,
    ) -> tuple[Tree, PagedCache | None, Int[Array, " B"]]:
        assert drafter is not None
        pending = Pending.read(drafter, variables, state, slots, rows, plan.depth + 1)
        keep = jnp.where(rows.active, pending.count, 0)
        cache, absorbed = pending.commit(state, rows, keep)
        tokens, parents, spine = [rows.root], [0], 0
        for level in range(1, plan.depth + 1):
            at = rows.lengths + level
            text = table.at[rows.sampling.seed.astype(jnp.int32), at].get(mode="clip")
            wrong = {"right": at < 0, "never": at >= 0, "mostly": at % 3 == 0}[kind]
            last = len(tokens) + min(plan.width, plan.nodes - len(tokens) - plan.depth + level) - 1
            while len(tokens) <= last:
                shift = jnp.where(wrong, 1, 0) if len(tokens) == last else 1 + last - len(tokens)
                tokens.append((text + shift) % vocab_size)
                parents.append(spine)
            spine = last
        where = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (len(slots), len(parents)))
        return Tree.build(jnp.stack(tokens, axis=1), where, plan.depth), cache, absorbed

    return draft


def border_distance(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    plain: Completion,
    other: Completion,
) -> float:
    """How far the coin was from the border between the first two tokens that differ.

    Infinite where the target's own token is neither of them, or one of the texts just ends.
    """
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return float("inf")
    ids = jnp.asarray([[*prompt, *plain.token_ids[:at]]], jnp.int32)
    target, weights = engine.models.target, engine.params.target
    hidden = apply(target, weights, ids, jnp.arange(ids.shape[1])[None]).hidden[:, -1:]
    logits = apply(target, weights, hidden, method="logits")
    sampling = admission([params], [params.seed or 0], ())["sampling"]
    rows = jax.tree.map(jnp.asarray, sampling)
    cumulative = jnp.cumsum(process(logits, rows)[0, 0])
    coin = uniform(rows.seed, jnp.asarray([[ids.shape[1]]]))[0, 0]
    border = cumulative[min(plain.token_ids[at], other.token_ids[at])]
    return float(jnp.abs(border / cumulative[-1] - coin))


def compare(
    engine: Engine,
    plain: Sequence[Completion],
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    drafter: str,
) -> Row:
    """Runs an engine speculatively against the tokens of plain decoding."""
    done = engine.generate(prompts, params, spec="on")
    same = [a.token_ids == b.token_ids for a, b in zip(plain, done, strict=True)]
    differing = [i for i, identical in enumerate(same) if not identical]
    borderline = sum(
        border_distance(engine, engine.encode(prompts[i]), params[i], plain[i], done[i]) < BORDER
        for i in differing
        if params[i].temperature > 0
    )
    accepted = acceptance_length(done)
    return Row(
        drafter=drafter,
        plan=str(engine.config.plan),
        temperature=params[0].temperature,
        batch=engine.config.max_slots,
        kernels=engine.config.kernels,
        prompts=len(prompts),
        tokens=sum(len(c.token_ids) for c in plain),
        identical=sum(same),
        borderline=borderline,
        acceptance_length=None if accepted is None else round(accepted, 3),
    )


def run(
    engine_of: Callable[[int], Engine],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    batches: Sequence[int],
    temperatures: Sequence[float],
    plans: Sequence[str] = PLANS,
    drafters: Sequence[str] = ("real", "right", "never", "mostly"),
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """All plans and drafters at each batch size and temperature.

    Args:
        engine_of: an engine with that many slots.
        prompts: what to complete.
        progress: told after every mode.
    """
    rows = []
    for batch in batches:
        first = engine_of(batch)
        real = {plan: first.with_plan(SpecPlan.parse(plan)) for plan in plans}
        for temperature in temperatures:
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens)
                for i in range(len(prompts))
            ]
            plain = first.generate(prompts, params, spec="off")
            texts = [
                first.encode(p) + list(c.token_ids) for p, c in zip(prompts, plain, strict=True)
            ]
            known = np.zeros((len(texts), max(map(len, texts)) + 16), np.int32)
            for i, ids in enumerate(texts):
                known[i, : len(ids)] = ids
            vocab = first.models.target.config.vocab_size
            for drafter in drafters:
                for plan in plans:
                    engine = real[plan]
                    if drafter != "real":
                        draft = scripted_draft(known, vocab, drafter)
                        engine = first.with_plan(SpecPlan.parse(plan), draft)
                    rows.append(compare(engine, plain, prompts, params, drafter))
                    progress(rows[-1])
    return rows


@click.command()
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="JSON file.")
@click.option("--model", default="smollm2", show_default=True)
@click.option("--drafter", default="default", show_default=True)
@click.option("--kernels", default="auto", show_default=True)
@click.option("--limit", default=41, show_default=True, help="Prompts, at most 200.")
@click.option("--plans", default=";".join(PLANS), show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--batches", default="1,8", show_default=True)
@click.option("--temperatures", default="0,0.8", show_default=True)
@click.option("--drafters", default="real,right,never,mostly", show_default=True)
def main(**options: Any) -> None:
    """Run the matrix; fails if any mode changes any text."""
    rows_read = read_prompts(PROMPTS) + read_prompts(HELD_OUT)
    prompts = [prompt_of(row) for row in rows_read[: options["limit"]]]

    def engine_of(slots: int) -> Engine:
        return eaglejax.load(
            options["model"],
            drafter=options["drafter"],
            kernels=options["kernels"],
            max_slots=slots,
            max_length=512,
        )

    rows = run(
        engine_of,
        prompts,
        max_tokens=options["max_tokens"],
        batches=[int(b) for b in options["batches"].split(",")],
        temperatures=[float(t) for t in options["temperatures"].split(",")],
        plans=options["plans"].split(";"),
        drafters=options["drafters"].split(","),
        progress=lambda row: click.echo(json.dumps(asdict(row)), err=True),
    )
    report = {"rows": [asdict(row) for row in rows], "machine": machine()}
    Path(options["out"]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    changed = [row for row in rows if row.identical != row.prompts]
    if changed:
        raise SystemExit(f"{len(changed)} of {len(rows)} modes changed a text: {changed}")
    print(f"{len(rows)} modes, every text identical to plain decoding")


if __name__ == "__main__":
    main()
