"""The fused head: values, gradients and products against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hacpo_kernels import (
    HACPOConfig,
    HACPOLoss,
    LinearHACPOLoss,
    SequenceBatch,
    linear_hacpo_loss,
    linear_token_logprobs,
)
from hacpo_kernels.reference import reference_hacpo_loss, reference_token_logprobs

from .builders import BACKENDS

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
LENGTHS = (3, 0, 4, 1, 5, 2)
CROSS = (False, True, True, False, True, True)
ADVANTAGES = (1.0, 1.0, -1.0, 0.5, 0.0, -1.0)
HIDDEN = 7
CONFIGS = {
    "hacpo": HACPOConfig(),
    "hacpo+kl": HACPOConfig(beta=0.1),
    "gspo": HACPOConfig.gspo(),
    "grpo+kl": HACPOConfig.grpo(beta=0.2),
    "naive+kl": HACPOConfig.naive(beta=0.1),
    "hacpo+token": HACPOConfig(ratio="token"),
}


class Inputs:
    """A random head and batch, with log-ratios near and beyond the bounds."""

    def __init__(
        self, config: HACPOConfig, vocab: int, dtype: torch.dtype, *, bias: bool, mask: bool, seed: int = 0,
        softcap: float | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        rows = sum(LENGTHS)
        self.config = config
        self.hidden, self.weight = normal(rows, HIDDEN).to(dtype), normal(vocab, HIDDEN).to(dtype)
        self.bias = normal(vocab).to(dtype) if bias else None
        self.targets = torch.randint(0, vocab, (rows,), generator=generator)
        self.mask = torch.rand(rows, generator=generator) > 0.25 if mask else None
        temperature = torch.rand(len(LENGTHS), generator=generator) + 0.5
        self.keywords: dict[str, Any] = {
            "temperature": temperature, "logit_scale": 0.7, "softcap": softcap, "update_index": 1,
        }  # fmt: skip
        spread = temperature.repeat_interleave(torch.tensor(LENGTHS))
        logits = self.hidden.double() @ self.weight.double().T + (0 if self.bias is None else self.bias.double())
        logprobs, _ = reference_token_logprobs(
            logits, self.targets, temperature=spread, logit_scale=0.7, softcap=softcap
        )
        counted = torch.ones(rows, dtype=torch.bool) if self.mask is None else self.mask
        means = torch.stack(
            [
                part[keep].mean() if keep.any() else torch.zeros((), dtype=torch.float64)
                for part, keep in zip(logprobs.split(LENGTHS), counted.split(LENGTHS), strict=True)
            ]
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.sequences = SequenceBatch(
            torch.tensor(list(itertools.accumulate(LENGTHS, initial=0))),
            (means - 0.1 * normal(len(LENGTHS)).double()).to(wide),
            torch.tensor(ADVANTAGES, dtype=wide),
            torch.rand(len(LENGTHS), generator=generator) + 0.5,
            None if config.cross == "none" else torch.tensor(CROSS),
            ref_logprobs=(logprobs + 0.3 * normal(rows).double()).to(wide),
            old_logprobs=(logprobs + 0.3 * normal(rows).double()).to(wide),
            loss_mask=self.mask,
        )
        if self.mask is not None:
            self.hidden[~self.mask] = float("nan")  # rows that do not count may hold anything

    def ours(self, backend: str, *, frozen: tuple[str, ...] = (), **keywords: Any) -> tuple[Any, dict[str, Tensor]]:
        leaves = self._leaves(frozen, torch.clone)
        out = linear_hacpo_loss(
            leaves["hidden"], leaves["weight"], self.targets, self.sequences, self.config, bias=leaves.get("bias"),
            backend=backend, **{**self.keywords, **keywords},
        )  # fmt: skip
        (3.0 * out.loss).backward()
        return out, leaves

    def reference(self) -> tuple[Any, dict[str, Tensor]]:
        leaves = self._leaves((), lambda tensor: tensor.double().nan_to_num().clone())
        logits = leaves["hidden"] @ leaves["weight"].T + leaves.get("bias", torch.zeros(()))
        out = reference_hacpo_loss(logits, self.targets, self.sequences, self.config, **self.keywords)
        (3.0 * out.loss).backward()
        return out, leaves

    def _leaves(self, frozen: tuple[str, ...], prepare: Any) -> dict[str, Tensor]:
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {
            name: prepare(tensor).requires_grad_(name not in frozen)
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def check(self, out: Any, leaves: dict[str, Tensor], tolerance: float) -> None:
        expected, theirs = self.reference()
        assert abs(out.loss.item() - expected.loss.item()) <= tolerance * max(1.0, abs(expected.loss.item()))
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
                difference = (leaf.grad.double() - theirs[name].grad).norm()
                assert difference <= tolerance * theirs[name].grad.norm() + 1e-12, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_linear_hacpo_loss_equals_the_reference(name: str, dtype: torch.dtype, backend: str) -> None:
    for bias, mask, softcap in ((False, False, None), (True, True, None), (True, True, 5.0)):
        inputs = Inputs(CONFIGS[name], 33, dtype, bias=bias, mask=mask, softcap=softcap)
        inputs.check(*inputs.ours(backend), TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 100])
def test_linear_hacpo_loss_any_budget_gives_the_same_gradient(rows: int, backend: str) -> None:
    inputs = Inputs(HACPOConfig(beta=0.1), 40, torch.float32, bias=True, mask=True)
    inputs.check(*inputs.ours(backend, memory_budget=rows * 40 * 4), 1e-5)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from(sorted(CONFIGS)), st.integers(1, 20), st.booleans())
def test_linear_hacpo_loss_random_inputs_equal_the_reference(
    seed: int, vocab: int, name: str, rows: int, mask: bool
) -> None:
    inputs = Inputs(CONFIGS[name], vocab, torch.float64, bias=seed % 2 == 0, mask=mask, seed=seed)
    inputs.check(*inputs.ours("torch", memory_budget=rows * vocab * 8), 1e-9)


@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_hacpo_loss_mixed_dtypes_give_each_input_its_own(hidden_dtype: torch.dtype, autocast: bool) -> None:
    inputs = Inputs(HACPOConfig(), 33, torch.float32, bias=False, mask=False)
    inputs.hidden = inputs.hidden.bfloat16().to(hidden_dtype)
    inputs.weight = inputs.weight.bfloat16().float()
    if hidden_dtype == torch.float32:
        inputs.weight = inputs.weight.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, leaves = inputs.ours("torch")
    inputs.check(out, leaves, 2e-2)


@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("weight", "hidden"), ("hidden", "weight", "bias")])
def test_linear_hacpo_loss_frozen_inputs_get_no_gradient(frozen: tuple[str, ...]) -> None:
    inputs = Inputs(HACPOConfig(), 33, torch.float32, bias=True, mask=False)
    if len(frozen) == 3:
        with torch.no_grad():
            out = linear_hacpo_loss(
                inputs.hidden, inputs.weight, inputs.targets, inputs.sequences, inputs.config, bias=inputs.bias,
                **inputs.keywords,
            )  # fmt: skip
        assert not out.loss.requires_grad
        assert abs(out.loss.item() - inputs.reference()[0].loss.item()) < 1e-5
        return
    out, leaves = inputs.ours("torch", frozen=frozen)
    assert all(leaves[name].grad is None for name in frozen)
    inputs.check(out, leaves, 1e-5)


def test_linear_hacpo_loss_tied_weight_adds_both_gradients() -> None:
    inputs = Inputs(HACPOConfig(), 33, torch.float64, bias=False, mask=False)
    embedding = nn.Embedding(33, HIDDEN, dtype=torch.float64)
    ids = torch.arange(sum(LENGTHS))

    def gradient(loss: Any) -> Tensor:
        embedding.zero_grad()
        loss(embedding(ids)).backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad.clone()

    call = (inputs.targets, inputs.sequences, inputs.config)
    ours = gradient(lambda hidden: linear_hacpo_loss(hidden, embedding.weight, *call).loss)
    theirs = gradient(lambda hidden: reference_hacpo_loss(hidden @ embedding.weight.T, *call).loss)
    torch.testing.assert_close(ours, theirs)


def test_linear_hacpo_loss_backward_twice_with_retain_graph_is_equal() -> None:
    inputs = Inputs(HACPOConfig(), 33, torch.float32, bias=False, mask=False)
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight.clone().requires_grad_()
    loss = linear_hacpo_loss(hidden, weight, inputs.targets, inputs.sequences, inputs.config).loss
    first = torch.autograd.grad(loss * 2, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 2, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_linear_hacpo_loss_sequences_without_advantage_are_not_scored() -> None:
    inputs = Inputs(HACPOConfig(), 33, torch.float32, bias=False, mask=False)
    out, leaves = inputs.ours("torch")
    assert torch.isnan(out.ratios[4]) and not out.live[4]
    assert torch.isnan(out.logprobs[8:13]).all()
    assert not torch.isnan(out.logprobs[:8]).any()
    assert leaves["hidden"].grad is not None and not leaves["hidden"].grad[8:13].any()
    assert not torch.isnan(out.metrics["ratio_cross_mean"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_hacpo_loss_very_improbable_target_keeps_its_log_probability(backend: str) -> None:
    hidden = torch.tensor([[1.0], [1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-200.0], [-95.0]])
    sequences = SequenceBatch(torch.tensor([0, 1, 2, 3]), torch.tensor([0.0, -199.9, -94.9]), torch.ones(3))
    out = linear_hacpo_loss(hidden, weight, torch.tensor([0, 1, 2]), sequences, HACPOConfig(), backend=backend)
    torch.testing.assert_close(out.logprobs, torch.tensor([0.0, -200.0, -95.0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entropy", [False, True])
def test_linear_token_logprobs_equals_the_reference(dtype: torch.dtype, entropy: bool, backend: str) -> None:
    inputs = Inputs(HACPOConfig(), 33, dtype, bias=True, mask=False)
    rows = inputs.hidden.shape[0]
    inputs.targets[2] = -100
    weights = torch.randn(2, rows, generator=torch.Generator().manual_seed(1)).double()
    weights[0, 3] = 0.0

    def run(prepare: Any, score: Any) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [prepare(t).requires_grad_() for t in (inputs.hidden, inputs.weight, inputs.bias)]
        outputs = score(*leaves)
        sum((w * o.double()).sum() for w, o in zip(weights, outputs, strict=False)).backward()
        return list(outputs), [leaf.grad.double() for leaf in leaves]

    def ours(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        result = linear_token_logprobs(
            hidden, weight, inputs.targets, bias=bias, temperature=0.7, logit_scale=0.9, entropy=entropy,
            memory_budget=33 * 8 * 4, backend=backend,
        )  # fmt: skip
        return result if isinstance(result, tuple) else (result,)

    def theirs(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        keep = inputs.targets != -100
        logits = (hidden @ weight.T + bias)[keep]
        scored = reference_token_logprobs(logits, inputs.targets[keep], temperature=0.7, logit_scale=0.9)
        zeros = torch.zeros(rows, dtype=torch.float64)
        return tuple(zeros.index_put((keep.nonzero().squeeze(-1),), value) for value in scored)[: 1 + entropy]

    values, gradients = run(torch.clone, ours)
    expected, expected_gradients = run(lambda t: t.double().clone(), theirs)
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a - b).norm() <= TOLERANCE[dtype] * b.norm()


def test_linear_hacpo_loss_padded_module_equals_the_one_from_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, HIDDEN, generator=generator)
    weight = torch.randn(33, HIDDEN, generator=generator)
    targets = torch.randint(0, 33, (3, 4), generator=generator)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]])
    targets[mask == 0] = -100
    arguments = (targets, mask, torch.tensor([-3.0, -4.0, -4.0]), torch.tensor([1.0, -1.0, 0.5]))
    cross = torch.tensor([False, True, True])
    ours = LinearHACPOLoss()(hidden, weight, *arguments, is_cross=cross)
    theirs = HACPOLoss()(hidden @ weight.T, *arguments, is_cross=cross)
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs)
    torch.testing.assert_close(ours.ratios, theirs.ratios)


def products(
    zero: float, live: float, *, frozen_weight: bool = False, budget: int = 1 << 30, sequences: int = 16
) -> float:
    """Matrix products of one call in units of 2 N V H, with shares of rows that have advantage 0 and that are live."""
    length, vocab, hidden_size = 8, 64, 16
    rows = sequences * length
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=not frozen_weight)
    targets = torch.randint(0, vocab, (rows,))
    advantages = torch.ones(sequences)
    advantages[: int(zero * sequences)] = 0.0
    means = linear_token_logprobs(hidden, weight, targets).detach().view(sequences, length).mean(-1)
    means[int(zero * sequences) : int((1 - live) * sequences)] -= 1.0  # ratio e: clipped
    batch = SequenceBatch(torch.arange(sequences + 1) * length, means, advantages)
    with FlopCounterMode(display=False) as counter:
        linear_hacpo_loss(hidden, weight, targets, batch, HACPOConfig(), memory_budget=budget).loss.backward()
    return counter.get_total_flops() / (2 * rows * vocab * hidden_size)


@pytest.mark.parametrize(("zero", "live"), [(z, f) for z in (0, 0.25, 0.5, 1) for f in (0, 0.25, 0.5, 1) if z + f <= 1])
def test_linear_hacpo_loss_costs_one_product_for_scored_and_two_for_live_rows(zero: float, live: float) -> None:
    assert products(zero, live) == (1 - zero) + 2 * live
    assert products(zero, live, frozen_weight=True) == (1 - zero) + live


def test_linear_hacpo_loss_sequence_above_the_budget_recomputes_only_what_is_not_cached() -> None:
    # 8 rows of 64 columns do not fit 4 rows: tiles of 1, 3 cached, 5 computed twice
    assert products(0, 1, budget=4 * 64 * 4) == 3 + 5 / 8
    assert products(0, 0, budget=4 * 64 * 4) == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(33, 6)}, ValueError, "hidden_states must have shape .* H = 6"),
        ({"weight": torch.zeros(0)}, ValueError, "looks like a sharded parameter.*inside the forward"),
        ({"weight": torch.zeros(33, HIDDEN, dtype=torch.int64)}, TypeError, "lm_head_weight must be a floating dtype"),
        ({"bias": torch.zeros(32)}, ValueError, r"bias must have shape \(V,\) = \(33,\), got \(32,\)"),
        ({"memory_budget": 100}, ValueError, "linear_hacpo_loss: memory_budget must be at least the 132 bytes"),
        ({"targets": torch.full((15,), 33)}, ValueError, r"target_ids must lie in \[0, V\) = \[0, 33\), got 33"),
    ],
)
def test_linear_hacpo_loss_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = Inputs(HACPOConfig(), 33, torch.float32, bias=False, mask=False)
    weight, targets = change.get("weight", inputs.weight), change.get("targets", inputs.targets)
    keywords = {key: value for key, value in change.items() if key in ("bias", "memory_budget")}
    with pytest.raises(error, match=message):
        linear_hacpo_loss(inputs.hidden, weight, targets, inputs.sequences, inputs.config, **keywords)


def test_linear_hacpo_loss_zero3_shard_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.zeros(0))
    weight.ds_id = 3  # type: ignore[attr-defined]
    inputs = Inputs(HACPOConfig(), 33, torch.float32, bias=False, mask=False)
    with pytest.raises(ValueError, match="ZeRO-3 shard"):
        linear_hacpo_loss(inputs.hidden, weight, inputs.targets, inputs.sequences, inputs.config)
