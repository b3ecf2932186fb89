from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hacrl.prompting import encode_prompt, flat_ids

TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think is defined and not think %}<t>{% endif %}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def make_tokenizer(template: str | None = TEMPLATE, single: str = "<s> $A </s>") -> PreTrainedTokenizerFast:
    """Bytes, with special tokens that the tokenizer puts around a text as `single` says."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<t>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    pairs = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def shown(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def test_encode_prompt_template_has_one_begin_of_text_and_the_generation_prompt() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, "2+2", chat_template=True)
    assert shown(tokenizer, ids) == "<s><|user|>2+2<|assistant|>"
    assert ids[1] == tokenizer.convert_tokens_to_ids("<|user|>")


def test_encode_prompt_template_gets_the_system_message() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, "2+2", chat_template=True, system="be brief")
    assert shown(tokenizer, ids) == "<s><|system|>be brief<|user|>2+2<|assistant|>"


def test_encode_prompt_template_gets_its_arguments() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, "2+2", chat_template=True, template_kwargs={"think": False})
    assert shown(tokenizer, ids) == "<s><|user|>2+2<|assistant|><t>"


def test_encode_prompt_plain_has_one_begin_of_text_and_no_end() -> None:
    tokenizer = make_tokenizer()
    assert shown(tokenizer, encode_prompt(tokenizer, "2+2", chat_template=False)) == "<s>2+2"


def test_encode_prompt_plain_without_begin_of_text_gets_none() -> None:
    tokenizer = make_tokenizer(single="$A")
    assert shown(tokenizer, encode_prompt(tokenizer, "2+2", chat_template=False)) == "2+2"


def test_encode_prompt_plain_text_like_begin_of_text_stays_text() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, "<s>2", chat_template=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert shown(tokenizer, ids) == "<s><s>2"


def test_encode_prompt_plain_puts_the_system_text_in_front() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, "2+2", chat_template=False, system="be brief")
    assert shown(tokenizer, ids) == "<s>be brief\n\n2+2"


def test_encode_prompt_longer_than_the_limit_is_refused_not_cut() -> None:
    tokenizer = make_tokenizer()
    assert len(encode_prompt(tokenizer, "2+2", chat_template=False, max_length=4)) == 4
    with pytest.raises(ValueError, match="at most max_length = 3 ids, got 4"):
        encode_prompt(tokenizer, "2+2", chat_template=False, max_length=3)


def test_encode_prompt_empty_raises() -> None:
    with pytest.raises(ValueError, match="has no ids"):
        encode_prompt(make_tokenizer(single="$A"), "", chat_template=False)


def test_encode_prompt_tokenizer_without_template_raises() -> None:
    with pytest.raises(ValueError, match="chat_template=True, but the tokenizer has none"):
        encode_prompt(make_tokenizer(template=None), "2+2", chat_template=True)


def test_encode_prompt_arguments_without_template_raise() -> None:
    with pytest.raises(ValueError, match="need chat_template=True"):
        encode_prompt(make_tokenizer(), "2+2", chat_template=False, template_kwargs={"think": False})


def test_encode_prompt_template_without_system_role_raises_clearly() -> None:
    with pytest.raises(ValueError, match=r"refuses messages of the roles \['system', 'user'\]: no system role"):
        encode_prompt(make_tokenizer(NO_SYSTEM), "2+2", chat_template=True, system="be brief")


class FakeTokenizer:
    chat_template = "yes"

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def apply_chat_template(self, messages: object, **keywords: object) -> object:
        assert keywords["return_dict"] is True  # what an unset value means changed between versions
        return self.returned


@pytest.mark.parametrize(
    "returned",
    [
        {"input_ids": [4, 5], "attention_mask": [1, 1]},
        UserDict(input_ids=[[4, 5]]),
        UserDict(input_ids=torch.tensor([[4, 5]])),
        [4, 5],
        [[4, 5]],
        torch.tensor([4, 5]),
    ],
)
def test_encode_prompt_whatever_the_template_returns_gives_the_ids(returned: Any) -> None:
    assert encode_prompt(FakeTokenizer(returned), "q", chat_template=True) == [4, 5]


@pytest.mark.parametrize("encoded", ["4 5", {"ids": [4]}, [4.0], 4])
def test_flat_ids_something_else_raises(encoded: object) -> None:
    with pytest.raises(TypeError, match="flat_ids"):
        flat_ids(encoded)


def test_flat_ids_two_texts_raise() -> None:
    with pytest.raises(ValueError, match="got 2 lists"):
        flat_ids([[1], [2]])
