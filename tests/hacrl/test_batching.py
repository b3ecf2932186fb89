"""From samples to updates, micro-batches and tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.batching import Sample, TokenBatch, micro_batches, reaches_model, split_updates, to_tensors

CPU = torch.device("cpu")


def sample(prompt_index: int = 0, prompt: int = 2, response: int = 3, **fields: object) -> Sample:
    defaults: dict[str, object] = {"is_cross": False, "advantage": 1.0}
    return Sample(prompt_index, [1] * prompt, list(range(10, 10 + response)), **{**defaults, **fields})  # type: ignore[arg-type]


def test_token_batch_rows_predict_the_response_tokens() -> None:
    batch = TokenBatch.build([([1, 2], [3, 4, 5]), ([6], [7])], CPU)
    ids = batch.input_ids.reshape(-1)
    assert ids[batch.rows + 1].tolist() == batch.target_ids.tolist() == [3, 4, 5, 7]
    assert batch.cu_seqlens.tolist() == [0, 3, 4]


def test_token_batch_padding_is_outside_the_attention_mask() -> None:
    batch = TokenBatch.build([([1, 2], [3, 4, 5]), ([6], [7])], CPU)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4]
    assert batch.position_ids[1, :2].tolist() == [0, 1]


def test_split_updates_keeps_the_responses_to_a_prompt_together() -> None:
    samples = [sample(index % 5, is_cross=index % 2 == 0) for index in range(20)]
    parts = split_updates(samples, 2, seed=3)
    prompts = [{s.prompt_index for s in part} for part in parts]
    assert prompts[0].isdisjoint(prompts[1])
    assert sum(len(part) for part in parts) == 20
    assert {len(p) for p in prompts} == {2, 3}


def test_split_updates_depends_on_the_seed_and_not_on_the_order_of_prompts() -> None:
    samples = [sample(index) for index in range(12)]

    def prompts(given: list[Sample], seed: int) -> list[list[int]]:
        return [[s.prompt_index for s in part] for part in split_updates(given, 3, seed)]

    assert prompts(samples, 1) == prompts(samples[::-1], 1)
    assert prompts(samples, 1) != prompts(samples, 2)


def test_split_updates_more_updates_than_prompts_raises() -> None:
    with pytest.raises(ValueError, match="3 updates need at least as many prompts, got 2"):
        split_updates([sample(0), sample(1)], 3, seed=0)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    samples = [sample(index, prompt=1, response=length) for index, length in enumerate(lengths)]
    groups = micro_batches(samples, budget)
    assert sorted(s.prompt_index for group in groups for s in group) == list(range(len(samples)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(s.num_tokens for s in group) <= budget


@pytest.mark.parametrize(
    ("advantage", "is_cross", "beta", "expected"),
    [(1.0, False, 0.0, True), (0.0, False, 0.0, False), (0.0, False, 0.1, True), (0.0, True, 0.1, False)],
)
def test_reaches_model_only_what_can_have_a_gradient(
    advantage: float, is_cross: bool, beta: float, expected: bool
) -> None:
    assert reaches_model(sample(advantage=advantage, is_cross=is_cross), beta) is expected


def test_to_tensors_of_cross_samples_alone_has_the_log_probs_that_the_loss_asks_for() -> None:
    _, sequences = to_tensors([sample(response=2, is_cross=True)], CPU, with_ref=True)
    assert sequences.ref_logprobs is not None and sequences.ref_logprobs.tolist() == [0.0, 0.0]


def test_to_tensors_puts_zeros_for_the_log_probs_that_cross_samples_lack() -> None:
    own = sample(response=2, ref_logprobs=torch.tensor([-1.0, -2.0]))
    cross = sample(response=1, is_cross=True, weight=0.5, length=7)
    _, sequences = to_tensors([own, cross], CPU, with_ref=True)
    assert sequences.ref_logprobs is not None and sequences.ref_logprobs.tolist() == [-1.0, -2.0, 0.0]
    assert sequences.old_logprobs is None
    assert sequences.lengths is not None and sequences.lengths.tolist() == [1, 7]
    assert sequences.is_cross is not None and sequences.is_cross.tolist() == [False, True]
