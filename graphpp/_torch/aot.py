"""The private names of torch that capture stands on; no other file of `graphpp/` or `passes/` touches one.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._functorch.aot_autograd.aot_export_joint_with_descriptors`: the joint trace of a module
- `torch._functorch._aot_autograd.descriptors`: what an input or output of that trace is
- `torch._decomp.decompositions`: `select_one_layer_lstm_function`, `one_layer_lstm`: what an LSTM's layer is traced as
- `torch._higher_order_ops.effects`: `_get_effect`, `_register_effectful_op`; `torch.fx.node._side_effectful_functions`:
  which operators are traced with a token, and which a trace keeps though nobody reads them
- `torch._subclasses.fake_tensor.FakeTensorMode`: tensors with a device and no data
- `torch._functorch.autograd_function`: the class `ApplyTemplate`, by name; the logger `torch._subclasses`
- `torch._dynamo.symbolic_convert`: the file whose frames stand on the stack while Dynamo reads code
- `torch._logging`: `trace_structured`, artefacts that `TORCH_TRACE` writes and tlparse shows; `_internal.trace_log`,
  which has a handler while a trace is being written
- `torch.amp.autocast_mode._enter_autocast`, `torch.amp.autocast_mode._exit_autocast`, `torch._C._set_grad_enabled`: modes as
  nodes of a graph, as Dynamo writes them
- `torch.autograd._engine_run_backward`: what `autograd.grad`, `backward` and `torch.func.grad` call in the end
- `torch.distributions.Distribution._validate_args`: whether distributions check values
- `torch.fx._lazy_graph_module._use_lazy_graph_module`: graphs are printed to Python when they are run, not at each change
- `torch._ops.OperatorBase`: what a call of an operator in a graph is a call of
- `torch.fx.traceback`: `annotate`, `preserve_node_meta`: what is traced meanwhile carries a note through both traces
- `torch.utils.checkpoint`: `_checkpoint_hook`, which is open around the forward of a checkpointed call;
  `_CachingTorchDispatchMode`, which asks the policy of a selective one; `_is_compiling`, `_get_debug_context_and_cb`,
  `SAC_IGNORED_OPS`
- `torch.utils._python_dispatch.TorchDispatchMode`: sees the operators of an eager run
- `torch.autograd.function.FunctionMeta`, `torch.autograd.Function._backward_cls`: what `apply` asks a Function for
- `torch.utils._pytree`: nested inputs and outputs as flat lists (export's own notion of a structure)
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._decomp import decompositions
from torch._functorch._aot_autograd import descriptors
from torch._higher_order_ops import effects
from torch._logging import trace_structured  # type: ignore[attr-defined]
from torch._logging._internal import trace_log
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_READER = os.path.join("torch", "_dynamo", "symbolic_convert.py")
# Functions of torch itself that change no gradient, or implement registered and higher-order operators, which export keeps.
KEPT_FUNCTIONS = ("torch._library.", "torch._higher_order_ops.", "torch._functorch.", "torch.utils.checkpoint")
FUNCTION_OF_A_REGION = "ApplyTemplate"  # what Dynamo makes of a custom one in the region of an operator like torch.cond
FAKE_LOG = "torch._subclasses"  # the logger of what fails on fake tensors
_FunctionMeta = torch.autograd.function.FunctionMeta

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled

DispatchMode = TorchDispatchMode
Operator = torch._ops.OperatorBase
UNSELECTED = checkpoint.SAC_IGNORED_OPS  # operators that the policy of a selective checkpoint is not asked about
TreeSpec = pytree.TreeSpec
keystr = pytree.keystr
tree_flatten = pytree.tree_flatten
tree_flatten_with_path = pytree.tree_flatten_with_path
tree_map = pytree.tree_map
tree_unflatten = pytree.tree_unflatten

ParamAOTInput = descriptors.ParamAOTInput
BufferAOTInput = descriptors.BufferAOTInput
PlainAOTInput = descriptors.PlainAOTInput
TangentAOTInput = descriptors.TangentAOTInput
PlainAOTOutput = descriptors.PlainAOTOutput
GradAOTOutput = descriptors.GradAOTOutput
InputMutationAOTOutput = descriptors.InputMutationAOTOutput


def fake_mode() -> FakeTensorMode:
    """A new fake mode with its own shape environment; real constants may meet fake tensors in it."""
    # Dynamo and sympy take 2 s to import: the first capture pays, not `import graphpp`, and before it patches any of torch.
    from torch._functorch import aot_autograd  # noqa: F401
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Trace without the two things that cost most beside tracing: garbage collection, and code for graphs in the making."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        if collecting:
            gc.enable()


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on `device` with shape, strides, dtype and needs-grad of `tensor`."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def backward_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Call `run` where autograd would run a backward."""
    original = vars(torch.autograd)["_engine_run_backward"]
    vars(torch.autograd)["_engine_run_backward"] = run
    try:
        yield
    finally:
        vars(torch.autograd)["_engine_run_backward"] = original


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Let `torch.distributions` not check the values that they are given."""
    checking = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checking)


@contextlib.contextmanager
def _lstm_trainable() -> Iterator[None]:
    """Trace an LSTM that learns as one that has a backward; torch asks only whether its input needs a gradient."""
    original: Callable[..., Any] = decompositions.select_one_layer_lstm_function

    def select(*given: Any) -> Any:
        learns = any(value.requires_grad for value in pytree.tree_leaves(given) if isinstance(value, torch.Tensor))
        return decompositions.one_layer_lstm if learns and torch.is_grad_enabled() else original(*given)

    decompositions.select_one_layer_lstm_function = select
    try:
        yield
    finally:
        decompositions.select_one_layer_lstm_function = original


@contextlib.contextmanager
def _check_plain() -> Iterator[None]:
    """Trace the check of what `torch.linalg` computed as an operator that stays though nobody reads it, without a token."""
    check, kept = torch.ops.aten._linalg_check_errors.default, fx.node._side_effectful_functions
    effect, added = effects._get_effect(check), check not in kept
    effects._register_effectful_op(check, None)
    kept.add(check)
    try:
        yield
    finally:
        effects._register_effectful_op(check, effect)
        if added:
            kept.discard(check)


@contextlib.contextmanager
def joint_trace(mode: FakeTensorMode, module: nn.Module, args: tuple[Any, ...]) -> Iterator[fx.GraphModule]:
    """Trace `module(*args)` with its backward; inputs and outputs of the graph carry descriptors in `meta['desc']`."""
    from torch._functorch import aot_autograd  # `fake_mode` has loaded it

    with _lstm_trainable(), _check_plain(), contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        yield aot_autograd.aot_export_joint_with_descriptors(stack, module, args).graph_module


class _Lookup:
    """Answers `Function.name` for every `autograd.Function`; what is set meanwhile is set for good afterwards."""

    def __init__(self, name: str, answer: Callable[[type, Any], Any]) -> None:
        self._name, self._answer = name, answer
        self._set: dict[type, Any] = {}

    def __get__(self, function: type, meta: type) -> Any:
        if function in self._set:
            return self._answer(function, self._set[function])
        found = next(vars(base)[self._name] for base in function.__mro__ if self._name in vars(base))
        return self._answer(function, found.__get__(None, function) if isinstance(found, staticmethod) else found)

    def __set__(self, function: type, value: Any) -> None:
        self._set[function] = value

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Answer while the context is open."""
        setattr(_FunctionMeta, self._name, self)
        try:
            yield
        finally:
            delattr(_FunctionMeta, self._name)
            for function, value in self._set.items():
                setattr(function, self._name, value)


