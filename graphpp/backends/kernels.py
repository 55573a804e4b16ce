"""Choose CPU kernels by timing: torch or oneDNN for matrix products, channels last or not for convolutions.

Contract
--------
- The faster kernel depends on the processor, sometimes by a factor of two. Each choice is timed once per key, processor, torch
  version and number of threads, and kept in the disk cache. Invalid cached choices are timed again. Symbolic sizes count with
  their values in the trace.
- `Products.replace_matmuls` replaces each float32 matrix product of a CPU graph by oneDNN's kernel where that was faster.
  `multiply` and `multiply_add` choose alike for gradients given as two factors (`runtime/gradients/gemm_accumulation.py`).
  The results of the two kernels differ in the last bits.
- `Convolutions.options`: on the CPU Inductor computes every convolution of a forward channels last. It then transposes each
  weight in every microbatch, and copies the region's inputs and results, which keep the graph's strides. This pays off for
  images that are large compared with the weights, so the choice is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import known
from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp.cache.disk_cache import DiskCache
from graphpp.passes.graph.region import Region
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel

_aten = torch.ops.aten
_LINEAR: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
_BATCH = 32  # larger batches have small matrices, where one call per matrix costs more than the kernel gains
_GAIN = 0.95  # oneDNN must take less than this fraction of the time of torch's kernel
_ONEDNN, _TORCH = "linear", "mm"  # values in the cached table
_AS_IN_GRAPH, _CHANNELS_LAST = "graph", "channels last"


def processor_name() -> str:
    """The model name in `/proc/cpuinfo`; "unknown" if missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


class MeasuredChoices:
    """A cached table of choices; other values than `choices` are ignored."""

    def __init__(self, cache: DiskCache, table: str, choices: Collection[str]) -> None:
        self._cache, self._table = cache, table
        self._chosen = {key: value for key, value in cache.read(table).items() if value in choices}
        processor = f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}"
        self._machine = f"{processor}, torch {torch.__version__}, {torch.get_num_threads()} threads"

    def choose(self, key: str, measure: Callable[[], str]) -> str:
        """The cached choice for a key, else the result of `measure`."""
        key = f"{self._machine}: {key}"
        if key not in self._chosen:
            self._chosen[key] = measure()
            with contextlib.suppress(OSError):  # full disk or deleted folder: other processes measure again
                self._cache.write(self._table, {key: self._chosen[key]})
        return self._chosen[key]


def shortest_times(runs: Sequence[Callable[[], Any]], rounds: int = 7) -> list[float]:
    """The minimum seconds of each function; the functions run alternately, `rounds` times after one warm-up."""
    best = [float("inf")] * len(runs)
    for turn in range(rounds + 1):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if turn:  # turn 0 warms up
                best[index] = min(best[index], time.perf_counter() - began)
    return best


def _sample(value: torch.Tensor) -> torch.Tensor:
    """A real tensor of the layout and device of a fake one."""
    shape, stride = ([*map(hint, sizes)] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).fill_(0.5)


def _layout_of(value: torch.Tensor) -> str:
    return f"{[*map(hint, value.shape)]}/{[*map(hint, value.stride())]}"


# ---------------------------------------------------------------------------------- matrix products


