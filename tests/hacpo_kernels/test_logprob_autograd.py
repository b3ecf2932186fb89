"""token_logprobs under autograd: gradcheck, incoming gradients, repeated backward, grad modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hacpo_kernels import token_logprobs
from hacpo_kernels.reference import reference_token_logprobs

from .builders import leaf, relative_error

IDS = torch.tensor([0, -100, 2])
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"temperature": torch.tensor([0.7, 1.3, 2.0]), "logit_scale": 0.8, "softcap": 2.0},
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("output", ("logprobs", "entropies", "both"))
def test_token_logprobs_float64_passes_gradcheck(output: str, transform: str, backend: str) -> None:
    logits = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def function(x: torch.Tensor) -> Any:
        both = token_logprobs(x, IDS, entropy=True, backend=backend, **TRANSFORMS[transform])
        return {"logprobs": both[0], "entropies": both[1], "both": both}[output]

    assert torch.autograd.gradcheck(function, (logits,))


@pytest.mark.parametrize("which", ("logprobs", "entropies"))
def test_token_logprobs_one_output_unused_gives_the_gradient_of_the_other(which: str, backend: str) -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine, wide = leaf(logits), leaf(logits)
    ids = torch.tensor([0, 3, 1, 4])
    index = ("logprobs", "entropies").index(which)
    token_logprobs(mine, ids, entropy=True, backend=backend)[index].sum().backward()
    reference_token_logprobs(wide, ids)[index].sum().backward()
    assert relative_error(mine.grad, wide.grad) <= 1e-12


def test_token_logprobs_weighted_rows_and_an_ignored_one_equal_reference(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(8, 10, generator=generator), torch.randn(10, 15, generator=generator)
    ids = torch.randint(0, 15, (8,), generator=generator)
    weights = torch.randn(8, generator=generator)
    weights[[1, 4]] = 0.0
    kept = torch.arange(8) != 5
    mine, wide = leaf(head), leaf(head.double())
    (token_logprobs(hidden @ mine, torch.where(kept, ids, -100), backend=backend) * weights).sum().backward()
    (reference_token_logprobs(hidden.double() @ wide, ids)[0] * weights * kept).sum().backward()
    assert relative_error(mine.grad, wide.grad) <= 1e-5


def test_token_logprobs_zero_incoming_gradient_gives_exact_zero(backend: str) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logprobs = token_logprobs(logits, torch.tensor([0, 1, 2]), backend=backend)
    logprobs.backward(torch.tensor([0.0, 1.0, 0.0]))
    assert logits.grad[[0, 2]].abs().max() == 0.0
    assert logits.grad[1].abs().max() > 0.0


def test_token_logprobs_backward_twice_gives_the_same(backend: str) -> None:
    head = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hidden = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    loss = token_logprobs(hidden @ head, torch.arange(5), backend=backend).sum()
    (first,) = torch.autograd.grad(loss, head, retain_graph=True)
    (second,) = torch.autograd.grad(loss, head, retain_graph=True)
    (last,) = torch.autograd.grad(loss, head)
    assert torch.equal(first, second)
    assert torch.equal(first, last)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode), ids=("no_grad", "inference_mode"))
def test_token_logprobs_without_gradients_gives_the_same_values(mode: Any, backend: str) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([0, 1, 2, 0])
    expected = token_logprobs(logits, ids, entropy=True, backend=backend)
    with mode():
        inside = token_logprobs(logits * 1.0, ids, entropy=True, backend=backend)
    detached = token_logprobs(logits.detach(), ids, entropy=True, backend=backend)
    for actual in (inside, detached):
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
        assert not actual[0].requires_grad
    assert expected[0].requires_grad


def test_token_logprobs_second_derivative_is_refused(backend: str) -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = token_logprobs(logits, torch.tensor([0, 1]), backend=backend).square().sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_token_logprobs_logits_changed_in_place_are_refused(backend: str) -> None:
    head = torch.ones(2, 3, requires_grad=True)
    logits = head * 2.0
    loss = token_logprobs(logits, torch.tensor([0, 1]), backend=backend).sum()
    logits.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
