"""The HACPO objective in plain PyTorch: from log-probabilities to ratio, J, per-token coefficient and metrics.

This is the readable statement of what the kernels compute (Eq. 11-14 of arXiv 2603.02604). With n the counted tokens of
a sequence, L the divisor of the learner's sum (n, or `SequenceBatch.lengths`), A its advantage and u the update index:

    log s = clamp(sum(logp) / L - source_mean, -10, 10)                                      gradient 0 outside
    self:   J = min(s * A, clamp(s, 1 - epsilon_low, 1 + epsilon_high) * A)
            dJ/dlogp_t = A * s / L            if (A > 0, s <= 1 + epsilon_high) or (A < 0, s >= 1 - epsilon_low)
    cross:  c = clamp(s, low_u, cross_clip_high),  J = c * sg(c)**alpha * omega * A
            dJ/dlogp_t = omega * A * s**(1 + alpha) / L if low_u <= s <= cross_clip_high
    loss = -sum(J) / num_sequences + beta * sum(KL over self) / num_self_sequences

The coefficient of a token is d loss / d logp_t: one number per sequence, unless the ratio is per token or KL is on.
Sums run in float64, each sequence on its own, so that neither the batch nor its order changes a bit of a ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_number, values_are_checked
from .types import HACPOConfig, SequenceBatch

LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True)
class SequenceTerms:
    """What the objective says of each sequence and token; everything detached."""

    coefficients: Tensor  # (N,) d loss / d logp
    ratios: Tensor  # (S,) s, 1 for an empty sequence
    objectives: Tensor  # (S,) J
    kl: Tensor  # (S,) mean k3 over the tokens of a self sequence, else 0
    live: Tensor  # (S,) bool, the gradient is not exactly zero
    clipped: Tensor  # (S,) int8, the gradient was removed at the lower (-1) or upper (+1) bound; 0: it was not


def normalizers(
    where: str,
    sequences: SequenceBatch,
    num_sequences: float | Tensor | None,
    num_self_sequences: float | Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(2,): the denominators of the policy term and of the KL term, without a host sync.

    The default of each is the number of non-empty (self) sequences of this call, at least 1.
    """
    device = sequences.cu_seqlens.device
    non_empty = sequences.token_counts() > 0
    defaults = (non_empty, non_empty & ~sequences.cross_mask())
    given = {"num_sequences": num_sequences, "num_self_sequences": num_self_sequences}
    result = []
    for (name, value), counted in zip(given.items(), defaults, strict=True):
        if value is None:
            result.append(counted.sum().clamp(min=1).to(dtype))
        elif isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{where}: {name} must be a number or one element, got shape {tuple(value.shape)}.")
            if values_are_checked(value):
                check_number(where, name, value.item(), minimum=0.0, exclusive=name == "num_sequences")
            number = value.detach().reshape(()).to(device=device, dtype=dtype)
            # an update without self sequences has no KL term; 1 keeps 0 / 0 out of it
            result.append(number.masked_fill(number == 0, 1.0))
        else:
            checked = check_number(where, name, value, minimum=0.0, exclusive=name == "num_sequences")
            result.append(torch.full((), checked or 1.0, device=device, dtype=dtype))
    return torch.stack(result)


def _segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(N,) -> (S,) float64, each segment summed on its own and in order: no atomics, no neighbour's rounding."""
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens.long(), unsafe=True)


