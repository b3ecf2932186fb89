from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hacrl.rewards import Score, Scorer

ENTRY: Mapping[str, Any] = {"answer": "7"}


def check(text: str, entry: Mapping[str, Any]) -> object:
    """A checker that does what the text says; any other text is compared with the entry's answer."""
    actions: dict[str, Callable[[], object]] = {
        "hang": lambda: time.sleep(1e6),
        "spin": _spin,
        "exit": lambda: os._exit(3),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "raise": lambda: int("seven"),
        "sys.exit": lambda: sys.exit(1),
        "None": lambda: None,
        "nan": lambda: math.nan,
        "inf": lambda: math.inf,
        "string": lambda: "1.0",
        "unpicklable": lambda: lambda: None,
        "int": lambda: 1,
        "bool": lambda: True,
        "numpy": lambda: np.float32(0.5),
        "array": lambda: np.ones(2),
    }
    return actions[text]() if text in actions else float(text == entry["answer"])


def _spin() -> None:
    while True:
        pass


def identify_process(text: str, entry: Mapping[str, Any]) -> float:
    return float(os.getpid())


class RefusesToLoad:
    def __call__(self, text: str, entry: Mapping[str, Any]) -> float:
        return 1.0

    def __setstate__(self, state: object) -> None:
        raise OSError("its file is gone")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def pairs_of(*texts: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(text, ENTRY) for text in texts]


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(check, workers=2, timeout=0.4) as shared:
        yield shared


def test_score_many_responses_keeps_their_order(scorer: Scorer) -> None:
    texts = [str(number % 10) for number in range(500)]
    assert [score.reward for score in scorer.score(pairs_of(*texts))] == [float(text == "7") for text in texts]


def test_score_no_responses_is_empty(scorer: Scorer) -> None:
    assert scorer.score([]) == []


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_score_hanging_checker_costs_that_response_only(scorer: Scorer, text: str) -> None:
    scores = scorer.score(pairs_of("7", "0", text, "7", "0", "7"))
    assert [score.reward for score in scores] == [1.0, 0.0, None, 1.0, 0.0, 1.0]
    assert scores[2].error == "timed out after 0.4 s"


@pytest.mark.parametrize(("text", "code"), [("exit", 3), ("segfault", -signal.SIGSEGV)])
def test_score_crashing_checker_costs_that_response_only(scorer: Scorer, text: str, code: int) -> None:
    scores = scorer.score(pairs_of("7", text, "7", "0"))
    assert [score.reward for score in scores] == [1.0, None, 1.0, 0.0]
    assert scores[1].error == f"the checker ended its process (exit code {code})"


def test_score_crash_inside_a_batch_loses_nothing_of_the_batch(scorer: Scorer) -> None:
    texts = ["7", "0"] * 50
    texts[20] = "exit"
    expected = [None if text == "exit" else float(text == "7") for text in texts]
    assert [score.reward for score in scorer.score(pairs_of(*texts))] == expected


def test_score_every_worker_crashing_still_scores_the_rest(scorer: Scorer) -> None:
    scores = scorer.score(pairs_of("exit", "exit", "exit", "7"))
    assert [score.reward for score in scores] == [None, None, None, 1.0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", "ValueError: invalid literal"),
        ("sys.exit", "SystemExit: 1"),
        ("None", "returned None"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("string", "returned str, a number is needed: '1.0'"),
        ("unpicklable", "returned function"),
        ("array", "returned ndarray"),
    ],
)
def test_score_useless_result_has_no_reward_but_a_reason(scorer: Scorer, text: str, error: str) -> None:
    before, broken, after = scorer.score(pairs_of("7", text, "7"))
    assert (before.reward, broken.reward, after.reward) == (1.0, None, 1.0)
    assert error in (broken.error or "")


@pytest.mark.parametrize(("text", "reward"), [("int", 1.0), ("bool", 1.0), ("numpy", 0.5)])
def test_score_any_kind_of_number_becomes_a_float(scorer: Scorer, text: str, reward: float) -> None:
    assert scorer.score(pairs_of(text)) == [Score(reward)]


