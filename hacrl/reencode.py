"""One agent's response in another agent's vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .rollout import Rollout
from .tokenization import control_token_ids, response_ids, response_text, same_tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PairReport", "Reason", "ReencodeReport", "Reencoded", "reencode", "response_text", "same_tokenization"]

Reason = Literal["empty", "too_long", "unknown"]


@dataclass(frozen=True, slots=True)
class Reencoded:
    """A response as the learner reads it.

    Args:
        ids: the learner's ids, its end token included when the response was finished; None when the response is left
            out of cross use.
        reason: why it is left out: "empty" (no text), "too_long" (more ids than the learner's limit) or "unknown" (the
            learner's vocabulary has no token for a part of the text). None when it is not.
        reused: both agents tokenize alike, so the source's ids were kept.
        lossy: the learner's tokenizer does not give the same text back (it normalizes, or drops characters).
    """

    ids: list[int] | None
    reason: Reason | None = None
    reused: bool = False
    lossy: bool = False


def reencode(
    rollout: Rollout,
    source_tokenizer: PreTrainedTokenizerBase,
    learner_tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    source_end_ids: Collection[int],
    learner_end_id: int,
) -> Reencoded:
    """The response of `rollout` in the learner's vocabulary, to follow the learner's own rendering of the prompt.

        text = source_tokenizer.decode(ids without the end token)
        learner_tokenizer.encode(text, no special tokens) + [learner_end_id] * finished

    The text is appended raw: what the source's prompt already held of the answer (an opening "<think>") is not part of
    the response and does not reach the learner. Special tokens of the source vanish, and text that looks like a special
    token of the learner stays text. The bytes of a character cut by the length limit are dropped. A response that is
    only an end token becomes the learner's end token. Between tokenizers that agree the ids are reused; only the end
    token is exchanged where the learner ends with another one.

    Args:
        rollout: the source's response; its `ids` are read, its `text` is not.
        max_length: the largest number of ids the learner takes, its end token included, >= 1. Longer responses are
            left out, never cut: the source's mean log-probability is about the whole response.
        source_end_ids: ids with which the source may end a response.
        learner_end_id: the id with which the learner ends one.

    Raises:
        ValueError: a finished rollout that does not end with one of `source_end_ids`, or `max_length` < 1.
    """
    if max_length < 1:
        raise ValueError(f"reencode: max_length must be >= 1, got {max_length}.")
    if rollout.finished and rollout.ids[-1] not in source_end_ids:
        raise ValueError(
            f"reencode: a finished response of {rollout.source!r} must end with one of source_end_ids = "
            f"{sorted(source_end_ids)}, got the id {rollout.ids[-1]}."
        )
    content = rollout.ids[:-1] if rollout.finished else rollout.ids
    end = [learner_end_id] if rollout.finished else []
    if not content:
        return Reencoded(end) if end else Reencoded(None, "empty")
    if same_tokenization(source_tokenizer, learner_tokenizer):
        return _limited(Reencoded(content + end, reused=True), max_length)

    text = response_text(source_tokenizer, content)
    if not text:
        return Reencoded(None, "empty")
    ids = response_ids(learner_tokenizer, text)
    if not control_token_ids(learner_tokenizer).isdisjoint(ids):  # the unknown token: no other can come out of text
        return Reencoded(None, "unknown")
    if not ids:  # a tokenizer without an unknown token drops what it does not know
        return Reencoded(None, "unknown")
    return _limited(Reencoded(ids + end, lossy=response_text(learner_tokenizer, ids) != text), max_length)


def _limited(reencoded: Reencoded, max_length: int) -> Reencoded:
    return reencoded if len(reencoded.ids or ()) <= max_length else Reencoded(None, "too_long")


@dataclass(slots=True)
class PairReport:
    """What re-encoding did to the responses of one source for one learner."""

    kept: int = 0
    changed: int = 0
    lossy: int = 0
    relative_change: float = 0.0
    excluded: Counter[Reason] = field(default_factory=Counter)

    def add(self, source_length: int, reencoded: Reencoded) -> None:
        """Count one response that has `source_length` ids in the source's vocabulary."""
        if reencoded.ids is None:
            self.excluded[reencoded.reason or "empty"] += 1
            return
        change = len(reencoded.ids) - source_length
        self.kept += 1
        self.changed += change != 0
        self.lossy += reencoded.lossy
        self.relative_change += abs(change) / source_length

    def metrics(self) -> dict[str, float]:
        """Numbers of the pair.

        Returns:
            kept: number of responses used. excluded, excluded_<reason>: numbers of those left out. changed: share of
            the used ones whose number of ids differs. relative_change: mean of |difference| / source's number.
            lossy: share of the used ones whose text the learner's tokenizer changes. Shares of nothing are 0.
        """
        used = max(self.kept, 1)
        reasons = {f"excluded_{reason}": float(count) for reason, count in sorted(self.excluded.items())}
        return {
            "kept": float(self.kept),
            "excluded": float(self.excluded.total()),
            **reasons,
            "changed": self.changed / used,
            "relative_change": self.relative_change / used,
            "lossy": self.lossy / used,
        }


@dataclass(slots=True)
class ReencodeReport:
    """One `PairReport` per ordered pair (source, learner)."""

    pairs: dict[tuple[str, str], PairReport] = field(default_factory=dict)

    def add(self, rollout: Rollout, learner: str, reencoded: Reencoded) -> None:
        self.pairs.setdefault((rollout.source, learner), PairReport()).add(len(rollout.ids), reencoded)

    def metrics(self) -> dict[str, float]:
        """The numbers of every pair, named "<source>-><learner>/<name>"."""
        return {
            f"{source}->{learner}/{name}": value
            for (source, learner), pair in self.pairs.items()
            for name, value in pair.metrics().items()
        }
