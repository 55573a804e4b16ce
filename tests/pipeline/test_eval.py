"""Evaluation: equal to the eager model in eval mode, bit for bit, and without a trace in the training."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import MODELS, Case, cuts
from tests.reference import model_loss
from tests.special_models import CUTS, Plain
from tests.training import CASES, capturing, compiled, step

NAMES = ["llama", "hf_gpt2", "norms", "several"]
DEAR = [(name, ranks) for name in ("llama", "hf_gpt2") for ranks in (1, 2)]


def split(name: str) -> Any:
    return cuts(name, 2) if name in MODELS else CUTS[2]


def evaluated(rank: int, name: str, with_target: bool) -> graphpp.EvalResult:
    case = CASES[name]()
    pipe = compiled(case, split=split(name), schedule="1F1B", microbatches=4)
    target = case.batch.target if with_target else None
    with capturing(name):
        return pipe.eval(*case.batch.args, target=target, **case.batch.kwargs)


def expected(case: Case, count: int) -> tuple[list[Any], Tensor]:
    """Outputs and losses of the microbatches, from the eager model."""
    case.model.eval()
    with torch.no_grad():
        parts = case.batch.microbatches(count)
        outputs = [case.model(*part.args, **part.kwargs) for part in parts]
        return outputs, torch.stack([model_loss(case.model, case.loss, part) for part in parts])


def logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["logits"] if isinstance(output, dict) else output.logits


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in NAMES for ranks in (1, 2) if (name, ranks) not in DEAR] + further(*DEAR),
)
def test_evaluation_is_that_of_eager(name: str, ranks: int) -> None:
    outputs, losses = expected(CASES[name](), 4)
    for with_target in (True, False):
        run = [evaluated(0, name, with_target)] if ranks == 1 else run_ranks(evaluated, 2, name, with_target)
        *others, last = run
        assert all(result.output is None for result in others)
        assert torch.equal(logits(last.output), torch.cat([logits(output) for output in outputs]))
        for result in run:
            assert (result.loss is None) == (result.losses is None) == (not with_target)
            if with_target:
                assert torch.equal(result.losses, losses)
                assert torch.equal(result.loss, losses.mean())


def test_outputs_keep_their_structure() -> None:
    case = CASES["several"]()
    outputs, _ = expected(CASES["several"](), 4)
    more = compiled(case, microbatches=4).eval(*case.batch.args).output["more"]
    assert torch.equal(more[0], torch.cat([output["more"][0] for output in outputs]))
    assert torch.equal(more[1], torch.stack([output["more"][1] for output in outputs]).mean())
    assert more[2] == [3, None]


def test_outputs_of_hugging_face_keep_their_class() -> None:
    case = CASES["hf_gpt2_labels"]()
    result = compiled(case, split=cuts("hf_gpt2_labels", 2), microbatches=4).eval(**case.batch.kwargs)
    _, losses = expected(CASES["hf_gpt2_labels"](), 4)
    assert type(result.output).__name__ == "CausalLMOutputWithCrossAttentions"
    assert torch.equal(result.output.loss, losses.mean())


def test_a_cache_in_the_output_is_named_where_it_is_used() -> None:
    case = CASES["hf_gpt2"]()
    case.model.config.use_cache = True
    pipe = compiled(case, microbatches=4)
    output = pipe.eval(**case.batch.kwargs).output
    assert torch.equal(output.logits, pipe.eval(**case.batch.kwargs, use_cache=False).output.logits)
    assert not hasattr(output.past_key_values, "dtype")
    with pytest.raises(graphpp.CaptureError, match=r"output holds a DynamicCache.*use_cache=False"):
        output.past_key_values.get_seq_length()


class Hidden:
    """An output that torch's pytree does not know."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Hides(nn.Linear):
    def forward(self, x: Tensor) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(x))


def test_an_output_without_a_tensor_that_torch_sees_is_refused() -> None:
    pipe = graphpp.compile(Hides(4, 4), lambda output, target: output.logits.sum() + target.sum(), microbatches=1)
    with pytest.raises(graphpp.CaptureError, match=r"output holds a Hidden, .*register_dataclass"):
        pipe.eval(torch.zeros(2, 4))


def evaluates_a_cache(rank: int) -> tuple[Tensor, Tensor | None]:
    torch.set_num_threads(1)
    case = CASES["hf_gpt2_labels"]()
    case.model.config.use_cache = True  # as by default
    pipe = compiled(case, split=cuts("hf_gpt2_labels", 2), schedule="1F1B", microbatches=4)
    trained, result = pipe.step(**case.batch.kwargs), pipe.eval(**case.batch.kwargs)
    assert trained.losses.shape == result.losses.shape
    if rank == 0:
        return result.losses, None
    for use in (lambda cache: cache.get_seq_length(), lambda cache: cache[0], len, list):
        with pytest.raises(graphpp.CaptureError, match=r"output holds a DynamicCache.*use_cache=False"):
            use(result.output.past_key_values)
    return result.losses, result.output.logits


def test_a_cache_in_the_output_is_left_out_beside_a_loss() -> None:
    outputs, losses = expected(CASES["hf_gpt2_labels"](), 4)
    (found, _), (again, logits) = run_ranks(evaluates_a_cache, 2)
    assert torch.equal(found, losses) and torch.equal(again, losses)
    assert torch.equal(logits, torch.cat([output.logits for output in outputs]))


