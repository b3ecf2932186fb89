"""hacpo_loss_from_logprobs: the second half of hacpo_loss, in every dtype."""

from __future__ import annotations

import pytest
import torch

from hacpo_kernels import HACPOConfig, hacpo_loss_from_logprobs, token_logprobs
from hacpo_kernels.reference import reference_loss_from_logprobs

from .builders import leaf, make_case, relative_error, run

CONFIGS = {
    "hacpo+kl": HACPOConfig(beta=0.1),
    "naive": HACPOConfig.naive(),
    "token": HACPOConfig(ratio="token", epsilon_low=0.2, epsilon_high=0.28),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_hacpo_loss_from_logprobs_after_token_logprobs_equals_hacpo_loss(
    name: str, dtype: torch.dtype, objective_backend: str
) -> None:
    case = make_case([3, 0, 4, 2], 37, dtype=dtype, config=CONFIGS[name], num_sequences=5, mask=True)
    direct = run(case, objective_backend)
    logits = leaf(case.logits)
    logprobs = token_logprobs(logits, case.target_ids)
    out = hacpo_loss_from_logprobs(logprobs, case.sequences, case.config, **case.counts)
    out.loss.backward()
    assert torch.equal(out.loss, direct.loss)
    assert torch.equal(out.ratios, direct.out.ratios)
    assert torch.equal(out.logprobs, direct.out.logprobs)
    assert torch.equal(logits.grad, direct.gradient)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_hacpo_loss_from_logprobs_any_dtype_equals_reference(
    name: str, dtype: torch.dtype, objective_backend: str
) -> None:
    case = make_case([3, 0, 4, 2], 37, config=CONFIGS[name], own_lengths=False, mask=True)
    logprobs = token_logprobs(case.logits, case.target_ids).to(dtype)
    mine, wide = leaf(logprobs), leaf(logprobs.double())
    out = hacpo_loss_from_logprobs(mine, case.sequences, case.config)
    expected = reference_loss_from_logprobs(wide, case.sequences, case.config)
    out.loss.backward()
    expected.loss.backward()
    narrow = torch.float64 if dtype == torch.float64 else torch.float32
    assert out.loss.dtype == out.ratios.dtype == out.logprobs.dtype == narrow
    assert mine.grad.dtype == dtype
    assert float((out.ratios / expected.ratios - 1.0).abs().max()) <= 1e-6
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=1e-5, atol=1e-7)
    exact = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2)
    assert relative_error(mine.grad, wide.grad) <= exact


def test_hacpo_loss_from_logprobs_passes_gradients_to_the_head(objective_backend: str) -> None:
    case = make_case([3, 2], 5)
    logprobs = leaf(token_logprobs(case.logits, case.target_ids))
    scale = torch.ones((), requires_grad=True)
    hacpo_loss_from_logprobs(logprobs * scale, case.sequences, case.config).loss.backward()
    assert scale.grad.item() == pytest.approx((logprobs.grad * logprobs).sum().item(), rel=1e-5)


def test_hacpo_loss_from_logprobs_strided_input_is_read_in_order(objective_backend: str) -> None:
    case = make_case([3, 2], 5)
    logprobs = token_logprobs(case.logits, case.target_ids)
    plain, strided = leaf(logprobs), leaf(logprobs.repeat_interleave(2))
    first = hacpo_loss_from_logprobs(plain, case.sequences, case.config)
    second = hacpo_loss_from_logprobs(strided[::2], case.sequences, case.config)
    first.loss.backward()
    second.loss.backward()
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(plain.grad, strided.grad[::2])


def test_hacpo_loss_from_logprobs_without_gradients_gives_the_same_loss(objective_backend: str) -> None:
    case = make_case([3, 2], 5)
    logprobs = token_logprobs(case.logits, case.target_ids)
    with torch.inference_mode():
        out = hacpo_loss_from_logprobs(logprobs, case.sequences, case.config)
    assert not out.loss.requires_grad
    assert torch.equal(out.loss, hacpo_loss_from_logprobs(leaf(logprobs), case.sequences, case.config).loss)


def test_hacpo_loss_from_logprobs_impossible_token_stays_finite(objective_backend: str) -> None:
    case = make_case([2, 2], 5, config=HACPOConfig())
    logprobs = torch.tensor([float("-inf"), -1.0, -1.0, -1.0], requires_grad=True)
    out = hacpo_loss_from_logprobs(logprobs, case.sequences, case.config)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[:2].tolist() == [0.0, 0.0]
