"""How exact the fused head is, against float64 and beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hacpo_kernels import (
    HACPOConfig,
    LinearHACPOLoss,
    SequenceBatch,
    hacpo_loss_from_logprobs,
    linear_hacpo_loss,
    linear_token_logprobs,
)
from hacpo_kernels.reference import reference_hacpo_loss

WIDE = HACPOConfig.gspo(epsilon_low=0.9, epsilon_high=9.0)  # nothing is clipped
SEQUENCES, LENGTH, VOCAB, HIDDEN = 8, 16, 257, 64


def inputs(
    seed: int, dtype: torch.dtype, vocab: int = VOCAB, hidden_size: int = HIDDEN
) -> tuple[Tensor, Tensor, Tensor, SequenceBatch]:
    generator = torch.Generator().manual_seed(seed)
    rows = SEQUENCES * LENGTH
    hidden = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=generator) * 0.3).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    means = linear_token_logprobs(hidden, weight, targets)
    assert isinstance(means, Tensor)
    sequences = SequenceBatch(
        torch.arange(SEQUENCES + 1) * LENGTH,
        means.view(SEQUENCES, LENGTH).mean(-1),
        torch.randn(SEQUENCES, generator=generator),
    )
    return hidden, weight, targets, sequences


def gradients(hidden: Tensor, weight: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    return [gradient.double() for gradient in torch.autograd.grad(loss(*leaves), leaves)]


def relative_errors(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "hidden_size"), [(VOCAB, HIDDEN), (1025, 32), (33, 256)])
@pytest.mark.parametrize("seed", range(3))
def test_linear_hacpo_loss_low_precision_gradient_is_no_worse_than_eager(
    dtype: torch.dtype, seed: int, vocab: int, hidden_size: int
) -> None:
    hidden, weight, targets, sequences = inputs(seed, dtype, vocab, hidden_size)

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return hacpo_loss_from_logprobs(logprobs, sequences, WIDE).loss

    def exact(hidden: Tensor, weight: Tensor) -> Tensor:
        return reference_hacpo_loss(hidden @ weight.T, targets, sequences, WIDE).loss

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_hacpo_loss(hidden, weight, targets, sequences, WIDE).loss

    truth = gradients(hidden.double(), weight.double(), exact)
    for mine, theirs in zip(
        relative_errors(gradients(hidden, weight, ours), truth),
        relative_errors(gradients(hidden, weight, eager), truth),
        strict=True,
    ):
        assert mine <= 1.05 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_hacpo_loss_weight_gradient_does_not_worsen_with_the_number_of_groups(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences, vocab, hidden_size = 1024, 33, 8
    hidden = torch.randn(sequences, hidden_size, generator=generator).to(dtype)
    weight = torch.randn(vocab, hidden_size, generator=generator).to(dtype)
    targets = torch.zeros(sequences, dtype=torch.long)  # every group adds to the same rows
    means = linear_token_logprobs(hidden, weight, targets)
    assert isinstance(means, Tensor)
    batch = SequenceBatch(torch.arange(sequences + 1), means, torch.ones(sequences))
    exact = gradients(
        hidden.double(), weight.double(), lambda h, w: reference_hacpo_loss(h @ w.T, targets, batch, WIDE).loss
    )[1]
    errors = []
    for groups in (1, 64, 1024):
        budget = sequences // groups * vocab * 4
        got = gradients(
            hidden, weight,
            lambda h, w, budget=budget: linear_hacpo_loss(h, w, targets, batch, WIDE, memory_budget=budget).loss,
        )[1]  # fmt: skip
        errors.append(float((got - exact).norm() / exact.norm()))
    # bfloat16 rounds the result once, at the end
    assert max(errors) <= 1.05 * errors[0] + (1e-6 if dtype == torch.float32 else 0.0)


def test_linear_hacpo_loss_on_policy_ratio_is_one_for_any_packing_and_budget() -> None:
    hidden, weight, targets, batch = inputs(0, torch.bfloat16)
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(1))
    shuffled = hidden.view(SEQUENCES, LENGTH, HIDDEN)[order]
    shuffled_targets = targets.view(SEQUENCES, LENGTH)[order]
    permuted = SequenceBatch(batch.cu_seqlens, batch.source_mean_logprobs[order], batch.advantages[order])
    ratios = []
    for rows in (1, 5, 16, 40, 1000):
        out = linear_hacpo_loss(
            shuffled.reshape(-1, HIDDEN), weight, shuffled_targets.reshape(-1), permuted, WIDE,
            memory_budget=rows * VOCAB * 4,
        )  # fmt: skip
        ratios.append(out.ratios)
    padded = torch.nn.functional.pad(shuffled.float(), (0, 0, 3, 2), value=float("nan")).bfloat16()
    mask = torch.nn.functional.pad(torch.ones(SEQUENCES, LENGTH, dtype=torch.bool), (3, 2))
    ids = torch.nn.functional.pad(shuffled_targets, (3, 2), value=-100)
    ratios.append(
        LinearHACPOLoss(WIDE)(
            padded, weight, ids, mask, permuted.source_mean_logprobs, permuted.advantages
        ).ratios
    )  # fmt: skip
    assert float((torch.stack(ratios) - 1).abs().max()) <= 1e-5
