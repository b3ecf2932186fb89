from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hacrl.reencode import Reencoded, ReencodeReport, reencode
from hacrl.rollout import Prompt, Rollout
from hacrl.tokenization import control_token_ids, response_ids, response_text, same_tokenization

BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _finish(tokenizer: Tokenizer, special: Sequence[str], **names: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def byte_level(merges: Sequence[tuple[str, str]], special: Sequence[str], **names: str) -> PreTrainedTokenizerFast:
    """GPT-2's kind: bytes, written as printable characters, and merges of them."""
    vocab = {token: index for index, token in enumerate([*BYTE_ALPHABET, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, special, **names)


@cache
def gpt() -> PreTrainedTokenizerFast:
    merges = [("I", "s"), ("Ġ", "i"), ("Ġi", "t"), ("a", "b"), ("Ġ", "?"), ("t", "h"), ("th", "e"), ("1", "2")]
    return byte_level(merges, ["<|end|>", "<|pad|>", "<|im_end|>"], eos_token="<|end|>", pad_token="<|pad|>")


@cache
def gpt_other_merges() -> PreTrainedTokenizerFast:
    return byte_level([("h", "e"), ("t", "he")], ["<|end|>", "<|tool|>"], eos_token="<|end|>")


@cache
def characters() -> PreTrainedTokenizerFast:
    """One token per character of a small alphabet, <unk> for any other."""
    alphabet = ["<unk>", "<s>", "</s>", *"0123456789+-= abcdeghistn?<|_>m\n"]
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(alphabet)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _finish(tokenizer, ["<unk>", "<s>", "</s>"], unk_token="<unk>", eos_token="</s>")


@cache
def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's kind with spaces as "▁", one put in front of every text."""
    pieces = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789?.\n", "▁is", "▁it", "▁the", "th"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(len(pieces) > 1)) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _finish(tokenizer, ["<unk>", "<end>"], unk_token="<unk>", eos_token="<end>")


@cache
def llama() -> PreTrainedTokenizerFast:
    """Llama 2's kind: "▁" in front of every text, unknown characters as bytes, begin-of-text token."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghist0123456789?=", "▁i", "▁is"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "i"), ("▁i", "s")],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return _finish(tokenizer, ["<s>", "</s>"], bos_token="<s>", eos_token="</s>")


def permuted_gpt() -> PreTrainedTokenizerFast:
    """As many ids as `gpt`, with other meanings."""
    vocab = {token: index for index, token in enumerate(reversed(BYTE_ALPHABET))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, ["<|end|>"], eos_token="<|end|>")


ALL = [gpt, gpt_other_merges, characters, unigram, llama]


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert None not in ids
    return list(ids)


def make_rollout(ids: list[int], finished: bool) -> Rollout:
    return Rollout(Prompt(0, "q", {}), "a", 0, ids, "not read", finished)


def convert(
    source: PreTrainedTokenizerFast,
    learner: PreTrainedTokenizerFast,
    ids: list[int],
    *,
    finished: bool = True,
    max_length: int = 100,
    **ends: Any,
) -> Reencoded:
    ends = {"source_end_ids": {source.eos_token_id}, "learner_end_id": learner.eos_token_id, **ends}
    content = [*ids, source.eos_token_id] if finished else ids
    return reencode(make_rollout(content, finished), source, learner, max_length, **ends)


# ---- text of a response -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Is it 5 ?", "  it is", "it \n\n", "don 't .", " "])
def test_response_text_spaces_come_back_exactly(text: str) -> None:
    assert response_text(gpt(), response_ids(gpt(), text)) == text


def test_response_text_special_tokens_vanish() -> None:
    tokenizer = gpt()
    ids = ids_of(tokenizer, "a", "<|im_end|>", "Ġit", "<|pad|>", "<|end|>")
    assert response_text(tokenizer, ids) == "a it"


def test_response_text_special_token_added_later_vanishes() -> None:
    tokenizer = byte_level([], ["<|end|>"], eos_token="<|end|>")
    response_text(tokenizer, [0])
    tokenizer.add_tokens([AddedToken("<|new|>", special=True)])
    assert response_text(tokenizer, ids_of(tokenizer, "a", "<|new|>", "b")) == "ab"


def test_response_text_ordinary_added_token_stays() -> None:
    tokenizer = byte_level([], ["<|end|>"], eos_token="<|end|>")
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    assert response_text(tokenizer, ids_of(tokenizer, "<think>", "a")) == "<think>a"


def test_response_text_end_token_that_is_not_special_is_left_out() -> None:
    tokenizer = gpt()
    newline = response_ids(tokenizer, "\n")
    assert response_text(tokenizer, ids_of(tokenizer, "a") + newline + newline, end_ids=newline) == "a\n"


def test_response_text_no_ids_is_empty() -> None:
    assert response_text(gpt(), []) == ""


def test_response_text_id_beyond_vocabulary_is_ignored() -> None:
    tokenizer = gpt()
    assert response_text(tokenizer, [*ids_of(tokenizer, "a"), len(tokenizer) + 5]) == "a"


@pytest.mark.parametrize("make", [gpt, llama])
@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_response_text_cut_inside_a_character_drops_its_bytes(make: Any, character: str) -> None:
    tokenizer = make()
    ids = response_ids(tokenizer, "1" + character + character)
    size = len(character.encode())
    for cut in range(1, size):
        assert response_text(tokenizer, ids[:-cut]) == "1" + character


@pytest.mark.parametrize("make", [gpt, llama])
@pytest.mark.parametrize("text", ["\ufffd", "1\ufffd", "\ufffd\ufffd"])
def test_response_text_written_replacement_character_survives(make: Any, text: str) -> None:
    tokenizer = make()
    assert response_text(tokenizer, response_ids(tokenizer, text)) == text


def test_response_text_bytes_cut_inside_a_merged_token_are_dropped() -> None:
    tokenizer = byte_level([("a", "Ã")], ["<|end|>"], eos_token="<|end|>")  # "a" and the first byte of "é"
    assert response_text(tokenizer, ids_of(tokenizer, "1", "aÃ")) == "1a"


def test_response_text_invalid_bytes_inside_become_replacement_characters() -> None:
    tokenizer = gpt()
    assert response_text(tokenizer, ids_of(tokenizer, "Ã", "a")) == "\ufffda"


@pytest.mark.parametrize("make", [unigram, llama])
def test_response_text_leading_space_of_a_continuation_stays(make: Any) -> None:
    tokenizer = make()
    assert response_text(tokenizer, ids_of(tokenizer, "▁is", "1")) == " is1"


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("a1 é€😀\ufffd\n"), max_size=8), st.integers(0, 30))
def test_response_text_cut_anywhere_is_a_prefix_without_inventions(text: str, length: int) -> None:
    for tokenizer in (gpt(), llama()):
        assert text.startswith(response_text(tokenizer, response_ids(tokenizer, text)[:length]))


# ---- ids of a text ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab1 ?is"), max_size=10))
@example(" is")
@example("is")
@example("  ")
def test_response_ids_then_text_is_the_identity(text: str) -> None:
    for make in ALL:
        assert response_text(make(), response_ids(make(), text)) == text


@pytest.mark.parametrize("make", [unigram, llama])
def test_response_ids_no_space_is_put_in_front(make: Any) -> None:
    assert response_ids(make(), "1") == ids_of(make(), "1")


@pytest.mark.parametrize("make", [unigram, llama])
def test_response_ids_own_space_stays_one_space(make: Any) -> None:
    assert response_ids(make(), " is") == ids_of(make(), "▁is")


def test_response_ids_begin_of_text_token_is_not_added() -> None:
    assert llama().bos_token_id not in response_ids(llama(), "1")


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|end|>", "<|pad|><|im_end|>"])
def test_response_ids_text_like_a_special_token_stays_text(text: str) -> None:
    ids = response_ids(gpt(), text)
    assert control_token_ids(gpt()).isdisjoint(ids)
    assert response_text(gpt(), ids) == text


def test_response_ids_leaves_the_tokenizer_as_it_was() -> None:
    tokenizer = gpt()
    response_ids(tokenizer, "<|end|>")
    assert tokenizer("<|end|>").input_ids == [tokenizer.eos_token_id]


# ---- agreement of two tokenizers --------------------------------------------------------------------------------


def test_same_tokenization_built_twice_is_true() -> None:
    first, second = (byte_level([("a", "b")], ["<|end|>"], eos_token="<|end|>") for _ in range(2))
    assert same_tokenization(first, second)


def test_same_tokenization_other_end_token_among_the_same_specials_is_true() -> None:
    first = byte_level([], ["<|end|>", "<|im_end|>"], eos_token="<|end|>")
    second = byte_level([], ["<|end|>", "<|im_end|>"], eos_token="<|im_end|>")
    assert same_tokenization(first, second)


def test_same_tokenization_padding_side_and_length_do_not_matter() -> None:
    first, second = (byte_level([], ["<|end|>"], eos_token="<|end|>", pad_token="<|end|>") for _ in range(2))
    second.padding_side = "left"
    second(["a", "ab"], padding=True, truncation=True, max_length=1)
    assert same_tokenization(first, second)


def test_same_tokenization_same_ids_in_another_order_is_false() -> None:
    first = byte_level([], ["<|end|>"], eos_token="<|end|>")
    assert len(first) == len(permuted_gpt())
    assert not same_tokenization(first, permuted_gpt())


def test_same_tokenization_same_vocabulary_and_other_merges_is_false() -> None:
    first = byte_level([("a", "b"), ("b", "c"), ("ab", "c")], ["<|end|>"], eos_token="<|end|>")
    second = byte_level([("b", "c"), ("a", "b"), ("ab", "c")], ["<|end|>"], eos_token="<|end|>")
    assert set(first.get_vocab()) == set(second.get_vocab())
    assert not same_tokenization(first, second)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "special", "ordinary"])
def test_same_tokenization_other_part_is_false(part: str) -> None:
    first, second = (byte_level([], ["<|end|>"], eos_token="<|end|>") for _ in range(2))
    if part == "normalizer":
        second.backend_tokenizer.normalizer = normalizers.NFC()
    elif part == "pre_tokenizer":
        second.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        second.add_tokens([AddedToken("<x>", special=part == "special")])
    assert not same_tokenization(first, second)


def test_same_tokenization_token_added_later_is_noticed() -> None:
    first, second = (byte_level([], ["<|end|>"], eos_token="<|end|>") for _ in range(2))
    assert same_tokenization(first, second)
    second.add_tokens([AddedToken("<x>", special=True)])
    assert not same_tokenization(first, second)


# ---- re-encoding ------------------------------------------------------------------------------------------------


def test_reencode_sampled_ids_that_are_not_canonical_become_the_learners_encoding() -> None:
    source, learner = gpt_other_merges(), gpt()
    assert convert(source, learner, ids_of(source, "a", "b")).ids == ids_of(learner, "ab", "<|end|>")


def test_reencode_does_not_change_the_rollout() -> None:
    source, learner = gpt_other_merges(), gpt()
    rollout = make_rollout(ids_of(source, "a", "b", "<|end|>"), True)
    reencode(rollout, source, learner, 9, source_end_ids={source.eos_token_id}, learner_end_id=learner.eos_token_id)
    assert rollout.ids == ids_of(source, "a", "b", "<|end|>")


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("learner", ALL)
@pytest.mark.parametrize("text", ["12 is it", " 7", "a\nb"])
def test_reencode_text_of_the_learners_ids_is_the_sources_text(source: Any, learner: Any, text: str) -> None:
    result = convert(source(), learner(), response_ids(source(), text))
    assert result.ids is not None
    assert result.ids[-1] == learner().eos_token_id
    assert response_text(learner(), result.ids) == text
    assert not result.lossy


def test_reencode_unfinished_response_gets_no_end_token() -> None:
    result = convert(characters(), gpt(), ids_of(characters(), "1", "2"), finished=False)
    assert result.ids == ids_of(gpt(), "12")


def test_reencode_end_token_only_becomes_the_learners_end_token() -> None:
    assert convert(gpt(), characters(), []).ids == [characters().eos_token_id]


def test_reencode_end_ids_come_from_the_caller_not_the_tokenizer() -> None:
    source, learner = gpt(), characters()
    rollout = make_rollout(ids_of(source, "a", "<|im_end|>"), True)
    end_ids = set(ids_of(source, "<|end|>", "<|im_end|>"))
    result = reencode(rollout, source, learner, 9, source_end_ids=end_ids, learner_end_id=1)
    assert result.ids == [*ids_of(learner, "a"), 1]


def test_reencode_special_tokens_of_the_source_do_not_reach_the_learner() -> None:
    source = gpt()
    result = convert(source, gpt_other_merges(), ids_of(source, "a", "<|im_end|>", "b"))
    assert result.ids == ids_of(gpt_other_merges(), "a", "b", "<|end|>")


def test_reencode_text_like_the_learners_special_token_stays_text() -> None:
    source, learner = gpt(), gpt_other_merges()
    result = convert(source, learner, response_ids(source, "a<|tool|>b"))
    assert result.ids is not None
    assert control_token_ids(learner).isdisjoint(result.ids[:-1])


def test_reencode_reasoning_without_its_opening_tag_is_appended_raw() -> None:
    text = "2+2 is 4\n</think>\n4"
    result = convert(gpt(), gpt_other_merges(), response_ids(gpt(), text))
    assert response_text(gpt_other_merges(), result.ids or []) == text


@pytest.mark.parametrize("tokens", [["<|pad|>"], ["<|pad|>", "<|im_end|>"]])
@pytest.mark.parametrize("finished", [True, False])
def test_reencode_special_tokens_alone_are_left_out_as_empty(tokens: list[str], finished: bool) -> None:
    result = convert(gpt(), characters(), ids_of(gpt(), *tokens), finished=finished)
    assert (result.ids, result.reason) == (None, "empty")


def test_reencode_no_ids_is_left_out_as_empty() -> None:
    result = convert(gpt(), characters(), [], finished=False)
    assert (result.ids, result.reason) == (None, "empty")


def test_reencode_only_a_part_of_a_character_is_left_out_as_empty() -> None:
    result = convert(gpt(), gpt_other_merges(), ids_of(gpt(), "Ã"), finished=False)
    assert (result.ids, result.reason) == (None, "empty")


def test_reencode_response_cut_inside_a_character_loses_the_bytes() -> None:
    result = convert(gpt(), gpt_other_merges(), ids_of(gpt(), "a", "Ã"), finished=False)
    assert result.ids == ids_of(gpt_other_merges(), "a")


def test_reencode_written_replacement_character_survives() -> None:
    result = convert(gpt(), gpt_other_merges(), response_ids(gpt(), "a\ufffd"))
    assert response_text(gpt_other_merges(), result.ids or []) == "a\ufffd"


@pytest.mark.parametrize(("max_length", "fits"), [(4, False), (6, False), (7, True)])
def test_reencode_longer_than_the_limit_is_left_out_not_cut(max_length: int, fits: bool) -> None:
    source = byte_level([("1", "1"), ("11", "1"), ("111", "111")], ["<|end|>"], eos_token="<|end|>")
    result = convert(source, characters(), ids_of(source, "111111"), max_length=max_length)
    assert (result.ids is not None, result.reason) == (fits, None if fits else "too_long")


def test_reencode_character_unknown_to_the_learner_is_left_out() -> None:
    result = convert(gpt(), characters(), response_ids(gpt(), "1€2"))
    assert (result.ids, result.reason) == (None, "unknown")


def test_reencode_text_the_learner_normalizes_is_lossy() -> None:
    learner = byte_level([], ["<|end|>"], eos_token="<|end|>")
    learner.backend_tokenizer.normalizer = normalizers.NFC()
    result = convert(gpt(), learner, response_ids(gpt(), "cafe\u0301"))
    assert (response_text(learner, result.ids or []), result.lossy) == ("caf\u00e9", True)


def test_reencode_agreeing_tokenizers_reuse_the_sampled_ids() -> None:
    other = byte_level([("a", "b")], ["<|end|>"], eos_token="<|end|>")
    source = byte_level([("a", "b")], ["<|end|>"], eos_token="<|end|>")
    sampled = ids_of(source, "a", "b", "Ã")
    result = convert(source, other, sampled)
    assert (result.ids, result.reused) == ([*sampled, other.eos_token_id], True)


def test_reencode_reused_ids_end_with_the_learners_end_token() -> None:
    first = byte_level([], ["<|end|>", "<|im_end|>"], eos_token="<|end|>")
    second = byte_level([], ["<|end|>", "<|im_end|>"], eos_token="<|im_end|>")
    assert convert(first, second, ids_of(first, "a")).ids == ids_of(second, "a", "<|im_end|>")


def test_reencode_reused_ids_longer_than_the_limit_are_left_out() -> None:
    assert convert(gpt(), gpt(), ids_of(gpt(), "a", "b"), max_length=2).reason == "too_long"


def test_reencode_same_size_and_other_meaning_is_not_reused() -> None:
    source, learner = byte_level([], ["<|end|>"], eos_token="<|end|>"), permuted_gpt()
    result = convert(source, learner, ids_of(source, "a", "b"))
    assert (result.ids, result.reused) == (ids_of(learner, "a", "b", "<|end|>"), False)


def test_reencode_finished_response_without_end_token_raises() -> None:
    with pytest.raises(ValueError, match="must end with one of source_end_ids"):
        reencode(make_rollout([1], True), gpt(), characters(), 9, source_end_ids={2}, learner_end_id=2)


def test_reencode_limit_below_one_raises() -> None:
    with pytest.raises(ValueError, match="max_length must be >= 1, got 0"):
        convert(gpt(), characters(), [], max_length=0)


# ---- report -----------------------------------------------------------------------------------------------------


def test_report_counts_exclusions_and_length_changes_of_a_pair() -> None:
    report = ReencodeReport()
    rollout = make_rollout([1, 2, 3, 4], False)
    for ids, reason in [([1] * 4, None), ([1] * 6, None), ([1] * 2, None), (None, "empty"), (None, "too_long")]:
        report.add(rollout, "b", Reencoded(ids, reason))  # type: ignore[arg-type]
    assert report.metrics() == pytest.approx(
        {
            "a->b/kept": 3,
            "a->b/excluded": 2,
            "a->b/excluded_empty": 1,
            "a->b/excluded_too_long": 1,
            "a->b/changed": 2 / 3,
            "a->b/relative_change": 1 / 3,
            "a->b/lossy": 0,
        }
    )


def test_report_ordered_pairs_are_kept_apart() -> None:
    report = ReencodeReport()
    for source, learner in [("a", "b"), ("b", "a"), ("a", "c")]:
        rollout = Rollout(Prompt(0, "q", {}), source, 0, [1], "x", False)
        report.add(rollout, learner, Reencoded([1]))
    assert set(report.pairs) == {("a", "b"), ("b", "a"), ("a", "c")}


def test_report_everything_excluded_has_shares_of_zero() -> None:
    report = ReencodeReport()
    report.add(make_rollout([], False), "b", Reencoded(None, "empty"))
    assert report.pairs["a", "b"].metrics()["changed"] == 0.0
