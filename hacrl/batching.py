"""From the responses of a step to what goes through a model: updates, micro-batches, tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hacpo_kernels import SequenceBatch


@dataclass(slots=True)
class Sample:
    """One response as a learner sees it.

    Attributes:
        prompt_index: the prompt it answers.
        prompt_ids, response_ids: in the learner's vocabulary.
        is_cross: another agent generated it.
        advantage: the learner's.
        weight: omega(source, learner), 1 for self.
        source_mean_logprob: nats per token under the source's old policy; 0 where it is not needed (advantage 0).
        length: what divides the learner's sum of log-probabilities.
        old_logprobs, ref_logprobs: (len(response_ids),) float32 or None.
    """

    prompt_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    is_cross: bool
    advantage: float
    weight: float = 1.0
    source_mean_logprob: float = 0.0
    length: int = 1
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded inputs of B sequences, and where their response tokens are scored.

    Attributes:
        input_ids, attention_mask, position_ids: (B, T) int64; T is the longest sequence of the batch.
        rows: (N,) indices into the flattened (B * T) positions whose outputs predict `target_ids`.
        target_ids: (N,) the response tokens of all sequences, one sequence after the other.
        cu_seqlens: (B + 1,) boundaries of the sequences in N.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    rows: Tensor
    target_ids: Tensor
    cu_seqlens: Tensor

    @classmethod
    def build(cls, pairs: Sequence[tuple[list[int], list[int]]], device: torch.device) -> TokenBatch:
        """From (prompt ids, response ids) pairs; every prompt holds at least one id."""
        time = max(len(prompt) + len(response) for prompt, response in pairs)
        input_ids = torch.zeros(len(pairs), time, dtype=torch.long)
        attention_mask = torch.zeros(len(pairs), time, dtype=torch.long)
        rows: list[int] = []
        targets: list[int] = []
        boundaries = [0]
        for index, (prompt, response) in enumerate(pairs):
            length = len(prompt) + len(response)
            input_ids[index, :length] = torch.tensor(prompt + response)
            attention_mask[index, :length] = 1
            # position p predicts the token at p + 1
            first = index * time + len(prompt) - 1
            rows.extend(range(first, first + len(response)))
            targets.extend(response)
            boundaries.append(len(targets))
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        tensors = (
            input_ids, attention_mask, position_ids, torch.tensor(rows, dtype=torch.long),
            torch.tensor(targets, dtype=torch.long), torch.tensor(boundaries, dtype=torch.long),
        )  # fmt: skip
        return cls(*(tensor.to(device) for tensor in tensors))


def split_updates(samples: Sequence[Sample], updates: int, seed: int) -> list[list[Sample]]:
    """The samples of a step in `updates` parts, shuffled by prompt.

    All responses to a prompt are in one part, so that each update holds self and cross responses of its prompts, and
    the parts have equal numbers of prompts up to one. The same seed gives the same parts for any order of the samples'
    prompts.

    Raises:
        ValueError: fewer prompts than updates.
    """
    prompts = sorted({sample.prompt_index for sample in samples})
    if len(prompts) < updates:
        raise ValueError(f"split_updates: {updates} updates need at least as many prompts, got {len(prompts)}.")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    part_of = {prompts[position]: rank * updates // len(prompts) for rank, position in enumerate(order)}
    rank_of = {prompts[position]: rank for rank, position in enumerate(order)}
    parts: list[list[Sample]] = [[] for _ in range(updates)]
    for sample in sorted(samples, key=lambda sample: rank_of[sample.prompt_index]):
        parts[part_of[sample.prompt_index]].append(sample)
    return parts


def micro_batches(samples: Sequence[Sample], token_budget: int) -> list[list[Sample]]:
    """The samples in groups whose padded size, rows times longest row, stays within the budget.

    Samples of similar length share a group, which keeps padding small. A sample above the budget is alone.
    """
    groups: list[list[Sample]] = []
    longest = 0
    for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
        if groups and (len(groups[-1]) + 1) * longest <= token_budget:
            groups[-1].append(sample)
        else:
            groups.append([sample])
            longest = sample.num_tokens
    return groups


def reaches_model(sample: Sample, beta: float) -> bool:
    """Whether a sample can have a gradient: one with advantage 0 has none, unless it is in the KL term."""
    return sample.advantage != 0 or (beta > 0 and not sample.is_cross)


def to_tensors(
    samples: Sequence[Sample], device: torch.device, *, with_ref: bool = False, with_old: bool = False
) -> tuple[TokenBatch, SequenceBatch]:
    """A micro-batch as the model and the loss take it, with the per-token log-probabilities that the loss needs.

    Cross samples have none, and the loss does not read them there: zeros stand in, also when all samples are cross.
    """
    batch = TokenBatch.build([(sample.prompt_ids, sample.response_ids) for sample in samples], device)

    def numbers(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def per_token(values: list[Tensor | None]) -> Tensor:
        filled = []
        for sample, value in zip(samples, values, strict=True):
            assert value is not None or sample.is_cross
            filled.append(torch.zeros(len(sample.response_ids)) if value is None else value)
        return torch.cat(filled).to(device=device, dtype=torch.float32)

    sequences = SequenceBatch(
        cu_seqlens=batch.cu_seqlens,
        source_mean_logprobs=numbers([sample.source_mean_logprob for sample in samples]),
        advantages=numbers([sample.advantage for sample in samples]),
        weights=numbers([sample.weight for sample in samples]),
        is_cross=torch.tensor([sample.is_cross for sample in samples], device=device),
        lengths=torch.tensor([sample.length for sample in samples], device=device),
        ref_logprobs=per_token([sample.ref_logprobs for sample in samples]) if with_ref else None,
        old_logprobs=per_token([sample.old_logprobs for sample in samples]) if with_old else None,
    )
    return batch, sequences
