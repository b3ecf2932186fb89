"""Exact peak of the memory that a call allocates, on any device: tensors are counted, not the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of storages that are made inside it and alive at once.

    Storages that existed before count nothing. Workspaces inside an operator, which never become tensors, are not seen.

    Attributes:
        peak: largest number of bytes alive at one time. current: bytes alive now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.current = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in before:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or storage.nbytes() == 0:
            return
        size = storage.nbytes()
        self._known[key] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.current -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Peak bytes that `call` allocates; None for a call that is compiled, whose allocations cannot be seen."""
    try:
        with PeakMemory() as memory:
            result = call()
            del result
    except RuntimeError as error:
        if "dispatch mode" in str(error):
            return None
        raise
    return memory.peak
