"""The transformers engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hacrl import tiny
from hacrl.agent import load_pretrained
from hacrl.engines.transformers import Generated, TransformersEngine, cut_at_end, end_token_ids
from hacrl.prompting import encode_prompt


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), ([2, 5], (2, 5))])
def test_end_token_ids_of_int_list_or_none(eos: object, expected: tuple[int, ...]) -> None:
    assert end_token_ids(SimpleNamespace(eos_token_id=eos)) == expected


def test_cut_at_end_keeps_the_end_token_when_padding_is_the_same_token() -> None:
    assert cut_at_end([5, 6, 2, 2, 2], [2]) == Generated([5, 6, 2], True)


def test_cut_at_end_row_without_end_token_is_unfinished() -> None:
    assert cut_at_end([5, 6], [2, 7]) == Generated([5, 6], False)


@pytest.fixture(scope="module")
def engine_and_prompts() -> tuple[TransformersEngine, list[list[int]]]:
    model, tokenizer = load_pretrained(str(tiny.path("pairs")), torch.float32, torch.device("cpu"))
    questions = ["7*3+5-2*4+8-6=", "1+1=", "9*9-3="]
    return TransformersEngine(model, end_token_ids(model.generation_config)), [
        encode_prompt(tokenizer, question, chat_template=True) for question in questions
    ]


def test_generate_left_padded_prompts_give_the_responses_they_give_alone(
    engine_and_prompts: tuple[TransformersEngine, list[list[int]]],
) -> None:
    engine, prompts = engine_and_prompts
    settings = {"samples": 1, "seed": 0, "max_new_tokens": 12, "greedy": True}
    together = engine.generate(prompts, batch_size=8, **settings)  # type: ignore[arg-type]
    alone = [engine.generate([prompt], batch_size=8, **settings)[0] for prompt in prompts]  # type: ignore[arg-type]
    assert together == alone


def test_generate_same_seed_gives_the_same_responses_and_another_seed_others(
    engine_and_prompts: tuple[TransformersEngine, list[list[int]]],
) -> None:
    engine, prompts = engine_and_prompts

    def sampled(seed: int) -> list[list[Generated]]:
        return engine.generate(prompts, samples=4, seed=seed, max_new_tokens=12, batch_size=4)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_generate_leaves_the_global_random_state_alone(
    engine_and_prompts: tuple[TransformersEngine, list[list[int]]],
) -> None:
    engine, prompts = engine_and_prompts
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    engine.generate(prompts, samples=2, seed=1, max_new_tokens=4, batch_size=4)
    assert torch.equal(torch.random.get_rng_state(), before)
