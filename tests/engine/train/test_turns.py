"""The order of a pipeline's passes: it completes, idles and keeps as the papers say, and is the order torch has."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from engine.plan.turns import Turn, most_in_flight, room, turns

CASES = [
    (ranks, chunks, micro)
    for ranks, chunks in product(range(1, 5), range(1, 4))
    for micro in range(1, 2 * ranks + 4)
    if ranks > 1 or chunks == 1
]


class Message(NamedTuple):
    """What one virtual stage sends another."""

    forward: bool
    stage: int
    """That sends."""
    micro: int


@dataclass
class Pipeline:
    """Ranks that go through their orders, each pass taking one unit of time."""

    ranks: int
    chunks: int
    micro_batches: int
    sent: dict[tuple[int, int, bool], list[Message]] = field(default_factory=dict)
    """By channel: sender, receiver, direction."""
    received: dict[tuple[int, int, bool], list[Message]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.orders = [
            turns(ranks=self.ranks, rank=rank, chunks=self.chunks, micro_batches=self.micro_batches)
            for rank in range(self.ranks)
        ]
        self.room = room(ranks=self.ranks, chunks=self.chunks, micro_batches=self.micro_batches)

    def run(self) -> int:
        """Time until the last pass is done. As in `engine.passes`, a rank posts the receive of its next turn early,
        and sends only as many messages beyond those that the receiver has posted as there is room for.
        """
        at, clock, done = [0] * self.ranks, [0] * self.ranks, dict[Message, int]()
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(self.orders):
                while at[rank] < len(order) and self.can_go(rank, order[at[rank]], done):
                    turn = order[at[rank]]
                    for ahead in order[at[rank] : at[rank] + 2]:
                        self.post(rank, ahead)
                    if not self.has_room(rank, turn):
                        break
                    ready = max((done[needed] for needed in self.needs(rank, turn)), default=0)
                    clock[rank] = max(clock[rank], ready) + 1
                    done[Message(turn.forward, self.stage(rank, turn), turn.micro)] = clock[rank]
                    if (message := self.sends(rank, turn)) is not None:
                        self.sent.setdefault(self.channel(message), []).append(message)
                    at[rank] += 1
                    moved = True
                if at[rank] < len(order):
                    moved |= self.post(rank, order[at[rank]])
        assert at == [len(order) for order in self.orders], "some rank waits for ever"
        return max(clock)

    def stage(self, rank: int, turn: Turn) -> int:
        return turn.chunk * self.ranks + rank

    def receives(self, rank: int, turn: Turn) -> Message | None:
        source = self.stage(rank, turn) + (-1 if turn.forward else 1)
        return Message(turn.forward, source, turn.micro) if 0 <= source < self.ranks * self.chunks else None

    def sends(self, rank: int, turn: Turn) -> Message | None:
        stage = self.stage(rank, turn)
        ends = self.ranks * self.chunks - 1 if turn.forward else 0
        return None if stage == ends else Message(turn.forward, stage, turn.micro)

    def needs(self, rank: int, turn: Turn) -> list[Message]:
        """What is done before: a backward pass needs its own forward pass too."""
        received = self.receives(rank, turn)
        own = [] if turn.forward else [Message(True, self.stage(rank, turn), turn.micro)]
        return own + ([] if received is None else [received])

    def can_go(self, rank: int, turn: Turn, done: dict[Message, int]) -> bool:
        return all(needed in done for needed in self.needs(rank, turn))

    def channel(self, message: Message) -> tuple[int, int, bool]:
        receiver = message.stage + (1 if message.forward else -1)
        return message.stage % self.ranks, receiver % self.ranks, message.forward

    def post(self, rank: int, turn: Turn) -> bool:
        message = self.receives(rank, turn)
        if message is None:
            return False
        posted = self.received.setdefault(self.channel(message), [])
        if message in posted:
            return False
        posted.append(message)
        return True

    def has_room(self, rank: int, turn: Turn) -> bool:
        message = self.sends(rank, turn)
        if message is None:
            return True
        channel = self.channel(message)
        return len(self.sent.get(channel, [])) - len(self.received.get(channel, [])) < self.room


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_every_order_completes_and_each_receive_meets_the_send_meant_for_it(
    ranks: int, chunks: int, micro_batches: int
) -> None:
    pipeline = Pipeline(ranks, chunks, micro_batches)
    pipeline.run()
    assert pipeline.sent == pipeline.received


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_every_micro_batch_goes_through_every_chunk_once_each_way(ranks: int, chunks: int, micro_batches: int) -> None:
    for order in Pipeline(ranks, chunks, micro_batches).orders:
        assert sorted(order) == sorted(
            Turn(forward, chunk, micro)
            for forward, chunk, micro in product((False, True), range(chunks), range(micro_batches))
        )


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [case for case in CASES if case[2] >= case[0]])
def test_ranks_idle_for_the_share_of_the_ideal_time_that_the_paper_says(
    ranks: int, chunks: int, micro_batches: int
) -> None:
    # Narayanan et al. 2021, 2.2: (p - 1) / (v m), also where m is no multiple of p.
    ideal = 2 * chunks * micro_batches
    assert (Pipeline(ranks, chunks, micro_batches).run() - ideal) / ideal == pytest.approx(
        (ranks - 1) / (chunks * micro_batches)
    )


@pytest.mark.parametrize(("ranks", "micro_batches"), [(ranks, m) for ranks, chunks, m in CASES if chunks == 1])
def test_plain_1f1b_keeps_no_more_micro_batches_than_ranks_come_after(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        most = most_in_flight(ranks=ranks, rank=rank, chunks=1, micro_batches=micro_batches)
        assert most == {0: min(ranks - rank, micro_batches)}


@pytest.mark.parametrize("heavy", [None, 0, -1], ids=["alike", "first chunk has most layers", "last has"])
@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), CASES)
def test_as_many_micro_batches_wait_as_the_order_leaves_waiting(
    ranks: int, chunks: int, micro_batches: int, heavy: int | None
) -> None:
    layers = [1] * chunks
    if heavy is not None:
        layers[heavy] = 5
    for rank, order in enumerate(Pipeline(ranks, chunks, micro_batches).orders):
        waiting, most, heaviest = dict.fromkeys(range(chunks), 0), dict[int, int](), 0
        for turn in order:
            waiting[turn.chunk] += 1 if turn.forward else -1
            if (weight := sum(layers[chunk] * count for chunk, count in waiting.items())) > heaviest:
                most, heaviest = dict(waiting), weight
        sizes = {"ranks": ranks, "rank": rank, "chunks": chunks, "micro_batches": micro_batches}
        assert most_in_flight(**sizes, layers=None if heavy is None else layers) == most


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (4, 2), (4, 3)])
def test_the_first_interleaved_rank_keeps_what_the_paper_says(ranks: int, chunks: int) -> None:
    # Korthikanti et al. 2022, 4.2.3: 1 + (p - 1) / (p v) times what plain 1F1B keeps, which is all layers once.
    most = most_in_flight(ranks=ranks, rank=0, chunks=chunks, micro_batches=4 * ranks)
    whole = ranks * chunks
    assert sum(most.values()) / whole == pytest.approx(1 + (ranks - 1) / whole)


def torchs(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Turn]:
    """The order of torch's own schedule, whose constructors want a model on a formed world."""
    schedule: Schedule1F1B | ScheduleInterleaved1F1B
    if chunks == 1:
        schedule = object.__new__(Schedule1F1B)
        schedule._num_stages, schedule._n_microbatches = ranks, micro_batches
        orders = schedule._get_pipeline_order()
        assert orders is not None
        actions = orders[rank]
    else:
        schedule = object.__new__(ScheduleInterleaved1F1B)
        schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, chunks, micro_batches
        schedule.number_of_rounds = max(1, micro_batches // ranks)
        schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
        actions = schedule._calculate_single_rank_operations(rank)
    kinds = {"FORWARD": True, "FULL_BACKWARD": False}
    return [
        Turn(kinds[action.computation_type.name], action.stage_index // ranks, action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type.name in kinds
    ]


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"),
    [
        (ranks, chunks, micro)
        for ranks, chunks, micro in CASES
        if ranks > 1 and micro >= ranks and micro % (micro // ranks) == 0
    ],
)
def test_the_order_is_torchs_where_torch_has_one(ranks: int, chunks: int, micro_batches: int) -> None:
    for rank, order in enumerate(Pipeline(ranks, chunks, micro_batches).orders):
        if chunks == 1 and rank == ranks - 1:
            # torch's list for the last rank of plain 1F1B, which it only draws, numbers forward passes from 1.
            continue
        assert order == torchs(ranks, rank, chunks, micro_batches)
