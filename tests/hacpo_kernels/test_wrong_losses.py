"""The suite's comparison rejects every wrong loss that is easy to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hacpo_kernels import HACPOConfig

from .builders import leaf, make_case, mismatch, run_reference

CASE = make_case(
    [3, 4, 2, 5, 3, 2], 17, dtype=torch.float64,
    config=HACPOConfig(alpha=1.0, beta=0.2, epsilon_low=0.01, epsilon_high=0.02),
    cross=[False, True, False, True, False, True],
    advantages=[1.5, -0.75, -1.25, 1.0, -0.5, 0.8],
    # self: inside, below the lower bound, above the upper one where only A > 0 clips;
    # cross: inside, above 1 but below 1.02, between 0.8 and 0.875
    log_ratios=[0.004, -0.05, -0.3, 0.015, 0.4, -0.17],
    mask=True, update_index=3, num_sequences=9.0, num_self_sequences=4.0, seed=5,
)  # fmt: skip


@dataclass
class Rules:
    """Places where a loss goes wrong; the defaults are right."""

    stop_gradient: bool = True
    divide_by_length: bool = True
    cross_upper: float = 1.0
    use_step: bool = True
    weight: Callable[[Tensor], Tensor] = lambda w: w
    use_mask: bool = True
    given_denominator: bool = True
    mean_of_logs: bool = True
    sign: float = -1.0
    kl_on_cross: bool = False
    weight_on_self: bool = False
    clip_cross_one_sided: bool = False
    clip_self_two_sided: bool = False
    k1: bool = False
    kl_gradient: bool = True
    token_mean: bool = False


def plain_loss(logits: Tensor, rules: Rules) -> Tensor:
    """The loss as one would write it in PyTorch, with the given mistakes."""
    config, batch = CASE.config, CASE.sequences
    logprobs = torch.log_softmax(logits, -1).gather(-1, CASE.target_ids[:, None]).squeeze(-1)
    low = config.cross_clip_low + (CASE.update_index * config.cross_clip_step if rules.use_step else 0.0)
    mask = batch.loss_mask if rules.use_mask else torch.ones_like(batch.loss_mask)
    objectives, divergences, counts = [], [], []
    for i, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        keep = mask[start:end]
        values, reference = logprobs[start:end][keep], batch.ref_logprobs[start:end][keep].double()
        if values.numel() == 0:
            continue
        mean = values.mean()
        if not rules.divide_by_length:
            mean = mean.detach() + values.sum() - values.sum().detach()
        difference = values - batch.source_mean_logprobs[i].double()
        log_ratio = mean - batch.source_mean_logprobs[i].double() if rules.mean_of_logs else difference.sum()
        ratio = log_ratio.clamp(-10.0, 10.0).exp()
        advantage = batch.advantages[i].double()
        weight = rules.weight(batch.weights[i].double())
        if batch.is_cross[i]:
            clipped = ratio.clamp(low, rules.cross_upper)
            power = clipped.detach() if rules.stop_gradient else clipped
            scaled = clipped * power**config.alpha * weight * advantage
            unclipped = ratio * ratio.detach() ** config.alpha * weight * advantage
            objective = torch.minimum(unclipped, scaled) if rules.clip_cross_one_sided else scaled
        else:
            bounded = ratio.clamp(1.0 - config.epsilon_low, 1.0 + config.epsilon_high) * advantage
            objective = bounded if rules.clip_self_two_sided else torch.minimum(ratio * advantage, bounded)
            objective = objective * weight if rules.weight_on_self else objective
        counts.append(values.numel())
        objectives.append(objective * (values.numel() if rules.token_mean else 1.0))
        if rules.kl_on_cross or not batch.is_cross[i]:
            delta = reference - (values if rules.kl_gradient else values.detach())
            divergences.append(-delta.mean() if rules.k1 else (delta.exp() - delta - 1.0).mean())
    count = CASE.num_sequences if rules.given_denominator else len(objectives)
    count = count * sum(counts) / len(counts) if rules.token_mean else count
    policy = rules.sign * torch.stack(objectives).sum() / count
    return policy + config.beta * torch.stack(divergences).sum() / CASE.num_self_sequences


def verdict(rules: Rules) -> str | None:
    logits = leaf(CASE.logits)
    loss = plain_loss(logits, rules)
    loss.backward()
    return mismatch(loss.detach(), logits.grad, run_reference(CASE), CASE, tolerance=1e-5)


WRONG = {
    "no stop-gradient": Rules(stop_gradient=False),
    "no 1/n in the gradient": Rules(divide_by_length=False),
    "upper cross bound at 1 + epsilon": Rules(cross_upper=1.02),
    "step ignored": Rules(use_step=False),
    "source and learner exchanged in the weight": Rules(weight=lambda w: 1.0 / w),
    "weight left out": Rules(weight=torch.ones_like),
    "mask dropped": Rules(use_mask=False),
    "local denominator": Rules(given_denominator=False),
    "sum instead of mean in the ratio": Rules(mean_of_logs=False),
    "sign flipped": Rules(sign=1.0),
    "KL on cross sequences too": Rules(kl_on_cross=True),
    "weight applied to self sequences": Rules(weight_on_self=True),
    "cross clipped on one side only": Rules(clip_cross_one_sided=True),
    "self clipped on both sides": Rules(clip_self_two_sided=True),
    "another estimator of KL": Rules(k1=True),
    "KL without a gradient": Rules(kl_gradient=False),
    "mean over tokens": Rules(token_mean=True),
}


def test_mismatch_accepts_the_right_loss() -> None:
    assert verdict(Rules()) is None


@pytest.mark.parametrize("name", WRONG)
def test_mismatch_rejects_a_wrong_loss(name: str) -> None:
    assert verdict(WRONG[name]) is not None
