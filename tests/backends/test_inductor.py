"""`backend=`: the caller's function gets each distinct region once; Inductor keeps its tolerance and its cache."""

import gc
import itertools
import os
import shutil
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import graphpp
from graphpp.backends.inductor import InductorCompiler
from graphpp.backends.kernels import Products, product_workspace
from graphpp.cache.disk_cache import DiskCache
from graphpp.passes.graph.region import Region
from tests.backends.vector_units import copy_vector_units
from tests.distributed import close_workers, run_ranks
from tests.exhaustive import further
from tests.models import MODELS, Batch, Case
from tests.reference import eager_steps, gradients
from tests.training import CASES, differences, example, step, trained

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")


def interpreted(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """The simplest backend: the region's module itself."""
    return module


EXACT = {"backend": interpreted, "gradients": graphpp.Gradients(fused=False)}


OUTLINED = ("llama", "norms", "skip", "tied")


@pytest.mark.parametrize("name", [*OUTLINED, *further(*sorted(CASES.keys() - set(OUTLINED)))])
def test_outlined_programs_train_bit_for_bit_as_eager_ones(name: str) -> None:
    options: dict[str, Any] = {"split": 3, "microbatches": 4, "schedule": "auto"}
    assert differences(trained(1, name, 2, **options, **EXACT), trained(1, name, 2, **options)) == []


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", *further("Interleaved1F1B")])
def test_on_two_ranks(schedule: str) -> None:
    options: dict[str, Any] = {"split": 4, "microbatches": 4, "schedule": schedule, "memory": "full"}
    assert differences(trained(2, "llama", 2, **options, **EXACT), trained(2, "llama", 2, **options)) == []


Relay = Callable[[Tensor], Tensor]


def strict(module: fx.GraphModule, examples: list[Tensor], relay: Relay = lambda x: x) -> Callable[..., Any]:
    """A backend whose regions assert the strides of their inputs; `relay` may change the strides of their results."""

    def run(*args: Tensor) -> Any:
        for value, fake in zip(args, examples, strict=True):
            pairs = zip(value.shape, value.stride(), fake.stride(), strict=True)
            assert all(size == 1 or found == wanted for size, found, wanted in pairs)
        return [relay(value) for value in module(*args)]

    return run


class Joined(nn.Module):
    """Concatenates three tensors, whose gradients are windows into the result's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.left(x).tanh(), self.right(x).tanh().flip(0).T.contiguous().T, x[:1].expand(x.shape)[:, :4]), 1)


@pytest.mark.parametrize("split", [["1", "2"], *further(["1"], None)])
def test_results_that_lie_otherwise_are_laid_as_the_graph_says(split: list[str] | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Joined(), nn.Linear(12, 8), Joined(), nn.Linear(12, 8))
    x = torch.randn(4, 8)
    for relay in (torch.Tensor.contiguous, lambda value: value.mT.contiguous().mT if value.dim() > 1 else value):
        expected = eager_steps(model, nn.functional.mse_loss, [Batch((x,), {}, x)], 2, 1)
        pipe = graphpp.compile(
            model,
            nn.functional.mse_loss,
            split=split,
            microbatches=2,
            backend=lambda module, examples, relay=relay: strict(module, examples, relay),
            gradients=graphpp.Gradients(fused=False),
        )
        pipe.step(x, target=x)
        for name, value in gradients(model).items():
            assert value is not None and torch.allclose(value, expected.grads[0][name], rtol=1e-5, atol=1e-7), name
        model.zero_grad()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values[:-1], r"has \d+ results, compiled it returned \d+"),
        (lambda values: [value.double() for value in values], "result 0 of .* is float32.*, compiled it is float64"),
        (lambda values: [value[None] for value in values], "result 0 of "),
        (lambda values: [None] * len(values), "compiled it is NoneType"),
    ],
)
def test_results_that_are_not_those_of_the_region_raise(change: Callable[[Any], Any], words: str) -> None:
    pipe = graphpp.compile(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
        nn.functional.mse_loss,
        microbatches=1,
        backend=lambda module, examples: lambda *args: change(module(*args)),
    )
    with pytest.raises(graphpp.GraphPPError, match=words):
        pipe.step(torch.randn(2, 2), target=torch.randn(2, 2))


def with_buffers(count: int) -> Callable[..., Any]:
    """A backend that returns results in one of `count` sets of buffers, in turn, as a replayed recording does."""

    def backend(module: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        sets: deque[list[Tensor]] = deque()

        def run(*args: Tensor) -> list[Tensor]:
            results = module(*args)
            if len(sets) < count:
                sets.append([value.clone() for value in results])
            else:
                sets.rotate(-1)
            for place, value in zip(sets[-1], results, strict=True):
                place.copy_(value)
            return list(sets[-1])

        return run

    return backend


@pytest.mark.parametrize(("buffers", "microbatches"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_results_in_the_memory_of_earlier_ones_raise(buffers: int, microbatches: int) -> None:
    """With one microbatch, the equal layers share one compiled region."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(8))), torch.randn(6, 4)
    pipe = graphpp.compile(
        model, nn.functional.mse_loss, split=2, microbatches=microbatches, backend=with_buffers(buffers), schedule="GPipe"
    )
    with pytest.raises(graphpp.GraphPPError, match="clone them"):
        pipe.step(x, target=x)


class Constant(nn.Module):
    """Has results that depend on no input, and results that are views of an input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x.T[1:].T, torch.full((len(x), 1), 2.0)), 1) * x.T.T


@pytest.mark.parametrize("split", [["1", "2", "3"], *further(["1"], ["2"])])
def test_constants_and_views_may_be_the_same_at_every_call(split: list[str]) -> None:
    made: dict[str, Tensor] = {}

    def folding(module: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.full.default:
                node.target = lambda *args, **kwargs: made.setdefault(str(args), torch.full(*args))
        module.recompile()
        return module

    model, x = nn.Sequential(nn.Linear(4, 4), Constant(), nn.Linear(4, 4), Constant()), torch.randn(8, 4)
    expected = eager_steps(model, nn.functional.mse_loss, [Batch((x,), {}, x)], 4, 1)
    options: dict[str, Any] = {"split": split, "microbatches": 4, "gradients": graphpp.Gradients(fused=False)}
    pipe = graphpp.compile(model, nn.functional.mse_loss, backend=folding, **options)
    pipe.step(x, target=x)
    for name, value in gradients(model).items():
        assert value is not None and torch.equal(value, expected.grads[0][name]), name


def test_each_distinct_region_is_compiled_once() -> None:
    seen: list[int] = []

    def counting(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        seen.append(len(examples))
        return module

    counts = []
    for layers in (4, 8):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(layers)))
        pipe = graphpp.compile(model, nn.functional.mse_loss, split=2, microbatches=2, backend=counting)
        x = torch.randn(4, 6)
        pipe.step(x, target=x)
        pipe.step(x, target=x)
        counts.append(len(seen))
        seen.clear()
    assert counts[0] == counts[1] > 0


def test_what_cannot_be_compiled_runs_eagerly_with_a_warning_that_names_it() -> None:
    def refusing(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        if any("gelu" in str(node.target) for node in module.graph.nodes):
            raise NotImplementedError("no gelu here")
        return module

    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 6), nn.GELU()))
    x = torch.randn(4, 6)
    expected = eager_steps(model, nn.functional.mse_loss, [_batch(x)], 2, 1)
    pipe = graphpp.compile(
        model, nn.functional.mse_loss, split=["1"], microbatches=2, backend=refusing, gradients=graphpp.Gradients(fused=False)
    )
    with pytest.warns(UserWarning, match=r"(?s)1 of stage 1 (forward|backward) cannot be compiled.*no gelu here") as caught:
        pipe.step(x, target=x)
    assert len(caught) == 2  # forward and backward of the one distinct layer
    assert all(torch.equal(value, expected.grads[0][name]) for name, value in gradients(model).items())


def test_a_backend_that_changes_the_graph_and_then_gives_up_changes_nothing() -> None:
    def spoiling(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            node.target = torch.ops.aten.sin.default
        raise NotImplementedError("after all")

    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    x = torch.randn(4, 6)
    expected = eager_steps(model, nn.functional.mse_loss, [_batch(x)], 2, 1)
    pipe = graphpp.compile(
        model, nn.functional.mse_loss, microbatches=2, backend=spoiling, gradients=graphpp.Gradients(fused=False)
    )
    with pytest.warns(UserWarning, match="after all"):
        pipe.step(x, target=x)
    assert all(torch.equal(value, expected.grads[0][name]) for name, value in gradients(model).items())


def _batch(x: Tensor) -> Any:
    from tests.models import Batch

    return Batch((x,), {}, x)


@pytest.mark.parametrize("given", ["tensorrt", 3, ["inductor"]])
def test_what_is_no_backend_is_refused(given: Any) -> None:
    with pytest.raises(graphpp.GraphPPError, match="backend: take"):
        graphpp.compile(nn.Linear(2, 2), nn.functional.mse_loss, backend=given)


@pytest.mark.parametrize("options", [{"no_such": 1}, {"cpp.no_such": 1}, {3: 1}, "max_autotune", ["cpp.threads"]])
def test_options_that_inductor_does_not_have_are_refused(options: Any) -> None:
    with pytest.raises(graphpp.GraphPPError, match=r"Inductor\.options: "):
        graphpp.compile(nn.Linear(2, 2), nn.functional.mse_loss, backend=graphpp.Inductor(options))


def test_a_cache_that_is_no_path_is_refused() -> None:
    wrong: Any = 3
    with pytest.raises(graphpp.GraphPPError, match=r"Inductor\.cache: take a path, or None, got 3"):
        graphpp.compile(nn.Linear(2, 2), nn.functional.mse_loss, backend=graphpp.Inductor(cache=wrong))


def test_a_backend_that_returns_nothing_to_call_is_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    pipe = graphpp.compile(model, nn.functional.mse_loss, microbatches=1, backend=lambda module, examples: None)
    with pytest.raises(graphpp.GraphPPError, match=r"backend: the function .* must return a callable, but returned None"):
        pipe.step(x, target=x)


def test_evaluation_runs_under_the_backend_too() -> None:
    seen = []

    def noting(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        seen.append(module)
        return module

    case = MODELS["llama"]()
    pipe = graphpp.compile(case.model, case.loss, split=2, microbatches=2, backend=noting)
    found = pipe.eval(*case.batch.args, target=case.batch.target)
    assert seen
    with torch.no_grad():
        assert torch.equal(found.output, torch.cat([case.model(*part.args) for part in case.batch.microbatches(2)]))


def test_what_was_compiled_goes_with_the_last_graph_it_is_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    compiled: list[weakref.ref[Any]] = []

    def watched(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        compiled.append(weakref.ref(module))
        return module

    debug = graphpp.Debug(max_graphs=1, dynamic=False)
    pipe = graphpp.compile(model, nn.functional.mse_loss, split=2, microbatches=2, debug=debug, backend=watched)
    alive = []
    for size in (4, 6, 8, 6):
        x = torch.randn(size, 4)
        pipe.step(x, target=x)
        gc.collect()
        alive.append(sum(module() is not None for module in compiled))
    assert len(compiled) == 4 * alive[0]
    assert alive[1:] == [2 * alive[0]] * 3  # alive: the first graph, which defines the pipeline, and the latest


def scaled(factor: float) -> Callable[..., Any]:
    """A backend whose results are wrong by `factor` or `1 / factor`, in turn."""

    def compile_region(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            factors = itertools.cycle((factor, 1 / factor))
            return tuple(v * f if v.is_floating_point() else v for v, f in zip(module(*args), factors, strict=False))

        return run

    return compile_region


def test_verify_finds_a_backend_that_computes_something_else() -> None:
    case = MODELS["llama"]()
    assert not graphpp.verify(case.model, case.loss, example(case.batch, 8), split=2, backend=scaled(1.00005)).ok


def close(case: Case, pipe: graphpp.Pipeline, microbatches: int = 4) -> None:
    """Assert that a step's gradients equal eager's to 1e-5 of their largest element, and its losses to a relative 1e-5."""
    expected = eager_steps(case.model, case.loss, [case.batch], microbatches, 1)
    found = step(pipe, case.batch)
    torch.testing.assert_close(found.losses, expected.losses[0], rtol=1e-5, atol=1e-6)
    for name, value in gradients(case.model).items():
        wanted = expected.grads[0][name]
        assert (value is None) == (wanted is None), name
        if value is not None and wanted is not None:
            assert (value - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name


def start(rank: int, name: str, cache: Path) -> None:
    """The work of a new process: one step under Inductor, checked by `close`; a region that runs eagerly raises."""
    os.environ["GRAPHPP_CACHE"] = str(cache)
    warnings.filterwarnings("error", message="graphpp:", category=UserWarning)
    torch.set_num_threads(1)
    case = MODELS[name]()
    close(case, graphpp.compile(case.model, case.loss, split=2, microbatches=4, backend="inductor"))


def started(name: str, cache: Path) -> dict[Path, int]:
    """Run `start` in a new process; returns the time of writing of each library in the cache, in nanoseconds."""
    close_workers()
    run_ranks(start, 1, name, cache)
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.so")}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", further("sequential", "llama"))
def test_inductor_trains_close_to_eager_and_starts_from_its_cache(name: str, tmp_path: Path) -> None:
    copy_vector_units(tmp_path)
    kept = started(name, tmp_path)
    assert kept
    assert started(name, tmp_path) == kept  # nothing is compiled again
    broken = max(kept, key=lambda path: path.stat().st_size)
    entry = tmp_path / broken.relative_to(tmp_path).parts[0]
    broken.write_bytes(broken.read_bytes()[:1000])
    mended = started(name, tmp_path)
    again = {path for path, written in mended.items() if written != kept.get(path)}
    assert again  # only the damaged entry is compiled again
    assert all(entry in path.parents for path in again)
    assert mended.keys() == kept.keys()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.slow
def test_inductor_on_two_ranks_that_share_a_cache(tmp_path: Path) -> None:
    copy_vector_units(tmp_path)
    backend = graphpp.Inductor(cache=tmp_path)
    options: dict[str, Any] = {"split": 4, "microbatches": 4, "schedule": "ZBVZeroBubble"}
    found = trained(2, "sequential", 1, **options, backend=backend)
    exact = trained(2, "sequential", 1, **options)
    torch.testing.assert_close(found.losses[0], exact.losses[0], rtol=1e-5, atol=1e-6)
    for name, value in exact.grads[0].items():
        assert value is not None
        assert (found.grads[0][name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    entries = [path for path in tmp_path.iterdir() if (path / "manifest.json").exists()]
    assert len(entries) < 16  # 4 stages with 3 programs of several layers: most regions are shared


def tried_on(rank: int, cache: Path, works: bool) -> int:
    """The number of vector instruction sets that Inductor tries in this process, all of which work or fail."""
    from torch._inductor.cpu_vec_isa import VecISA

    tried: list[Any] = []
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports what it deprecates
        patched.setattr(VecISA, "check_build", lambda units, code: tried.append(units) or works)
        InductorCompiler(graphpp.Inductor(cache=cache)).find_vector_units()
    return len(tried)


def tries(cache: Path, *, works: bool) -> int:
    """The number of vector instruction sets that Inductor tries in a new process."""
    close_workers()
    found: int = run_ranks(tried_on, 1, cache, works)[0]
    return found


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch 2.13 imports what it deprecates
@pytest.mark.parametrize(("device", "given", "asked"), [("cpu", True, True), ("cpu", False, True), ("meta", True, False)])
def test_code_for_the_processor_alone_needs_vector_instructions(
    device: str, given: bool, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a region that is given nothing. The meta device stands for a GPU."""
    graph = fx.Graph()
    if given:
        graph.placeholder("x").meta["val"] = torch.zeros(2, device=device)
    made = graph.call_function(torch.ops.aten.zeros.default, ([2],), {"device": device})
    made.meta["val"] = torch.zeros(2, device=device)
    graph.output((made,))
    searches: list[bool] = []
    monkeypatch.setattr(InductorCompiler, "find_vector_units", lambda self: searches.append(True))
    monkeypatch.setattr("graphpp._torch.inductor.inductor_compile", lambda *rest: (lambda values: values, None))
    InductorCompiler(graphpp.Inductor(cache=tmp_path))(Region("a region", graph, "a key"))
    assert bool(searches) is asked


def test_an_entry_is_whole_or_made_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for _ in range(2):
        with cache.entry("a") as folder:
            (folder / "x").write_text("1")
    with cache.entry("a") as folder:
        assert (folder / "x").read_text() == "1"
    damages: list[Callable[[], Any]] = [
        lambda: (tmp_path / "a" / "x").write_text("2"),
        lambda: (tmp_path / "a" / "y").write_text(""),
        (tmp_path / "a" / "manifest.json").unlink,
    ]
    for damage in damages:
        damage()
        with cache.entry("a") as folder:
            assert list(folder.iterdir()) == []
            (folder / "x").write_text("1")


def test_all_that_inductor_keeps_of_a_region_is_in_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor itself sets Triton's cache folder, once per process."""
    names = ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]
    monkeypatch.setenv(names[0], "theirs")
    monkeypatch.delenv(names[1], raising=False)
    seen: list[list[str]] = []

    def compiling(*args: Any) -> tuple[Callable[..., Any], None]:
        os.environ.setdefault(names[1], os.environ[names[0]])
        seen.append([os.environ[name] for name in names])
        return lambda boxed: boxed, None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 imports what it deprecates
        monkeypatch.setattr("graphpp._torch.inductor.inductor_compile", compiling)
    compiler = InductorCompiler(graphpp.Inductor(cache=tmp_path))
    for key in "ab":
        graph = fx.Graph()
        graph.output(())
        compiler(Region(key, graph, key))
        assert os.environ[names[0]] == "theirs" and names[1] not in os.environ
    entries = [{Path(path).relative_to(tmp_path).parts[0] for path in paths} for paths in seen]
    assert [len(parts) for parts in entries] == [1, 1] and entries[0] != entries[1]


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with DiskCache(tmp_path / "file" / "below").entry("a") as folder:
        assert folder.exists()
    assert "cannot be written" in caplog.text


