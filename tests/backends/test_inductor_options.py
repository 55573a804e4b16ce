"""The options of Inductor: a mode, options by name, and those that are chosen by measurement."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from graphpp.backends import kernels
from graphpp.backends.inductor import InductorCompiler
from graphpp.backends.kernels import Convolutions
from graphpp.cache.disk_cache import DiskCache
from graphpp.options.backend import describe_backend
from graphpp.passes.graph.region import Region
from graphpp.passes.stage.region_key import graph_key
from tests.backends.vector_units import copy_vector_units
from tests.exhaustive import further

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch 2.13's own, as it imports Inductor

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")


@pytest.mark.exhaustive
@needs_compiler
def test_an_option_reaches_the_compiler_of_the_kernels_and_has_entries_of_its_own(tmp_path: Path) -> None:
    """Inductor has an option for its own tests that lets kernels of ReLU add 1."""
    copy_vector_units(tmp_path)
    x = torch.randn(16, 16)
    region = convolving(x)
    right, wrong = torch.relu(x + 1), x + 2
    for options, expected in (({}, right), ({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}, wrong), ({}, right)):
        (found,) = InductorCompiler(graphpp.Inductor(options, cache=tmp_path))(region)([x])
        torch.testing.assert_close(found, expected)


def given_to_torch(monkeypatch: pytest.MonkeyPatch, region: Region, **arguments: Any) -> dict[str, Any]:
    """The options with which a region is compiled."""
    seen: list[dict[str, Any]] = []

    def compiling(graph: Any, examples: Any, options: dict[str, Any], choose: Any) -> tuple[Any, None]:
        seen.append(dict(options))
        return lambda boxed: boxed, None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports what it deprecates
        monkeypatch.setattr("graphpp._torch.inductor.inductor_compile", compiling)
    monkeypatch.setattr(InductorCompiler, "find_vector_units", lambda self: None)  # takes seconds with a new cache
    InductorCompiler(graphpp.Inductor(**arguments))(region)
    return seen[0]


def test_a_mode_is_its_options_below_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = convolving(torch.randn(1, 2))
    given = given_to_torch(monkeypatch, region, mode="max-autotune", cache=tmp_path)
    assert given["max_autotune"] is True and "triton.cudagraphs" not in given
    given = given_to_torch(monkeypatch, region, mode="max-autotune", options={"max_autotune": False}, cache=tmp_path)
    assert given["max_autotune"] is False and given["coordinate_descent_tuning"] is True
    assert given_to_torch(monkeypatch, region, mode="default", cache=tmp_path) == {}
    described = [describe_backend(graphpp.Inductor(mode=mode)) for mode in (None, "max-autotune")]
    assert described[0] != described[1]


@pytest.mark.parametrize("mode", ["fastest", "reduce-overhead", 3])
def test_modes_that_have_no_options_of_inductor_are_refused(mode: Any) -> None:
    with pytest.raises(graphpp.GraphPPError, match=r"Inductor\.mode: "):
        graphpp.compile(nn.Linear(2, 2), nn.functional.mse_loss, backend=graphpp.Inductor(mode=mode))


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(graphpp.GraphPPError, match=r"Inductor\.options: .*max_autotune is of type bool, not str"):
        graphpp.compile(nn.Linear(2, 2), nn.functional.mse_loss, backend=graphpp.Inductor({"max_autotune": "yes"}))
    InductorCompiler(graphpp.Inductor({"cpp.gemm_cache_blocking": "4,1,10"}))  # an option that is None has no type


def test_options_that_are_read_before_inductor_compiles_are_refused() -> None:
    options = {"freezing": True, "max_autotune": True, "joint_custom_post_pass": None}
    with pytest.raises(graphpp.GraphPPError, match=r"Inductor\.options: freezing, joint_custom_post_pass: .*no effect"):
        graphpp.compile(nn.Linear(2, 2), nn.functional.mse_loss, backend=graphpp.Inductor(options))


@pytest.mark.exhaustive
@needs_compiler
def test_no_refused_option_is_read_from_the_decompositions_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options hold for decompositions, and no refused one is read while a region is compiled."""
    from torch._inductor import config

    from graphpp._torch import inductor

    select, kind, read, held = inductor.select_decomp_table, type(config), set[str](), list[bool]()
    get = kind.__getattr__

    def reading(module: Any, name: str) -> Any:
        read.add(name)
        return get(module, name)

    def selecting() -> Any:
        monkeypatch.setattr(kind, "__getattr__", reading)
        held.append(config.coordinate_descent_tuning)
        return select()

    monkeypatch.setattr(inductor, "select_decomp_table", selecting)
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    options = {"coordinate_descent_tuning": True, "fx_graph_cache": False}  # the key of an entry has all options
    InductorCompiler(graphpp.Inductor(options, cache=tmp_path))(convolving(x, weight))
    monkeypatch.setattr(kind, "__getattr__", get)
    assert held == [True]
    assert {"layout_optimization", "fallback_random"} <= read  # of the lowering and of the decompositions
    assert inductor.WITHOUT_EFFECT & read == set()


def convolving(*inputs: Tensor) -> Region:
    """A region: the first input convolved with each other one in turn, each with a ReLU; or a ReLU of the first plus 1."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        for weight in weights:
            x = torch.relu(nn.functional.conv2d(x, weight, padding=1))
        return (x if weights else torch.relu(x + 1),)

    graph = make_fx(run, tracing_mode="fake")(*inputs).graph
    return Region("a region", graph, graph_key(graph))


def layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: Region, times: Sequence[float]) -> dict[str, Any]:
    """The options for a region if its convolutions take these times: in the strides of the graph, and channels last."""

    def measured(runs: Sequence[Callable[[], Tensor]]) -> list[float]:
        one, other = (run() for run in runs)
        torch.testing.assert_close(one, other)
        return list(times)

    monkeypatch.setattr(kernels, "shortest_times", measured)
    return dict(Convolutions(DiskCache(tmp_path)).options(region))


def test_convolutions_keep_their_strides_where_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = convolving(torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3))
    graph = {"layout_optimization": False}
    assert layouts(tmp_path / "a", monkeypatch, region, (2.0, 1.0)) == {}
    assert layouts(tmp_path / "b", monkeypatch, region, (1.0, 2.0)) == graph
    assert layouts(tmp_path / "b", monkeypatch, region, (2.0, 1.0)) == graph  # measured once
    last = torch.randn(1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    assert layouts(tmp_path / "c", monkeypatch, convolving(last, torch.randn(3, 2, 3, 3)), (1.0, 2.0)) == {}
    given = given_to_torch(monkeypatch, region, options={"layout_optimization": True}, cache=tmp_path / "b")
    assert given == {"layout_optimization": True}
    assert given_to_torch(monkeypatch, region, cache=tmp_path / "b") == graph


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("optimized", [False, *further(True)])
def test_convolutions_compute_the_same_either_way(optimized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    region = convolving(*inputs)
    monkeypatch.setattr(kernels, "faster_layout", lambda convolutions: "channels last" if optimized else "graph")
    (found,) = InductorCompiler(graphpp.Inductor(cache=tmp_path))(region)(list(inputs))
    torch.testing.assert_close(found, torch.relu(nn.functional.conv2d(*inputs, padding=1)))
