"""Builds llama.cpp's programs from the source package of llama-cpp-python, which carries all of it.

    python -m benchmarks.peers.build_llamacpp            # what `make peers` runs; some minutes
    python -m benchmarks.peers.build_llamacpp --jobs 1 --sdist llama_cpp_python-0.3.36.tar.gz

Only a Python package index is needed. The folder (`.peers` by default) gets `bin/` with the three
programs and `source/`, whose converter `benchmarks.peers.convert_drafter` uses.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import click

from benchmarks.peers.setup import PROGRAMS, peers_folder

VERSION = "0.3.36"
SOURCE = "source"
# For this machine's instructions, in one file each, and without what these programs do not need
# (the server's web page would be fetched from a model hub).
FLAGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}


@click.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=peers_folder)
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Compilers at a time.")
@click.option("--version", default=VERSION, show_default=True, help="Of llama-cpp-python.")
@click.option(
    "--sdist", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Do not download."
)
def main(folder: Path, jobs: int, version: str, sdist: Path | None) -> None:
    """Download, configure, build, and put the programs into FOLDER/bin."""
    cmake = tool("cmake")
    if cmake is None:
        raise click.ClickException("cmake is missing: pip install cmake ninja, or the system's")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        place = Path(scratch)
        root = unpack(sdist or download(version, place), place)
        build, ninja = place / "build", tool("ninja")
        flags = [f"-D{name}={value}" for name, value in FLAGS.items()]
        generator = [] if ninja is None else ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        click.echo(f"[2/3] configuring {root.name}", err=True)
        run([cmake, "-S", str(root), "-B", str(build), *generator, *flags], place / "cmake.log")
        click.echo(f"[3/3] building {', '.join(PROGRAMS)} (some minutes)", err=True)
        targets = ["--target", *PROGRAMS, "--parallel", str(jobs)]
        run([cmake, "--build", str(build), *targets], place / "build.log")
        (folder / "bin").mkdir(exist_ok=True)
        for name in PROGRAMS:
            unfinished = folder / "bin" / f".{name}.tmp"
            shutil.copy2(build / "bin" / name, unfinished)
            unfinished.replace(folder / "bin" / name)
        shutil.rmtree(folder / SOURCE, ignore_errors=True)
        root.rename(folder / SOURCE)
    click.echo(f"ready: {folder / 'bin'}", err=True)


def tool(name: str) -> str | None:
    """A build tool, from this Python's environment (where pip puts it) or from PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def download(version: str, place: Path) -> Path:
    """The source package, through pip."""
    click.echo(f"[1/3] downloading the source of llama-cpp-python {version} (77 MB)", err=True)
    wanted = f"llama-cpp-python=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    run([*pip, "--no-binary", "llama-cpp-python", "--dest", str(place), wanted], place / "pip.log")
    return next(place.glob("llama_cpp_python-*.tar.gz"))


def unpack(sdist: Path, place: Path) -> Path:
    """llama.cpp's own folder out of the package."""
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    return next(place.glob("llama_cpp_python-*/vendor/llama.cpp"))


def run(command: list[str], log: Path) -> None:
    """Runs a step, its output in a log that is shown when it fails."""
    with log.open("wb") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise click.ClickException(
            "\n".join([*lines[-20:], f"failed: {' '.join(command[:4])} ..."])
        )


if __name__ == "__main__":
    main()
