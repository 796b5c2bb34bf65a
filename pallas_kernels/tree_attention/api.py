"""Attention over a paged prefix and a fresh block; chooses the implementation."""

from __future__ import annotations

from pallas_kernels.tree_attention.reference import tree_attention

__all__ = ["tree_attention"]
