"""Quantised matrix product; chooses the implementation."""

from __future__ import annotations

from pallas_kernels.int4_matmul.reference import int4_matmul

__all__ = ["int4_matmul"]
