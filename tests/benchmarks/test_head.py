"""The benchmark of the fused head, and the memory it counts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.head import CONFIG, make_inputs, ours, plain, run, step
from benchmarks.memory import peak_bytes


def test_peak_bytes_counts_what_is_alive_at_once() -> None:
    def call() -> torch.Tensor:
        a = torch.zeros(1000, dtype=torch.float32)  # 4000 bytes
        b = a + 1  # 8000
        del a
        return b + 1  # 8000 again

    assert peak_bytes(call) == 8000


def test_peak_bytes_in_place_views_and_older_tensors_count_nothing() -> None:
    older = torch.zeros(1000)
    assert peak_bytes(lambda: older.add_(1).view(10, 100)[2:]) == 0


@pytest.mark.parametrize("budget_rows", [64, 512])
def test_linear_hacpo_loss_stays_within_budget_and_gradients(budget_rows: int) -> None:
    from hacpo_kernels import linear_hacpo_loss

    inputs = make_inputs(512, 1024, 16, 64, 0.0, torch.float32)
    budget = budget_rows * 1024 * 4

    def call() -> object:
        loss = linear_hacpo_loss(
            inputs.hidden, inputs.weight, inputs.targets, inputs.sequences, CONFIG,
            memory_budget=budget,
        ).loss  # fmt: skip
        return torch.autograd.grad(loss, (inputs.hidden, inputs.weight))

    gradients = 4 * (inputs.hidden.numel() + inputs.weight.numel())
    hidden_rows = 4 * 4 * inputs.hidden.numel()  # copies of rows of hidden states, scaled and unscaled
    peak = peak_bytes(call)
    assert peak is not None and peak <= budget + gradients + hidden_rows


def test_step_ours_and_plain_give_the_same_gradients() -> None:
    inputs = make_inputs(64, 100, 8, 8, 0.5, torch.float32)
    for a, b in zip(step(inputs, ours), step(inputs, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_run_times_ours_at_three_dead_shares_and_names_what_is_missing() -> None:
    rows = {row["name"]: row for row in run(64, 100, 8, 8, torch.float32, rounds=1)}
    assert {"floor", "ours, 0% dead", "ours, 50% dead", "ours, 80% dead", "eager", "plain"} <= set(rows)
    assert all("seconds" in row or "not installed" in row["note"] or "run here" in row["note"] for row in rows.values())
