"""Minus infinity, NaN in rows that do not count, and ids outside the vocabulary."""

from __future__ import annotations

import pytest
import torch

from hacpo_kernels import SequenceBatch, hacpo_loss, token_logprobs
from hacpo_kernels.reference import reference_token_logprobs

from .builders import leaf, make_case, relative_error, run, with_sequences

GARBAGE = (float("nan"), float("-inf"), float("inf"))


@pytest.mark.parametrize(
    "values, dtype, entropy",
    [([0.0, 0.0, float("-inf")], torch.float32, 0.693147), ([65504.0, -65504.0], torch.float16, 0.0)],
)
def test_token_logprobs_entropy_of_excluded_columns_is_finite(
    values: list[float], dtype: torch.dtype, entropy: float, backend: str
) -> None:
    logits = torch.tensor([values], dtype=dtype, requires_grad=True)
    _, entropies = token_logprobs(logits, torch.tensor([0]), entropy=True, backend=backend)
    assert float(entropies.detach()) == pytest.approx(entropy, abs=1e-6)
    entropies.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, -1].item() == 0.0


@pytest.mark.parametrize("excluded", [slice(0, 4096), slice(4096, 9000), slice(1, None, 2)], ids=str)
def test_token_logprobs_whole_excluded_blocks_equal_reference(excluded: slice, backend: str) -> None:
    logits = torch.randn(1, 9001, generator=torch.Generator().manual_seed(0))
    logits[:, excluded] = float("-inf")
    ids = torch.tensor([9000])
    mine, wide = leaf(logits), leaf(logits.double())
    logprobs, entropies = token_logprobs(mine, ids, entropy=True, backend=backend)
    expected = reference_token_logprobs(wide, ids)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected[1], rtol=1e-5, atol=1e-5)
    (logprobs + entropies).sum().backward()
    (expected[0] + expected[1]).sum().backward()
    assert relative_error(mine.grad, wide.grad) <= 1e-5


def test_token_logprobs_impossible_target_is_minus_infinity(backend: str) -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    logprob = token_logprobs(logits, torch.tensor([2]), backend=backend)
    assert float(logprob) == float("-inf")


def test_hacpo_loss_impossible_target_has_no_gradient_and_a_finite_loss(backend: str) -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")], [1.0, 0.0, 2.0]], requires_grad=True)
    sequences = SequenceBatch(torch.tensor([0, 2]), torch.tensor([-1.0]), torch.tensor([1.0]))
    case = make_case([2], 3)
    out = hacpo_loss(logits, torch.tensor([2, 0]), sequences, case.config, backend=backend)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert out.live.tolist() == [False]
    assert logits.grad.abs().max() == 0.0


