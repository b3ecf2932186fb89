"""Advantages of the responses of one group: all agents' responses to one prompt (Eq. 5-7, 10)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeGuard

EPSILON = 1e-6

Omega = Callable[[str, str], float]


def unit_omega(learner: str, source: str) -> float:
    """The omega of the comparisons (GSPO, GRPO, naive sharing): their baseline is the plain mean of the group."""
    return 1.0


def is_scored(reward: float | None) -> TypeGuard[float]:
    """Whether a reward counts: neither None nor NaN nor infinite."""
    return reward is not None and math.isfinite(reward)


def is_uniform(rewards: Iterable[float | None]) -> bool:
    """Whether the scored rewards of a group are all equal, so that the group teaches nothing.

    True as well for a group with one scored reward or none. Rewards that differ by rounding alone (1e-9 of their
    size) are equal: dividing by their deviation would turn the rounding into an advantage.
    """
    scored = [reward for reward in rewards if is_scored(reward)]
    if len(scored) < 2:
        return True
    low, high = min(scored), max(scored)
    return high - low <= 1e-9 * max(abs(low), abs(high))


def uniform_share(groups: Sequence[Sequence[float | None]]) -> float:
    """Share of groups whose rewards are all equal, in [0, 1]; 0 when there are no groups."""
    return sum(is_uniform(group) for group in groups) / len(groups) if groups else 0.0


def baseline(
    rewards: Sequence[float],
    sources: Sequence[str],
    learner: str,
    omega: Omega,
    baseline_cap: float | None = 1.0,
) -> float:
    """The learner's baseline of one group of scored rewards (Eq. 6).

        mu_k = mean over all responses of omega(k, source) * reward

    A baseline above `baseline_cap`, the largest reward there is, would make every advantage negative; it is replaced
    by the mean of the learner's own rewards. Without own rewards, or with `baseline_cap=None`, it stays.
    """
    own = [reward for reward, source in zip(rewards, sources, strict=True) if source == learner]
    scaled = [
        reward if source == learner else omega(learner, source) * reward
        for reward, source in zip(rewards, sources, strict=True)
    ]
    mu = math.fsum(scaled) / len(scaled)
    if own and baseline_cap is not None and mu > baseline_cap:
        return math.fsum(own) / len(own)
    return mu


def standard_deviation(rewards: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator (Eq. 7), n >= 2."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def group_advantages(
    rewards: Sequence[float | None],
    sources: Sequence[str],
    learner: str,
    omega: Omega,
    *,
    cross_baseline: Literal["learner", "source"] = "learner",
    baseline_cap: float | None = 1.0,
) -> list[float | None]:
    """Advantages of one group for one learner (Eq. 5-7, 10).

        mu_k = mean(omega(k, j) * R_j,i);  A_j,i = (R_j,i - mu_k) / (std(R, ddof=1) + 1e-6)

    Only scored rewards enter the mean and the deviation. A group whose scored rewards are all equal, a group of one
    included, has advantages of exactly 0 whatever omega is.

    Args:
        rewards: (n,) rewards of the group in any order; None or not finite where a response could not be scored.
        sources: (n,) name of the agent that generated each response.
        learner: the agent being updated.
        omega: omega(k, j) = P_k / P_j, learner first. The weight of a cross response in the loss is the other
            direction, omega(j, k), and is not part of the advantage. `unit_omega` gives the plain group mean.
        cross_baseline: "learner": every response is compared with the learner's baseline (Eq. 50 and the public
            implementations). "source": a response is compared with the baseline of the agent that generated it
            (Eq. 10 taken literally).
        baseline_cap: the largest reward there is, see `baseline`; None for rewards without a bound.

    Returns:
        (n,) advantages; None where the response was not scored.

    Raises:
        ValueError: lengths differ, or an unknown `cross_baseline`.
    """
    if len(rewards) != len(sources):
        raise ValueError(
            f"group_advantages: rewards and sources must have one entry per response, got {len(rewards)} and "
            f"{len(sources)}."
        )
    if cross_baseline not in ("learner", "source"):
        raise ValueError(f"group_advantages: cross_baseline must be 'learner' or 'source', got {cross_baseline!r}.")
    if is_uniform(rewards):
        return [0.0 if is_scored(reward) else None for reward in rewards]

    scored = [reward for reward in rewards if is_scored(reward)]
    scored_sources = [source for reward, source in zip(rewards, sources, strict=True) if is_scored(reward)]
    compared_with = set(scored_sources) if cross_baseline == "source" else {learner}
    mu = {agent: baseline(scored, scored_sources, agent, omega, baseline_cap) for agent in compared_with}
    scale = standard_deviation(scored) + EPSILON
    return [
        (reward - mu[source if cross_baseline == "source" else learner]) / scale if is_scored(reward) else None
        for reward, source in zip(rewards, sources, strict=True)
    ]
