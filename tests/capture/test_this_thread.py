"""A replaced attribute acts in one thread, whatever kind of attribute it is, and nowhere after the context."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from graphpp._torch.this_thread import replaced
from tests.other_thread import elsewhere


class Base:
    value = 1

    def method(self) -> str:
        return "method"

    @classmethod
    def of_class(cls) -> str:
        return f"class {cls.__name__}"


class Thing(Base):
    @property
    def field(self) -> str:
        return "field"

    @field.setter
    def field(self, value: str) -> None:
        self.set = value


def module() -> ModuleType:
    made = ModuleType("made")
    vars(made)["function"] = lambda: "function"
    return made


def call(owner: Any, name: str) -> Any:
    return getattr(owner, name)()


MODULE = module()
KINDS: list[tuple[Any, str, Any, Callable[[], Any]]] = [
    (MODULE, "function", lambda: "new", lambda: call(MODULE, "function")),
    (math, "pow", lambda x, y: "new", lambda: math.pow(2, 3)),
    (Thing, "method", lambda self: "new", lambda: Thing().method()),
    (Thing, "of_class", staticmethod(lambda: "new"), lambda: call(Thing, "of_class")),
    (Thing, "value", "new", lambda: Thing.value),
    (Thing, "value", "new", lambda: Thing().value),
    (Thing, "field", property(lambda self: "new"), lambda: Thing().field),
]


@pytest.mark.parametrize(("owner", "name", "new", "use"), KINDS)
def test_only_this_thread_finds_the_replacement(owner: Any, name: str, new: Any, use: Callable[[], Any]) -> None:
    before, kept = use(), name in vars(owner)
    with replaced(owner, name, new):
        assert use() == "new" and elsewhere(use) == before
        with replaced(owner, name, new):
            assert use() == "new" and elsewhere(use) == before
    assert use() == before == elsewhere(use) and (name in vars(owner)) == kept


def test_a_property_is_set_by_thread() -> None:
    thing, found = Thing(), list[str]()
    with replaced(Thing, "field", property(None, lambda self, value: found.append(value))):
        thing.field = "here"
        elsewhere(lambda: setattr(thing, "field", "elsewhere"))
    assert found == ["here"] and thing.set == "elsewhere"


def test_a_replacement_that_somebody_kept_ends_with_its_context() -> None:
    with replaced(MODULE, "function", lambda: "new", elsewhere=lambda: "elsewhere"):
        kept = vars(MODULE)["function"]
        assert kept() == "new" and elsewhere(kept) == "elsewhere"
    assert kept() == "function" == elsewhere(kept)
