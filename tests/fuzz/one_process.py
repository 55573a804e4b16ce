"""The models and batches of combinations, and their training as a plain loop in one process.

Contract: `train_alone` runs each replica's microbatches in order, and averages the gradients in the order of the replicas,
without graphpp. Where a model draws random numbers, graphpp in one process stands in, for its draws are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.batch.microbatch import Whole
from tests import expert_parallel, tensor_parallel, test_attention
from tests.fuzz.combinations import Combination
from tests.fuzz.layers import DRAWS, VOCAB, WIDTH, Mixed

Parts = Sequence[graphpp.Microbatch]
Tensors = dict[str, Tensor]


class Numbers(NamedTuple):
    """What one step left on a rank, or in one process for a replica; `evaluated`: losses of an evaluation behind the step."""

    losses: list[Tensor]
    grads: Tensors
    buffers: Tensors
    evaluated: list[Tensor]


def model(case: Combination, mesh: Any = None) -> nn.Module:
    """The model of a case, spread over its own dimension of a mesh; None: whole."""
    if case.kind in ("llama", "gpt2"):
        made: nn.Module = _of_transformers(case)
        return made
    if case.kind == "decoder":
        dropout = 0.1 if case.variant == "dropout" else 0.0
        made = tensor_parallel.decoder(layers=len(case.layers), tied=case.variant == "tied", dropout=dropout)
        return made if mesh is None else tensor_parallel.spread(made, mesh["tp"], sequence=case.variant == "sequence")
    if case.kind == "mixture":
        return expert_parallel.mixture(None if mesh is None else mesh["ep"])
    if case.kind == "long":
        how = "ulysses" if case.variant == "ulysses" else "gathered"
        return test_attention.Decoder(None if mesh is None else mesh.get_group("cp"), how)
    return Mixed(case.layers)


def _of_transformers(case: Combination) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    common |= {"num_hidden_layers": len(case.layers), "hidden_size": WIDTH, "num_attention_heads": 2}
    if case.kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=16, max_position_embeddings=32, **common)).train()
    drops: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=32, **drops, **common)).train()


def token_loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def with_metrics(output: Any, target: Tensor) -> Any:
    return token_loss(output, target), {"largest": output.detach().abs().max()}


def loss_of(case: Combination) -> Any:
    return None if case.loss == "own" else with_metrics if "metrics" in case.extra else token_loss


def batch(case: Combination, number: int, replica: int) -> graphpp.Microbatch:
    """The batch of a step for one replica."""
    generator = torch.Generator().manual_seed(100 * number + replica)
    rows, length = case.rows + (number and case.second == "rows"), case.length - 2 * (number and case.second == "length")
    tokens = torch.randint(VOCAB, (rows, length), generator=generator)
    if case.loss == "own":
        return graphpp.Microbatch((), {"input_ids": tokens, "labels": tokens})
    kwargs: dict[str, Any] = {}
    if "mask" in case.extra:
        kwargs["mask"] = torch.rand(rows, length, generator=generator) < 0.3
    if "scale" in case.extra:
        kwargs["scale"] = graphpp.whole(1 + torch.rand(WIDTH, generator=generator))
    if "factor" in case.extra:
        kwargs["factor"] = 1.0 + number / 4
    where = (graphpp.whole(torch.arange(length)),) if case.kind == "long" else ()
    return graphpp.Microbatch((tokens, *where), kwargs, tokens.roll(1, 1))


def cut(whole: graphpp.Microbatch, count: int) -> list[graphpp.Microbatch]:
    """As docs/training/shapes.md says that a batch is cut."""

    def pieces(value: Any) -> Sequence[Any]:
        if isinstance(value, Whole):
            value = value.value
        elif isinstance(value, Tensor):
            found = value.chunk(count)
            return found if len(found) == count else value.tensor_split(count)
        return [value] * count

    args = [pieces(each) for each in whole.args]
    kwargs, target = {name: pieces(each) for name, each in whole.kwargs.items()}, pieces(whole.target)
    return [
        graphpp.Microbatch(tuple(each[i] for each in args), {name: each[i] for name, each in kwargs.items()}, target[i])
        for i in range(count)
    ]


def weights_of(case: Combination) -> dict[str, Any]:
    """`loss_weight=`, if the case has one: a weight for each microbatch, some of them 0, or one for all."""
    count = case.microbatches
    return {"loss_weight": 0.5 if count is None else [(n % 3) / count for n in range(1, count + 1)]} if case.weights else {}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9, foreach=False)


def train_alone(case: Combination, counts: Sequence[int]) -> Iterator[tuple[list[Numbers], Tensors]]:
    """By step the numbers of each replica, and the parameters behind the optimizer's step. `counts`: microbatches by step."""
    net = model(case)
    optimizer, buffers = sgd(net.parameters()), [_copied(net.named_buffers())]
    for number, layout in enumerate(case.layouts):
        if number:
            _between(case, net, optimizer)
        if case.later or not number:  # a checkpoint has the buffers of the first replica
            buffers = buffers[:1] * layout.replicas
        kept = _grads(net)
        found = [_of_replica(case, net, number, replica, own, counts[number]) for replica, own in enumerate(buffers)]
        sums = dict(found[0].grads)
        for each in found[1:]:
            sums |= {fqn: sums[fqn] + grad for fqn, grad in each.grads.items()}
        for fqn, parameter in net.named_parameters():
            mean = sums[fqn] / len(found) if fqn in sums and len(found) > 1 else sums.get(fqn)
            parameter.grad = kept.get(fqn, mean) if mean is None or fqn not in kept else kept[fqn] + mean
        buffers = _exchanged(case, [each.buffers for each in found])
        grads = _copied(_grads(net).items())
        numbers = [each._replace(grads=grads, buffers=own) for each, own in zip(found, buffers, strict=True)]
        if number:
            optimizer.step()
        elif "eval" in case.between:
            numbers = [each._replace(evaluated=_evaluated(case, net, r, each, counts[0])) for r, each in enumerate(numbers)]
        yield numbers, {fqn: each.detach() for fqn, each in net.named_parameters()}


