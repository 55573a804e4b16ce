"""Where stages start: every form of `split=`, every refusal, and the arithmetic of equal stages."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import SupportsIndex

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.errors import SplitError
from graphpp.options.split import ModuleCall, Split, Splitter
from graphpp.planner.layers import module_calls, repeated_layers
from graphpp.planner.resolve_split import resolve, split_points


def forward(*parts: str) -> list[ModuleCall]:
    """The calls of a forward of `fqn` or `fqn:operations` in order; `(parent` opens a parent's call, `)` closes it."""
    calls: list[ModuleCall] = []
    opened: list[int] = []
    position = 0
    for part in parts:
        if part == ")":
            at = opened.pop()
            calls[at] = ModuleCall(calls[at].fqn, calls[at].position, position)
        elif part.startswith("("):
            opened.append(len(calls))
            calls.append(ModuleCall(part[1:], position, position))
        else:
            name, _, count = part.partition(":")
            calls.append(ModuleCall(name, position, position + int(count or 1)))
            position = calls[-1].end
    return calls


def block(name: str) -> list[str]:
    """A layer of 10 operations: a norm, attention and a feed-forward part."""
    return [f"({name}", f"{name}.norm", f"{name}.attn:5", f"{name}.ffn:4", ")"]


def blocks(name: str, count: int) -> list[str]:
    """`count` layers in a row; `name` has `{}` for the number."""
    return [part for k in range(count) for part in block(name.format(k))]


TORCHTITAN = forward("tok_embeddings", *blocks("layers.{}", 8), "norm", "output")
LLAMA = forward("(", "(model", "model.embed_tokens", *blocks("model.layers.{}", 8), "model.norm", ")", "lm_head", ")")
T5 = forward("shared", *blocks("encoder.block.{}", 4), "shared@1", *blocks("decoder.block.{}", 4), "lm_head")
ALBERT = forward(
    "(albert",
    *(f"embeddings.{kind}" for kind in ("word", "position", "norm")),
    *block("albert.layer"),
    *(part for k in range(1, 6) for part in ["(albert.layer@" + str(k), f"albert.layer.ffn@{k}:9", ")"]),
    ")",
    "head",
)


def where(calls: list[ModuleCall], name: str) -> int:
    """The first operation of a call."""
    return next(call.position for call in calls if call.fqn == name)


def cut(calls: list[ModuleCall], *names: str) -> tuple[int, ...]:
    """The starts of stages that begin at these calls."""
    return (0, *(where(calls, name) for name in names))


class TestSplitPoints:
    @pytest.mark.parametrize(
        ("layers", "stages", "weights", "first"),
        [
            (8, 1, (1, 1), []),
            (8, 2, (1, 1), [4]),
            (7, 2, (1, 1), [4]),  # loads 5 and 4: the last stage is the lighter
            (6, 3, (1, 1), [2, 5]),  # loads 3, 3, 2
            (7, 3, (1, 1), [2, 5]),
            (8, 4, (1, 1), [1, 4, 7]),  # loads 2, 3, 3, 2
            (32, 4, (1, 1), [7, 16, 25]),  # loads 8, 9, 9, 8
            (10, 4, (0, 0), [2, 5, 8]),
            (8, 3, (2, 1), [2, 6]),
            (5, 3, (9, 9), [1, 4]),  # heavier than a share: one layer each
            (4, 4, (3, 3), [1, 2, 3]),
            (126, 16, (1, 1), [7, *range(15, 120, 8)]),
        ],
    )
    def test_examples(self, layers: int, stages: int, weights: tuple[int, int], first: list[int]) -> None:
        assert split_points(layers, stages, *weights) == [f"layers.{k}" for k in first]

    @given(st.integers(1, 150), st.data())
    def test_balance(self, layers: int, data: st.DataObject) -> None:
        stages = data.draw(st.integers(1, layers))
        before, after = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
        points = split_points(layers, stages, before, after)
        edges = [0, *(int(name.removeprefix("layers.")) for name in points), layers]
        counts = [end - start for start, end in pairwise(edges)]
        assert len(counts) == stages
        assert sum(counts) == layers
        assert min(counts) >= 1
        middle = counts[1:-1]
        if middle:
            assert max(middle) - min(middle) <= 1
            assert sorted(middle, reverse=True) == middle  # what does not divide goes to the first of them
            assert counts[0] == 1 or counts[0] + before <= max(middle)
            assert counts[-1] == 1 or counts[-1] + after <= min(middle)
        if stages > 1 and counts[0] > 1 and counts[-1] > 1:
            assert 0 <= counts[0] + before - counts[-1] - after <= 1

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ((4, 0), "num_stages: take a positive integer up to 2**20, got 0"),
            ((4, 5), "4 layers cannot fill 5 stages: at most 4 fit"),
            ((1, 2), "1 layer cannot fill 2 stages: at most 1 fit"),
            ((4, 2, -1), "must be 0 or more"),
            ((4, 2, 1, float("nan")), "must be 0 or more"),
        ],
    )
    def test_errors(self, arguments: tuple[int, int], says: str) -> None:
        with pytest.raises(SplitError, match=re.escape(says)):
            split_points(*arguments)

    def test_a_name_without_number_is_refused(self) -> None:
        with pytest.raises(SplitError, match=r"layer='layers\.'"):
            split_points(4, 2, layer="layers.")


