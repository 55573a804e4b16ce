"""Choose by measurement the layout in which Inductor computes a region's convolutions on the CPU.

Contract: `ConvLayouts.options` gives the options of Inductor for a region: none, or those for the strides of the graph. On the
CPU Inductor computes every convolution of a forward channels last. For that it transposes each weight anew in every
microbatch, and a region's inputs and results keep the strides of the graph, so they are copied too. This pays where the images
are large beside the weights. A region whose own strides are channels last has nothing to copy and needs no choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import hint
from graphpp.backends.measured_choices import MeasuredChoices, layout_of, sample, shortest_times
from graphpp.cache.disk_cache import DiskCache
from graphpp.passes.graph.region import Region

_CONVOLUTION = torch.ops.aten.convolution.default
_TABLE = "convolutions.json"
_AS_IN_GRAPH, _CHANNELS_LAST = "graph", "channels last"  # as the cached table has them


class ConvLayouts:
    """Measures and remembers the faster layout; `cache` keeps the choices for other processes and later runs."""

    def __init__(self, cache: DiskCache) -> None:
        self._choices = MeasuredChoices(cache, _TABLE, (_AS_IN_GRAPH, _CHANNELS_LAST))

    def options(self, region: Region) -> Mapping[str, Any]:
        """The options for a region; those that the user sets come first."""
        nodes = [node for node in region.graph.nodes if node.target is _CONVOLUTION]
        if not nodes or not all(map(_is_eligible, nodes)):
            return {}
        convolutions = [_Convolution(node) for node in nodes]
        key = "; ".join(convolution.key for convolution in convolutions)
        chosen = self._choices.choose(key, lambda: _faster(convolutions))
        return {"layout_optimization": False} if chosen == _AS_IN_GRAPH else {}


class _Convolution:
    """A convolution of a region, to be timed."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node

    @property
    def key(self) -> str:
        values = (arg.meta["val"] for arg in self._node.args[:2])  # type: ignore[union-attr]
        layouts = " ".join(f"{str(value.dtype).removeprefix('torch.')} {layout_of(value)}" for value in values)
        return f"{layouts} {self._node.args[3:]}"

    def runs(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The convolution in the strides of the graph; and channels last, with the copy of the weight.

        Copies of images are left out: Inductor makes them in the kernels before and after, where they cost little.
        """
        args: list[Any] = [sample(arg.meta["val"]) if isinstance(arg, fx.Node) else arg for arg in self._node.args]
        image, weight, *others = args
        last = torch.channels_last
        moved = image.contiguous(memory_format=last)
        in_graph = partial(_CONVOLUTION, image, weight, *others)
        return in_graph, lambda: _CONVOLUTION(moved, weight.contiguous(memory_format=last), *others)


def _is_eligible(node: fx.Node) -> bool:
    """Whether there is a choice: a convolution over images on the CPU that are not channels last already."""
    image = node.args[0].meta["val"]  # type: ignore[union-attr]
    if image.device.type != "cpu" or image.dim() != 4 or node.kwargs or not all(map(_is_plain, node.args[3:])):
        return False
    shape, stride = (tuple(map(hint, sizes)) for sizes in (image.shape, image.stride()))
    return stride == torch.empty(shape, device="meta").stride()


def _is_plain(value: object) -> bool:
    """Whether a stride, padding or flag is known, also where sizes are symbolic."""
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, int)


def _faster(convolutions: Sequence[_Convolution]) -> str:
    """The name of the layout in which the convolutions take less time. Equal ones are timed once."""
    counts = Counter(convolution.key for convolution in convolutions)
    each = {convolution.key: convolution for convolution in convolutions}
    of_graph = channels_last = 0.0
    with torch.no_grad():
        for key, count in counts.items():
            here, moved = shortest_times(each[key].runs())
            of_graph, channels_last = of_graph + count * here, channels_last + count * moved
    return _CHANNELS_LAST if channels_last < of_graph else _AS_IN_GRAPH
