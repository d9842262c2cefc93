"""Rows are shared out among sources as their weights say, exactly."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from training.data.mixture import Cursor, integer_weights


def cursor(weights: list[int], rows: list[int]) -> Cursor:
    return Cursor(weights, lambda source, epoch, row: row < rows[source])


def test_weights_become_the_smallest_integers() -> None:
    assert integer_weights([0.1, 0.2]) == [1, 2]
    assert integer_weights([3, 1.5, 0.75]) == [4, 2, 1]
    assert integer_weights([1e-7, 1.0]) == [1, 10_000_000]
    assert integer_weights([640]) == [1]


@pytest.mark.parametrize("weights", [[1, 1], [7, 2, 1], [1, 1000], [3, 3, 3, 1]])
def test_no_source_is_ever_a_row_ahead_of_its_share(weights: list[int]) -> None:
    walk = cursor(weights, [10**9] * len(weights))
    for n in range(1, 2001):
        walk.next()
        for weight, taken in zip(weights, walk.taken):
            assert taken - n * weight / sum(weights) < 1
    assert abs(walk.taken[0] - 2000 * weights[0] / sum(weights)) <= 1


def test_in_proportion_to_their_rows_sources_end_together() -> None:
    rows = [5, 13, 1, 30]
    walk = cursor(rows, rows)
    for epoch in range(3):
        seen = [walk.next() for _ in range(sum(rows))]
        assert sorted(seen) == sorted((s, epoch, i) for s in range(4) for i in range(rows[s]))


def test_a_small_source_starts_over_while_a_large_one_goes_on() -> None:
    walk = cursor([1, 1], [3, 100])
    seen = [walk.next() for _ in range(20)]
    assert [(e, r) for s, e, r in seen if s == 0] == [(i // 3, i % 3) for i in range(10)]
    assert [(e, r) for s, e, r in seen if s == 1] == [(0, i) for i in range(10)]


@pytest.mark.parametrize("stop", [0, 1, 17, 40])
def test_going_on_from_a_state(stop: int) -> None:
    rows = [4, 9, 25]
    whole = cursor([5, 3, 1], rows)
    expected = [whole.next() for _ in range(100)]
    first = cursor([5, 3, 1], rows)
    for _ in range(stop):
        first.next()
    second = cursor([5, 3, 1], rows)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.next() for _ in range(100 - stop)] == expected[stop:]
    assert second.rows == 100


def test_changed_weights_count_from_where_they_change() -> None:
    walk = cursor([1, 1], [1000, 1000])
    for _ in range(100):
        walk.next()
    other = cursor([1, 3], [1000, 1000])
    other.load_state_dict(walk.state_dict())
    after = Counter(other.next()[0] for _ in range(40))
    assert after == {0: 10, 1: 30}
    assert other.rows == 140
    assert other.row == [60, 80], "rows of both go on where they were"


def test_the_sequence_by_hand() -> None:
    """Shares after 1, 2, 3, 4 rows are 1/4, 2/4, 3/4, 1 and 3/4, 6/4, 9/4, 3."""
    walk = cursor([1, 3], [100, 100])
    assert [walk.next()[0] for _ in range(8)] == [1, 0, 1, 1] * 2