class TestNames:
    def test_a_stage_starts_before_the_call(self) -> None:
        assert resolve(["layers.2", "layers.5.ffn", "norm"], TORCHTITAN) == (0, 21, 57, 81)

    def test_no_names_make_one_stage(self) -> None:
        assert resolve([], TORCHTITAN, 1) == (0,)

    def test_later_calls_have_a_number(self) -> None:
        split = ["albert.layer@2", "albert.layer@4"]
        assert resolve(split, ALBERT) == cut(ALBERT, *split)

    def test_any_sequence(self) -> None:
        expected = cut(TORCHTITAN, "layers.2", "norm")
        assert resolve(("layers.2", "norm"), TORCHTITAN) == expected
        assert resolve([np.str_("layers.2"), "norm"], TORCHTITAN) == expected
        assert resolve((), TORCHTITAN) == (0,)

    def test_blanks_around_a_name_mean_nothing(self) -> None:
        assert resolve([" layers.2", "norm\t\n"], TORCHTITAN) == cut(TORCHTITAN, "layers.2", "norm")
        assert resolve([["layers.1 "], [" layers.4"]], TORCHTITAN) == cut(TORCHTITAN, "layers.4")

    def test_a_call_without_operations_is_a_place_like_any_other(self) -> None:
        calls = sorted([*TORCHTITAN, ModuleCall("identity", 21, 21)], key=lambda call: call.position)
        assert resolve(["identity"], calls) == resolve(["layers.2"], calls) == cut(TORCHTITAN, "layers.2")
        assert resolve(4, calls) == resolve(4, TORCHTITAN)


class TestLists:
    def test_torchtitan(self) -> None:
        stages = [
            ["tok_embeddings", "layers.0", "layers.1"],
            ["layers.2", "layers.3", "layers.4"],
            ["layers.5", "layers.6", "layers.7", "norm", "output"],
        ]
        assert resolve(stages, TORCHTITAN, 3) == cut(TORCHTITAN, "layers.2", "layers.5")
        assert resolve(tuple(map(tuple, map(reversed, stages))), TORCHTITAN) == resolve(stages, TORCHTITAN)

    def test_modules_that_are_not_listed_go_where_execution_puts_them(self) -> None:
        assert resolve([["layers.1"], ["layers.4"]], TORCHTITAN) == cut(TORCHTITAN, "layers.4")

    def test_a_module_and_one_inside_it(self) -> None:
        """A parent may be cut by a child that a later stage lists, and be listed beside its own children."""
        assert resolve([["layers.2"], ["layers.2.ffn"]], TORCHTITAN) == cut(TORCHTITAN, "layers.2.ffn")
        assert resolve([["layers.2"], ["layers.4.norm", "layers.4"]], TORCHTITAN) == cut(TORCHTITAN, "layers.4")

    def test_empty_stages(self) -> None:
        assert resolve([["tok_embeddings"], [], ["layers.4"]], TORCHTITAN) == (0, 41, 41)
        assert resolve([["tok_embeddings"], [], [], ["layers.4"], ["norm"]], TORCHTITAN) == (0, 41, 41, 41, 81)
        assert resolve([[], ["layers.2"], ["norm"]], TORCHTITAN) == (0, 0, 81)

    @given(st.data())
    def test_any_grouping_in_order(self, data: st.DataObject) -> None:
        names = ["tok_embeddings", *(f"layers.{k}" for k in range(8)), "norm", "output"]
        sizes = data.draw(st.lists(st.integers(0, 4), max_size=6).filter(lambda sizes: sum(sizes) < len(names)))
        ends = [*accumulate(sizes), len(names)]
        stages = [names[start:end] for start, end in pairwise([0, *ends])]
        starts = resolve(stages, TORCHTITAN, len(stages))
        assert starts == (0, *(where(TORCHTITAN, names[end]) for end in ends[:-1]))


