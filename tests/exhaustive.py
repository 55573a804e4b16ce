"""The mark of cases that `make test` leaves to `make test-all`."""

from typing import Any

import pytest


def further(*cases: Any) -> list[Any]:
    """Cases for `parametrize` of a kind of which `make test` runs others; a tuple is one case of several arguments."""
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*values, marks=pytest.mark.exhaustive) for values in each]