def evaluate_between_steps(rank: int) -> tuple[list[Tensor], dict[str, Tensor], list[bool]]:
    case = CASES["norms"]()
    case.model.layers[1].eval()
    flags = [module.training for module in case.model.modules()]
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=4)
    losses = []
    for seed in range(3):
        batch = CASES["norms"](seed).batch
        losses.append(step(pipe, batch).losses)
        grads = {fqn: p.grad.clone() for fqn, p in pipe.named_parameters()}
        tensors = {fqn: tensor.clone() for fqn, tensor in pipe.state_dict().items()}
        pipe.eval(*batch.args, target=batch.target)
        pipe.eval(*batch.args)
        assert all(torch.equal(p.grad, grads[fqn]) for fqn, p in pipe.named_parameters())
        assert all(torch.equal(tensor, tensors[fqn]) for fqn, tensor in pipe.state_dict().items())
    return losses, dict(pipe.named_buffers()), [m.training for m in case.model.modules()] == flags


def test_evaluation_leaves_the_training_alone() -> None:
    twin = CASES["norms"]()
    twin.model.layers[1].eval()
    reference = [
        torch.stack([model_loss(twin.model, twin.loss, part) for part in CASES["norms"](seed).batch.microbatches(4)])
        for seed in range(3)
    ]
    buffers = dict(twin.model.named_buffers())
    for losses, found, same_flags in run_ranks(evaluate_between_steps, 2):
        assert same_flags
        assert all(torch.equal(a, b) for a, b in zip(losses, reference, strict=True))
        assert all(torch.equal(buffer, buffers[fqn]) for fqn, buffer in found.items())


def test_evaluation_sees_what_training_changed() -> None:
    case = CASES["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=4)
    pipe.eval(*case.batch.args)  # captured before the first step
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    step(pipe, case.batch)
    optimizer.step()
    outputs, _ = expected(Case(deepcopy(case.model), case.loss, case.batch), 4)
    assert torch.equal(pipe.eval(*case.batch.args).output, torch.cat(outputs))


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_with_dropout_evaluate_without_it(ranks: int) -> None:
    results = [dropout(0)] if ranks == 1 else run_ranks(dropout, 2)
    assert results == [True] * ranks


def dropout(rank: int) -> bool:
    case = CASES["plain"]()
    case.model.layers[1] = torch.nn.Sequential(case.model.layers[1], torch.nn.Dropout(0.5))
    outputs, _ = expected(case, 4)
    case.model.train()
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=4)
    found = pipe.eval(*case.batch.args).output
    return found is None or torch.equal(found, torch.cat(outputs))


class Wandering(Plain):
    """In eval mode the last layer reads a parameter that the first one trains."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y + self.layers[0].bias.sum()


def evaluate_elsewhere(rank: int) -> str:
    case = CASES["plain"]()
    pipe = graphpp.compile(Wandering(), case.loss, split=CUTS[2], schedule="1F1B", microbatches=4)
    step(pipe, case.batch)
    with pytest.raises(graphpp.GraphPPError) as caught:
        pipe.eval(*case.batch.args)
    return str(caught.value)


def test_a_parameter_is_not_read_where_nobody_updates_it() -> None:
    for text in run_ranks(evaluate_elsewhere, 2):
        assert "layers.0.bias is kept on rank 0" in text
        assert "stage 1 on rank 1 reads it, where it is never updated" in text
    alone = graphpp.compile(Wandering(), CASES["plain"]().loss, split=CUTS[2], microbatches=4)
    step(alone, CASES["plain"]().batch)
    assert alone.eval(*CASES["plain"]().batch.args).output is not None


def test_a_stage_may_start_at_a_module_that_evaluation_leaves_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(8, 8)
    pipe = graphpp.compile(model, nn.functional.mse_loss, split=["1", "4"], schedule="1F1B", microbatches=4)
    pipe.step(x, target=x)
    out = pipe.eval(x)
    model.eval()
    assert torch.equal(out.output, torch.cat([model(part) for part in x.chunk(4)]))


def outputs_of_each(rank: int) -> list[Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parts = [graphpp.Microbatch((torch.ones(rows, 4),), target=torch.zeros(rows, 4)) for rows in (1, 3)]
    memory = graphpp.Memory(outputs=True)
    pipe = graphpp.compile(model, nn.functional.mse_loss, split=["2"], memory=memory, example=parts[0], microbatches=2)
    with pytest.raises(graphpp.GraphPPError, match="output: take 'last' or 'all' or 'each'"):
        pipe.step_microbatches(parts, output="first")  # type: ignore[arg-type]
    whole = pipe.step_microbatches(parts, output="all").output
    found = pipe.step_microbatches(parts, output="each").output
    assert torch.equal(torch.cat(found), whole)
    evaluated = pipe.eval_microbatches(parts, output="each").output
    assert [*map(torch.equal, found, evaluated)] == [True, True]
    return [each.tolist() for each in found]


def test_every_rank_gets_the_output_of_each_microbatch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    expected = [model(torch.ones(rows, 4)).tolist() for rows in (1, 3)]
    assert run_ranks(outputs_of_each, 2) == [expected, expected]
    pipe = graphpp.compile(model, nn.functional.mse_loss, microbatches=1)
    with pytest.raises(graphpp.GraphPPError, match=r"steps keep no outputs: give memory=graphpp.Memory\(outputs=True\)"):
        pipe.step_microbatches([graphpp.Microbatch((torch.ones(1, 4),), target=torch.zeros(1, 4))], output="each")
