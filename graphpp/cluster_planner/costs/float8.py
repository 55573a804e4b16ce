"""Linear layers in float8 for a capture of costs, by torchao's own conversion; the model is as before at the end.

A recipe of torchao: "tensorwise" and "rowwise" scale operands of products by tensor or by row, "rowwise_with_gw_hp" computes
gradients of weights in the model's dtype. `float8=` is one recipe for all linear layers inside of numbered modules
(`layers.3.up`, not a head beside them) whose sizes are multiples of 16, or {FQN pattern: recipe}, with patterns as in
`tensor_plan.py`. Raises `CaptureError` if torchao is missing, for other recipes, and for layers that cannot be in float8.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphpp.arguments import Accepted
from graphpp.cluster_planner.costs.tensor_plan import fitting_fqns
from graphpp.errors import CaptureError

Float8 = str | Mapping[str, str]
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_OTHER = "another config"
_MULTIPLE = 16  # of which kernels for float8 take sizes
_NUMBERED = re.compile(r"(^|\.)[0-9]+\.")

FLOAT8 = Accepted(
    f"one of {', '.join(RECIPES)}, or a mapping of one or more FQN patterns to them",
    lambda value: bool(value) and all(each in RECIPES for each in (value.values() if isinstance(value, Mapping) else [value])),
)


def recipes_of(model: nn.Module, float8: Float8 | None) -> dict[str, str]:
    """The recipe of each linear layer to convert, by FQN. Raises `CaptureError`, also if `model` is converted already."""
    linear = {fqn: layer for fqn, layer in model.named_modules(remove_duplicate=False) if isinstance(layer, nn.Linear)}
    if float8 is None:
        return {}
    if converted := converted_layers(model):
        raise CaptureError(
            f"float8: {next(iter(converted))} is in float8 already: leave float8= out, and the model is priced as it is"
        )
    if isinstance(float8, str):
        found = {fqn: float8 for fqn, layer in linear.items() if _NUMBERED.search(fqn) and _fits(layer)}
        if not found:
            raise CaptureError(
                f"float8={float8!r}: no linear layer with sizes that are multiples of {_MULTIPLE} is inside of a numbered "
                "module: give {FQN pattern: recipe}"
            )
        return found
    found = {}
    for pattern, recipe in sorted(float8.items(), key=lambda item: item[0].count(".")):
        fqns = fitting_fqns(pattern, linear)
        if not fqns:
            raise CaptureError(f"float8: {pattern!r} fits no linear layer: give FQNs as in model.named_modules()")
        found |= dict.fromkeys(fqns, recipe)
    unfit = [f"{fqn} {tuple(linear[fqn].weight.shape)}" for fqn in found if not _fits(linear[fqn])]
    if unfit:
        raise CaptureError(f"float8: sizes of {unfit[0]} are no multiples of {_MULTIPLE}, as kernels need: leave the layer out")
    return found


def converted_layers(model: nn.Module) -> dict[str, str]:
    """The recipe of each linear layer that is torchao's already, by FQN."""
    module: Any = sys.modules.get("torchao.float8.float8_linear")  # not imported: no layer is
    layers = model.named_modules(remove_duplicate=False) if module is not None else ()
    found: dict[str, Any] = {fqn: layer for fqn, layer in layers if isinstance(layer, module.Float8Linear)}
    return {fqn: _recipe_of(layer.config) for fqn, layer in found.items()}


def _recipe_of(config: Any) -> str:
    return next((recipe for recipe in RECIPES if type(config).from_recipe_name(recipe) == config), _OTHER)


def described(recipes: Mapping[str, str]) -> str | None:
    """The recipes as text, with the number of layers of each; None without layers in float8."""
    counts = Counter(recipes.values())
    words = (*RECIPES, _OTHER)
    return ", ".join(f"{recipe} of {counts[recipe]} linear layers" for recipe in words if counts[recipe]) or None


@contextmanager
def in_float8(model: nn.Module, recipes: Mapping[str, str]) -> Iterator[None]:
    """While open, the layers of `recipes` are torchao's, with the model's own parameters."""
    before = {fqn: model.get_submodule(fqn) for fqn in recipes}
    made = {fqn: _converted(before[fqn], recipe) for fqn, recipe in recipes.items()}
    try:
        for fqn, layer in made.items():
            _replace(model, fqn, layer)
        yield
    finally:
        for fqn, layer in before.items():
            _replace(model, fqn, layer)


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _replace(model: nn.Module, fqn: str, layer: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


def _converted(layer: nn.Module, recipe: str) -> Any:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise CaptureError("float8: the recipes are torchao's, which is not installed: pip install torchao") from error
    return convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
