"""`chain_mod`: chains of + - * worked out from left to right modulo a small number, as a reasoning-gym dataset.

The question is a chain such as `4*3+5-2*4+1-3=`. It is read strictly from left to right, without precedence, and every
intermediate result is reduced modulo 17. The worked response lists the intermediate results, zero padded to one width
and separated by single spaces: `12 00 15 09 10 07`. Only its last number is checked.

Importing this module registers the dataset: `reasoning_gym.create_dataset("chain_mod", size=500, seed=1)`.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from reasoning_gym.factory import DATASETS, ProceduralDataset, register_dataset

DATASET_NAME = "chain_mod"

OPERATORS = "+-*"

# The last word must be a number as a whole; [0-9] because \d also takes digits of other scripts, which int() accepts.
_LAST_NUMBER = re.compile(r"(?:^|\s)([0-9]+)\s*\Z")


@dataclass
class ChainModConfig:
    """Settings of `chain_mod`.

    Attributes:
        num_operations: operations in a chain; it has one operand more.
        modulus: every intermediate result is reduced modulo this number.
        max_operand: operands are drawn uniformly from 1 to this number, operators uniformly from + - *.
        seed: together with the index it determines an item; None draws a random seed.
        size: number of items.
    """

    num_operations: int = 6
    modulus: int = 17
    max_operand: int = 5
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a setting is out of range.
        """
        for name, low in (("num_operations", 1), ("modulus", 2), ("max_operand", 1), ("size", 1)):
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"ChainModConfig: {name} must be >= {low}, got {value}.")


@dataclass(frozen=True)
class Problem:
    """One chain.

    Attributes:
        question: the chain, ending in `=`.
        results: the intermediate results in order; the last one is the answer.
        modulus: what they are reduced by.
    """

    question: str
    results: tuple[int, ...]
    modulus: int

    @property
    def response(self) -> str:
        """The worked steps: the results zero padded to the width of the largest residue, joined by spaces."""
        width = len(str(self.modulus - 1))
        return " ".join(f"{result:0{width}d}" for result in self.results)


def work_out(first: int, operations: list[tuple[str, int]], modulus: int = 17) -> Problem:
    """The chain that starts with `first` and applies `operations` from left to right.

    Args:
        first: the first operand.
        operations: pairs of an operator out of + - * and the operand to its right.
        modulus: at least 2.

    Returns:
        The chain with its intermediate results.

    Raises:
        ValueError: an operator is unknown.
    """
    value = first
    question = str(first)
    results = []
    for operator, operand in operations:
        question += f"{operator}{operand}"
        if operator == "+":
            value += operand
        elif operator == "-":
            value -= operand
        elif operator == "*":
            value *= operand
        else:
            raise ValueError(f"work_out: operator must be one of {' '.join(OPERATORS)}, got {operator!r}.")
        value %= modulus
        results.append(value)
    return Problem(question + "=", tuple(results), modulus)


class ChainModDataset(ProceduralDataset):
    """Chains of + - * modulo a small number; see the module's docstring."""

    def __init__(self, config: ChainModConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Item number `idx`, which depends only on the settings, the seed and `idx`.

        Args:
            idx: 0 <= idx < size.

        Returns:
            `question` (str), `answer` (the last result as text, not padded) and `metadata`, in which `response` is
            the worked response.

        Raises:
            IndexError: idx is out of range.
        """
        if not 0 <= idx < self.size:
            raise IndexError(f"ChainModDataset: idx must be in [0, {self.size}), got {idx}.")
        # A string seeds through SHA-512, whatever PYTHONHASHSEED is. Random(seed + idx), the usual way in
        # reasoning-gym, would make the datasets of two neighbouring seeds share all items but one.
        rng = Random(f"{DATASET_NAME}:{self.seed}:{idx}")
        config = self.config
        first = rng.randint(1, config.max_operand)
        operations = [(rng.choice(OPERATORS), rng.randint(1, config.max_operand)) for _ in range(config.num_operations)]
        problem = work_out(first, operations, config.modulus)
        return {
            "question": problem.question,
            "answer": str(problem.results[-1]),
            "metadata": {
                "source_dataset": DATASET_NAME,
                "source_index": idx,
                "response": problem.response,
                "results": list(problem.results),
                "difficulty": {"num_operations": config.num_operations, "modulus": config.modulus},
            },
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """1.0 if the response ends in the right number, else 0.0; there is no partial credit.

        Args:
            answer: a whole response. Its last whitespace-separated word has to be a number; leading zeros are fine.
            entry: the item as `__getitem__` returned it.

        Returns:
            1.0 or 0.0; 0.0 for None, for an empty response and for one whose last word is anything but digits.
        """
        if not isinstance(answer, str):
            return 0.0
        match = _LAST_NUMBER.search(answer)
        if match is None:
            return 0.0
        # As text, because int() refuses very long digit strings with an exception.
        return float((match.group(1).lstrip("0") or "0") == entry["answer"])


# The registry refuses a second registration, and a reloaded module would ask for one.
if DATASET_NAME not in DATASETS:
    register_dataset(DATASET_NAME, ChainModDataset, ChainModConfig)
