"""Digests of values of libraries: equal whatever was read before, and others after a change of what can be reached."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from graphpp.capture.transfer.library_digests import Digests

CLASSES = (nn.Module, nn.Linear, nn.ModuleDict, parametrize.ParametrizationList, torch.Tensor, nn.Parameter)


def classes_that_name_each_other() -> list[Any]:
    """Three classes in a circle that count as a library's."""
    made = [type(name, (), {"__module__": "torch.example"}) for name in ("One", "Two", "Three")]
    for kind, following in zip(made, [*made[1:], made[0]], strict=True):
        kind.following = following  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("kinds", [CLASSES, classes_that_name_each_other()])
def test_a_digest_does_not_depend_on_what_was_read_before(kinds: list[type]) -> None:
    alone = {kind: Digests().of(kind) for kind in kinds}
    for first, second in permutations(kinds, 2):
        digests = Digests()
        digests.of(first)
        assert digests.of(second) == alone[second]


def test_what_classes_name_counts() -> None:
    kinds = classes_that_name_each_other()
    holder = {"key": [kinds[0]]}
    before = [Digests().of(value) for value in (*kinds, holder)]
    kinds[2].factor = 2
    after = [Digests().of(value) for value in (*kinds, holder)]
    assert not set(before).intersection(after)
