"""Refuse models for which a trace would silently compute wrong gradients.

Contract: `CaptureError`, with the FQN or the user's line, is raised for
- hooks on gradients of parameters, modules, forward values or their autograd nodes: the graph's gradients bypass them;
- parameters that the forward freezes, unfreezes or assigns `.data` to; two parameters in one memory (tied by `.data`);
- data-dependent numbers and sizes in a trace for several sizes; matrix products of different dtypes;
- modules under torch's own data parallelism, TorchScript modules, lazy modules and sparse gradients; parameters and buffers
  that the model's own lists omit.

To add a refusal: a check before the trace goes into `check_model`, a patch during the trace into `refuse_during_trace`; a check
after the trace is a function that `trace.py` calls. A refusal that needs another file's state belongs there.
While `refuse_during_trace` is open, `torch.inference_mode` acts as `torch.no_grad` and reading `.data` as `detach()`, with
the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from graphpp._torch.parallel.parallel_wrappers import wrapper_of
from graphpp._torch.symbols import SYMBOLIC, is_unknown, unknown_symbols
from graphpp._torch.this_thread import caller, replaced
from graphpp.capture.source_lines import is_user_file, module_calls, source_line, user_line
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.model_state import own_tensors


def check_model(model: nn.Module) -> None:
    """Raise `CaptureError` for modules, hooks and shared memory that cannot be captured; runs before the trace."""
    check_modules(model)
    _refuse_hooks(model)
    _refuse_shared_memory(model)


@contextlib.contextmanager
def refuse_during_trace() -> Iterator[None]:
    """While open, raise `CaptureError` when user code changes tensors in a way that a trace would lose."""
    inference = torch.inference_mode
    patches = (
        (torch.Tensor, "register_hook", _refusing("hooks a gradient with Tensor.register_hook", _HOOK)),
        (torch.Tensor, "register_post_accumulate_grad_hook", _refusing("calls register_post_accumulate_grad_hook", _LATE_HOOK)),
        (torch.Tensor, "grad_fn", property(_for_user_code(_GRAD_FN.__get__, _refusing("asks for a node (grad_fn)", _NODE)))),
        (torch.Tensor, "requires_grad", property(_REQUIRES_GRAD.__get__, _set_requires_grad)),
        (torch.Tensor, "requires_grad_", _for_user_code(_requires_grad_, _refuse_thawing, str(nn_module.__file__))),
        (torch.Tensor, "data", property(_for_user_code(_DATA.__get__, torch.Tensor.detach), _set_data)),
        (inference, "__enter__", _enter_inference),
        (inference, "__exit__", _exit_inference),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(replaced(owner, name, replacement))
        yield


def check_modules(model: nn.Module) -> None:
    """Raise `CaptureError` for wrapped, TorchScript and lazy modules, sparse gradients, backward hooks, unlisted tensors."""
    for fqn, module in model.named_modules():
        name = f"the module {fqn}" if fqn else "the model"
        wrapper = wrapper_of(module)
        if wrapper is not None:
            raise CaptureError(
                f"{name} is under torch's {wrapper}, which gathers parameters or reduces gradients in hooks of autograd, and "
                f"gradients do not pass through autograd here. Give graphpp.compile the model as it is before {wrapper}, and "
                "for data parallelism a mesh= with the dimensions pp and dp_replicate (whole parameters) or dp_shard (shards)."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name} is a TorchScript module, which torch.export cannot trace: use the module that it was made from."
            )
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(isinstance(each, UninitializedParameter | UninitializedBuffer) for each in tensors):
            raise CaptureError(f"{name} is lazy, its parameters have no shapes yet: run the model once before graphpp.compile.")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CaptureError(f"{name} has sparse=True: gradients are dense here. Set sparse=False.")
        if any(getattr(module, kind) or getattr(nn_module, f"_global{kind}") for kind in _MODULE_HOOKS):
            raise CaptureError(
                f"{name} has backward hooks, or all modules have: gradients do not pass through autograd here, so they would "
                "never be called. Remove them, and do their work in the forward or on param.grad."
            )
    _refuse_unlisted(model)


def _refuse_unlisted(model: nn.Module) -> None:
    """Raise `CaptureError` for tensors that an override of `named_parameters` omits: they would have no FQN."""
    listed = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for fqn, module in model.named_modules():
        for name, tensor in own_tensors(module):
            if id(tensor) not in listed:
                place = f"{fqn}.{name}" if fqn else name
                raise CaptureError(
                    f"named_parameters() or named_buffers() of the model leaves out {place}: take the override away. (A frozen "
                    "parameter needs none: it gets no gradient.)"
                )


def _refuse_hooks(model: nn.Module) -> None:
    for fqn, parameter in model.named_parameters():
        if parameter._backward_hooks:
            raise CaptureError(
                f"the parameter {fqn} has gradient hooks: gradients do not pass through autograd here, so a hook would "
                "never be called. Use parameter.register_post_accumulate_grad_hook, which pipe.step calls with the complete "
                "gradient, or do the hook's work on param.grad after pipe.step(...)."
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    found: dict[int, str] = {}
    for fqn, parameter in model.named_parameters():
        if parameter.is_meta or type(parameter) is not nn.Parameter or not parameter.numel():
            continue
        other = found.setdefault(parameter.data_ptr(), fqn)
        if other != fqn:
            raise CaptureError(
                f"the parameters {other} and {fqn} are two objects in one memory (tied by .data?): their gradients would "
                f"not be added. Tie them as one parameter: set the attribute {fqn} to the parameter {other} itself."
            )


def refuse_unknown_numbers(graph: fx.Graph, are_numbers: Sequence[bool]) -> None:
    """Raise `CaptureError` for numbers that a trace for several sizes cannot compute as Python does.

    These are data-dependent numbers and sizes, and floats that several operations compute from sizes: torch simplifies
    algebraically, `0.1*n*3.0` to `n*0.3`, while Python rounds after each operation. `are_numbers`: which inputs are numbers of
    the microbatch, which the graph may read.
    """
    inputs = graph.find_nodes(op="placeholder")[-len(are_numbers) :]
    read = [user.meta.get("val") for node, number in zip(inputs, are_numbers, strict=True) if number for user in node.users]
    known = set[Any]().union(*map(unknown_symbols, read))
    for node in graph.nodes:
        value, line = node.meta.get("val"), source_line(node.meta.get("stack_trace") or "") or "the loss"
        given = not isinstance(value, torch.Tensor) and unknown_symbols(value) <= known
        if not given and any(map(is_unknown, value.shape if isinstance(value, torch.Tensor) else (value,))):
            raise CaptureError(f"only the data decides a number or a size at {line}, by {node.target}")
        chained = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.SymFloat)]
        number = node.op == "call_function" and isinstance(value, SYMBOLIC)
        if number and any(source.target is not torch.sym_float for source in chained):
            raise CaptureError(f"several floating-point operations compute a number from a size at {line}")


def refuse_made_tensors(nodes: Sequence[fx.Node]) -> None:
    """Raise `CaptureError` for an operator whose body makes a tensor out of numbers."""
    for node in nodes:
        raise CaptureError(
            f"score_mod or mask_mod of {node.target} in module {(module_calls(node) or ('',))[-1]!r} at "
            f"{source_line(node.stack_trace or '') or 'the loss'} makes a tensor out of numbers, which a trace cannot keep: "
            "make the tensor before the function, so that the function captures it."
        )


def refuse_mixed_products(joint: JointGraph) -> None:
    """Raise `CaptureError` for matrix products of different dtypes: a trace accepts some of them, and no kernel does."""
    for node in joint.computed():
        values = [each.meta["val"] for each in node.all_input_nodes] if node.target in _PRODUCTS else []
        dtypes = {str(value.dtype).removeprefix("torch.") for value in values}
        if len(dtypes) > 1:
            module = f"in module {node.meta['calls'][-1]!r}" if node.meta["calls"] else ""
            line = f"at {node.meta['source']}" if node.meta["source"] else ""
            place = " ".join(filter(None, [module, line])) or "in the loss"
            raise CaptureError(
                f"{node.target} {place} multiplies values of {' and '.join(sorted(dtypes))}, which no kernel does. Pass a "
                "batch of the model's dtype, cast one of them there, or train under torch.autocast."
            )


_PRODUCTS = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward")
}
_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_DATA: Any = torch.Tensor.data
_GRAD_FN: Any = torch.Tensor.grad_fn
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


def _for_user_code(original: Callable[..., Any], replacement: Callable[..., Any], *also: str) -> Callable[..., Any]:
    """A function that calls `replacement` for callers in user code and in the files `also`, else `original`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        file = caller().co_filename
        return (replacement if is_user_file(file) or file in also else original)(*args, **kwargs)

    return call


