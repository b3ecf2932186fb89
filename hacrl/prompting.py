"""Each agent's own rendering of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    chat_template: bool,
    system: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> list[int]:
    """The ids after which an agent writes its response.

        chat_template=True:  apply_chat_template([system, user], add_generation_prompt=True, **template_kwargs)
        chat_template=False: encode(system + "\\n\\n" + question), after what the tokenizer puts in front of a text

    A begin-of-text token appears once: a template writes its own, and the tokenizer adds none to it. Without a template
    nothing is added at the end (no end token after a prompt), and text that looks like a special token stays text.

    Args:
        question: the text shown to the agent.
        chat_template: render with the tokenizer's chat template.
        system: the system message.
        template_kwargs: further arguments of the template, for example {"enable_thinking": False}. What the template
            then puts after the generation prompt belongs to the prompt, not to the response.
        max_length: the largest number of ids allowed. A longer prompt is refused, never cut.

    Returns:
        (n,) ids, n >= 1.

    Raises:
        ValueError: the tokenizer has no chat template, the template refuses the messages, `template_kwargs` without a
            template, or a prompt that is empty or longer than `max_length`.
    """
    if chat_template:
        ids = _render(tokenizer, question, system, dict(template_kwargs or {}))
    elif template_kwargs:
        raise ValueError(f"encode_prompt: template_kwargs {dict(template_kwargs)} need chat_template=True.")
    else:
        text = question if system is None else f"{system}\n\n{question}"
        ids = _encode_after_leading_special(tokenizer, text)
    if not ids:
        raise ValueError(f"encode_prompt: the prompt {question!r:.60} has no ids; a model needs at least one.")
    if max_length is not None and len(ids) > max_length:
        raise ValueError(
            f"encode_prompt: the prompt must have at most max_length = {max_length} ids, got {len(ids)}: "
            f"{question!r:.60}. Raise the limit or drop the prompt."
        )
    return ids


def _render(
    tokenizer: PreTrainedTokenizerBase, question: str, system: str | None, template_kwargs: dict[str, Any]
) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("encode_prompt: chat_template=True, but the tokenizer has none; use chat_template=False.")
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    from jinja2.exceptions import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
        )
    except TemplateError as error:  # some templates know no system message
        roles = [message["role"] for message in messages]
        raise ValueError(f"encode_prompt: the chat template refuses messages of the roles {roles}: {error}") from error
    return flat_ids(rendered)


def flat_ids(encoded: object) -> list[int]:
    """The ids in whatever a tokenizer returned for one text: a mapping with "input_ids", a tensor or array, a list, or
    a batch of one of these.

    Raises:
        TypeError: something else. ValueError: a batch of several texts.
    """
    if isinstance(encoded, Mapping):  # a BatchEncoding is a UserDict, hence a Mapping but no dict
        if "input_ids" not in encoded:
            raise TypeError(f"flat_ids: the encoding must have 'input_ids', it has {list(encoded)}.")
        encoded = encoded["input_ids"]
    if hasattr(encoded, "tolist"):
        encoded = encoded.tolist()
    if not isinstance(encoded, Sequence) or isinstance(encoded, str):
        raise TypeError(f"flat_ids: a tokenizer must return ids, got {type(encoded).__name__}.")
    if encoded and isinstance(encoded[0], Sequence):
        if len(encoded) != 1:
            raise ValueError(f"flat_ids: one text has one list of ids, got {len(encoded)} lists.")
        return flat_ids(encoded[0])
    if not all(isinstance(token, int) for token in encoded):
        raise TypeError(f"flat_ids: ids must be ints, got {encoded!r:.80}.")
    return [int(token) for token in encoded]


def _encode_after_leading_special(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of `text` after what the tokenizer puts in front of a text, without what it puts behind it."""
    whole = flat_ids(tokenizer.encode(text, add_special_tokens=True, split_special_tokens=True))
    plain = flat_ids(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[: start + len(plain)]
    return plain
