"""Run forward and loss on the model's own parameter and buffer objects, while torch traces other tensors in their places.

Contract
--------
- Inside `TensorObjects.in_use` the modules hold the model's own objects: classes, Python attributes and identity (as a key of
  a dict, with `is`) are those of eager. Every call of torch gets the traced tensor of each object among its arguments, and a
  call that returns a traced tensor returns its object. Code that reads memory without calling torch gets the real values;
  `refuse_foreign_leaves` refuses a trained parameter that reached the graph this way.
- Code that calls operators with bodies (`torch.cond`, `scan`), and that of models with `DTensor`s, sees the traced tensors with
  the attributes of the objects (`with_attributes_alone`); `CaptureError` is raised for a subclass with `__torch_function__`.
- An error that eager does not have, and that the code caught, is a `CaptureError` at the end.
- A subclass with `__torch_function__` decides about its objects' operations, as in eager. Its results keep the class.
- A frozen tensor of a class with `__torch_dispatch__`, such as quantised weights, has no traced tensor: its class computes with
  the tensors inside, which become constants of the graph. `CaptureError` is raised for such a class that trains.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphpp._torch import aot, tensor_subclass
from graphpp._torch.parallel.sharded_tensor import is_dtensor_class
from graphpp._torch.this_thread import replaced
from graphpp.capture.explain_errors import BY_VALUE, is_of_trace
from graphpp.capture.source_lines import is_user_file, user_line
from graphpp.errors import CaptureError
from graphpp.runtime.released import like, original

T = TypeVar("T")
_BLANK = torch.empty((), device="meta")


class Place(NamedTuple):
    """A store of a module, the tensor's name in it, the tensor there, its name in the model, and the user's object."""

    store: dict[str, Any]
    name: str
    tensor: torch.Tensor
    fqn: str
    own: torch.Tensor  # a tensor that other ranks have was exchanged for a stand-in (`runtime/released.py`)


def places_of(model: nn.Module) -> list[Place]:
    named = ((f"{fqn}." if fqn else "", module) for fqn, module in model.named_modules())
    stores = ((prefix, store) for prefix, module in named for store in (module._parameters, module._buffers))
    found = ((store, name, held, prefix + name) for prefix, store in stores for name, held in store.items())
    return [Place(*place, _own(place[2])) for place in found if place[2] is not None]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The object that the code sees: for a shard of a whole parameter a plain parameter, as after a gather."""
    return like(tensor, _BLANK) if is_dtensor_class(type(tensor)) else original(tensor)


def computes_itself(place: Place) -> bool:
    """Whether a tensor's class computes by `__torch_dispatch__`. Raises `CaptureError` if such a tensor trains."""
    if not tensor_subclass.dispatches(type(place.tensor)) or is_dtensor_class(type(place.tensor)):
        return False
    if place.tensor.requires_grad and hasattr(place.tensor, "fsdp_pre_all_gather"):
        raise CaptureError(
            f"the parameter {place.fqn} is a {type(place.tensor).__qualname__}, which says how FSDP2 gathers it: graphpp "
            "shards plain parameters, and gathers them in their own dtype or `parallel.param_dtype`. Leave the class off, for "
            "torchao's float8 by Float8LinearConfig(enable_fsdp_float8_all_gather=False)."
        )
    if place.tensor.requires_grad:
        raise CaptureError(
            f"the parameter {place.fqn} is a {type(place.tensor).__qualname__}, a class with operators of its own, and "
            "requires grad: gradients of such parameters cannot be captured. Freeze it (requires_grad_(False)), for example "
            "as the base of LoRA, or train a plain nn.Parameter."
        )
    return True


def _lend_attributes(place: Place) -> None:
    """Give the traced tensor the attributes of the object. Raises `CaptureError` for a class that decides about operations."""
    kind, traced = type(place.own), place.store[place.name]
    if traced is None or (tensor_subclass.overrides(kind) and not is_dtensor_class(kind)):
        raise CaptureError(
            f"{place.fqn} is a {kind.__qualname__}, which decides about its own operations, and the model calls an operator "
            "with a body (such as torch.cond) or has DTensor parameters, where torch traces plain tensors: use a plain one."
        )
    for name, value in vars(place.own).items():
        setattr(traced, name, value)


class RegionsTraced(BaseException):
    """Ends a trace whose code calls an operator with a body (its name is the text): torch traces bodies without the mode."""


def with_objects_first(trace: Callable[[TensorObjects], T], objects: TensorObjects) -> T:
    """`trace(objects)`, or where the code calls operators with bodies, a trace in which it sees the traced tensors."""
    try:
        return trace(objects)
    except RegionsTraced:
        return trace(objects.with_attributes_alone())


