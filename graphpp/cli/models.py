"""Find the model that a command names.

- `package.module:function`, `path/to/file.py:function`, or a folder with a Hugging Face `config.json` (`hugging_face.py`).
  Modules are looked up in the working folder first; a file may import its neighbours.
- The function takes no arguments. It returns (model, loss, example), where the loss may be None if the model's output has a
  `.loss`; an object with the attributes `model`, `loss` and `example` (a `graphpp.Microbatch`); or only a causal language model
  of transformers, whose example is random tokens.
- With `meta` everything is built under `torch.device("meta")`: no tensor has memory. torch's random numbers start from seed 0.
- Every fault, including an exception of the function, raises a `GraphPPError` that names the function.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from graphpp.arguments import shown, type_name, unfit
from graphpp.batch.microbatch import Microbatch
from graphpp.capture.loss import LossFunction
from graphpp.cli.hugging_face import causal_model, is_causal, random_tokens
from graphpp.errors import GraphPPError

_FORMS = "package.module:function, path/to/file.py:function, or a folder with a Hugging Face config.json"
_RETURNS = "(model, loss, example), or an object with the attributes model, loss and example"
_PARTS = ("model", "loss", "example")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its loss (None: the output's own) and one microbatch, as `graphpp.compile` takes them."""

    model: nn.Module
    loss: LossFunction | None
    example: Microbatch


def load_model(
    name: str, *, rows: int | None = None, length: int | None = None, meta: bool = False, length_needed: bool = False
) -> LoadedModel:
    """The model called `name`. `length_needed`: random tokens need a given `length`.

    `rows`, `length`: size of the random tokens; None: 2 rows of 64 tokens, or the model's maximum if that is less. Raises
    `GraphPPError`, also if they are given and the function returns an example.
    """
    torch.manual_seed(0)
    if ":" not in name:
        folder = _config_folder(name)
        if length_needed:
            _require_length(length)
        model = causal_model(folder, meta=meta)
        return LoadedModel(model, None, random_tokens(model, rows, length))
    function = _function(name)
    with torch.device("meta") if meta else contextlib.nullcontext():
        with _reported(f"{name}, run under torch.device('meta')," if meta else name):
            result = function()
        if length_needed and isinstance(result, nn.Module):
            _require_length(length)
        return _read(name, result, rows, length)


def _require_length(length: int | None) -> None:
    if length is None:
        raise GraphPPError("--length: give the tokens of a row; the costs of a Hugging Face model depend on them")


def _config_folder(name: str) -> Path:
    """The folder, if it has a `config.json`; else raises a `GraphPPError` that says how to name a model."""
    path = Path(name)
    if name and path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise GraphPPError(f"MODEL: the folder {name} has no config.json of a Hugging Face model")
    if path.name == "config.json" and path.is_file():
        raise GraphPPError(f"MODEL: name the folder of the config.json: {path.parent}")
    if path.is_file():
        raise GraphPPError(f"MODEL: name a function of the file too: {name}:FUNCTION; it returns {_RETURNS}")
    raise GraphPPError(f"MODEL: take {_FORMS}, got {name!r}, and there is no such file or folder")


def _function(name: str) -> Callable[[], Any]:
    """The function that `file.py:function` or `package.module:function` names."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise GraphPPError(f"MODEL: take {_FORMS}, got {name!r}")
    is_file = place.endswith(".py") or "/" in place
    found: Any = _run_file(Path(place)) if is_file else _import(place)
    for each in attribute.split("."):
        if not hasattr(found, each):
            raise GraphPPError(f"MODEL: {place} has no {attribute}{_functions_of(found)}")
        found = getattr(found, each)
    if isinstance(found, nn.Module) or not callable(found):
        raise GraphPPError(f"MODEL: {name} is a {type_name(found)}: name a function without arguments that returns {_RETURNS}")
    fault = unfit(found, 0)
    if fault is not None:
        raise GraphPPError(f"MODEL: the function {name} must take no arguments: {fault}")
    function: Callable[[], Any] = found
    return function


def _functions_of(found: Any) -> str:
    """The functions that a module itself defines, as a hint."""
    own = vars(found).items() if isinstance(found, ModuleType) else ()
    names = [key for key, value in own if callable(value) and getattr(value, "__module__", "") == found.__name__]
    names = [key for key in names if not isinstance(vars(found)[key], type)]
    return f"; its functions: {', '.join(names[:10])}" if names else ""


def _import(module: str) -> ModuleType:
    """Import a module, from the working folder first."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        known = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is missing or fails, or the name is invalid
        known = False
    if not known and module.partition(".")[0] == module:
        raise GraphPPError(f"MODEL: there is no module {module!r} in this folder or among the installed packages")
    with _reported(f"importing {module}"):
        return importlib.import_module(module)


def _run_file(path: Path) -> ModuleType:
    """Run a file and return its module, named after the file unless that name is taken."""
    if not path.is_file():
        raise GraphPPError(f"MODEL: there is no file {path}")
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_the_command_line"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise GraphPPError(f"MODEL: {path} is no file of Python code; its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module  # dataclasses and pickle look a class up there
    with _reported(f"importing {path}"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Raise `GraphPPError` for an exception or exit of the user's code."""
    try:
        yield
    except GraphPPError:
        raise
    except (Exception, SystemExit) as fault:
        raise GraphPPError(f"MODEL: {what} raised {type(fault).__name__}: {fault}{_own_line(fault)}") from fault


def _own_line(fault: BaseException) -> str:
    """The innermost line of the traceback outside of the import system and this file."""
    frames, trace = [], fault.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [(file, line) for file, line in frames if not file.startswith("<frozen") and file != __file__]
    own = [(file, line) for file, line in own if not file.endswith("importlib/__init__.py")]
    return "".join(f"\n  at {file}:{line}" for file, line in own[-1:])


def _read(name: str, result: Any, rows: int | None, length: int | None) -> LoadedModel:
    if isinstance(result, nn.Module):
        if not is_causal(result):
            alone = f"{name} returned a {type_name(result)} alone, which is no causal language model of transformers"
            raise GraphPPError(f"{alone}: return {_RETURNS}")
        return LoadedModel(result, None, random_tokens(result, rows, length))
    model, loss, example = _three_parts(name, result)
    if not isinstance(model, nn.Module):
        raise GraphPPError(f"{name}: the model must be an nn.Module, got {shown(model)}")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise GraphPPError(f"{name}: the loss must be a function of (output, target), or None, got {shown(loss)}")
    if not isinstance(example, Microbatch):
        raise GraphPPError(f"{name}: the example must be a graphpp.Microbatch(args, kwargs, target), got {shown(example)}")
    if rows is not None or length is not None:
        given = "--batch" if rows is not None else "--length"
        raise GraphPPError(f"{given}: {name} gives an example of its own: leave the option out")
    return LoadedModel(model, loss, example)


def _three_parts(name: str, result: Any) -> tuple[Any, Any, Any]:
    """Model, loss and example of a result that is no model."""
    lacking = [part for part in _PARTS if not hasattr(result, part)]
    if not lacking:
        return result.model, result.loss, result.example
    if isinstance(result, tuple) and len(result) == len(_PARTS):
        return result[0], result[1], result[2]
    form = f"a tuple of {len(result)}" if isinstance(result, tuple) else shown(result)
    without = f" without {' and '.join(lacking)}" if len(lacking) < len(_PARTS) else ""
    raise GraphPPError(f"{name} returned {form}{without}: return {_RETURNS}")
