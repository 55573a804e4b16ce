"""Costs of linear layers in float8 by torchao's recipes: which layers, which products, and the passes that scale operands."""

import warnings
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import graphpp
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.model_costs import Degrees, ModelCosts
from graphpp.cluster_planner.costs.price import priced
from graphpp.devices import Machines
from graphpp.errors import CaptureError, ScheduleError
from graphpp.schedules.table.actions import Kind
from tests.cluster_planner.plans.test_plan import LENGTH, WIDTH, Decoder, example, loss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao.float8")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

ROWS, LAYERS = 2, 4
_WHOLE = "weights", "derived"
F, B = 0, 1


def decoder(width: int = WIDTH) -> Decoder:
    with torch.device("meta"):
        model = Decoder(width)
    model.layers = model.layers[:LAYERS]
    return model


@cache
def usual(float8: str | None) -> ModelCosts:
    return costs(decoder(), float8)


def costs(model: torch.nn.Module, float8: Any = None) -> ModelCosts:
    return capture_costs(model, loss, example(ROWS), float8=float8)


def products(found: ModelCosts, segment: int, phase: int) -> Counter[str]:
    variant, counted = found.variants[None], Counter[str]()
    for each, number in variant.kinds[variant.kind_of[segment]].operations[phase]:
        counted[each.dtype] += number if each.kind == "product" else 0
    return +counted


def passed(found: ModelCosts, segment: int, phase: int) -> float:
    """Bytes of the kernels that are no products."""
    variant, at = found.variants[None], Degrees(1.0)
    operations = variant.kinds[variant.kind_of[segment]].operations[phase]
    return sum(number * at.amount(each.nbytes) for each, number in operations if each.kind == "memory")


def test_the_word_of_a_recipe_takes_the_layers_of_numbered_modules() -> None:
    model = decoder()
    before = list(model.modules())
    found, plain = costs(model, "tensorwise"), usual(None)
    assert [id(each) for each in model.modules()] == [id(each) for each in before]
    assert found.float8 == "tensorwise of 8 linear layers" and plain.float8 is None
    layer, head = found.layers[1], len(found.starts) - 1
    assert products(found, layer, F) == {"float8_e4m3fn": 2}
    assert products(found, layer, B) == {"float8_e5m2": 4}  # the dtype of gradients
    assert products(found, head, F) == products(plain, head, F) == {"bfloat16": 1}


def test_scales_and_casts_are_passes_over_memory() -> None:
    """Of inputs [rows, k] and weights [n, k] in 2 bytes: one reading for the scale, one for the cast, and the bytes written."""
    layer = usual(None).layers[1]
    added = passed(usual("tensorwise"), layer, F) - passed(usual(None), layer, F)
    tokens, weights = ROWS * LENGTH, 2 * 4 * WIDTH * WIDTH
    inputs = tokens * (WIDTH + 4 * WIDTH)
    # the scale of an input is found where the input is computed, and its readings for the cast are counted there
    assert 3 * inputs + 5 * weights <= added <= 5 * inputs + 5 * weights + 1_000


def test_a_converted_model_costs_what_the_option_says() -> None:
    converted = convert_to_float8_training(
        decoder(), config=Float8LinearConfig.from_recipe_name("tensorwise"), module_filter_fn=lambda layer, fqn: fqn != "head"
    )
    assert any(isinstance(each, Float8Linear) for each in converted.modules())
    assert usual("tensorwise") == costs(converted)
    with pytest.raises(CaptureError, match=r"layers\.0\.up is in float8 already: leave float8= out"):
        costs(converted, "rowwise")


def test_recipes_by_pattern() -> None:
    found = costs(decoder(), {"layers.*.up": "rowwise_with_gw_hp", "head": "tensorwise"})
    assert found.float8 == "tensorwise of 1 linear layers, rowwise_with_gw_hp of 4 linear layers"
    assert products(found, found.layers[1], F) == {"float8_e4m3fn": 1, "bfloat16": 1}
    assert products(found, found.layers[1], B) == {"float8_e4m3fn": 1, "bfloat16": 3}  # the weight's gradient is not in float8


def test_weights_are_scaled_once_per_step_or_in_each_computation() -> None:
    found = usual("tensorwise")
    step, each, shards = (
        priced(found, Machines.read("8xH100"), Deployment(rows=ROWS, casts=word)) for word in ("step", "computation", "shards")
    )
    stages = zip(each.segments.costs.stages, step.segments.costs.stages, step.layers, strict=True)
    for again, once, phases in stages:
        for kind in (Kind.F, Kind.B):
            assert again.of(kind) == pytest.approx(once.of(kind) + phases[kind].derived)
    assert sum(phases[Kind.F].derived for phases in step.layers) > 0
    assert not any(phases[Kind.F].derived for phases in (*each.layers, *shards.layers))
    assert shards.segments.costs == step.segments.costs


