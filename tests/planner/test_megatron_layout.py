"""Megatron's layout strings: what they mean, where they cut a model, and how a fault is shown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpp.errors import SplitError
from graphpp.options.split import ModuleCall
from graphpp.planner.megatron_layout import Layout
from graphpp.planner.resolve_split import resolve

LAYER = 10  # operations in a layer


def forward(*names: str) -> list[ModuleCall]:
    """Calls one after the other: a layer (`...{a:b}`, numbers a to b-1) has ten operations, another module one."""
    calls: list[ModuleCall] = []
    for name in names:
        prefix, _, span = name.rstrip("}").partition("{")
        first, _, last = span.partition(":")
        for fqn in [f"{prefix}{k}" for k in range(int(first), int(last))] if span else [name]:
            position = max((call.end for call in calls), default=0)
            calls.append(ModuleCall(fqn, position, position + (LAYER if span else 1)))
            if span:
                calls.append(ModuleCall(f"{fqn}.layers.0", position, position + LAYER // 2))  # one inside another
    return sorted(calls, key=lambda call: call.position)


def after(*sizes: int) -> tuple[int, ...]:
    """Starts of stages behind an embedding of one operation, by the number of layers before each."""
    return (0, *(1 + LAYER * size for size in sizes))


LLAMA = forward("tok_embeddings", "layers.{0:6}", "norm", "output")
DEEPSEEK = forward("tok_embeddings", "layers.{0:4}", "mtp_layers.{0:1}", "norm", "output")


class TestStages:
    @pytest.mark.parametrize(
        ("text", "stages"),
        [
            ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
            ("E||t|L", ["E", "", "t", "L"]),
            ("E|t*3|(t|)*4tm|L", ["E", "ttt", "t", "t", "t", "t", "tm", "L"]),
            ("E(t|t|t)*2,tL", ["Et", "t", "tt", "t", "ttL"]),
            ("EL", ["EL"]),
            ("|EtL", ["", "EtL"]),  # Megatron takes an empty first stage
            ("E|*3tL", ["E", "", "", "tL"]),
            ("E(t*2|)*2L", ["Ett", "tt", "L"]),
            ("E(|tt)*2,t|L", ["E", "tt", "ttt", "L"]),
            ("Et*0|(t)*0L", ["E", "L"]),
            (",E,,t,*1,2,|,(,t,|,)*1,L,", ["E" + "t" * 12, "t", "L"]),  # Megatron drops commas before anything else
            ("Et*02|L", ["Ett", "L"]),
            ("Et|tm*2L", ["Et", "tmmL"]),
        ],
    )
    def test_examples(self, text: str, stages: list[str]) -> None:
        layout = Layout(text)
        assert layout.stages == tuple(stages)
        assert layout.num_stages == len(stages)

    @given(st.data())
    def test_repeats_are_written_out(self, data: st.DataObject) -> None:
        plain = st.sampled_from(["t", "|", ","])
        once = st.tuples(plain, st.just(1)) | st.tuples(st.sampled_from("t|"), st.integers(0, 12))
        group = st.tuples(st.lists(once, min_size=1, max_size=4).filter(_is_group), st.integers(0, 4))
        text, naive = "", ""
        for body, count in data.draw(st.lists(once | group, max_size=8)):
            items = [(body, count)] if isinstance(body, str) else body
            inner = "".join(item if times == 1 else f"{item}*{times}" for item, times in items)
            text += inner if isinstance(body, str) else f"({inner})*{count}"
            naive += "".join(item * times for item, times in items) * (1 if isinstance(body, str) else count)
        assert Layout(f"E{text}mL").stages == tuple(f"E{naive}mL".replace(",", "").split("|"))

    @given(st.text(alphabet="EtmL|()*,0123 x\n٣²", max_size=20) | st.text(max_size=12))
    def test_junk_is_refused_or_legal(self, text: str) -> None:
        try:
            layout = Layout(text)
        except SplitError as error:
            assert "\n" not in str(error).splitlines()[1] and str(error).endswith("^")
        else:
            letters = "".join(layout.stages)
            assert re.fullmatch("Et*m*L", letters)
            assert layout.stages[-1].endswith("L")
            assert str(layout)


def _is_group(items: list[tuple[str, int]]) -> bool:
    return any(item != "," for item, _ in items)


class TestFaults:
    @pytest.mark.parametrize(
        ("shown", "why"),
        [
            ("E t|L\n ^", "no space"),
            *((f"{text}\n ^", "write a group as (...)*n: closed") for text in ("E((t|)*2)*2L", "E(t|L", "E(t|)L", "E(,)*2L")),
            ("Et)*2L\n  ^", "closes no group"),
            ("Et*L\n  ^", "a letter or a group stands before *, and a number behind it"),
            ("Et*2*3L\n    ^", "a letter or a group stands before *"),
            ("*3\n^", "a letter or a group stands before *"),
            ("Et3L\n  ^", "a number stands only behind *"),
            ("Et*٣L\n  ^", "and a number behind it"),
            ("Ed|L\n ^", "the letters are E, t, m, L"),
            ("Et*99999999999999999999L\n ^", "more than 10000"),
            ("tE|L\n^", "the first letter is E"),
            ("|t|L\n ^", "the first letter is E"),
            ("\n^", "the first letter is E"),
            ("Et|E|L\n   ^", "only one E"),
            ("Et|t\n    ^", "the last letter is L"),
            ("EtL|t\n    ^", "nothing stands behind L"),
            ("Et|L|\n    ^", "the last stage cannot be empty"),
            ("Et|m|tL\n     ^", "decoder layers t run before the MTP layers m"),
            ("Et|m|mL\n     ^", "all MTP layers m are in the same stage"),
        ],
    )
    def test_the_place_is_shown(self, shown: str, why: str) -> None:
        text, caret = shown.split("\n")
        with pytest.raises(SplitError) as caught:
            Layout(text)
        message = str(caught.value)
        assert why in message
        assert message.endswith(f"\n  {text}\n  {caret}")
        assert f"character {len(caret)}:" in message

    def test_a_repeated_group_shows_the_place_in_the_string(self) -> None:
        with pytest.raises(SplitError, match=re.escape("nothing stands behind L, the loss\n  E(t|L|)*2\n    ^")):
            Layout("E(t|L|)*2")

    def test_the_ranks_must_divide_the_stages(self) -> None:
        with pytest.raises(SplitError, match="4 stages of 'E|t|t|L' do not divide among 3 ranks".replace("|", r"\|")):
            Layout("E|t|t|L", ranks=3)
        with pytest.raises(SplitError, match="ranks: take a positive integer"):
            Layout("E|t|t|L", ranks=0)
        with pytest.raises(SplitError, match="among 8 ranks"):
            Layout("E|t|t|L").table(8)

    def test_only_a_string(self) -> None:
        with pytest.raises(SplitError, match="not list"):
            Layout(["E", "L"])  # type: ignore[arg-type]


class TestTable:
    def test_equal_neighbours_share_a_row(self) -> None:
        assert str(Layout("Et*3|(tt|)*29,m|L", ranks=16)).splitlines() == [
            "PP rank  VPP 0  VPP 1",
            "0        Ettt   tt",
            "1-13     tt     tt",
            "14       tt     m",
            "15       tt     L",
        ]

    def test_one_stage_a_rank(self) -> None:
        assert str(Layout("E||t*4|t*2L")).splitlines() == [
            "PP rank  VPP 0",
            "0        E",
            "1        (empty)",
            "2        t*4",
            "3        ttL",
        ]
        assert Layout("E|t|t|L").table(2).splitlines()[1:] == ["0        E      t", "1        t      L"]


class TestStarts:
    @pytest.mark.parametrize(
        ("text", "starts"),
        [
            ("Ett|tt|ttL", after(2, 4)),
            ("E|t*6|L", after(0, 6)),
            ("E||t*3||t*3L", (0, 1, 1, 31, 31)),
            ("|E|t*6L", (0, 0, 1)),
            ("Et*6L", (0,)),
        ],
    )
    def test_torchtitan(self, text: str, starts: tuple[int, ...]) -> None:
        layout = Layout(text)
        assert resolve(layout, LLAMA, layout.num_stages) == starts

    @pytest.mark.parametrize(
        ("embedding", "layer", "head"),
        [
            ("model.embed_tokens", "model.layers.{0:6}", ["model.norm", "lm_head"]),
            ("transformer.wte", "transformer.h.{0:6}", ["transformer.ln_f", "lm_head"]),
            ("vit.embeddings", "vit.encoder.layer.{0:6}", ["vit.layernorm", "classifier"]),
            ("patch_embed", "blocks.{0:6}", ["head"]),
            ("embed", "cells.{0:6}", ["readout"]),  # no name that is known: what repeats
        ],
    )
    def test_names(self, embedding: str, layer: str, head: list[str]) -> None:
        calls = forward(embedding, layer, *head)
        assert resolve(Layout("E|tt|t*4|L"), calls) == after(0, 2, 6)

    def test_encoder_and_decoder(self) -> None:
        calls = forward("shared", "encoder.block.{0:2}", "decoder.block.{0:2}", "lm_head")
        assert Layout("Et|t|ttL").starts(calls) == after(1, 2)

    def test_the_language_model_beside_another(self) -> None:
        calls = forward("model.vision.layers.{0:3}", "model.embed", "model.layers.{0:4}", "lm_head")
        assert Layout("Ett|ttL").starts(calls) == (0, 51)
        assert Layout("Et|t|tL", decoder="model.vision.layers.{}").starts(calls) == (0, 10, 20)

    def test_mtp(self) -> None:
        assert Layout("Et|tt|tm|L").starts(DEEPSEEK) == after(1, 3, 5)
        assert Layout("Et*4|m|L").starts(DEEPSEEK) == after(4, 5)
        megatron = forward("embedding", "decoder.layers.{0:2}", "mtp.layers.{0:2}", "head")
        assert Layout("Et|t|mm|L").starts(megatron) == after(1, 2, 4)

    def test_patterns(self) -> None:
        calls = forward("stem", "a.b.cells.{0:4}", "extra.{0:2}", "tail", "pool", "head")
        text, decoder = "E|t*4|mm|L", ["layers.{}", "*.cells.{}"]
        assert Layout(text, embedding="stem", decoder=decoder, mtp="extra.{}").starts(calls) == after(0, 4, 6)
        named = Layout(text, decoder=decoder, mtp="ext*.{}", loss=["none", "pool"])
        assert named.starts(calls) == (0, 1, 41, 62)

    @pytest.mark.parametrize(
        ("layout", "says"),
        [
            (Layout("Et*4|L"), "has 4 't', but the model runs 6 decoder layers (layers.0 to layers.5)"),
            (Layout("Et*4|L", decoder="block.{}"), "decoder='<FQN with {} for the number>'"),
            (Layout("Et*6m|L"), "has 1 'm', but the model runs 0 mtp layers."),
            (Layout("Et*2|L", mtp="layers.{}"), "has 2 't', but the model runs 0 decoder layers."),
            (Layout("Et*6|L", embedding="norm"), "embedding='norm' fits no module that runs before the first layer"),
            (Layout("Et*6|L", loss="tok_embeddings"), "loss='tok_embeddings' fits no module that runs after"),
            (Layout("Et*2mm|L", decoder=["norm", "layers.{}"], mtp=[]), "runs 1 decoder layers (norm to norm)"),
        ],
    )
    def test_errors(self, layout: Layout, says: str) -> None:
        with pytest.raises(SplitError, match=re.escape(says)):
            layout.starts(LLAMA)

    def test_nothing_to_run_in_a_stage(self) -> None:
        with pytest.raises(SplitError, match="stage 0 would be empty: no operation runs between 'E' and 'tt'"):
            Layout("E|tt|L").starts(forward("layers.{0:2}", "head"))

    def test_mtp_before_the_decoder(self) -> None:
        calls = forward("embed", "mtp.{0:1}", "layers.{0:2}", "head")
        with pytest.raises(SplitError, match=r"out of execution order: mtp\.0"):
            Layout("Ettm|L").starts(calls)
