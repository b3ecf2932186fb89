"""HACPOConfig: presets, the stepwise bound and when it closes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from hacpo_kernels import HACPOConfig


def test_config_defaults_are_the_papers() -> None:
    config = HACPOConfig()
    assert (config.alpha, config.cross_clip_low, config.cross_clip_step, config.cross_clip_high) == (
        1.0,
        0.8,
        0.025,
        1.0,
    )
    assert (config.epsilon_low, config.epsilon_high, config.beta) == (3e-4, 4e-4, 0.0)
    assert (config.ratio, config.cross) == ("sequence", "hacpo")


def test_config_cross_clip_low_is_the_bound_itself() -> None:
    assert HACPOConfig(cross_clip_low=0.8).cross_bounds(0) == (0.8, 1.0)


@pytest.mark.parametrize("update_index, low", [(0, 0.8), (1, 0.825), (4, 0.9), (7, 0.975), (8, 1.0), (100, 1.0)])
def test_cross_bounds_rise_by_the_step_up_to_the_upper_bound(update_index: int, low: float) -> None:
    assert HACPOConfig().cross_bounds(update_index) == (pytest.approx(low), 1.0)


@pytest.mark.parametrize(
    "changes, closes_at",
    [
        ({}, 8), ({"cross_clip_step": 0.05}, 4), ({"cross_clip_step": 0.03}, 7), ({"cross_clip_step": 0.0}, None),
        ({"cross_clip_low": 1.0}, 0), ({"cross_clip_high": 0.8, "cross_clip_step": 0.0}, 0),
        ({"cross_clip_step": 1.0}, 1),
        ({"cross_clip_low": 0.7, "cross_clip_step": 0.1}, 3), ({"cross": "self"}, None), ({"cross": "none"}, None),
        ({"cross_clip_low": 0.1, "cross_clip_step": 1e-4}, 9000),
    ],
)  # fmt: skip
def test_cross_closes_at_the_first_update_whose_bounds_meet(changes: dict, closes_at: int | None) -> None:
    config = HACPOConfig(**changes)
    assert config.cross_closes_at() == closes_at
    if closes_at:
        low, high = config.cross_bounds(closes_at - 1)
        assert low < high
        assert config.cross_bounds(closes_at) == (high, high)


@pytest.mark.parametrize("step", [0.1 / n for n in range(1, 60)], ids="{:.5f}".format)
def test_cross_bounds_close_whatever_the_rounding_of_the_step(step: float) -> None:
    config = HACPOConfig(cross_clip_low=0.9, cross_clip_step=step)
    assert config.cross_closes_at() == round(0.1 / step)


def test_presets_are_the_baselines() -> None:
    assert HACPOConfig.gspo() == HACPOConfig(cross="none")
    assert HACPOConfig.grpo() == HACPOConfig(epsilon_low=0.2, epsilon_high=0.28, ratio="token", cross="none")
    assert HACPOConfig.naive(beta=0.1) == HACPOConfig(cross="self", beta=0.1)


def test_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(FrozenInstanceError):
        HACPOConfig().alpha = 2.0  # type: ignore[misc]


WRONG = [
    ({"alpha": -0.1}, ValueError, "alpha must be a finite number >= 0, got -0.1"),
    ({"alpha": float("nan")}, ValueError, "alpha must be a finite number >= 0, got nan"),
    ({"alpha": "1"}, TypeError, "alpha must be a number, got str"),
    ({"alpha": True}, TypeError, "alpha must be a number, got bool"),
    ({"cross_clip_step": -1e-3}, ValueError, "cross_clip_step must be a finite number >= 0"),
    ({"epsilon_low": -1.0}, ValueError, "epsilon_low must be a finite number >= 0"),
    ({"epsilon_low": 1.0}, ValueError, "epsilon_low must be < 1, got 1.0"),
    ({"epsilon_high": float("inf")}, ValueError, "epsilon_high must be a finite number >= 0, got inf"),
    ({"beta": -0.001}, ValueError, "beta must be a finite number >= 0, got -0.001"),
    ({"beta": None}, TypeError, "beta must be a number, got NoneType"),
    ({"cross_clip_low": 0.0}, ValueError, "cross_clip_low must be a finite number > 0, got 0.0"),
    ({"cross_clip_high": -1.0}, ValueError, "cross_clip_high must be a finite number > 0"),
    ({"cross_clip_low": 1.2}, ValueError, r"cross_clip_low must be <= cross_clip_high = 1.0, got 1.2.*itself"),
    ({"ratio": "word"}, ValueError, "ratio must be 'sequence' or 'token', got 'word'"),
    ({"cross": "both"}, ValueError, "cross must be one of .*'hacpo'.*, got 'both'"),
    ({"ratio": "token", "cross": "self"}, ValueError, "ratio='token' with cross='self' is not defined"),
]


@pytest.mark.parametrize("changes, error, message", WRONG, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_config_wrong_value_is_refused_by_name(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"HACPOConfig: {message}"):
        HACPOConfig(**changes)
