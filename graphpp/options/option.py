"""Declaration of an option: its reading, its errors, the text that ranks compare, and its row of `docs/options.md`.

- An `Option` is a field of a frozen dataclass that inherits `Group`. `read` converts any accepted form to one value when the
  object is made. It must be idempotent, so that `dataclasses.replace` works.
- An error of `read` keeps its type and gets the option's path as a prefix: `memory.cap: ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

import torch

from graphpp.arguments import PATH, Accepted, refusal, shown
from graphpp.errors import GraphPPError

FLOATING_DTYPE = Accepted(
    "a floating torch.dtype of 16 bits or more",
    lambda form: isinstance(form, torch.dtype) and form.is_floating_point and form.itemsize > 1,
)

Form = TypeVar("Form")  # the forms that a user may write
Value = TypeVar("Value")  # the form that graphpp uses
G = TypeVar("G", bound="Group")


class Option(Generic[Form, Value]):
    """A field of a `Group`.

    `read`: a reader, or the values that are taken unchanged. `takes`: the forms in a few words, if `read` does not have them;
    `about`: the effect, for `docs/options.md`; `describe`: text for comparison with other ranks (None: not compared).
    """

    def __init__(
        self,
        default: Form,
        *,
        read: Accepted | Callable[[Any], Value],
        describe: Callable[[Value], Sequence[str]] | None = lambda value: [str(value)],
        takes: str = "",
        about: str,
    ) -> None:
        self.default, self.describe, self.about = default, describe, about
        self.read: Callable[[Any], Value] = reader_of(read) if isinstance(read, Accepted) else read
        self.takes = read.takes if isinstance(read, Accepted) and not takes else takes
        self.name = self.path = ""

    def __set_name__(self, owner: type[Group], name: str) -> None:
        self.name = name
        self.path = f"{owner.prefix}.{name}" if owner.prefix else name

    @overload
    def __get__(self, instance: None, owner: type) -> Form: ...

    @overload
    def __get__(self, instance: Group, owner: type) -> Value: ...

    def __get__(self, instance: Group | None, owner: type) -> Form | Value:
        """The value; on the class the default, where `dataclass` looks for it."""
        if instance is None:
            return self.default
        value: Value = instance.__dict__[self.name]
        return value

    def __set__(self, instance: Group, form: Form) -> None:
        """Read the form. Raises the reader's `GraphPPError`, prefixed by the option's path."""
        try:
            instance.__dict__[self.name] = self.read(form)
        except GraphPPError as error:
            if str(error).startswith(f"{self.path}.") or str(error).startswith(f"{self.path}: "):
                raise  # an inner group has already added its path
            raise type(error)(f"{self.path}: {error}") from error


@dataclass(frozen=True)
class Group:
    """A group of options. Subclasses are frozen dataclasses whose fields are `Option`s."""

    prefix: ClassVar[str] = ""  # the group's argument of `compile`

    @classmethod
    def options(cls) -> list[Option[Any, Any]]:
        """The declarations, in order."""
        return [vars(cls)[item.name] for item in fields(cls)]

    def facts(self) -> Iterator[tuple[str, list[str]]]:
        """(path, lines of text) of each option, inner groups included, that must be equal on all ranks."""
        for option in self.options():
            value = getattr(self, option.name)
            if isinstance(value, Group) and option.describe is not None:
                yield from value.facts()
            elif option.describe is not None:
                yield option.path, list(option.describe(value))


def group_reader(group: type[G], short: str, accepts: Callable[[object], bool]) -> Callable[[Any], G]:
    """A reader of a group: None (all defaults), the group, or a form of its option `short` if `accepts` allows it."""
    forms = next(option.takes for option in group.options() if option.name == short)

    def read(form: object) -> G:
        if form is None:
            return group()
        if isinstance(form, group):
            return form
        if accepts(form):
            return group(**{short: form})
        raise GraphPPError(f"take None, a graphpp.{group.__name__}, or for its {short}= {forms}, got {shown(form)}")

    return read


def reader_of(accepted: Accepted, error: type[GraphPPError] = GraphPPError) -> Callable[[Any], Any]:
    """A reader that returns accepted values unchanged. Raises `error` for anything else."""

    def read(form: object) -> object:
        if not accepted.accepts(form):
            raise error(refusal(accepted, form))
        return form

    return read


def read_folder(form: Any) -> Path | None:
    if form is not None and not PATH.accepts(form):
        raise GraphPPError(f"take the path of a folder, or None, got {shown(form)}")
    return None if form is None else Path(form)
