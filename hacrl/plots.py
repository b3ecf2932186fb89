"""Figures of a run, from its metrics file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tracking import read_metrics


def learning_curves(runs: Sequence[Path], target: Path) -> Path:
    """Reward, held-out accuracy, cross ratio and dead share against the step, for one or more run folders.

    Raises:
        FileNotFoundError: a folder without metrics.jsonl.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("reward", "mean reward (sampled)"),
        ("accuracy", "held-out accuracy (greedy)"),
        ("ratio_cross_mean", "mean cross ratio"),
        ("dead", "share of dead sequences"),
    )
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for run in runs:
        path = run / "metrics.jsonl"
        if not path.is_file():
            raise FileNotFoundError(f"learning_curves: {run} is not a run folder: it holds no metrics.jsonl.")
        lines = list(read_metrics(path))
        for axis, (key, title) in zip(axes.flat, panels, strict=True):
            for name, (steps, values) in _series(lines, key).items():
                label = name if len(runs) == 1 else f"{run.name}: {name}"
                marker = "o" if key == "accuracy" else None
                axis.plot(steps, values, label=label, marker=marker, linewidth=1.5)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
    axes.flat[0].legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
    plt.close(figure)
    return target


def _series(lines: Sequence[dict[str, Any]], key: str) -> dict[str, tuple[list[int], list[float]]]:
    """Per agent the steps and values of one metric; steps without a value are left out."""
    section = "eval" if key == "accuracy" else "agents"
    series: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        for name, numbers in line.get(section, {}).items():
            if numbers.get(key) is not None:
                steps, values = series.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(numbers[key])
    return series
