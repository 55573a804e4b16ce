"""Objects of dataclasses from JSON, checked by the annotations of their fields: plans, machines, costs.

`read(cls, given, path)` raises `GraphPPError` that names the entry, if it is missing, unknown, of another type or not finite.
`data_of(value)` is the data from which `read` makes an equal object.
An object of the class is taken as it is. Lists become tuples, keys members of their enumeration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from graphpp.arguments import shown
from graphpp.errors import GraphPPError


def document(text: str | Path, path: str) -> dict[str, Any]:
    """The object of a JSON text or file, in which no name occurs twice. Raises `GraphPPError`."""
    try:
        given = json.loads(text.read_text(encoding="utf-8") if isinstance(text, Path) else text, object_pairs_hook=_once)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise GraphPPError(f"{path}: {error}") from error
    if not isinstance(given, dict):
        raise GraphPPError(f"{path}: take a JSON object, got {shown(given)}")
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a field stands twice in one object: {', '.join(name for name, _ in pairs)}")
    return found


def data_of(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: data_of(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key.value if isinstance(key, Enum) else key: data_of(each) for key, each in value.items()}
    return [data_of(each) for each in value] if isinstance(value, list | tuple) else value


def read(cls: type[Any], given: object, path: str) -> Any:
    hints = get_type_hints(cls)
    items = {item.name: item for item in fields(cls)}
    if not isinstance(given, dict):
        raise GraphPPError(f"{path}: take an object with {', '.join(items)}; got {shown(given)}")
    unknown = sorted(set(given) - set(items))
    if unknown:
        near = "".join(f", did you mean {name}?" for name in get_close_matches(unknown[0], items, 1))
        raise GraphPPError(f"{path}: take an object with {', '.join(items)}; got {unknown}{near}")
    missing = [name for name, item in items.items() if name not in given and item.default is item.default_factory is MISSING]
    if missing:
        raise GraphPPError(f"{path}: missing {', '.join(missing)}")
    values = {name: _value(hints[name], each, f"{path}.{name}") for name, each in given.items()}
    try:
        return cls(**values)
    except GraphPPError as error:  # which names the field
        raise type(error)(f"{path}.{error}" if not str(error).startswith(path) else str(error)) from error


def _value(hint: Any, given: object, path: str) -> object:
    """A value of an annotated type. Raises `GraphPPError` for another type."""
    if is_dataclass(hint) and isinstance(hint, type):
        return given if isinstance(given, hint) else read(hint, given, path)
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and isinstance(given, list | dict):  # a list or an object, or nothing
        nested = [each for each in inside if (is_dataclass(each) if isinstance(given, dict) else get_origin(each) is tuple)]
        if nested:
            return _value(nested[0], given, path)
    if origin is tuple and isinstance(given, list):
        return tuple(_value(inside[0], each, f"{path}[{at}]") for at, each in enumerate(given))
    if origin is Mapping and isinstance(given, dict):
        return {_key(inside[0], key, path): _value(inside[1], each, f"{path}.{key}") for key, each in given.items()}
    choices = inside if origin in (Union, UnionType) else (hint,)
    if any(_is(choice, given) for choice in choices):
        return given
    names = " or ".join("null" if each is NoneType else getattr(each, "__name__", str(each)) for each in choices)
    raise GraphPPError(f"{path}: take {names}, got {shown(given)}")


def _key(hint: Any, key: str, path: str) -> object:
    if not issubclass(hint, Enum):
        return key
    if key not in [member.value for member in hint]:
        raise GraphPPError(f"{path}: take {', '.join(str(member.value) for member in hint)} as names, got {shown(key)}")
    return hint(key)


def _is(hint: Any, given: object) -> bool:
    if hint is float:
        return isinstance(given, int | float) and not isinstance(given, bool) and isfinite(given)
    return isinstance(hint, type) and isinstance(given, hint) and (hint is bool or not isinstance(given, bool))
