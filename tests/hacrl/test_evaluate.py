"""avg@k, best@k, pass@k."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hacrl.evaluate import average_at_k, best_at_k, evaluate_rewards, greedy_accuracy, pass_at_k
from hacrl.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]


def test_average_at_k_is_the_mean_over_all_samples() -> None:
    assert average_at_k(REWARDS) == pytest.approx(5 / 12)


def test_best_at_k_is_the_share_of_problems_with_a_right_sample() -> None:
    assert best_at_k(REWARDS) == pytest.approx(2 / 3)


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    # one right of four: a pair drawn without replacement holds it with probability 1/2
    assert pass_at_k(REWARDS, 2) == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_pass_at_k_beyond_the_samples_raises() -> None:
    with pytest.raises(ValueError, match=r"k must lie in \[1, 4\], got 5"):
        pass_at_k(REWARDS, 5)


def test_evaluate_rewards_gives_one_row_a_problem_and_greedy_agrees(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer()
    agent, task, scorer = trainer.agents["pairs"], trainer.held_out, trainer.scorer
    rows = evaluate_rewards(agent, task, scorer, 16, 8)
    assert [len(row) for row in rows] == [1] * 16
    assert greedy_accuracy(agent, task, scorer, 16, 5)["accuracy"] == pytest.approx(average_at_k(rows))
    assert [len(row) for row in evaluate_rewards(agent, task, scorer, 4, 8, samples=3, temperature=1.0)] == [3] * 4


def test_held_out_problems_are_not_among_the_training_problems(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer(**{"task.size": 512, "evaluation.size": 256})
    training = {trainer.task.prompt(index).question for index in range(512)}
    held_out = {trainer.held_out.prompt(index).question for index in range(256)}
    assert training.isdisjoint(held_out)
