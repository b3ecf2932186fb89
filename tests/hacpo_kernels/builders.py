"""Inputs and the one comparison that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hacpo_kernels import HACPOConfig, LossOutput, SequenceBatch, hacpo_loss
from hacpo_kernels.reference import ReferenceOutput, reference_hacpo_loss, reference_token_logprobs

BACKENDS = ("torch", "triton")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}

# log-ratios on both sides of every bound: the self clip radii 3e-4 and 4e-4, the cross bounds 0.8 to 1, the clamp at 10
SELF_LOG_RATIOS = (0.0, 1e-4, -1e-4, 2e-3, -2e-3, 0.3, -0.3, 12.0, -12.0)
CROSS_LOG_RATIOS = (-0.1, -0.02, -0.4, 0.15, -1.5, 12.0, -12.0)


@dataclass(frozen=True)
class Case:
    """Arguments of `hacpo_loss`."""

    logits: Tensor
    target_ids: Tensor
    sequences: SequenceBatch
    config: HACPOConfig = field(default_factory=HACPOConfig)
    update_index: int = 0
    num_sequences: float | None = None
    num_self_sequences: float | None = None
    transform: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, Any]:
        return {
            "update_index": self.update_index,
            "num_sequences": self.num_sequences,
            "num_self_sequences": self.num_self_sequences,
        }


@dataclass(frozen=True)
class Result:
    """A loss, its gradient with respect to the logits and what else came out."""

    loss: Tensor
    gradient: Tensor
    out: LossOutput | ReferenceOutput


def boundaries(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(dtype)


def make_case(
    lengths: list[int],
    vocab_size: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    config: HACPOConfig | None = None,
    cross: list[bool] | None = None,
    advantages: list[float] | None = None,
    log_ratios: list[float] | None = None,
    mask: bool = False,
    own_lengths: bool = True,
    transform: dict[str, Any] | None = None,
    spread: float = 2.0,
    **counts: Any,
) -> Case:
    """Random logits and targets, with source means that put the ratio of sequence i at exp(log_ratios[i])."""
    config = HACPOConfig() if config is None else config
    transform = transform or {}
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    size, rows = len(lengths), sum(lengths)
    logits = (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype)
    target_ids = torch.randint(0, vocab_size, (rows,), generator=generator)
    if cross is None:
        cross = [config.cross != "none" and i % 2 == 1 for i in range(size)]
    if advantages is None:
        advantages = [(1.5, -0.75, 0.0, -1.25, 0.5)[i % 5] for i in range(size)]
    if log_ratios is None:
        log_ratios = [(CROSS_LOG_RATIOS if c else SELF_LOG_RATIOS)[i % 7] for i, c in enumerate(cross)]
    loss_mask = uniform(rows) > 0.3 if mask else None
    divisors = None if own_lengths else torch.randint(1, 9, (size,), generator=generator)
    fields: dict[str, Tensor | None] = {
        "cu_seqlens": boundaries(lengths),
        "source_mean_logprobs": torch.zeros(size),
        "advantages": torch.tensor(advantages),
        "weights": 0.25 + 2.0 * uniform(size),
        "is_cross": torch.tensor(cross, dtype=torch.bool),
        "lengths": divisors,
        "loss_mask": loss_mask,
    }
    sequences = SequenceBatch(**fields)
    logprobs = scored(logits, target_ids, sequences, transform)
    counted = torch.ones(rows, dtype=torch.bool) if loss_mask is None else loss_mask
    means = []
    for i, (start, end) in enumerate(zip(sequences.cu_seqlens[:-1], sequences.cu_seqlens[1:], strict=True)):
        kept = logprobs[start:end][counted[start:end]]
        divisor = max(kept.numel(), 1) if divisors is None else int(divisors[i])
        means.append(float(kept.sum()) / divisor - log_ratios[i])
    fields["source_mean_logprobs"] = torch.tensor(means, dtype=torch.float64).to(torch.float32)
    # per token: about a third beyond each of GRPO's bounds
    fields["old_logprobs"] = (logprobs + 0.8 * (uniform(rows).double() - 0.5)).float()
    # a reference policy near the policy, but not so near that float32 log-probabilities cannot tell the difference
    side = torch.where(uniform(rows) > 0.5, 1.0, -1.0).double()
    fields["ref_logprobs"] = (logprobs + side * (0.2 + 0.3 * uniform(rows).double())).float()
    return Case(logits, target_ids, SequenceBatch(**fields), config, transform=transform, **counts)


def scored(logits: Tensor, target_ids: Tensor, sequences: SequenceBatch, transform: dict[str, Any]) -> Tensor:
    """(N,) float64 log-probabilities under the transform, per-sequence temperatures spread over rows."""
    transform = dict(transform)
    if isinstance(transform.get("temperature"), Tensor):
        transform["temperature"] = transform["temperature"][sequences.sequence_of_row(logits.shape[0])]
    return reference_token_logprobs(logits, target_ids, **transform)[0]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def run(case: Case, backend: str | None) -> Result:
    logits = leaf(case.logits)
    out = hacpo_loss(
        logits, case.target_ids, case.sequences, case.config, backend=backend, **case.counts, **case.transform
    )
    out.loss.backward()
    return Result(out.loss.detach(), logits.grad, out)


def run_reference(case: Case) -> Result:
    """Float64 autograd on the same, already rounded, logits."""
    logits = leaf(case.logits.double())
    out = reference_hacpo_loss(logits, case.target_ids, case.sequences, case.config, **case.counts, **case.transform)
    gradient = torch.zeros_like(logits)
    if out.loss.requires_grad:
        (gradient,) = torch.autograd.grad(out.loss, logits, allow_unused=True, materialize_grads=True)
    return Result(out.loss.detach(), gradient, out)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|; where all of `expected` is 0 only 0 is right, NaN never is."""
    if expected.numel() == 0:
        return 0.0 if actual.shape == expected.shape else float("inf")
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    if not bool(torch.isfinite(difference)):
        return float("inf")
    return float(difference / scale) if scale > 0 else (0.0 if difference == 0 else float("inf"))


