"""The published runs of benchmarks/published: valid, with figures that agree, and expressible by the planner; the cards of
benchmarks/tried, which share their schema; the pages of both."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from graphpp.cluster_planner.costs.model_costs import Variant
from graphpp.cluster_planner.plans.settings import admits
from graphpp.errors import GraphPPError
from tests.test_benchmarks import ROOT, sibling

GROUPS = {
    "deepseek_v3": 1, "ibm_fsdp": 12, "llama_3": 3, "llm_foundry": 41, "megatron_bridge": 8, "megatron_bridge_table": 11,
    "megatron_lm": 5, "megatron_lm_2021": 10, "moe_folding": 10, "nemo_24_07": 9, "nemo_automodel": 5, "qwen3_235b": 5,
    "torchtitan_2024_07": 8, "torchtitan_2024_12": 18, "torchtitan_async_tp": 2, "torchtitan_h200": 2, "zero_bubble": 24,
}  # fmt: skip


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return sibling("published_runs", monkeypatch)


def test_every_file_is_valid_and_has_its_runs(published: ModuleType) -> None:
    runs = published.read_runs()
    assert dict(Counter(run.group for run in runs)) == GROUPS
    assert sum(run.documented for run in runs) == 9
    assert sum(run.unverified for run in runs) <= 10
    assert all(path.stat().st_size <= 100_000 for path in published.FOLDER.iterdir())


def test_the_figures_of_a_run_agree(published: ModuleType) -> None:
    """Tokens per second from seconds, TFLOP/s and MFU under the run's convention of FLOPs: within 2 % of each other."""
    for run in published.read_runs():
        rates = run.rates()
        assert max(rates.values(), default=1) <= 1.02 * min(rates.values(), default=1), (run.name, rates)


