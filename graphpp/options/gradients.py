"""TODO contract."""

from __future__ import annotations

from typing import Literal

Reduction = Literal["mean", "sum"]