@pytest.mark.parametrize("garbage", GARBAGE)
def test_token_logprobs_ignored_row_is_zero_whatever_it_holds(garbage: float, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(3, 37, generator=generator), torch.tensor([4, -100, 36])
    clean = leaf(logits)
    expected = token_logprobs(clean, ids, entropy=True, backend=backend)
    (expected[0] * 2.0 + expected[1]).sum().backward()
    logits[1] = garbage
    mine = leaf(logits)
    actual = token_logprobs(mine, ids, entropy=True, backend=backend)
    (actual[0] * 2.0 + actual[1]).sum().backward()
    assert actual[0][1].item() == actual[1][1].item() == 0.0
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert mine.grad[1].abs().max() == 0.0
    assert torch.equal(mine.grad, clean.grad)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_hacpo_loss_rows_outside_the_mask_influence_nothing(garbage: float, backend: str) -> None:
    config = make_case([1], 2).config
    case = make_case([4, 0, 5, 3], 37, config=type(config)(beta=0.1), mask=True, seed=2)
    mask = case.sequences.loss_mask
    assert bool((~mask).any())
    clean = run(case, backend)
    logits, ids = case.logits.clone(), case.target_ids.clone()
    logits[~mask], ids[~mask] = garbage, -100
    dirty = with_sequences(
        type(case)(logits, ids, case.sequences, case.config),
        ref_logprobs=torch.where(mask, case.sequences.ref_logprobs, garbage),
        old_logprobs=torch.where(mask, case.sequences.old_logprobs, garbage),
    )
    actual = run(dirty, backend)
    assert torch.equal(actual.loss, clean.loss)
    assert torch.equal(actual.gradient, clean.gradient)
    assert actual.gradient[~mask].abs().max() == 0.0
    assert actual.out.logprobs[~mask].abs().max() == 0.0


def test_hacpo_loss_nan_in_a_row_that_counts_is_not_hidden(backend: str) -> None:
    case = make_case([3, 2], 9)
    logits = case.logits.clone()
    logits[1, 4] = float("nan")
    out = hacpo_loss(logits, case.target_ids, case.sequences, case.config, backend=backend)
    assert torch.isnan(out.loss)
    assert torch.isnan(out.ratios).tolist() == [True, False]


@pytest.mark.parametrize("bad", (-1, -5, 33, 34, 63, 10**12))
def test_token_logprobs_unchecked_id_outside_gives_nan_and_harms_nothing(
    bad: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hacpo_kernels.logprob.check_target_ids", lambda *arguments: None)
    memory = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([5, bad, 32])
    logits = (memory.clone() * 1.0)[1:4].requires_grad_()
    before = logits.detach().clone()
    logprobs = token_logprobs(logits, ids, backend=backend)
    logprobs[[0, 2]].sum().backward()
    expected = reference_token_logprobs(before[[0, 2]], ids[[0, 2]])[0]
    assert torch.isnan(logprobs).tolist() == [False, True, False]
    torch.testing.assert_close(logprobs[[0, 2]].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.detach(), before)


@pytest.mark.parametrize("bad", (-100, 33, 10**12))
def test_hacpo_loss_unchecked_id_outside_gives_nan(bad: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacpo_kernels.loss.check_target_ids", lambda *arguments: None)
    case = make_case([2, 2], 33)
    ids = case.target_ids.clone()
    ids[1] = bad
    logits = leaf(case.logits)
    out = hacpo_loss(logits, ids, case.sequences, case.config, backend=backend)
    out.loss.backward()
    assert torch.isnan(out.loss)
    assert torch.isnan(logits.grad[:2]).all(), "the whole sequence is unknown"
    assert torch.isfinite(logits.grad[2:]).all(), "its neighbour is not"


def test_triton_unchecked_boundaries_outside_stay_inside_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's own operators check their indices
    monkeypatch.setattr("hacpo_kernels.types.values_are_checked", lambda tensor: False)
    case = make_case([2, 2], 9)
    sequences = SequenceBatch(torch.tensor([0, 2, 10**9]), torch.zeros(2), torch.ones(2))
    out = hacpo_loss(leaf(case.logits), case.target_ids, sequences, case.config, backend="triton")
    ends_at_last_row = SequenceBatch(torch.tensor([0, 2, 4]), torch.zeros(2), torch.ones(2))
    same = hacpo_loss(leaf(case.logits), case.target_ids, ends_at_last_row, case.config, backend="triton")
    assert torch.equal(out.ratios, same.ratios)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_torch_backend_where_rows_cannot_be_selected_still_hides_those_that_do_not_count(
    garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on an accelerator the rows are not looked for, since the host would wait: all are computed, then dropped
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(3, 37, generator=generator), torch.tensor([4, -100, 36])
    logits[1] = garbage
    selected = leaf(logits)
    expected = token_logprobs(selected, ids, entropy=True, backend="torch")
    (expected[0] + expected[1]).sum().backward()
    monkeypatch.setattr("hacpo_kernels.backends.torch_ops._selected", lambda mask: None)
    mine = leaf(logits)
    actual = token_logprobs(mine, ids, entropy=True, backend="torch")
    (actual[0] + actual[1]).sum().backward()
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(mine.grad, selected.grad)
