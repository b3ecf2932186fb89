"""Layouts: strided, sliced, transposed and expanded logits, targets and incoming gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hacpo_kernels import token_logprobs
from hacpo_kernels.reference import reference_token_logprobs

from .builders import TOLERANCE, leaf, relative_error

# name -> (shape of the base, how the logits come out of it)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "every second column": ((4, 66), lambda x: x[:, ::2]),
    "some columns": ((4, 80), lambda x: x[:, 5:38]),
    "rows on 16 bytes, columns cut": ((4, 64), lambda x: x[:, :33]),
    "first row dropped": ((5, 33), lambda x: x[1:]),
    "every second row": ((8, 33), lambda x: x[::2]),
    "transposed": ((33, 4), lambda x: x.t()),
    "last position dropped": ((2, 4, 33), lambda x: x[:, :-1]),
    "first position dropped": ((2, 4, 33), lambda x: x[:, 1:]),
    "time first": ((3, 2, 33), lambda x: x.transpose(0, 1)),
    "vocabulary first": ((33, 2, 3), lambda x: x.permute(1, 2, 0)),
    "expanded over the batch": ((1, 3, 33), lambda x: x.expand(3, -1, -1)),
    "expanded over rows": ((1, 33), lambda x: x.expand(4, -1)),
    "aligned rows, sliced time": ((2, 4, 32), lambda x: x[:, 1:]),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_token_logprobs_any_layout_equals_reference(name: str, dtype: torch.dtype, backend: str) -> None:
    shape, view = LAYOUTS[name]
    generator = torch.Generator().manual_seed(0)
    base = (2.0 * torch.randn(shape, generator=generator)).to(dtype)
    mine, wide = leaf(base), leaf(base.double())
    logits = view(mine)
    ids = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator)
    logprobs = token_logprobs(logits, ids, backend=backend)
    expected = reference_token_logprobs(view(wide).reshape(-1, logits.shape[-1]), ids.reshape(-1))[0]
    torch.testing.assert_close(logprobs.reshape(-1).double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.arange(1.0, 1.0 + ids.numel())
    (logprobs.reshape(-1) * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative_error(mine.grad, wide.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("temporary", (False, True), ids=("visible", "temporary"))
@pytest.mark.parametrize("offset", range(9))
def test_token_logprobs_rows_at_any_distance_from_a_boundary_equal_reference(
    offset: int, temporary: bool, backend: str
) -> None:
    # rows of 2059 columns that begin anywhere between two 16-byte boundaries, over more than one block
    generator = torch.Generator().manual_seed(offset)
    memory = torch.randn(offset + 2 * 2059, generator=generator).bfloat16()
    base = leaf(memory)
    logits = base[offset:].view(2, 2059)
    if temporary:
        logits = logits * 1.0
    ids = torch.tensor([0, 2058])
    expected_base = leaf(memory.double())
    expected = reference_token_logprobs(expected_base[offset:].view(2, 2059), ids)[0]
    logprobs = token_logprobs(logits, ids, backend=backend)
    del logits
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    assert relative_error(base.grad, expected_base.grad) <= 2e-2
    assert base.grad[:offset].abs().sum() == 0.0


IDS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda x: x.repeat_interleave(2)[::2],
    "expanded": lambda x: x[:1].expand(4),
    "a column": lambda x: torch.stack([x, x.flip(0)], 1)[:, 0],
}


@pytest.mark.parametrize("name", IDS)
def test_token_logprobs_strided_ids_are_read_in_order(name: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, plain = torch.randn(4, 33, generator=generator), torch.randint(0, 33, (4,), generator=generator)
    ids = IDS[name](plain)
    assert not ids.is_contiguous()
    mine, theirs = leaf(logits), leaf(logits)
    actual, expected = (
        token_logprobs(x, i, backend=backend) for x, i in ((mine, ids), (theirs, ids.clone().contiguous()))
    )
    assert torch.equal(actual, expected)
    actual.sum().backward()
    expected.sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_token_logprobs_sliced_padded_ids_are_read_in_order(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 5, 33, generator=generator), torch.randint(0, 33, (2, 10), generator=generator)
    actual = token_logprobs(logits, ids[:, ::2], backend=backend)
    assert torch.equal(actual, token_logprobs(logits, ids[:, ::2].contiguous(), backend=backend))


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "row weight": lambda x: (x * torch.arange(1.0, 17.0).reshape(16, 1)).sum(),
    "expanded weight": lambda x: (x * torch.arange(1.0, 17.0).reshape(16, 1).expand(16, 2)).sum(),
    "last column": lambda x: x[:, 1].sum(),
    "transposed": lambda x: (x.t() * torch.arange(32.0).reshape(2, 16)).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_token_logprobs_incoming_gradient_of_any_stride_is_read_in_order(name: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(16, 2, 5, generator=generator), torch.randint(0, 5, (16, 2), generator=generator)
    mine, wide = leaf(logits), leaf(logits.double())
    GRADIENTS[name](token_logprobs(mine, ids, backend=backend)).backward()
    GRADIENTS[name](torch.log_softmax(wide, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)).backward()
    assert relative_error(mine.grad, wide.grad) <= 1e-5


def test_token_logprobs_stride_0_gradient_equals_contiguous_one(backend: str) -> None:
    logits, ids = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5
    grads = []
    for gradient in (torch.tensor([2.0]).expand(6), torch.full((6,), 2.0)):
        mine = leaf(logits)
        logprobs, entropies = token_logprobs(mine, ids, entropy=True, backend=backend)
        torch.autograd.backward([logprobs, entropies], [gradient, gradient])
        grads.append(mine.grad)
    assert torch.equal(grads[0], grads[1])
