"""A checkpoint of another training is refused by name and changes nothing; `allow` takes what is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import graphpp
from graphpp.checkpoint import optimizer_state, training_state
from graphpp.checkpoint.safe_reading import as_text
from graphpp.errors import CheckpointError

X, Y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
Made = tuple[graphpp.Pipeline, Any]


def training(
    layers: int = 3, dtype: torch.dtype = torch.float32, optimizer: Any = AdamW, schedulers: Any = (), **extra: Any
) -> Made:
    """A pipeline after one step, and its checkpoint. `schedulers`: functions of the optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(dtype)
    x = X.to(dtype)
    example = graphpp.Microbatch((x[:2],), target=Y[:2])
    pipe = graphpp.compile(model, F.cross_entropy, example=example, split=["1"], schedule="GPipe", microbatches=2)
    stepped = optimizer(pipe.parameters(), lr=0.125)
    others = [make(stepped) for make in schedulers]
    pipe.step(x, target=Y)
    for each in (stepped, *others):
        each.step()
    return pipe, pipe.checkpoint(stepped, *others, extra=extra)


def values(made: Made) -> list[torch.Tensor]:
    pipe, found = made
    state = [entry[name] for each in found._state.optimizers for entry in each.state.values() for name in sorted(entry)]
    return [value.clone() for value in (*pipe.state_dict().values(), *state)]


def step(size: int) -> Callable[[Any], Any]:
    return lambda optimizer: StepLR(optimizer, size)


def cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, 7)


def constant(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda number: 1.0)


def slower(parameters: Any, lr: float) -> Any:
    return AdamW(parameters, lr=lr / 2)


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {  # saved, loaded, what is said, the word that allows it
    "more layers": (
        {"layers": 5},
        {"layers": 3},
        r"has 8 entries that this training lacks: training\.model\.3\.bias, training\.model\.3\.weight",
        "entries",
    ),
    "an extra value": ({"epoch": 3}, {}, r"has 1 entries that this training lacks: training\.extra\.epoch", "entries"),
    "one more": ({"schedulers": (cosine, step(2))}, {"schedulers": (cosine,)}, r"lacks: training\.others\.1", "entries"),
    "float64": ({"dtype": torch.float64}, {}, r"model\.0\.weight is torch\.float64, and here torch\.float32", "dtypes"),
    "bfloat16": ({"dtype": torch.bfloat16}, {}, r"model\.0\.weight is torch\.bfloat16, and here torch\.float32", "dtypes"),
    "another optimizer": ({"optimizer": Adam}, {}, r"the optimizer of 0\.weight .* class Adam, and here of AdamW", "classes"),
    "an optimizer with less state": ({"optimizer": SGD}, {"optimizer": AdamW}, "class SGD, and here of AdamW", "classes"),
    "the other order": (
        {"schedulers": (cosine, step(2))},
        {"schedulers": (step(2), cosine)},
        r"others\.0 of the checkpoint is of the class CosineAnnealingLR, and here of StepLR",
        "classes",
    ),
    "the other order of one class": (
        {"schedulers": (step(2), step(5))},
        {"schedulers": (step(5), step(2))},
        r"others\.0 of the checkpoint, a StepLR, has step_size=2, and here 5",
        "settings",
    ),
    "another base": (
        {"optimizer": AdamW, "schedulers": (constant,)},
        {"optimizer": slower, "schedulers": (constant,)},
        r"has base_lrs=\[0\.125\], and here \[0\.0625\]",
        "settings",
    ),
}


@pytest.mark.first_cases(5)
@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_training_is_refused(name: str, tmp_path: Path) -> None:
    of_saved, of_loaded, words, allow = OTHERS[name]
    training(**of_saved)[1].save(tmp_path)
    pipe, found = made = training(**of_loaded)
    before = values(made)
    others = [word for word in ("entries", "dtypes", "classes", "settings") if word != allow]
    with pytest.raises(CheckpointError, match=rf'(?s){words}.* allow="{allow}"'):
        found.load(tmp_path, allow=others)
    assert all(torch.equal(one, other) for one, other in zip(before, values(made), strict=True))
    found.load(tmp_path, allow=allow)
    state = [value for entry in found._state.optimizers[0].state.values() for value in entry.values() if value.dim()]
    assert {each.dtype for each in (*pipe.parameters(), *state)} == {torch.float32}
    pipe.step(X, target=Y)  # the optimizer's state fits its class
    for each in (*found._state.optimizers, *found._state.others):
        each.step()


def test_missing_schedulers_are_refused(tmp_path: Path) -> None:
    training(schedulers=(cosine,))[1].save(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks 1 entries that this training has: training\.others\.1"):
        training(schedulers=(cosine, step(2)))[1].load(tmp_path)


def test_words_that_allow_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="allow: take words of 'entries', 'dtypes', 'classes', 'settings'"):
        training()[1].load(tmp_path, allow="dtype")


def test_a_checkpoint_without_names_of_classes_is_loaded(tmp_path: Path) -> None:
    """Earlier versions named no classes and no saves."""
    saved = training(schedulers=(cosine,), epoch=3)

    def without_class(name: str, owner: object, state: Any) -> str:
        return as_text(name, state)

    with patch.object(optimizer_state, "state_text", without_class), patch.object(training_state, "state_text", without_class):
        entries = saved[1].state_dict()
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from graphpp._torch.checkpoint_files import write_entries

    write_entries({"training": entries}, FileSystemWriter(tmp_path), None)
    assert [each.name for each in tmp_path.glob("*.distcp")] == ["__0_0.distcp"]
    made = training(schedulers=(cosine,), epoch=0)
    made[1].load(tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(values(saved), values(made), strict=True))
    made[1].save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # the files of the earlier version are replaced