def _copied(named: Any) -> Tensors:
    return {fqn: each.clone() for fqn, each in named}


def _grads(net: nn.Module) -> Tensors:
    return {fqn: each.grad for fqn, each in net.named_parameters() if each.grad is not None}


def _between(case: Combination, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if "clip" in case.between and not case.later:
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    if case.later or "optimizer" in case.between:
        optimizer.step()
        optimizer.zero_grad()
    elif "keep" not in case.between:
        optimizer.zero_grad()


def _of_replica(case: Combination, net: nn.Module, number: int, replica: int, buffers: Tensors, count: int) -> Numbers:
    with _beginning(net, buffers):
        torch.manual_seed(100 + number)
        draws = case.variant == "dropout" or (case.kind == "mixed" and DRAWS & set(case.layers))
        losses = (_by_graphpp if draws else _plainly)(case, net, cut(batch(case, number, replica), count))
        return Numbers(losses, _grads(net), _copied(net.named_buffers()), [])


@contextmanager
def _beginning(net: nn.Module, buffers: Tensors) -> Iterator[None]:
    """With these buffers and without gradients; afterwards the gradients are as before."""
    before = {parameter: parameter.grad for parameter in net.parameters()}
    with torch.no_grad():
        for fqn, buffer in net.named_buffers():
            buffer.copy_(buffers[fqn])
    net.zero_grad()
    yield
    for parameter, grad in before.items():
        parameter.grad = grad


def _plainly(case: Combination, net: nn.Module, parts: Parts) -> list[Tensor]:
    return [_loss(case, net, part, seed) for part, seed in zip(parts, _seeds(case, parts), strict=True)]


def _loss(case: Combination, net: nn.Module, part: graphpp.Microbatch, seed: Tensor | None = None) -> Tensor:
    output = net(*part.args, **part.kwargs)
    loss = output.loss if case.loss == "own" else token_loss(output, part.target)
    if seed is not None and seed != 0:
        loss.backward(seed)
    found: Tensor = loss.detach()
    return found


def _seeds(case: Combination, parts: Parts) -> list[Tensor]:
    """The factor of each microbatch's loss."""
    one, count, how = torch.tensor(1.0), len(parts), case.option("gradients.reduction", "mean")
    if case.weights:
        weights = weights_of(case)["loss_weight"]
        return [one * each for each in (weights if isinstance(weights, list) else [weights] * count)]
    rows = [len((*part.args, *part.kwargs.values())[0]) for part in parts]
    if how == "rows" and len(set(rows)) > 1:
        return [one * (each / sum(rows)) for each in rows]
    return [one if how == "sum" else one / count] * count


def _by_graphpp(case: Combination, net: nn.Module, parts: Parts) -> list[Tensor]:
    how = case.option("gradients.reduction", "mean")
    pipe = graphpp.compile(net, loss_of(case), microbatches=len(parts), gradients=graphpp.Gradients(how))
    return list(pipe.step_microbatches(parts, **weights_of(case)).losses.unbind())


def _evaluated(case: Combination, net: nn.Module, replica: int, numbers: Numbers, count: int) -> list[Tensor]:
    with _beginning(net, numbers.buffers), torch.no_grad():
        net.eval()
        losses = [_loss(case, net, part) for part in cut(batch(case, 0, replica), count)]
        net.train()
    return losses


def _exchanged(case: Combination, each: list[Tensors]) -> list[Tensors]:
    """The replicas' buffers after the step, by `parallel.replica_buffers`."""
    how = case.option("parallel.replica_buffers", "own")
    if how == "own" or len(each) == 1:
        return each
    if how == "broadcast":
        return each[:1] * len(each)
    floating = [fqn for fqn, buffer in each[0].items() if buffer.is_floating_point()]
    return [own | {fqn: torch.stack([one[fqn] for one in each]).mean(0) for fqn in floating} for own in each]
