"""The whole loss in float64 by autograd, one sequence at a time: the oracle of the tests.

It shares no arithmetic with the kernels or with `objective`: the objective is written as its definition and autograd
finds the gradient. Nothing at run time imports it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import HACPOConfig, SequenceBatch


@dataclass(frozen=True)
class ReferenceOutput:
    loss: Tensor  # 0-d float64, differentiable
    logprobs: Tensor  # (N,) float64
    ratios: Tensor  # (S,) float64
    objectives: Tensor  # (S,) float64


def reference_token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(N, V) logits -> ((N,) log-probabilities, (N,) entropies) in float64; temperature a number or (N,)."""
    values = logits.double() * logit_scale
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.double().reshape(-1, 1)
    log_softmax = torch.log_softmax(values / temperature, dim=-1)
    logprobs = log_softmax.gather(-1, target_ids.long().reshape(-1, 1)).squeeze(-1)
    # an excluded column has probability 0 and must not bring 0 * -inf into the sum or its gradient
    excluded = log_softmax == float("-inf")
    finite = torch.where(excluded, 0.0, log_softmax)
    entropies = -torch.where(excluded, 0.0, finite.exp() * finite).sum(-1)
    return logprobs, entropies


def reference_loss_from_logprobs(
    logprobs: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
    *,
    update_index: int = 0,
    num_sequences: float | None = None,
    num_self_sequences: float | None = None,
) -> ReferenceOutput:
    """The objective of each sequence by its definition (Eq. 11-14), summed and normalised."""
    low = min(config.cross_clip_low + update_index * config.cross_clip_step, config.cross_clip_high)
    high = config.cross_clip_high
    objectives, divergences, ratios, self_count, count = [], [], [], 0, 0
    zero = (
        logprobs.double().sum() * 0.0 if bool(torch.isfinite(logprobs).all()) else torch.zeros((), dtype=torch.float64)
    )
    boundaries = sequences.cu_seqlens.tolist()
    for index, (start, end) in enumerate(itertools.pairwise(boundaries)):
        keep = torch.arange(start, end)
        if sequences.loss_mask is not None:
            keep = keep[sequences.loss_mask[start:end].bool()]
        if keep.numel() == 0:
            objectives.append(zero)
            ratios.append(zero.detach() + 1.0)
            continue
        is_cross = sequences.is_cross is not None and bool(sequences.is_cross[index])
        count, self_count = count + 1, self_count + (not is_cross)
        values = logprobs[keep].double()
        length = keep.numel() if sequences.lengths is None else float(sequences.lengths[index])
        log_ratio = values.sum() / length - sequences.source_mean_logprobs[index].double()
        ratio = torch.exp(torch.clamp(log_ratio, -10.0, 10.0))
        ratios.append(ratio.detach())
        advantage = sequences.advantages[index].double()
        if advantage == 0:
            objectives.append(zero)
        elif is_cross and config.cross == "hacpo":
            weight = 1.0 if sequences.weights is None else sequences.weights[index].double()
            # closed bounds leave a constant: a ratio that happens to lie on them is dead like every other
            clipped = torch.clamp(ratio if low < high - 1e-9 else ratio.detach(), low, high)
            objectives.append(clipped * clipped.detach() ** config.alpha * weight * advantage)
        else:
            if config.ratio == "token":
                assert sequences.old_logprobs is not None
                difference = values - sequences.old_logprobs[keep].double()
                ratio = torch.exp(torch.clamp(difference, -10.0, 10.0))
            bounded = torch.clamp(ratio, 1.0 - config.epsilon_low, 1.0 + config.epsilon_high)
            objectives.append(torch.minimum(ratio * advantage, bounded * advantage).mean())
        if config.beta > 0 and not is_cross:
            assert sequences.ref_logprobs is not None
            delta = sequences.ref_logprobs[keep].double() - values
            divergences.append((torch.exp(delta) - delta - 1.0).mean())
    total = torch.stack([*objectives, zero]).sum()
    loss = -total / (max(count, 1) if num_sequences is None else num_sequences)
    if divergences:
        loss = loss + config.beta * torch.stack(divergences).sum() / (
            self_count if num_self_sequences is None else num_self_sequences
        )
    stacked = torch.stack([*ratios, zero.detach()])[:-1]
    return ReferenceOutput(loss, logprobs.detach().double(), stacked, torch.stack([*objectives, zero])[:-1].detach())


def reference_hacpo_loss(
    logits: Tensor,
    target_ids: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
    *,
    update_index: int = 0,
    num_sequences: float | None = None,
    num_self_sequences: float | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> ReferenceOutput:
    """(N, V) logits -> the loss, in float64; rows that do not count are left out before anything is computed."""
    rows = torch.arange(logits.shape[0])
    counted = torch.ones_like(rows, dtype=torch.bool)
    if sequences.loss_mask is not None:
        counted = sequences.loss_mask.bool()
    if isinstance(temperature, Tensor):
        temperature = temperature[sequences.sequence_of_row(logits.shape[0])][counted]
    scored, _ = reference_token_logprobs(
        logits[counted], target_ids[counted], temperature=temperature, logit_scale=logit_scale, softcap=softcap
    )
    logprobs = torch.zeros(logits.shape[0], dtype=torch.float64).index_put((rows[counted],), scored)
    return reference_loss_from_logprobs(
        logprobs,
        sequences,
        config,
        update_index=update_index,
        num_sequences=num_sequences,
        num_self_sequences=num_self_sequences,
    )
