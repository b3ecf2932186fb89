"""Launches the Triton kernels; the same three functions as the PyTorch backend."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..head import Head
from ..objective import SequenceTerms
from ..types import HACPOConfig, SequenceBatch
from . import triton_kernels
from .torch_ops import accumulation_dtype, compact_rows
from .transform import LogitTransform

__all__ = ["INTERPRETED", "head_gradient", "logprob_bwd", "logprob_fwd", "score_head", "sequence_terms"]

INTERPRETED = not isinstance(triton_kernels._logprob_fwd_kernel, triton.runtime.jit.JITFunction)

# Chosen from the element size, not by autotuning: each thread then holds two 16-byte loads in the forward kernel
# (8 warps) and one or two in the backward kernel (4 warps), on 32- and 64-lane targets alike, without spilling.
_FWD_BYTES, FWD_WARPS = 8192, 8
_BWD_BYTES, BWD_WARPS = 4096, 4
SEQUENCE_BLOCK, SEQUENCE_WARPS = 256, 2
_CROSS_RULES = {"none": 0, "self": 1, "hacpo": 2}


def fwd_block(element_size: int) -> int:
    """Columns that a program of the forward kernel reads at once."""
    return _FWD_BYTES // element_size


def bwd_block(element_size: int) -> int:
    """Columns that a program of the backward kernel owns."""
    return _BWD_BYTES // element_size


def _device_guard(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """(T, stride_b, stride_t, stride_v) of a (T, V) or (B, T, V) tensor."""
    if tensor.dim() == 2:
        return max(tensor.shape[0], 1), 0, tensor.stride(0), tensor.stride(1)
    return max(tensor.shape[1], 1), tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _peels(tensor: Tensor) -> bool:
    """Whether rows have adjacent columns but are not all known to start on a 16-byte boundary.

    Triton itself sees the alignment of pointers and of strides that are multiples of 16.
    """
    aligned = tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in (*tensor.stride()[:-1], tensor.shape[-1]))
    return tensor.stride(-1) == 1 and not aligned


def _equally_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether corresponding rows of two tensors start equally far from a 16-byte boundary."""
    if a.element_size() != b.element_size():
        return False
    elements = 16 // a.element_size()
    same_start = (a.data_ptr() - b.data_ptr()) % 16 == 0
    return same_start and all((p - q) % elements == 0 for p, q in zip(a.stride()[:-1], b.stride()[:-1], strict=True))


def _common(logits: Tensor, mask: Tensor | None, transform: LogitTransform, entropy: bool) -> dict[str, Any]:
    """Kernel arguments that the forward and the backward share."""
    row_temperature = isinstance(transform.temperature, Tensor)
    return {
        "mask_ptr": mask,
        "temperature_ptr": transform.temperature if row_temperature else None,
        "scale": transform.scale,
        "softcap": transform.softcap or 1.0,
        "temperature": 1.0 if row_temperature else transform.temperature,
        "ACC": tl.float64 if accumulation_dtype(logits) == torch.float64 else tl.float32,
        "HAS_MASK": mask is not None,
        "HAS_SOFTCAP": transform.softcap is not None,
        "HAS_ROW_TEMPERATURE": row_temperature,
        "HAS_ENTROPY": entropy,
        "ELEMENT_BYTES": logits.element_size(),
    }