def end_trace(region: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
    """`region`: the operator, or what `torch.compile` was given."""
    name = getattr(region, "_name", None) or f"torch.compile of {getattr(region, '__name__', 'a function')}"
    raise RegionsTraced("flex_attention" if "flex_attention" in name else name)  # which torch compiles by itself


class TensorObjects:
    """The model's tensors of `places`. `exchanged`: whether the code sees them; else the traced ones, with their attributes."""

    def __init__(self, places: Sequence[Place] = (), *, exchanged: bool = True) -> None:
        self._places, self._exchanged = places, exchanged
        self._mode = _Traced()

    def with_attributes_alone(self) -> TensorObjects:
        return TensorObjects(self._places, exchanged=False)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self._mode = _Traced()
        if not self._exchanged:
            for place in self._places:
                _lend_attributes(place)
            yield
            return

        def as_subclass(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
            return self._mode.as_subclass(tensor, kind)

        traced = [store[name] for store, name, *_ in self._places]
        for place, tensor in zip(self._places, traced, strict=True):
            if tensor is not None:
                self._mode.add(place.own, tensor)
            place.store[place.name] = place.own
        try:
            with self._mode, replaced(torch.Tensor, "as_subclass", as_subclass), aot.regions_replaced(end_trace):
                yield
            self._mode.refuse_caught_error()
        finally:
            for place, tensor in zip(self._places, traced, strict=True):
                place.store[place.name] = tensor

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A context inside `in_use` for the user's code that torch runs within a call of its own."""
        return self._mode if self._exchanged else contextlib.nullcontext()

    def traced(self, value: Any) -> Any:
        """The traced tensor of an object of the model; every other value itself."""
        return self._mode.traced(value)


class _Traced(TorchFunctionMode):
    """Replaces objects by their traced tensors in the arguments of calls, and traced tensors by objects in results."""

    def __init__(self) -> None:
        super().__init__()
        self._traced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of an object -> object, traced tensor
        self._own: dict[int, torch.Tensor] = {}  # id of a traced tensor -> object
        self.error: tuple[Exception, str] | None = None  # the first error that eager does not have, and the user's line

    def add(self, own: torch.Tensor, traced: torch.Tensor) -> None:
        self._traced[id(own)] = own, traced
        self._own[id(traced)] = own

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        overriding = next(filter(tensor_subclass.overrides, types), None)
        if overriding is not None and tensor_subclass.subclasses_decide():
            with self:
                return overriding.__torch_function__(function, types, args, dict(kwargs or {}))
        _refuse_wrapped(function)
        try:
            if function is torch.Tensor.__reduce_ex__:
                raise CaptureError("a tensor is pickled, or copied by copy.copy, while the model runs: use tensor.clone()")
            found = function(*self.traced(args), **self.traced(dict(kwargs or {})))
        except Exception as error:
            if is_of_trace(error):
                self.error = self.error or (error, user_line())
            raise
        return self._with_objects(found)

    def refuse_caught_error(self) -> None:
        """Raise `CaptureError` if the code caught an error that eager does not have."""
        if self.error is not None:
            error, line = self.error
            raise CaptureError(
                f"the code of model or loss caught an error of the trace, so the graph would take the branch of the error in "
                f"every step: {type(error).__name__}: {str(error).partition(chr(10))[0]}\n  at {line}\n{BY_VALUE}"
            ) from error

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return self._traced.get(id(value), (value, value))[1]

    def traced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.traced, value))
        if type(value) is dict:
            return {key: self.traced(each) for key, each in value.items()}
        return value

    def _with_objects(self, found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return self._own.get(id(found), found)
        return type(found)(map(self._with_objects, found)) if type(found) in (list, tuple) else found

    def as_subclass(self, tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        """An object of class `kind` whose traced tensor is that of `tensor`: torch cannot make one of a fake tensor."""
        traced = self.tensor(tensor)
        if not tensor_subclass.overrides(kind):
            return traced
        own = tensor_subclass.made(kind, _BLANK, False)
        self._traced[id(own)] = own, traced
        return own


def _refuse_wrapped(function: Any) -> None:
    """Raise `CaptureError` if `function` wraps a function of torch under its name: each mode of the trace would call it again.

    Torch's own function passes the object of its name to modes, and is the user's wrapper by then.
    """
    if isinstance(function, FunctionType) and is_user_file(function.__code__.co_filename):
        frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(2)))
        asking = next(code for code in frames if code.co_name != "handle_torch_function")
        if asking is not function.__code__ and not is_user_file(asking.co_filename):
            raise CaptureError(
                f"{asking.co_name} of torch was replaced by {function.__qualname__} ({function.__code__.co_filename}:"
                f"{function.__code__.co_firstlineno}), which calls the original: a trace would call it several times. Let the "
                "model call your function by its own name."
            )
