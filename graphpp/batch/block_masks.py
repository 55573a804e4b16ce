"""`BlockMask`s of `torch.nn.attention.flex_attention` among the arguments of a call: their tensors, and all else as one text.

Contract
--------
- `tree_with_masks` replaces each `BlockMask` by a node of pytree. Its leaves are the mask's tensors (`.kv_num_blocks`) and the
  tensors that its `mask_mod` closes over (`.mask_mod[0]`), also those of functions and `functools.partial`s in the closure.
- Nodes are equal, and print alike in every process, exactly if block sizes, lengths, code and all other captured values are.
- A mask of several rows has the leaf `.rows`, the row of the batch for each of its own: cut along the rows with the mask's
  tensors, it makes `mask_mod` of a part read what it reads in the whole. Captured tensors are never cut (`has_rows`).
- `BatchError` is raised where tensors may hide: for another callable or a captured object, for a global tensor, and for what
  may hold other values in the next step: modules and classes other than torch's, attributes of functions.
- A captured graph keeps the tensors of the first mask alive: those that its functions close over are held by `_Form.build`.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from graphpp._torch import pytree
from graphpp._torch.operators.flex_attention import SLICED, is_block_mask
from graphpp.errors import BatchError

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NAMED = (ModuleType, BuiltinFunctionType, type)
_LIBRARIES = frozenset(("torch", "math", "operator", "builtins", "_operator"))  # whose attributes stay as they are
_OWN = "_graphpp_rows"  # attribute of a `mask_mod` of rows: the user's function, and the rows
Build = Callable[[Iterator[torch.Tensor]], Any]


def tree_with_masks(tree: Any) -> Any:
    """The structure with a node of pytree for each `BlockMask`; `tree_unflatten` makes masks of the nodes' leaves."""
    if not any(map(is_block_mask, pytree.tree_leaves(tree, is_leaf=is_block_mask))):
        return tree
    return pytree.tree_map(lambda leaf: _Node(leaf) if is_block_mask(leaf) else leaf, tree, is_leaf=is_block_mask)


def has_rows(keys: Sequence[Any]) -> bool | None:
    """Whether the tensor of a mask at a path of pytree is cut along the rows; None for other leaves."""
    return next((key.cut for key in keys if isinstance(key, _Key)), None)


def refuse_whole_rows(path: str, value: Any) -> None:
    """Raise `BatchError` for a mask of several rows in an argument that goes whole to each microbatch."""
    for mask in filter(is_block_mask, pytree.tree_leaves(value, is_leaf=is_block_mask)):
        if len(mask.kv_num_blocks) > 1:
            raise BatchError(of_other_rows(path, len(mask.kv_num_blocks), "goes whole to microbatches of fewer rows"))


def of_other_rows(path: str, rows: int, call: str) -> str:
    """The text of an error."""
    return f"{path} is of a block mask of {rows} rows, and {call}: give a mask of as many rows, or of one row for all"


def lines_of_masks(spec: pytree.TreeSpec) -> Iterator[str]:
    """A line for each code object, and for each captured value that is no tensor, of the masks' functions in a structure."""
    form = pytree.context(spec)
    yield from (f"the block mask's {line}" for line in (form.lines if isinstance(form, _Form) else ()))
    for each in pytree.children(spec):
        yield from lines_of_masks(each)


@dataclass(frozen=True)
class _Key:
    """A leaf of a mask in a path. `cut`: whether the tensor has a first dimension of the batch's rows."""

    name: str
    cut: bool = field(compare=False)

    def __str__(self) -> str:
        return f".{self.name}"


@dataclass(frozen=True)
class _Form:
    """All of a mask but its tensors: `text` tells forms apart. `lines`: what `text` is a hash of, to be read in errors."""

    text: str
    lines: tuple[str, ...] = field(compare=False, repr=False)
    build: Build = field(compare=False, repr=False)