def test_a_cache_that_is_gone_or_full_stops_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path / "root")
    kernels = Products(cache)
    shutil.rmtree(tmp_path / "root")
    monkeypatch.setattr("graphpp.backends.kernels.faster_product", lambda a, b: "mm")
    assert torch.equal(kernels.multiply(torch.ones(2, 3), torch.ones(3, 2)), torch.full((2, 2), 3.0))
    assert (tmp_path / "root" / "products.json").exists() == torch.backends.mkldnn.is_available()

    def full(name: str, table: dict[str, str]) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(cache, "write", full)
    assert torch.equal(kernels.multiply(torch.ones(4, 3), torch.ones(3, 4)), torch.full((4, 4), 3.0))


def hold_cache(rank: int, root: str) -> list[str]:
    """Append this rank's lines to the one entry that all ranks share, under its lock."""
    cache = DiskCache(Path(root))
    for turn in range(20):
        with cache.entry("shared") as folder:
            file = folder / "lines"
            file.write_text((file.read_text() if file.exists() else "") + f"{rank} {turn}\n")
    return []


def test_processes_hold_an_entry_one_at_a_time(tmp_path: Path) -> None:
    run_ranks(hold_cache, 2, str(tmp_path))
    with DiskCache(tmp_path).entry("shared") as folder:
        assert len((folder / "lines").read_text().splitlines()) == 40


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("chosen", ["linear", "mm"])
def test_products_by_either_kernel(chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Products(DiskCache(tmp_path))
    monkeypatch.setattr("graphpp.backends.kernels.faster_product", lambda a, b: chosen)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    for left, right in [(a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())]:
        total = torch.ones(5, 3)
        kernels.multiply_add(total, left, right)
        torch.testing.assert_close(total, 1 + a @ b)
        torch.testing.assert_close(kernels.multiply(left, right), a @ b)

    batch = torch.randn(2, 5, 7), torch.randn(2, 7, 3)
    total = torch.ones(2, 5, 3)
    kernels.multiply_add(total, *batch)
    torch.testing.assert_close(total, 1 + torch.bmm(*batch))
    torch.testing.assert_close(kernels.multiply(*batch), torch.bmm(*batch))

    def both(x: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        several = torch.bmm(torch.stack([x, 2 * x]), torch.stack([y, y]))
        return torch.mm(x, y), torch.addmm(bias, x, y), torch.addmm(bias, x, y, beta=2), several

    given = (a, b, torch.randn(3))
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(both, tracing_mode="fake")(*given)
    kernels.replace_matmuls(module.graph)
    module.recompile()
    targets = [str(node.target) for node in module.graph.nodes]
    assert targets.count("mkldnn._linear_pointwise.default") == (4 if chosen == "linear" else 0)
    for found, wanted in zip(module(*given), both(*given), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_the_workspace_of_a_product_is_what_the_kernel_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Products(DiskCache(tmp_path))
    monkeypatch.setattr("graphpp.backends.kernels.faster_product", lambda a, b: "linear")
    for a, b in [(torch.randn(256, 64), torch.randn(64, 512)), (torch.randn(3, 256, 64), torch.randn(3, 64, 512))]:
        total = a @ b
        kernels.multiply_add(total, a, b)  # makes factors to choose by
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            kernels.multiply_add(total, a, b)
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        assert 1 <= max(itertools.accumulate(changes)) / product_workspace(a, b) < 1.125, "oneDNN takes some scratch beside"
        assert product_workspace(a.double(), b.double()) == 0


def test_kernels_remember_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    first = Products(DiskCache(tmp_path)).prefers_onednn(a, b)
    monkeypatch.setattr("graphpp.backends.kernels.faster_product", lambda a, b: pytest.fail("measured again"))
    assert Products(DiskCache(tmp_path)).prefers_onednn(a, b) == first
