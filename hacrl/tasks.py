"""Tasks: prompts with the checker that scores responses to them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

from .rollout import Prompt

Answer = Literal["text", "tag", "last_number"]

# Datasets that this package adds to reasoning-gym's registry, and the modules that do it when imported.
_OWN_DATASETS = {"chain_mod": "hacrl.tiny.chain"}
# "1,234.5" and "-4" are one number; the minus of "10-4" is no sign.
_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", re.ASCII
)


class Task(Protocol):
    """What training needs of a task.

    `reward_max` is the largest reward there is (the cap of the baseline), None when there is no bound. `score` may
    hang, crash or raise: it is called through a `Scorer`. For that the task is picklable.
    """

    @property
    def reward_max(self) -> float | None: ...

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> Prompt: ...

    def score(self, text: str, entry: Mapping[str, Any]) -> float: ...


class ReasoningGymTask:
    """A reasoning-gym dataset with rewards 0 and 1.

    The reward is 1 when the dataset's own score of the answer is at least `threshold`. Many datasets give part of the
    score to a wrong answer (for holding the right one inside a longer text, or for nothing at all), which is no signal
    to learn from; hence the high default.

    Item i of a dataset is drawn with the seed `seed + i`: two tasks share items unless their seeds are at least `size`
    apart. `held_out` gives a task that is. Easy settings have few distinct items, so equal questions can still occur.

    Args:
        name: a registered dataset ("composite" mixes several; its `datasets` are tables of name, weight and config).
        size: number of prompts, >= 1.
        seed: seed of item 0, >= 0.
        config: the dataset's other settings.
        threshold: the score from which an answer counts as right, in (0, 1].
        answer: what of a response is the answer: "text", the whole response; "tag", the last <answer>...</answer>;
            "last_number", the last number in it. A response without an answer has reward 0.

    Raises:
        ValueError: an unknown name, field or value; the message names it.
    """

    reward_max = 1.0

    def __init__(
        self,
        name: str,
        size: int,
        seed: int,
        config: Mapping[str, Any] | None = None,
        threshold: float = 0.99,
        answer: Answer = "text",
    ) -> None:
        if size < 1:
            raise ValueError(f"ReasoningGymTask: size must be >= 1, got {size}.")
        if seed < 0:
            raise ValueError(f"ReasoningGymTask: seed must be >= 0, got {seed}.")
        if not 0 < threshold <= 1:
            raise ValueError(f"ReasoningGymTask: threshold must be in (0, 1], got {threshold}.")
        if answer not in get_args(Answer):
            raise ValueError(f"ReasoningGymTask: answer must be one of {get_args(Answer)}, got {answer!r}.")
        self.name = name
        self.size = size
        self.seed = seed
        self.config = dict(config or {})
        self.threshold = threshold
        self.answer: Answer = answer
        self._check_item(0)  # what is wrong with the settings shows now, not in the middle of training

    def __len__(self) -> int:
        return self.size

    def __getstate__(self) -> dict[str, Any]:
        """Without the dataset, which is rebuilt where it is needed: some datasets cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_dataset"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._check_item(0)  # a worker loads what it needs now, not within the deadline of its first response

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`, the same at every call. Raises IndexError outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"ReasoningGymTask.prompt: index must lie in [0, {self.size}), got {index}.")
        entry = self._dataset[index]
        return Prompt(index=index, question=entry["question"], entry=entry)

    def score(self, text: str, entry: Mapping[str, Any]) -> float:
        """1.0 for a right answer, 0.0 for a wrong one or none; NaN when the dataset's score is.

        The dataset's exceptions pass through, and nothing limits its time: call it through a `Scorer`.
        """
        answer = extract_answer(text, self.answer)
        if answer is None:  # some datasets give points for that
            return 0.0
        score = float(self._dataset.score_answer(answer, entry))
        return score if math.isnan(score) else float(score >= self.threshold)

    def held_out(self, size: int) -> ReasoningGymTask:
        """A task of the `size` items that follow this task's."""
        return ReasoningGymTask(self.name, size, self.seed + self.size, self.config, self.threshold, self.answer)

    @cached_property
    def _dataset(self) -> Any:
        return _build_dataset(self.name, self.size, self.seed, self.config)

    def _check_item(self, index: int) -> None:
        entry = self._dataset[index]
        if not isinstance(entry.get("question"), str):
            raise ValueError(
                f"ReasoningGymTask: items of {self.name!r} must have a 'question' of type str, they have {list(entry)}."
            )


def extract_answer(text: str, answer: Answer) -> str | None:
    """The answer in a response (see `ReasoningGymTask`), stripped; None when there is none."""
    if answer == "text":
        return text.strip() or None
    if answer == "last_number":
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    from reasoning_gym.utils import extract_answer as extract_tag

    tagged = extract_tag(text)
    # from an opening tag that was never closed, the match reaches into the next one
    return tagged.rsplit("<answer>", 1)[-1].strip() or None if tagged is not None else None


def _build_dataset(name: str, size: int, seed: int, config: Mapping[str, Any]) -> Any:
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS and name in _OWN_DATASETS:
        importlib.import_module(_OWN_DATASETS[name])
    if name not in DATASETS:
        known = sorted({*DATASETS, *_OWN_DATASETS})
        close = difflib.get_close_matches(name, known) or known
        raise ValueError(f"ReasoningGymTask: there is no dataset {name!r}; did you mean one of {close}?")
    dataset_class, config_class = DATASETS[name]
    _check_fields(name, config, {field.name for field in dataclasses.fields(config_class)})

    def build(chosen: Mapping[str, Any]) -> Any:
        settings = _with_dataset_specs(chosen) if name == "composite" else chosen
        dataset = dataset_class(config=config_class(**settings, size=size, seed=seed))  # validates the configuration
        dataset[0]
        return dataset

    try:
        return build(config)
    except Exception as error:
        wrong = _wrong_fields(build, config)
        raise ValueError(
            f"ReasoningGymTask: {name!r} refuses its config; look at {wrong}. {type(error).__name__}: {error}"
        ) from error


def _check_fields(name: str, config: Mapping[str, Any], known: set[str]) -> None:
    for field in config:
        if field in ("size", "seed"):
            raise ValueError(f"ReasoningGymTask: {field} is an argument of its own, not a field of config ({name!r}).")
        if field not in known:
            close = difflib.get_close_matches(field, known) or sorted(known - {"size", "seed"})
            raise ValueError(f"ReasoningGymTask: {name!r} has no config field {field!r}; did you mean one of {close}?")


def _wrong_fields(build: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of which each one alone, left at its default, makes the configuration work; else all of them."""
    wrong = {}
    for field, value in config.items():
        try:
            build({other: config[other] for other in config if other != field})
        except Exception:
            continue
        wrong[field] = value
    return wrong or dict(config)


def _with_dataset_specs(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of "composite" with tables turned into the objects it wants."""
    from reasoning_gym.composite import DatasetSpec

    def as_spec(spec: Any) -> Any:
        return DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) if isinstance(spec, Mapping) else spec

    return {**config, "datasets": [as_spec(spec) for spec in config.get("datasets", [])]}
