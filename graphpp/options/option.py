"""One declaration of an option: reading, errors, the text that ranks compare, and the row of `docs/options.md` follow from it.

Contract
    An `Option` is a field of a frozen dataclass that inherits `Group`. The field takes every form that users may write,
    `read` turns the form into one value when the object is made, and the field then gives that value.
    Reading is idempotent: `read(read(form)) == read(form)`, so that `dataclasses.replace` works.
    An error of `read` keeps its type and gets the option's path in front: `memory.cap: ...`.
    `Group.facts` lists the text of each option by its path, in the order of declaration; `describe=None` leaves one out.
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

Form = TypeVar("Form")  # every form that a user may write
Value = TypeVar("Value")  # the one form that graphpp works with
G = TypeVar("G", bound="Group")


class Option(Generic[Form, Value]):
    """A field of a `Group`: `default`, its reader, its description for other ranks, and its documentation.

    `read`: a reader, or the values that are taken as they are. `takes`: the forms in a few words, where `read` does not have
    them; `about`: the effect, for `docs/options.md`.
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
        """Called by Python when the group's class is made."""
        self.name = name
        self.path = f"{owner.prefix}.{name}" if owner.prefix else name

    @overload
    def __get__(self, instance: None, owner: type) -> Form: ...

    @overload
    def __get__(self, instance: Group, owner: type) -> Value: ...

    def __get__(self, instance: Group | None, owner: type) -> Form | Value:
        """The value; on the class the default, which is where `dataclass` looks for it."""
        if instance is None:
            return self.default
        value: Value = instance.__dict__[self.name]
        return value

    def __set__(self, instance: Group, form: Form) -> None:
        """Read the form. Raises the reader's `GraphPPError`, with the option's path in front."""
        try:
            instance.__dict__[self.name] = self.read(form)
        except GraphPPError as error:
            if str(error).startswith(f"{self.path}.") or str(error).startswith(f"{self.path}: "):
                raise  # a group inside has said which of its options
            raise type(error)(f"{self.path}: {error}") from error


@dataclass(frozen=True)
class Group:
    """Options that belong together. Subclasses are frozen dataclasses whose fields are `Option`s."""

    prefix: ClassVar[str] = ""  # the name under which `compile` takes the group

    @classmethod
    def options(cls) -> list[Option[Any, Any]]:
        """The declarations, in order."""
        return [vars(cls)[item.name] for item in fields(cls)]

    def facts(self) -> Iterator[tuple[str, list[str]]]:
        """(path, lines of text) of each option that all ranks must be given alike, groups inside taken apart."""
        for option in self.options():
            value = getattr(self, option.name)
            if isinstance(value, Group) and option.describe is not None:
                yield from value.facts()
            elif option.describe is not None:
                yield option.path, list(option.describe(value))


def group_reader(group: type[G], short: str, accepts: Callable[[object], bool]) -> Callable[[Any], G]:
    """A reader of a whole group: None (all defaults), the group, or a form of its option `short` where `accepts` says so."""
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
    """A reader that takes accepted values as they are. Raises `error` for anything else."""

    def read(form: object) -> object:
        if not accepted.accepts(form):
            raise error(refusal(accepted, form))
        return form

    return read


def read_folder(form: Any) -> Path | None:
    """The reader of a folder, or of None. Raises `GraphPPError` for anything else."""
    if form is not None and not PATH.accepts(form):
        raise GraphPPError(f"take the path of a folder, or None, got {shown(form)}")
    return None if form is None else Path(form)
