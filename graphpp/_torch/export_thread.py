"""Restrict the process-wide changes of torch's tracers to the thread that traces.

Checked on torch 2.13.0 and 2.15.0:

- `torch._dynamo.convert_frame.compile_lock`: the lock under which Dynamo compiles; `torch._dynamo.trace_rules`:
  `_numpy_function_ids`, `get_tensor_method`, `get_torch_obj_rule_map`: tables built at first use and after `init_process_group`
- `torch.export._trace`: `_ignore_backend_decomps`, `_override_builtin_ops`: contexts that export opens around a trace
- `torch._export.non_strict_utils._tensor_min_max`: `max` and `min` of `_override_builtin_ops`
- `torch._functorch.aot_autograd.patch`: `unittest.mock.patch`, used by the joint trace on `torch.cuda.set_rng_state`
- `torch.fx._symbolic_trace`: `_Patcher.patch_method`, which replaces methods of `nn.Module`; `_is_fx_tracing_flag`, whether the
  process is tracing (until torch 2.14)
"""

from __future__ import annotations

import builtins
import contextlib
import math
import os
import pkgutil
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.fx import _symbolic_trace as symbolic_trace

from graphpp._torch.this_thread import InThisThread, alone, caller, replaced

Context = contextlib.AbstractContextManager[None]
_DYNAMO = os.path.join("torch", "_dynamo", "")


@contextlib.contextmanager
def traces_in_this_thread() -> Iterator[None]:
    """Restrict patches of `torch.export` and the joint trace to this thread; Dynamo compiles nothing in other threads."""
    from torch._dynamo import convert_frame, trace_rules  # `fake_mode` has loaded Dynamo
    from torch._functorch import aot_autograd
    from torch.export import _trace

    # Dynamo keeps functions in tables at first use: build the tables now, before functions are replaced.
    for table in (trace_rules._numpy_function_ids, trace_rules.get_tensor_method, trace_rules.get_torch_obj_rule_map):
        table()
    is_compiling, is_exporting = torch.compiler.is_compiling(), torch.compiler.is_exporting()
    replacements: tuple[tuple[Any, ...], ...] = (
        # Export disables MKLDNN and cuDNN, which would change the kernels of other threads. A fake trace runs no kernel.
        (_trace, "_ignore_backend_decomps", contextlib.nullcontext),
        (_trace, "_override_builtin_ops", _builtins_for_tensors),
        (torch.random, "set_rng_state", _unless_by_dynamo(torch.random.set_rng_state)),
        (torch.cuda, "set_rng_state", _unless_by_dynamo(torch.cuda.set_rng_state)),
        (random, "setstate", _unless_by_dynamo(random.setstate)),
        (aot_autograd, "patch", _patched),
        (symbolic_trace._Patcher, "patch_method", _patch_method),
        (torch.compiler, "is_compiling", torch.compiler.is_compiling, lambda: is_compiling),
        (torch.compiler, "is_exporting", torch.compiler.is_exporting, lambda: is_exporting),
    )
    with alone(), convert_frame.compile_lock, contextlib.ExitStack() as stack:
        for owner, name, *here_and_elsewhere in replacements:
            stack.enter_context(replaced(owner, name, *here_and_elsewhere))
        yield


def _unless_by_dynamo(set_state: Callable[..., None]) -> Callable[..., None]:
    """Ignore calls from Dynamo, which restores an earlier random state and would undo other threads' draws."""

    def set_unless_by_dynamo(*args: Any, **kwargs: Any) -> None:
        code = caller()  # for a call from Dynamo's C++, code that does not name the function
        if _DYNAMO not in code.co_filename and set_state.__name__ in code.co_names:
            set_state(*args, **kwargs)

    return set_unless_by_dynamo


@contextlib.contextmanager
def _builtins_for_tensors() -> Iterator[None]:
    """Export's `max`, `min` and `math.pow` for tensors and symbolic numbers."""
    from torch._export import non_strict_utils  # export has loaded this module

    choose = partial(partial, non_strict_utils._tensor_min_max)
    with (
        replaced(builtins, "max", choose(real_callable=max, tensor_callable=torch.maximum)),
        replaced(builtins, "min", choose(real_callable=min, tensor_callable=torch.minimum)),
        replaced(math, "pow", lambda x, y: x**y),
    ):
        yield


def _patched(target: str, new: Any) -> Context:
    owner, name = target.rsplit(".", 1)
    return replaced(pkgutil.resolve_name(owner), name, new)


def _patch_method(patcher: Any, owner: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
    """Replacement of the tracer's `patch_method`, for this thread only."""
    patched = _PatchedMethod(owner, name, new)
    patched.patch()
    patcher.patches_made.append(patched)
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):  # torch 2.15 keeps the flag by thread; the tracer restores it
        symbolic_trace._is_fx_tracing_flag = InThisThread()  # type: ignore[assignment]


class _PatchedMethod:
    """An entry of the tracer's list of patches, which the tracer reverts and applies again."""

    def __init__(self, owner: type, name: str, new: Any) -> None:
        self._replaced = partial(replaced, owner, name, new)

    def patch(self) -> None:
        self._open = self._replaced()
        self._open.__enter__()

    def revert(self) -> None:
        self._open.__exit__(None, None, None)