def sequence_terms(
    logprobs: Tensor, sequences: SequenceBatch, config: HACPOConfig, update_index: int, denominators: Tensor
) -> SequenceTerms:
    """The objective of each sequence and its gradient with respect to each log-probability.

    Args:
        logprobs: (N,) float32 or float64, detached.
        denominators: (2,) from `normalizers`.
    """
    size, rows = sequences.num_sequences, logprobs.numel()
    counts = sequences.token_counts()
    non_empty = counts > 0
    is_cross = sequences.cross_mask()
    by_cross_rule = is_cross & (config.cross == "hacpo")
    owner = sequences.sequence_of_row(rows)
    counted = torch.ones(rows, dtype=torch.bool, device=logprobs.device)
    if sequences.loss_mask is not None:
        counted = sequences.loss_mask != 0

    def read(values: Tensor | None, default: float) -> Tensor:
        """A (S,) field in float64; `default` where the sequence is empty or the field absent."""
        if values is None:
            return torch.full((size,), default, dtype=torch.float64, device=logprobs.device)
        return torch.where(non_empty, values.double(), default)

    advantages = read(sequences.advantages, 0.0)
    divisors = read(counts if sequences.lengths is None else sequences.lengths, 1.0)
    token_counts = counts.clamp(min=1).double()
    token_logprobs = torch.where(counted, logprobs, 0.0).double()

    log_ratio = _segment_sum(token_logprobs, sequences.cu_seqlens) / divisors - read(
        sequences.source_mean_logprobs, 0.0
    )
    log_ratio = torch.where(non_empty, log_ratio, 0.0)
    ratios = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    outside = torch.where(log_ratio.abs() > LOG_RATIO_LIMIT, log_ratio.sign(), 0.0)

    if config.ratio == "token":
        per_token, objectives, clipped, live = _token_rule(
            token_logprobs, counted, owner, advantages, sequences, config
        )
        objectives = objectives / token_counts
        coefficients = per_token / token_counts[owner] if size else per_token
    else:
        objectives, slopes, clipped = _self_rule(ratios, outside, advantages, config)
        live = (clipped == 0) & (advantages != 0)
        coefficients = (slopes / divisors)[owner] if size else torch.zeros_like(token_logprobs)
    if config.cross == "hacpo" and sequences.is_cross is not None and size:
        weights = torch.where(is_cross, read(sequences.weights, 1.0), 1.0)
        cross = _cross_rule(ratios, outside, advantages, weights, config, update_index)
        objectives = torch.where(by_cross_rule, cross[0], objectives)
        coefficients = torch.where(by_cross_rule[owner], (cross[1] / divisors)[owner], coefficients)
        clipped = torch.where(by_cross_rule, cross[2], clipped)
        live = torch.where(by_cross_rule, (cross[2] == 0) & (advantages * weights != 0), live)
    elif config.cross == "none" and sequences.is_cross is not None and size:
        # values are not looked at on an accelerator, so a cross sequence can arrive here: it has no say
        objectives = torch.where(is_cross, 0.0, objectives)
        coefficients = torch.where(is_cross[owner], 0.0, coefficients)
        clipped, live = torch.where(is_cross, 0, clipped), live & ~is_cross

    coefficients = -coefficients / denominators[0].double()
    kl = torch.zeros_like(ratios)
    if config.beta > 0 and size:
        assert sequences.ref_logprobs is not None
        in_kl = counted & ~is_cross[owner]
        delta = torch.where(in_kl, sequences.ref_logprobs.double() - token_logprobs, 0.0)
        kl = _segment_sum(delta.exp() - delta - 1.0, sequences.cu_seqlens) / token_counts
        slope = (1.0 - delta.exp()) / token_counts[owner]
        coefficients = coefficients + config.beta / denominators[1].double() * slope
        live = live | (non_empty & ~is_cross)

    dtype = logprobs.dtype
    return SequenceTerms(
        coefficients=torch.where(counted, coefficients, 0.0).to(dtype),
        ratios=ratios.to(dtype),
        objectives=objectives.to(dtype),
        kl=kl.to(dtype),
        live=live & non_empty,
        clipped=clipped.to(torch.int8),
    )


