"""The private names of torch that compiling regions stands on.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._inductor.compile_fx.compile_fx_inner`: one graph of operators -> a function of a boxed list, through Inductor's own
  cache of graphs; `current_callable` of what it returns
- `torch._inductor.decomposition.select_decomp_table`: the operators that Inductor wants taken apart
- `torch._inductor.cpu_vec_isa`: `pick_vec_isa` tries compiler and processor, once per process, by `VecISA.check_build`;
  `_get_isa_dry_compile_fingerprint`: torch, compiler and its options; `torch._inductor.exc.InvalidCxxCompiler`
- `torch._inductor.config`: its options
- `torch._inductor.lowering`: `lowerings`, `fallback_handler`: how an operator is lowered; here: by calling it
- `torch._guards`: `TracingContext`, `tracing`: where Inductor looks for the fake mode of what it compiles
- `torch._subclasses.fake_tensor`: `FakeTensorMode`, `FakeTensor`
- `torch.fx.experimental.symbolic_shapes.ShapeEnv`, `torch.fx.experimental.proxy_tensor.make_fx`
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config, lowering
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint, pick_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpp._torch.aot import quick

_CALLED: tuple[Any, ...] = (torch.ops.mkldnn._linear_pointwise.default,) if torch.backends.mkldnn.is_available() else ()


def compile_graph(
    graph: fx.Graph, examples: Sequence[Any], options: Mapping[str, Any], choose: Callable[[fx.Graph], None]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a graph of operators with Inductor; `choose` may exchange operators of the decomposed graph.

    `examples` are fake tensors or numbers, one per input. The function takes a list of inputs and empties it.
    Whatever Inductor raises is raised.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [_fake(mode, example) for example in examples]
    with quick(), torch.no_grad(), mode:
        module = make_fx(fx.Interpreter(fx.GraphModule({}, graph)).run, select_decomp_table(), tracing_mode="fake")(*fakes)
    choose(module.graph)
    module.recompile()
    end = module.graph.output_node()
    results: Sequence[Any] = end.args[0]  # type: ignore[assignment]
    end.meta["user_visible_output_idxs"] = list(range(len(results)))  # their strides are what the graph says
    with torch.no_grad(), tracing(TracingContext(mode)), config.patch(dict(options)), contextlib.ExitStack() as stack:
        for operator in _CALLED:
            stack.enter_context(_called(operator))
        made: Any = compile_fx_inner(module, fakes)
    run: Callable[[list[Any]], Sequence[Any]] = made.current_callable  # what stands around it costs as much as a small region
    return run


def try_options(options: Mapping[str, Any]) -> None:
    """Raise what torch raises where Inductor has no option of such a name."""
    with config.patch(dict(options)):
        pass


def find_vector_units(known: MutableMapping[str, str]) -> None:
    """Let Inductor find, once per process, the vector instructions that compiler and processor have.

    It builds and loads libraries, each load in a process of its own. `known` are those that earlier runs found to work, by what
    Inductor builds with and of: they are not tried again, and new ones are added. What failed is tried again at each start: a
    full disk or a slow machine makes it fail as well. What the processor has is looked up each time.
    """
    check = VecISA.check_build

    def remembered(units: VecISA, code: str) -> bool:
        key = hashlib.sha256(f"{_get_isa_dry_compile_fingerprint(units.build_arch_flags())}\n{code}".encode()).hexdigest()
        if known.get(key) != "yes" and check(units, code):
            known[key] = "yes"
        return known.get(key) == "yes"

    with mock.patch.object(VecISA, "check_build", remembered), contextlib.suppress(InvalidCxxCompiler):  # GPUs do without one
        pick_vec_isa()


def _fake(mode: FakeTensorMode, example: Any) -> Any:
    """The example in a fake mode of its own."""
    if not isinstance(example, torch.Tensor):
        return example
    with mode:
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)


@contextlib.contextmanager
def _called(operator: Any) -> Iterator[None]:
    """Let an operator be called as it is; the lowering that Inductor has for it copies what is transposed."""
    kept = lowering.lowerings.get(operator)
    lowering.lowerings[operator] = lowering.fallback_handler(operator, add_to_fallback_set=False)
    try:
        yield
    finally:
        if kept is None:
            del lowering.lowerings[operator]
        else:
            lowering.lowerings[operator] = kept
