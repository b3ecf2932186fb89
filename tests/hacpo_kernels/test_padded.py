"""HACPOLoss: padded (batch, time) tensors, wherever the padding sits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hacpo_kernels import HACPOConfig, HACPOLoss, hacpo_loss, token_logprobs

from .builders import Case, leaf, make_case

LENGTHS = [3, 5, 1]
CONFIG = HACPOConfig(beta=0.1)
# aligned rows, so that a row's bits do not depend on where it lies in memory
CASE = make_case(LENGTHS, 48, config=CONFIG)


def padded(case: Case, side: str, extra: int, fill: float = 0.0) -> dict[str, Any]:
    """Arguments of HACPOLoss: the sequences of the case, padded on one side to the longest plus `extra`."""
    width = max(LENGTHS) + extra
    batch: dict[str, Any] = {
        "logits": torch.full((3, width, 48), fill), "target_ids": torch.full((3, width), -100),
        "loss_mask": torch.zeros(3, width, dtype=torch.bool), "ref_logprobs": torch.full((3, width), fill),
    }  # fmt: skip
    for i, length in enumerate(LENGTHS):
        start = int(case.sequences.cu_seqlens[i])
        place = slice(0, length) if side == "right" else slice(width - length, width)
        if side == "middle":
            place = torch.arange(length) * 2 % width if length * 2 <= width else slice(0, length)
        rows = slice(start, start + length)
        batch["logits"][i, place] = case.logits[rows]
        batch["target_ids"][i, place] = case.target_ids[rows]
        batch["loss_mask"][i, place] = True
        batch["ref_logprobs"][i, place] = case.sequences.ref_logprobs[rows]
    for name in ("source_mean_logprobs", "advantages", "weights", "is_cross"):
        batch[name] = getattr(case.sequences, name)
    return batch


def packed_result(backend: str) -> tuple[Any, Tensor]:
    logits = leaf(CASE.logits)
    out = hacpo_loss(logits, CASE.target_ids, CASE.sequences, CONFIG, backend=backend)
    out.loss.backward()
    return out, logits.grad


@pytest.mark.parametrize("fill", (0.0, float("nan"), float("-inf")))
@pytest.mark.parametrize("extra", (0, 5))
@pytest.mark.parametrize("side", ("right", "left", "middle"))
def test_hacpo_loss_module_equals_packed_loss_wherever_padding_sits(
    side: str, extra: int, fill: float, backend: str
) -> None:
    expected, gradient = packed_result(backend)
    arguments = padded(CASE, side, extra, fill)
    logits = arguments["logits"] = leaf(arguments["logits"])
    out = HACPOLoss(CONFIG)(**arguments, backend=backend)
    out.loss.backward()
    mask = arguments["loss_mask"]
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(out.ratios, expected.ratios)
    assert torch.equal(out.live, expected.live)
    assert torch.equal(out.logprobs[mask], expected.logprobs)
    assert torch.equal(logits.grad[mask], gradient)
    assert logits.grad[~mask].abs().sum() == 0.0
    assert out.logprobs.shape == mask.shape
    assert out.logprobs[~mask].abs().sum() == 0.0


def test_hacpo_loss_module_defaults_to_the_papers_configuration() -> None:
    assert HACPOLoss().config == HACPOConfig()
    assert "cross_clip_low=0.8" in repr(HACPOLoss())


def test_hacpo_loss_module_passes_every_option_on(backend: str) -> None:
    arguments = padded(CASE, "right", 2)
    options = {
        "update_index": 3, "num_sequences": 7, "num_self_sequences": 5, "temperature": torch.tensor([0.5, 1.0, 2.0]),
        "logit_scale": 0.5, "softcap": 9.0,
    }  # fmt: skip
    lengths = torch.tensor([2, 7, 1])
    out = HACPOLoss(CONFIG)(**arguments, lengths=lengths, backend=backend, **options)
    expected = hacpo_loss(
        CASE.logits, CASE.target_ids, replace(CASE.sequences, lengths=lengths), CONFIG, backend=backend, **options
    )
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(out.ratios, expected.ratios)


def test_hacpo_loss_module_takes_old_logprobs_per_position(backend: str) -> None:
    config = HACPOConfig.grpo()
    arguments = padded(CASE, "left", 1)
    del arguments["is_cross"]
    mask = arguments["loss_mask"]
    old = torch.zeros(mask.shape).masked_scatter(mask, CASE.sequences.old_logprobs)
    out = HACPOLoss(config)(**arguments, old_logprobs=old, backend=backend)
    sequences = replace(CASE.sequences, is_cross=None)
    expected = hacpo_loss(CASE.logits, CASE.target_ids, sequences, config, backend=backend)
    assert torch.equal(out.loss, expected.loss)


@pytest.mark.parametrize("shape", ((0, 4), (2, 0)), ids=str)
def test_hacpo_loss_module_empty_batch_is_0(shape: tuple[int, int], backend: str) -> None:
    logits = torch.zeros(*shape, 7, requires_grad=True)
    nothing = torch.zeros(shape[0])
    out = HACPOLoss()(logits, torch.zeros(shape).long(), torch.zeros(shape).bool(), nothing, nothing, backend=backend)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert out.logprobs.shape == shape


def test_hacpo_loss_module_position_t_scores_target_t_in_every_row(backend: str) -> None:
    # left-padded prompts of 2 and 5 tokens, completions of 3 and 1: logits that are certain of the next token
    ids = torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 6, 7, 8, 9, 1, 2]])
    completion = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]]).bool()
    logits = torch.full((2, 8, 10), -1e4)
    logits[:, :-1].scatter_(-1, ids[:, 1:, None], 0.0)
    out = HACPOLoss()(logits[:, :-1], ids[:, 1:], completion[:, 1:], torch.zeros(2), torch.ones(2), backend=backend)
    assert out.logprobs.tolist() == [[0.0] * 7] * 2
    assert out.ratios.tolist() == [1.0, 1.0]
    shifted = token_logprobs(logits[:, :-1], ids[:, :-1], backend=backend)
    assert bool((shifted[completion[:, 1:]] < -1e3).all()), "a shift by one would not go unnoticed"
