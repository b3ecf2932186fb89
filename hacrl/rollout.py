"""Prompts, sampled responses with their records, and the pool of one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # worker processes that score responses import this module: torch would cost them seconds
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of a task.

    Args:
        index: position in the task, >= 0; it identifies the prompt for the whole run.
        question: the text shown to the agents. Each agent renders it with its own chat template.
        entry: what the checker needs to score a response.
    """

    index: int
    question: str
    entry: Mapping[str, Any]

    def __post_init__(self) -> None:
        if isinstance(self.index, bool) or not isinstance(self.index, int):
            raise TypeError(f"Prompt: index must be an int, got {type(self.index).__name__} ({self.index!r}).")
        if self.index < 0:
            raise ValueError(f"Prompt: index must be >= 0, got {self.index}.")
        if not isinstance(self.question, str):
            raise TypeError(f"Prompt: question must be a str, got {type(self.question).__name__}.")


@dataclass(slots=True)
class Rollout:
    """One sampled response with its record.

    Args:
        prompt: the prompt it answers.
        source: name of the agent that generated it.
        policy_version: optimizer updates the source had done when it sampled.
        ids: the sampled ids in the source's vocabulary, the end token included when `finished`. They mean nothing to
            an agent with another tokenizer.
        text: the whole response decoded at once, without special tokens and without clean-up of spaces.
        finished: it ended with an end token, not by the length limit.
        reward: the score; None when there is none (yet, or because it could not be scored).
        reward_error: why it could not be scored.
        source_mean_logprob: mean over `ids` of the source's log-probabilities, in nats per token (Eq. 11).
        old_logprobs: (len(ids),) float32, nats; needed only for a ratio per token.

    Raises:
        TypeError, ValueError: see `validate`, which runs when a rollout is built.
    """

    prompt: Prompt
    source: str
    policy_version: int
    ids: list[int]
    text: str
    finished: bool
    reward: float | None = None
    reward_error: str | None = None
    source_mean_logprob: float | None = None
    old_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check the record; call it again after fields were filled in.

        Raises:
            TypeError: `ids` is not a list of Python ints, or `old_logprobs` is not float32.
            ValueError: a length that disagrees with `ids`, a number that is not finite, an empty finished response.
        """
        if not self.source:
            raise ValueError("Rollout: source must name the agent that generated the response, got ''.")
        if self.policy_version < 0:
            raise ValueError(f"Rollout: policy_version must be >= 0, got {self.policy_version}.")
        self._validate_ids()
        if self.old_logprobs is not None:
            self._validate_old_logprobs(self.old_logprobs)
        for name in ("reward", "source_mean_logprob"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"Rollout: {name} must be a finite number or None, got {value!r} ({self._label()}).")

    def _validate_ids(self) -> None:
        if not isinstance(self.ids, list) or not all(type(token) is int for token in self.ids):
            raise TypeError(f"Rollout: ids must be a list of ints (.tolist()), got {self.ids!r:.80} ({self._label()}).")
        if any(token < 0 for token in self.ids):
            raise ValueError(f"Rollout: ids must be >= 0, got {min(self.ids)} ({self._label()}).")
        if self.finished and not self.ids:
            raise ValueError(f"Rollout: a finished response has at least its end token, got no ids ({self._label()}).")

    def _validate_old_logprobs(self, logprobs: Tensor) -> None:
        if tuple(logprobs.shape) != (len(self.ids),):
            raise ValueError(
                f"Rollout: old_logprobs must have one number per id, shape ({len(self.ids)},), got "
                f"{tuple(logprobs.shape)} ({self._label()}). An end token appended by hand has no log-probability."
            )
        if str(logprobs.dtype) != "torch.float32":
            raise TypeError(f"Rollout: old_logprobs must be torch.float32, got {logprobs.dtype} ({self._label()}).")

    def _label(self) -> str:
        return f"prompt {self.prompt.index}, source {self.source!r}"


@dataclass(slots=True)
class RolloutPool:
    """All responses of one step, of all agents to all prompts of the step.

    Rollouts are grouped by the index of their prompt, never by their position: agents may add theirs in any order.

    Raises:
        ValueError: two different questions under one prompt index.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    _groups: dict[int, list[Rollout]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        rollouts, self.rollouts = list(self.rollouts), []
        self.extend(rollouts)

    def extend(self, rollouts: Iterable[Rollout]) -> None:
        """Add rollouts; each is validated first."""
        for rollout in rollouts:
            rollout.validate()
            group = self._groups.setdefault(rollout.prompt.index, [])
            if group and group[0].prompt.question != rollout.prompt.question:
                raise ValueError(
                    f"RolloutPool: prompt {rollout.prompt.index} has two questions, {group[0].prompt.question!r:.60} "
                    f"and {rollout.prompt.question!r:.60}: the index must identify a prompt for the whole run."
                )
            group.append(rollout)
            self.rollouts.append(rollout)

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def groups(self) -> list[list[Rollout]]:
        """One list per prompt, prompts and the rollouts of each in the order in which they were added."""
        return [list(group) for group in self._groups.values()]

    def counts(self) -> dict[str, int]:
        """Number of rollouts per source."""
        counts: dict[str, int] = {}
        for rollout in self.rollouts:
            counts[rollout.source] = counts.get(rollout.source, 0) + 1
        return counts

    def unscored(self) -> dict[str, int]:
        """Number of rollouts without a reward, per source; sources without any are left out."""
        return RolloutPool([rollout for rollout in self.rollouts if rollout.reward is None]).counts()

    def mean_rewards(self, sources: Sequence[str]) -> dict[str, float | None]:
        """Mean reward of each source over its scored rollouts; None for a source that has none."""
        rewards: dict[str, list[float]] = {source: [] for source in sources}
        for rollout in self.rollouts:
            if rollout.source not in rewards:
                raise ValueError(f"RolloutPool.mean_rewards: sources {list(sources)} lack {rollout.source!r}.")
            if rollout.reward is not None:
                rewards[rollout.source].append(rollout.reward)
        return {source: math.fsum(values) / len(values) if values else None for source, values in rewards.items()}
