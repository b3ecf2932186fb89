"""Scoring of responses in worker processes that can be killed, with a deadline per response.

A checker runs on text that a model wrote: sooner or later it hangs, crashes or raises. It then costs the one response
it ran on, and nothing else. Threads cannot be stopped and a pool of futures cannot kill one worker, so each worker here
is a process with a pipe of its own.
"""

from __future__ import annotations

import math
import multiprocessing
import numbers
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Checker = Callable[[str, Mapping[str, Any]], Any]
Pair = tuple[str, Mapping[str, Any]]

START_SECONDS = 120.0  # a worker imports the checker's module, which may import much
_MAX_CHUNK = 64  # responses per message to a worker
_MAX_ERROR = 500  # characters


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one response; None, and why, when it could not be scored."""

    reward: float | None
    error: str | None = None


class Scorer:
    """Scores responses with `checker(text, entry) -> number`.

    A response is left without a reward (`Score.reward` None, `Score.error` says why) when the checker raises, returns
    None, NaN or something that is not a number, takes longer than `timeout`, or takes its process down. In the last two
    cases the worker is replaced and the others go on.

    Workers are started at once (by "spawn": a script that builds a Scorer needs the usual `__name__ == "__main__"`
    guard), and end with `close`, at the end of a `with` block, or when this process ends, however it does.

    Args:
        checker: a picklable callable: a module's function or an instance of a module's class.
        workers: number of processes. 0 runs the checker in this process, which is fast for a trivial checker that is
            trusted: there is no deadline, and a crash or an endless loop takes the training with it.
        timeout: seconds for one response, > 0; not used with `workers=0`.

    Raises:
        ValueError: a number outside its range. TypeError: a checker that cannot be called, or not be pickled.
    """

    def __init__(self, checker: Checker, workers: int, timeout: float = 5.0) -> None:
        if not callable(checker):
            raise TypeError(f"Scorer: checker must be callable, got {type(checker).__name__}.")
        if workers < 0:
            raise ValueError(f"Scorer: workers must be >= 0, got {workers}.")
        if not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"Scorer: timeout must be a finite number of seconds > 0, got {timeout}.")
        self.workers = workers
        self.timeout = timeout
        self._checker = checker
        self._lock = threading.Lock()
        self._closed = False
        self._pickled = _pickle_checker(checker) if workers else b""
        self._pool = [_Worker(self._pickled, timeout) for _ in range(workers)]

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """Scores of (text, entry) pairs, in their order.

        Raises:
            RuntimeError: the scorer is closed, or a worker cannot load the checker.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("Scorer.score: the scorer is closed.")
            if not self.workers:
                return [_check(self._checker, text, entry, Exception) for text, entry in pairs]
            try:
                return self._score_in_workers(pairs)
            except BaseException:  # interrupted half-way: what the workers still send belongs to no later call
                for index, worker in enumerate(self._pool):
                    if worker.is_busy:
                        self._replace(index)
                raise

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        self._closed = True
        for worker in self._pool:
            worker.kill()
        self._pool.clear()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _score_in_workers(self, pairs: Sequence[Pair]) -> list[Score]:
        scores: dict[int, Score] = {}
        queue = deque(range(len(pairs)))
        failed_starts = 0
        chunk = min(_MAX_CHUNK, math.ceil(len(pairs) / (4 * self.workers)))  # small enough to share the work evenly
        while len(scores) < len(pairs):
            for worker in self._pool:
                if worker.ready and not worker.waiting and queue:
                    indices = [queue.popleft() for _ in range(min(chunk, len(queue)))]
                    if not worker.send(indices, pairs):
                        queue.extendleft(reversed(indices))
            for index in self._wait():
                worker = self._pool[index]
                scores.update(worker.receive())
                reason = worker.failure()
                if reason is None:
                    continue
                if not worker.ready:
                    failed_starts += 1
                    if failed_starts > self.workers:  # each may be killed once, by a lack of memory for example
                        raise RuntimeError(f"Scorer: {reason}")
                if worker.waiting:  # the first one without a score was being checked
                    scores[worker.waiting.popleft()] = Score(None, reason)
                    queue.extendleft(reversed(worker.waiting))
                self._replace(index)
        return [scores[index] for index in range(len(pairs))]

    def _wait(self) -> list[int]:
        """The workers that have something to say, have ended, or are past their deadline; waits until there is one."""
        deadline = min(worker.deadline for worker in self._pool if worker.is_busy)
        heard = connection.wait([worker.pipe for worker in self._pool], max(0.0, deadline - time.monotonic()))
        now = time.monotonic()
        return [
            index
            for index, worker in enumerate(self._pool)
            if worker.pipe in heard or (worker.is_busy and worker.deadline <= now)
        ]

    def _replace(self, index: int) -> None:
        self._pool[index].kill()
        self._pool[index] = _Worker(self._pickled, self.timeout)