def _refusing(act: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any) -> NoReturn:
        raise CaptureError(f"the forward {act} at {user_line()}: {reason}")

    return refuse


_HOOK = "the captured graph would pass it by. Write its work as a differentiable operation, or on param.grad after the step."
_NODE = "hooks on it would be passed by. Write what it is for as a differentiable operation."
_LATE_HOOK = (
    "the forward is traced on stand-ins of the parameters, so the hook would never be called. Register the hook on the model's "
    "parameters before the step. Where the hook sums a gradient over the ranks of tp, spread the module by torch's "
    "SequenceParallel(sequence_dim=...) over the dimension of its input that tp shards: torch sums the gradient then."
)


def _refuse_thawing(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    if tensor.requires_grad != requires_grad and isinstance(tensor, nn.Parameter):
        raise CaptureError(
            f"the forward switches a parameter's requires_grad at {user_line()}: a captured graph "
            "knows one set of trained parameters. Use torch.no_grad() or detach(), or freeze before the step."
        )
    return _requires_grad_(tensor, requires_grad)


def _set_requires_grad(tensor: torch.Tensor, value: bool) -> None:
    if is_user_file(caller().co_filename):
        _refuse_thawing(tensor, value)
    _REQUIRES_GRAD.__set__(tensor, value)


_requires_grad_ = torch.Tensor.requires_grad_


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if is_user_file(caller().co_filename):
        raise CaptureError(
            f"the forward assigns to .data at {user_line()}: the captured graph would not see it. Copy into a buffer "
            "(buffer.copy_(new)), or assign the buffer itself. bitsandbytes: take Linear4bit, and on CPUs "
            "where it packs weights in eval mode, set its support_avx512bf16_for_cpu to False."
        )
    _DATA.__set__(tensor, value)


def _enter_inference(mode: Any) -> None:
    mode._outside = torch.is_grad_enabled()
    if mode.mode:
        torch.set_grad_enabled(False)


def _exit_inference(mode: Any, *_: Any) -> None:
    torch.set_grad_enabled(mode._outside)
