"""Whether our kernels are launched as parts of CUDA graphs (XLA's command buffers), on this GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.record import DRY, Record, Skip, run
from eaglejax import aot, aot_models
from eaglejax.config import SpecPlan


def main(record: Record) -> None:
    """Compiles the steps of the default model's shapes and reads XLA's list of launches."""
    if DRY:
        raise Skip("command buffers exist on GPUs only")
    spec = aot_models.model_spec("smollm2", "llama")
    setting = aot_models.Setting(1, 1024, SpecPlan(3, 1, 4))
    params, state = aot_models.parameters(spec), aot_models.state(spec, setting)
    for step in aot_models.steps(spec, setting):

        def compiled(step: aot_models.Step = step) -> dict[str, Any]:
            lowered = jax.jit(step.function, donate_argnums=1).lower(params, state, *step.arguments)
            with tempfile.TemporaryDirectory() as folder:
                options: Any = {"xla_dump_to": folder, "xla_dump_emitter_re": ".*"}
                text = lowered.compile(compiler_options=options).as_text() or ""
                names = frozenset(aot.PALLAS.findall(text))
                found = aot.launches(Path(folder), names)
                if not found:  # another release may write another form: keep some of it
                    sequences = list(Path(folder).glob("*thunk_sequence*.txt"))
                    excerpt = sequences[0].read_text()[:2000] if sequences else "no file"
                    raise RuntimeError(f"no launches in XLA's thunk sequence: {excerpt}")
            ours = [launch for launch in found if launch.pallas]
            inside = sum(launch.in_command_buffer for launch in ours)
            return {
                "launches": len(found),
                "pallas": len(ours),
                "pallas_in_command_buffers": inside,
                "outside": sorted({x.name for x in found if not x.in_command_buffer}),
            }

        record.attempt(compiled, step=step.name)


if __name__ == "__main__":
    run("graphs", main)
