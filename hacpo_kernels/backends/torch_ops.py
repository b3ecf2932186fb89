"""The PyTorch backend: any device, a block of rows at a time, so that no float32 copy of the logits exists."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..head import Head
from ..objective import sequence_terms
from .transform import LogitTransform

__all__ = ["head_gradient", "logprob_bwd", "logprob_fwd", "score_head", "sequence_terms"]

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
            ids = target_ids[block].long()
            # an id outside these columns (another rank's, or one that nobody checked) is in none of them
            own = torch.where((ids >= 0) & (ids < vocab_size), grad_logprobs[block], 0.0)
            gradient.scatter_add_(-1, ids.clamp(0, vocab_size - 1).unsqueeze(-1), own.unsqueeze(-1))
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


def score_head(
    head: Head, rows: Tensor, target_ids: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probabilities (n,), buffer (n, V), statistics or None) of some rows of the head.

    The buffer is what `head_gradient` starts from: the probabilities, or with a softcap or a shard the raw logits.
    """
    hidden = head.rows(rows)
    if head.shard is not None:
        logits = head.logits(hidden)
        local = logprob_fwd(logits, head.shard.local(target_ids), None, transform, entropy=False)
        logprobs, stats, _ = head.shard.combine(target_ids, local[0], local[1])
        return logprobs, logits, stats
    if transform.softcap is not None:
        logits = head.logits(hidden)
        logprobs, stats, _ = logprob_fwd(logits, target_ids, None, transform, entropy=False)
        return logprobs, logits, stats
    factor = _factor(transform)
    if head.bias is None and not head.low:  # (n, H) is smaller than (n, V)
        logits = head.logits(hidden * factor)
    else:
        logits = head.logits(hidden).mul_(factor)
    # one pass over memory instead of three: a row stays in the cache between its maximum, its sum and its quotient
    probabilities = torch.softmax(logits, -1, out=logits)
    ids = target_ids.long()
    inside = (ids >= 0) & (ids < probabilities.shape[-1])
    chosen = probabilities.gather(-1, ids.clamp(0, probabilities.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    logprobs = torch.where(inside, chosen.log(), float("nan"))
    # below this a probability has lost digits, or is 0 where its logarithm is not -inf
    vague = inside & (chosen < torch.finfo(head.dtype).tiny * 1e8)
    if bool(vague.any()):
        again = head.logits(hidden[vague])
        exact = logprob_fwd(again, ids[vague], None, transform.of_rows(vague), entropy=False)[0]
        logprobs[vague] = exact
    return logprobs, probabilities, None


def head_gradient(
    head: Head,
    buffer: Tensor,
    stats: Tensor | None,
    target_ids: Tensor,
    transform: LogitTransform,
    live: Tensor,
) -> tuple[Tensor, Tensor | float]:
    """(gradients (k, V), factor (k, 1) or a number) of the `live` rows; d logp / d logits is their product.

    The buffer is overwritten. Gradients are not scaled by any coefficient: they lie in [-1, 1] in whatever precision.
    """
    gradients = compact_rows(buffer, live)
    ids = target_ids[live].long()
    if stats is not None:
        ones = torch.ones(live.numel(), dtype=head.dtype, device=buffer.device)
        chosen = transform.of_rows(live)
        columns = ids if head.shard is None else ids - head.shard.start
        logprob_bwd(gradients, columns, None, chosen, stats[:, live], None, ones, None, gradients)
        return gradients.to(head.operand_dtype), 1.0
    minus_one = torch.full((live.numel(), 1), -1.0, dtype=head.dtype, device=buffer.device)
    gradients.scatter_add_(-1, ids.unsqueeze(-1), minus_one)
    factor = _factor(transform.of_rows(live))
    return gradients.to(head.operand_dtype), -factor.squeeze(-1) if isinstance(factor, Tensor) else -factor


def compact_rows(buffer: Tensor, live: Tensor) -> Tensor:
    """The `live` rows (ascending indices) moved to the front of the buffer, in place; a view of them."""
    if live.numel() == buffer.shape[0]:
        return buffer
    target = 0
    for start, stop in _runs(live.tolist()):
        while start < stop and start != target:  # a run moves in steps that do not overlap what they read
            step = min(stop - start, start - target)
            buffer[target : target + step] = buffer[start : start + step]
            start, target = start + step, target + step
        target += stop - start
    return buffer[: live.numel()]


def _runs(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of consecutive numbers."""
    start = 0
    for position in range(1, len(indices) + 1):
        if position == len(indices) or indices[position] != indices[position - 1] + 1:
            yield indices[start], indices[position - 1] + 1
            start = position


def _factor(transform: LogitTransform) -> Tensor | float:
    """What multiplies the logits without a softcap: a number, or (n, 1)."""
    if isinstance(transform.temperature, Tensor):
        return transform.scale / transform.temperature.unsqueeze(-1)
    return transform.scale / transform.temperature
