"""LossOutput: fields, metrics against a loop over rows, and which sequences are live."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hacpo_kernels import HACPOConfig, LossOutput, SequenceBatch, hacpo_loss, token_logprobs

from .builders import CROSS_LOG_RATIOS, SELF_LOG_RATIOS, Case, make_case, run, run_reference

CONFIGS = {
    "hacpo": HACPOConfig(),
    "hacpo+kl": HACPOConfig(beta=0.1),
    "closed": HACPOConfig(cross_clip_low=1.0),
    "naive": HACPOConfig.naive(),
    "gspo": HACPOConfig.gspo(),
    "grpo": HACPOConfig.grpo(),
    "token+cross": HACPOConfig(ratio="token", epsilon_low=0.2, epsilon_high=0.28),
}


def many(config: HACPOConfig, **options: object) -> Case:
    """Every ratio of the lists with both signs and 0, an empty sequence among them."""
    ratios = list(SELF_LOG_RATIOS) if config.cross == "none" else [*SELF_LOG_RATIOS, *CROSS_LOG_RATIOS]
    cross = [i >= len(SELF_LOG_RATIOS) for i in range(len(ratios))]
    ratios, cross = [*ratios, 0.0, *ratios, ratios[2]], [*cross, False, *cross, cross[2]]
    half = len(ratios) // 2
    advantages = [1.0 + i for i in range(half)] + [-1.0 - i for i in range(half - 1)] + [0.0]
    lengths = [1 + i % 2 for i in range(len(ratios))]
    lengths[half - 1] = 0
    return make_case(
        lengths, 5, config=config, cross=cross, log_ratios=ratios, advantages=advantages[: len(ratios)], **options
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_loss_output_has_the_documented_shapes_and_dtypes(dtype: torch.dtype, backend: str) -> None:
    case = make_case([3, 0, 2], 9, dtype=dtype)
    out = run(case, backend).out
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert isinstance(out, LossOutput)
    assert (out.loss.shape, out.loss.dtype, out.loss.requires_grad) == ((), wide, True)
    assert (out.logprobs.shape, out.logprobs.dtype, out.logprobs.requires_grad) == ((5,), wide, False)
    assert (out.ratios.shape, out.ratios.dtype, out.ratios.requires_grad) == ((3,), wide, False)
    assert (out.live.shape, out.live.dtype) == ((3,), torch.bool)
    for name, value in out.metrics.items():
        assert (value.shape, value.dtype, value.requires_grad) == ((), wide, False), name


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_output_live_says_which_sequences_have_a_gradient(name: str, backend: str) -> None:
    case = many(CONFIGS[name])
    actual, expected = run(case, backend), run_reference(case)
    for result in (actual, expected):
        owner = case.sequences.sequence_of_row(case.logits.shape[0])
        moved = torch.zeros(case.sequences.num_sequences).scatter_reduce(
            0, owner, result.gradient.abs().amax(-1).float(), "amax"
        )
        assert torch.equal(moved > 0, actual.out.live)
    if name != "hacpo+kl":
        assert 0 < int(actual.out.live.sum()) < case.sequences.num_sequences - 1


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_output_metrics_equal_a_loop_over_sequences(name: str, backend: str) -> None:
    config = CONFIGS[name]
    case = many(config, update_index=2)
    out = run(case, backend).out
    low, high = config.cross_bounds(2)
    counts, bounds = case.sequences.token_counts().tolist(), case.sequences.cu_seqlens.tolist()
    ratios: dict[bool, list[float]] = {False: [], True: []}
    clipped: dict[bool, list[int]] = {False: [], True: []}
    dead, kl = [], []
    for i, count in enumerate(counts):
        if count == 0:
            continue
        cross, advantage = bool(case.sequences.is_cross[i]), float(case.sequences.advantages[i])
        ratio, side = float(out.ratios[i]), 0
        ratios[cross].append(ratio)
        if advantage != 0 and cross and config.cross == "hacpo":
            side = 1 if ratio > high else -1 if ratio < low or low >= high else 0
        elif advantage != 0 and config.ratio == "token":
            rows = slice(bounds[i], bounds[i + 1])
            tokens = (out.logprobs[rows] - case.sequences.old_logprobs[rows]).exp().tolist()
            gone = all(t > 1.28 if advantage > 0 else t < 0.8 for t in tokens)
            side = (1 if advantage > 0 else -1) if gone else 0
        elif advantage != 0:
            if advantage > 0 and ratio > 1 + config.epsilon_high:
                side = 1
            elif advantage < 0 and ratio < 1 - config.epsilon_low:
                side = -1
            elif abs(math.log(ratio)) > 9.999:
                side = 1 if ratio > 1 else -1
        clipped[cross].append(side)
        dead.append(not out.live[i])
        if not cross:
            rows = slice(bounds[i], bounds[i + 1])
            delta = (case.sequences.ref_logprobs[rows] - out.logprobs[rows]).double()
            kl.append(float((delta.exp() - delta - 1).mean()) if config.beta > 0 else 0.0)

    def mean(values: list) -> float:
        return sum(values) / len(values) if values else float("nan")

    expected = {
        "dead": mean(dead), "kl": mean(kl),
        "clipped_cross_low": mean([s < 0 for s in clipped[True]]),
        "clipped_cross_high": mean([s > 0 for s in clipped[True]]),
        "cross_bounds_closed": float(config.cross == "hacpo" and low >= high),
    }  # fmt: skip
    for kind, cross in (("self", False), ("cross", True)):
        expected[f"ratio_{kind}_mean"] = mean(ratios[cross])
        expected[f"ratio_{kind}_min"] = min(ratios[cross], default=float("nan"))
        expected[f"ratio_{kind}_max"] = max(ratios[cross], default=float("nan"))
        expected[f"clipped_{kind}"] = mean([s != 0 for s in clipped[cross]])
    actual = {name: value.item() for name, value in out.metrics.items()}
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)


def test_loss_output_logprobs_are_those_of_token_logprobs_and_0_outside_the_mask(backend: str) -> None:
    case = make_case([4, 3], 9, mask=True, transform={"temperature": torch.tensor([0.5, 2.0])})
    out = run(case, backend).out
    rows = case.sequences.sequence_of_row(7)
    scored = token_logprobs(
        case.logits, case.target_ids, temperature=case.transform["temperature"][rows], backend=backend
    )
    assert torch.equal(out.logprobs, torch.where(case.sequences.loss_mask, scored, 0.0))


@pytest.mark.parametrize("lengths", ([], [0], [0, 0, 0]), ids=str)
@pytest.mark.parametrize("beta", (0.0, 0.5))
def test_hacpo_loss_without_tokens_is_0_and_differentiable(lengths: list[int], beta: float, backend: str) -> None:
    case = make_case(lengths, 5, config=HACPOConfig(beta=beta))
    result = run(case, backend)
    assert result.loss.item() == 0.0
    assert result.gradient.shape == (0, 5)
    assert result.out.ratios.tolist() == [1.0] * len(lengths)
    assert result.out.live.tolist() == [False] * len(lengths)
    assert math.isnan(result.out.metrics["ratio_self_mean"].item())


def test_hacpo_loss_masked_out_altogether_is_0_with_gradient_0(backend: str) -> None:
    case = make_case([2, 3], 5, config=HACPOConfig(beta=0.5))
    masked = replace(case, sequences=replace(case.sequences, loss_mask=torch.zeros(5, dtype=torch.bool)))
    result = run(masked, backend)
    assert result.loss.item() == 0.0
    assert result.gradient.abs().max() == 0.0


@pytest.mark.parametrize("kind", ("self", "cross", "dead"))
def test_hacpo_loss_of_one_kind_of_sequence_leaves_the_other_metrics_empty(kind: str, backend: str) -> None:
    case = make_case([2, 3], 5, cross=[kind == "cross"] * 2, advantages=[0.0 if kind == "dead" else 1.0] * 2)
    metrics = run(case, backend).out.metrics
    assert math.isnan(metrics["ratio_self_mean"].item()) is (kind == "cross")
    assert math.isnan(metrics["ratio_cross_mean"].item()) is (kind != "cross")
    if kind == "dead":
        assert metrics["dead"].item() == 1.0


def test_hacpo_loss_is_cross_none_means_all_self(backend: str) -> None:
    case = make_case([2, 3], 5, cross=[False, False])
    expected = run(case, backend)
    sequences = SequenceBatch(case.sequences.cu_seqlens, case.sequences.source_mean_logprobs, case.sequences.advantages)
    out = hacpo_loss(case.logits, case.target_ids, sequences, case.config, backend=backend)
    assert torch.equal(out.loss, expected.loss)
