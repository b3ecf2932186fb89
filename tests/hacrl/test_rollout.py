from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hacrl.rollout import Prompt, Rollout, RolloutPool


def make_rollout(index: int = 0, source: str = "a", **changes: Any) -> Rollout:
    fields: dict[str, Any] = {"policy_version": 0, "ids": [5, 6, 2], "text": "x", "finished": True}
    return Rollout(prompt=Prompt(index, f"question {index}", {}), source=source, **{**fields, **changes})


def test_prompt_negative_index_raises() -> None:
    with pytest.raises(ValueError, match="index must be >= 0"):
        Prompt(-1, "q", {})


def test_prompt_question_not_text_raises() -> None:
    with pytest.raises(TypeError, match="question must be a str"):
        Prompt(0, ["q"], {})  # type: ignore[arg-type]


def test_rollout_old_logprobs_one_per_id_is_accepted() -> None:
    assert make_rollout(old_logprobs=torch.zeros(3)).old_logprobs is not None


@pytest.mark.parametrize("length", [2, 4])
def test_rollout_old_logprobs_of_other_length_raises(length: int) -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), got"):
        make_rollout(old_logprobs=torch.zeros(length))


def test_rollout_old_logprobs_in_low_precision_raises() -> None:
    with pytest.raises(TypeError, match="float32"):
        make_rollout(old_logprobs=torch.zeros(3, dtype=torch.bfloat16))


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), (1, 2), [np.int64(1)], [1.0], [True]])
def test_rollout_ids_not_a_list_of_ints_raises(ids: object) -> None:
    with pytest.raises(TypeError, match="list of ints"):
        make_rollout(ids=ids)


def test_rollout_negative_id_raises() -> None:
    with pytest.raises(ValueError, match="ids must be >= 0, got -100"):
        make_rollout(ids=[1, -100])


def test_rollout_finished_without_ids_raises() -> None:
    with pytest.raises(ValueError, match="end token"):
        make_rollout(ids=[])


def test_rollout_unfinished_without_ids_is_accepted() -> None:
    assert make_rollout(ids=[], finished=False).ids == []


@pytest.mark.parametrize("name", ["reward", "source_mean_logprob"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rollout_number_not_finite_raises(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        make_rollout(0, "a", **{name: value})


def test_rollout_without_source_raises() -> None:
    with pytest.raises(ValueError, match="source must name"):
        make_rollout(source="")


def test_validate_field_filled_in_wrongly_raises() -> None:
    rollout = make_rollout()
    rollout.old_logprobs = torch.zeros(4)
    with pytest.raises(ValueError, match="old_logprobs"):
        rollout.validate()


def test_groups_interleaved_prompts_are_grouped_by_prompt() -> None:
    rollouts = [make_rollout(1), make_rollout(0), make_rollout(1, "b"), make_rollout(0, "b")]
    groups = RolloutPool(rollouts).groups()
    assert groups == [[rollouts[0], rollouts[2]], [rollouts[1], rollouts[3]]]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"))))
def test_groups_any_order_hold_every_rollout_once(keys: list[tuple[int, str]]) -> None:
    pool = RolloutPool([make_rollout(index, source) for index, source in keys])
    grouped = [rollout for group in pool.groups() for rollout in group]
    assert sorted(map(id, grouped)) == sorted(map(id, pool))
    assert all(len({rollout.prompt.index for rollout in group}) == 1 for group in pool.groups())


def test_extend_two_questions_under_one_index_raises() -> None:
    pool = RolloutPool([make_rollout(0)])
    other = Rollout(Prompt(0, "another", {}), "b", 0, [1], "x", True)
    with pytest.raises(ValueError, match="two questions"):
        pool.extend([other])


def test_extend_rollout_changed_to_be_invalid_raises() -> None:
    rollout = make_rollout()
    rollout.reward = math.nan
    with pytest.raises(ValueError, match="reward"):
        RolloutPool().extend([rollout])


def test_counts_two_sources_are_counted_apart() -> None:
    assert RolloutPool([make_rollout(), make_rollout(source="b"), make_rollout(1)]).counts() == {"a": 2, "b": 1}


def test_pool_length_is_number_of_rollouts() -> None:
    assert len(RolloutPool([make_rollout(), make_rollout(1)])) == 2


def test_mean_rewards_unscored_rollout_is_left_out() -> None:
    pool = RolloutPool([make_rollout(reward=1.0), make_rollout(reward=0.0), make_rollout(), make_rollout(source="b")])
    assert pool.mean_rewards(["a", "b"]) == {"a": 0.5, "b": None}


def test_mean_rewards_source_not_named_raises() -> None:
    with pytest.raises(ValueError, match="lack 'a'"):
        RolloutPool([make_rollout()]).mean_rewards(["b"])


def test_unscored_counts_rollouts_without_reward() -> None:
    pool = RolloutPool([make_rollout(reward=1.0), make_rollout(), make_rollout(source="b", reward=0.0)])
    assert pool.unscored() == {"a": 1}
