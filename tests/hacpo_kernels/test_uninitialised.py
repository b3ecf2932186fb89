"""Every output is written: memory that torch.empty returns is full of NaN here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hacpo_kernels import HACPOConfig, token_logprobs

from .builders import assert_matches, leaf, make_case, with_sequences


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def test_empty_memory_is_poisoned() -> None:
    assert torch.empty(8).isnan().all()


CONFIGS = {
    "hacpo": HACPOConfig(), "hacpo+kl": HACPOConfig(beta=0.1), "naive": HACPOConfig.naive(), "gspo": HACPOConfig.gspo(),
    "grpo": HACPOConfig.grpo(), "token+cross": HACPOConfig(ratio="token", epsilon_low=0.2, epsilon_high=0.28),
}  # fmt: skip


@pytest.mark.parametrize("vocab_size", (16, 1057))
@pytest.mark.parametrize("masked", (False, True), ids=("all rows", "masked"))
@pytest.mark.parametrize("name", CONFIGS)
def test_hacpo_loss_reads_nothing_unwritten(name: str, masked: bool, vocab_size: int, backend: str) -> None:
    case = make_case([3, 0, 2, 1], vocab_size, config=CONFIGS[name], mask=masked, seed=4)
    out = assert_matches(case, backend).out
    assert torch.isfinite(out.ratios).all()
    assert torch.isfinite(out.logprobs).all()


@pytest.mark.parametrize("kind", ("all cross", "all self", "all dead", "all empty"))
def test_hacpo_loss_of_one_kind_reads_nothing_unwritten(kind: str, backend: str) -> None:
    case = make_case([0, 0] if kind == "all empty" else [3, 2], 33, cross=[kind == "all cross"] * 2)
    if kind == "all dead":
        case = with_sequences(case, advantages=torch.zeros(2))
    assert_matches(case, backend)


@pytest.mark.parametrize("entropy", (False, True), ids=("logprobs", "entropy"))
def test_token_logprobs_with_ignored_rows_reads_nothing_unwritten(entropy: bool, backend: str) -> None:
    logits = leaf(torch.ones(4, 1057))
    result = token_logprobs(logits, torch.tensor([0, -100, 1056, -100]), entropy=entropy, backend=backend)
    outputs = result if isinstance(result, tuple) else (result,)
    torch.stack(outputs).sum().backward()
    assert all(torch.isfinite(output).all() for output in outputs)
    assert torch.isfinite(logits.grad).all()
