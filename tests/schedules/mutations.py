"""Ways to spoil a table: each function changes rows in place, at random; most results cannot run.

`accepted` is the checker's verdict on rows.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.tables import Rows


def accepted(rows: Rows, stages: int, microbatches: int) -> bool:
    schedule = Schedule.of(rows, stages=stages, microbatches=microbatches)
    try:
        check(schedule, ranks=len(rows), stages=stages, microbatches=microbatches)
    except ScheduleError:
        return False
    return True


Mutation = Callable[[Random, Rows], None]


def spot(random: Random, rows: Rows, kinds: tuple[Kind, ...] = tuple(Kind)) -> tuple[list[Action], int] | None:
    places = [(row, column) for row in rows for column, action in enumerate(row) if action.kind in kinds]
    return random.choice(places) if places else None


def changed(random: Random, rows: Rows, change: Callable[[Action], Action]) -> None:
    row, column = spot(random, rows) or ([], 0)
    row[column] = change(row[column])


def drop(random: Random, rows: Rows) -> None:
    row, column = spot(random, rows) or ([], 0)
    del row[column]


def double(random: Random, rows: Rows) -> None:
    row, column = spot(random, rows) or ([], 0)
    row.insert(random.randint(0, len(row)), row[column])


def swap_neighbours(random: Random, rows: Rows) -> None:
    row = random.choice(rows)
    if len(row) > 1:
        at = random.randrange(len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]


def swap_any(random: Random, rows: Rows) -> None:
    row = random.choice(rows)
    if row:
        one, two = random.randrange(len(row)), random.randrange(len(row))
        row[one], row[two] = row[two], row[one]


def swap_forward_and_backward(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.F,)):
        row, column = found
        twin = [at for at, a in enumerate(row) if a.kind in (Kind.B, Kind.I) and a.microbatch == row[column].microbatch]
        if twin:
            row[column], row[twin[-1]] = row[twin[-1]], row[column]


def retarget_stage(random: Random, rows: Rows) -> None:
    changed(random, rows, lambda action: action._replace(stage=random.randrange(-1, 8)))


def retarget_microbatch(random: Random, rows: Rows) -> None:
    microbatch = random.choice([None, -1, 0, 1, 2, 3, 7])
    changed(random, rows, lambda action: action._replace(microbatch=microbatch))


def change_kind(random: Random, rows: Rows) -> None:
    changed(random, rows, lambda action: action._replace(kind=random.choice(list(Kind))))


def move_to_other_rank(random: Random, rows: Rows) -> None:
    row, column = spot(random, rows) or ([], 0)
    target = random.choice(rows)
    target.insert(random.randint(0, len(target)), row.pop(column))


def cut(kinds: tuple[Kind, ...]) -> Mutation:
    def mutate(random: Random, rows: Rows) -> None:
        if found := spot(random, rows, kinds):
            del found[0][found[1]]

    return mutate


def receive_after_its_reader(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.RECV_F, Kind.RECV_B)):
        row, column = found
        kinds = (Kind.F,) if row[column].kind is Kind.RECV_F else (Kind.B, Kind.I)
        readers = {row[column]._replace(kind=kind) for kind in kinds}
        at = next(at for at, action in enumerate(row) if readers & {*action.leaves})
        row.insert(at, row.pop(column))


def reverse_two(kinds: tuple[Kind, ...]) -> Mutation:
    def mutate(random: Random, rows: Rows) -> None:
        row = random.choice(rows)
        at = [column for column, action in enumerate(row) if action.kind in kinds]
        if len(at) > 1:
            one, two = random.sample(at, 2)
            row[one], row[two] = row[two], row[one]

    return mutate


def split_backward(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.B,)):
        row, column = found
        row[column : column + 1] = [row[column]._replace(kind=kind) for kind in (Kind.I, Kind.W)]


def half_a_backward(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.B,)):
        row, column = found
        row[column] = row[column]._replace(kind=Kind.I)


def weights_before_inputs(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.I,)):
        row, column = found
        if (rest := row[column]._replace(kind=Kind.W)) in row:
            row.remove(rest)
            row.insert(column, rest)


def weight_beside_backward(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.B,)):
        row, column = found
        row.insert(column + 1, row[column]._replace(kind=Kind.W))


def overlap_neighbours(random: Random, rows: Rows) -> None:
    row = random.choice(rows)
    at = random.randrange(max(1, len(row) - 1))
    if all(action.is_compute for action in row[at : at + 2]) and len(row) > 1:
        row[at : at + 2] = [Action(-1, Kind.OVERLAP_F_B, None, tuple(row[at : at + 2]))]


def batch_any(random: Random, rows: Rows) -> None:
    """Join any two messages of a rank into one batch, at the place of either."""
    row = random.choice(rows)
    at = [column for column, action in enumerate(row) if action.is_communication]
    if len(at) > 1:
        one, two = random.sample(at, 2)
        row[one] = Action(-1, Kind.P2P, None, (*row[one].leaves, *row[two].leaves))
        del row[two]


def turn_a_batch(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.P2P,)):
        row, column = found
        row[column] = row[column]._replace(parts=row[column].parts[::-1])


def take_a_batch_apart(random: Random, rows: Rows) -> None:
    if found := spot(random, rows, (Kind.P2P,)):
        row, column = found
        row[column : column + 1] = random.sample(row[column].parts, len(row[column].parts))


def put_in(kinds: tuple[Kind, ...]) -> Mutation:
    def mutate(random: Random, rows: Rows) -> None:
        row, stage = random.choice([(row, leaf.stage) for row in rows for action in row for leaf in action.leaves])
        row.insert(random.randint(0, len(row)), Action(stage, random.choice(kinds)))

    return mutate


def early(kinds: tuple[Kind, ...]) -> Mutation:
    def mutate(random: Random, rows: Rows) -> None:
        if found := spot(random, rows, kinds):
            found[0].insert(random.randint(0, found[1]), found[0].pop(found[1]))

    return mutate


def shuffle(random: Random, rows: Rows) -> None:
    random.shuffle(random.choice(rows))


SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)
MUTATIONS: dict[str, Mutation] = {
    "drop": drop,
    "double": double,
    "swap neighbours": swap_neighbours,
    "swap any": swap_any,
    "swap forward and backward": swap_forward_and_backward,
    "retarget the stage": retarget_stage,
    "retarget the microbatch": retarget_microbatch,
    "change the kind": change_kind,
    "move to another rank": move_to_other_rank,
    "cut a receive": cut(RECEIVES),
    "cut a send": cut(SENDS),
    "receive after its reader": receive_after_its_reader,
    "reverse two sends": reverse_two(SENDS),
    "reverse two receives": reverse_two(RECEIVES),
    "split a backward": split_backward,
    "half a backward": half_a_backward,
    "B with W": weight_beside_backward,
    "W before I": weights_before_inputs,
    "overlap neighbours": overlap_neighbours,
    "shuffle": shuffle,
    "batch any": batch_any,
    "turn a batch": turn_a_batch,
    "take a batch apart": take_a_batch_apart,
    "a gather or release more": put_in((Kind.UNSHARD, Kind.RESHARD)),
    "a reduction more": put_in((Kind.REDUCE_GRAD,)),
    "a reduction early": early((Kind.REDUCE_GRAD,)),
    "a release early": early((Kind.RESHARD,)),
}
