"""Which rows go through the head together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacpo_kernels.plan import Group, plan_groups, rows_within

SEQUENCES = st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=40)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(SEQUENCES, st.integers(1, 80), st.integers(1, 50))
def test_plan_groups_holds_every_needed_sequence_once_within_the_budget(
    sequences: list[tuple[int, bool]], rows_fit: int, target: int
) -> None:
    lengths, needed = [n for n, _ in sequences], [b for _, b in sequences]
    groups = plan_groups(lengths, needed, rows_fit, target)
    planned = sorted(i for group in groups for i in group.sequences)
    assert planned == [i for i, length in enumerate(lengths) if needed[i] and length]
    for group in groups:
        assert group.rows == sum(lengths[i] for i in group.sequences)
        # what is cached and the tile that is being worked on
        working = group.tile_rows if group.cached_rows < group.rows else 0
        assert group.cached_rows + working <= rows_fit


@settings(deadline=None, max_examples=50, derandomize=True)
@given(SEQUENCES, st.integers(1, 80), st.randoms())
def test_plan_groups_does_not_depend_on_the_order_of_the_batch(
    sequences: list[tuple[int, bool]], rows_fit: int, rng: random.Random
) -> None:
    def shapes(given: list[tuple[int, bool]]) -> list[list[int]]:
        groups = plan_groups([n for n, _ in given], [b for _, b in given], rows_fit, 20)
        return sorted(sorted(given[i][0] for i in group.sequences) for group in groups)

    shuffled = sequences[:]
    rng.shuffle(shuffled)
    assert shapes(sequences) == shapes(shuffled)


def test_plan_groups_short_sequences_fill_the_target() -> None:
    groups = plan_groups([5] * 10, [True] * 10, rows_fit=1000, target_rows=20)
    assert [group.rows for group in groups] == [20, 20, 10]


def test_plan_groups_sequence_above_the_budget_is_alone_and_cached_as_far_as_it_fits() -> None:
    assert plan_groups([100], [True], rows_fit=40) == [Group((0,), 100, 10, 30)]


def test_plan_groups_of_nothing_is_empty() -> None:
    assert plan_groups([], [], rows_fit=10) == plan_groups([3, 0], [False, True], rows_fit=10) == []


def test_rows_within_less_than_one_row_raises() -> None:
    assert rows_within(1000, 100, 4) == 2
    with pytest.raises(ValueError, match=r"at least the 400 bytes of one row of logits .* got 399"):
        rows_within(399, 100, 4)
