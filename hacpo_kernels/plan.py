"""Which rows go through the head together: pure arithmetic on sequence lengths and a memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Matrix products reach their speed at about this many rows; more of them at once only cost memory.
TARGET_ROWS = 2048


@dataclass(frozen=True)
class Group:
    """Whole sequences whose logits are in memory at once.

    Attributes:
        sequences: their indices, ascending.
        rows: their number of rows together.
        tile_rows: how many rows are computed at a time. Equal to `rows` unless one sequence alone exceeds the budget;
            then the first `cached_rows` rows keep their logits for the gradient and the rest is computed twice.
        cached_rows: rows that keep their logits.
    """

    sequences: tuple[int, ...]
    rows: int
    tile_rows: int
    cached_rows: int


def rows_within(memory_budget: int, vocab_size: int, bytes_per_logit: int) -> int:
    """How many rows of logits fit the budget.

    Raises:
        ValueError: not even one.
    """
    per_row = vocab_size * bytes_per_logit
    if memory_budget < per_row:
        raise ValueError(
            f"memory_budget must be at least the {per_row} bytes of one row of logits ({vocab_size} columns of "
            f"{bytes_per_logit} bytes), got {memory_budget}."
        )
    return memory_budget // per_row


def plan_groups(
    lengths: Sequence[int], needed: Sequence[bool], rows_fit: int, target_rows: int = TARGET_ROWS
) -> list[Group]:
    """Groups of whole sequences for the head.

    Every needed, non-empty sequence is in exactly one group, and no group has more than `rows_fit` rows in memory.
    Sequences are packed longest first, each into the first group with room, so that the lengths in each group depend
    on the multiset of lengths alone and not on the order of the batch.

    Args:
        lengths: rows of each sequence.
        needed: whether it goes through the head at all.
        rows_fit: rows of logits that fit the memory budget, >= 1.
        target_rows: rows a group is filled up to, as far as they fit.
    """
    order = sorted((i for i, length in enumerate(lengths) if needed[i] and length), key=lambda i: (-lengths[i], i))
    longest_that_fits = max((lengths[i] for i in order if lengths[i] <= rows_fit), default=1)
    capacity = min(rows_fit, max(target_rows, longest_that_fits))
    bins: list[list[int]] = []
    room: list[int] = []
    groups: list[Group] = []
    for index in order:
        length = lengths[index]
        if length > rows_fit:
            tile = max(1, rows_fit // 4)
            # one tile stays free for the rows that are not cached
            groups.append(Group((index,), length, tile, max(0, rows_fit - tile)))
            continue
        place = next((place for place, free in enumerate(room) if length <= free), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= length
    for members in bins:
        rows = sum(lengths[i] for i in members)
        groups.append(Group(tuple(sorted(members)), rows, rows, rows))
    return groups
