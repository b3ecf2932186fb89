"""hacpo_loss: from logits, or from log-probabilities that somebody else computed, to the HACPO loss."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import get_backend
from .checks import FLOAT_DTYPES, check_dtype, check_same_device, check_target_ids, check_tensor
from .logprob import LogprobFunction, LogprobParams, check_logits, check_transform, row_temperature
from .objective import normalizers, reduce_loss, reduce_metrics
from .types import HACPOConfig, LossOutput, SequenceBatch, check_update_index


class ObjectiveFunction(torch.autograd.Function):
    """(logprobs (N,), loss, coefficients (N,)) -> loss, whose gradient with respect to logprobs is the coefficients."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, coefficients: Tensor) -> Tensor:
        ctx.save_for_backward(coefficients)
        ctx.dtype = logprobs.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (coefficients,) = ctx.saved_tensors
        return (grads[0] * coefficients).to(ctx.dtype), None, None


def check_sequences(where: str, sequences: object, config: object, rows: int, name: str, tensor: Tensor) -> None:
    """`sequences` and `config` are of their classes and fit the `rows` of `tensor`."""
    if not isinstance(sequences, SequenceBatch):
        raise TypeError(f"{where}: sequences must be a SequenceBatch, got {type(sequences).__name__}.")
    if not isinstance(config, HACPOConfig):
        raise TypeError(f"{where}: config must be a HACPOConfig, got {type(config).__name__}.")
    check_same_device(where, "sequences", sequences.cu_seqlens, name, tensor)
    sequences.check_rows(where, rows)
    sequences.check_config(where, config)


def _loss(
    where: str,
    logprobs: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
    update_index: int,
    num_sequences: float | Tensor | None,
    num_self_sequences: float | Tensor | None,
    ops: ModuleType,
) -> LossOutput:
    values = logprobs.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    denominators = normalizers(where, sequences, num_sequences, num_self_sequences, values.dtype)
    terms = ops.sequence_terms(values, sequences, config, update_index, denominators)
    loss = ObjectiveFunction.apply(logprobs, reduce_loss(terms, config, denominators), terms.coefficients)
    if sequences.loss_mask is not None:
        values = torch.where(sequences.loss_mask != 0, values, 0.0)
    metrics = reduce_metrics(terms, sequences, config, update_index)
    return LossOutput(loss, values, terms.ratios, terms.live, metrics)


@torch.compiler.disable
def hacpo_loss_from_logprobs(
    logprobs: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
    *,
    update_index: int = 0,
    num_sequences: float | Tensor | None = None,
    num_self_sequences: float | Tensor | None = None,
) -> LossOutput:
    """The objective alone, for a trainer that already has per-token log-probabilities (Eq. 11-14).

    Args:
        logprobs: (N,) of a floating dtype, nats, at the temperature the responses were sampled with. Rows that
            `sequences.loss_mask` leaves out influence nothing, even when they hold NaN. Gradients flow through it.
        sequences: what belongs to each sequence; `cu_seqlens` ends at N.
        config: the objective.
        update_index: optimizer updates already done in this step, u of Eq. 14.
        num_sequences, num_self_sequences: sequences (self sequences) of the whole optimizer update over all
            micro-batches and ranks: the denominators of the policy and KL terms. With them, any split of an update
            gives the same summed gradient. None: the non-empty ones of this call. A number or a one-element tensor.

    Returns:
        LossOutput; only `loss` is differentiable.

    Raises:
        ValueError, TypeError: an argument that does not fit, named.
    """
    where = "hacpo_loss_from_logprobs"
    logprobs = check_tensor(where, "logprobs", logprobs)
    check_dtype(where, "logprobs", logprobs, FLOAT_DTYPES, "a floating dtype")
    if logprobs.dim() != 1:
        raise ValueError(
            f"{where}: logprobs must have shape (N,), got {tuple(logprobs.shape)}. Padded (B, T) log-probabilities: "
            "flatten them, with cu_seqlens = arange(B + 1) * T and loss_mask."
        )
    check_sequences(where, sequences, config, logprobs.numel(), "logprobs", logprobs)
    index = check_update_index(where, update_index)
    ops = get_backend(where, None, logprobs.device)
    return _loss(where, logprobs, sequences, config, index, num_sequences, num_self_sequences, ops)


@torch.compiler.disable
def hacpo_loss(
    logits: Tensor,
    target_ids: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
    *,
    update_index: int = 0,
    num_sequences: float | Tensor | None = None,
    num_self_sequences: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str | None = None,
) -> LossOutput:
    """The HACPO loss from logits, without a second tensor of vocabulary size (Eq. 11-14).

    Equivalent to::

        x = softcap * tanh(logit_scale * logits / softcap) / temperature
        logprobs = x.float().log_softmax(-1).gather(-1, target_ids[:, None]).squeeze(-1)
        return hacpo_loss_from_logprobs(logprobs, sequences, config, ...)

    Args:
        logits: (N, V), or (B, T, V) with N = B * T, of a floating dtype and any strides. Row i scores target i: the
            shift between inputs and targets is the caller's. Rows that `sequences.loss_mask` leaves out are not read.
        target_ids: (N,) or (B, T), integer, in [0, V) where they count.
        sequences: what belongs to each sequence; `cu_seqlens` ends at N.
        config: the objective; `HACPOConfig.gspo()`, `.grpo()` and `.naive()` are the baselines.
        update_index, num_sequences, num_self_sequences: see `hacpo_loss_from_logprobs`.
        temperature: > 0, a number or one per sequence (S,): what the responses were sampled with.
        logit_scale: > 0. softcap: > 0 or None. The order is scale, softcap, temperature.
        backend: "torch", "triton" or None (by the tensors' device).

    Returns:
        LossOutput; only `loss` is differentiable, with respect to `logits`. The backward pass may overwrite the
        logits, but only when nothing else can read them any more: see `token_logprobs`. The gradient of a dead
        sequence is written as zeros without reading its logits. Under torch.compile the call is one graph break.

    Raises:
        ValueError, TypeError: an argument that does not fit, named. Values are looked at on CPU tensors, and on an
            accelerator under HACPO_KERNELS_CHECK=1; without it an id outside [0, V) gives NaN, never a read out of
            bounds.
    """
    where = "hacpo_loss"
    logits, target_ids = check_logits(where, logits, target_ids)
    rows = target_ids.numel()
    check_sequences(where, sequences, config, rows, "logits", logits)
    index = check_update_index(where, update_index)
    transform = check_transform(where, temperature, logit_scale, softcap, (sequences.num_sequences,))
    mask = None if sequences.loss_mask is None else sequences.loss_mask != 0
    check_target_ids(where, target_ids.reshape(-1), logits.shape[-1], mask)
    owner = sequences.sequence_of_row(rows) if isinstance(temperature, Tensor) else None
    ops = get_backend(where, backend, logits.device)
    params = LogprobParams(ops, row_temperature(transform, logits, owner), entropy=False)
    logprobs, _ = LogprobFunction.apply(logits, target_ids.reshape(-1), mask, params)
    return _loss(where, logprobs, sequences, config, index, num_sequences, num_self_sequences, ops)
