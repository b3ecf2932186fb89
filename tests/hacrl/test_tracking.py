"""metrics.jsonl and the console."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from hacrl.tracking import MetricsFile, RunConsole, read_metrics

NUMBERS = {
    "reward": 0.5, "capability": 0.5, "ratio_cross_mean": float("nan"), "clipped_self": 0.0, "clipped_cross": None,
    "dead": 0.25,
}  # fmt: skip
LINE = {
    "step": 1,
    "agents": {"a": NUMBERS},
    "seconds": {"sample": 2.0, "update": 1.0},
    "tokens": {"sample": 10, "update": 20},
}


def test_metrics_file_writes_nan_as_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "x": {"y": float("nan")}, "z": float("inf")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "x": {"y": None}, "z": None}


def test_metrics_file_resumed_drops_later_lines_and_a_cut_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 1, "eval": {}}\n{"step": 2}\n{"ste')
    file = MetricsFile(path, resume_at=1)
    file.write({"step": 2, "again": True})
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 1, "eval": {}}, {"step": 2, "again": True}]
    assert file.evaluated == [1]


def test_run_console_shows_a_line_a_step_and_the_table() -> None:
    out = io.StringIO()
    console = RunConsole(3, console=Console(file=out, width=200))
    with console:
        console.step(LINE)
        console.evaluation({"step": 0, "eval": {"a": {"accuracy": 0.25}}})
        console.summary(
            [{"step": 0, "eval": {"a": {"accuracy": 0.25}}}, LINE, {"step": 1, "eval": {"a": {"accuracy": 0.5}}}]
        )
    text = out.getvalue()
    assert "0.500" in text and "5, 20" in text  # tokens per second
    assert "+0.250" in text
    assert "nan" not in text
