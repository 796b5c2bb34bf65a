"""Calling a Linen module."""

from __future__ import annotations

from typing import Any

from flax import linen as nn


def apply(module: nn.Module, variables: Any, *args: Any, method: str | None = None) -> Any:
    """`module.apply` without mutable collections: the method's own result.

    Linen types every result as perhaps a pair with changed collections; nothing here has any.
    """
    return module.apply(variables, *args, method=method)
