"""The implementations an op can have. Which one runs is decided once, when an engine starts."""

from __future__ import annotations

from typing import Literal

Implementation = Literal["reference", "cpu", "triton"]
