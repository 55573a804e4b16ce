"""Ranks with different arguments, ranks that fail, ranks that die: every rank ends with an error that names rank and reason.

No rank hangs: each test ends in a fraction of the group's timeout. A rank that is late waits until the others have given up.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import GraphPPError, Microbatch, MismatchError, RankFailure
from graphpp._torch.distributed import default_store
from graphpp.parallel import lost_rank
from graphpp.parallel.agreement import Round
from graphpp.parallel.facts import Facts
from tests import internals
from tests.distributed import WorkerDied, rank_outcomes, run_ranks
from tests.special_models import CUTS, Plain
from tests.training import CASES, compiled, local_grads, step

STEP = 3.0  # seconds that a rank waits for a late one in a step
SOON = 200.0  # seconds, far below the timeout of the ranks' process group
TWO = {"split": CUTS[2], "schedule": "1F1B", "microbatches": 4}
BATCH = CASES["plain"]().batch
(X,), Y = BATCH.args, BATCH.target


def message(fn: Callable[[], Any]) -> str:
    """The error of `fn`, as `Type: text`."""
    try:
        fn()
    except GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Relu(Plain):
    """The parameters of `Plain`, with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Wide(Plain):
    """`Plain` with one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(8, 8))


def other_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def first_step(
    model: nn.Module | None = None,
    loss: Any = F.cross_entropy,
    rows: int = 24,
    x: Tensor = X,
    weight: Any = None,
    **options: Any,
) -> None:
    """One step on a new pipeline; a test changes any one of its arguments."""
    model = Plain() if model is None else model
    before = [flag.training for flag in model.modules()]
    try:
        graphpp.compile(model, loss, **(TWO | options)).step(x[:rows], target=Y[:rows], loss_weight=weight)
    except GraphPPError:
        assert all(parameter.grad is None for parameter in model.parameters())
        assert [flag.training for flag in model.modules()] == before
        raise


def count(number: int) -> None:
    """A step of this many microbatches."""
    pipe = graphpp.compile(Plain(), F.cross_entropy, split=CUTS[2], schedule="1F1B")
    pipe.step_microbatches([Microbatch((X[:4],), {}, Y[:4])] * number)


def no_target() -> None:
    graphpp.compile(Plain(), F.cross_entropy, **TWO).step(X)


def evaluates() -> None:
    graphpp.compile(Plain(), F.cross_entropy, **TWO).eval(X)


def half_frozen() -> nn.Module:
    model = Plain()
    model.layers[1].requires_grad_(False)
    return model


def half_evaluating() -> nn.Module:
    model = Plain()
    model.layers[1].eval()
    return model


# The call of rank 1 while the others call `first_step()`, and the error that every rank must raise.
DIFFERENT: dict[str, tuple[Callable[[], None], str]] = {
    "parameters": (lambda: first_step(Wide()), "rank 1 differs in the model: it has layers.4.weight"),
    "dtype": (lambda: first_step(Plain().double()), r"rank 1 differs in the model: it has .* float64"),
    "frozen": (lambda: first_step(half_frozen()), "rank 1 differs in the model: it has layers.1.weight .* frozen"),
    "code": (lambda: first_step(Relu()), "rank 1 differs in the code of the model or the loss: it has .*relu.*tanh"),
    "loss": (lambda: first_step(loss=other_loss), "rank 1 differs in the code of the model or the loss"),
    "flags": (lambda: first_step(half_evaluating()), "differs in training flags: it has layers.1.training=False"),
    "split": (lambda: first_step(split=["layers.1"]), r"rank 1 differs in split=: it has \['layers.1'\], the others"),
    "schedule": (lambda: first_step(schedule="GPipe"), "rank 1 differs in schedule=: it has GPipe, .* 1F1B"),
    "microbatches": (lambda: first_step(microbatches=3), "rank 1 differs in microbatches.count=: it has 3, .* have 4"),
    "reduction": (lambda: first_step(gradients="sum"), "rank 1 differs in gradients.reduction=: it has sum"),
    "example": (
        lambda: first_step(example=Microbatch((X[:6],), {}, Y[:6])),
        "rank 1 differs in example=: it has given, the others have none",
    ),
    "uneven": (lambda: first_step(rows=23), r"differs in the microbatch: it has microbatches of 2 shapes: 0, 1, 2 \| 3, the"),
    "weights": (
        lambda: first_step(weight=[1, 2, 3, 4]),
        r"rank 1 differs in the weights of the loss: it has weights \(1.0, 2.0, 3.0, 4.0\), the others have no weights",
    ),
    "shape": (lambda: first_step(rows=12), r"rank 1 differs in the microbatch: it has args\[0\]: \[3, 8\].*\[6, 8\]"),
    "strides": (lambda: first_step(x=X.t().contiguous().t()), r"rank 1 differs in the microbatch: .*strides"),
    "call": (evaluates, "rank 1 differs in the call: it has eval, the others have step"),
    "bad split": (lambda: first_step(split=["layers.9"]), r"rank 1 differs in split=: it has \['layers.9'\]"),
    "bad schedule": (lambda: first_step(schedule="1F2B"), "rank 1: ScheduleError: schedule: unknown schedule '1F2B'"),
    "few rows": (lambda: first_step(rows=3), "rank 1 differs in the number of microbatches: it has 3, the others have 4"),
    "bad batch": (lambda: first_step(rows=0), "rank 1: BatchError: the batch is empty"),
    "no target": (no_target, "rank 1 differs in the microbatch: it has target: None"),
    "bad loss": (lambda: first_step(loss=lambda y, t: y), r"rank 1: CaptureError: the loss must be a scalar"),
}

# If the call of rank 1 fails by itself, rank 1 raises its own error.
OWN_ERROR = {"bad schedule": "Schedule", "bad batch": "Batch", "bad loss": "Capture"}


def differ(rank: int, odd: int) -> list[tuple[str, float]]:
    found = []
    for other, _ in DIFFERENT.values():
        began = time.monotonic()
        text = message(other if rank == odd else first_step)
        found.append((text, time.monotonic() - began))
    return found


def test_every_rank_says_who_differs_and_in_what() -> None:
    one, odd = run_ranks(differ, 2, 1)
    for (name, (_, words)), (text, seconds), (own, _) in zip(DIFFERENT.items(), one, odd, strict=True):
        assert text.startswith("MismatchError"), name
        assert_matches(words, text)
        assert seconds < SOON
        if name in OWN_ERROR:
            assert own.startswith(f"{OWN_ERROR[name]}Error"), name
        else:
            assert own == text


def assert_matches(words: str, text: str) -> None:
    with pytest.raises(MismatchError, match=words):
        raise MismatchError(text)


def outvoted(rank: int) -> str:
    return message(lambda: count(3 if rank == 0 else 4))


def test_the_majority_counts() -> None:
    texts = run_ranks(outvoted, 3)
    assert len(set(texts)) == 1
    assert "rank 0 differs in the number of microbatches: it has 3, the others have 4" in texts[0]


class Sloped(Plain):
    slope = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.slope


def later(rank: int) -> tuple[list[str], bool]:
    """A good step, calls in which rank 1 differs, and one more good step."""
    case = CASES["plain"]()._replace(model=Sloped())
    pipe = compiled(case, **TWO)
    step(pipe, case.batch)
    grads = local_grads(pipe)
    rows = 24 if rank == 0 else 12
    texts = [
        message(lambda: pipe.step(X[:rows], target=Y[:rows])),
        message(lambda: pipe.step(X, target=Y if rank == 0 else None)),
        message(lambda: pipe.step(X, target=Y) if rank == 0 else pipe.eval(X)),
    ]
    if rank == 1:
        case.model.slope = 1.5
    texts.append(message(lambda: step(pipe, case.batch)))
    if rank == 1:
        del case.model.slope
    unchanged = all(torch.equal(p.grad, grads[fqn]) for fqn, p in pipe.named_parameters())
    step(pipe, case.batch)
    doubled = all(torch.allclose(p.grad, 2 * grads[fqn]) for fqn, p in pipe.named_parameters())
    return texts, unchanged and doubled


def test_a_difference_in_a_later_step_leaves_the_pipeline_usable() -> None:
    for texts, fine in run_ranks(later, 2):
        assert "rank 1 differs in the microbatch" in texts[0]
        assert "rank 1 differs in the microbatch" in texts[1]
        assert "rank 1 differs in the call" in texts[2]
        assert "rank 1 differs in what it has kept for this call: it has nothing yet" in texts[3]
        assert fine


def unequal_copies(rank: int) -> str:
    case = CASES["tied"]()
    with torch.no_grad():
        case.model.embed.weight[0, 0] += rank
    return message(lambda: step(compiled(case, **TWO), case.batch))


def test_copies_of_a_tied_parameter_must_start_equal() -> None:
    for text in run_ranks(unequal_copies, 2):
        assert "rank 1 differs in the values of embed.weight" in text


def bad_split_alone(rank: int) -> str:
    """A split that is an object of the user is not compared between ranks: its fault shows when it is called."""

    class Splitter:
        def starts(self, calls: Any) -> tuple[int, ...]:
            if rank == 1:
                raise graphpp.SplitError("this rank cannot")
            return (0, calls[-1].position)

    return message(lambda: first_step(split=Splitter()))


def test_a_rank_that_fails_alone_tells_the_others() -> None:
    good, bad = run_ranks(bad_split_alone, 2)
    assert bad == "SplitError: this rank cannot"
    assert good.startswith("MismatchError") and "rank 1: SplitError: this rank cannot" in good


class Asked:
    """A group that notes the facts of each comparison, and differs if so asked."""

    def __init__(self, *, differs: bool = False) -> None:
        self.differs, self.facts = differs, list[Any]()

    def compare(self, facts: Facts) -> bool:
        self.facts.append(facts.all_lines)
        if self.differs:
            raise MismatchError("the ranks do not agree")
        return facts.lacking


@pytest.mark.parametrize("differs", [False, True])
def test_each_group_of_a_round_learns_of_a_failure_once(differs: bool) -> None:
    first, second, failure = Asked(differs=True), Asked(), {"error": ["MismatchError: the ranks do not agree"]}
    with pytest.raises(MismatchError if differs else ValueError), Round(first, second) as r:  # type: ignore[arg-type]
        r.compare(Facts({"split=": ["2"]}))
        if not differs:
            failure = {"error": ["ValueError: this rank cannot"]}
            raise ValueError("this rank cannot")
    assert first.facts == [{"split=": ["2"]} if differs else failure]
    assert second.facts == [failure]


# --------------------------------------------------------------------------------------------- in the middle of a step

FUSES: dict[int, tuple[int, Callable[[], None]]] = {}  # layer -> (calls until it blows, its action)


@torch.library.custom_op("graphpp_tests::fuse", mutates_args=())
def fuse(x: Tensor, layer: int) -> Tensor:
    """The identity, in which a test can make a rank fail."""
    if layer in FUSES:
        left, action = FUSES[layer]
        FUSES[layer] = (left - 1, action)
        if not left:
            action()
    return x.clone()


fuse.register_fake(lambda x, layer: torch.empty_like(x))
fuse.register_autograd(lambda ctx, grad: (grad, None))


class Fused(Plain):
    """`Plain` with a fuse in every layer."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(fuse(layer(x), index))
        return self.head(x)


