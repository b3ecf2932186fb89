"""With the same weights the self ratio is 1, however the tokens are batched, packed, padded or tiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hacpo_kernels import (
    HACPOConfig,
    HACPOLoss,
    SequenceBatch,
    hacpo_loss,
    hacpo_loss_from_logprobs,
    token_logprobs,
)

from .builders import boundaries

LENGTHS = [7, 1, 16]
ROWS, VOCAB = sum(LENGTHS), 1009


def recorded_means(logits: Tensor, ids: Tensor, backend: str) -> Tensor:
    """Each sequence scored on its own, as a rollout is."""
    pairs = zip(logits.split(LENGTHS), ids.split(LENGTHS), strict=True)
    return torch.stack([token_logprobs(x, i, backend=backend).mean() for x, i in pairs])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 3.0 * torch.randn(ROWS, VOCAB, generator=generator), torch.randint(0, VOCAB, (ROWS,), generator=generator)


@pytest.mark.parametrize("recorder", ("torch", "triton"))
def test_self_ratio_of_packed_sequences_is_1(recorder: str, backend: str) -> None:
    logits, ids = data()
    sequences = SequenceBatch(boundaries(LENGTHS), recorded_means(logits, ids, recorder), torch.ones(3))
    out = hacpo_loss(logits, ids, sequences, HACPOConfig(), backend=backend)
    assert (out.ratios - 1.0).abs().max() <= 1e-6
    assert out.live.all()


@pytest.mark.parametrize("side", ("left", "right"))
def test_self_ratio_of_padded_sequences_is_1(side: str, backend: str) -> None:
    logits, ids = data()
    width = max(LENGTHS) + 3
    mask = torch.zeros(3, width, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, slice(0, length) if side == "right" else slice(width - length, width)] = True
    padded = torch.zeros(3, width, VOCAB).masked_scatter(mask[..., None], logits)
    targets = torch.zeros(3, width, dtype=torch.long).masked_scatter(mask, ids)
    out = HACPOLoss()(padded, targets, mask, recorded_means(logits, ids, backend), torch.ones(3), backend=backend)
    assert (out.ratios - 1.0).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_self_ratio_of_low_precision_logits_is_1(dtype: torch.dtype, backend: str) -> None:
    logits, ids = data()
    logits = logits.to(dtype)
    sequences = SequenceBatch(boundaries(LENGTHS), recorded_means(logits, ids, backend), torch.ones(3))
    out = hacpo_loss(logits, ids, sequences, HACPOConfig(), backend=backend)
    assert (out.ratios - 1.0).abs().max() <= 1e-6


@pytest.mark.parametrize("tile", (1, 5, 8))
def test_self_ratio_from_the_same_hidden_states_in_other_tiles_is_1(tile: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, 256, generator=generator).bfloat16().float()
    head = (0.1 * torch.randn(VOCAB, 256, generator=generator)).bfloat16().float()
    ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    # rows and the inner dimension in other pieces: other sums, other rounding
    halves = [
        torch.cat([part[:, s] @ head[:, s].T for part in hidden.split(tile)]) for s in (slice(0, 96), slice(96, 256))
    ]
    recorded = recorded_means(halves[0] + halves[1], ids, backend)
    logits = hidden @ head.T
    assert not torch.equal(logits, halves[0] + halves[1])
    sequences = SequenceBatch(boundaries(LENGTHS), recorded, torch.ones(3))
    out = hacpo_loss(logits, ids, sequences, HACPOConfig(), backend=backend)
    assert (out.ratios - 1.0).abs().max() <= 1e-5


def test_self_ratio_of_a_long_sequence_does_not_drift(objective_backend: str) -> None:
    # a running float32 sum over 20,000 tokens would be off by more than the clip radius allows
    logprobs = -12.0 * torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    mean = logprobs.double().mean().reshape(1)
    sequences = SequenceBatch(torch.tensor([0, 20_000]), mean, torch.ones(1))
    out = hacpo_loss_from_logprobs(logprobs.double(), sequences, HACPOConfig())
    assert abs(out.ratios.item() - 1.0) <= 1e-12
    assert abs(hacpo_loss_from_logprobs(logprobs, sequences, HACPOConfig()).ratios.item() - 1.0) <= 1e-7