def loss_scale(reference: ReferenceOutput, case: Case) -> float:
    """What rounding of the loss is relative to: the sum of |J| and of the KL term, which may cancel in the loss."""
    count = case.num_sequences or max(int((case.sequences.token_counts() > 0).sum()), 1)
    policy = float(reference.objectives.abs().sum()) / count
    divergence = float(reference.loss.detach()) + float(reference.objectives.sum()) / count
    return max(policy + abs(divergence), 1e-12)


def mismatch(loss: Tensor, gradient: Tensor, expected: Result, case: Case, tolerance: float) -> str | None:
    """Why a loss and a gradient are not the reference's, None if they are."""
    if not bool(torch.isfinite(loss)):
        return f"loss is {float(loss)}"
    error = abs(float(loss) - float(expected.loss)) / loss_scale(expected.out, case)
    if error > tolerance:
        return f"loss {float(loss)} should be {float(expected.loss)}: error {error:.2e}"
    error = relative_error(gradient, expected.gradient)
    return f"gradient: error {error:.2e}" if error > tolerance else None


def assert_matches(case: Case, backend: str | None, tolerance: float | None = None) -> Result:
    """`hacpo_loss` has the reference's loss, gradient and ratios."""
    actual, expected = run(case, backend), run_reference(case)
    dtype = case.logits.dtype
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    problem = mismatch(actual.loss, actual.gradient, expected, case, tolerance)
    assert problem is None, problem
    wide = 1e-10 if dtype == torch.float64 else 1e-5  # computed from the same rounded logits, in float32
    if actual.out.ratios.numel():
        assert float((actual.out.ratios.double() / expected.out.ratios - 1.0).abs().max()) <= wide
    return actual


def with_sequences(case: Case, **changes: Any) -> Case:
    """The case with some fields of its SequenceBatch replaced."""
    return replace(case, sequences=replace(case.sequences, **changes))
