from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.capability import CapabilityTracker


def tracker_after(*steps: Mapping[str, float | None], window: int = 5, warmup_steps: int = 0) -> CapabilityTracker:
    tracker = CapabilityTracker(list(steps[0]), window, warmup_steps)
    for step in steps:
        tracker.update(step)
    return tracker


def test_capability_first_step_is_its_mean_reward() -> None:
    assert tracker_after({"a": 0.25, "b": 0.5}).capability("a") == 0.25


def test_capability_more_steps_than_window_keeps_the_last_ones() -> None:
    tracker = tracker_after(*({"a": value} for value in (1.0, 0.0, 0.5, 1.0)), window=2)
    assert tracker.capability("a") == 0.75


def test_capability_step_without_scores_leaves_the_window() -> None:
    tracker = tracker_after({"a": 0.25, "b": 1.0}, {"a": None, "b": 0.0}, window=2)
    assert (tracker.capability("a"), tracker.capability("b")) == (0.25, 0.5)


@pytest.mark.parametrize("reward", [0.0, -3.0])
def test_capability_mean_not_positive_is_floored(reward: float) -> None:
    assert tracker_after({"a": reward}).capability("a") == 1e-8


def test_capability_negative_step_is_not_floored_by_itself() -> None:
    assert tracker_after({"a": -0.5}, {"a": 1.0}).capability("a") == 0.25


def test_omega_direction_is_learner_over_source() -> None:
    tracker = tracker_after({"k": 0.25, "j": 0.5})
    assert (tracker.omega("k", "j"), tracker.omega("j", "k")) == (0.5, 2.0)


def test_omega_one_agent_at_zero_is_clamped() -> None:
    tracker = tracker_after({"a": 0.0, "b": 0.5})
    assert (tracker.omega("a", "b"), tracker.omega("b", "a")) == (0.1, 10.0)


def test_omega_every_agent_at_zero_is_one() -> None:
    assert tracker_after({"a": 0.0, "b": 0.0}).omega("a", "b") == 1.0


def test_omega_before_any_step_is_one() -> None:
    assert CapabilityTracker(["a", "b"]).omega("a", "b") == 1.0


def test_omega_agent_never_scored_is_one() -> None:
    assert tracker_after({"a": None, "b": 0.5}).omega("b", "a") == 1.0


def test_omega_warmup_lasts_for_its_steps_and_fills_the_window() -> None:
    tracker = CapabilityTracker(["a", "b"], warmup_steps=2)
    omegas = []
    for rewards in ({"a": 0.2, "b": 0.8}, {"a": 0.2, "b": 0.8}, {"a": 0.5, "b": 0.8}):
        tracker.update(rewards)
        omegas.append(tracker.omega("a", "b"))
    assert omegas[:2] == [1.0, 1.0]
    assert omegas[2] == pytest.approx(0.3 / 0.8)


def test_omega_single_agent_is_one() -> None:
    assert tracker_after({"a": 0.3}).omega("a", "a") == 1.0


@given(st.lists(st.fixed_dictionaries({name: st.none() | st.floats(-2, 2) for name in "abc"}), min_size=1, max_size=8))
def test_omega_any_history_is_bounded_and_reciprocal(steps: list[dict[str, float | None]]) -> None:
    tracker = tracker_after(*steps)
    for first in "abc":
        assert tracker.omega(first, first) == 1.0
        for second in "abc":
            assert 0.1 <= tracker.omega(first, second) <= 10.0
            assert tracker.omega(first, second) * tracker.omega(second, first) == pytest.approx(1.0)


def test_state_dict_through_json_continues_bit_equal() -> None:
    steps = [{"a": 0.1 * i, "b": 1 / (i + 3)} for i in range(7)]
    whole = tracker_after(*steps, window=3)
    resumed = CapabilityTracker(["a", "b"], window=3)
    resumed.load_state_dict(json.loads(json.dumps(tracker_after(*steps[:4], window=3).state_dict())))
    for step in steps[4:]:
        resumed.update(step)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.omega("a", "b") == whole.omega("a", "b")


def test_load_state_dict_after_warmup_does_not_warm_up_again() -> None:
    first = tracker_after({"a": 0.2, "b": 0.8}, {"a": 0.2, "b": 0.8}, warmup_steps=1)
    resumed = CapabilityTracker(["a", "b"], warmup_steps=1)
    resumed.load_state_dict(first.state_dict())
    assert resumed.omega("a", "b") == 0.25


def test_load_state_dict_other_agents_raises() -> None:
    state = tracker_after({"a": 0.2, "b": 0.8}).state_dict()
    with pytest.raises(ValueError, match=r"agents \['a', 'b'\], this run has \['a', 'c'\]"):
        CapabilityTracker(["a", "c"]).load_state_dict(state)


def test_load_state_dict_other_window_raises() -> None:
    with pytest.raises(ValueError, match="window 3, this run has 5"):
        CapabilityTracker(["a"]).load_state_dict(CapabilityTracker(["a"], window=3).state_dict())


def test_load_state_dict_missing_field_raises() -> None:
    with pytest.raises(ValueError, match=r"lacks \['rewards'\]"):
        CapabilityTracker(["a"]).load_state_dict({"window": 5, "steps": 0})


def test_load_state_dict_window_too_full_raises() -> None:
    with pytest.raises(ValueError, match="at most 1 finite"):
        CapabilityTracker(["a"], 1).load_state_dict({"window": 1, "steps": 2, "rewards": {"a": [0.1, 0.2]}})


@pytest.mark.parametrize("rewards", [{"a": 0.5}, {"a": 0.5, "b": 0.5, "c": 0.5}])
def test_update_other_agents_raises(rewards: dict[str, float | None]) -> None:
    with pytest.raises(ValueError, match="must name the agents"):
        CapabilityTracker(["a", "b"]).update(rewards)


def test_update_nan_raises_and_changes_nothing() -> None:
    tracker = tracker_after({"a": 0.5, "b": 0.5})
    before = tracker.state_dict()
    with pytest.raises(ValueError, match="must be finite"):
        tracker.update({"a": 0.1, "b": math.nan})
    assert tracker.state_dict() == before


def test_capability_unknown_agent_raises() -> None:
    with pytest.raises(ValueError, match="no agent 'x'"):
        CapabilityTracker(["a"]).capability("x")


def test_omega_unknown_agent_raises() -> None:
    with pytest.raises(ValueError, match="no agent 'x'"):
        CapabilityTracker(["a"]).omega("a", "x")


@pytest.mark.parametrize(
    ("agents", "window", "warmup"), [([], 5, 0), (["a", "a"], 5, 0), (["a"], 0, 0), (["a"], 5, -1)]
)
def test_tracker_argument_outside_range_raises(agents: list[str], window: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="CapabilityTracker"):
        CapabilityTracker(agents, window, warmup)
