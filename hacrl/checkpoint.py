"""Checkpoints of a whole run: weights and optimizers of all agents, capability windows, step.

Random states and the position in the data are not in them: both follow from the seed and the step.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .trainer import Trainer

_PREFIX = "step-"
_STATE = "state.json"
_MAY_CHANGE = ("checkpoint", "evaluation", "threads")  # they do not change what is learned


def _folders(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob(f"{_PREFIX}*") if (path / _STATE).is_file())


def save(trainer: Trainer, root: Path, keep: int) -> Path:
    """Writes a checkpoint under a temporary name, renames it when it is whole, and prunes the oldest.

    A run that is killed at any moment leaves the previous checkpoint as it was.
    """
    name = f"{_PREFIX}{trainer.step_index:08d}"
    temporary, final = root / f".{name}.tmp", root / name
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for agent_name, agent in trainer.agents.items():
        model, optimizer = get_state_dict(agent.model, agent.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one process needs no process group
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=temporary / agent_name)
    state = {
        "step": trainer.step_index,
        "capability": trainer.capability.state_dict(),
        "updates": {agent_name: agent.updates for agent_name, agent in trainer.agents.items()},
        "config": trainer.config.model_dump(mode="json", exclude={"output", "steps"}),
    }
    (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in _folders(root)[:-keep]:
        shutil.rmtree(old)
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    folders = _folders(root)
    return folders[-1] if folders else None


def load(trainer: Trainer, folder: Path) -> None:
    """Puts a trainer into the state of a checkpoint.

    Raises:
        ValueError: the checkpoint belongs to a run with other agents or settings; the message names them.
    """
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    current = trainer.config.model_dump(mode="json", exclude={"output", "steps"})
    changed = [
        name for name, value in current.items() if name not in _MAY_CHANGE and state["config"].get(name) != value
    ]
    if changed:
        raise ValueError(
            f"load: the checkpoint {folder} was made with other settings of {', '.join(sorted(changed))}; resume with "
            "the run's own config.toml, or start a new run."
        )
    for name, agent in trainer.agents.items():
        model, optimizer = get_state_dict(agent.model, agent.optimizer)
        tensors: dict[str, Any] = {"model": model, "optimizer": optimizer}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, checkpoint_id=folder / name)
        set_state_dict(
            agent.model,
            agent.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        agent.updates = int(state["updates"][name])
    trainer.capability.load_state_dict(state["capability"])
    trainer.step_index = int(state["step"])
