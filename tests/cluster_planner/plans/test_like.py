"""`graphpp.plan(like=)`: layouts of one's own, in every dialect, priced beside the best plan, and refused with the remedy."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpp
from graphpp import TrainingPlan, TrainingPlans
from graphpp.cluster_planner.plans.layouts.fixed import CHOICES
from graphpp.errors import GraphPPError, NoPlanError, ScheduleError
from tests.cluster_planner.plans.test_plan import costs, plans

MEGATRON = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --bf16"
TITAN = """
    [parallelism]
    pipeline_parallel_degree = 2
    pipeline_parallel_schedule = "Interleaved1F1B"
    [training]
    local_batch_size = 4
    [activation_checkpoint]
    mode = "full"
"""
DEEPSPEED = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}


def priced(like: Any, **options: Any) -> TrainingPlans:
    return plans(like=like, search=False, **options)


def yours(like: Any, **options: Any) -> TrainingPlan:
    found = priced(like, **options).yours
    assert found is not None
    return found


@cache
def searched() -> TrainingPlans:
    return plans()


@pytest.mark.parametrize("form", ["plan", "setting", "json", "text"])
def test_a_plan_of_the_search_is_priced_as_there_in_every_form(form: str) -> None:
    for plan in searched().plans[:20:3]:
        has_cut, has_order = form in ("plan", "json"), form != "text"
        if (plan.setting.schedule.order is None or has_order) and (not plan.moved or has_cut):
            own = yours({"plan": plan, "setting": plan.setting, "json": plan.to_json(), "text": str(plan.setting)}[form])
            assert (own.setting, own.seconds, own.split, own.peaks) == (plan.setting, plan.seconds, plan.split, plan.peaks)


def test_yours_stands_beside_the_best_with_the_difference_by_part() -> None:
    found = plans(like="pp 2, tp 2, 1 row, 1F1B, recompute selective")
    own = found.yours
    assert own is not None and found.best == searched().best
    (line,) = (each for each in str(found).splitlines() if each.startswith("yours: pp 2 x dp_shard 2 x tp 2"))
    assert re.search(r"step .* ms, \+[\d.]+% \(.*recompute \+.*\); memory .* \(.*activations -.*\)", line)
    assert own.reason.startswith("slower by")
    assert TrainingPlans.from_json(found.to_json()) == found
    numbers = json.loads(found.to_json())["yours"]["comparison"]["numbers"]
    assert {"step", "recompute", "activations"} <= {each["name"] for each in numbers}
    page = found.to_html()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [each["yours"] for each in data["plans"]] == [False] * len(found) + [True]
    assert f"yours: {own.setting}" in page


def test_what_a_layout_leaves_open_is_searched_for() -> None:
    found = yours("pp 2, dp_shard 2, 1 row")
    cheaper = yours("pp 2, dp_shard 2, tp 2, 1 row, 1F1B, keep all")
    assert (found.setting.shape.pp, found.setting.shape.dp_shard, found.setting.rows) == (2, 2, 1)
    assert found.step_seconds <= cheaper.step_seconds


def test_a_layout_over_the_cap_is_priced() -> None:
    plain = yours("pp 2, dp_replicate 4, 1F1B, recompute full, offload none")
    found = priced(str(plain.setting), memory_cap=plain.peak - 1)
    assert found.yours is not None and found.yours.peak == plain.peak and found.yours.reason == "1 B over the cap"
    with pytest.raises(NoPlanError, match=r"no plan fits.*\. Yours, pp 2 .*, takes "):
        plans(like=str(plain.setting), memory_cap=1_000)


FIXED: list[tuple[dict[str, Any], str]] = [
    ({"dp_replicate": 4, "dp_shard": 1, "pp": 2}, "pp 2 x dp_replicate 4"),
    ({"pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 3}, "6 stages, Interleaved1F1B"),
    ({"pp": 2, "schedule": "MegatronInterleaved", "stages": 4, "group": 2, "rows": 1}, "MegatronInterleaved in groups of 2"),
    ({"pp": 2, "schedule": "GPipe", "dp_shard": 4, "keep": 1, "rows": 2}, "GPipe, 2 microbatches of 2 rows, keep 1"),
    ({"pp": 2, "schedule": "1F1B", "recompute": "full", "recomputed": 5}, "recompute full of 5 layers"),
    ({"pp": 2, "schedule": "1F1B", "recompute": "full", "recomputed": (1, 2), "split": (3, 5)}, "recompute full of 3 layers"),
    ({"pp": 2, "schedule": "1F1B", "recompute": "selective", "recomputed": (2,)}, "recompute selective of 4 layers"),
    ({"offload": 0.25, "pp": 2, "schedule": "1F1B", "recompute": None}, "offload 0.25"),
    ({"pp": 2, "stages": 4, "word_parts": True, "schedule": "Interleaved1F1B", "tp": 1}, "words cut"),
    ({"pp": 2, "tp": 1, "logits_tokens": 64}, "logits in pieces of 64"),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "said"), FIXED)
def test_every_choice_can_be_fixed(choices: dict[str, Any], said: str) -> None:
    setting = yours(choices).setting
    assert said in str(setting)
    for name in {"keep", "offload", "word_parts", "logits_tokens", "rows", "microbatches"} & choices.keys():
        assert getattr(setting, name) == choices[name]
    assert all(getattr(setting.shape, name) == size for name, size in choices.items() if name in setting.shape.sizes())
    assert choices.keys() <= CHOICES.keys()


def test_the_split_is_given_by_names_by_layers_and_by_a_layout_of_megatron() -> None:
    for like in ("split layers.3", "3+5 layers", "split Et*3|t*5L", {"split": ["layers.3"]}):
        fixed = like if isinstance(like, dict) else f"{like}, pp 2, 1F1B, 1 row"
        assert yours(fixed).split == ("layers.3",)
    assert yours("split Et*4|t*4|L, pp 3", machines="3xH100", batch=3).split == ("layers.4", "head")


DIALECTS: list[tuple[Any, str, str]] = [
    (MEGATRON, "pp 4 x dp_replicate 2, 4 stages, 1F1B, 8 microbatches of 1 row", ""),
    (f"{MEGATRON} --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --tensor-model-parallel-size 2",
     "pp 4 x tp 2, 8 stages, MegatronInterleaved in groups of 4, 16 microbatches", "(ZeRO-1) is priced as dp_shard"),
    (f"{MEGATRON} --recompute-granularity full --recompute-method block --recompute-num-layers 1 --tp-comm-overlap",
     "recompute full of 4 layers", "Not priced: --tp-comm-overlap"),
    ("python pretrain.py \\\n --pipeline-model-parallel-size=2 --pipeline-model-parallel-layout Et*3|t*5L", "pp 2 x", ""),
    (f"{MEGATRON} --use-distributed-optimizer --decoder-first-pipeline-num-layers 2", "dp_shard 2", "priced as dp_shard"),
    (TITAN, "pp 2 x dp_shard 4, 4 stages, Interleaved1F1B, 4 microbatches of 1 row, recompute full", ""),
    (TITAN.replace('"full"', '"selective"\nselective_ac_option = "2"'), "recompute full of 4 layers", ""),
    ("[parallelism]\nfsdp_reshard_after_forward = 'always'\n[training]\nlocal_batch_size = 2\n",
     "pp 1 x dp_shard 8, 1 stage, loop, 1 microbatch of 2 rows, keep 0, recompute selective", "of all light operations"),
    (json.dumps(DEEPSPEED), "pp 1 x dp_replicate 8, 1 stage, loop, 2 microbatches of 1 row", "priced with one"),
    (json.dumps({**DEEPSPEED, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
     "pp 1 x dp_shard 8, 1 stage, loop, 2 microbatches of 1 row, keep 0", "Not priced: zero_optimization.offload_param"),
]  # fmt: skip


@pytest.mark.parametrize(("like", "said", "note"), DIALECTS)
def test_layouts_of_other_systems_are_read(like: str, said: str, note: str) -> None:
    options = {"batch": 16}
    found = priced(like.replace("    ", ""), **options)
    assert found.yours is not None and said in str(found.yours.setting)
    assert note in " ".join(found.notes) and all(each.endswith(".") for each in found.notes)


def test_torchtitan_counts_embedding_and_head_as_layers() -> None:
    assert yours(TITAN.replace("    ", "")).split == ("layers.2", "layers.5", "layers.7")  # 3, 3, 2 and 2 of 8 + 2


def test_layouts_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TITAN.replace("    ", ""))
    (tmp_path / "plan.json").write_text(searched().best.to_json())
    assert yours(tmp_path / "run.toml").setting.stages == 4
    assert yours(str(tmp_path / "plan.json")).setting == searched().best.setting


REFUSED: list[tuple[Any, str]] = [
    ("pp 8, tp 4", "pp 8 x tp 4 makes 32 ranks, which do not divide 8 GPUs: take other sizes"),
    ("pp 2, dp_replicate 1, dp_shard 1, ep 1, cp 1, tp 1", "2 ranks of 8 GPUs: take 4 times as many ranks"),
    ({"offload": 0.25, "pp": 2, "schedule": "1F1B", "recompute": 0.5}, 'offload: take recompute=None, "selective" or "full"'),
    ("pp 2, dp_shard 4, 3 rows", "a batch of 16 rows does not divide by 4 data ranks x 3 rows: take a multiple"),
    ("pp 2, ZBVZeroBubble, 3 stages a rank", "ZBVZeroBubble runs two stages per rank"),
    ("pp 2, MegatronInterleaved 5, 2 stages a rank, 4 microbatches", "groups of 2, 4 fit"),
    ("pp 4, 4 stages a rank", "16 stages: the model admits up to 10: take fewer"),
    ("dp_replicate 8, keep 1", "nothing is sharded: give dp_shard or ep above 1, or keep all"),
    ("ep 2", "ep: the costs were made without expert_plan="),
    ("pp 2, words cut, tp 2", "words are cut with tp 1"),
    ("pp 2, pp 4", "pp stands twice, as 2 and as 4"),
    ("pp 2, 1F1C", "'1F1C' says nothing, did you mean 1F1B?"),
    ("3+4 layers", "split has 7 layers, and the model has 8"),
    ("split layer.3", "no stage can start at 'layer.3': take FQNs such as layers.3"),
    ("split layers.4 layers.3", "out of execution order"),
    ("split layers.4, 3 stages", "split has 2 stages, of whole words: leave out split, stages"),
    ("pp 2, recompute full of 9 layers", "the stages have 4+4 layers: take fewer than 9"),
    ("pp 8, DualPipeV", "16 stages: the model admits up to 10: take fewer"),
    ("pp 2, 7 stages", "7 stages on pp 2: take a multiple"),
    ("pp 2, ForwardOnly", "schedule: take 'auto' or 'GPipe' or"),
    ("pp 2, loop", "pp stands twice, as 2 and as 1"),
    ({"recomputed": 3}, 'recomputed: give recompute="selective" or "full" beside it'),
    ({"order": "r0: 0F0"}, "order: give the schedule"),
    ("[parallelism]\n[training]\nseq_len = 'a'", "training.seq_len: take an integer from 1, got 'a'"),
    ("parallelism = 3\n[training]", "parallelism: take a table, got 3"),
    ("nowhere.toml", "nowhere.toml: No such file or directory: name a file"),
    ({"kep": 1}, "got 'kep', did you mean keep?"),
    ({"keep": -1}, "keep: take an integer from 0"),
    (3, "like: take a layout in words"),
    (f"{MEGATRON} --global-batch-size 32", "batch: the layout has 32, the search 16: give batch=32"),
    (f"{MEGATRON} --seq-length 64", "tokens: the layout has 64, the search 32"),
    ("--fp16", "dtype: the layout has float16, the search bfloat16: give param_dtype=torch.float16"),
    ("--pipeline-model-parallel-size two", "--pipeline-model-parallel-size: take an integer from 1, got 'two'"),
    (f"{MEGATRON} --expert-model-parallel-size 8", "there are 2 data ranks for experts"),
    (f"{MEGATRON} --num-layers 12", "the model has 8 layers"),
    (f"{MEGATRON} --num-virtual-stages-per-pipeline-rank 3", "8 layers do not divide among 4 pipeline ranks"),
    ("[parallelism]\ntensor_parallel_degree = 3", "tp 3 makes 3 ranks"),
    ("[training]\ntensor_parallel_degree = 2", "torchtitan has its degrees in [parallelism]: write them there"),
    ("[parallelism]\ndata_parallel_shard_degree = 4", "4 x 1 data ranks of 8"),
    ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 4", "make 3 stages, no multiple of 2"),
    ("[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Best'", "take 1F1B, GPipe"),
    ("[parallelism]\n[model]\nconverters = ['float8']\n[training]\nlocal_batch_size = 2", 'give float8="tensorwise"'),
    ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage: take 0, 1, 2, 3, got 4"),
    (json.dumps({**DEEPSPEED, "train_batch_size": 8}), "batch: the layout has 8, the search 16: give batch=8"),
    (json.dumps({**DEEPSPEED, "gradient_accumulation_steps": 3}), "does not divide by 8 data ranks x 3 microbatches x 1 rows"),
    ("[training]\nlocal_batch_size = 2", "torchtitan has its degrees in [parallelism]: write them there"),
    ('{"gpus": 8}', "take the JSON of a plan, or of DeepSpeed"),
]  # fmt: skip


@pytest.mark.parametrize(("like", "message"), REFUSED)
def test_what_cannot_run_is_refused_with_the_remedy(like: Any, message: str) -> None:
    with pytest.raises(GraphPPError) as caught:
        yours(like)
    assert message in str(caught.value)


def test_a_layout_alone_needs_a_layout() -> None:
    with pytest.raises(ScheduleError, match="search: without a search there is nothing to price: give like="):
        graphpp.plan(costs(torch.bfloat16, "cuda"), machines="8xH100", batch=16, search=False)


def test_no_plan_says_what_is_short_and_from_how_many_gpus_it_fits() -> None:
    with pytest.raises(NoPlanError) as caught:
        plans(memory_cap=300_000)
    said = str(caught.value)
    assert re.search(r"on its fullest rank, .* KiB too much: .* of it are state, which alone is over the cap \(shards ", said)
    assert "smaller batch" not in said and "A plan fits on 64 GPUs" in said
