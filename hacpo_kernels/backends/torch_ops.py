"""The PyTorch backend: any device, a block of rows at a time, so that no float32 copy of the logits exists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..objective import sequence_terms
from .transform import LogitTransform

__all__ = ["logprob_bwd", "logprob_fwd", "sequence_terms"]

# elements of one block of rows: large enough to amortise the calls, small enough to stay near the caches
_BLOCK_ELEMENTS = 1 << 20


def accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _blocks(rows: Tensor | None, num_rows: int, vocab_size: int) -> Iterator[Tensor | slice]:
    """Row indices in blocks: all rows as slices, or the given ones."""
    step = max(1, _BLOCK_ELEMENTS // max(vocab_size, 1))
    total = num_rows if rows is None else rows.numel()
    for start in range(0, total, step):
        yield slice(start, min(start + step, total)) if rows is None else rows[start : start + step]


def _as_rows(logits: Tensor) -> Tensor | None:
    """(N, V) view of 2-D or 3-D logits, None where the strides do not allow one."""
    if logits.dim() == 2:
        return logits
    try:
        return logits.view(-1, logits.shape[-1])
    except RuntimeError:
        return None


def _gather(logits: Tensor, rows: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """A copy of some rows, (n, V), in `dtype`."""
    flat = _as_rows(logits)
    if flat is not None:
        block = flat[rows]
    else:
        index = torch.arange(rows.start, rows.stop, device=logits.device) if isinstance(rows, slice) else rows
        block = logits[index // logits.shape[1], index % logits.shape[1]]
    return block.to(dtype, copy=True)


def _scatter(out: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    flat = _as_rows(out)
    if flat is not None:
        flat[rows] = values.to(out.dtype)
    else:
        index = torch.arange(rows.start, rows.stop, device=out.device) if isinstance(rows, slice) else rows
        out[index // out.shape[1], index % out.shape[1]] = values.to(out.dtype)


def _selected(mask: Tensor | None) -> Tensor | None:
    """Indices of the rows to compute. Only on CPU: elsewhere finding them would make the host wait, so all are."""
    if mask is None or mask.device.type != "cpu" or bool(mask.all()):
        return None
    return mask.nonzero().squeeze(-1)


def logprob_fwd(
    logits: Tensor, target_ids: Tensor, mask: Tensor | None, transform: LogitTransform, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probabilities (N,), statistics (2, N): row maximum, log of the sum of exp(x - maximum); entropies or None).

    Rows outside `mask` give 0. An id outside the vocabulary gives NaN.
    """
    rows, vocab_size, dtype = target_ids.numel(), logits.shape[-1], accumulation_dtype(logits)
    logprobs = torch.zeros(rows, dtype=dtype, device=logits.device)
    stats = torch.zeros(2, rows, dtype=dtype, device=logits.device)
    entropies = torch.zeros_like(logprobs) if entropy else None
    for block in _blocks(_selected(mask), rows, vocab_size):
        values = transform.apply(_gather(logits, block, dtype), block)
        maximum = values.amax(-1)
        values.sub_(maximum.unsqueeze(-1))
        ids = target_ids[block].long()
        inside = (ids >= 0) & (ids < vocab_size)
        targets = values.gather(-1, ids.clamp(0, vocab_size - 1).unsqueeze(-1)).squeeze(-1)
        targets = torch.where(inside, targets, float("nan"))
        weights = values.exp()
        total = weights.sum(-1)
        log_total = total.log()
        if entropies is not None:
            # exp(x) * x is 0 where x is -inf
            weighted = torch.where(weights > 0, weights * values, 0.0).sum(-1)
            entropies[block] = log_total - weighted / total
        logprobs[block] = targets - log_total
        stats[0, block] = maximum
        stats[1, block] = log_total
    if mask is not None:
        logprobs.masked_fill_(~mask, 0.0)
        if entropies is not None:
            entropies.masked_fill_(~mask, 0.0)
    return logprobs, stats, entropies


def logprob_bwd(
    logits: Tensor,
    target_ids: Tensor,
    mask: Tensor | None,
    transform: LogitTransform,
    stats: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """d logits, in the logits' dtype, written to `out` (which may be the logits) or to a new tensor.

    A row is live if it counts and one of its incoming gradients is not zero; the others only receive zeros.
    """
    rows, vocab_size, dtype = target_ids.numel(), logits.shape[-1], accumulation_dtype(logits)
    live = torch.ones(rows, dtype=torch.bool, device=logits.device) if mask is None else mask
    nonzero = torch.zeros_like(live)
    for grad in (grad_logprobs, grad_entropies):
        if grad is not None:
            nonzero |= grad != 0
    live = live & nonzero
    fresh = out is None
    if out is None:
        out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    for block in _blocks(_selected(live), rows, vocab_size):
        values, slope = transform.apply_with_slope(_gather(logits, block, dtype), block)
        values.sub_(stats[0, block].unsqueeze(-1)).sub_(stats[1, block].unsqueeze(-1))
        probabilities = values.exp()
        gradient = torch.zeros_like(values)
        if grad_logprobs is not None:
            gradient = -grad_logprobs[block].unsqueeze(-1) * probabilities
            ids = target_ids[block].long().clamp(0, vocab_size - 1).unsqueeze(-1)
            gradient.scatter_add_(-1, ids, grad_logprobs[block].unsqueeze(-1))
        if grad_entropies is not None and entropies is not None:
            surprise = torch.where(probabilities > 0, values + entropies[block].unsqueeze(-1), 0.0)
            gradient -= grad_entropies[block].unsqueeze(-1) * probabilities * surprise
        gradient *= slope
        gradient.masked_fill_(~live[block].unsqueeze(-1), 0.0)
        _scatter(out, block, gradient)
    if not fresh and live.device.type == "cpu":
        dead = (~live).nonzero().squeeze(-1)
        _scatter(out, dead, torch.zeros(1, 1, dtype=dtype))
    return out
