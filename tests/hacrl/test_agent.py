"""Agents: where their models come from, and the log-probabilities they record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hacrl.agent import load_pretrained, resolve_model
from hacrl.config import ConfigError
from hacrl.trainer import Trainer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny:digitz", "agents.a.model: path: name must be one of digits, pairs"),
        ("./nowhere", "agents.a.model: there is no folder ./nowhere"),
        ("/no/such/folder", "agents.a.model: there is no folder"),
        ("a/b/c", "agents.a.model: there is no folder a/b/c"),
    ],
)
def test_resolve_model_missing_folder_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(name, "agents.a.model")


def test_resolve_model_folder_without_config_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path), "agents.a.model")


def test_resolve_model_hub_name_passes_through() -> None:
    assert resolve_model("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


def test_load_pretrained_hub_name_that_cannot_be_had_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"agents\.a\.model: cannot load 'nobody/nothing'"):
        load_pretrained("nobody/nothing", torch.float32, torch.device("cpu"), "agents.a.model")


def test_score_is_the_same_however_the_responses_are_batched(small_trainer: Callable[..., Trainer]) -> None:
    agent = small_trainer().agents["digits"]
    prompt = agent.prompt_ids("7*3+5-2*4+8-6=")
    pairs = [(prompt, agent.tokenizer.encode(text, add_special_tokens=False)) for text in ("04", "04 09 07", "1")]
    together = agent.score(pairs, 10_000)
    alone = [agent.score([pair], 1)[0] for pair in pairs]
    for a, b in zip(together, alone, strict=True):
        assert abs(float(a.double().mean() - b.double().mean())) < 1e-5  # float32 numbers near -14


def test_optimizer_step_without_gradient_changes_nothing(small_trainer: Callable[..., Trainer]) -> None:
    agent = small_trainer().agents["digits"]
    before = [parameter.clone() for parameter in agent.model.parameters()]
    assert agent.optimizer_step() == 0.0
    assert agent.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, agent.model.parameters(), strict=True))


def test_optimizer_step_with_a_gradient_that_is_not_finite_is_skipped(small_trainer: Callable[..., Trainer]) -> None:
    agent = small_trainer().agents["digits"]
    before = [parameter.clone() for parameter in agent.model.parameters()]
    for parameter in agent.model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    agent.optimizer_step()
    assert agent.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, agent.model.parameters(), strict=True))