def _pickle_checker(checker: Checker) -> bytes:
    try:
        return pickle.dumps(checker)
    except Exception as error:
        raise TypeError(
            f"Scorer: checker {checker!r:.80} must be picklable to run in worker processes ({error}); use a module's "
            "function or class, or workers=0."
        ) from error


class _Worker:
    """The parent's side of one worker process.

    `waiting` are the indices of the responses it was sent and has not scored, in order: the first one is being checked.
    """

    def __init__(self, pickled_checker: bytes, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_work, args=(child, pickled_checker, timeout), daemon=True)
        self.process.start()
        child.close()
        self.timeout = timeout
        self.ready = False
        self.ended = False
        self.waiting: deque[int] = deque()
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting) or not self.ready or self.ended

    def send(self, indices: list[int], pairs: Sequence[Pair]) -> bool:
        """Give it responses to score; False when it has ended since it was last heard of."""
        try:
            self.pipe.send([pairs[index] for index in indices])
        except OSError:
            self.ended = True
            return False
        self.waiting.extend(indices)
        self.deadline = time.monotonic() + self.timeout
        return True

    def receive(self) -> dict[int, Score]:
        """The scores it has sent since the last call."""
        scores: dict[int, Score] = {}
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, str):
                    raise RuntimeError(f"Scorer: a worker cannot load the checker:\n{message}")
                if message is None:
                    self.ready = True
                else:
                    scores[self.waiting.popleft()] = Score(*message)
                self.deadline = time.monotonic() + self.timeout
        except (EOFError, OSError):
            self.ended = True
        return scores

    def failure(self) -> str | None:
        """Why it has to be replaced, or None. Call after `receive`."""
        late = self.is_busy and time.monotonic() >= self.deadline
        if not self.ready and (self.ended or late):
            state = "ended" if self.ended else f"was not ready after {START_SECONDS:g} s"
            return (
                f"a worker {state} before it could score (exit code {self.process.exitcode}). Does the script start "
                'its work under `if __name__ == "__main__":`?'
            )
        if self.ended:
            self.process.join(1.0)
            return f"the checker ended its process (exit code {self.process.exitcode})"
        return f"timed out after {self.timeout:g} s" if late and not self.pipe.poll() else None

    def kill(self) -> None:
        """End the process and whatever the checker started."""
        if self.process.pid is not None and self.process.is_alive():
            _kill_group(self.process.pid)
            self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _kill_group(pid: int) -> None:
    """Kill the process group that the worker leads, unless it has not come to lead one yet."""
    if not hasattr(os, "killpg"):
        return
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    except OSError:  # it has just ended
        pass


def _work(pipe: Connection, pickled_checker: bytes, timeout: float) -> None:
    """Body of a worker: sends None when it is ready, then one (reward, error) per response, in order."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own: an interrupt from the terminal is for the parent, which ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        checker: Checker = pickle.loads(pickled_checker)
    except BaseException:
        pipe.send(traceback.format_exc())
        return
    pipe.send(None)
    while True:
        try:
            pairs: list[Pair] = pipe.recv()
        except (EOFError, OSError):
            return
        for text, entry in pairs:
            _limit_cpu(10 * timeout + 10)
            score = _check(checker, text, entry, BaseException)
            pipe.send((score.reward, score.error))
        _limit_cpu(0)


def _end_with_parent() -> None:
    """End this process, and what the checker started, when the parent has ended without a word."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    connection.wait([parent.sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _limit_cpu(seconds: float) -> None:
    """Have the system end this process after that much computing (0: never).

    The parent's deadline comes first. This one is for a worker that outlives its parent inside a C function which never
    lets another thread run.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _check(checker: Checker, text: str, entry: Mapping[str, Any], caught: type[BaseException]) -> Score:
    try:
        return _as_score(checker(text, entry))
    except caught as error:
        return Score(None, "".join(traceback.format_exception_only(error)).strip()[:_MAX_ERROR])


def _as_score(value: object) -> Score:
    if value is None:
        return Score(None, "the checker returned None")
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]  # a tensor or numpy scalar
    if not isinstance(value, numbers.Real):
        return Score(None, f"the checker returned {type(value).__name__}, a number is needed: {value!r:.80}")
    reward = float(value)
    return Score(reward) if math.isfinite(reward) else Score(None, f"the checker returned {reward}")