class TestNumbers:
    @pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
    def test_equal_layers(self, stages: int) -> None:
        first = {1: [], 2: [4], 3: [3, 6], 4: [2, 4, 6], 8: range(1, 8)}[stages]
        expected = cut(TORCHTITAN, *(f"layers.{k}" for k in first))
        assert resolve(stages, TORCHTITAN) == expected
        assert resolve(None, TORCHTITAN, stages) == expected
        assert resolve(stages, LLAMA, stages) == cut(LLAMA, *(f"model.layers.{k}" for k in first))

    @pytest.mark.parametrize(
        ("parts", "layers"),
        [
            (["0:2", *blocks("1.{}", 3), "2:2"], [f"1.{k}" for k in range(3)]),  # nested Sequential
            (["0", "1", "2", "3"], ["0", "1", "2", "3"]),  # Sequential at the root
            (["a.0", "a.1", "b.0", "b.1"], ["a.0", "a.1", "b.0", "b.1"]),  # containers one after the other
            (["pre.0", "pre.1", *blocks("layers.{}", 4), "head.0", "head.1"], [f"layers.{k}" for k in range(4)]),
            (  # containers in turn: the wider one
                [f"{kind}.{k}{size}" for k in range(3) for kind, size in (("attn", ":5"), ("ffn", ":4"))],
                [f"attn.{k}" for k in range(3)],
            ),
            (  # experts are inside layers
                [p for k in range(3) for p in (f"(layers.{k}", *(f"layers.{k}.experts.{e}:3" for e in range(8)), ")")],
                [f"layers.{k}" for k in range(3)],
            ),
            (
                ["(tower", *blocks("tower.l.{}", 2), ")", "(tower@1", "tower.l.0@1:10", "tower.l.1@1:10", ")"],
                ["tower.l.0", "tower.l.1", "tower.l.0@1", "tower.l.1@1"],
            ),  # both runs of a shared tower
            (["emb:5", "a:9", "b:9", "head.0", "head.1"], []),  # too small to be the layers
            (  # built alike, behind a loop of code or of a cell
                ["loop:200", *(p for k in range(3) for p in (f"(b.{k}", f"b.{k}.up:2", ")"))],
                [f"b.{k}" for k in range(3)],
            ),
            (
                ["cell:9", *(f"cell@{k}:9" for k in (1, 2)), *(p for k in range(3) for p in (f"(b.{k}", f"b.{k}.up:2", ")"))],
                [f"b.{k}" for k in range(3)],
            ),
            (["emb", "block", "head"], []),
            ([], []),
        ],
    )
    def test_what_the_layers_are(self, parts: list[str], layers: list[str]) -> None:
        assert [call.fqn for call in repeated_layers(forward(*parts))] == layers

    def test_encoder_and_decoder_are_joined(self) -> None:
        assert resolve(4, T5) == cut(T5, "encoder.block.2", "decoder.block.0", "decoder.block.2")

    @pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, torch.tensor])
    def test_what_stands_for_an_int(self, kind: Callable[[int], SupportsIndex]) -> None:
        assert resolve(kind(4), TORCHTITAN, 4) == resolve(4, TORCHTITAN)

    def test_one_stage_needs_no_layers(self) -> None:
        assert resolve(1, []) == resolve(None, forward("a", "b"), 1) == (0,)


