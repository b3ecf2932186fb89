"""What must not change a ratio, a loss or a gradient: order, neighbours, padding, micro-batches."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch

from hacpo_kernels import HACPOConfig, SequenceBatch, hacpo_loss, hacpo_loss_from_logprobs

from .builders import Case, boundaries, leaf, make_case, relative_error, run

PER_SEQUENCE = ("source_mean_logprobs", "advantages", "weights", "is_cross", "lengths")
PER_ROW = ("ref_logprobs", "old_logprobs", "loss_mask")


def pick(case: Case, order: list[int], **counts: float) -> Case:
    """The case with these sequences, in this order."""
    bounds = case.sequences.cu_seqlens.tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    chosen = {f.name: getattr(case.sequences, f.name) for f in fields(SequenceBatch)}
    for name in PER_SEQUENCE:
        chosen[name] = None if chosen[name] is None else chosen[name][order]
    for name in PER_ROW:
        chosen[name] = None if chosen[name] is None else chosen[name][rows]
    chosen["cu_seqlens"] = boundaries([bounds[i + 1] - bounds[i] for i in order])
    sequences = SequenceBatch(**chosen)
    return replace(case, logits=case.logits[rows], target_ids=case.target_ids[rows], sequences=sequences, **counts)


def rows_of(case: Case, index: int) -> slice:
    return slice(int(case.sequences.cu_seqlens[index]), int(case.sequences.cu_seqlens[index + 1]))


# rows that start on 16 bytes; see test_hacpo_loss_rows_off_the_boundary_agree_to_rounding for the others
CASE = make_case([3, 5, 1, 4], 48, config=HACPOConfig(beta=0.1), num_sequences=4, num_self_sequences=2, mask=True)


@pytest.mark.parametrize("order", ([3, 1, 0, 2], [2, 3, 1, 0]), ids=str)
def test_hacpo_loss_permuted_sequences_keep_every_bit(order: list[int], backend: str) -> None:
    whole, moved = run(CASE, backend), pick(CASE, order)
    actual = run(moved, backend)
    assert torch.equal(actual.out.ratios, whole.out.ratios[order])
    assert torch.equal(actual.out.live, whole.out.live[order])
    for new, old in enumerate(order):
        assert torch.equal(actual.gradient[rows_of(moved, new)], whole.gradient[rows_of(CASE, old)])


def test_hacpo_loss_rows_off_the_boundary_agree_to_rounding(backend: str) -> None:
    # where V is odd, a row's columns fall on other lanes when the row moves in memory: the order of the sum changes
    odd = make_case([3, 5, 1, 4], 37, num_sequences=4, mask=True)
    whole, moved = run(odd, backend), run(pick(odd, [3, 1, 0, 2]), backend)
    assert relative_error(moved.out.ratios, whole.out.ratios[[3, 1, 0, 2]]) <= 5e-7
    assert torch.equal(moved.out.live, whole.out.live[[3, 1, 0, 2]])
    assert relative_error(moved.gradient, pick(replace(odd, logits=whole.gradient), [3, 1, 0, 2]).logits) <= 1e-6


@pytest.mark.parametrize("kept", ([0], [0, 1], [1, 2, 3], [3]), ids=str)
def test_hacpo_loss_other_sequences_change_no_bit_of_a_sequence(kept: list[int], backend: str) -> None:
    whole, part = run(CASE, backend), pick(CASE, kept)
    actual = run(part, backend)
    assert torch.equal(actual.out.ratios, whole.out.ratios[kept])
    for new, old in enumerate(kept):
        assert torch.equal(actual.gradient[rows_of(part, new)], whole.gradient[rows_of(CASE, old)])


def test_hacpo_loss_empty_sequences_between_change_nothing(backend: str) -> None:
    whole = run(CASE, backend)
    bounds = CASE.sequences.cu_seqlens.tolist()
    chosen = {f.name: getattr(CASE.sequences, f.name) for f in fields(SequenceBatch)}
    places = torch.tensor([1, 2, 4, 6])  # of the old sequences among the new ones
    for name in PER_SEQUENCE:
        if chosen[name] is not None:
            # what an empty sequence carries is not read
            filler = torch.full((7,), float("nan")) if chosen[name].is_floating_point() else torch.ones(7).bool()
            chosen[name] = filler.index_put((places,), chosen[name])
    chosen["cu_seqlens"] = torch.tensor(
        [0, bounds[0], bounds[1], bounds[2], bounds[2], bounds[3], bounds[3], bounds[4]]
    )
    actual = run(replace(CASE, sequences=SequenceBatch(**chosen), num_sequences=None, num_self_sequences=None), backend)
    default = run(replace(CASE, num_sequences=None, num_self_sequences=None), backend)
    assert torch.equal(actual.loss, default.loss)
    assert torch.equal(actual.gradient, default.gradient)
    assert torch.equal(actual.out.ratios[places], whole.out.ratios)
    empty = [0, 3, 5]
    assert actual.out.ratios[empty].tolist() == [1.0] * 3
    assert actual.out.live[empty].tolist() == [False] * 3


@pytest.mark.parametrize("parts", ([[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 2, 3], [1]]), ids=str)
def test_hacpo_loss_any_split_of_an_update_gives_its_gradient(parts: list[list[int]], backend: str) -> None:
    whole = run(CASE, backend)
    total, gradient = 0.0, torch.zeros_like(whole.gradient)
    for part in parts:
        piece = pick(CASE, part)
        result = run(piece, backend)
        total += result.loss.item()
        for new, old in enumerate(part):
            gradient[rows_of(CASE, old)] = result.gradient[rows_of(piece, new)]
    assert total == pytest.approx(whole.loss.item(), rel=1e-6)
    assert torch.equal(gradient, whole.gradient)


@pytest.mark.parametrize("splits", ([4], [1, 3], [2, 2], [3, 1]), ids=str)
def test_hacpo_loss_one_objective_among_four_weighs_a_quarter_in_any_split(
    splits: list[int], objective_backend: str
) -> None:
    advantages, total, gradient, start = [1.0, 0.0, 0.0, 0.0], 0.0, [], 0
    for size in splits:
        logprobs = torch.full((size,), -1.0, requires_grad=True)
        sequences = SequenceBatch(
            torch.arange(size + 1), torch.full((size,), -1.0), torch.tensor(advantages[start : start + size])
        )
        out = hacpo_loss_from_logprobs(logprobs, sequences, HACPOConfig(), num_sequences=4)
        out.loss.backward()
        total, start = total + out.loss.item(), start + size
        gradient += logprobs.grad.tolist()
    assert total == -0.25
    assert gradient == [-0.25, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("count", (4, 4.0, torch.tensor(4), torch.tensor([4.0])), ids=repr)
def test_hacpo_loss_denominator_may_be_a_number_or_an_element(count: object, backend: str) -> None:
    expected = run(replace(CASE, num_sequences=4), backend)
    actual = run(replace(CASE, num_sequences=count), backend)
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(actual.gradient, expected.gradient)


def test_hacpo_loss_mask_equals_leaving_the_rows_out(backend: str) -> None:
    case = make_case([6, 4], 48, seed=3, mask=True)
    mask, bounds = case.sequences.loss_mask, case.sequences.cu_seqlens.tolist()
    lengths = [int(mask[a:b].sum()) for a, b in pairwise(bounds)]
    assert 0 < sum(lengths) < 10
    packed = replace(
        case, logits=case.logits[mask], target_ids=case.target_ids[mask],
        sequences=replace(
            case.sequences, cu_seqlens=boundaries(lengths), loss_mask=None,
            ref_logprobs=case.sequences.ref_logprobs[mask], old_logprobs=case.sequences.old_logprobs[mask],
        ),
    )  # fmt: skip
    masked, actual = run(case, backend), run(packed, backend)
    assert torch.equal(masked.loss, actual.loss)
    assert torch.equal(masked.out.ratios, actual.out.ratios)
    assert torch.equal(masked.gradient[mask], actual.gradient)


@pytest.mark.parametrize("dtype", (torch.bool, torch.int8, torch.int64), ids=str)
def test_hacpo_loss_mask_of_any_integer_dtype_means_the_same(dtype: torch.dtype, backend: str) -> None:
    case = make_case([6, 4], 37, mask=True)
    expected = run(case, backend)
    sequences = replace(
        case.sequences, loss_mask=case.sequences.loss_mask.to(dtype) * (1 if dtype == torch.bool else 2)
    )
    actual = run(replace(case, sequences=sequences), backend)
    assert torch.equal(actual.gradient, expected.gradient)


def test_hacpo_loss_fields_of_any_stride_and_dtype_mean_the_same(backend: str) -> None:
    case = make_case([3, 2, 4], 37, config=HACPOConfig(beta=0.1), own_lengths=False, mask=True)
    expected = run(case, backend)
    changed = {}
    for f in fields(SequenceBatch):
        value = getattr(case.sequences, f.name)
        if value.is_floating_point():
            value = value.double()
        changed[f.name] = value.repeat_interleave(2)[::2]
        assert not changed[f.name].is_contiguous()
    actual = run(replace(case, sequences=SequenceBatch(**changed)), backend)
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(actual.gradient, expected.gradient)


def test_hacpo_loss_padded_logits_equal_packed_ones(backend: str) -> None:
    case = make_case([4, 4, 4], 33)
    packed = run(case, backend)
    padded = run(replace(case, logits=case.logits.view(3, 4, 33), target_ids=case.target_ids.view(3, 4)), backend)
    assert torch.equal(padded.loss, packed.loss)
    assert torch.equal(padded.gradient.view(12, 33), packed.gradient)
    assert padded.out.logprobs.shape == (12,)


def test_hacpo_loss_scaled_by_the_caller_scales_its_gradient(backend: str) -> None:
    case = make_case([3, 2], 37)
    expected = run(case, backend)
    logits = leaf(case.logits)
    (hacpo_loss(logits, case.target_ids, case.sequences, case.config, backend=backend).loss * 8.0).backward()
    assert relative_error(logits.grad, 8.0 * expected.gradient) <= 1e-6
