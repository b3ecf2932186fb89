"""token_logprobs: from logits to the log-probability (and entropy) of the tokens that were chosen."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backends import get_backend
from .backends.transform import LogitTransform
from .checks import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    check_dtype,
    check_number,
    check_same_device,
    check_shape,
    check_target_ids,
    check_tensor,
    values_are_checked,
)
from .ownership import may_overwrite, sole_owner_counts

IGNORED_ID = -100


@dataclass(frozen=True)
class LogprobParams:
    """What `LogprobFunction` needs besides tensors that autograd must see."""

    ops: ModuleType
    transform: LogitTransform
    entropy: bool


class LogprobFunction(torch.autograd.Function):
    """(logits, target_ids (N,), mask (N,) or None) -> (logprobs (N,), entropies (N,) or None)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target_ids: Tensor, mask: Tensor | None, params: LogprobParams
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, stats, entropies = params.ops.logprob_fwd(
            logits.detach(), target_ids, mask, params.transform, params.entropy
        )
        if ctx.needs_input_grad[0]:
            sole_owner_counts()  # measured here, since it runs a backward of its own
            ctx.save_for_backward(logits, target_ids, mask, stats, entropies)
            ctx.params = params
            ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, target_ids, mask, stats, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None
        overwrite = may_overwrite(logits)
        values = logits.detach()
        grad_logits = ctx.params.ops.logprob_bwd(
            values, target_ids, mask, ctx.params.transform, stats, entropies, grad_logprobs, grad_entropies,
            values if overwrite else None,
        )  # fmt: skip
        if overwrite:
            # if the count of holders was ever wrong, autograd now refuses a stale read instead of using it
            torch.autograd.graph.increment_version(logits)
        return grad_logits, None, None, None


def check_logits(where: str, logits: object, target_ids: object) -> tuple[Tensor, Tensor]:
    """Logits (N, V) or (B, T, V) of a floating dtype and integer target_ids of shape (N,) or (B, T) beside them."""
    logits = check_tensor(where, "logits", logits)
    target_ids = check_tensor(where, "target_ids", target_ids)
    check_dtype(where, "logits", logits, FLOAT_DTYPES, "float16, bfloat16, float32 or float64")
    check_dtype(where, "target_ids", target_ids, INTEGER_DTYPES, "an integer dtype")
    if logits.dim() not in (2, 3):
        raise ValueError(f"{where}: logits must have shape (N, V) or (B, T, V), got {tuple(logits.shape)}.")
    symbols = "logits.shape[:-1]"
    check_shape(where, "target_ids", target_ids, tuple(logits.shape[:-1]), symbols)
    if logits.shape[-1] == 0:
        raise ValueError(f"{where}: logits must have at least one column, got shape {tuple(logits.shape)}.")
    check_same_device(where, "target_ids", target_ids, "logits", logits)
    return logits, target_ids


def check_transform(
    where: str, temperature: float | Tensor, logit_scale: float, softcap: float | None, shape: tuple[int, ...]
) -> LogitTransform:
    """The logit transform with its numbers checked; a tensor temperature must have the given shape."""
    scale = check_number(where, "logit_scale", logit_scale, minimum=0.0, exclusive=True)
    cap = None if softcap is None else check_number(where, "softcap", softcap, minimum=0.0, exclusive=True)
    if not isinstance(temperature, Tensor):
        return LogitTransform(scale, cap, check_number(where, "temperature", temperature, minimum=0.0, exclusive=True))
    check_dtype(where, "temperature", temperature, FLOAT_DTYPES, "a floating dtype")
    check_shape(where, "temperature", temperature, shape, "one per sequence")
    if values_are_checked(temperature) and not bool(((temperature > 0) & torch.isfinite(temperature)).all()):
        raise ValueError(f"{where}: temperature must be finite and > 0, got {temperature.tolist()[:16]}.")
    return LogitTransform(scale, cap, temperature)


def row_temperature(transform: LogitTransform, logits: Tensor, owner: Tensor | None) -> LogitTransform:
    """The transform with a tensor temperature spread over the rows it belongs to."""
    if not isinstance(transform.temperature, Tensor):
        return transform
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = transform.temperature.detach().to(device=logits.device, dtype=dtype)
    if owner is not None:
        values = values[owner]
    elif logits.dim() == 3:
        values = values.repeat_interleave(logits.shape[1])
    return LogitTransform(transform.scale, transform.softcap, values.contiguous())


@torch.compiler.disable
def token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target, without a second tensor of vocabulary size.

    Equivalent to::

        x = softcap * tanh(logit_scale * logits / softcap) / temperature      # softcap=None: logit_scale * logits / T
        logprobs = x.float().log_softmax(-1).gather(-1, target_ids[..., None]).squeeze(-1)

    Args:
        logits: (N, V) or (B, T, V), float16, bfloat16, float32 or float64; any strides. Row i scores target i: the
            shift between inputs and targets is the caller's.
        target_ids: (N,) or (B, T), integer. -100 marks a row to ignore: log-probability and entropy 0, gradient 0, and
            its logits are not read, so they may hold anything.
        temperature: > 0, a number or one per row of the first dimension: (N,) or (B,).
        logit_scale: > 0, multiplies the logits first. softcap: > 0 or None, applied second.
        entropy: also return the entropy of each row, in nats.
        backend: "torch", "triton" or None (by the tensors' device).

    Returns:
        Log-probabilities in nats, shape of `target_ids`, float32 (float64 for float64 logits); with `entropy` a tuple
        of them and the entropies. Both are differentiable with respect to `logits`.

        The backward pass writes the gradient over the logits when nothing else can read them any more: they are not a
        leaf, no variable, view or other node of the graph holds them, and the graph is not retained. Otherwise it
        allocates a tensor of their size. Values you can still see are never changed; `del` yours to save the memory.

        Under torch.compile the call is one graph break and runs as it does without.

    Raises:
        ValueError: shapes, devices, or an id outside [0, V) other than -100 (on an accelerator only under
            HACPO_KERNELS_CHECK=1; without it such a row gives NaN and reads nothing out of bounds). TypeError: dtypes.
    """
    where = "token_logprobs"
    logits, target_ids = check_logits(where, logits, target_ids)
    transform = check_transform(where, temperature, logit_scale, softcap, tuple(logits.shape[:1]))
    counts = target_ids.long() != IGNORED_ID  # in uint8, -100 would compare equal to 156
    check_target_ids(where, target_ids, logits.shape[-1], counts)
    params = LogprobParams(
        get_backend(where, backend, logits.device), row_temperature(transform, logits, None), entropy
    )
    flat_ids, mask = target_ids.reshape(-1), counts.reshape(-1)
    logprobs, entropies = LogprobFunction.apply(logits, flat_ids, mask, params)
    logprobs = logprobs.reshape(target_ids.shape)
    return (logprobs, entropies.reshape(target_ids.shape)) if entropy else logprobs
