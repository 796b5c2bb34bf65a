"""Finding, checking and registering the shared library."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import jax

LIBRARY = Path(__file__).parent / "libeaglejax_cpu.so"
OVERRIDE = "EAGLEJAX_CPU_LIBRARY"  # names another build, one with sanitizers for example
HANDLERS = {
    "eaglejax_matmul": "EaglejaxMatmul",
    "eaglejax_rms_norm": "EaglejaxRmsNorm",
    "eaglejax_swiglu": "EaglejaxSwiglu",
    "eaglejax_attention_fresh": "EaglejaxAttentionFresh",
    "eaglejax_attention_paged": "EaglejaxAttentionPaged",
    "eaglejax_decoder": "EaglejaxDecoder",
    "eaglejax_argmax": "EaglejaxArgmax",
    "eaglejax_sample": "EaglejaxSample",
    "eaglejax_top_k": "EaglejaxTopK",
    "eaglejax_commit": "EaglejaxCommit",
}


class LibraryError(RuntimeError):
    """The kernels cannot run here; the message says why."""


def path() -> Path:
    """The library's file."""
    return Path(os.environ.get(OVERRIDE) or LIBRARY)


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Loads the library and registers its handlers, once.

    Raises:
        LibraryError: it was not built, was built against a newer FFI than this JAX has, or cannot
            run on this machine.
    """
    file = path()
    if not file.exists():
        raise LibraryError(
            f"the CPU kernels were not built ({file.name} is missing): "
            "install again with a C++ compiler"
        )
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise LibraryError(f"{file.name} cannot be loaded: {error}") from error
    if not hasattr(library, "eaglejax_ffi_api_major"):
        raise LibraryError(f"{file} is not this project's library")
    built = (library.eaglejax_ffi_api_major(), library.eaglejax_ffi_api_minor())
    # A handler of a newer FFI would stop the whole CPU backend, so it is never registered.
    running = _ffi_version()
    if built[0] != running[0] or built[1] > running[1]:
        raise LibraryError(
            f"{file.name} was built for XLA FFI {built[0]}.{built[1]}, "
            f"jaxlib {version('jaxlib')} has {running[0]}.{running[1]}"
        )
    library.eaglejax_isa.restype = ctypes.c_char_p
    library.eaglejax_isa_error.restype = ctypes.c_char_p
    if library.eaglejax_isa() is None:
        raise LibraryError(library.eaglejax_isa_error().decode())
    for target, symbol in HANDLERS.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return library


def _ffi_version() -> tuple[int, int]:
    """The FFI version of the running jaxlib, from the header that ships with it."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    version = {}
    for line in header.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "#define" and words[1].startswith("XLA_FFI_API_M"):
            version[words[1]] = int(words[2])
    return version["XLA_FFI_API_MAJOR"], version["XLA_FFI_API_MINOR"]


def unavailable_reason() -> str | None:
    """Why the kernels cannot run here; None where they can."""
    try:
        load()
    except LibraryError as error:
        return str(error)
    return None


def instruction_set() -> str:
    """Name of the instruction set in use."""
    return load().eaglejax_isa().decode()
