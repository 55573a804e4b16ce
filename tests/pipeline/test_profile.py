"""Profiles of a step: all actions on all ranks, costs of every stage, and an unchanged model."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphpp
from graphpp.pipeline.profile import Profile, RecordedSteps, median_of_means, seconds_outside, stage_costs, waited_for
from graphpp.runtime.recorder import Recorder
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.actions import Action, Kind, upstream
from tests.distributed import rank_outcomes, run_ranks
from tests.special_models import CUTS, SPECIAL
from tests.training import compiled, local_grads, step

SPLIT = "0F0 0F1 1F0 1I0 0I0 1W0 1F1 1B1 0W0 0B1"  # one rank: whole and split backwards in one table
OVERLAPPED = graphpp.Schedule.of(["0F0 1F0 0F1 (1F1;1B0)OVERLAP_F_B 0B0 1I1 0I1 1W1 0W1"])


def everything(pipe: graphpp.Pipeline) -> dict[str, torch.Tensor]:
    """All values that a profile must not change."""
    grads = {f"{fqn}.grad": grad for fqn, grad in local_grads(pipe).items() if grad is not None}
    state = {fqn: value.detach().clone() for fqn, value in (*pipe.named_parameters(), *pipe.named_buffers())}
    return {**grads, **state, "random": torch.get_rng_state()}


def profile(rank: int, name: str, options: dict[str, Any]) -> tuple[Profile, list[str]]:
    """A profile after a step, and the names of the values that it changed."""
    case = SPECIAL[name]()
    pipe = compiled(case, **options)
    step(pipe, case.batch)
    before, hooked = everything(pipe), list[torch.Tensor]()
    for parameter in pipe.parameters():
        parameter.register_post_accumulate_grad_hook(hooked.append)
    found = pipe.profile(*case.batch.args, target=case.batch.target, repeat=2, **case.batch.kwargs)
    after = everything(pipe)
    assert before.keys() == after.keys()
    assert pipe.steps == 1 and not hooked, "the steps of a profile are no steps of the training"
    return found, [key for key, value in before.items() if not torch.equal(value, after[key])]


def check_complete(timeline: Timeline) -> None:
    """Assert that every action of the table ran once on its rank, in its order, and one computation at a time."""
    for rank, row in enumerate(timeline.schedule.table):
        events = timeline.on(rank)
        assert sorted(map(str, (event.action for event in events))) == sorted(str(action) for action in row if action)
        computing = [event for event in events if event.action.is_compute]
        assert [event.action for event in computing] == [action for action in row if action and action.is_compute]
        assert all(a.end <= b.start for a, b in pairwise(computing))
    assert all(event.duration >= 0 for event in timeline.events)
    assert min(event.start for event in timeline.events) == 0
    check_order(timeline)


def check_order(timeline: Timeline) -> None:
    """Assert that a computation starts after the computations on its rank that it reads have ended."""
    ended = {leaf: event for event in timeline.events if event.action.is_compute for leaf in event.action.leaves}
    for leaf, event in ended.items():
        for maker in (ended.get(each) for each in upstream(leaf, timeline.schedule.stages)):
            assert maker is None or maker.rank != event.rank or maker.end <= event.start


def check_costs(found: Profile) -> None:
    for each in found.costs.stages:
        assert each.forward > 0 and each.weight_grad > 0 and (each.backward or 0) > 0
        assert each.saved_bytes >= 0 and each.kept_bytes is not None
    assert all(each.input_grad > 0 for each in found.costs.stages[1:])
    assert sum(each.saved_bytes for each in found.costs.stages) > 0
    assert 0 < found.costs.overhead < found.timeline.makespan
    assert len(found.steps) == 2 and found.timeline.makespan in found.steps
    assert found.outside > 0
    assert found.predict() == graphpp.simulate(found.timeline.schedule, found.costs).makespan + found.outside


@pytest.mark.parametrize("name", ["plain", "norms", "skip"])
def test_one_process(name: str) -> None:
    found, changed = profile(0, name, {"split": CUTS[4], "schedule": "1F1B", "microbatches": 4})
    assert changed == []
    check_complete(found.timeline)
    check_costs(found)
    assert found.timeline.name == "measured" and found.timeline.unit == "s"
    assert found.costs.sends_forward == found.costs.sends_backward == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_two_ranks_get_the_same_profile(schedule: str) -> None:
    stages = 2 if schedule == "1F1B" else 4
    (first, changed), (second, changed_too) = run_ranks(
        profile, 2, "norms", {"split": CUTS[stages], "schedule": schedule, "microbatches": 4}
    )
    assert changed == changed_too == []
    assert first == second
    check_complete(first.timeline)
    check_costs(first)
    assert first.timeline.schedule.has_communication
    assert all(time > 0 for time in (*first.costs.sends_forward, *first.costs.sends_backward))
    assert len(first.timeline.memory) == 2


def test_a_message_takes_as_long_as_a_rank_waited_for_it() -> None:
    table = graphpp.Schedule.of(["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])
    at = {"0SEND_F0": (2.0, 2.5), "1RECV_F0": (1.0, 4.0), "1SEND_B0": (8.0, 8.5), "0RECV_B0": (9.0, 9.0)}
    events = [Event(rank, each, *at[str(each)]) for rank, row in enumerate(table.table) for each in row if str(each) in at]
    waited = dict(waited_for(Timeline(table, tuple(events))))
    assert {str(send): seconds for send, seconds in waited.items()} == {"0SEND_F0": 1.5}, "the other one had arrived before"


def test_a_number_is_the_median_of_the_means_of_runs() -> None:
    disturbed = [[("F", 1.0), ("F", 2.0), ("B", 7.0)], [("F", 50.0), ("F", 1.0)], [("F", 2.0), ("F", 3.0)]]
    assert median_of_means(disturbed) == {"F": 2.5, "B": 7.0}


def run_of(**seconds: float) -> Timeline:
    """A timeline of one rank that computes the actions of the names for some seconds each."""
    actions = {Action(0, Kind[name[0]], int(name[1:])): each for name, each in seconds.items()}
    return Timeline(graphpp.Schedule.of(["0F0 0B0"]), tuple(Event(0, action, 0.0, end) for action, end in actions.items()))


def test_the_profiled_table_says_how_long_the_kinds_take_that_it_runs() -> None:
    own, split = [run_of(F0=1.0, B0=3.0)], [run_of(F0=9.0, I0=2.0, W0=1.5)]
    (found,) = stage_costs([own, split], 1)
    assert (found.forward, found.input_grad, found.weight_grad, found.backward) == (1.0, 2.0, 1.5, 3.0)


def test_seconds_outside_are_those_of_the_whole_call_without_the_actions() -> None:
    case = SPECIAL["plain"]()
    pipe = compiled(case, microbatches=2)
    step(pipe, case.batch)
    assert pipe._calls.last is not None
    steps = RecordedSteps(pipe._calls.last.runner, [], [3.0, 50.0, 4.0])
    assert seconds_outside(steps, [1.0, 2.0, 3.5]) == 2.0


def test_memory_follows_the_stages_saved_bytes() -> None:
    found, _ = profile(0, "plain", {"split": CUTS[2], "schedule": "GPipe", "microbatches": 4})
    foretold = graphpp.schedules.peak_bytes(found.timeline.schedule, found.costs)[0]
    assert found.timeline.peak_bytes(0) == foretold >= 4 * sum(each.saved_bytes for each in found.costs.stages)
    assert found.timeline.memory[0][-1][1] == 0


@pytest.mark.parametrize("table", [graphpp.Schedule.of([SPLIT], name="both kinds"), OVERLAPPED], ids=["both", "overlap"])
def test_tables_of_ones_own(table: graphpp.Schedule) -> None:
    found, changed = profile(0, "norms" if table is not OVERLAPPED else "plain", {"split": CUTS[2], "schedule": table})
    assert changed == []
    check_complete(found.timeline)
    check_costs(found)
    assert (found.costs.overlap != 1.0) == (table is OVERLAPPED)


def test_a_profile_before_the_first_step() -> None:
    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], microbatches=1)
    timeline = pipe.profile(*case.batch.args, target=case.batch.target, repeat=1).timeline
    check_complete(timeline)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert len(timeline.events) == 4 and "1F0" in graphpp.svg(timeline)


def test_what_a_profile_says() -> None:
    found, _ = profile(0, "plain", {"split": CUTS[2], "schedule": "1F1B", "microbatches": 2})
    head, names, *rows = str(found).splitlines()
    assert head.startswith("1F1B: ") and names.split()[:5] == ["stage", "F", "I", "W", "B"]
    assert [row.split()[0] for row in rows] == ["0", "1"]


@pytest.mark.parametrize("repeat", [0, -1, 1.5])
def test_a_profile_of_no_step_is_refused(repeat: Any) -> None:
    case = SPECIAL["plain"]()
    with pytest.raises(graphpp.GraphPPError, match="repeat: take a positive integer"):
        compiled(case, microbatches=2).profile(*case.batch.args, target=case.batch.target, repeat=repeat)


def disagree(rank: int, what: str) -> None:
    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=4)
    batch = {"target": case.batch.target}
    if what == "repeat":
        pipe.profile(*case.batch.args, **batch, repeat=1 + rank)
    else:
        (pipe.profile if rank else pipe.step)(*case.batch.args, **batch)


@pytest.mark.parametrize(("what", "why"), [("repeat", "a profile of 2 steps"), ("call", "a profile of 3 steps")])
def test_ranks_that_do_not_ask_for_the_same_are_refused(what: str, why: str) -> None:
    for outcome in rank_outcomes(disagree, 2, what):
        assert isinstance(outcome.error, graphpp.MismatchError) and why in str(outcome.error)


def seen(rank: int) -> list[str]:
    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=2)
    step(pipe, case.batch)
    with torch.profiler.profile(acc_events=True) as profiler:
        step(pipe, case.batch)
        pipe.clip_grad_norm_(1.0)
    return sorted(event.key for event in profiler.key_averages() if event.key.startswith(("PP:", "graphpp::")))


def test_torchs_profiler_sees_the_actions_and_the_parts_of_a_step_by_name() -> None:
    first, second = run_ranks(seen, 2)
    names = ["0F0", "0F1", "0B0", "0B1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1"]
    parts = [f"graphpp::{name}" for name in ("step", "prepare", "actions", "gradients", "losses", "grad_norm")]
    assert first == sorted([*(f"PP:{name}" for name in names), *parts])
    assert "PP:1B1" in second and "PP:1RECV_F0" in second


class Hands:
    """A clock that the test moves."""

    now = 100.0

    def mark(self) -> float:
        return self.now

    def seconds(self, mark: float) -> float:
        return mark


RECEIVE, FORWARD, SEND = Action(1, Kind.RECV_F, 0), Action(1, Kind.F, 0), Action(1, Kind.SEND_F, 0)
BOTH = Action(-1, Kind.OVERLAP_F_B, None, (FORWARD, Action(1, Kind.B, 1)))


def recorded(*actions: tuple[Action, list[float]]) -> Recorder:
    """A recording of actions, each of which computes and waits in turn for its times; 1 second passes before each action."""
    clock = Hands()
    recorder = Recorder(clock)

    def handler(times: list[float]) -> None:
        for place, time in enumerate(times):
            for _ in range(place % 2):
                recorder.waiting()
            clock.now += time
            for _ in range(place % 2):
                recorder.waiting()

    for action, times in actions:
        clock.now += 1
        recorder.run(action, partial(handler, times))
    return recorder


def test_a_wait_before_a_computation_is_its_receives() -> None:
    recorder = recorded((RECEIVE, [0.5]), (FORWARD, [0, 20, 10]), (SEND, [0.25, 7]))
    times = {action: (start - 101, end - 101) for action, start, end in recorder.times(3)}
    assert times == {RECEIVE: (1.5, 21.5), FORWARD: (21.5, 31.5), SEND: (32.5, 39.75)}
    assert recorder.overhead() == (0.5 + 1 + 1 + 0.25) / 3


def test_a_wait_within_an_overlap_stays_within_it() -> None:
    backward = Action(1, Kind.RECV_B, 1)
    recorder = recorded((RECEIVE, [0]), (backward, [0]), (BOTH, [0, 5, 10, 3, 10]))
    times = {action: (start - 101, end - 101) for action, start, end in recorder.times(3)}
    assert times == {RECEIVE: (2, 7), backward: (17, 20), BOTH: (7, 30)}


def lost(rank: int) -> None:
    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=4)
    step(pipe, case.batch)
    if rank:
        dist.destroy_process_group()
        return
    pipe.profile(*case.batch.args, target=case.batch.target)


def test_a_rank_that_left_is_named() -> None:
    outcome = rank_outcomes(lost, 2)[0]
    assert isinstance(outcome.error, graphpp.RankFailure) and "rank 1" in str(outcome.error)