def logprob_fwd(
    logits: Tensor, target_ids: Tensor, mask: Tensor | None, transform: LogitTransform, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probabilities (N,), statistics (2, N), entropies or None); see `torch_ops.logprob_fwd`."""
    rows, dtype = target_ids.numel(), accumulation_dtype(logits)
    logprobs = torch.empty(rows, dtype=dtype, device=logits.device)
    stats = torch.empty(2, rows, dtype=dtype, device=logits.device)
    entropies = torch.empty_like(logprobs) if entropy else None
    if rows:
        time, stride_b, stride_t, stride_v = _strides(logits)
        with _device_guard(logits):
            triton_kernels._logprob_fwd_kernel[(rows,)](
                logits_ptr=logits, target_ids_ptr=target_ids.contiguous(), logprobs_ptr=logprobs, stats_ptr=stats,
                entropies_ptr=entropies, N=rows, T=time, V=logits.shape[-1], stride_b=stride_b, stride_t=stride_t,
                stride_v=stride_v, PEEL=_peels(logits), BLOCK_V=fwd_block(logits.element_size()),
                num_warps=FWD_WARPS,
                **_common(logits, mask, transform, entropy),
            )  # fmt: skip
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
    """d logits, written to `out` (which may be the logits) or to a new tensor; see `torch_ops.logprob_bwd`."""
    rows, vocab_size = target_ids.numel(), logits.shape[-1]
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if grad_logprobs is None:
        grad_logprobs = torch.zeros(rows, dtype=stats.dtype, device=logits.device)
    if rows and vocab_size:
        time, stride_b, stride_t, stride_v = _strides(logits)
        _, grad_stride_b, grad_stride_t, grad_stride_v = _strides(out)
        block = bwd_block(logits.element_size())
        peel = _peels(logits) and grad_stride_v == 1 and _equally_aligned(logits, out)
        # a row that starts between two boundaries can reach into one block more
        width = vocab_size + (16 // logits.element_size() - 1 if peel else 0)
        with _device_guard(logits):
            triton_kernels._logprob_bwd_kernel[(rows, triton.cdiv(width, block))](
                logits_ptr=logits, grad_logits_ptr=out, target_ids_ptr=target_ids.contiguous(), stats_ptr=stats,
                entropies_ptr=entropies, grad_logprobs_ptr=grad_logprobs.contiguous(),
                grad_entropies_ptr=None if grad_entropies is None else grad_entropies.contiguous(),
                N=rows, T=time, V=vocab_size, stride_b=stride_b, stride_t=stride_t, stride_v=stride_v,
                grad_stride_b=grad_stride_b, grad_stride_t=grad_stride_t, grad_stride_v=grad_stride_v,
                PEEL=peel, BLOCK_V=block, num_warps=BWD_WARPS,
                **_common(logits, mask, transform, grad_entropies is not None),
            )  # fmt: skip
    return out


def sequence_terms(
    logprobs: Tensor, sequences: SequenceBatch, config: HACPOConfig, update_index: int, denominators: Tensor
) -> SequenceTerms:
    """The objective of each sequence in one kernel; see `objective.sequence_terms`."""
    size, rows, device, dtype = sequences.num_sequences, logprobs.numel(), logprobs.device, logprobs.dtype
    low, high = config.cross_bounds(update_index)
    mask = sequences.loss_mask
    has_cross = sequences.is_cross is not None and config.cross != "self"
    ratios, objectives, kl = (torch.empty(size, dtype=dtype, device=device) for _ in range(3))
    live, clipped = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
    coefficients = torch.zeros(rows, dtype=dtype, device=device)
    # KL is taken on self sequences, also when cross ones follow the self rule
    has_cross = sequences.is_cross is not None and (has_cross or config.beta > 0)
    if size:
        with _device_guard(logprobs):
            triton_kernels._sequence_kernel[(size,)](
                logprobs_ptr=logprobs.contiguous(), mask_ptr=None if mask is None else mask.contiguous(),
                cu_seqlens_ptr=sequences.cu_seqlens.contiguous(),
                source_mean_ptr=sequences.source_mean_logprobs.contiguous(),
                advantages_ptr=sequences.advantages.contiguous(), weights_ptr=_contiguous(sequences.weights),
                is_cross_ptr=_contiguous(sequences.is_cross), lengths_ptr=_contiguous(sequences.lengths),
                ref_logprobs_ptr=_contiguous(sequences.ref_logprobs) if config.beta > 0 else None,
                old_logprobs_ptr=_contiguous(sequences.old_logprobs) if config.ratio == "token" else None,
                denominators_ptr=denominators, coefficients_ptr=coefficients, ratios_ptr=ratios,
                objectives_ptr=objectives, kl_ptr=kl, live_ptr=live, clipped_ptr=clipped, N=rows, alpha=config.alpha,
                cross_low=low, cross_high=high, epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high,
                beta=config.beta, HAS_MASK=mask is not None, HAS_WEIGHTS=sequences.weights is not None,
                HAS_CROSS=has_cross, HAS_LENGTHS=sequences.lengths is not None, HAS_KL=config.beta > 0,
                TOKEN_RATIO=config.ratio == "token", CROSS_RULE=_CROSS_RULES[config.cross], BLOCK_N=SEQUENCE_BLOCK,
                num_warps=SEQUENCE_WARPS,
            )  # fmt: skip
    return SequenceTerms(coefficients, ratios, objectives, kl, live.bool(), clipped)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def score_head(
    head: Head, rows: Tensor, target_ids: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probabilities (n,), raw logits (n, V), statistics (2, n)); see `torch_ops.score_head`."""
    logits = head.logits(head.rows(rows))
    columns = target_ids if head.shard is None else head.shard.local(target_ids)
    logprobs, stats, _ = logprob_fwd(logits, columns, None, transform, entropy=False)
    if head.shard is not None:
        logprobs, stats, _ = head.shard.combine(target_ids, logprobs, stats)
    return logprobs, logits, stats


def head_gradient(
    head: Head,
    buffer: Tensor,
    stats: Tensor | None,
    target_ids: Tensor,
    transform: LogitTransform,
    live: Tensor,
) -> tuple[Tensor, float]:
    """(gradients (k, V), 1.0) of the `live` rows; see `torch_ops.head_gradient`."""
    assert stats is not None
    logits = compact_rows(buffer, live)
    out = logits
    if head.low:  # rounded as it is written, not in a pass of its own
        out = torch.empty(logits.shape, dtype=head.operand_dtype, device=logits.device)
    ones = torch.ones(live.numel(), dtype=stats.dtype, device=logits.device)
    chosen = stats[:, live].contiguous()
    ids = target_ids[live]
    if head.shard is not None:
        ids = ids.long() - head.shard.start  # a target of another rank matches no column
    return logprob_bwd(logits, ids, None, transform.of_rows(live), chosen, None, ones, None, out), 1.0