def fails() -> None:
    raise ValueError("the fuse blew")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_late() -> None:
    """Wait until a rank has said that its step failed."""
    default_store().wait(["given up"], timedelta(seconds=SOON))


def gave_up() -> None:
    default_store().set("given up", "")


def no_store() -> None:
    raise RuntimeError("the store went down with its host")


def blow(
    rank: int, victim: int, action: Callable[[], None], lose_store: bool = False, timeout: float | None = None
) -> tuple[str, float]:
    """Two good steps, and one in which the victim's stage does `action` after some of its forwards; the error and its time."""
    group = dist.new_group(timeout=timedelta(seconds=timeout)) if timeout else None
    split = CUTS[4][: dist.get_world_size() - 1]
    pipe = graphpp.compile(Fused(), F.cross_entropy, mesh=group, split=split, schedule="1F1B", microbatches=8)
    FUSES.clear()
    for _ in range(2):
        pipe.step(X, target=Y)
    FUSES[victim] = (3, action)
    began = time.monotonic()
    with patch.object(lost_rank, "default_store", no_store if lose_store else lost_rank.default_store):
        try:
            pipe.step(X, target=Y)
        except (RankFailure, ValueError) as error:
            gave_up()
            return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", 0.0


def test_a_rank_that_raises_in_a_step() -> None:
    for rank, (text, seconds) in enumerate(run_ranks(blow, 3, 1, fails)):
        if rank == 1:
            assert text == "ValueError: the fuse blew"
        else:
            assert text.startswith("RankFailure: rank 1 failed with ValueError: the fuse blew")
        assert seconds < SOON


