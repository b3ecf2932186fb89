"""Between the ids and the text of a response, for one tokenizer.

A response is a continuation: its ids follow a prompt. Tokenizers are made for whole texts, and some of them add a space
in front of what they encode, or strip one from what they decode. The functions here do neither.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NEWLINE = "\n"


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], end_ids: Collection[int] = ()) -> str:
    """The text of a response, decoded at once.

    Like `tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`, and besides:

    - every token that is special leaves no text, and so does a final id that is in `end_ids` (an end token of the
      generation configuration need not be special),
    - a leading space stays: nothing is stripped from the front,
    - the bytes of an unfinished character at the end are dropped; they do not become U+FFFD. A U+FFFD that was written
      out in full survives.

    Args:
        ids: (n,) sampled ids, with or without the end token.
        end_ids: ids that end a response.

    Returns:
        The text; "" when nothing but special tokens was generated.
    """
    traits = _traits(tokenizer)
    content = ids[:-1] if len(ids) and ids[-1] in end_ids else ids
    kept = [int(token) for token in content if token not in traits.control_ids]
    pending = _pending_bytes(tokenizer, kept, traits) if kept else 0
    if pending and traits.falls_back_to_bytes:  # one token per byte, and one bad byte would spoil its whole run
        return _decode(tokenizer, kept[:-pending], traits)
    text = _decode(tokenizer, kept, traits)
    return text.removesuffix("\ufffd") if pending else text


def response_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of `text` as a continuation: no special token is added, and none is read out of the text.

    Like `tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)`, but without the space that some
    tokenizers put in front of every text.
    """
    traits = _traits(tokenizer)
    if traits.adds_space:
        prefix, whole = _encode(tokenizer, _NEWLINE), _encode(tokenizer, _NEWLINE + text)
        ids = whole[len(prefix) :]
        if whole[: len(prefix)] == prefix and _decode(tokenizer, ids, traits) == text:
            return ids
    return _encode(tokenizer, text)


def control_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all special tokens, the unknown token included: none of them stands for text."""
    return _traits(tokenizer).control_ids


def same_tokenization(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether an id means the same in both, and every text gets the same ids.

    Model (vocabulary, merges), normalizer, pre-tokenizer, decoder and added tokens have to agree. Two tokenizers
    without a `tokenizers` backend cannot be compared and count as different unless they are one object.
    """
    if a is b:
        return True
    first, second = _traits(a).fingerprint, _traits(b).fingerprint
    return first is not None and first == second


class _Traits:
    """What has to be known about a tokenizer, found out once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.version = _version(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {index for index, token in added.items() if token.special}
        self.control_ids = frozenset({*tokenizer.all_special_ids, *special})
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(self._backend, "decoder", None)
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        decoders = {part.get("type") for part in state.get("decoders", [state])}
        self.is_byte_level = "ByteLevel" in decoders or hasattr(tokenizer, "byte_decoder")
        self.falls_back_to_bytes = "ByteFallback" in decoders
        self.anchor = self._find_anchor(tokenizer) if decoders & {"Metaspace", "Strip"} else []
        self.adds_space = _decode(tokenizer, _encode(tokenizer, "a"), self) == " a"

    @staticmethod
    def _find_anchor(tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Ids to put in front of what is decoded, when decoding strips a leading space; [] when it does not."""
        anchor = _encode(tokenizer, " a")
        once, twice = _plain_decode(tokenizer, anchor), _plain_decode(tokenizer, anchor + anchor)
        return anchor if once and twice != once + once and twice.startswith(once) else []

    @cached_property
    def fingerprint(self) -> str | None:
        if self._backend is None:
            return None
        state = json.loads(self._backend.to_str())
        # padding, truncation and the post-processor (which adds special tokens) take no part in coding a response
        parts = {name: state[name] for name in ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_KNOWN_TRAITS: WeakKeyDictionary[PreTrainedTokenizerBase, _Traits] = WeakKeyDictionary()


def _version(tokenizer: PreTrainedTokenizerBase) -> tuple[int, tuple[int, ...]]:
    """Changes when tokens are added or made special."""
    return len(tokenizer), tuple(tokenizer.all_special_ids)


def _traits(tokenizer: PreTrainedTokenizerBase) -> _Traits:
    traits = _KNOWN_TRAITS.get(tokenizer)
    if traits is None or traits.version != _version(tokenizer):
        traits = _KNOWN_TRAITS[tokenizer] = _Traits(tokenizer)
    return traits


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def _plain_decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)) if ids else ""


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], traits: _Traits) -> str:
    """The text of `ids` after something else, so that a leading space stays."""
    if not traits.anchor or not ids:
        return _plain_decode(tokenizer, ids)
    prefix, whole = _plain_decode(tokenizer, traits.anchor), _plain_decode(tokenizer, traits.anchor + ids)
    return whole[len(prefix) :] if whole.startswith(prefix) else _plain_decode(tokenizer, ids)


def _pending_bytes(tokenizer: PreTrainedTokenizerBase, ids: list[int], traits: _Traits) -> int:
    """Number of bytes (0-3) at the end that begin a character without completing it."""
    if not traits.is_byte_level and not traits.falls_back_to_bytes:
        return 0
    tail = b""
    for start in range(len(ids) - 1, -1, -1):
        # None for an id beyond the vocabulary: a model's embedding may have more rows than its tokenizer ids
        token = tokenizer.convert_ids_to_tokens(ids[start])
        tail = (_token_bytes(str(token), traits) if token is not None else b"") + tail
        if len(tail) >= 4:  # no character is longer
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return len(decoder.getstate()[0])


def _token_bytes(token: str, traits: _Traits) -> bytes:
    if traits.falls_back_to_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(match[1])
    if traits.is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    return token.encode()  # an added token is stored as it is


def _byte_level_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies write each byte: printable ones themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
