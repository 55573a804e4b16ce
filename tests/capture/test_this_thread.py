"""A replaced attribute acts in one thread, whatever kind of attribute it is, and nowhere after the context."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from graphpp._torch.this_thread import caller, found_in_modules, replaced
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


def test_an_attribute_that_another_thread_sets_meanwhile_stays() -> None:
    with replaced(Thing, "value", 2):
        elsewhere(lambda: setattr(Thing, "value", 5))
    assert Thing.value == 5
    del Thing.value


def test_a_replacement_knows_the_code_that_uses_it() -> None:
    def name(*args: Any) -> str:
        return caller().co_name

    with replaced(MODULE, "function", name), replaced(Thing, "field", property(name)), replaced(Thing, "of_class", name):
        names = [MODULE.function(), Thing().field, Thing().of_class()]
    assert set(names) == {"test_a_replacement_knows_the_code_that_uses_it"}


def test_all_names_of_an_object_in_modules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = object(), object()
    made = module()
    vars(made).update(first=one, again=one, other=other)
    monkeypatch.setitem(sys.modules, "made", made)
    monkeypatch.setitem(sys.modules, "no module", vars(made))
    assert found_in_modules([id(one)]) == [(made, "first", one), (made, "again", one)]
    assert found_in_modules([]) == []
