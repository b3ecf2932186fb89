"""Small runs with the shipped agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hacrl.config import RunConfig, load_config
from hacrl.trainer import Trainer

SMALL = {
    "steps": 2,
    "task.size": 64,
    "sampling.group_size": 4,
    "update.prompts_per_step": 6,
    "update.updates_per_step": 2,
    "update.tokens_per_micro_batch": 512,
    "evaluation.size": 16,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def small_config() -> Callable[..., RunConfig]:
    """The quickstart recipe made small, with overrides by dotted name."""

    def build(**overrides: Any) -> RunConfig:
        return load_config("quickstart", {**SMALL, **overrides})

    return build


@pytest.fixture
def small_trainer(small_config: Callable[..., RunConfig]) -> Iterator[Callable[..., Trainer]]:
    """Trainers of small runs, closed at the end of the test."""
    from hacrl.run import build_trainer

    trainers = []

    def build(**overrides: Any) -> Trainer:
        trainers.append(build_trainer(small_config(**overrides)))
        return trainers[-1]

    yield build
    for trainer in trainers:
        trainer.close()