def test_weights_that_are_gathered_in_float8_have_no_other_form() -> None:
    """A byte an element in place of two, and one order in place of two beside it."""
    found = usual("tensorwise")
    step, shards = (priced(found, Machines.read("8xH100"), Deployment(rows=ROWS, casts=word)) for word in ("step", "shards"))
    narrow = sum(each.elements for each in found.parameters if each.float8)
    assert narrow == LAYERS * 2 * 4 * WIDTH * WIDTH
    weights, casts = ([sum(getattr(one, name) for one in each.segments.state) for each in (step, shards)] for name in _WHOLE)
    assert weights[0] - weights[1] == narrow
    assert casts[0] == 2 * casts[1] >= 2 * narrow
    layer = found.layers[1]
    for kind in (Kind.F, Kind.B):
        assert shards.layers[layer][kind].read == pytest.approx(step.layers[layer][kind].read / 2)
    head = len(found.starts) - 1
    assert shards.layers[head][Kind.F].read == step.layers[head][Kind.F].read


@pytest.mark.parametrize("recipe", ["tensorwise", None])
def test_operands_are_the_inputs_of_products_that_are_computed_again(recipe: str | None) -> None:
    """With full recomputation a layer saves its own input alone, so both inputs of its products are computed again."""
    found, at = usual(recipe), Degrees(1.0)
    variant = found.variants["full"]
    kind = variant.kinds[variant.kind_of[found.layers[1]]]
    assert at.amount(kind.saved) == 2 * ROWS * LENGTH * WIDTH
    assert at.amount(kind.operands) == 2 * ROWS * LENGTH * (WIDTH + 4 * WIDTH)


def test_operands_of_a_product_are_not_the_values_that_they_are_computed_from() -> None:
    """With selective recomputation a layer saves the input of its GELU, and not the output, which its second product reads."""
    model = torch.nn.Sequential(*(Gelus() for _ in range(LAYERS))).to("meta")
    rows = torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta")
    found = capture_costs(model, torch.nn.functional.mse_loss, graphpp.Microbatch((rows,), {}, rows))
    for recompute, operands in ((None, 0), ("selective", 2 * ROWS * LENGTH * 4 * WIDTH)):
        variant = found.variants[recompute]
        assert Degrees(1.0).amount(variant.kinds[variant.kind_of[2]].operands) == operands


class Gelus(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.down(torch.nn.functional.gelu(self.up(rows)))


class Halves(Gelus):
    """Attention-like products of parts of one tensor, as in Mamba 2."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        one, other = self.up(rows).chunk(2, -1)
        return rows + (one @ other.transpose(-1, -2)) @ rows


def test_operands_may_be_parts_of_a_split() -> None:
    """Of `full`, both parts, which are one value, and the input of the layer, which is saved."""
    model = torch.nn.Sequential(*(Halves() for _ in range(LAYERS))).to("meta")
    rows = torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta")
    found = capture_costs(model, torch.nn.functional.mse_loss, graphpp.Microbatch((rows,), {}, rows))
    variant = found.variants["full"]
    scores = 2 * ROWS * LENGTH * LENGTH
    assert Degrees(1.0).amount(variant.kinds[variant.kind_of[2]].operands) == 2 * ROWS * LENGTH * 4 * WIDTH + scores


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_casts_of_weights_are_state_where_stages_are_whole(recipe: str) -> None:
    """As many bytes as `compile` counts: about 2 for each element of a converted weight."""
    torch.manual_seed(0)
    model = Decoder(WIDTH).bfloat16()
    model.layers = model.layers[:LAYERS]
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, fqn: fqn != "head")
    given = {"model": model, "loss": loss, "example": example(ROWS)}
    pipe = graphpp.compile(**given, split=2, microbatches=2)
    found = costs(model).derived
    assert round(sum(Degrees(1.0).amount(size) for size in found)) == sum(each.derived for each in pipe.plan.memory.state)
    elements = sum(each.weight.numel() for each in model.modules() if isinstance(each, Float8Linear))
    assert 2 * elements <= sum(Degrees(1.0).amount(size) for size in found) <= 2.3 * elements
    assert not any(usual(None).derived)


@pytest.mark.parametrize(
    ("width", "float8", "message"),
    [
        (WIDTH, "blockwise", "float8: take one of tensorwise"),
        (WIDTH, {}, "a mapping of one or more FQN patterns"),
        (WIDTH, {"layers.*.left": "rowwise"}, r"'layers\.\*\.left' fits no linear layer"),
        (24, {"layers.*.up": "rowwise"}, r"layers\.0\.up \(96, 24\) are no multiples of 16"),
        (24, "rowwise", "no linear layer with sizes that are multiples of 16"),
    ],
)
def test_refusals(width: int, float8: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        costs(decoder(width), float8)


def test_plans_say_what_is_in_float8() -> None:
    options: dict[str, Any] = {"machines": "8xH100", "batch": 16, "work": 1_000}
    best = graphpp.plan(usual("tensorwise"), **options).best
    assert "float8: tensorwise of 8 linear layers" in str(best)
    assert graphpp.TrainingPlan.from_json(best.to_json()) == best
    with pytest.raises(ScheduleError, match="A100 has peak FLOP/s of bfloat16"):
        graphpp.plan(usual("tensorwise"), **{**options, "machines": "8xA100"})
    with pytest.raises(ScheduleError, match="float8: it has no effect beside a ModelCosts"):
        graphpp.plan(usual("tensorwise"), float8="rowwise", **options)
