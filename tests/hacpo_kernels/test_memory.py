"""Forward and backward allocate nothing of the size of the logits, which they overwrite."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hacpo_kernels import HACPOConfig, SequenceBatch, hacpo_loss, token_logprobs

# (rows, V): larger than a block of the PyTorch backend, or as large as the interpreter has time for
SHAPES = {"torch": (64, 50257), "triton": (6, 4099)}


class Allocations(TorchDispatchMode):
    """Counts the new storages of at least `elements` elements, in bytes per element of `dtype`."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.threshold = elements * dtype.itemsize
        self.large: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(tree: Any) -> set[int]:
            leaves = torch.utils._pytree.tree_leaves(tree)
            return {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}

        before = storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        if "set_" in str(function):  # Triton's interpreter makes tensors over the storages of its arguments
            return result
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.nbytes() >= self.threshold and storage.data_ptr() not in before:
                    self.large.append(str(function))
        return result


def head_inputs(backend: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab_size = SHAPES[backend]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 4, generator=generator).to(dtype)
    head = torch.randn(4, vocab_size, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.arange(rows)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_hacpo_loss_allocates_no_second_tensor_of_vocabulary_size(dtype: torch.dtype, backend: str) -> None:
    rows, vocab_size = SHAPES[backend]
    hidden, head, ids = head_inputs(backend, dtype)
    sequences = SequenceBatch(torch.tensor([0, rows // 2, rows]), torch.full((2,), -9.0), torch.tensor([1.0, -1.0]))
    config = HACPOConfig(epsilon_low=0.99, epsilon_high=1e4)
    hacpo_loss(torch.zeros(2, 3, requires_grad=True), ids[:2], sequences_of_two(), config, backend=backend)  # warm
    with Allocations(rows * vocab_size, dtype) as seen:
        out = hacpo_loss(hidden @ head, ids, sequences, config, backend=backend)
        gc.collect()  # each call of Triton's interpreter leaves a cycle that holds its arguments
        out.loss.backward()
    assert out.live.all()
    assert len(seen.large) == 1 and "mm" in seen.large[0], seen.large


def sequences_of_two() -> SequenceBatch:
    return SequenceBatch(torch.tensor([0, 2]), torch.zeros(1), torch.ones(1))


def test_token_logprobs_of_held_logits_allocates_their_gradient_and_nothing_more(backend: str) -> None:
    rows, vocab_size = SHAPES[backend]
    hidden, head, ids = head_inputs(backend, torch.float32)
    with Allocations(rows * vocab_size, torch.float32) as seen:
        logits = hidden @ head
        token_logprobs(logits, ids, backend=backend).sum().backward()
    assert len(seen.large) == 2, seen.large


def test_token_logprobs_without_gradients_allocates_nothing_of_vocabulary_size(backend: str) -> None:
    rows, vocab_size = SHAPES[backend]
    hidden, head, ids = head_inputs(backend, torch.bfloat16)
    logits = (hidden @ head).detach()
    with Allocations(rows * vocab_size, torch.bfloat16) as seen:
        token_logprobs(logits, ids, entropy=True, backend=backend)
    assert seen.large == []


def test_allocations_sees_what_plain_pytorch_allocates() -> None:
    hidden, head, ids = head_inputs("triton", torch.float32)
    with Allocations(6 * 4099, torch.float32) as seen:
        torch.log_softmax(hidden @ head, -1).gather(-1, ids[:, None]).sum().backward()
    assert len(seen.large) >= 4
