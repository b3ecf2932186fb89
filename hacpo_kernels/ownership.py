"""Whether a saved tensor can be overwritten in a backward pass without anybody noticing.

A gradient with respect to logits is as large as the logits. Writing it over them saves that memory, and is right only
if nothing else can still read them: no variable, view or alias of the caller, no other node of the graph, no second
backward. The test here counts the holders and says yes only if the autograd node is the sole one; whatever it does not
understand, it takes for a holder.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any

import torch
from torch import Tensor


def _holder_counts(tensor: Tensor) -> tuple[int, int, int, int]:
    """References to the tensor object, to the tensor behind it, to the storage object and to the storage behind it."""
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor),
        tensor._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )


class _Probe(torch.autograd.Function):
    """Saves a tensor that nobody else holds and records its counts in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, record: list[tuple[int, int, int, int]]) -> Tensor:
        ctx.save_for_backward(tensor)
        ctx.record = record
        return tensor.detach().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        (tensor,) = ctx.saved_tensors
        ctx.record.append(_holder_counts(tensor))
        return None, None


@functools.cache
def sole_owner_counts() -> tuple[int, int, int, int] | None:
    """The counts of a tensor that only an autograd node holds, measured once; None where they cannot be had.

    Call it in a forward pass before relying on `may_overwrite`: measuring runs a small backward of its own.
    """
    record: list[tuple[int, int, int, int]] = []

    def measure() -> None:
        with contextlib.suppress(AttributeError, RuntimeError):
            graph_is_kept()
            _Probe.apply(torch.zeros(2, requires_grad=True) * 1.0, record).backward()

    # Hooks on saved tensors (activation checkpointing, offloading), dispatch modes and inference mode belong to a
    # thread. In a new one the measurement neither sees them nor is seen by them.
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return record[0] if record else None


def graph_is_kept() -> bool:
    """Whether the backward pass that is running keeps the graph for another one (retain_graph or create_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def may_overwrite(tensor: Tensor) -> bool:
    """Whether `tensor`, just unpacked from `ctx.saved_tensors` into a local variable, has no other holder.

    False for a leaf, for anything still referenced, aliased or viewed, for overlapping memory, and when the graph is
    kept for another backward.
    """
    counts = sole_owner_counts()
    if counts is None or tensor.is_leaf or graph_is_kept():
        return False
    sizes_strides = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes_strides):
        return False
    references, *others = _holder_counts(tensor)
    # this function's own argument is one more reference than the probe had
    return (references - 1, *others) == counts