class _Node:
    """A mask as a node of pytree. Raises `BatchError` (see the contract of this file)."""

    def __init__(self, mask: Any) -> None:
        fields = list(inspect.signature(type(mask)).parameters)
        values = {name: getattr(mask, name) for name in fields}
        own, rows = getattr(mask.mask_mod, _OWN, (mask.mask_mod, None))
        if getattr(own, "__name__", "") == SLICED:
            raise BatchError(
                "a block mask was sliced, and torch's slices have no mask_mod: give pipe.step the mask of the whole batch, "
                "or make one for each microbatch"
            )
        if rows is None and len(mask.kv_num_blocks) > 1:
            rows = torch.arange(len(mask.kv_num_blocks), device=mask.kv_num_blocks.device)
        found = _Captured()
        build = found.take(own, "mask_mod")
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        rest = {name: value for name, value in values.items() if name not in tensors and name != "mask_mod"}
        pairs = [(_Key(name, cut=rows is not None), value) for name, value in tensors.items()]
        pairs += [] if rows is None else [(_Key("rows", cut=True), rows)]
        self.pairs = pairs + [(_Key(f"mask_mod[{at}]", cut=False), value) for at, value in enumerate(found.tensors)]
        names, of_batch = list(tensors), rows is not None

        def mask_of(leaves: Iterator[torch.Tensor]) -> Any:
            given = {name: next(leaves) for name in names}
            of_rows = next(leaves) if of_batch else None
            function = build(leaves)
            return type(mask)(**rest, **given, mask_mod=function if of_rows is None else _of_rows(function, of_rows))

        self.form = _Form(f"{rest} of {found.text}", tuple(found.lines), mask_of)


