"""Checkpoints: a resumed run is the uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hacrl import checkpoint
from hacrl.trainer import Trainer


def state(trainer: Trainer) -> list[torch.Tensor]:
    tensors = []
    for agent in trainer.agents.values():
        tensors += list(agent.model.parameters())
        for slots in agent.optimizer.state.values():
            tensors += [value for value in slots.values() if isinstance(value, torch.Tensor)]
    return tensors


def test_load_continues_bit_for_bit(small_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    whole, first, second = small_trainer(), small_trainer(), small_trainer()
    for _ in range(3):
        expected = whole.step()
    first.step()
    checkpoint.save(first, tmp_path, keep=2)
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    checkpoint.load(second, folder)
    for _ in range(2):
        got = second.step()
    assert repr({**got, "seconds": 0}) == repr({**expected, "seconds": 0})
    assert all(torch.equal(a, b) for a, b in zip(state(whole), state(second), strict=True))
    assert second.capability.state_dict() == whole.capability.state_dict()


def test_save_keeps_the_newest_and_leaves_no_temporary_folder(
    small_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = small_trainer()
    for step in (1, 2, 3):
        trainer.step_index = step
        checkpoint.save(trainer, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_latest_passes_over_a_checkpoint_that_was_not_finished(tmp_path: Path) -> None:
    (tmp_path / "step-00000004").mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_load_of_a_run_with_other_settings_names_them(small_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    folder = checkpoint.save(small_trainer(), tmp_path, keep=1)
    with pytest.raises(ValueError, match="other settings of objective, seed"):
        checkpoint.load(small_trainer(**{"objective.alpha": 3.0, "seed": 5}), folder)


def test_load_allows_other_evaluation_and_checkpoint_settings(
    small_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    folder = checkpoint.save(small_trainer(), tmp_path, keep=1)
    trainer = small_trainer(**{"evaluation.every": 1, "checkpoint.keep": 5, "steps": 9})
    checkpoint.load(trainer, folder)
    assert trainer.step_index == 0
