"""The checker behind jaxtyping's import hook: beartype, where an int is a float too.

Configurations are left out: they check themselves, and tests give them wrong types on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

from beartype import BeartypeConf, beartype

CHECK_THEMSELVES = ("eaglejax.config", "checkpoints.chat_template")
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable) -> Callable:
    return function if function.__module__ in CHECK_THEMSELVES else _beartype(function)
