"""Every option is declared once: reader, documentation, text for other ranks, and keyword of `compile` and `verify`."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpp
from graphpp.errors import GraphPPError
from graphpp.options.document import GROUPS, KINDS, printed
from graphpp.options.option import Group
from graphpp.options.options import Options

DATA = ["example", "mesh", "plan"]  # arguments that are no options
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("group", GROUPS)
def test_every_field_is_declared_and_reads_its_default(group: type[Group]) -> None:
    made = group()
    assert [option.name for option in group.options()] == [item.name for item in fields(group)] != []
    for option in group.options():
        assert option.read(option.default) == getattr(made, option.name)
        assert option.read(getattr(made, option.name)) == getattr(made, option.name)  # what is read stays as it is
        assert option.takes and option.about.endswith("."), option.path
    assert replace(made) == made


def test_the_document_is_printed_from_the_declarations() -> None:
    pages = [ROOT / "docs/options.md", *(ROOT / "docs/options").glob("*.md")]
    texts = {page: page.read_text() for page in pages}
    assert {page: printed(page) for page in pages} == texts
    whole = "".join(texts.values())
    for option in (option for group in GROUPS for option in group.options()):
        assert f"| `{option.name}` | " in whole
    for kind in (*(group for group in GROUPS if group is not Options), *KINDS):
        assert whole.count(f"\n## `graphpp.{kind.__name__}`") == 1
    for owner in KINDS:
        for item in fields(owner):
            assert item.name in (owner.__doc__ or "") and f"{item.name}" in whole, (owner, item.name)


def test_every_group_of_options_is_public_and_documented() -> None:
    opened = [type(value) for value in (getattr(Options(), item.name) for item in fields(Options)) if isinstance(value, Group)]
    assert {Options, *opened} == set(GROUPS)
    assert all(getattr(graphpp, group.__name__) is group for group in opened)


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in found.values())
    return {name: each for name, each in found.items() if name not in ("model", "loss")}


def test_compile_has_at_most_twelve_typed_keywords() -> None:
    found = keywords(graphpp.compile)
    assert [name for name in found if name not in DATA] == [option.name for option in Options.options()]
    assert len(found) <= 12 and all(each.kind is each.KEYWORD_ONLY for each in found.values())
    for name, each in found.items():
        assert each.annotation is not each.empty, name
        assert name in DATA or each.default == next(o.default for o in Options.options() if o.name == name)


def test_verify_takes_the_options_of_compile() -> None:
    ours, theirs = keywords(graphpp.verify), keywords(graphpp.compile)
    assert set(ours) - set(theirs) == {"ranks", "tolerance", "against"}
    for name in (name for name in theirs if name != "example"):
        assert (ours[name].default, ours[name].annotation) == (theirs[name].default, theirs[name].annotation), name


def test_facts_name_every_option_that_ranks_must_have_alike() -> None:
    found = dict(Options(memory=0.5, gradients="sum", debug="here", parallel="cpu").facts())
    said = {option.path for group in GROUPS for option in group.options() if option.describe is not None}
    assert set(found) == said - {group.prefix for group in GROUPS}
    assert "debug.dump" not in found and "parallel.device" not in found
    assert found["gradients.reduction"] == ["sum"] and "0.5" in found["memory.recompute"][0]


@pytest.mark.parametrize("group", GROUPS)
def test_facts_change_with_every_option_that_is_compared(group: type[Group]) -> None:
    others: dict[str, Any] = {
        "split": 3, "schedule": "GPipe", "microbatches.count": 7, "microbatches.batch_dims": {"x": 1},
        "parallel.op_costs": len, "backend": "inductor",
        "memory.recompute": "full", "memory.offload": 0.25, "memory.cap": [5, 6], "memory.release": False,
            "memory.optimizer": "sgd", "memory.outputs": True, "memory.logits_tokens": 256, "memory.word_parts": 2,
            "gradients.reduction": "sum",
        "gradients.dtype": torch.float32, "gradients.fused": True, "debug.max_graphs": 3,
        "debug.audit": 7,
        "debug.dynamic": True, "parallel.check_data": 7, "parallel.keep": 2, "parallel.param_dtype": torch.bfloat16,
        "parallel.reduce_dtype": torch.bfloat16,
            "parallel.replica_values": "broadcast", "parallel.timeout": 3, "parallel.start_timeout": 4,
            "parallel.sum_order": "any",
        "parallel.replica_buffers": "average",
    }  # fmt: skip
    for option in group.options():
        if option.describe is not None and option.path not in [each.prefix for each in GROUPS]:
            changed = replace(group(), **{option.name: others[option.path]})
            assert dict(changed.facts())[option.path] != dict(group().facts())[option.path], option.path


SHORT: dict[str, tuple[Options, Options]] = {
    "a fraction": (Options(memory=0.5), Options(memory=graphpp.Memory(recompute=0.5))),
    "full": (Options(memory="full"), Options(memory=graphpp.Memory(recompute=graphpp.Recompute()))),
    "FQNs": (Options(memory=["a", "b"]), Options(memory=graphpp.Memory(recompute=graphpp.Recompute(("a", "b"))))),
    "a Recompute": (Options(memory=graphpp.Recompute(fraction=0.5)), Options(memory=0.5)),
    "a sum": (Options(gradients="sum"), Options(gradients=graphpp.Gradients(reduction="sum"))),
    "a folder": (Options(debug="here"), Options(debug=graphpp.Debug(dump=Path("here")))),
    "a device": (Options(parallel="cpu"), Options(parallel=graphpp.Parallel(device=torch.device("cpu")))),
    "a backend": (Options(backend="inductor"), Options(backend=graphpp.Inductor())),
    "an offload": (Options(memory=graphpp.Memory(offload=True)), Options(memory=graphpp.Memory(offload=graphpp.Offload()))),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_forms_mean_their_long_forms(name: str) -> None:
    short, long = SHORT[name]
    assert short == long


WRONG: dict[str, tuple[Any, str]] = {
    "recompute": (lambda: Options(memory="ful"), r'memory: take None, a graphpp\.Memory, or for its recompute= "full"'),
    "fraction": (lambda: Options(memory=1.5), r"memory\.recompute: a fraction .* got 1\.5"),
    "a flag as fraction": (lambda: graphpp.Memory(recompute=True), r"memory\.recompute: take None"),
    "offload": (lambda: graphpp.Memory(offload="half"), r"memory\.offload: take None, True"),  # type: ignore[arg-type]
    "offload fraction": (lambda: graphpp.Memory(offload=2.0), r"memory\.offload: take a fraction of the saved bytes"),
    "cap": (lambda: graphpp.Memory(cap=0), r"memory\.cap: take a positive number of bytes"),
    "caps": (lambda: graphpp.Memory(cap=[]), r"memory\.cap: take a positive number of bytes"),
    "cap text": (lambda: graphpp.Memory(cap="12"), r"memory\.cap: take a positive"),  # type: ignore[arg-type]
    "optimizer": (lambda: graphpp.Memory(optimizer="lamb"), r'memory\.optimizer: take "adamw", .* got \'lamb\''),
    "optimizer bytes": (lambda: graphpp.Memory(optimizer=-1), r"memory\.optimizer: .* bytes from 0 to 1024, got -1"),
    "too many caps": (lambda: graphpp.Memory(cap=[1, 2]).caps(3), r"memory\.cap: .* each of 3 ranks"),
    "gradients": (lambda: Options(gradients=torch.float32), r"gradients: take None, a graphpp\.Gradients"),  # type: ignore[arg-type]
    "dtype": (lambda: graphpp.Gradients(dtype=torch.int64), r"gradients\.dtype: take a floating torch\.dtype"),
    "max_graphs": (lambda: graphpp.Debug(max_graphs=True), r"debug\.max_graphs: take a positive integer"),
    "debug": (lambda: Options(debug=3), r"debug: take None, a graphpp\.Debug"),  # type: ignore[arg-type]
    "dump": (lambda: graphpp.Debug(dump=3), r"debug\.dump: take the path"),  # type: ignore[arg-type]
    "device": (lambda: Options(parallel="gpus"), r"parallel\.device: take a torch\.device or its name, got 'gpus'"),
    "backend": (lambda: Options(backend="cuda"), r'backend: take "eager", "inductor"'),
    "graphs": (lambda: graphpp.Eager(cudagraphs=1), r"Eager\.cudagraphs: take True or False"),  # type: ignore[arg-type]
    "schedule": (lambda: Options(schedule="1F2B"), r"schedule: unknown schedule '1F2B'"),
    "microbatches": (lambda: Options(microbatches=0), r"microbatches: take a positive integer"),
    "a class": (lambda: Options(backend=graphpp.Inductor), r"backend: .* the class .*: give graphpp\.Inductor\(\)"),
    "a class of options": (lambda: Options(memory=graphpp.Memory), r"memory: take None, a graphpp\.Memory"),  # type: ignore[arg-type]
    "layers": (lambda: graphpp.Recompute(layers="0"), "layers: take a list of FQNs"),  # type: ignore[arg-type]
    "nodes": (lambda: graphpp.Recompute(nodes="selectiv"), "nodes: take a function"),  # type: ignore[arg-type]
    "values": (lambda: graphpp.Offload(values=3), "values: take a function"),  # type: ignore[arg-type]
    "ahead": (lambda: graphpp.Offload(ahead=True), "at least one action ahead"),
    "custom": (lambda: graphpp.Custom("x"), r"Custom\.function: take a function"),  # type: ignore[arg-type]
    "split": (lambda: Options(split=1.5), "split: take FQNs"),  # type: ignore[arg-type]
    "two counts": (lambda: Options(schedule=[["0F0", "0B0"]], microbatches=2), "microbatches=2, but the schedule"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_the_option(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(GraphPPError, match=words):
        make()


def test_the_dump_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPP_DUMP", "there")
    assert Options().debug.dump == Path("there") and Options(debug="here").debug.dump == Path("here")


def test_a_misspelt_option_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="recompte"):
        graphpp.Memory(recompte=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="memroy"):
        graphpp.compile(torch.nn.Linear(1, 1), memroy=0.5)  # type: ignore[call-arg]
