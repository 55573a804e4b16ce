"""Tell which attributes of Python modules code reads, from its instructions.

Contract
--------
- `module_uses(code, around)` yields (module, attribute) for each module that code with the globals `around` loads and reads an
  attribute of, `import` statements in functions included. The attribute is None where code uses the module as a value
  (`getattr(module, name)`, an argument, a stored variable) or reads its `__dict__`: then any attribute may be read.
- A module that is not imported yet yields nothing.
"""

from __future__ import annotations

import builtins
import dis
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ModuleUse = tuple[types.ModuleType, str | None]

_WITHOUT_MEANING = ("EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL")
_READS = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("STORE_ATTR", "DELETE_ATTR")


def global_named(around: Mapping[str, Any], name: str, default: Any) -> Any:
    """The object that a name in code means: a global, or one of Python's builtins."""
    return around[name] if name in around else vars(builtins).get(name, default)


def attribute_of_module(module: types.ModuleType, name: str, default: Any) -> Any:
    """The attribute of a module, or its submodule of this name."""
    return vars(module).get(name, sys.modules.get(f"{module.__name__}.{name}", default))


def module_uses(code: types.CodeType, around: Mapping[str, Any]) -> Iterator[ModuleUse]:
    """The attributes of modules that code, and the functions in it, may read; None for any attribute."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _WITHOUT_MEANING]
    imported: dict[str, types.ModuleType] = {}  # by the local variable
    yield from _imports(instructions, around, imported)
    for at, each in enumerate(instructions):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield from _reads_of(global_named(around, each.argval, None), instructions[at + 1 :])
        elif "LOAD_FAST" in each.opname:
            loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            found = [imported[name] for name in loaded if name in imported]
            for module in found:
                yield from _reads_of(module, instructions[at + 1 :] if len(loaded) == 1 else ())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from module_uses(constant, around)


def _reads_of(value: Any, following: Sequence[dis.Instruction]) -> Iterator[ModuleUse]:
    """The uses of a loaded value and of the modules read from it, by the instructions that follow."""
    for each in (*following, None):
        if not isinstance(value, types.ModuleType):
            return
        if each is None or each.opname not in (*_READS, *_WRITES) or each.argval == "__dict__":
            yield value, None
            return
        if each.opname in _WRITES:
            return
        yield value, each.argval
        value = attribute_of_module(value, each.argval, None)


def _imports(
    instructions: Sequence[dis.Instruction], around: Mapping[str, Any], imported: dict[str, types.ModuleType]
) -> Iterator[ModuleUse]:
    """What `import` statements read; modules that they bind to local variables are put into `imported`."""
    source: types.ModuleType | None = None
    for at, each in enumerate(instructions):
        value: Any = None
        if each.opname == "IMPORT_NAME":
            source = value = _imported_module(each.argval, instructions[at - 2].argval, instructions[at - 1].argval, around)
        elif each.opname == "IMPORT_FROM" and source is not None:
            yield source, each.argval
            value = attribute_of_module(source, each.argval, None)
        if not isinstance(value, types.ModuleType):
            continue
        following = instructions[at + 1]
        if following.opname == "SWAP":  # of `import a.b.c as d`
            source = value
        elif following.opname == "STORE_FAST" and imported.get(following.argval, value) is value:
            imported[following.argval] = value
        elif following.opname != "IMPORT_FROM" or each.opname != "IMPORT_NAME":
            yield value, None


def _imported_module(name: str, level: int, names: Any, around: Mapping[str, Any]) -> types.ModuleType | None:
    """The module that an `import` statement puts on the stack; None if it is not imported yet."""
    package = around.get("__package__") or str(around.get("__name__", "")).rpartition(".")[0]
    full = importlib.util.resolve_name("." * level + name, package) if level else name
    return sys.modules.get(full if names or level else full.partition(".")[0])