def onednn_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` by oneDNN: [m, k] @ [k, n], or [batch, m, k] @ [batch, k, n]."""
    if a.dim() == 3:
        return torch.stack([onednn_matmul(*factors) for factors in zip(a.unbind(), b.unbind(), strict=True)])
    result: torch.Tensor = _LINEAR(a, b.t(), None, "none", [], "")
    return result


class Products(MatmulKernel):
    """Multiplies by the faster kernel."""

    def __init__(self, cache: DiskCache) -> None:
        self._choices = MeasuredChoices(cache, "products.json", (_ONEDNN, _TORCH))
        self._known: dict[Any, bool] = {}

    def replace_matmuls(self, graph: fx.Graph) -> None:
        """Replace matrix products in place by oneDNN's kernel where that is faster; nodes must have `meta["val"]`."""
        for node in [node for node in graph.nodes if node.target in _PRODUCTS and _is_eligible_node(node)]:
            *bias, a, b = node.args
            if not self.prefers_onednn(a.meta["val"], b.meta["val"]):
                continue
            with graph.inserting_before(node):
                product = _batched(graph, a, b) if node.target is _aten.bmm.default else _linear(graph, a, b, *bias)
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if is_eligible(a, b) and self.prefers_onednn(a, b):
            return onednn_matmul(a, b)
        return super().multiply(a, b)

    def multiply_add(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if not (is_eligible(a, b) and self.prefers_onednn(a, b)):
            super().multiply_add(total, a, b)
        elif a.dim() == 3:
            for part, *factors in zip(total, a, b, strict=True):
                part.add_(onednn_matmul(*factors))
        else:
            total.add_(onednn_matmul(a, b))

    def prefers_onednn(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether oneDNN is faster for these shapes and strides; the operands may be fake tensors."""
        shapes = tuple(tuple(map(hint, sizes)) for sizes in (a.shape, a.stride(), b.shape, b.stride()))
        found = self._known.get(shapes)
        if found is None:
            chosen = self._choices.choose(f"{_layout_of(a)} {_layout_of(b)}", lambda: faster_product(_sample(a), _sample(b)))
            found = self._known[shapes] = chosen == _ONEDNN
        return found


def faster_product(a: torch.Tensor, b: torch.Tensor) -> str:
    usual, other = shortest_times([lambda: torch.matmul(a, b), lambda: onednn_matmul(a, b)])
    return _ONEDNN if other < _GAIN * usual else _TORCH


def product_workspace(a: torch.Tensor, b: torch.Tensor) -> int:
    """The maximum temporary bytes of `Products.multiply_add`, equal on all ranks whichever kernel a rank chooses."""
    if not _both_can(a, b):
        return 0
    elements: int = known(a.shape[-2] * b.shape[-1])  # a batch is multiplied matrix by matrix
    return elements * a.dtype.itemsize


def is_eligible(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both kernels can compute this product, and it is not empty."""
    return _both_can(a, b) and all(hint(value.numel()) for value in (a, b))


def _both_can(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both kernels can compute this product: float32 on the CPU, two matrices or a batch of at most `_BATCH`."""
    on_cpu = all(value.device.type == "cpu" and value.dtype is torch.float32 for value in (a, b))
    several = a.dim() == b.dim() == 3 and not isinstance(a.shape[0], SYMBOLIC)
    few = a.dim() == b.dim() == 2 or (several and len(a) <= _BATCH)
    return on_cpu and few and torch.backends.mkldnn.is_available()


def _linear(graph: fx.Graph, a: fx.Node, b: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    transposed = graph.call_function(_aten.permute.default, (b, [1, 0]))
    transposed.meta["val"] = b.meta["val"].t()
    product = graph.call_function(_LINEAR, (a, transposed, bias, "none", [], ""))
    product.meta["val"] = _empty(a.meta["val"], b.meta["val"])
    return product


def _batched(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """Insert one oneDNN call per matrix of a batch."""
    products = []
    for index in range(len(a.meta["val"])):
        factors = [graph.call_function(_aten.select.int, (value, 0, index)) for value in (a, b)]
        for factor, value in zip(factors, (a, b), strict=True):
            factor.meta["val"] = value.meta["val"][index]
        whole = graph.call_function(_aten.unsqueeze.default, (_linear(graph, *factors), 0))
        whole.meta["val"] = _empty(*(factor.meta["val"] for factor in factors))[None]
        products.append(whole)
    return graph.call_function(_aten.cat.default, (products,))


def _empty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An empty tensor with the shape of `a @ b`."""
    return a.new_empty(a.shape[0], b.shape[1])


def _is_eligible_node(node: fx.Node) -> bool:
    if node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return False
    *bias, a, b = (arg.meta["val"] for arg in node.args)  # type: ignore[union-attr]
    return all(value.dim() == 1 for value in bias) and is_eligible(a, b)


# ---------------------------------------------------------------------------------- convolutions


class Convolutions:
    def __init__(self, cache: DiskCache) -> None:
        self._choices = MeasuredChoices(cache, "convolutions.json", (_AS_IN_GRAPH, _CHANNELS_LAST))

    def options(self, region: Region) -> Mapping[str, Any]:
        """Inductor's layout option for a region."""
        nodes = [node for node in region.graph.nodes if node.target is _aten.convolution.default]
        if not nodes or not all(map(_has_a_choice, nodes)):
            return {}
        chosen = self._choices.choose("; ".join(map(_key_of, nodes)), lambda: faster_layout(nodes))
        return {"layout_optimization": False} if chosen == _AS_IN_GRAPH else {}


def _has_a_choice(node: fx.Node) -> bool:
    """Whether a convolution is over CPU images that are contiguous (not channels last already)."""
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    if image.device.type != "cpu" or image.dim() != 4 or node.kwargs or not all(map(_is_plain, node.args[3:])):
        return False
    shape, stride = (tuple(map(hint, sizes)) for sizes in (image.shape, image.stride()))
    return stride == torch.empty(shape, device="meta").stride()


def _is_plain(value: object) -> bool:
    """Whether a stride, padding or flag is a plain number, not symbolic."""
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, int)


def _key_of(node: fx.Node) -> str:
    values = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
    layouts = " ".join(f"{str(value.dtype).removeprefix('torch.')} {_layout_of(value)}" for value in values)
    return f"{layouts} {node.args[3:]}"


def _runs_of(node: fx.Node) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Run a convolution in the graph's strides; channels last, with the weight's copy. (Inductor fuses the image's copy.)"""
    image, weight, *others = [_sample(arg.meta["val"]) if isinstance(arg, fx.Node) else arg for arg in node.args]
    run, last = _aten.convolution.default, torch.channels_last
    moved = image.contiguous(memory_format=last)  # type: ignore[union-attr]
    return partial(run, image, weight, *others), lambda: run(moved, weight.contiguous(memory_format=last), *others)  # type: ignore[union-attr]


def faster_layout(nodes: Sequence[fx.Node]) -> str:
    """The faster layout for all convolutions together. Equal convolutions are timed once."""
    counts, each = Counter(map(_key_of, nodes)), {_key_of(node): node for node in nodes}
    with torch.no_grad():
        times = [[count * seconds for seconds in shortest_times(_runs_of(each[key]))] for key, count in counts.items()]
    of_graph, channels_last = map(sum, zip(*times, strict=True))
    return _CHANNELS_LAST if channels_last < of_graph else _AS_IN_GRAPH