def _self_rule(
    ratios: Tensor, outside: Tensor, advantages: Tensor, config: HACPOConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """J, dJ/dlog s and the clip side of sequences or tokens under the self rule (Eq. 47)."""
    bounded = ratios.clamp(1.0 - config.epsilon_low, 1.0 + config.epsilon_high)
    objectives = torch.where(advantages == 0, 0.0, torch.minimum(ratios * advantages, bounded * advantages))
    above = (advantages > 0) & (ratios > 1.0 + config.epsilon_high)
    below = (advantages < 0) & (ratios < 1.0 - config.epsilon_low)
    clipped = torch.where(advantages == 0, 0.0, torch.where(above, 1.0, torch.where(below, -1.0, outside)))
    slopes = torch.where((clipped == 0) & (advantages != 0), advantages * ratios, 0.0)
    return objectives, slopes, clipped


def _cross_rule(
    ratios: Tensor, outside: Tensor, advantages: Tensor, weights: Tensor, config: HACPOConfig, update_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """J, dJ/dlog s and the clip side of sequences under the cross rule (Eq. 12-14)."""
    low, high = config.cross_bounds(update_index)
    bounded = ratios.clamp(low, high)
    scale = torch.where(advantages == 0, 0.0, weights * advantages)
    objectives = torch.where(advantages == 0, 0.0, bounded.pow(1.0 + config.alpha) * scale)
    below = ratios <= low if low >= high else ratios < low
    clipped = torch.where(ratios > high, 1.0, torch.where(below, -1.0, outside))
    clipped = torch.where(advantages == 0, 0.0, clipped)
    slopes = torch.where((clipped == 0) & (advantages != 0), ratios.pow(1.0 + config.alpha) * scale, 0.0)
    return objectives, slopes, clipped


def _token_rule(
    token_logprobs: Tensor,
    counted: Tensor,
    owner: Tensor,
    advantages: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GRPO's rule: per-token dJ/dlogp, and per sequence the sum of J, the clip side and whether a token is live."""
    assert sequences.old_logprobs is not None
    if sequences.num_sequences == 0:
        empty = torch.zeros_like(advantages)
        return torch.zeros_like(token_logprobs), empty, empty, empty.bool()
    log_ratio = torch.where(counted, token_logprobs - sequences.old_logprobs.double(), 0.0)
    outside = torch.where(log_ratio.abs() > LOG_RATIO_LIMIT, log_ratio.sign(), 0.0)
    token_ratios = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    objectives, slopes, sides = _self_rule(token_ratios, outside, advantages[owner], config)
    objectives = torch.where(counted, objectives, 0.0)
    token_live = counted & (advantages[owner] != 0) & (sides == 0)
    live = _segment_sum(token_live, sequences.cu_seqlens) > 0
    # a sequence counts as clipped when no token of it is left
    side = torch.where(advantages > 0, 1.0, -1.0)
    clipped = torch.where(live | (advantages == 0), 0.0, side)
    return slopes, _segment_sum(objectives, sequences.cu_seqlens), clipped, live


def reduce_loss(terms: SequenceTerms, config: HACPOConfig, denominators: Tensor) -> Tensor:
    """0-d loss from the terms of its sequences."""
    loss = -terms.objectives.sum() / denominators[0]
    return loss + config.beta * (terms.kl.sum() / denominators[1]) if config.beta > 0 else loss


def reduce_metrics(
    terms: SequenceTerms,
    sequences: SequenceBatch,
    config: HACPOConfig,
    update_index: int,
    scored: Tensor | None = None,
) -> dict[str, Tensor]:
    """Metrics of a call as 0-d tensors, over its non-empty sequences; NaN where there is nothing to average.

    `scored`: (S,) bool, the sequences that have a ratio; None: all.
    """
    non_empty = sequences.token_counts() > 0
    is_cross = sequences.cross_mask()
    kinds = {"self": non_empty & ~is_cross, "cross": non_empty & is_cross}
    dtype = terms.ratios.dtype
    nan = torch.full((), float("nan"), dtype=dtype, device=terms.ratios.device)

    def mean(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values.to(dtype), 0.0).sum() / where.sum()  # 0 / 0 is NaN

    def extreme(values: Tensor, where: Tensor, largest: bool) -> Tensor:
        if values.numel() == 0:
            return nan
        filled = torch.where(where, values, float("-inf") if largest else float("inf"))
        return torch.where(where.any(), filled.max() if largest else filled.min(), nan)

    metrics = {}
    for kind, where in kinds.items():
        with_ratio = where if scored is None else where & scored
        metrics[f"ratio_{kind}_mean"] = mean(terms.ratios, with_ratio)
        metrics[f"ratio_{kind}_min"] = extreme(terms.ratios, with_ratio, largest=False)
        metrics[f"ratio_{kind}_max"] = extreme(terms.ratios, with_ratio, largest=True)
        metrics[f"clipped_{kind}"] = mean(terms.clipped != 0, where)
    metrics["clipped_cross_low"] = mean(terms.clipped < 0, kinds["cross"])
    metrics["clipped_cross_high"] = mean(terms.clipped > 0, kinds["cross"])
    metrics["dead"] = mean(~terms.live, non_empty)
    metrics["kl"] = torch.where(kinds["self"], terms.kl, 0.0).sum() / kinds["self"].sum().clamp(min=1)
    low, high = config.cross_bounds(update_index)
    closed = config.cross == "hacpo" and low >= high
    metrics["cross_bounds_closed"] = torch.full((), float(closed), dtype=dtype, device=terms.ratios.device)
    return metrics
