"""The command line, from recipe to run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.cli import main
from hacrl.config import load_config
from hacrl.run import choose_device

SMALL = [
    "--steps", "2", "--task.size", "64", "--sampling.group_size", "2", "--update.prompts_per_step", "4",
    "--evaluation.size", "8",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "quickstart", "--output", str(folder), "--seed", "3", *SMALL]) == 0
    return folder


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_writes_the_run_folder(run: Path) -> None:
    assert load_config(run / "config.toml").seed == 3
    assert [line["step"] for line in lines(run) if "agents" in line] == [1, 2]
    assert [line["step"] for line in lines(run) if "eval" in line] == [0, 2]
    assert (run / "plots" / "learning_curves.png").stat().st_size > 10_000


def test_train_saves_agents_that_plain_transformers_reload_with_equal_answers(run: Path) -> None:
    from hacrl.run import build_trainer

    trainer = build_trainer(load_config(run / "config.toml"))
    try:
        for _ in range(2):
            trainer.step()
        for name, agent in trainer.agents.items():
            model = AutoModelForCausalLM.from_pretrained(run / "agents" / name)
            tokenizer = AutoTokenizer.from_pretrained(run / "agents" / name)
            prompt = agent.prompt_ids("7*3+5-2*4+8-6=")
            ids = torch.tensor([prompt])
            answer = model.generate(ids, do_sample=False, max_new_tokens=24, attention_mask=torch.ones_like(ids))
            ours = agent.generate(["7*3+5-2*4+8-6="], samples=1, seed=0, batch_size=1, greedy=True)[0][0]
            assert answer[0, len(prompt) :].tolist() == ours.ids
            assert tokenizer.decode(ours.ids) == agent.tokenizer.decode(ours.ids)
    finally:
        trainer.close()


def test_train_same_seed_gives_the_same_metrics(run: Path, tmp_path: Path) -> None:
    main(["train", "quickstart", "--output", str(tmp_path / "again"), "--seed", "3", *SMALL])
    for a, b in zip(lines(run), lines(tmp_path / "again"), strict=True):
        a.pop("seconds", None), b.pop("seconds", None)
        assert a == b


def test_train_into_a_folder_that_holds_a_run_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--output", str(run), *SMALL]) == 2
    assert "holds a run already; add --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quickstat"], "Did you mean 'quickstart'"),
        (["train", "quickstart", "--stepz", "3"], "stepz: there is no such field"),
        (["train", "quickstart", "--agents.digits.model", "./nowhere"], "agents.digits.model: there is no folder"),
        (["train", "quickstart", "--task.name", "chain_sums"], "'chain_sum'"),
        (["train", "quickstart", "--task.config.modulos", "3"], "modulos"),
        (["train", "quickstart", "--device", "cuda:9"], "device: 'cuda:9' is not available here"),
        (["train", "quickstart", "--resume"], "--resume needs --output"),
        (["train", "quickstart", "--resume", "--output", "nowhere"], "holds no run to resume"),
        (["evaluate", "quickstart", "tiny:digitz"], "name must be one of digits, pairs"),
        (["evaluate", "quickstart", "tiny:digits", "--samples", "-1"], "--samples must be >= 0"),
        (["plot", "nowhere"], "nowhere is not a run folder"),
    ],
)
def test_main_bad_input_gives_one_paragraph_that_names_it(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_evaluate_prints_the_accuracies(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "quickstart", "tiny:digits", "--samples", "2", "--evaluation.size", "8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("tiny:digits: greedy 0.") and "avg@2" in out and "best@2" in out and "(8 problems)" in out


def test_plot_writes_a_figure_of_several_runs(run: Path, tmp_path: Path) -> None:
    assert main(["plot", str(run), str(run), "--to", str(tmp_path / "a" / "b.png")]) == 0
    assert (tmp_path / "a" / "b.png").exists()


def test_choose_device_auto_is_cpu_without_an_accelerator() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hacrl.cli", "train", "quickstart", "--output", str(folder), *SMALL]
    command += ["--steps", "6", "--checkpoint.every", "1", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_train_killed_and_resumed_gives_the_metrics_of_an_uninterrupted_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    whole = start(tmp_path / "whole")
    assert whole.wait(timeout=120) == 0
    killed = start(tmp_path / "killed")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("killed/checkpoints/step-*")) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(number)
    killed.wait(timeout=60)
    assert len(lines(tmp_path / "killed")) < len(lines(tmp_path / "whole"))
    assert start(tmp_path / "killed", "--resume").wait(timeout=120) == 0
    for a, b in zip(lines(tmp_path / "whole"), lines(tmp_path / "killed"), strict=True):
        a.pop("seconds", None), b.pop("seconds", None)
        assert a == b
    for name in ("digits", "pairs"):
        ours, theirs = (
            (tmp_path / run / "agents" / name / "model.safetensors").read_bytes() for run in ("whole", "killed")
        )
        assert ours == theirs
