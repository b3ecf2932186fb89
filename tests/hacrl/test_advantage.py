from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hacrl.advantage import group_advantages, is_uniform, uniform_share, unit_omega
from hacrl.capability import CapabilityTracker

SOURCES = ["k", "k", "j", "j"]


def omega_half(learner: str, source: str) -> float:
    """P_k = 0.25, P_j = 0.5."""
    capability = {"k": 0.25, "j": 0.5}
    return capability[learner] / capability[source]


def test_group_advantages_worked_example_matches() -> None:
    advantages = group_advantages([1, 0, 1, 0], SOURCES, "k", omega_half)
    assert advantages == pytest.approx([1.0825, -0.6495, 1.0825, -0.6495], abs=1e-4)


def test_group_advantages_worked_example_with_tracker_has_cross_weight_two() -> None:
    tracker = CapabilityTracker(["k", "j"])
    tracker.update({"k": 0.25, "j": 0.5})
    assert group_advantages([1, 0, 1, 0], SOURCES, "k", tracker.omega)[0] == pytest.approx(1.0825, abs=1e-4)
    assert tracker.omega("j", "k") == 2.0


def test_group_advantages_other_learner_has_other_baseline() -> None:
    # mu_j = (2 * 1 + 1) / 4
    advantages = group_advantages([1, 0, 1, 0], SOURCES, "j", omega_half)
    assert advantages == pytest.approx([(reward - 0.75) / (0.5773503 + 1e-6) for reward in (1, 0, 1, 0)])


@pytest.mark.parametrize("reward", [0.0, 1.0, -2.5])
def test_group_advantages_uniform_group_is_exactly_zero(reward: float) -> None:
    assert group_advantages([reward] * 4, SOURCES, "k", omega_half) == [0.0] * 4


def test_group_advantages_rewards_equal_up_to_rounding_are_zero() -> None:
    assert group_advantages([0.1 + 0.2, 0.3, 0.3, 0.3], SOURCES, "k", omega_half) == [0.0] * 4


@pytest.mark.parametrize("source", ["k", "j"])
def test_group_advantages_group_of_one_is_zero(source: str) -> None:
    assert group_advantages([1.0], [source], "k", omega_half) == [0.0]


def test_group_advantages_empty_group_is_empty() -> None:
    assert group_advantages([], [], "k", omega_half) == []


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_group_advantages_unscored_response_is_left_out(missing: float | None) -> None:
    scored = group_advantages([1, 0, 1, 0], SOURCES, "k", omega_half)
    advantages = group_advantages([1, 0, missing, 1, 0], ["k", "k", "j", "j", "j"], "k", omega_half)
    assert advantages == [*scored[:2], None, *scored[2:]]


def test_group_advantages_one_scored_response_is_zero() -> None:
    assert group_advantages([None, 1.0, None], ["k", "j", "j"], "k", omega_half) == [None, 0.0, None]


def test_group_advantages_nothing_scored_is_all_none() -> None:
    assert group_advantages([None, math.nan], ["k", "j"], "k", omega_half) == [None, None]


def test_group_advantages_baseline_above_cap_becomes_own_mean() -> None:
    # mu_k = (1 + 0 + 4 * 1 + 4 * 1) / 4 > 1
    advantages = group_advantages([1, 0, 1, 1], SOURCES, "k", lambda learner, source: 4.0)
    deviation = statistics.stdev([1, 0, 1, 1]) + 1e-6
    assert advantages == pytest.approx([0.5 / deviation, -0.5 / deviation, 0.5 / deviation, 0.5 / deviation])


def test_group_advantages_without_cap_baseline_above_one_stays() -> None:
    advantages = group_advantages([5, 3, 4, 2], SOURCES, "k", unit_omega, baseline_cap=None)
    deviation = statistics.stdev([5, 3, 4, 2]) + 1e-6
    assert advantages == pytest.approx([(reward - 3.5) / deviation for reward in (5, 3, 4, 2)])


def test_group_advantages_cap_at_declared_maximum_leaves_baseline_below_it() -> None:
    capped = group_advantages([5, 3, 4, 2], SOURCES, "k", unit_omega, baseline_cap=5.0)
    assert capped == group_advantages([5, 3, 4, 2], SOURCES, "k", unit_omega, baseline_cap=None)


def test_group_advantages_without_own_responses_skips_the_cap() -> None:
    # mu_k = (4 * 1 + 0) / 2 = 2
    advantages = group_advantages([1, 0], ["j", "j"], "k", lambda learner, source: 4.0)
    deviation = statistics.stdev([1, 0]) + 1e-6
    assert advantages == pytest.approx([-1.0 / deviation, -2.0 / deviation])


