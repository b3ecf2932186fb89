"""Numbers worked out by hand: ratio, clipping, sign, KL and the stepwise bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hacpo_kernels import HACPOConfig, LossOutput, SequenceBatch, hacpo_loss, hacpo_loss_from_logprobs, token_logprobs

from .builders import leaf

pytestmark = pytest.mark.usefixtures("objective_backend")


def loss_of(
    logprobs: list[list[float]],
    source: list[float],
    advantages: list[float],
    *,
    cross: list[bool] | None = None,
    config: HACPOConfig | None = None,
    dtype: torch.dtype = torch.float64,
    ref: list[list[float]] | None = None,
    mask: list[list[int]] | None = None,
    weights: list[float] | None = None,
    lengths: list[float] | None = None,
    **options: Any,
) -> tuple[LossOutput, Tensor]:
    """(output, d loss / d logprobs) of sequences given by their per-token log-probabilities."""

    def flat(rows: list[list[float]] | None, kind: torch.dtype) -> Tensor | None:
        return None if rows is None else torch.tensor([x for row in rows for x in row], dtype=kind)

    values = flat(logprobs, dtype)
    assert values is not None
    values.requires_grad_()
    sequences = SequenceBatch(
        cu_seqlens=torch.tensor([0, *(len(row) for row in logprobs)]).cumsum(0),
        source_mean_logprobs=torch.tensor(source, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
        is_cross=None if cross is None else torch.tensor(cross),
        lengths=None if lengths is None else torch.tensor(lengths),
        ref_logprobs=flat(ref, torch.float64),
        loss_mask=flat(mask, torch.int64),
    )
    out = hacpo_loss_from_logprobs(values, sequences, HACPOConfig() if config is None else config, **options)
    out.loss.backward()
    return out, values.grad


def test_ratio_is_the_exponential_of_the_mean_not_of_the_sum() -> None:
    out, _ = loss_of([[-1.003] * 1000], [-1.0], [1.0])
    assert out.ratios.item() == pytest.approx(math.exp(-0.003), rel=1e-12)  # the sum would give 0.0498


@pytest.mark.parametrize("padding", (0, 3))
def test_ratio_takes_one_exponential_and_padding_adds_nothing(padding: int) -> None:
    out, _ = loss_of([[-0.9, -1.1, -0.8, *[0.0] * padding]], [-1.0], [1.0], mask=[[1, 1, 1, *[0] * padding]])
    assert out.ratios.item() == pytest.approx(1.06894, abs=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("advantage", (1.0, -1.0, 0.0))
@pytest.mark.parametrize("source, ratio, bound", [(-200.0, math.exp(10.0), 1.0), (200.0, math.exp(-10.0), 0.825)])
def test_cross_ratio_beyond_the_clamp_is_a_constant_bound(
    source: float, ratio: float, bound: float, advantage: float, dtype: torch.dtype
) -> None:
    out, gradient = loss_of([[-0.1]], [source], [advantage], cross=[True], dtype=dtype, update_index=1)
    assert out.loss.item() == pytest.approx(-(bound**2) * advantage, abs=1e-6)
    assert gradient.abs().max() == 0.0
    assert out.ratios.item() == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("advantage, live", [(1.0, False), (-1.0, False)])
@pytest.mark.parametrize("source", (-200.0, 200.0))
def test_self_ratio_beyond_the_clamp_has_no_gradient_and_a_finite_loss(
    source: float, advantage: float, live: bool
) -> None:
    out, gradient = loss_of([[-0.1]], [source], [advantage])
    assert math.isfinite(out.loss.item())
    assert gradient.abs().max() == 0.0
    assert out.live.item() is live


@pytest.mark.parametrize("advantage", (1.0, -1.0))
def test_gradient_descends_on_the_objective(advantage: float) -> None:
    _, gradient = loss_of([[-1.0, -2.0, -3.0, -2.0]], [-2.0], [advantage])
    assert gradient.tolist() == pytest.approx([-advantage / 4.0] * 4)


def test_first_update_on_policy_has_loss_0_and_a_gradient() -> None:
    out, gradient = loss_of([[-1.0, -3.0], [-2.0]], [-2.0, -2.0], [1.0, -1.0])
    assert out.loss.item() == 0.0
    assert gradient.tolist() == pytest.approx([-0.25, -0.25, 0.5])


@pytest.mark.parametrize(
    "update_index, objective, coefficient",
    [(0, 0.81873, 0.20468), (4, 0.81873, 0.20468), (8, 1.0, 0.0), (12, 1.0, 0.0)],
)
def test_cross_lower_bound_rises_with_the_update(update_index: int, objective: float, coefficient: float) -> None:
    out, gradient = loss_of([[-1.1] * 4], [-1.0], [1.0], cross=[True], update_index=update_index)
    assert -out.loss.item() == pytest.approx(objective, abs=1e-5)
    assert gradient.tolist() == pytest.approx([-coefficient] * 4, abs=1e-5)
    assert out.live.item() is (coefficient > 0)


@pytest.mark.parametrize("update_index, closed", [(0, 0.0), (7, 0.0), (8, 1.0), (30, 1.0)])
def test_metric_says_when_the_cross_bounds_have_closed(update_index: int, closed: float) -> None:
    out, _ = loss_of([[-1.1]], [-1.0], [1.0], cross=[True], update_index=update_index)
    assert out.metrics["cross_bounds_closed"].item() == closed


def test_closed_bounds_kill_a_cross_ratio_that_lies_on_them() -> None:
    out, gradient = loss_of([[-1.0]], [-1.0], [1.0], cross=[True], update_index=8)
    assert out.ratios.item() == 1.0
    assert out.loss.item() == -1.0
    assert gradient.item() == 0.0
    assert out.live.item() is False


@pytest.mark.parametrize("cross, advantage, bound, live", [
    (True, 1.0, 1.0, True), (True, -1.0, 0.5, True), (False, 1.0, 1.5, True), (False, -1.0, 0.5, True),
])  # fmt: skip
def test_ratio_exactly_on_a_bound_is_live(cross: bool, advantage: float, bound: float, live: bool) -> None:
    config = HACPOConfig(cross_clip_low=0.5, epsilon_low=0.5, epsilon_high=0.5)
    source = -1.0 - math.log(bound)
    out, gradient = loss_of([[-1.0]], [source], [advantage], cross=[cross], config=config)
    if out.ratios.item() != bound:
        pytest.skip("the logarithm of the bound does not round trip")
    assert out.live.item() is live
    assert gradient.item() != 0.0


@pytest.mark.parametrize("advantage, log_ratio, live", [
    (1.0, 0.5, False), (1.0, -0.5, True), (-1.0, -0.5, False), (-1.0, 0.5, True),
])  # fmt: skip
def test_self_rule_clips_only_on_the_side_of_the_advantage(advantage: float, log_ratio: float, live: bool) -> None:
    out, gradient = loss_of([[-1.0]], [-1.0 - log_ratio], [advantage])
    ratio, radius = math.exp(log_ratio), 4e-4 if advantage > 0 else -3e-4
    assert out.live.item() is live
    assert -out.loss.item() == pytest.approx(advantage * (ratio if live else 1.0 + radius), rel=1e-9)
    assert gradient.item() == pytest.approx(-advantage * ratio if live else 0.0)


@pytest.mark.parametrize("advantage", (1.0, -1.0))
@pytest.mark.parametrize("log_ratio, bound", [(0.2, 1.0), (-0.5, 0.8)])
def test_cross_rule_clips_on_both_sides_whatever_the_advantage(
    advantage: float, log_ratio: float, bound: float
) -> None:
    out, gradient = loss_of([[-1.0]], [-1.0 - log_ratio], [advantage], cross=[True])
    assert -out.loss.item() == pytest.approx(bound**2 * advantage)
    assert gradient.item() == 0.0


def test_exponent_and_weight_scale_the_cross_objective_once() -> None:
    config = HACPOConfig(alpha=3.0)
    out, gradient = loss_of([[-1.1, -1.1]], [-1.0], [2.0], cross=[True], weights=[0.5], config=config)
    assert -out.loss.item() == pytest.approx(math.exp(-0.4))
    assert gradient.tolist() == pytest.approx([-math.exp(-0.4) / 2.0] * 2)


def test_weight_of_a_self_sequence_is_not_read() -> None:
    out, _ = loss_of([[-1.0], [-1.1]], [-1.0, -1.0], [1.0, 0.0], cross=[False, True], weights=[float("nan"), 2.0])
    assert out.loss.item() == -0.5


def test_weight_0_makes_a_cross_sequence_dead() -> None:
    out, gradient = loss_of([[-1.1]], [-1.0], [1.0], cross=[True], weights=[0.0])
    assert gradient.item() == 0.0
    assert out.live.item() is False


def test_lengths_divide_the_learners_sum_and_its_gradient() -> None:
    # 8 nats over 4 learner tokens, the source had 3: one divisor makes 8/3 of it
    out, gradient = loss_of([[-2.0] * 4], [-8.0 / 3.0], [1.0], lengths=[3])
    assert out.ratios.item() == pytest.approx(1.0)
    assert gradient.tolist() == pytest.approx([-1.0 / 3.0] * 4)


def test_source_mean_is_over_the_sources_own_tokens() -> None:
    # -6 nats over 3 source tokens, -8 over 4 learner tokens: ratio 1
    out, _ = loss_of([[-2.0] * 4], [-6.0 / 3.0], [1.0], cross=[True])
    assert out.ratios.item() == pytest.approx(1.0)


def test_cross_ratio_uses_the_stored_source_mean_even_when_all_is_one_batch() -> None:
    out, _ = loss_of([[-1.0], [-1.0]], [-1.0, -2.0], [1.0, 1.0], cross=[False, True])
    assert out.ratios.tolist() == pytest.approx([1.0, math.e])
    assert out.live.tolist() == [True, False]
    out, _ = loss_of([[-1.0], [-1.0]], [-1.0, -0.9], [1.0, 1.0], cross=[False, True])
    assert out.ratios[1].item() == pytest.approx(0.904837, abs=1e-6)


def test_each_sequence_weighs_the_same_whatever_its_length() -> None:
    out, gradient = loss_of([[-1.0], [-1.0] * 4], [-1.0, -1.0], [1.0, -1.0])
    assert out.loss.item() == 0.0
    assert gradient.tolist() == pytest.approx([-0.5] + [0.125] * 4)


def test_kl_is_k3_with_its_own_gradient_and_skips_padding() -> None:
    out, gradient = loss_of(
        [[-1.0, 4.0]], [-1.0], [0.0], config=HACPOConfig(beta=1.0), ref=[[-1.1, -1.0]], mask=[[1, 0]]
    )
    assert out.loss.item() == pytest.approx(0.004837, abs=1e-6)
    assert gradient.tolist() == pytest.approx([0.09516, 0.0], abs=1e-5)
    assert out.metrics["kl"].item() == pytest.approx(0.004837, abs=1e-6)


def test_kl_is_taken_on_self_sequences_alone() -> None:
    _, gradient = loss_of(
        [[-1.0], [-1.0]],
        [-1.0, -1.0],
        [0.0, 0.0],
        cross=[False, True],
        config=HACPOConfig(beta=1.0),
        ref=[[-1.1], [-1.1]],
    )
    assert gradient.tolist() == pytest.approx([0.09516, 0.0], abs=1e-5)


def test_kl_of_cross_sequences_under_the_self_rule_is_left_out_too() -> None:
    _, gradient = loss_of(
        [[-1.0]], [-1.0], [0.0], cross=[True], config=HACPOConfig.naive(beta=1.0), ref=[[-1.1]], num_self_sequences=1
    )
    assert gradient.item() == 0.0


def test_kl_stays_on_sequences_of_advantage_0_and_they_stay_counted() -> None:
    config = HACPOConfig(beta=0.5)
    out, gradient = loss_of([[-1.0], [-1.0]], [-1.0, -1.0], [1.0, 0.0], config=config, ref=[[-1.0], [-1.1]])
    assert out.live.tolist() == [True, True]
    assert gradient.tolist() == pytest.approx([-0.5, 0.5 * 0.09516 / 2.0], abs=1e-6)


def test_kl_averages_over_the_tokens_of_a_sequence_then_over_sequences() -> None:
    config = HACPOConfig(beta=1.0)
    k3 = math.exp(-0.1) + 0.1 - 1.0
    out, _ = loss_of([[-1.0, -1.0], [-1.0]], [-1.0, -1.0], [0.0, 0.0], config=config, ref=[[-1.1, -1.0], [-1.1]])
    assert out.loss.item() == pytest.approx((k3 / 2.0 + k3) / 2.0)


def test_tiny_beta_changes_the_loss_by_that_much() -> None:
    rows = [[-1.0, -1.2], [-0.5] * 8]
    ref = [[-1.1, -1.0], [-0.7] * 8]
    arguments = (rows, [-1.1, -0.5], [1.0, -2.0])
    without, _ = loss_of(*arguments, ref=ref)
    with_kl, _ = loss_of(*arguments, ref=ref, config=HACPOConfig(beta=1e-12))
    assert 0.0 < with_kl.loss.item() - without.loss.item() < 1e-12


@pytest.mark.parametrize("num_self", (None, 0, 0.0, torch.tensor(0), torch.tensor([0.0])), ids=str)
def test_kl_without_self_sequences_is_0_and_not_nan(num_self: Any) -> None:
    out, gradient = loss_of(
        [[-1.1], [-1.2]], [-1.0, -1.0], [1.0, 1.0], cross=[True, True], config=HACPOConfig(beta=0.5),
        ref=[[-1.0], [-1.0]], num_self_sequences=num_self,
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(-(math.exp(-0.2) + math.exp(-0.4)) / 2.0)
    assert torch.isfinite(gradient).all()
    assert out.metrics["kl"].item() == 0.0


def test_dropped_sequences_leave_the_numerator_and_the_denominator() -> None:
    out, _ = loss_of([[-1.0]] * 4, [-1.0] * 4, [1.0] * 4, mask=[[1], [0], [1], [0]])
    assert out.loss.item() == -1.0


def test_source_mean_recorded_at_another_temperature_moves_the_ratio(backend: str) -> None:
    logits = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(8)
    recorded = token_logprobs(logits, ids, temperature=0.6, backend=backend).mean().reshape(1)
    sequences = SequenceBatch(torch.tensor([0, 8]), recorded, torch.ones(1))
    same = hacpo_loss(leaf(logits), ids, sequences, HACPOConfig(), temperature=0.6, backend=backend)
    other = hacpo_loss(leaf(logits), ids, sequences, HACPOConfig(), backend=backend)
    assert same.ratios.item() == pytest.approx(1.0, abs=1e-6)
    assert abs(other.ratios.item() - 1.0) > 0.1