@contextlib.contextmanager
def functions_watched(begun: Callable[[type], None], forward: Callable[[type, Any], Any]) -> Iterator[None]:
    """While open, `begun(function)` is called when an `autograd.Function` is applied, and `forward(function, its own)` runs.

    `apply` is often held under another name (`f = MyFunction.apply`), so it cannot be replaced: torch's code asks the class
    for these two each time, and its metaclass answers first.
    """

    def backward_cls(function: type, own: Any) -> Any:
        begun(function)
        return own

    with _Lookup("_backward_cls", backward_cls).open(), _Lookup("forward", forward).open():
        yield


@contextlib.contextmanager
def noted(note: dict[str, Any]) -> Iterator[None]:
    """What export traces while this is open has the note in `meta["custom"]`, and so has what is traced of that."""
    with preserve_node_meta(), annotate(note):
        yield


@contextlib.contextmanager
def checkpoints_replaced(
    run: Callable[..., Any],
    call: Callable[[], contextlib.AbstractContextManager[None]],
    select: Callable[[Callable[..., Any]], None],
) -> Iterator[None]:
    """While open, `torch.utils.checkpoint` saves what autograd saves, and says what it was asked to do.

    `run(function, preserve_rng_state, *args)` runs a reentrant checkpoint; `call()` is open around the forward of another,
    where `select(policy)` is told the policy of a selective one.
    """
    caching = checkpoint._CachingTorchDispatchMode
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (checkpoint.CheckpointFunction, "apply", staticmethod(run)),
        (checkpoint, "_checkpoint_hook", lambda frame: call()),
        (checkpoint, "_is_compiling", lambda *_: False),
        (checkpoint, "_get_debug_context_and_cb", lambda: (checkpoint.noop_context_fn, None)),
        (caching, "__enter__", lambda mode: select(mode.policy_fn)),
        (caching, "__exit__", lambda mode, *_: None),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(_replaced(owner, name, replacement))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    inherited, original = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        delattr(owner, name)
        if not inherited:
            setattr(owner, name, original)


def selective_context(output: Any) -> checkpoint.SelectiveCheckpointContext:
    """What the policy of a selective checkpoint is given beside an operator and its arguments."""
    context = checkpoint.SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output  # 2.11 knows none
    return context


def dynamo_is_reading() -> bool:
    """Whether Dynamo, which reads the regions of operators like `torch.cond`, looks at what the caller is asked for."""
    return any(frame.f_code.co_filename.endswith(_READER) for frame, _ in traceback.walk_stack(None))


def tracing() -> bool:
    """Whether a structured trace is being written; asked after a capture, which makes torch find out."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Hand a text to torch's structured trace (read by tlparse); nothing happens when no trace is being written."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload, expect_trace_id=False
    )