def test_score_worker_killed_between_calls_blames_no_response(scorer: Scorer) -> None:
    scorer.score(pairs_of("7"))
    for worker in scorer._pool:
        worker.process.kill()
        worker.process.join()
    assert [score.reward for score in scorer.score(pairs_of("7", "0", "7"))] == [1.0, 0.0, 1.0]


def test_score_after_an_interrupt_starts_clean(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    scorer.score(pairs_of("7"))  # so that a worker is ready, and is at work when the interrupt comes
    with monkeypatch.context() as patch:
        patch.setattr("hacrl.rewards._Worker.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scorer.score(pairs_of(*["0"] * 100))
    assert [score.reward for score in scorer.score(pairs_of("7", "7"))] == [1.0, 1.0]


def test_score_in_process_unwraps_zero_dimensional_tensor() -> None:
    import torch  # not at the top: the workers import this module

    assert Scorer(lambda text, entry: torch.tensor(0.5), workers=0).score(pairs_of("x")) == [Score(0.5)]


def test_score_without_workers_runs_in_this_process() -> None:
    assert Scorer(identify_process, workers=0).score(pairs_of("x"))[0].reward == os.getpid()


def test_score_without_workers_exception_costs_that_response_only() -> None:
    scores = Scorer(check, workers=0).score(pairs_of("7", "raise", "0"))
    assert [score.reward for score in scores] == [1.0, None, 0.0]


def test_score_without_workers_interrupt_is_not_swallowed() -> None:
    def interrupted(text: str, entry: Mapping[str, Any]) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scorer(interrupted, workers=0).score(pairs_of("x"))


def test_score_trivial_checker_costs_little_per_response(scorer: Scorer) -> None:
    scorer.score(pairs_of(*"7777"))
    pairs = pairs_of(*["7"] * 2000)
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        scorer.score(pairs)
        durations.append(time.perf_counter() - start)
    assert min(durations) / len(pairs) < 2e-4


def test_score_checker_that_does_not_load_raises_with_the_reason() -> None:
    with Scorer(RefusesToLoad(), workers=1) as broken, pytest.raises(RuntimeError, match="its file is gone"):
        broken.score(pairs_of("x"))


def test_close_ends_the_workers_and_refuses_more() -> None:
    scorer = Scorer(identify_process, workers=1)
    pid = int(scorer.score(pairs_of("x"))[0].reward or 0)
    scorer.close()
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        scorer.score(pairs_of("x"))


def test_scorer_parent_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib, sys, time
            from hacrl.rewards import Scorer

            def check(text, entry):
                pathlib.Path(text).write_text(str(os.getpid()))
                time.sleep(1e6)

            if __name__ == "__main__":
                Scorer(check, workers=1, timeout=1e5).score([(sys.argv[1], {})])
            """
        )
    )
    pid_file = tmp_path / "pid"
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "hanging.py"), str(pid_file)], env={**os.environ, "PYTHONPATH": root}
    )
    try:
        assert _within(20.0, lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    assert _within(5.0, lambda: not _is_alive(int(pid_file.read_text())))


def _within(seconds: float, condition: Any) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _is_alive(pid: int) -> bool:
    try:  # a process that has ended may wait for its new parent to notice
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_scorer_checker_not_picklable_raises() -> None:
    with pytest.raises(TypeError, match="picklable"):
        Scorer(lambda text, entry: 1.0, workers=1)


def test_scorer_checker_not_callable_raises() -> None:
    with pytest.raises(TypeError, match="callable"):
        Scorer("exact", workers=0)  # type: ignore[arg-type]


def test_scorer_partial_of_a_function_is_picklable() -> None:
    assert Scorer(functools.partial(check), workers=0).score(pairs_of("7")) == [Score(1.0)]


@pytest.mark.parametrize(("workers", "timeout"), [(-1, 1.0), (0, 0.0), (0, math.nan), (0, math.inf)])
def test_scorer_argument_outside_range_raises(workers: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="Scorer"):
        Scorer(check, workers=workers, timeout=timeout)
