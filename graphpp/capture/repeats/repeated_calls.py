"""Trace or replace the calls of repeated modules while a model runs.

Contract
--------
- While `RepeatedCalls.replaced` is open, the calls of the modules of one group with arguments of one kind (shapes, plain data,
  needs-grad, modes) are treated alike. The first two are traced between operators that mark their inputs and results. Each
  other one is a single operator with the same results (`stand_ins.py`).
- The forward of every call runs, so its side effects are those of a full trace. That of a replaced call runs outside of the
  trace, and its operators are compared with those of the traced calls (`operator_record.py`). No tensor that it made may
  be held anywhere afterwards: the trace does not know such tensors.
- `DifferentError` is raised at the end of the model's forward, if calls differ in anything that is compared, if a call writes
  into an argument, or if its results share memory with other tensors. The caller then traces once more. So a program whose
  forward changes its own lists sees two forwards, and tables in which it keeps tensors have fake tensors of the first one.
- Calls that no operator can stand for, with arguments that are no plain data or within a transform for instance, are traced as
  always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from graphpp._torch import aot, pytree
from graphpp._torch.this_thread import replaced
from graphpp.capture.autograd_functions import functions_apart
from graphpp.capture.repeats.arguments import can_be_marked, key_of, leaves_of, with_tensors
from graphpp.capture.repeats.equal_modules import RepeatedModules
from graphpp.capture.repeats.operator_record import PLAIN, OperatorRecord
from graphpp.capture.repeats.stand_ins import (
    CONSTANT_RESULTS,
    CONSTANTS,
    INPUTS,
    RESULTS,
    STAND_IN,
    Call,
    CallKind,
    CallTable,
    Layout,
    gets_gradient,
)


class RepeatedCalls(CallTable):
    """The calls of the modules of these groups in one trace."""

    def __init__(self, groups: Sequence[RepeatedModules] = ()) -> None:
        super().__init__()
        self._groups = groups
        self._kinds: dict[Any, CallKind] = {}
        self._called: set[str] = set()
        self._state: dict[str, Mapping[str, torch.Tensor]] = {}  # of each member, by name
        self._unwritten: list[tuple[Call, torch.Tensor, int]] = []  # tensors that must keep their versions

    @property
    def kinds(self) -> list[CallKind]:
        """The kinds of which calls were replaced."""
        return [kind for kind in self._kinds.values() if kind.replaced]

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """While open, the members of all groups have a forward that traces or replaces the call."""
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                members = {id(module): (fqn, module) for fqn, module in group.members.items()}
                self._state |= {fqn: _state_of(module) for fqn, module in group.members.items()}
                owner = type(next(iter(group.members.values())))
                stack.enter_context(replaced(owner, "forward", self._forward(group, members, owner.forward)))
            try:
                yield
            finally:
                self._raise_refusal()

    def _raise_refusal(self) -> None:
        for call, tensor, version in self._unwritten:
            if tensor._version != version:
                call.refuse("has a parameter, a buffer or a result that is written after the call")
        for kind in self._kinds.values():
            if kind.refused:
                raise kind.refused[0]

    def _forward(
        self, group: RepeatedModules, members: Mapping[int, tuple[str, nn.Module]], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The forward of the class of a group's members; other modules of the class run their own."""

        @wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            fqn, own, leaves = members.get(id(module), ("", module))[0], partial(original, module), leaves_of((args, kwargs))
            if not fqn or fqn in self._called or leaves is None or aot.transforms_active():
                return own(*args, **kwargs)
            self._called.add(fqn)
            trained = _trained(module)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if trained and not any(map(gets_gradient, tensors)):
                return own(*args, **kwargs)  # no operator would mark the end of its backward
            kind = self._kinds.setdefault(key_of(group, leaves, kwargs), CallKind(group))
            inputs = tuple(map(Layout.of, tensors))
            call = Call(len(self.calls), fqn, kind, inputs, tuple(map(Layout.of, trained.values())), tuple(trained))
            self.calls.append(call)
            if any(tensor is not self._state[fqn].get(name) for name, tensor in _state_of(module).items()):
                call.refuse("has other parameters or buffers than before the forward")
            state = [*module.parameters(), *module.buffers()]
            versions = [tensor._version for tensor in (*state, *tensors)]
            if len(kind.traced) < 2:
                kind.traced.append(call)
                output = _trace(call, module, own, tensors, args, kwargs)
            else:
                kind.replaced.append(call)
                output = _replace(call, module, partial(own, *args, **kwargs), tensors, list(trained.values()))
            if versions != [tensor._version for tensor in (*state, *tensors)]:
                call.refuse("writes a parameter, a buffer or an argument")
            results = [leaf for leaf in pytree.tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
            views = [result for result, layout in zip(results, kind.results(), strict=False) if layout.view]
            self._unwritten += [(call, tensor, tensor._version) for tensor in (*state, *views)]
            return output

        return forward


def _state_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _trained(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that get gradients, by their names within the module."""
    return {name: p for name, p in module.named_parameters() if gets_gradient(p)}


# ---------------------------------------------------------------------------------------------------------- traced calls


def _trace(
    call: Call,
    module: nn.Module,
    own: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the module's own forward, between operators that mark its inputs and outputs."""
    marked = _marked(tensors, INPUTS, CONSTANTS, call.number)
    given = iter(marked)
    args, kwargs = with_tensors(args, given), {key: with_tensors(each, given) for key, each in kwargs.items()}
    outcome, _ = _outcome(call, module, lambda: own(*args, **kwargs), marked)
    if any(tensor._version for tensor in marked):
        call.refuse("writes into an argument")
    if bool(call.inputs_with_grad()) != any(map(gets_gradient, outcome.results)):
        call.refuse("takes a tensor that requires grad and returns none")
    if len(call.kind.traced) == 1:
        call.kind.leaves, call.kind.spec, call.kind.ran = outcome.layouts, outcome.spec, outcome.ran
    _check_equal(call, outcome)
    ending = iter(_marked(outcome.results, RESULTS, CONSTANT_RESULTS, call.number))
    leaves = [next(ending) if isinstance(leaf, Layout) else leaf for leaf in outcome.layouts]
    return pytree.tree_unflatten(leaves, outcome.spec)


class _Outcome:
    """The output of a forward in parts, and the operators that ran."""

    def __init__(self, output: Any, record: OperatorRecord) -> None:
        leaves, self.spec = pytree.tree_flatten(output)
        self.output = output
        self.results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.layouts = tuple(Layout.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        self.ran = record.operators, [record.name(result) for result in self.results]


def _outcome(
    call: Call, module: nn.Module, run: Callable[[], Any], tensors: Sequence[torch.Tensor]
) -> tuple[_Outcome, OperatorRecord]:
    """Run a forward and note the operators; refuses operators that cannot be compared, and results that share memory."""
    known = {f"input {at}": tensor for at, tensor in enumerate(tensors)} | dict(_state_of(module))
    record = OperatorRecord(known)
    with record:
        output = run()
    if record.strange is not None:
        call.refuse(f"runs or reads {record.strange}")
    outcome = _Outcome(output, record)
    _check_memory(call, list(known.values()), outcome.results)
    return outcome, record


def _check_equal(call: Call, outcome: _Outcome) -> bool:
    """Refuse a call that runs other operators than the first traced call or returns something else; False for the latter."""
    first = call.kind.traced[0].fqn
    described = [[(type(leaf), repr(leaf)) for leaf in each] for each in (outcome.layouts, call.kind.leaves)]
    if described[0] != described[1] or outcome.spec != call.kind.spec:
        call.refuse(f"returns other shapes or data than {first}")
        return False
    plain = all(isinstance(leaf, Layout) or type(leaf) in PLAIN for leaf in outcome.layouts)
    if not plain or not _only_tuples(outcome.spec):
        call.refuse("returns more than tensors, plain data and tuples")
    if outcome.ran != call.kind.ran:
        call.refuse(f"runs other operators than {first}")
    return True


def _only_tuples(spec: pytree.TreeSpec) -> bool:
    """Whether a result has no container that somebody else may hold, or that may have attributes."""
    return spec.type in (None, tuple) and all(map(_only_tuples, pytree.children(spec)))


def _marked(tensors: Sequence[torch.Tensor], with_grad: Any, without: Any, number: int) -> list[torch.Tensor]:
    """The tensors behind operators: one operator for those that require grad, and one for the others."""
    found = list(tensors)
    for operator, grad in ((with_grad, True), (without, False)):
        places = [at for at, tensor in enumerate(tensors) if gets_gradient(tensor) is grad]
        if places:
            for at, tensor in zip(places, operator([tensors[at] for at in places], number), strict=True):
                found[at] = tensor
    return found


def _check_memory(call: Call, known: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Refuse results that share memory with each other, or with an argument or the state of the module."""
    taken = {_storage(tensor) for tensor in known}
    for result in results:
        if _storage(result) in taken:
            call.refuse("returns a view of an argument, of its state or of another result")
        taken.add(_storage(result))
        if not can_be_marked(result):
            call.refuse("returns a tensor with attributes, a conjugated one, or one with an offset")


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


# -------------------------------------------------------------------------------------------------------- replaced calls


def _replace(
    call: Call, module: nn.Module, run: Callable[[], Any], tensors: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]
) -> Any:
    """The results of the operator that stands for a call, after the proof that the forward runs the traced call's operators."""
    kind = call.kind
    assert kind.spec is not None
    with aot.untraced(), functions_apart():
        output, record = _compared(call, module, run, tensors)
    if output is not None:  # the trace goes on to its end, and is not used
        return output[0]
    if record.held():
        call.refuse("leaves a tensor behind that is no result")
    results = iter(STAND_IN([*tensors, *trained], call.number)) if kind.results() else iter(())
    leaves = [next(results) if isinstance(leaf, Layout) else leaf for leaf in kind.leaves]
    return pytree.tree_unflatten(leaves, kind.spec)


def _compared(
    call: Call, module: nn.Module, run: Callable[[], Any], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Any] | None, OperatorRecord]:
    """The output if it is unlike that of the traced call, and the operators that the forward ran."""
    outcome, record = _outcome(call, module, run, tensors)
    return None if _check_equal(call, outcome) else (outcome.output,), record
