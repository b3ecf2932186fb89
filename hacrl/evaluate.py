"""Accuracy of an agent on held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .rewards import Scorer
from .seeding import derive_seed
from .tasks import Task
from .tokenization import response_text

if TYPE_CHECKING:
    from .agent import Agent


def average_at_k(rewards: Sequence[Sequence[float]]) -> float:
    """avg@k: mean reward over all samples of all problems."""
    values = [reward for row in rewards for reward in row]
    return math.fsum(values) / len(values)


def best_at_k(rewards: Sequence[Sequence[float]]) -> float:
    """best@k: mean over problems of the best of its k samples."""
    return math.fsum(max(row) for row in rewards) / len(rewards)


def pass_at_k(rewards: Sequence[Sequence[float]], k: int) -> float:
    """pass@k for k <= n samples, by the unbiased estimator 1 - C(n - c, k) / C(n, k), c the number of right ones.

    Raises:
        ValueError: k is not between 1 and the number of samples.
    """

    def one(row: Sequence[float]) -> float:
        right = sum(reward >= 1.0 for reward in row)
        if not 1 <= k <= len(row):
            raise ValueError(f"pass_at_k: k must lie in [1, {len(row)}], got {k}.")
        return 1.0 - math.comb(len(row) - right, k) / math.comb(len(row), k)

    return math.fsum(one(row) for row in rewards) / len(rewards)


def evaluate_rewards(
    agent: Agent,
    task: Task,
    scorer: Scorer,
    size: int,
    batch_size: int,
    *,
    samples: int = 1,
    temperature: float | None = None,
    seed: int = 0,
) -> list[list[float]]:
    """Rewards of `samples` responses to each of the first `size` problems; greedy when `temperature` is None.

    A response that could not be scored counts 0 here: an evaluation has a fixed number of problems.
    """
    prompts = [task.prompt(index) for index in range(min(size, len(task)))]
    generated = agent.generate(
        [prompt.question for prompt in prompts],
        samples=samples,
        seed=derive_seed(seed, "evaluate", agent.name),
        batch_size=batch_size,
        greedy=temperature is None,
        temperature=temperature or 1.0,
    )
    pairs = [
        (response_text(agent.tokenizer, response.ids, agent.end_ids), prompt.entry)
        for prompt, group in zip(prompts, generated, strict=True)
        for response in group
    ]
    rewards = [score.reward or 0.0 for score in scorer.score(pairs)]
    return [rewards[start : start + samples] for start in range(0, len(rewards), samples)]


def greedy_accuracy(agent: Agent, task: Task, scorer: Scorer, size: int, batch_size: int) -> dict[str, float]:
    """{"accuracy": mean reward of greedy responses to the first `size` problems}."""
    return {"accuracy": average_at_k(evaluate_rewards(agent, task, scorer, size, batch_size))}
