"""`PipelineAccelerator` against accelerate's own Accelerator in one process: losses, norms, weights, evaluations, saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("accelerate")
from accelerate import Accelerator  # type: ignore[import-untyped]
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import graphpp
from graphpp.integrations.accelerate import PipelineAccelerator
from tests.distributed import run_ranks
from tests.integrations.examples import as_process, run_example

IDS = [torch.randint(64, (6,), generator=torch.Generator().manual_seed(at)) for at in range(20)]
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


def llama() -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(config)


def llama_loop(accelerator: Any, folder: Path | None = None) -> dict[str, Any]:
    """accelerate's documented loop, as a user has it."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(ROWS, 4, shuffle=True)
    scheduler, loader, optimizer, model = accelerator.prepare(scheduler, loader, optimizer, model)
    losses, norms, rates = [], [], []
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                scheduler.step()
                rates.append(scheduler.get_last_lr()[0])
                optimizer.zero_grad()
        if folder is not None and epoch == 0:  # all ranks, then the first alone: the training goes on
            unwrapped, main = accelerator.unwrap_model(model), accelerator.is_main_process
            state, again = accelerator.get_state_dict(model), accelerator.get_state_dict(model)
            unwrapped.save_pretrained(folder / "all", is_main_process=main, save_function=accelerator.save, state_dict=state)
            if main:
                unwrapped.save_pretrained(folder / "first", state_dict=again)
            accelerator.save_model(model, folder / "model")
    model.eval()
    with torch.no_grad():
        outputs = model(**batch)
    evals = [outputs.loss, *accelerator.gather_for_metrics((outputs.logits, batch["labels"]))]
    return {"losses": losses, "norms": norms, "rates": rates, "evals": evals, "state": accelerator.get_state_dict(model)}


def llamas(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    as_process(rank, ranks)
    return llama_loop(PipelineAccelerator(cpu=True, pipeline={"microbatches": 1}, gradient_accumulation_steps=2), folder)


def check_equal(mine: dict[str, Any], theirs: dict[str, Any], names: Sequence[str] = ("losses", "norms", "rates")) -> None:
    assert all(mine[name] == theirs[name] for name in names)
    assert all(torch.equal(one, other) for one, other in zip(mine["evals"], theirs["evals"], strict=True))
    if mine["state"]:  # of the first rank
        assert mine["state"].keys() == theirs["state"].keys()
        assert all(torch.equal(mine["state"][name], value) for name, value in theirs["state"].items())


def test_the_loop_trains_as_one_process_and_saves_the_model(tmp_path: Path) -> None:
    """Bit-equal with one microbatch a batch: losses, norms, learning rates, weights, logits."""
    own = run_ranks(llamas, 2, 2, tmp_path)
    as_process(0, 1)
    plain = llama_loop(Accelerator(cpu=True, gradient_accumulation_steps=2), tmp_path / "plain")
    for found in own:
        check_equal(found, plain)
    for name in ("all", "first"):
        one, other = (load_file(folder / name / "model.safetensors") for folder in (tmp_path, tmp_path / "plain"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[fqn], value) for fqn, value in other.items())
    assert LlamaForCausalLM.from_pretrained(tmp_path / "all").config.num_hidden_layers == 2
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == plain["state"].keys()


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Count:
    """An object of the user in a checkpoint."""

    seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def net_loop(accelerator: Any, folder: Path | None = None, load: bool = False, size: int = 8) -> dict[str, Any]:
    """A loop with a loss function, two optimizers and several calls of prepare; `folder`: saved to, or loaded from."""
    pipelined = isinstance(accelerator, PipelineAccelerator)
    set_seed(5)
    rows = 22 if size == 8 else 20  # the last batch of 8 is short
    features, labels, net = torch.randn(rows, 6), torch.randint(3, (rows,)), Net()
    data = torch.utils.data.TensorDataset(features, labels)
    loader = torch.utils.data.DataLoader(data, size, shuffle=True)
    first = torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9)
    loader, first = accelerator.prepare(loader, first)
    model, evals = accelerator.prepare(net, torch.utils.data.DataLoader(data, 8))
    others = [each for name, each in model.named_parameters() if not name.startswith("0.")]
    second = torch.optim.Adam([{"params": others}], 1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(second, 0.05, total_steps=40)
    second, scheduler, count = *accelerator.prepare(second, scheduler), Count()
    accelerator.register_for_checkpointing(count)
    if load:
        accelerator.load_state(folder)
    losses, rates = [], []
    while count.seen < 3:
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, target=y).loss if pipelined else F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.05)
                first.step()
                second.step()
                scheduler.step()
                first.zero_grad()
                second.zero_grad()
            losses.append(loss.item())
            rates.append(scheduler.get_last_lr()[0])
        count.seen += 1
        if count.seen == 1 and not load and folder is not None:
            accelerator.save_state(folder)
    model.eval()
    with torch.no_grad():
        found = [each for x, y in evals for each in accelerator.gather_for_metrics((model(x), y))]
    return {"losses": losses, "rates": rates, "evals": found, "state": accelerator.get_state_dict(model)}