@pytest.mark.parametrize(
    ("model", "billions", "flops"),
    [
        ("Llama 3 8B", 8.03, 6 * 7.505e9 + 12 * 32 * 4096 * 2048),  # 7.505e9 without the embedding
        ("Qwen3 30B-A3B", 30.53, 6 * 3.034e9 + 12 * 48 * 4096 * 2048),
        ("DeepSeek-V3", 671.0, 6 * 36.62e9 + 6 * 61 * 128 * 320 * 2048),
    ],
)
def test_parameters_and_flops_of_known_models(published: ModuleType, model: str, billions: float, flops: float) -> None:
    known = {run.model: run.architecture for run in published.read_runs()}[model]
    assert known.parameters(2048) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert known.flops(2048, "full") == pytest.approx(flops, rel=2e-3)
    scores = known.flops(2048, "full") - known.flops(2048, "causal")
    assert known.flops(4096, "causal") - known.flops(2048, "causal") == pytest.approx(scores)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"colour": 1}, "colour"),
    "another number of ranks": ({"settings": {"tp": 2}}, "dp x tp x pp x cp is 16, machines have 8"),
    "a batch that ranks cannot share": ({"settings": {"batch": 12}}, "batch: 12 rows for dp 8"),
    "experts that ranks cannot share": ({"settings": {"ep": 3}}, "ep: 3 x etp None does not divide 8"),
    "no convention of FLOPs": ({"result": {"tflops": 400}}, "flops: take full"),
    "an unknown model": ({"model": "Llama 9"}, "take a name of models.json"),
    "no figure": ({"result": {"tokens": None}}, "positive figures, or fits: false"),
    "from memory, not marked": ({"source": {"title": "", "where": "", "date": "", "seen": "memory"}}, "unverified"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_run_is_refused(case: str, published: ModuleType, tmp_path: Path) -> None:
    change, message = WRONG[case]
    settings = {"dp": 8, "rows": 2, "batch": 16, "length": 8192, "schedule": "loop", "attention": "newest"}
    common = {
        "name": "a", "table": "t", "model": "Llama 3 8B", "machines": {"device": "H100", "gpus": 8}, "settings": settings,
        "result": {"tokens": 5762},
    }  # fmt: skip
    source = {"title": "a page", "where": "https://example.com", "date": "2024", "seen": "page"}
    group = {"source": source, "common": common, "runs": [{}]}
    (tmp_path / "models.json").write_text((ROOT / "benchmarks/published/models.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(group))
    assert len(published.read_runs(tmp_path)) == 1
    (tmp_path / "a.json").write_text(json.dumps({**group, "runs": [change]}))
    with pytest.raises(GraphPPError, match=message):
        published.read_runs(tmp_path)


WRONG_CARDS: dict[str, tuple[dict[str, Any], str]] = {
    "an error beyond the tolerance": ({"result": {"eager": 1e-5}}, "eager: 1e-05, tolerance 1e-06"),
    "a difference without a reason": ({"model": "Mamba", "result": {"eager": 1e-7}}, "Mamba: models.json: why"),
    "a split that is not the stages": ({"settings": {"split": 3}}, "split: 3 for 2 stages"),
    "no version of torch": ({"torch": None}, "take torch"),
}


@pytest.mark.parametrize("case", WRONG_CARDS)
def test_a_wrong_card_is_refused(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried, (change, message) = sibling("model_cards", monkeypatch), WRONG_CARDS[case]
    file = Path(copytree(tried.FOLDER, tmp_path / "tried")) / "zoo.json"
    group = json.loads(file.read_text())
    for key, value in change.items():
        group["runs"][0][key] = {**group["runs"][0][key], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(group))
    with pytest.raises(GraphPPError, match=message):
        tried.read_cards(file.parent)


def test_the_pages_show_the_data_with_a_card_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = sibling("model_pages", monkeypatch)
    titles = re.findall(r'Entry\(\s*"([^"]+)"', (ROOT / "tests/zoo/models.py").read_text())
    assert list(dict.fromkeys(card.model for card in pages.read_cards())) == titles
    assert {path: (ROOT / "docs" / path).read_text() for path in pages.pages()} == pages.pages()


def test_each_run_is_a_case_of_the_planner_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    published = sibling("published", monkeypatch)
    for run in published.read_runs():
        if run.cannot is not None:
            with pytest.raises(ValueError, match="cannot express"):
                published.cases(run)
            continue
        for case in published.cases(run):
            setting, it = case.setting, run.settings
            assert setting.shape.ranks == case.machines.gpus == run.machines.gpus, run.name
            assert setting.microbatches == it.microbatches, run.name
            by_layer = it.zero == 3 and it.pp == 1 and setting.shape.shards > 1 and it.shard is None
            assert (setting.keep == 0) == by_layer, run.name
            assert admits(setting.schedule, setting.shape.pp, setting.microbatches), (run.name, setting.schedule)
        config = sys.modules["published_models"].config
        assert config(run.architecture, run.settings.length).vocab_size == run.architecture.vocabulary


def test_a_run_is_priced_with_the_kernels_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of two layers: kernels fused in part lie between eager and compiled ones; scores in memory take longer."""
    published = sibling("published", monkeypatch)
    run = next(each for each in published.read_runs() if each.name == "Llama 2 7B, 128 A100, FSDP of IBM")
    small = replace(run.architecture, family="gpt", layers=2, vocabulary=1000)

    def seconds(**changes: Any) -> float:
        settings = replace(run.settings, length=1024, **changes)
        found = published.compared(replace(run, architecture=small, settings=settings))
        return float(found.seconds.total)

    eager, partly, compiled = (seconds(kernels=each) for each in ("eager", "partly", "compile"))
    assert eager > partly > compiled
    assert partly == pytest.approx((eager + compiled) / 2)
    assert seconds(kernels="compile", attention="unfused") > compiled


def test_experts_in_float8_are_scaled_by_passes_over_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 rows for each of 4 experts: once in a forward, and for the gradient of inputs, not for that of weights."""
    published = sibling("published_kernels", monkeypatch)
    rows, inner, outer = ((1, 0, 0, 8.0),), ((0, 0, 0, 16.0),), ((0, 0, 0, 32.0),)
    work = ((1, 0, 1, 4 * 2 * 8 * 32 * 16.0),)
    forward = published.Operation("product", "bfloat16", work, sides=(rows, outer, inner), grouped=True)
    weights = replace(forward, sides=(inner, outer, rows))
    kind = published.SegmentKind((((forward, 3),), ((weights, 3),)), (), (), (), (), ())
    model = published.ModelCosts(1, (0,), ("",), (), {None: Variant((kind,), (0,))}, (), (), ())
    [found] = published.experts_in_float8(model, "tensorwise").variants[None].kinds
    product, passes = found.operations[0]
    assert product == (replace(forward, dtype="float8_e4m3fn"), 3)
    assert passes == (published.Operation("memory", nbytes=((1, 0, 1, 6 * 4 * 8 * 16.0),)), 3)
    assert found.operations[1] == ((replace(weights, dtype="float8_e4m3fn"), 3),)


def test_single_experts_in_float8_are_scaled_by_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as by one kernel for all, in four kernels for each expert: two of them read or write nothing much."""
    published = sibling("published_kernels", monkeypatch)
    rows, inner, outer = ((1, 0, 0, 8.0),), ((0, 0, 0, 16.0),), ((0, 0, 0, 32.0),)
    work = ((1, 0, 1, 4 * 2 * 8 * 32 * 16.0),)
    forward = published.Operation("product", flops=work, sides=(rows, outer, inner), grouped=True)
    kind = published.SegmentKind((((forward, 1),),), (), (), (), (), ())
    model = published.ModelCosts(1, (0,), ("",), (), {None: Variant((kind,), (0,))}, (), (), ())
    [found] = published.experts_in_float8(model, "tensorwise", single=4).variants[None].kinds
    scaling = [one for one, _ in found.operations[0] if one.kind == "memory"]
    assert [sum(term[3] for term in one.nbytes) for one in scaling] == [0, 2 * 4 * 8 * 16, 0, 4 * 4 * 8 * 16]
    assert {one.pieces for one in scaling} == {((0, 0, 1, 4.0),)}


def test_products_save_their_inputs_in_their_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    published = sibling("published_kernels", monkeypatch)
    for dtype, inputs in (("bfloat16", 100.0), ("float8_e4m3fn", 50.0)):
        product = published.Operation("product", dtype)
        kind = published.SegmentKind((((product, 1),),), (), (), (), ((1, 0, 0, 40.0),), (), operands=((1, 0, 0, 100.0),))
        model = published.ModelCosts(1, (0,), ("",), (), {None: Variant((kind,), (0,))}, (), (), ())
        [found] = published.saved_by_fused_kernels(model).variants[None].kinds
        assert found.saved == ((1, 0, 0, 40.0 + inputs),)


def test_a_fused_loss_has_no_logits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 tokens and 100 words: two copies of 4 bytes become the logits of 2; other values stay."""
    published = sibling("published_kernels", monkeypatch)
    sides = ((1, 0, 0, 8.0),), ((0, 1, 0, 100.0),), ((0, 0, 0, 16.0),)
    head = published.Operation("product", sides=sides, flops=((1, 1, 0, 1.0),))
    peaks = tuple((((0, 0, 0, 7.0), (1, 0, 0, copies * 800.0 + 30)),) for copies in (8, 12, 12, 2))
    kind = published.SegmentKind((((head, 1),),), peaks, (), (), ((1, 0, 0, 4 * 800.0 + 30),), ())
    model = published.ModelCosts(1, (0, 1), ("", ""), (), {None: Variant((kind,), (0, 0))}, (), (), ())
    found = published.with_fused_loss(model).variants[None]
    assert found.kind_of == (0, 1) and found.kinds[0] == kind
    assert [size[0][1][3] for size in found.kinds[1].peaks] == [2 * 800 + 30, 4 * 800 + 30, 4 * 800 + 30, 2 * 800 + 30]
    assert found.kinds[1].saved == ((1, 0, 0, 2 * 800.0 + 30),)


def test_ranks_along_cp_hold_shards_in_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of two layers over 2 x 4 ranks: shards of an eighth, gathered by all of them, and no sum over copies."""
    published = sibling("published", monkeypatch)
    run = next(each for each in published.read_runs() if each.name == "Llama 3 8B, 8 H100, 131072 tokens, cp 4, float8")
    small = replace(run.architecture, layers=2, vocabulary=1000)
    run = replace(run, architecture=small, settings=replace(run.settings, length=1024, precision="bfloat16"))
    [case] = published.cases(run)
    shape = case.setting.shape
    assert (shape.shards, shape.shard_stride, shape.copies) == (8, 1, ("dp_replicate",)) and case.setting.keep == 0
    with_shards = published.compared(run)
    monkeypatch.setattr(published, "ContextShards", published.MeshShape)
    with_copies = published.compared(run)
    state = 16 * small.parameters(1024)  # bytes of parameters, sums of gradients, and two moments in float32
    assert 0.9 * state * (1 / 2 - 1 / 8) < with_copies.peak - with_shards.peak < 1.6 * state * (1 / 2 - 1 / 8)


def test_kendalls_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    tau = sibling("published_summary", monkeypatch).tau
    assert tau([(1, 2), (2, 3), (3, 4)]) == 1
    assert tau([(1, 4), (2, 3), (3, 2)]) == -1
    assert tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)
    assert tau([(1.00, 2), (1.02, 1), (2, 3)], noise=0.03) == 1 > tau([(1.00, 2), (1.02, 1), (2, 3)])


def test_the_run_picked_by_predictions_is_compared_with_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predicted fastest of three layouts is 20 % slower as published; two releases with equal settings are no set."""
    summary = sibling("published_summary", monkeypatch)
    first = next(run for run in sibling("published_runs", monkeypatch).read_runs() if run.tokens)

    def one(tokens: float, rate: float, **settings: Any) -> Any:
        own = replace(first.settings, **settings)
        run = SimpleNamespace(**{**vars(first), "settings": own, "tokens": tokens, "name": str(tokens)})
        return SimpleNamespace(run=run, rate=rate)

    batch = first.settings.batch
    three = ((80.0, 90.0, "none"), (100.0, 85.0, "full"), (50.0, 40.0, "selective"))
    known = [one(tokens, rate, batch=batch, recompute=kind) for tokens, rate, kind in three]
    [found] = summary.choices([*known, one(10.0, 9.0, batch=64 * batch), one(11.0, 9.0, batch=64 * batch)])
    assert found[1:] == ("3", "80.0", "100.0", "20%")
