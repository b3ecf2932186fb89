"""Scale, softcap and temperature: their formula, order and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hacpo_kernels import token_logprobs
from hacpo_kernels.reference import reference_token_logprobs

from .builders import TOLERANCE, leaf, relative_error

TRANSFORMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": torch.tensor([0.3, 1.0, 1.9, 4.0])},
    "scale": {"logit_scale": 0.0625},
    "softcap": {"softcap": 5.0},
    "all": {"temperature": 1.7, "logit_scale": 1.3, "softcap": 4.0},
    "all by row": {"temperature": torch.tensor([0.5, 1.0, 2.0, 3.0]), "logit_scale": 0.5, "softcap": 3.0},
}


@pytest.mark.parametrize("vocab_size", (7, 4099))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_token_logprobs_with_transform_equals_reference(
    name: str, dtype: torch.dtype, vocab_size: int, backend: str
) -> None:
    transform = TRANSFORMS[name]
    generator = torch.Generator().manual_seed(3)
    logits = (4.0 * torch.randn(4, vocab_size, generator=generator)).to(dtype)
    ids = torch.randint(0, vocab_size, (4,), generator=generator)
    mine, wide = leaf(logits), leaf(logits.double())
    logprobs, entropies = token_logprobs(mine, ids, entropy=True, backend=backend, **transform)
    expected = reference_token_logprobs(wide, ids, **transform)
    exact = 1e-10 if dtype == torch.float64 else 1e-5
    assert (logprobs - expected[0]).abs().max() <= exact
    assert (entropies - expected[1]).abs().max() <= exact
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    ((logprobs - 0.3 * entropies) * weights).sum().backward()
    ((expected[0] - 0.3 * expected[1]) * weights).sum().backward()
    assert relative_error(mine.grad, wide.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("temperature, expected", [(0.5, -0.035976), (1.0, -0.239545)])
def test_token_logprobs_temperature_divides_the_logits(temperature: float, expected: float, backend: str) -> None:
    logprob = token_logprobs(
        torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), temperature=temperature, backend=backend
    )
    assert float(logprob) == pytest.approx(expected, abs=1e-6)


def test_token_logprobs_temperature_divides_the_gradient(backend: str) -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
    logprob = token_logprobs(logits, torch.tensor([0]), temperature=0.5, backend=backend)
    logprob.backward()
    probability = math.exp(-0.035976)
    assert float(logits.grad[0, 0]) == pytest.approx((1.0 - probability) / 0.5, abs=1e-5)


def test_token_logprobs_order_is_scale_then_softcap_then_temperature(backend: str) -> None:
    # 30 tanh(0.5 * 40 / 30) / 2 = 8.7417 against a logit of 0; scaling after the cap would give 6.525
    logits = torch.tensor([[40.0, 0.0]], dtype=torch.float64)
    logprob = token_logprobs(logits, torch.tensor([1]), temperature=2.0, logit_scale=0.5, softcap=30.0, backend=backend)
    x = 30.0 * math.tanh(20.0 / 30.0) / 2.0
    assert x == pytest.approx(8.7417, abs=1e-4)
    assert float(logprob) == pytest.approx(-math.log1p(math.exp(x)), rel=1e-9)


def test_token_logprobs_one_temperature_per_padded_row_applies_to_all_its_tokens(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 3, 11, generator=generator), torch.randint(0, 11, (2, 3), generator=generator)
    both = token_logprobs(logits, ids, temperature=torch.tensor([0.5, 2.0]), backend=backend)
    for row, temperature in enumerate((0.5, 2.0)):
        alone = token_logprobs(logits[row], ids[row], temperature=temperature, backend=backend)
        torch.testing.assert_close(both[row], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=str)
def test_token_logprobs_row_temperature_of_any_dtype_is_read(dtype: torch.dtype, backend: str) -> None:
    logits, ids = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 4])
    wanted = token_logprobs(logits, ids, temperature=torch.tensor([0.5, 2.0]), backend=backend)
    assert torch.equal(
        token_logprobs(logits, ids, temperature=torch.tensor([0.5, 2.0], dtype=dtype), backend=backend), wanted
    )


def _gradient(logits: Tensor, backend: str, **transform: Any) -> Tensor:
    mine = leaf(logits)
    token_logprobs(mine, torch.tensor([0]), backend=backend, **transform).backward()
    return mine.grad


def test_token_logprobs_saturated_softcap_gives_a_finite_gradient(backend: str) -> None:
    gradient = _gradient(torch.tensor([[1e4, -1e4, float("-inf"), 1.0]]), backend, softcap=2.0)
    assert torch.isfinite(gradient).all()
    assert gradient[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert float(gradient[0, 3]) != 0.0