@pytest.mark.parametrize(
    ("ranks", "victim", "lose_store"),
    [(4, 3, False), (3, 0, True)],
    ids=["the last of four", "the first of three, with the store"],
)
def test_a_rank_that_dies_in_a_step(ranks: int, victim: int, lose_store: bool) -> None:
    """All other ranks name the dead rank, its neighbours and the rest."""
    outcomes = rank_outcomes(blow, ranks, victim, dies, lose_store)
    for outcome in outcomes:
        if outcome.rank == victim:
            assert isinstance(outcome.error, WorkerDied)
            continue
        assert outcome.error is None
        text, seconds = outcome.value
        assert text.startswith("RankFailure: rank")
        assert str(victim) in text.partition(" lost")[0]
        assert "Restart all ranks" in text
        assert seconds < SOON


def loses_its_neighbour(rank: int) -> str:
    """On a mesh of 2 x 2 (pp, tp), a message of rank 1 to the second rank of its pipeline, which is rank 3, fails."""
    everyone, pipelines = dist.new_group([0, 1, 2, 3]), [dist.new_group([0, 2]), dist.new_group([1, 3])]
    board, found = lost_rank.FailureBoard((everyone, None), "of four", peers=pipelines[rank % 2]), ""
    if rank == 1:
        with pytest.raises(RankFailure) as caught, board.watching():
            raise lost_rank.PeerLost(1, "Connection closed by peer")
        found = str(caught.value)
    dist.barrier()
    return found


