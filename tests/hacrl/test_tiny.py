"""The tiny agents: their task, their tokenizers and the files that ship."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl import tiny
from hacrl.tiny import make
from hacrl.tiny.chain import ChainModConfig, ChainModDataset, work_out

QUESTION = "7*3+5-2*4+8-6="
RESPONSE = "04 09 07 11 02 13"


def dataset(seed: int, size: int = 200, **settings: int) -> ChainModDataset:
    return ChainModDataset(ChainModConfig(seed=seed, size=size, **settings))


@pytest.fixture(scope="module", params=tiny.NAMES)
def agent(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    folder = tiny.path(request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {name: AutoTokenizer.from_pretrained(tiny.path(name), local_files_only=True) for name in tiny.NAMES}


def test_work_out_reads_from_left_to_right_without_precedence() -> None:
    problem = work_out(7, [("*", 3), ("+", 5), ("-", 2), ("*", 4), ("+", 8), ("-", 6)])
    assert (problem.question, problem.response) == (QUESTION, RESPONSE)


def test_work_out_negative_difference_wraps_around_the_modulus() -> None:
    assert work_out(1, [("-", 9)]).results == (9,)


def test_work_out_unknown_operator_raises() -> None:
    with pytest.raises(ValueError, match="operator"):
        work_out(1, [("/", 2)])


def test_chain_mod_is_registered_with_reasoning_gym() -> None:
    created = reasoning_gym.create_dataset("chain_mod", seed=3, size=5)
    assert [created[i] for i in range(5)] == [dataset(3)[i] for i in range(5)]


def test_chain_mod_items_agree_with_plain_python() -> None:
    for i in range(50):
        item = dataset(4)[i]
        first, *operations = re.findall(r"[+*-]?\d+", item["question"])
        value = int(first)
        for operation in operations:
            value = eval(f"({value}{operation}) % 17")
        assert item["answer"] == str(value) and int(item["metadata"]["response"].split()[-1]) == value


def test_chain_mod_neighbouring_seeds_share_hardly_any_question() -> None:
    questions = [{item["question"] for item in dataset(seed)} for seed in (0, 1)]
    assert len(questions[0] & questions[1]) <= 1


def test_chain_mod_items_do_not_depend_on_the_hash_seed() -> None:
    program = "from hacrl.tiny.chain import *; print(ChainModDataset(ChainModConfig(seed=5))[7]['question'])"
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert printed.stdout.decode().strip() == dataset(5)[7]["question"]


def test_chain_mod_settings_are_followed() -> None:
    item = dataset(0, num_operations=3, modulus=5, max_operand=2)[0]
    assert re.fullmatch(r"[12]([+*-][12]){3}=", item["question"])
    assert re.fullmatch(r"[0-4] [0-4] [0-4]", item["metadata"]["response"])


@pytest.mark.parametrize("field", ["num_operations", "modulus", "max_operand", "size"])
def test_chain_mod_setting_out_of_range_raises(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ChainModConfig(**{field: 0}).validate()


def test_chain_mod_index_out_of_range_raises() -> None:
    with pytest.raises(IndexError, match="idx"):
        dataset(0, size=3)[3]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("13", 1.0),
        (RESPONSE, 1.0),
        (RESPONSE + "\n", 1.0),
        ("wrong 01 13", 1.0),
        ("013", 1.0),
        ("13 04", 0.0),
        ("113", 0.0),
        ("1 3", 0.0),
        ("-13", 0.0),
        ("13.0", 0.0),
        ("13.", 0.0),
        ("13 x", 0.0),
        ("x13", 0.0),
        ("\u0661\u0663", 0.0),
        ("9" * 10_000, 0.0),
        ("garbage", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_score_answer_counts_only_an_exact_last_number(answer: str | None, score: float) -> None:
    assert dataset(0).score_answer(answer, {"answer": "13"}) == score


def test_score_answer_zero_written_with_two_digits_is_right() -> None:
    assert dataset(0).score_answer("16 00", {"answer": "0"}) == 1.0


def test_path_unknown_name_raises_and_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="digits, pairs"):
        tiny.path("words")


def test_tokenizers_split_a_response_differently(tokenizers: dict[str, Any]) -> None:
    ids = {name: tokenizer.encode(RESPONSE, add_special_tokens=False) for name, tokenizer in tokenizers.items()}
    assert [len(ids["digits"]), len(ids["pairs"])] == [17, 11]


def test_tokenizers_render_the_prompt_differently(tokenizers: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for tokenizer in tokenizers.values()
    ]
    assert prompts == [f"<s>Q:{QUESTION}\nA:", f"<|user|>{QUESTION}<|assistant|>"]


def test_tokenizers_share_no_special_token(tokenizers: dict[str, Any]) -> None:
    first, second = (set(tokenizer.all_special_tokens) for tokenizer in tokenizers.values())
    assert first and second and not first & second


def test_tokenizers_end_and_padding_are_one_token_only_in_pairs(tokenizers: dict[str, Any]) -> None:
    assert tokenizers["digits"].pad_token_id != tokenizers["digits"].eos_token_id
    assert tokenizers["pairs"].pad_token_id == tokenizers["pairs"].eos_token_id


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("text", [RESPONSE, QUESTION, "", " 1  23 456 ,.", "a 'm n't ?", "\u00e9\u2713 \U0001f600\n"])
def test_tokenizer_decodes_what_it_encoded(tokenizers: dict[str, Any], name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and not set(ids) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_tokenizer_shipped_is_the_one_the_script_builds(tokenizers: dict[str, Any], name: str) -> None:
    built = make.BUILDERS[name][0]()
    assert built.get_vocab() == tokenizers[name].get_vocab()
    assert built.chat_template == tokenizers[name].chat_template


def test_agents_have_different_architectures() -> None:
    assert len({type(AutoModelForCausalLM.from_pretrained(tiny.path(name))) for name in tiny.NAMES}) == 2


def test_agent_answers_with_worked_steps_and_solves_some_problems(agent: tuple[Any, Any]) -> None:
    model, tokenizer = agent
    torch.manual_seed(0)
    items = [dataset(6)[i] for i in range(64)]
    prompts = make.render(tokenizer, [item["question"] for item in items])
    inputs = tokenizer(prompts, add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(re.fullmatch(r"\d\d( \d\d){5}", text) is not None for text in texts) >= 60
    solved = sum(dataset(6).score_answer(text, item) for text, item in zip(texts, items, strict=True)) / 64
    assert 0.2 <= solved <= 0.8


def test_encode_labels_are_the_response_and_the_end_token() -> None:
    tokenizer = make.pairs_tokenizer()
    input_ids, labels = make.encode(tokenizer, [work_out(1, [("+", 2), ("*", 3)])])
    assert tokenizer.decode(input_ids[0]) == "<|user|>1+2*3=<|assistant|>03 09<|end|>"
    assert tokenizer.decode(labels[0][labels[0] != -100]) == "03 09<|end|>"


def test_warm_up_same_seed_gives_the_same_weights() -> None:
    recipe = make.Recipe(max_steps=3, batch_size=2, turn_loss=1000.0, check_every=2, check_size=4)
    weights = []
    for _ in range(2):
        torch.manual_seed(1)
        tokenizer = make.digits_tokenizer()
        model = make.warm_up(make.digits_model(tokenizer), tokenizer, recipe, 1, lambda line: None)
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(*weights)
