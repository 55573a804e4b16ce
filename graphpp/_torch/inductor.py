"""The private names of torch for compiling regions with Inductor.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._inductor.compile_fx.compile_fx_inner`: compiles a graph, with Inductor's own cache; `current_callable` of its result
- `torch._inductor.decomposition.select_decomp_table`: the operators that Inductor decomposes
- `torch._inductor.cpu_vec_isa`: `pick_vec_isa` selects the vector instructions, once per process, by `VecISA.check_build`;
  `_get_isa_dry_compile_fingerprint`: torch, compiler and its options; `torch._inductor.exc.InvalidCxxCompiler`
- `torch._inductor.config`: its options, `get_type` of an option; `torch._inductor.list_mode_options`
- `torch._inductor.lowering`: `lowerings`, `fallback_handler`
- `torch._dispatch.python.enable_python_dispatcher`: decompositions run in Python
- `torch._guards`: `TracingContext`, `tracing`: give Inductor the fake mode of a graph
- `torch._subclasses.fake_tensor`: `FakeTensorMode`, `FakeTensor`
- `torch.fx.experimental.symbolic_shapes.ShapeEnv`, `torch.fx.experimental.proxy_tensor.make_fx`
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import NoneType
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor import config, list_mode_options, lowering
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint, pick_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpp._torch.aot import quick, with_bodies
from graphpp._torch.symbols import Symbols, in_new_mode

# Options for passes before Inductor's decompositions: on the Dynamo graph and the joint graph, partitioner, freezing
WITHOUT_EFFECT = frozenset(
    [
        "add_pre_grad_passes", "auto_chunker.amplify_ratio_threshold", "auto_chunker.enable", "auto_chunker.num_chunk",
        "auto_chunker.output_size_threshold", "bw_outputs_user_visible", "custom_partitioner_fn",
        "efficient_conv_bn_eval_fx_passes", "enable_linear_binary_folding", "force_shape_pad", "freezing",
        "freezing_discard_parameters", "fx_passes_numeric_check", "is_predispatch", "joint_custom_post_pass",
        "joint_custom_pre_pass", "joint_graph_constant_folding", "keep_output_stride",
        "optimize_scatter_upon_const_tensor", "permute_fusion", "pre_grad_custom_pass", "pre_grad_fusion_options",
        "remove_pre_grad_passes", "selective_decompose", "shape_padding", "use_joint_graph_passes", "use_pre_grad_passes",
    ]
)  # fmt: skip
_CALLED: tuple[Any, ...] = (torch.ops.mkldnn._linear_pointwise.default,) if torch.backends.mkldnn.is_available() else ()


def inductor_compile(
    graph: fx.Graph, examples: Sequence[Any], options: Mapping[str, Any], choose: Callable[[fx.Graph], None]
) -> tuple[Callable[[list[Any]], Sequence[Any]], Symbols]:
    """Compile a graph of operators with Inductor; `choose` may replace operators of the decomposed graph.

    `examples`: a fake tensor or number per input. The function takes a list of inputs and empties it; it is valid for the sizes
    for which the returned symbols' guards hold. Raises Inductor's errors.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes, symbols = in_new_mode(examples, mode)
    with config.patch(dict(options)):  # decompositions read options too, such as `coordinate_descent_tuning`
        module = _decomposed(graph, fakes, mode)
        module.graph.eliminate_dead_code()  # not every lowering has all results of its operator
        choose(module.graph)
        module.recompile()
        end = module.graph.output_node()
        results: Sequence[Any] = end.args[0]  # type: ignore[assignment]
        end.meta["user_visible_output_idxs"] = list(range(len(results)))  # keep the strides of the graph
        with torch.no_grad(), tracing(TracingContext(mode)), contextlib.ExitStack() as stack:
            for operator in _CALLED:
                stack.enter_context(_called(operator))
            made: Any = compile_fx_inner(module, fakes)
    run: Callable[[list[Any]], Sequence[Any]] = made.current_callable  # skip its wrapper, as slow as a small region
    return run, symbols


def _decomposed(graph: fx.Graph, fakes: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    with quick(), torch.no_grad(), mode, enable_python_dispatcher():  # some kernels read sizes that their meta kernels do not
        return make_fx(fx.Interpreter(with_bodies(graph)).run, select_decomp_table(), tracing_mode="fake")(*fakes)


def mode_options(mode: str | None) -> dict[str, Any]:
    """The options of a mode of `torch.compile`, without CUDA graphs. Raises torch's error for unknown modes."""
    options: dict[str, Any] = list_mode_options(mode) if mode is not None else {}
    return {name: value for name, value in options.items() if name != "triton.cudagraphs"}


def try_options(options: Mapping[str, Any]) -> None:
    """Raise torch's error for an unknown option, and TypeError for a value of another type."""
    with config.patch(dict(options)):
        pass
    for name, value in options.items():
        expected = config.get_type(name)  # type: ignore[attr-defined]
        if expected is NoneType or not isinstance(expected, type):  # NoneType: an option without a declared type
            continue
        if not isinstance(value, expected):
            raise TypeError(f"{name} is of type {expected.__name__}, not {type(value).__name__}")


def find_vector_units(known: MutableMapping[str, str]) -> None:
    """Let Inductor detect the vector instructions of compiler and processor, once per process.

    For each instruction set Inductor builds a library and loads it in a subprocess, except for sets in `known`: these
    worked before, by a hash of compiler, options and source. New ones are added. Failed sets
    are tried again: a full disk or a slow machine also makes them fail.
    """
    check = VecISA.check_build

    def remembered(units: VecISA, code: str) -> bool:
        key = hashlib.sha256(f"{_get_isa_dry_compile_fingerprint(units.build_arch_flags())}\n{code}".encode()).hexdigest()
        if known.get(key) != "yes" and check(units, code):
            known[key] = "yes"
        return known.get(key) == "yes"

    with mock.patch.object(VecISA, "check_build", remembered), contextlib.suppress(InvalidCxxCompiler):  # GPUs need none
        pick_vec_isa()


@contextlib.contextmanager
def _called(operator: Any) -> Iterator[None]:
    """Let Inductor call `operator` without lowering it: Inductor's own lowering would copy a transposed input."""
    usual = lowering.lowerings.get(operator)
    lowering.lowerings[operator] = lowering.fallback_handler(operator, add_to_fallback_set=False)
    try:
        yield
    finally:
        if usual is None:
            del lowering.lowerings[operator]
        else:
            lowering.lowerings[operator] = usual