def test_a_lost_neighbour_is_named_by_its_rank_of_the_world() -> None:
    assert run_ranks(loses_its_neighbour, 4)[1].startswith("rank 3 is lost, and rank 1 cannot finish this step")


def test_a_rank_that_does_not_answer() -> None:
    """The error names the rank once the group's timeout is over."""
    waiting, slow = run_ranks(blow, 2, 1, is_late, False, STEP)
    assert waiting[0].startswith("RankFailure: rank 1 did not answer in time")
    assert slow[0].startswith("RankFailure")


def answers_late(rank: int, start: float) -> tuple[str, float]:
    """A first step whose capture takes longer than the timeout of steps, and a step for which the last rank is late."""
    torch.set_num_threads(1)
    FUSES.clear()  # of an earlier test in this process
    model = Fused()
    parallel = graphpp.Parallel(timeout=STEP, start_timeout=start)
    began = time.monotonic()

    def capture(*args: Any, **options: Any) -> Any:
        time.sleep(0 if rank else STEP + 1)
        return internals.capture(*args, **options)

    try:
        with internals.capturing_by(capture):
            pipe = graphpp.compile(model, F.cross_entropy, parallel=parallel, **TWO)
            pipe.step(X, target=Y)
        began = time.monotonic()
        if rank == 1:
            is_late()
        pipe.step(X, target=Y)
    except (RankFailure, GraphPPError) as error:
        gave_up()
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def test_timeouts_of_steps_and_of_the_start() -> None:
    waiting, slow = run_ranks(answers_late, 2, SOON)
    assert waiting[0].startswith("RankFailure: rank 1 did not answer in time") and STEP - 0.5 < waiting[1] < SOON
    assert "RankFailure: the other ranks have given up this step, because rank 1, this one, did not answer" in slow[0]
    started = rank_outcomes(answers_late, 2, 1.0)
    assert any("did not answer in time" in str(outcome.value or outcome.error) for outcome in started)


def leaves(rank: int) -> str:
    case = CASES["plain"]()
    pipe = compiled(case, **TWO)
    step(pipe, case.batch)
    if rank == 1:
        raise KeyboardInterrupt
    return message(lambda: step(pipe, case.batch))


def test_a_rank_that_leaves_between_steps() -> None:
    stays, left = rank_outcomes(leaves, 2)
    assert isinstance(left.error, KeyboardInterrupt)
    assert stays.value.startswith("RankFailure: rank 1 is lost")