def test_group_advantages_source_baseline_compares_cross_with_its_own() -> None:
    # mu_k = 0.375, mu_j = 0.75
    advantages = group_advantages([1, 0, 1, 0], SOURCES, "k", omega_half, cross_baseline="source")
    deviation = 0.5773503 + 1e-6
    assert advantages == pytest.approx([value / deviation for value in (0.625, -0.375, 0.25, -0.75)])


def test_group_advantages_source_baseline_is_capped_for_each_source() -> None:
    # mu_j = (4 + 4 + 1 + 0) / 4 > 1 becomes 0.5; mu_k = (1 + 1 + 0.25) / 4 stays
    def omega(learner: str, source: str) -> float:
        return 4.0 if learner == "j" else 0.25

    advantages = group_advantages([1, 1, 1, 0], SOURCES, "k", omega, cross_baseline="source")
    deviation = statistics.stdev([1, 1, 1, 0]) + 1e-6
    assert advantages == pytest.approx([value / deviation for value in (0.4375, 0.4375, 0.5, -0.5)])


def test_group_advantages_three_agents_scale_each_source() -> None:
    capability = {"a": 0.5, "b": 0.25, "c": 1.0}
    advantages = group_advantages([1, 1, 0], ["a", "b", "c"], "a", lambda k, j: capability[k] / capability[j])
    assert advantages[2] == pytest.approx(-1.0 / (statistics.stdev([1, 1, 0]) + 1e-6))  # mu = (1 + 2 + 0) / 3
    assert advantages[0] == pytest.approx(0.0)


def test_group_advantages_lengths_differ_raises() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        group_advantages([1, 0], ["k"], "k", unit_omega)


def test_group_advantages_unknown_cross_baseline_raises() -> None:
    with pytest.raises(ValueError, match="cross_baseline"):
        group_advantages([1], ["k"], "k", unit_omega, cross_baseline="group")  # type: ignore[arg-type]


groups = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from("kj")), min_size=2, max_size=12)


@given(groups)
def test_group_advantages_unit_omega_sums_to_zero(group: list[tuple[float, str]]) -> None:
    rewards, sources = zip(*group, strict=True)
    advantages = group_advantages(rewards, sources, "k", unit_omega)
    assert sum(value or 0.0 for value in advantages) == pytest.approx(0.0, abs=1e-9)


@given(groups, st.randoms(use_true_random=False))
def test_group_advantages_order_of_responses_does_not_matter(group: list[tuple[float, str]], random: object) -> None:
    rewards, sources = zip(*group, strict=True)
    order = list(range(len(group)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = group_advantages([rewards[i] for i in order], [sources[i] for i in order], "k", omega_half)
    plain = group_advantages(rewards, sources, "k", omega_half)
    assert shuffled == pytest.approx([plain[i] for i in order])


@given(groups)
def test_group_advantages_better_reward_has_larger_advantage(group: list[tuple[float, str]]) -> None:
    rewards, sources = zip(*group, strict=True)
    assume(not is_uniform(rewards))
    advantages = group_advantages(rewards, sources, "k", omega_half)
    ranked = sorted(zip(rewards, advantages, strict=True), key=lambda pair: pair[0])
    assert all(
        low_advantage < high_advantage  # type: ignore[operator]
        for (low, low_advantage), (high, high_advantage) in itertools.pairwise(ranked)
        if low < high
    )


def test_is_uniform_ignores_unscored() -> None:
    assert is_uniform([1.0, None, 1.0, math.nan])


def test_is_uniform_different_rewards_is_false() -> None:
    assert not is_uniform([1.0, None, 0.0])


def test_is_uniform_small_rewards_that_differ_is_false() -> None:
    assert not is_uniform([1e-12, 2e-12])


def test_uniform_share_counts_groups_without_signal() -> None:
    assert uniform_share([[1, 1], [1, 0], [None, 0], [0, 1]]) == 0.5


def test_uniform_share_joint_groups_have_more_signal_than_own_ones() -> None:
    own, joint = [[1, 1], [0, 0]], [[1, 1, 0, 0], [0, 0, 1, 0]]
    assert (uniform_share(own), uniform_share(joint)) == (1.0, 0.0)


def test_uniform_share_no_groups_is_zero() -> None:
    assert uniform_share([]) == 0.0
