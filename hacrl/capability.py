"""How well each agent does lately, and the ratios between agents that follow from it (Eq. 8, 9)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

FLOOR = 1e-8
OMEGA_MIN, OMEGA_MAX = 0.1, 10.0


class CapabilityTracker:
    """Windows of the agents' mean rewards.

        P_k = max(mean of agent k's mean rewards in its last `window` steps, 1e-8)          Eq. 8
        omega(k, j) = clamp(P_k / P_j, 0.1, 10)                                              Eq. 9

    The current step is part of the window, as in both public implementations: call `update` once per step, before
    `omega`. A step in which nothing of an agent could be scored leaves that agent's window as it is.

    omega is 1 when every P is at the floor, during the first `warmup_steps` steps (which do fill the windows), and
    for a pair in which an agent has no scored step yet: nothing is known about it.

    Args:
        agents: the names of the agents, at least one, each once.
        window: number of steps K in the window, >= 1.
        warmup_steps: number of first steps with omega = 1, >= 0.

    Raises:
        ValueError: no agents, a repeated name, or a number outside its range.
    """

    def __init__(self, agents: Sequence[str], window: int = 5, warmup_steps: int = 0) -> None:
        if not agents or len(set(agents)) != len(agents):
            raise ValueError(f"CapabilityTracker: agents must be distinct names, at least one, got {list(agents)}.")
        if window < 1:
            raise ValueError(f"CapabilityTracker: window must be >= 1 step, got {window}.")
        if warmup_steps < 0:
            raise ValueError(f"CapabilityTracker: warmup_steps must be >= 0, got {warmup_steps}.")
        self.window = window
        self.warmup_steps = warmup_steps
        self.steps = 0
        self._rewards = {agent: deque[float](maxlen=window) for agent in agents}

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self._rewards)

    def update(self, mean_rewards: Mapping[str, float | None]) -> None:
        """Add one step.

        Args:
            mean_rewards: each agent's mean reward over its scored responses of the step; None where it has none.

        Raises:
            ValueError: an agent is missing or unknown, or a mean is not finite.
        """
        if set(mean_rewards) != set(self._rewards):
            raise ValueError(
                f"CapabilityTracker.update: mean_rewards must name the agents {list(self._rewards)}, got "
                f"{list(mean_rewards)}."
            )
        for agent, mean in mean_rewards.items():
            if mean is not None and not math.isfinite(mean):
                raise ValueError(
                    f"CapabilityTracker.update: the mean reward of {agent!r} must be finite, got {mean!r}; pass None "
                    "when nothing could be scored."
                )
        for agent, mean in mean_rewards.items():
            if mean is not None:
                self._rewards[agent].append(float(mean))
        self.steps += 1

    def capability(self, name: str) -> float:
        """P of agent `name` (Eq. 8): the mean of its window, at least 1e-8; 1e-8 while the window is empty."""
        rewards = self._window(name)
        return max(math.fsum(rewards) / len(rewards), FLOOR) if rewards else FLOOR

    def omega(self, learner: str, source: str) -> float:
        """clamp(P_learner / P_source, 0.1, 10) (Eq. 9).

        omega(k, j) scales the rewards of source j in learner k's baseline; the weight of a cross response is the
        other direction, omega(j, k).
        """
        known = all([self._window(learner), self._window(source)])
        if learner == source or not known or self.steps <= self.warmup_steps:
            return 1.0
        # Two agents at the floor give 1 by division, so the rule "every agent at the floor" needs no case of its own.
        return min(max(self.capability(learner) / self.capability(source), OMEGA_MIN), OMEGA_MAX)

    def state_dict(self) -> dict[str, Any]:
        """The windows, as plain values that survive JSON without loss."""
        return {
            "window": self.window,
            "steps": self.steps,
            "rewards": {agent: list(rewards) for agent, rewards in self._rewards.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ValueError: the state lacks a field, or was saved with other agents or another window.
        """
        where = "CapabilityTracker.load_state_dict"
        missing = {"window", "steps", "rewards"} - set(state)
        if missing:
            raise ValueError(f"{where}: the state lacks {sorted(missing)}, it has {sorted(state)}.")
        if state["window"] != self.window:
            raise ValueError(f"{where}: the state has window {state['window']}, this run has {self.window}.")
        rewards: Mapping[str, Sequence[float]] = state["rewards"]
        if set(rewards) != set(self._rewards):
            raise ValueError(f"{where}: the state has agents {sorted(rewards)}, this run has {sorted(self._rewards)}.")
        for agent, values in rewards.items():
            if len(values) > self.window or not all(math.isfinite(value) for value in values):
                raise ValueError(
                    f"{where}: the window of {agent!r} must hold at most {self.window} finite numbers, got {values}."
                )
        self.steps = int(state["steps"])
        for agent in self._rewards:
            self._rewards[agent] = deque((float(value) for value in rewards[agent]), maxlen=self.window)

    def _window(self, name: str) -> deque[float]:
        if name not in self._rewards:
            raise ValueError(f"CapabilityTracker: no agent {name!r}, the agents are {list(self._rewards)}.")
        return self._rewards[name]
