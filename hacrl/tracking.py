"""What a run leaves behind while it goes: metrics.jsonl, and lines on the console."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as null: JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut by a kill is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


class MetricsFile:
    """One JSON object per line, on disk as soon as it is written."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        """Opens `path`; `resume_at` drops what was written after that many steps, as the resumed run repeats it."""
        self.path = path
        kept = []
        if resume_at is not None and path.exists():
            kept = [line for line in read_metrics(path) if line["step"] <= resume_at]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")
        self.evaluated = [line["step"] for line in kept if "eval" in line]

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunConsole:
    """A progress bar on a terminal, and a line per step everywhere."""

    def __init__(self, steps: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True)
        self.progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("training", total=steps, completed=done)
        self.steps = steps
        self._header_due = True

    def __enter__(self) -> RunConsole:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def step(self, line: dict[str, Any]) -> None:
        """One line per agent of a step."""
        if self._header_due:
            self.say(
                f"[dim]{'step':>5}  {'agent':<12}{'reward':>8}{'capab.':>8}{'cross ratio':>13}{'clip self':>11}"
                f"{'clip cross':>12}{'dead':>7}{'  tokens/s sample, update'}[/dim]"
            )
            self._header_due = False
        seconds, tokens = line["seconds"], line["tokens"]
        speeds = [tokens[phase] / max(seconds[phase], 1e-9) for phase in ("sample", "update")]
        for index, (name, numbers) in enumerate(line["agents"].items()):
            step = str(line["step"]) if index == 0 else ""
            speed = f"  {speeds[0]:,.0f}, {speeds[1]:,.0f}" if index == 0 else ""
            self.say(
                f"{step:>5}  {name:<12}{_number(numbers['reward']):>8}{_number(numbers['capability']):>8}"
                f"{_number(numbers['ratio_cross_mean']):>13}{_number(numbers['clipped_self']):>11}"
                f"{_number(numbers['clipped_cross']):>12}{_number(numbers['dead']):>7}{speed}"
            )
        self.progress.update(self.task, completed=line["step"])

    def evaluation(self, line: dict[str, Any]) -> None:
        accuracies = ", ".join(f"{name} {numbers['accuracy']:.3f}" for name, numbers in line["eval"].items())
        self.say(f"{line['step']:>5}  held-out accuracy (greedy): [bold]{accuracies}[/bold]")

    def summary(self, lines: list[dict[str, Any]]) -> None:
        """The table at the end: held-out accuracy before and after, and what the steps showed."""
        evaluations = [line["eval"] for line in lines if "eval" in line]
        steps = [line["agents"] for line in lines if "agents" in line]
        table = Table(title="Held-out greedy accuracy and the ratios of the run")
        for column in ("agent", "before", "after", "gain", "cross ratio", "clipped self", "clipped cross", "dead"):
            table.add_column(column, justify="left" if column == "agent" else "right")
        for name in evaluations[0]:
            before, after = evaluations[0][name]["accuracy"], evaluations[-1][name]["accuracy"]
            means = [
                _number(_mean([step[name][key] for step in steps]))
                for key in ("ratio_cross_mean", "clipped_self", "clipped_cross", "dead")
            ]
            table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", *means)
        self.console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
