"""Native kernels for CPUs: C++ behind the XLA FFI, running on XLA's own thread pool.

A row's result has the same bits for any number of rows, any split between cache and fresh block,
and any instruction set. Weights are 4-bit (or 8-bit) levels, activations are quantised to 8 bits in
groups of 32 (W4A8): integer dot products are exact, and groups are added in order.
"""

from cpu_kernels.library import LibraryError, instruction_set, unavailable_reason
from cpu_kernels.ops import (
    MATRICES,
    argmax,
    commit,
    decoder,
    matmul,
    rms_norm,
    sample,
    swiglu,
    top_k,
    tree_attention,
)
from cpu_kernels.packing import matrix_shape, pack, unpack_columns

__all__ = [
    "MATRICES",
    "LibraryError",
    "argmax",
    "commit",
    "decoder",
    "instruction_set",
    "matmul",
    "matrix_shape",
    "pack",
    "rms_norm",
    "sample",
    "swiglu",
    "top_k",
    "tree_attention",
    "unavailable_reason",
    "unpack_columns",
]