class Halves:
    """A splitter of one's own."""

    def starts(self, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
        return (0, calls[-1].end // 2)


class Given:
    """A splitter that gives what it is told to."""

    def __init__(self, *starts: int) -> None:
        self.given = starts

    def starts(self, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
        return self.given


def test_any_splitter() -> None:
    assert isinstance(Halves(), Splitter)
    assert resolve(Halves(), TORCHTITAN, 2) == (0, 41)
    assert resolve(Given(0, 0, 41, 41, 83), TORCHTITAN) == (0, 0, 41, 41, 83)  # what follows the last call is the loss


@pytest.mark.parametrize("starts", [(), (1,), (0, 41, 40), (0, 84), (-1, 0)])
def test_what_a_splitter_finds_is_held_to_the_contract(starts: tuple[int, ...]) -> None:
    with pytest.raises(SplitError, match=re.escape(f"Given.starts gave {starts}: it must give the first operation")):
        resolve(Given(*starts), TORCHTITAN)


KNOWN = ["", "tok_embeddings", "layers", "layers.0", "norm", "output", "output.bias_head", "aux_head", "identity"]
T = TORCHTITAN


@pytest.mark.parametrize(
    ("split", "calls", "stages", "says"),
    [
        (["layer.3"], T, None, "no module 'layer.3'; nearest: 'layers.3'"),
        (["aux_head"], T, None, "'aux_head' exists, but the forward never calls it"),
        (["layers"], T, None, "'layers' is never called itself; modules inside it are: layers.0, layers.0.norm"),
        (["identity"], T, None, "(like nn.Identity, or nn.Dropout in evaluation): leave it out, or name a module that runs"),
        (["model.layers.3"], T, None, "no module 'model.layers.3'; nearest: 'layers.3'"),
        (["layers.3"], LLAMA, None, "no module 'layers.3'; nearest: 'model.layers.3'"),
        (["zzz"], T, None, "; it calls: tok_embeddings, layers.0, layers.0.norm, "),
        ([""], T, None, "a name is empty, which would be the whole model: name a module inside it, or leave it out"),
        ([" layers.4 ", "layers.4"], T, None, "'layers.4' is listed twice"),
        (["layers.3@1"], T, None, "'layers.3' is called 1 time: layers.3"),
        (["albert.layer@7"], ALBERT, None, "is called 6 times: albert.layer, albert.layer@1,"),
        (["layers.4", "layers.2"], T, None, "out of execution order: 'layers.4', listed for stage 1, runs after"),
        ([["layers.4"], ["layers.5", "layers.4"]], T, None, "'layers.4' is listed twice"),
        (["tok_embeddings"], T, None, "stage 0 would be empty: no operation runs between the start and tok_embeddings"),
        (["layers.1", "layers.1.norm"], T, None, "stage 1 would be empty: no operation runs between layers.1 and"),
        ([["layers.1.ffn"], ["layers.1"]], T, None, "order: 'layers.1.ffn', listed for stage 0, runs after 'layers.1'"),
        ([["layers.0", "layers.1"], ["layers.1.norm"]], T, None, "'layers.1.norm': list both for one stage"),
        ([["layers.0"], ["layers.0.norm"], [], ["norm"]], T, None, "'layers.0', listed for stage 0, starts together with"),
        ([["layers.0"], []], T, None, "stage 1, the last, cannot be empty: the loss is computed there"),
        (["layers.4"], T, 4, "split= makes 2 stages, schedule and ranks ask for 4"),
        (2, T, 4, "split= makes 2 stages, schedule and ranks ask for 4"),
        (9, T, None, "9 stages of equal numbers of layers do not fit: the model has 8 repeated layers: layers.0"),
        (None, T, 16, "Ask for at most 8, or list the FQNs"),
        (2, forward("a", "b"), None, "the model has 0 repeated layers. Ask for at most 1"),
        (0, T, None, "give a number of 1 or more"),
        (True, T, None, "give a number of 1 or more"),
        (np.int64(0), T, None, "split=0 does not say how many stages there are: give a number of 1 or more"),
        (np.True_, T, None, "split= takes an int, a list of FQNs, a list of lists of FQNs, or a Layout, not bool"),
        ((name for name in ["layers.1"]), T, None, "not generator"),
        ([np.int64(4)], T, None, "mixes forms"),
        (None, T, None, "does not say how many stages"),
        ("Et|L", T, None, "write graphpp.Layout('Et|L'), ['Et|L'] if it is an FQN, or "),
        (["layers.1", ["layers.2"]], T, None, "mixes forms"),
        ([1, 2], T, None, "mixes forms"),
        (2.0, T, None, "not float"),
    ],
)
def test_errors(split: Split, calls: list[ModuleCall], stages: int | None, says: str) -> None:
    before = list(calls)
    with pytest.raises(SplitError, match=re.escape(says)):
        resolve(split, calls, stages, KNOWN)
    assert calls == before


NAMES = st.one_of(
    st.sampled_from([*(call.fqn for call in TORCHTITAN), *KNOWN, " layers.2 ", "layers.2@0", "model.layers.2"]),
    st.text(max_size=8),
)
LISTS = st.lists(st.one_of(NAMES, st.lists(NAMES, max_size=4), st.integers(), st.none()), max_size=5)


@given(st.one_of(st.integers(-2, 12), st.integers(-2, 12).map(np.int64), LISTS, LISTS.map(tuple), st.floats()))
def test_whatever_is_given_starts_rise_or_it_is_refused(split: Split) -> None:
    try:
        starts = resolve(split, TORCHTITAN, known=KNOWN)
    except SplitError:
        return
    assert starts[0] == 0
    assert list(starts) == sorted(starts)
    assert starts[-1] < TORCHTITAN[-1].end


class Odd(nn.Module):
    """Modules that do nothing, never run, run twice, or run under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.identity = nn.Identity()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.nothing = nn.Sequential(nn.Identity(), nn.Identity())
        self.unused = nn.Linear(8, 8)
        self.second = self.layers[1]
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.identity(self.embed(x)))
        x = self.nothing(self.layers[2](self.layers[2](self.second(x))))
        return self.head(x)  # type: ignore[no-any-return]


@cache
def odd(training: bool) -> tuple[list[ModuleCall], list[str]]:
    """The calls of `Odd`'s forward, and the names of its modules."""
    model, example = Odd().train(training), Microbatch((torch.zeros(2, 4),), target=torch.zeros(2, 2))
    captured = capture(model, nn.functional.mse_loss, example, torch.device("cpu"), training=training)
    return module_calls(captured.joint), [name for name, _ in model.named_modules()]


@pytest.mark.parametrize("training", [True, False])
class TestCaptured:
    """The same names start a stage in training and in evaluation, so parameters stand on the same ranks."""

    @pytest.mark.parametrize(
        ("split", "first"),
        [
            (["layers.0.1", "layers.2", "layers.2@1", "head"], ["layers.0.1", "layers.2", "layers.2@1", "head"]),
            (["second"], ["second"]),
            ([["embed", "layers.0"], ["head", "layers.2@1"]], ["layers.2@1"]),
            ([[], ["layers.2"], ["head"]], ["embed", "head"]),
            ([], []),
        ],
    )
    def test_works(self, training: bool, split: Split, first: list[str]) -> None:
        calls, known = odd(training)
        assert resolve(split, calls, None, known) == cut(calls, *first)

    @pytest.mark.parametrize(
        ("split", "says"),
        [
            (["identity"], "'identity' exists, but the forward never calls it (under this name), or it does nothing"),
            (["nothing"], "leave it out, or name a module that runs"),
            (["layers.1"], "'layers.1' exists, but the forward never calls it (under this name)"),
            (["layers"], "'layers' is never called itself; modules inside it are: layers.0, layers.0.0"),
            (["layers.2@2"], "'layers.2' is called 2 times: layers.2, layers.2@1"),
            (["embed"], "no operation runs between the start and embed; do not cut between them"),
        ],
    )
    def test_is_refused(self, training: bool, split: Split, says: str) -> None:
        calls, known = odd(training)
        with pytest.raises(SplitError, match=re.escape(says)):
            resolve(split, calls, None, known)