def _of_rows(own: Callable[..., Any], rows: torch.Tensor) -> Callable[..., Any]:
    """`mask_mod` of a part of a batch: `own` for the part's rows."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return own(rows[b], h, q_idx, kv_idx)

    setattr(mask_mod, _OWN, (own, rows))
    return mask_mod


pytree.register(
    _Node,
    lambda node: ([value for _, value in node.pairs], node.form),
    lambda leaves, form: form.build(iter(leaves)),
    lambda node: (node.pairs, node.form),
)


class _Captured:
    """The tensors that functions close over, in order, and a text of everything else that decides about their results."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.lines: list[str] = []
        self._open: list[FunctionType] = []

    @property
    def text(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]

    def take(self, value: Any, place: str) -> Build:
        """Note a value, and return the function that makes it anew with other tensors."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return next
        if isinstance(value, FunctionType) and value not in self._open:
            return self._take_function(value, place)
        if isinstance(value, functools.partial):
            return self._take_partial(value, place)
        by_name = _is_of_library(value)
        if not by_name and not isinstance(value, _CONSTANTS):
            raise BatchError(f"the block mask's {place} {_refusal(value)}")
        name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        self._note(place, f"{getattr(value, '__module__', '')} {name}" if by_name else f"{type(value).__name__} {value!r}")
        return lambda tensors: value

    def _take_partial(self, own: functools.partial[Any], place: str) -> Build:
        parts = self._take_all((own.func, own.args, own.keywords), place)

        def build(tensors: Iterator[torch.Tensor]) -> Any:
            func, args, named = parts(tensors)
            return functools.partial(func, *args, **named)

        return build

    def _note(self, place: str, fact: str) -> None:
        self.lines.append(f"{place} is {fact}")

    def _take_all(self, values: Any, place: str) -> Build:
        leaves, spec = pytree.tree_flatten(values)
        self._note(place, f"of {spec}")
        builds = [self.take(leaf, place) for leaf in leaves]
        return lambda tensors: pytree.tree_unflatten([build(tensors) for build in builds], spec)

    def _take_function(self, own: FunctionType, place: str) -> Build:
        if changing := sorted(vars(own).keys() - {"__wrapped__"}):
            raise BatchError(
                f"the block mask's {place} has the attribute {own.__name__}.{changing[0]}, whose value would become "
                "a constant of the graph: read it before def mask_mod, and remove it from the function."
            )
        self._note(place, f"the code {_digest(own.__code__)}")
        self._open.append(own)
        cells, names = own.__closure__ or (), own.__code__.co_freevars
        builds = [self._take_all(cell.cell_contents, f"{place}: {name}") for cell, name in zip(cells, names, strict=True)]
        defaults = self._take_all((own.__defaults__, own.__kwdefaults__), f"{place}: a default")
        before = len(self.tensors)
        for name in _globals_of(own.__code__):
            value = own.__globals__.get(name)
            of_torch = (getattr(value, "__module__", None) or "").partition(".")[0] == "torch"
            self._take_all(name if of_torch and isinstance(value, FunctionType) else value, f"{place}: {name}")
        if found := self.tensors[before:]:
            trained = any(tensor.requires_grad for tensor in found)
            raise BatchError(
                f"the block mask's {place} reads a {'trained ' * trained}tensor of its module by a global name, and the tensor "
                "would become a constant of the graph: make mask_mod in a function that has the tensor"
                f"{', as tensor.detach(),' * trained} as an argument."
            )
        self._open.pop()

        def build(tensors: Iterator[torch.Tensor]) -> Any:
            contents = tuple(CellType(each(tensors)) for each in builds)
            positional, named = defaults(tensors)
            if not contents and positional is own.__defaults__:
                return own
            made = FunctionType(own.__code__, own.__globals__, own.__name__, positional, contents)
            made.__kwdefaults__ = named
            return made

        return build


def _is_of_library(value: Any) -> bool:
    """Whether a module, class or function in C is torch's or Python's own, so that its name tells all of it."""
    if not isinstance(value, _NAMED):
        return False
    bound = getattr(value, "__self__", None) if isinstance(value, BuiltinFunctionType) else None
    of = value if bound is None else bound  # `torch.where` is bound to a class, `math.floor` to a module
    name = getattr(of, "__name__", "") if isinstance(of, ModuleType) else getattr(of, "__module__", "")
    return isinstance(of, _NAMED) and str(name).partition(".")[0] in _LIBRARIES


def _refusal(value: Any) -> str:
    """Why a value is no part of a mask, and what to do."""
    if isinstance(value, FunctionType):
        return f"is {value.__name__}, which calls itself: write mask_mod without recursion."
    if isinstance(value, ModuleType | type):
        kind = "module" if isinstance(value, ModuleType) else "class"
        return (
            f"is the {kind} {value.__name__}, whose attributes would become "
            "constants of the graph. Read an attribute before def mask_mod, for example window = settings.window; import a "
            "function by its name, for example from helpers import within."
        )
    if type(value).__module__ == "numpy":
        return f"is of the type numpy.{type(value).__name__}: give a number of Python, by .item(), or a tensor."
    return (
        f"is of the type {type(value).__qualname__}: tensors in it would become constants of the graph. Let mask_mod be a "
        "function that closes over tensors, numbers and functions alone: read attributes before its def, for example doc = "
        "self.doc or window = config.window."
    )


@functools.lru_cache(maxsize=256)
def _digest(code: CodeType) -> str:
    """A hash of what a code object computes, equal in all processes."""
    facts = [code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars]
    facts += map(str, (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags))
    return hashlib.sha256("\n".join([*facts, *map(_constant, code.co_consts)]).encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _digest(value)
    if isinstance(value, frozenset | tuple):
        each: Iterable[str] = map(_constant, value)
        return f"{type(value).__name__}({', '.join(sorted(each) if isinstance(value, frozenset) else each)})"
    return f"{type(value).__name__} {value!r}"


@functools.lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The global names that a function and the functions in it read."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = (name for value in code.co_consts if isinstance(value, CodeType) for name in _globals_of(value))
    return tuple(sorted(own.union(inner)))
