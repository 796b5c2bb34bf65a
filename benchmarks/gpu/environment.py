"""What the figures are measured on."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

from benchmarks.gpu.record import DRY, Record, Skip, run

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "triton", "jax-cuda13-plugin", "jaxtyping")


def main(record: Record) -> None:
    """Versions, driver, device."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    record.note(python=platform.python_version(), versions=versions)
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        smi = subprocess.run(command, capture_output=True, text=True, timeout=20)
        record.note(nvidia_smi=smi.stdout.strip())
    import jax

    from pallas_kernels import chips

    device = jax.devices()[0]
    record.note(
        device=device.device_kind,
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        chip=getattr(chips.current(), "name", None),
    )
    if device.platform != "gpu" and not DRY:
        raise Skip(f"the platform is {device.platform}, not a GPU")


if __name__ == "__main__":
    run("environment", main)
