"""Algorithm 1: what one step samples, shares and updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hacrl.trainer
from hacrl.agent import Agent
from hacrl.trainer import Trainer

METRICS = {
    "reward", "capability", "loss", "grad_norm", "ratio_self_mean", "ratio_cross_mean", "ratio_cross_min",
    "ratio_cross_max", "clipped_self", "clipped_cross", "dead", "response_length", "cross_excluded",
}  # fmt: skip


def weights(agent: Agent) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in agent.model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_update(ours: list[torch.Tensor], theirs: list[torch.Tensor], start: list[torch.Tensor]) -> None:
    """Equal to float32 rounding; Adam turns the rounding of a gradient near zero into a part of a step."""
    for a, b, before in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() <= 1e-3 * (b - before).norm()


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "seconds"}


def test_step_reports_every_metric_and_phase(small_trainer: Callable[..., Trainer]) -> None:
    line = small_trainer().step()
    assert line["step"] == 1
    assert set(line["seconds"]) == {"sample", "score", "update"}
    for numbers in line["agents"].values():
        assert set(numbers) >= METRICS


def test_step_same_seed_gives_the_same_metrics_and_weights(small_trainer: Callable[..., Trainer]) -> None:
    first, second = small_trainer(), small_trainer()
    for _ in range(2):
        # repr: NaN equals itself there
        assert repr(without_times(first.step())) == repr(without_times(second.step()))
    for name in first.agents:
        assert same(weights(first.agents[name]), weights(second.agents[name]))


def test_step_another_seed_gives_other_responses(small_trainer: Callable[..., Trainer]) -> None:
    texts = [[rollout.text for rollout in small_trainer(seed=seed).sample(0)] for seed in (0, 1)]
    assert texts[0] != texts[1]


def test_step_every_agent_learns(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer()
    before = {name: weights(agent) for name, agent in trainer.agents.items()}
    trainer.step()
    for name, agent in trainer.agents.items():
        assert not same(before[name], weights(agent))
        assert agent.updates == 2


def test_step_first_update_has_self_ratios_of_one(small_trainer: Callable[..., Trainer]) -> None:
    line = small_trainer(**{"update.updates_per_step": 1}).step()
    for numbers in line["agents"].values():
        assert abs(numbers["ratio_self_min"] - 1) < 1e-5
        assert abs(numbers["ratio_self_max"] - 1) < 1e-5
        assert numbers["clipped_self"] == 0
        assert numbers["ratio_cross_mean"] != pytest.approx(1, abs=1e-3)


def test_step_order_of_the_learners_changes_nothing(small_trainer: Callable[..., Trainer]) -> None:
    first, second = small_trainer(), small_trainer()
    second.agents = dict(reversed(second.agents.items()))
    first.step()
    second.step()
    for name, agent in first.agents.items():
        start = weights(small_trainer().agents[name])
        assert_same_update(weights(agent), weights(second.agents[name]), start)


def test_step_dead_sequences_left_out_give_the_update_they_give_in(
    small_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = small_trainer(**{"update.tokens_per_micro_batch": 100_000})
    line = dropped.step()
    assert any(numbers["dead"] > 0 for numbers in line["agents"].values())
    monkeypatch.setattr(hacrl.trainer, "reaches_model", lambda sample, beta: True)
    kept = small_trainer(**{"update.tokens_per_micro_batch": 100_000})
    kept.step()
    for name, agent in dropped.agents.items():
        start = weights(small_trainer().agents[name])
        assert_same_update(weights(agent), weights(kept.agents[name]), start)


def test_update_split_into_micro_batches_gives_the_same_gradient(
    small_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients: list[dict[str, list[torch.Tensor]]] = []

    def keep(agent: Agent) -> float:
        gradients[-1].setdefault(agent.name, [p.grad.clone() for p in agent.model.parameters() if p.grad is not None])
        agent.optimizer.zero_grad(set_to_none=True)
        return 1.0

    monkeypatch.setattr(Agent, "optimizer_step", keep)
    for budget in (150, 100_000):
        gradients.append({})
        small_trainer(**{"update.tokens_per_micro_batch": budget}).step()
    for name, split in gradients[0].items():
        for a, b in zip(split, gradients[1][name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_step_methods_that_do_not_share_see_no_cross_response(
    small_trainer: Callable[..., Trainer], method: str
) -> None:
    line = small_trainer(**{"objective.method": method}).step()
    for numbers in line["agents"].values():
        assert math.isnan(numbers["ratio_cross_mean"])
        assert numbers["sequences"] == 24


@pytest.mark.parametrize("method", ["hacpo", "naive"])
def test_step_methods_that_share_see_everybody_s_responses(small_trainer: Callable[..., Trainer], method: str) -> None:
    line = small_trainer(**{"objective.method": method}).step()
    for numbers in line["agents"].values():
        assert numbers["sequences"] + numbers["cross_excluded"] == 48


def test_step_three_agents_share_and_all_learn(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer(**{"agents.third.model": "tiny:digits", "agents.third.learning_rate": 1e-4})
    line = trainer.step()
    assert set(line["agents"]) == {"digits", "pairs", "third"}
    for numbers in line["agents"].values():
        assert numbers["sequences"] + numbers["cross_excluded"] == 72
        assert numbers["grad_norm"] > 0


@pytest.mark.parametrize("method", ["hacpo", "gspo", "grpo", "naive"])
def test_step_with_kl_keeps_self_sequences_alive(small_trainer: Callable[..., Trainer], method: str) -> None:
    trainer = small_trainer(**{"objective.beta": 0.1, "objective.method": method})
    for numbers in trainer.step()["agents"].values():
        assert numbers["dead"] * numbers["sequences"] <= numbers["sequences"] - 24 + 1e-9
        assert numbers["grad_norm"] > 0


def test_update_cross_weight_is_source_over_learner(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer()
    pool = trainer.sample(0)
    trainer.score(pool)
    trainer.capability.update({"digits": 0.25, "pairs": 0.5})
    agent = trainer.agents["digits"]
    samples = trainer.samples(agent, trainer.view(pool, agent))
    assert {sample.weight for sample in samples if sample.is_cross} == {2.0}
    assert {sample.weight for sample in samples if not sample.is_cross} == {1.0}


@pytest.mark.parametrize("ratio_length", ["own", "source"])
def test_samples_length_is_the_learner_s_or_the_source_s_token_count(
    small_trainer: Callable[..., Trainer], ratio_length: str
) -> None:
    trainer = small_trainer(**{"objective.ratio_length": ratio_length})
    pool = trainer.sample(0)
    trainer.score(pool)
    trainer.capability.update({"digits": 0.5, "pairs": 0.5})
    agent = trainer.agents["digits"]
    view = trainer.view(pool, agent)
    for (rollout, _), sample in zip(view.rows, trainer.samples(agent, view), strict=True):
        count = len(rollout.ids) if ratio_length == "source" else len(sample.response_ids)
        assert sample.length == count


def test_view_responses_without_a_reward_are_left_out(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer()
    pool = trainer.sample(0)
    trainer.score(pool)
    next(iter(pool)).reward = None
    trainer.capability.update(pool.mean_rewards(list(trainer.agents)))
    view = trainer.view(pool, trainer.agents["pairs"])
    assert len(view.rows) + view.excluded == len(pool) - 1


def test_step_checker_that_raises_costs_that_response_only(
    small_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = small_trainer()
    original, calls = trainer.scorer._checker, []

    def sometimes(text: str, entry: Any) -> float:
        calls.append(text)
        if len(calls) % 10 == 0:
            raise RuntimeError("no")
        return float(original(text, entry))

    monkeypatch.setattr(trainer.scorer, "_checker", sometimes)
    line = trainer.step()
    assert sum(numbers["unscored"] for numbers in line["agents"].values()) == 4


def test_prompt_indices_visit_every_prompt_once_an_epoch(small_trainer: Callable[..., Trainer]) -> None:
    trainer = small_trainer(**{"task.size": 60})
    epochs = [[i for step in range(10 * e, 10 * e + 10) for i in trainer.prompt_indices(step)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))
    assert epochs[0] != epochs[1]
