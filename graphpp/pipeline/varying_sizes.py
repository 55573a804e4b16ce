"""Which sizes of microbatches a capture leaves open, and the graphs that serve several sizes.

Contract:
- The first microbatch of a kind (structure and dtypes, under one state of the model) is captured for its own sizes. When
  another one has other sizes, the dimensions that varied so far are left open; the graph serves all sizes for which it is valid
  (`_torch/symbols.py`). Three shapes in one call leave sizes open at once.
- Floating tensors whose elements are not in memory order, and dimensions of size 0 or 1, are never left open: torch takes other
  branches for them.
- If model or loss fix every open size, or cannot be captured with open sizes, each size gets its own capture, and one warning
  gives the reason. After two captures refused the same dimensions, or `_MOST` graphs of a kind, no further one is tried.
- A number of the microbatch is a constant of the graph until it has a second value, then an input, if there is such a graph.
- Decisions depend only on the microbatches and captured graphs, which ranks compare, so all ranks decide alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphpp.batch.microbatch import FlatMicrobatch, is_unordered_integers
from graphpp.capture.sizes.open_sizes import Open
from graphpp.capture.trace import CapturedGraph
from graphpp.compiler.compile_graph import CompiledGraph
from graphpp.log import logger
from graphpp.pipeline.cache_key import GraphKey, Recent

_LOG = logger(__name__)
_MOST = 4  # graphs with open sizes for one kind of microbatch
_SEVERAL = 3  # shapes in one call that leave their sizes open at once; a batch that does not divide has two
Kind = tuple[Any, ...]
Capture = Callable[[Sequence[GraphKey], Sequence[Open]], list[CapturedGraph]]


class VaryingSizes:
    """The seen sizes, and the graphs with open sizes. `dynamic`: None opens sizes that vary, True all sizes, False none."""

    def __init__(self, dynamic: bool | None, limit: int, warns: bool) -> None:
        self._dynamic, self._limit, self._warns = dynamic, limit, warns
        self._first: dict[Kind, dict[str, tuple[int, ...]]] = {}
        self._varied: dict[Kind, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._fixed: dict[Kind, Open] = {}
        self._graphs: list[tuple[Kind, CompiledGraph]] = []  # the one used last at the end
        self._told: set[str] = set()
        self._alone: Recent[Kind, tuple[FlatMicrobatch, CapturedGraph]] = Recent(limit)
        self._numbers: dict[Kind, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # the values seen, by path
        self._plain: dict[Kind, set[str]] = defaultdict(set)

    @property
    def graphs(self) -> list[CompiledGraph]:
        return [graph for _, graph in self._graphs]

    def find(self, key: GraphKey, part: FlatMicrobatch) -> CompiledGraph | None:
        """A kept graph that is valid for the sizes of this microbatch, with its programs for these sizes."""
        for kind, graph in reversed(self._graphs):  # the latest first
            symbols = graph.captured.joint.symbols
            assert symbols is not None, "a graph with open sizes has symbols"
            values = symbols.values(part.shapes) if kind == key.of_kind(part) else None
            if values is not None:
                return graph.at(values)
        return None

    def with_numbers(self, training: bool, parts: Sequence[FlatMicrobatch]) -> list[FlatMicrobatch]:
        """The microbatches with the numbers that vary as inputs of a graph."""
        kinds = {part.signature: (training, part.wide_kind) for part in parts if part.plain_numbers}
        if self._dynamic is False or not kinds:
            return list(parts)
        seen = {kind: {path: set(each) for path, each in self._numbers[kind].items()} for kind in kinds.values()}
        for part in {part.signature: part for part in parts if part.plain_numbers}.values():
            for path, number in part.plain_numbers.items():
                seen[kinds[part.signature]].setdefault(path, set()).add(repr(number))
        varied = {kind: frozenset(path for path in seen[kind] if len(seen[kind][path]) > 1) for kind in seen}
        found, first = list[FlatMicrobatch](), dict[tuple[str, ...], FlatMicrobatch]()
        for part in parts:
            kind = kinds.get(part.signature)
            found.append(part if kind is None else part.with_numbers(varied[kind] - self._plain[kind]))
            found[-1].take_signature(first.setdefault(part.signature, found[-1]).signature)
        return found

    def keep_plain(self, training: bool, part: FlatMicrobatch, reasons: Mapping[str, str]) -> None:
        """Note numbers that stay constants of the graphs of such a microbatch."""
        self._plain[training, part.wide_kind] |= reasons.keys()
        for path, reason in reasons.items():
            self._tell(f"each value of {path} is captured by itself, because {reason}. Pass a tensor, if the code takes one")

    def alike(self, key: GraphKey, part: FlatMicrobatch) -> tuple[FlatMicrobatch, CapturedGraph] | None:
        """An earlier microbatch of this kind, of other sizes, with its graph for these sizes alone."""
        return self._alone.get(key.of_kind(part))

    def use(self, graph: CompiledGraph) -> None:
        self._graphs.sort(key=lambda pair: pair[1] is graph)

    def captured(self, new: Mapping[GraphKey, FlatMicrobatch], capture: Capture) -> dict[GraphKey, CapturedGraph]:
        """The graphs of new microbatches of a call; those that leave the same sizes open share one, where it is valid for them.

        `capture(keys, open sizes of each)` makes a graph for each key.
        """
        captured, left = dict[GraphKey, CapturedGraph](), dict(new)
        while left:
            together = self._together(left)
            made = capture([keys[0] for keys, _ in together], [sizes for _, sizes in together])
            for (keys, _), graph in zip(together, made, strict=True):
                symbols = graph.joint.symbols
                served = [key for key in keys if symbols is not None and symbols.values(left[key].shapes) is not None]
                captured |= dict.fromkeys((keys[0], *served), graph)
            left = {key: part for key, part in left.items() if key not in captured}
        return captured

    def _together(self, new: Mapping[GraphKey, FlatMicrobatch]) -> list[tuple[list[GraphKey], Open]]:
        """Microbatches of one call that one capture may serve, and the dimensions that it leaves open."""
        alike = defaultdict[Kind, set[tuple[Any, ...]]](set)
        for key, part in new.items() if self._dynamic is None else ():
            alike[_structure(key, part)].add(tuple((path, tuple(each.shape)) for path, each in part.tensors.items()))
        for seen, shapes in alike.items():
            for each in zip(*shapes, strict=True) if len(shapes) >= _SEVERAL else ():
                dims = zip(*(shape for _, shape in each), strict=True)
                self._varied[seen][each[0][0]] |= {dim for dim, found in enumerate(dims) if len(set(found)) > 1}
        for key, part in new.items():
            self.open(key, part)  # notes what varied, for the microbatches before it too
        together = defaultdict[Any, tuple[list[GraphKey], Open]](lambda: ([], {}))
        for key, part in new.items():
            sizes = self.open(key, part)
            same = (key.of_kind(part), *sorted(sizes.items())) if sizes else key
            together[same] = ([*together[same][0], key], sizes)
        return list(together.values())

    def open(self, key: GraphKey, part: FlatMicrobatch) -> Open:
        """The dimensions to leave open in a capture of this microbatch, by path of the tensor."""
        if self._dynamic is False:
            return {}
        kind, seen = key.of_kind(part), _structure(key, part)
        varied = self._varied[seen] if self._dynamic is None else {}
        for path, shape in self._first.get(seen, {}).items() if self._dynamic is None else ():
            new = part.tensors[path].shape
            varied[path] |= {dim for dim, size in enumerate(shape) if size != new[dim]}
        found = {}
        for path, tensor in part.tensors.items():
            wanted = range(tensor.dim()) if self._dynamic else sorted(varied[path])
            dims = tuple(dim for dim in wanted if tensor.shape[dim] > 1)
            if dims and (tensor.is_contiguous() or is_unordered_integers(tensor)):
                found[path] = dims
        graphs = sum(other == kind for other, _ in self._graphs)
        refused = sum(kind[:-1] == other[:-1] and dims == found for other, dims in self._fixed.items())
        return {} if self._fixed.get(kind) == found or refused >= 2 or graphs >= _MOST else found

    def keep(self, key: GraphKey, part: FlatMicrobatch, graph: CompiledGraph) -> None:
        """Note a graph on which all ranks agreed, and the sizes of its microbatch."""
        shapes = {path: tuple(tensor.shape) for path, tensor in part.tensors.items() if path not in part.numbers}
        seen = _structure(key, part)
        self._first.setdefault(seen, shapes)
        for path, number in part.plain_numbers.items():
            self._numbers[seen][path] = {repr(number), *sorted(self._numbers[seen][path])[:1]}
        for path in part.numbers:
            self._numbers[seen][path] |= {"one", "other"}
        plain = graph.general is None and not part.numbers and not graph.captured.plain_because
        if plain and graph.captured.operations is not None and all(size > 1 for shape in shapes.values() for size in shape):
            self._alone.keep(key.of_kind(part), (part.without_data(), graph.captured))
        if graph.general is not None:
            self.use(graph.general)
            if all(graph.general is not other for other in self.graphs):
                self._graphs = [*self._graphs, (key.of_kind(part), graph.general)][-self._limit :]
        reason = graph.captured.fixed_because
        if reason:
            self._fixed[key.of_kind(part)] = self.open(key, part)
            self._tell(f"each size of a microbatch is captured by itself, because {reason}")

    def _tell(self, line: str) -> None:
        if self._warns and line not in self._told:
            _LOG.warning("%s", line)
        self._told.add(line)


def _structure(key: GraphKey, part: FlatMicrobatch) -> Kind:
    return key.training, part.wide_kind


def for_sizes(graph: CompiledGraph, part: FlatMicrobatch) -> CompiledGraph:
    """The graph with its programs for the sizes of this microbatch."""
    symbols = graph.captured.joint.symbols
    values = None if symbols is None else symbols.values(part.shapes)
    assert symbols is None or values is not None, "a graph does not hold for the sizes of which it was captured"
    return graph if values is None else graph.at(values)
