"""Under torch.compile the public functions run eagerly behind one graph break each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hacpo_kernels import HACPOConfig, SequenceBatch, hacpo_loss, hacpo_loss_from_logprobs, token_logprobs


def step(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    return token_logprobs((hidden * 2.0) @ head, ids).square().sum()


def loss_step(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    size = hidden.shape[0]
    boundaries = torch.arange(2) * size
    sequences = SequenceBatch(boundaries, torch.full((1,), -9.0), torch.full((1,), -1.0))
    return hacpo_loss((hidden * 2.0) @ head, ids, sequences, HACPOConfig(epsilon_low=0.9)).loss * 3.0


def objective_step(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    logprobs = torch.log_softmax(hidden @ head, -1).gather(-1, ids[:, None]).squeeze(-1)
    sequences = SequenceBatch(torch.arange(2) * hidden.shape[0], torch.full((1,), -9.0), torch.full((1,), -1.0))
    return hacpo_loss_from_logprobs(logprobs, sequences, HACPOConfig(epsilon_low=0.9)).loss


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token_logprobs": step, "hacpo_loss": loss_step, "hacpo_loss_from_logprobs": objective_step,
}  # fmt: skip


@pytest.mark.parametrize("engine", ("eager", "aot_eager"))
@pytest.mark.parametrize("name", STEPS)
def test_compiled_function_equals_eager_one_for_dynamic_lengths(name: str, engine: str) -> None:
    torch._dynamo.reset()
    function = STEPS[name]
    compiled: Any = torch.compile(function, backend=engine, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for rows in (7, 8, 13):
        hidden, ids = torch.randn(rows, 4, generator=generator), torch.arange(rows)
        heads = [torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
        losses = [f(hidden, head, ids) for f, head in zip((function, compiled), heads, strict=True)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(heads[1].grad, heads[0].grad, rtol=1e-6, atol=1e-7)
        assert heads[0].grad.abs().max() > 0


def test_compiled_token_logprobs_breaks_the_graph_once() -> None:
    torch._dynamo.reset()
    explained = torch._dynamo.explain(step)(torch.randn(3, 4), torch.randn(4, 16), torch.arange(3))
    assert explained.graph_break_count == 1
