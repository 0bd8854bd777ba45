"""Rows are full, nothing is lost, and each id but a document's first is predicted exactly once."""

from __future__ import annotations

from collections import Counter
from math import ceil
from random import Random

import pytest

from engine.data import packing
from engine.data.packing import cut, pack

LENGTHS = {
    "one": [5],
    "all full": [10] * 4,
    "halves": [5] * 9,
    "just over half": [6] * 7,
    "pairs that fit": [7, 3, 6, 4, 8, 2, 9, 1],
    "large and small": [9, 9, 9, 1, 1, 1],
    "many": [1 + (place * 7919) % 10 for place in range(500)],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_every_document_is_in_one_row_whole(lengths: list[int]) -> None:
    rows = pack(lengths, 10)

    assert Counter(place for row in rows for place in row) == Counter(range(len(lengths)))
    assert max(sum(lengths[place] for place in row) for row in rows) <= 10


# The fewest rows possible, by hand.
@pytest.mark.parametrize(
    ("name", "fewest"),
    [("one", 1), ("all full", 4), ("halves", 5), ("just over half", 7), ("pairs that fit", 4), ("large and small", 3)],
)
def test_small_cases_need_the_fewest_rows(name: str, fewest: int) -> None:
    assert len(pack(LENGTHS[name], 10)) == fewest


def test_many_documents_need_no_more_rows_than_their_sum_does() -> None:
    lengths = LENGTHS["many"]

    assert len(pack(lengths, 10)) == ceil(sum(lengths) / 10)


def test_rows_of_a_few_long_documents_are_full_too() -> None:
    # Three or four to a row, as conversations of 300 tokens are in rows of 1024.
    draw = Random(1)
    lengths = [max(60, min(1000, round(draw.lognormvariate(5.7, 0.45)))) for _ in range(500)]

    assert sum(lengths) / (len(pack(lengths, 1025)) * 1024) > 0.98


def test_a_row_takes_what_fills_it_and_not_what_is_longest() -> None:
    # By hand: 6 + 5 leaves a place of 12 empty; 6 + 3 + 3 and 5 + 5 + 2 leave none.
    assert pack([6, 5, 5, 3, 3, 2], 12) == [[0, 3, 4], [1, 2, 5]]


def test_short_documents_fill_rows_to_the_last_place() -> None:
    lengths = [40 + (place * 7919) % 160 for place in range(400)]
    rows = pack(lengths, 1024)

    # All rows are full but for less than the shortest document, except the last to be opened.
    assert sum(lengths) / (len(rows) * 1024) > 0.98


def test_lengths_that_never_fill_a_row_to_its_last_place_are_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(1)
    # Even ones in odd rows.
    lengths = [2 * draw.randint(20, 500) for _ in range(1000)]
    looked_at = []
    pieces = packing._pieces
    monkeypatch.setattr(packing, "_pieces", lambda *given: (looked_at.append(1) or each for each in pieces(*given)))
    rows = pack(lengths, 4097)

    assert len(looked_at) <= len(rows) * (packing.MOST + 1)
    assert sum(lengths) / (len(rows) * 4096) > 0.98


def test_packing_tells_how_far_it_is_and_hurries_once_time_is_up() -> None:
    told: list[tuple[int, int]] = []
    lengths = LENGTHS["many"]
    rows = pack(lengths, 10, told=lambda placed, total: told.append((placed, total)), in_time=lambda: False)

    assert told[-1] == (500, 500)
    assert [placed for placed, _ in told] == sorted({placed for placed, _ in told})
    assert Counter(place for row in rows for place in row) == Counter(range(len(lengths)))
    # First fit of falling lengths needs at most 11/9 of the fewest rows, and six ninths of one (Dosa 2007).
    assert len(rows) <= 11 / 9 * ceil(sum(lengths) / 10) + 6 / 9
    assert max(sum(lengths[place] for place in row) for row in rows) <= 10


def test_packing_is_the_same_each_time() -> None:
    assert pack(LENGTHS["many"], 10) == pack(LENGTHS["many"], 10)
    assert pack([], 10) == []


def test_text_is_cut_with_one_id_shared_between_rows() -> None:
    # Rows of 5 ids are 4 inputs: a document of 9 makes two full rows (0-4, 4-8), and the next one starts a third.
    assert list(cut([("a", 9), ("b", 3)], 5)) == [[("a", 0, 5)], [("a", 4, 5)], [("b", 0, 3)]]
    # 3 of 5 places are taken, so 2 ids of the next document fit.
    assert list(cut([("a", 3), ("b", 4)], 5)) == [[("a", 0, 3), ("b", 0, 2)], [("b", 1, 3)]]
    # One place left is of no use: a single id predicts nothing.
    assert list(cut([("a", 4), ("b", 2)], 5)) == [[("a", 0, 4)], [("b", 0, 2)]]
    assert list(cut([("a", 2), ("b", 2)], 5, packing=False)) == [[("a", 0, 2)], [("b", 0, 2)]]
    assert list(cut([("a", 1)], 5)) == []


@pytest.mark.parametrize("capacity", [2, 3, 5, 16])
@pytest.mark.parametrize("packing", [True, False])
def test_each_id_but_the_first_of_a_document_is_predicted_once(capacity: int, packing: bool) -> None:
    lengths = [2 + (place * 31) % 23 for place in range(40)]
    rows = list(cut(enumerate(lengths), capacity, packing=packing))
    predicted = Counter(
        (document, start + place) for row in rows for document, start, length in row for place in range(1, length)
    )

    assert predicted == Counter(
        (document, place) for document, length in enumerate(lengths) for place in range(1, length)
    )
    assert max(sum(length for _, _, length in row) for row in rows) <= capacity
    if packing:
        assert min(sum(length for _, _, length in row) for row in rows[:-1]) >= capacity - 1
