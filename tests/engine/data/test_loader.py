"""A step's rows follow from its number, and are the same rows in every layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.batch import IGNORE, Batch
from engine.data.loader import Loader
from engine.data.rows import Rows
from tests.engine.data import make

LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]
"""Data ranks and rows per micro-batch, for 4 rows a step."""


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """Ten rows that tell their number in each id: documents of 8 letters and an end, which fill a row."""
    lines = make.jsonl({"text": chr(ord("a") + number) * 8} for number in range(10))
    return make.prepared(tmp_path, lines, seq_len=8).train


def loader(rows: Rows, rank: int = 0, ranks: int = 1, micro: int = 4, batch: int = 4, seed: int = 1) -> Loader:
    return Loader(rows, seed=seed, global_batch=batch, micro_batch=micro, data_rank=rank, data_size=ranks)


def numbers(batches: list[Batch]) -> list[int]:
    """The rows that a step trains on, by their numbers; rows of padding left out."""
    return [
        int(row[0]) - ord("a")
        for batch in batches
        for row, labels in zip(batch.tokens_BT, batch.labels_BT, strict=True)
        if (labels != IGNORE).any()
    ]


def test_an_epoch_has_each_row_once_and_the_next_another_order(rows: Rows) -> None:
    whole = loader(rows, batch=5, micro=5)
    epochs = [numbers(whole.step(2 * epoch)) + numbers(whole.step(2 * epoch + 1)) for epoch in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert numbers(loader(rows, batch=5, micro=5, seed=2).step(0)) != epochs[0][:5]


def test_a_step_that_meets_the_end_of_an_epoch_goes_on_with_the_next(rows: Rows) -> None:
    # 5 steps of 4 rows are 2 epochs of 10: the third step has 2 rows of each.
    seen = [number for step in range(5) for number in numbers(loader(rows).step(step))]

    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_a_window_limits_the_pairs_of_a_step(rows: Rows) -> None:
    # Four documents of 8 letters; the end after them is only predicted.
    assert loader(rows).pairs(0) == 4 * 8 * 8
    assert Loader(rows, seed=1, global_batch=4, micro_batch=4, window=3).pairs(0) == 4 * 8 * 3
    assert Loader(rows, seed=1, global_batch=4, micro_batch=4, window=9).pairs(0) == 4 * 8 * 8


def test_documents_of_a_packed_row_attend_within_themselves(tmp_path: Path) -> None:
    # Three documents of 3, 2 and 4 ids with their ends fill a row of 8 inputs, the last id of which is a label only.
    full = make.prepared(tmp_path / "full", make.jsonl([{"text": t} for t in ("ab", "c", "def")]), seq_len=8).train
    padded = make.prepared(tmp_path / "padded", make.jsonl([{"text": t} for t in ("ab", "c")]), seq_len=8).train

    assert len(full) == len(padded) == 1
    assert (loader(full).tokens(0), loader(full).pairs(0)) == (3 + 2 + 3, 3 * 3 + 2 * 2 + 3 * 3)
    assert (loader(padded).tokens(0), loader(padded).pairs(0)) == (3 + 2, 3 * 3 + 2 * 2)
    # Every id but the first of each document is predicted.
    assert [loader(rows).step(0)[0].num_labels for rows in (full, padded)] == [2 + 1 + 3, 2 + 1]


@pytest.mark.parametrize(("ranks", "micro"), LAYOUTS)
def test_every_layout_gets_the_same_rows_in_each_step(ranks: int, micro: int, rows: Rows) -> None:
    for step in range(4):
        dealt = [loader(rows, rank, ranks, micro).step(step) for rank in range(ranks)]

        assert [number for batches in dealt for number in numbers(batches)] == numbers(loader(rows).step(step))
        assert [int(place) for batches in dealt for b in batches for place in _places(b)] == [0, 1, 2, 3]
        assert {len(batches) for batches in dealt} == {4 // ranks // micro}
        assert {batch.step for batches in dealt for batch in batches} == {step}


def _places(batch: Batch) -> torch.Tensor:
    assert batch.rows_B is not None
    return batch.rows_B


def test_a_step_does_not_depend_on_those_before(rows: Rows) -> None:
    walked = loader(rows)
    for step in range(7):
        walked.step(step)

    assert numbers(walked.step(7)) == numbers(loader(rows).step(7))


def test_another_batch_goes_on_in_the_line_where_the_last_one_was(rows: Rows) -> None:
    line = [number for step in range(5) for number in numbers(loader(rows).step(step))]
    later = loader(rows, batch=6, micro=6)
    later.go_on(step=2, rows=8)

    assert numbers(later.step(2)) + numbers(later.step(3)) == line[8:20]
    assert later.taken(4) == 20
    # 8 rows of 20 in 2 steps, and the other 12 in 2 more.
    assert later.steps(2) == 4


@pytest.mark.parametrize(("ranks", "micro"), [(1, 16), (1, 3), (2, 4), (4, 4), (16, 1)])
def test_fewer_rows_than_a_batch_are_the_whole_batch(ranks: int, micro: int, rows: Rows) -> None:
    dealt = [loader(rows, rank, ranks, micro, batch=16) for rank in range(ranks)]
    for step in range(2):
        batches = [each.step(step) for each in dealt]

        assert sorted(number for each in batches for number in numbers(each)) == list(range(10))
        # Every rank takes part as often, and with at least one row.
        assert len({len(each) for each in batches}) == 1
        assert min(len(batch.tokens_BT) for each in batches for batch in each) >= 1
        # 8 letters predict 7 and an end.
        assert sum(int((b.labels_BT != IGNORE).sum()) for each in batches for b in each) == 10 * 8
        assert sum(b.num_labels or 0 for each in batches for b in each) == 10 * 8
    assert dealt[0].steps(2) == 2


def test_epochs_become_steps(rows: Rows) -> None:
    # 10 rows in steps of 4.
    assert [loader(rows).steps(epochs) for epochs in (0.01, 0.4, 1, 2, 3)] == [1, 1, 3, 5, 8]


def test_labels_are_the_next_ids_and_padding_has_none(tmp_path: Path) -> None:
    rows = make.prepared(tmp_path, make.jsonl([{"text": "ab"}, {"text": "c"}]), seq_len=7).train
    (batch,) = loader(rows).step(0)

    a, b, c, end, pad = *b"abc", 256, 257
    assert batch.tokens_BT.tolist() == [[a, b, end, c, end, pad, pad]]
    assert batch.labels_BT.tolist() == [[b, end, IGNORE, end, IGNORE, IGNORE, IGNORE]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch.documents_BT is not None
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert {t.dtype for t in (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT)} == {
        torch.int64
    }
    assert loader(rows).tokens(0) == 5


def test_rows_of_one_document_need_no_mask(rows: Rows, tmp_path: Path) -> None:
    padded = make.prepared(tmp_path / "padded", b"abc", seq_len=8).train

    assert all(batch.documents_BT is None for batch in loader(rows).step(0))
    (batch,) = loader(padded).step(0)
    assert batch.documents_BT is None
    assert batch.positions_BT.tolist() == [list(range(8))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sweep_sees_each_row_once_over_all_ranks(ranks: int, rows: Rows) -> None:
    swept = [list(loader(rows, rank, ranks, micro=3).sweep()) for rank in range(ranks)]

    assert Counter(number for each in swept for number in numbers(each)) == Counter(range(10))
    assert len({len(each) for each in swept}) == 1


def test_tokens_of_a_step_leave_padding_out_and_count_all_ranks(rows: Rows) -> None:
    # Each row has 8 inputs: the letters. Its end is a label only.
    assert loader(rows, rank=1, ranks=2, micro=1).tokens(3) == 4 * 8