KINDS = {"saves": {}, "loads": {}, "loads with example": {}, "bf16": {"mixed_precision": "bf16"}, "cut": {}}
EXAMPLE = graphpp.Microbatch((torch.zeros(8, 6),), target=torch.zeros(8, dtype=torch.int64))


def nets(rank: int, ranks: int, folder: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for kind in kinds:
        as_process(rank, ranks)
        options = {"microbatches": 2 if kind == "cut" else 1, **({"example": EXAMPLE} if "example" in kind else {})}
        accelerator = PipelineAccelerator(cpu=True, loss=F.cross_entropy, pipeline=options, **KINDS[kind])
        found.append(net_loop(accelerator, folder if "s" in kind else None, "loads" in kind, 4 if kind == "cut" else 8))
    return found


def test_a_loss_function_and_a_state_that_other_ranks_load(tmp_path: Path) -> None:
    """Bit-equal too, in bf16 as well; batches that are cut equal the smaller ones of one process, with its accumulation."""
    own = run_ranks(nets, 2, 2, tmp_path, list(KINDS))
    plain = {}
    for name, options in {"no": {}, "bf16": {"mixed_precision": "bf16"}, "cut": {"gradient_accumulation_steps": 2}}.items():
        as_process(0, 1)
        plain[name] = net_loop(Accelerator(cpu=True, **options), size=2 if name == "cut" else 8)
    later = {**plain["no"], "losses": plain["no"]["losses"][3:], "rates": plain["no"]["rates"][3:]}
    halves = iter(plain["cut"]["losses"])
    whole = [(one + other) / 2 for one, other in zip(halves, halves, strict=True)]
    for *found, cut in own:
        for mine, theirs in zip(found, [plain["no"], later, later, plain["bf16"]], strict=True):
            check_equal(mine, theirs, ["losses", "rates"])
        assert cut["losses"] == pytest.approx(whole, rel=1e-6)
        assert not cut["state"] or all(torch.equal(cut["state"][fqn], each) for fqn, each in plain["cut"]["state"].items())
    for mine in nets(0, 1, tmp_path, ["loads", "loads with example"]):
        check_equal(mine, later, ["losses", "rates"])


def test_a_launch_that_accelerate_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    as_process(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(graphpp.GraphPPError, match=r"2 processes were started, .* give cpu=True"):
        PipelineAccelerator()


@pytest.mark.exhaustive  # the loop's other tests stay
def test_the_example_prints_what_one_process_prints(tmp_path: Path) -> None:
    """Batches are cut into four on the ranks, so the printed digits alone are equal."""
    plain = {"graphpp.integrations.accelerate import PipelineAccelerator": "accelerate import Accelerator",
             'PipelineAccelerator(pipeline={"microbatches": 4}, ': "Accelerator("}  # fmt: skip
    found = run_example("accelerate_loop.py", tmp_path / "own", ranks=2, launched=True)
    assert found == run_example("accelerate_loop.py", tmp_path / "plain", changes=plain) and found.count("epoch ") == 2
