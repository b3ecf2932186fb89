"""Sequences longer than a block of the sequence kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hacpo_kernels import HACPOConfig, SequenceBatch, hacpo_loss_from_logprobs
from hacpo_kernels.reference import reference_loss_from_logprobs

from .builders import boundaries, leaf, relative_error

LENGTHS = [255, 256, 257, 1, 0, 700]
CONFIGS = {
    "hacpo+kl": HACPOConfig(beta=0.1),
    "grpo+kl": HACPOConfig.grpo(beta=0.1),
    "token+cross": HACPOConfig(ratio="token", epsilon_low=0.2, epsilon_high=0.28),
}


@pytest.mark.parametrize("masked", (False, True), ids=("all rows", "masked"))
@pytest.mark.parametrize("name", CONFIGS)
def test_hacpo_loss_from_logprobs_sequences_over_several_blocks_equal_reference(
    name: str, masked: bool, objective_backend: str
) -> None:
    config, rows, size = CONFIGS[name], sum(LENGTHS), len(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    logprobs = -3.0 * torch.rand(rows, generator=generator)
    mask = torch.rand(rows, generator=generator) > 0.4 if masked else torch.ones(rows, dtype=torch.bool)
    cu_seqlens = boundaries(LENGTHS)
    pairs = pairwise(cu_seqlens.tolist())
    means = torch.tensor(
        [float(logprobs[a:b][mask[a:b]].mean()) if b > a and mask[a:b].any() else 0.0 for a, b in pairs]
    )
    is_cross = torch.zeros(size, dtype=torch.bool)
    if config.cross != "none":
        is_cross[[1, 5]] = True
    sequences = SequenceBatch(
        cu_seqlens, means + torch.where(is_cross, 0.1, -1e-4), torch.tensor([1.0, -1.0, -0.5, 2.0, 1.0, 1.5]),
        weights=torch.full((size,), 0.5), is_cross=is_cross, loss_mask=mask if masked else None,
        ref_logprobs=logprobs + 0.5 * torch.rand(rows, generator=generator),
        old_logprobs=logprobs + 0.7 * (torch.rand(rows, generator=generator) - 0.5),
    )  # fmt: skip
    mine, wide = leaf(logprobs), leaf(logprobs.double())
    out = hacpo_loss_from_logprobs(mine, sequences, config)
    expected = reference_loss_from_logprobs(wide, sequences, config)
    out.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=1e-5, atol=1e-6)
    assert relative_error(out.ratios, expected.ratios) <= 1e-6
    assert relative_error(mine.grad, wide.grad) <= 1e-5
