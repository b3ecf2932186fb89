"""A training run from configuration to run folder: build, train, evaluate, save."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch

from . import checkpoint
from .agent import Agent
from .config import AgentConfig, ConfigError, RunConfig
from .plots import learning_curves
from .tasks import ReasoningGymTask
from .tracking import MetricsFile, RunConsole, read_metrics
from .trainer import Trainer


def build_tasks(config: RunConfig) -> tuple[ReasoningGymTask, ReasoningGymTask]:
    """(training task, held-out task).

    Raises:
        ConfigError: the task or one of its settings does not exist.
    """
    settings = config.task
    try:
        task = ReasoningGymTask(
            settings.name, settings.size, settings.seed, settings.config, settings.threshold, settings.answer
        )
    except ValueError as error:
        raise ConfigError(f"task: {error}") from None
    return task, task.held_out(config.evaluation.size)


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is CUDA where there is one.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: {name!r} is not available here: {str(error).splitlines()[0]}") from None
    return device


def build_agent(config: RunConfig, name: str, agent: AgentConfig) -> Agent:
    """An agent with the sampling settings of a run."""
    return Agent(
        name,
        agent,
        temperature=config.sampling.temperature,
        max_response_length=config.sampling.max_new_tokens,
        device=choose_device(config.device),
        with_reference=config.objective.beta > 0,
    )


def build_trainer(config: RunConfig) -> Trainer:
    """Tasks first, since they are cheap to refuse, then the agents."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    task, held_out = build_tasks(config)
    agents = {name: build_agent(config, name, agent) for name, agent in config.agents.items()}
    return Trainer(config, agents, task, held_out)


class _Stop:
    """Whether the run was asked to stop; the step in progress is finished first."""

    def __init__(self) -> None:
        self.requested = False
        self._previous = signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._previous)


def train(config: RunConfig, output: Path, *, resume: bool = False) -> Path:
    """Runs a whole training and returns its folder.

    The folder holds config.toml (resolved), metrics.jsonl, agents/NAME in Hugging Face format, and
    plots/learning_curves.png.

    Raises:
        ConfigError: the folder holds a run already (without `resume`) or none to resume, or the configuration does not
            fit this machine.
    """
    checkpoints = output / "checkpoints"
    found = checkpoint.latest(checkpoints) if resume else None
    if (output / "metrics.jsonl").exists() and not resume:
        raise ConfigError(
            f"output: {output} holds a run already; add --resume to continue it, or choose another folder."
        )
    if resume and not (output / "config.toml").exists():
        raise ConfigError(f"output: {output} holds no run to resume.")
    started = time.perf_counter()
    trainer = build_trainer(config)
    try:
        if found is not None:
            checkpoint.load(trainer, found)
        output.mkdir(parents=True, exist_ok=True)
        temporary = output / ".config.toml.tmp"
        temporary.write_text(config.to_toml(), encoding="utf-8")
        os.replace(temporary, output / "config.toml")
        metrics = MetricsFile(output / "metrics.jsonl", resume_at=trainer.step_index if resume else None)
        with RunConsole(config.steps, trainer.step_index) as console:
            for warning in config.warnings():
                console.say(f"[yellow]warning:[/yellow] {warning}")
            if resume:
                console.say(f"resuming {output} after step {trainer.step_index}")
            finished = _loop(trainer, config, checkpoints, metrics, console)
            if not finished:
                console.say(f"stopped after step {trainer.step_index}; continue with --output {output} --resume")
                return output
            for name, agent in trainer.agents.items():
                agent.save_pretrained(output / "agents" / name)
            metrics.close()
            figure = learning_curves([output], output / "plots" / "learning_curves.png")
            console.summary(list(read_metrics(output / "metrics.jsonl")))
            console.say(f"agents, metrics and {figure.relative_to(output)} are in {output}")
            console.say(f"{time.perf_counter() - started:.0f} s in all")
    finally:
        trainer.close()
    return output


def _loop(trainer: Trainer, config: RunConfig, checkpoints: Path, metrics: MetricsFile, console: RunConsole) -> bool:
    """Steps, evaluations and checkpoints; False when it was asked to stop before the end."""
    every, saving = config.evaluation.every, config.checkpoint
    stop = _Stop()
    try:
        if trainer.step_index == 0:
            _evaluate_once(trainer, metrics, console)
        while trainer.step_index < config.steps:
            line = trainer.step()
            metrics.write(line)
            console.step(line)
            step = trainer.step_index
            if step == config.steps or (every and step % every == 0):
                _evaluate_once(trainer, metrics, console)
            if stop.requested or (saving.every and step % saving.every == 0):
                checkpoint.save(trainer, checkpoints, saving.keep)
            if stop.requested:
                return step == config.steps
    finally:
        stop.close()
    return True


def _evaluate_once(trainer: Trainer, metrics: MetricsFile, console: RunConsole) -> None:
    """Evaluates unless the metrics of a resumed run hold this evaluation already."""
    if trainer.step_index in metrics.evaluated:
        return
    line = trainer.evaluate()
    metrics.write(line)
    console.evaluation(line)
