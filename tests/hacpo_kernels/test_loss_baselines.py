"""GSPO, GRPO and naive sharing run through the same code, and a per-token ratio beside cross sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hacpo_kernels import HACPOConfig, SequenceBatch, hacpo_loss_from_logprobs

from .builders import assert_matches, make_case, run, with_sequences

SELF_ONLY = {"gspo": HACPOConfig.gspo(), "grpo": HACPOConfig.grpo()}


@pytest.mark.parametrize("name", SELF_ONLY)
def test_self_only_config_refuses_cross_sequences(name: str, backend: str) -> None:
    case = replace(make_case([2, 3], 9), config=SELF_ONLY[name])
    with pytest.raises(ValueError, match=r"cross = 'none'.*got 1 cross sequences"):
        run(case, backend)


@pytest.mark.parametrize("name", SELF_ONLY)
def test_self_only_config_on_an_accelerator_gives_cross_sequences_no_say(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # values are not looked at there
    case = replace(make_case([2, 3], 9, advantages=[1.0, 1.0]), config=SELF_ONLY[name], num_sequences=2)
    alone = run(with_sequences(case, advantages=torch.tensor([1.0, 0.0]), is_cross=None), backend)
    monkeypatch.setattr("hacpo_kernels.types.values_are_checked", lambda tensor: False)
    both = run(case, backend)
    assert torch.equal(both.loss, alone.loss)
    assert torch.equal(both.gradient, alone.gradient)
    assert both.out.live.tolist()[1] is False


def test_naive_equals_calling_every_sequence_self(backend: str) -> None:
    case = make_case([2, 3, 2, 1], 9, config=HACPOConfig.naive(), log_ratios=[1e-4, -0.1, 0.2, 1e-4])
    naive = run(case, backend)
    gspo = run(with_sequences(replace(case, config=HACPOConfig.gspo()), is_cross=None), backend)
    assert torch.equal(naive.loss, gspo.loss)
    assert torch.equal(naive.gradient, gspo.gradient)


def test_gspo_equals_hacpo_without_cross_sequences(backend: str) -> None:
    case = make_case([2, 3, 2], 9, cross=[False] * 3, log_ratios=[1e-4, -0.1, 0.2])
    hacpo, gspo = run(case, backend), run(replace(case, config=HACPOConfig.gspo()), backend)
    assert torch.equal(hacpo.loss, gspo.loss)
    assert torch.equal(hacpo.gradient, gspo.gradient)


def test_token_ratio_clips_each_token_alone(objective_backend: str) -> None:
    differences = [0.1, 0.3, -0.4, -0.1]
    logprobs = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    sequences = SequenceBatch(
        torch.tensor([0, 4]), torch.tensor([-1.0]), torch.tensor([2.0]), old_logprobs=-1.0 - torch.tensor(differences)
    )
    out = hacpo_loss_from_logprobs(logprobs, sequences, HACPOConfig.grpo())
    out.loss.backward()
    ratios = [math.exp(d) for d in differences]
    kept = [ratios[0], 0.0, ratios[2], ratios[3]]
    assert logprobs.grad.tolist() == pytest.approx([-2.0 * r / 4.0 for r in kept], abs=1e-7)
    assert out.loss.item() == pytest.approx(-2.0 * (ratios[0] + 1.28 + ratios[2] + ratios[3]) / 4.0, abs=1e-6)


def test_token_ratio_with_every_token_clipped_is_dead(objective_backend: str) -> None:
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    sequences = SequenceBatch(
        torch.tensor([0, 2]), torch.tensor([-1.0]), torch.tensor([1.0]), old_logprobs=torch.tensor([-2.0, -2.5])
    )
    out = hacpo_loss_from_logprobs(logprobs, sequences, HACPOConfig.grpo())
    out.loss.backward()
    assert out.live.tolist() == [False]
    assert out.metrics["clipped_self"].item() == 1.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("difference", (50.0, -50.0))
def test_token_ratio_beyond_the_clamp_is_finite_and_has_no_gradient(difference: float, objective_backend: str) -> None:
    logprobs = torch.tensor([-60.0, -60.0], requires_grad=True)
    sequences = SequenceBatch(
        torch.tensor([0, 2]), torch.tensor([-60.0]), torch.tensor([1.0]),
        old_logprobs=torch.tensor([-60.0 - difference, -60.0]),
    )  # fmt: skip
    out = hacpo_loss_from_logprobs(logprobs, sequences, HACPOConfig.grpo())
    out.loss.backward()
    assert math.isfinite(out.loss.item())
    assert logprobs.grad[0].item() == 0.0
    assert logprobs.grad[1].item() == pytest.approx(-0.5)


def test_token_ratio_leaves_cross_sequences_to_their_own_rule(backend: str) -> None:
    config = HACPOConfig(ratio="token", epsilon_low=0.2, epsilon_high=0.28)
    case = make_case([3, 4, 2, 3], 17, config=config, log_ratios=[0.0, -0.1, 0.0, -0.05])
    actual = assert_matches(case, backend)
    sequence = run(replace(case, config=HACPOConfig()), backend)
    rows = torch.cat([torch.arange(3, 7), torch.arange(9, 12)])
    assert torch.equal(actual.gradient[rows], sequence.gradient[rows])
    others = torch.cat([torch.arange(0, 3), torch.arange(7, 9)])
    assert not torch.equal(actual.gradient[others], sequence.gradient[others])


def test_token_ratio_of_a_sequence_on_policy_has_the_sequence_gradient(backend: str) -> None:
    case = make_case([3], 17, config=HACPOConfig.grpo(), log_ratios=[0.0])
    on_policy = run(case, backend).out.logprobs
    token = run(with_sequences(case, old_logprobs=on_policy), backend)
    sequence = run(replace(case, config=HACPOConfig.gspo()), backend)
    torch.testing.assert_close(token.gradient, sequence.gradient, rtol=1e-5, atol=1e-8)
