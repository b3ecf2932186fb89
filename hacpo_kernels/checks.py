"""Argument checks shared by the public functions.

Shapes, dtypes and devices are checked always. Values (finite, in range) need the numbers on the host, which makes an
accelerator wait, so they are checked on CPU tensors always and elsewhere only under HACPO_KERNELS_CHECK=1.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Sequence

import torch
from torch import Tensor

INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values_are_checked(tensor: Tensor) -> bool:
    """Whether the values of `tensor` may be looked at: on CPU always, elsewhere under HACPO_KERNELS_CHECK=1."""
    return tensor.device.type == "cpu" or os.environ.get("HACPO_KERNELS_CHECK", "0") == "1"


def check_tensor(where: str, name: str, value: object) -> Tensor:
    """`value` as a plain tensor; TypeError for anything else, DTensors included."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: {name} must be a torch.Tensor, got {type(value).__name__}.")
    if type(value).__name__ == "DTensor":
        raise TypeError(
            f"{where}: {name} is a DTensor (placements {getattr(value, 'placements', '?')}). Call the loss inside the "
            "forward of the wrapped module, where the tensor is whole, or pass its full_tensor()."
        )
    return value


def check_shape(where: str, name: str, value: Tensor, shape: Sequence[int], symbols: str) -> None:
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{where}: {name} must have shape {symbols} = {tuple(shape)}, got {tuple(value.shape)}.")


def check_dtype(where: str, name: str, value: Tensor, allowed: Sequence[torch.dtype], kind: str) -> None:
    if value.dtype not in allowed:
        raise TypeError(f"{where}: {name} must be {kind}, got {value.dtype}.")


def check_same_device(where: str, name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"{where}: {name} is on {value.device} but {other_name} is on {other.device}; move them to one device."
        )


def check_number(
    where: str, name: str, value: object, *, minimum: float | None = None, exclusive: bool = False
) -> float:
    """`value` as a finite float that is at least (or, with `exclusive`, above) `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{where}: {name} must be a number, got {type(value).__name__} ({value!r}).")
    number = float(value)
    below = minimum is not None and (number <= minimum if exclusive else number < minimum)
    if not math.isfinite(number) or below:
        rule = "" if minimum is None else f" {'>' if exclusive else '>='} {minimum:g}"
        raise ValueError(f"{where}: {name} must be a finite number{rule}, got {value!r}.")
    return number


def check_target_ids(where: str, target_ids: Tensor, vocab_size: int, counts: Tensor | None) -> None:
    """Every counted id lies in [0, V). `counts` is a bool mask of the same shape, None when all count."""
    if not values_are_checked(target_ids):
        return
    target_ids = target_ids.long()  # V need not fit the narrow dtype that the ids came in
    wrong = (target_ids < 0) | (target_ids >= vocab_size)
    if counts is not None:
        wrong &= counts
    if bool(wrong.any()):
        first = tuple(int(i) for i in wrong.nonzero()[0])
        position = first[0] if len(first) == 1 else first
        raise ValueError(
            f"{where}: target_ids must lie in [0, V) = [0, {vocab_size}), got {int(target_ids[first])} at position "
            f"{position} ({int(wrong.sum())} such ids). Ids of another model's vocabulary cannot be scored: encode the "
            "text with this model's tokenizer."
        )
