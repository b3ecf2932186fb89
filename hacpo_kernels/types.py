"""The configuration of the objective, the description of a batch of sequences, and what a loss returns."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from .checks import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    check_dtype,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    values_are_checked,
)

_CROSS_RULES = ("hacpo", "self", "none")


@dataclass(frozen=True)
class HACPOConfig:
    """Settings of the objective (Eq. 12-14 of arXiv 2603.02604).

    With s the sequence ratio, A the advantage, omega the weight and sg stop-gradient, a sequence contributes

        self:   J = min(s * A, clamp(s, 1 - epsilon_low, 1 + epsilon_high) * A)
        cross:  c = clamp(s, low_u, cross_clip_high);  J = c * sg(c)**alpha * omega * A
                low_u = min(cross_clip_low + u * cross_clip_step, cross_clip_high)

    Args:
        alpha: exponent of the stop-gradient ratio of cross sequences, >= 0.
        cross_clip_low: lower bound of the cross ratio at update u = 0, in (0, cross_clip_high]. It is the bound
            itself (0.8), not its distance from 1.
        cross_clip_step: how much the lower bound rises with each update of a step, >= 0.
        cross_clip_high: upper bound of the cross ratio.
        epsilon_low, epsilon_high: clip radii of the self ratio, epsilon_low in [0, 1), epsilon_high >= 0.
        beta: weight of the KL term on self sequences (k3 estimator), >= 0.
        ratio: "sequence" or "token": the ratio of the sequences under the self rule. "token" is GRPO's ratio
            per token and needs `SequenceBatch.old_logprobs`; cross sequences under the "hacpo" rule keep the sequence
            ratio.
        cross: what happens to cross sequences: "hacpo" (the rule above), "self" (naive sharing: the self rule, weight
            1) or "none" (they are refused: GSPO and GRPO learn from their own sequences only).

    Raises:
        ValueError: a value outside its range. TypeError: not a number.
    """

    alpha: float = 1.0
    cross_clip_low: float = 0.8
    cross_clip_step: float = 0.025
    cross_clip_high: float = 1.0
    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4
    beta: float = 0.0
    ratio: Literal["sequence", "token"] = "sequence"
    cross: Literal["hacpo", "self", "none"] = "hacpo"

    def __post_init__(self) -> None:
        for name in ("alpha", "cross_clip_step", "epsilon_low", "epsilon_high", "beta"):
            check_number("HACPOConfig", name, getattr(self, name), minimum=0.0)
        for name in ("cross_clip_low", "cross_clip_high"):
            check_number("HACPOConfig", name, getattr(self, name), minimum=0.0, exclusive=True)
        if self.cross_clip_low > self.cross_clip_high:
            raise ValueError(
                f"HACPOConfig: cross_clip_low must be <= cross_clip_high = {self.cross_clip_high}, got "
                f"{self.cross_clip_low}. It is the lower bound of the ratio itself, for example 0.8."
            )
        if self.epsilon_low >= 1.0:
            raise ValueError(f"HACPOConfig: epsilon_low must be < 1, got {self.epsilon_low}.")
        if self.ratio not in ("sequence", "token"):
            raise ValueError(f"HACPOConfig: ratio must be 'sequence' or 'token', got {self.ratio!r}.")
        if self.cross not in _CROSS_RULES:
            raise ValueError(f"HACPOConfig: cross must be one of {_CROSS_RULES}, got {self.cross!r}.")
        if self.ratio == "token" and self.cross == "self":
            raise ValueError(
                "HACPOConfig: ratio='token' with cross='self' is not defined: the source's per-token log-probabilities "
                "belong to another tokenization than the learner's."
            )

    @classmethod
    def gspo(cls, *, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4, beta: float = 0.0) -> HACPOConfig:
        """GSPO: the self rule on own sequences alone."""
        return cls(epsilon_low=epsilon_low, epsilon_high=epsilon_high, beta=beta, cross="none")

    @classmethod
    def grpo(cls, *, epsilon_low: float = 0.2, epsilon_high: float = 0.28, beta: float = 0.0) -> HACPOConfig:
        """GRPO: a ratio per token, own sequences alone. The mean over sequences of the mean over tokens."""
        return cls(epsilon_low=epsilon_low, epsilon_high=epsilon_high, beta=beta, ratio="token", cross="none")

    @classmethod
    def naive(cls, *, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4, beta: float = 0.0) -> HACPOConfig:
        """Naive sharing: cross sequences are treated as if they were the learner's own, with weight 1."""
        return cls(epsilon_low=epsilon_low, epsilon_high=epsilon_high, beta=beta, cross="self")

    def cross_bounds(self, update_index: int) -> tuple[float, float]:
        """(low_u, high): the bounds of the cross ratio at the u-th update of a step (Eq. 14)."""
        low = self.cross_clip_low + update_index * self.cross_clip_step
        # 0.8 + 8 * 0.025 must close the interval whatever the rounding of the sum
        return (self.cross_clip_high if low > self.cross_clip_high - 1e-9 else low), self.cross_clip_high

    def cross_closes_at(self) -> int | None:
        """The first update index at which low_u reaches the upper bound, so that cross is dead; None: never."""
        if self.cross != "hacpo":
            return None
        if self.cross_bounds(0)[0] >= self.cross_clip_high:
            return 0
        if self.cross_clip_step == 0:
            return None
        guess = max(0, int((self.cross_clip_high - self.cross_clip_low) / self.cross_clip_step) - 1)
        while self.cross_bounds(guess)[0] < self.cross_clip_high:
            guess += 1
        return guess


def check_update_index(where: str, update_index: object) -> int:
    """`update_index` as an int >= 0. A tensor is refused: reading it would make an accelerator wait."""
    if isinstance(update_index, (bool, Tensor)):
        raise TypeError(f"{where}: update_index must be a Python int, got {type(update_index).__name__}.")
    try:
        index = operator.index(update_index)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{where}: update_index must be an int, got {type(update_index).__name__}.") from None
    if index < 0:
        raise ValueError(f"{where}: update_index counts the updates already done in this step, >= 0, got {index}.")
    return index


@dataclass(frozen=True)
class SequenceBatch:
    """S sequences over N rows of tokens: sequence i owns the rows cu_seqlens[i] to cu_seqlens[i + 1].

    Args:
        cu_seqlens: (S + 1,) int32 or int64, non-decreasing from 0 to N (flash-attention's convention).
        source_mean_logprobs: (S,) float, nats per token: the mean log-probability of the response under the policy that
            sampled it, over that policy's own tokens, at the temperature it sampled with.
        advantages: (S,) float. 0 makes a sequence dead.
        weights: (S,) float, omega of cross sequences (source over learner); entries of self sequences are not read.
            None: 1.
        is_cross: (S,) bool, True where another agent generated the response. None: all self.
        lengths: (S,) int or float, > 0: what divides the learner's sum of log-probabilities. None: the sequence's own
            number of counted tokens. The source's token count gives both sums one divisor.
        ref_logprobs: (N,) float, per-token log-probabilities of the reference policy; needed when beta > 0.
        old_logprobs: (N,) float, per-token log-probabilities at sampling time; needed for ratio="token".
        loss_mask: (N,) bool or int, rows that count (True). None: all. Rows that do not count influence nothing, even
            when they hold NaN: padding needs no repacking.

    A sequence without counted tokens is empty: J = 0, no gradient, not counted; its other entries are not read.

    Raises:
        ValueError: shape, device or value. TypeError: dtype or class. Values are checked on CPU tensors, and on an
            accelerator under HACPO_KERNELS_CHECK=1.
    """

    cu_seqlens: Tensor
    source_mean_logprobs: Tensor
    advantages: Tensor
    weights: Tensor | None = None
    is_cross: Tensor | None = None
    lengths: Tensor | None = None
    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    loss_mask: Tensor | None = None

    def __post_init__(self) -> None:
        where = "SequenceBatch"
        cu_seqlens = check_tensor(where, "cu_seqlens", self.cu_seqlens)
        check_dtype(where, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64), "int32 or int64")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
            raise ValueError(f"{where}: cu_seqlens must have shape (S + 1,), got {tuple(cu_seqlens.shape)}.")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            self._check_field(field.name, value)
        if values_are_checked(cu_seqlens):
            self._check_values()

    @property
    def num_sequences(self) -> int:
        """S, empty sequences included."""
        return self.cu_seqlens.numel() - 1

    def _check_field(self, name: str, value: object) -> None:
        where, size = "SequenceBatch", self.num_sequences
        tensor = check_tensor(where, name, value)
        check_same_device(where, name, tensor, "cu_seqlens", self.cu_seqlens)
        if name in ("ref_logprobs", "old_logprobs", "loss_mask"):
            if tensor.dim() != 1:
                raise ValueError(f"{where}: {name} must have shape (N,), got {tuple(tensor.shape)}.")
        elif tuple(tensor.shape) != (size,):
            raise ValueError(
                f"{where}: {name} must have shape (S,) = ({size},) like cu_seqlens says, got {tuple(tensor.shape)}."
            )
        if name == "is_cross":
            check_dtype(where, name, tensor, (torch.bool,), "bool")
        elif name == "loss_mask":
            check_dtype(where, name, tensor, (torch.bool, *INTEGER_DTYPES), "bool or an integer dtype")
        elif name == "lengths":
            check_dtype(where, name, tensor, (*INTEGER_DTYPES, *FLOAT_DTYPES), "an integer or floating dtype")
        else:
            check_dtype(where, name, tensor, FLOAT_DTYPES, "a floating dtype")

    def _check_values(self) -> None:
        where, cu_seqlens = "SequenceBatch", self.cu_seqlens
        if int(cu_seqlens[0]) != 0 or bool((cu_seqlens[1:] < cu_seqlens[:-1]).any()):
            raise ValueError(f"{where}: cu_seqlens must start at 0 and never decrease, got {cu_seqlens.tolist()[:16]}.")
        counted = self.token_counts() > 0
        for name in ("source_mean_logprobs", "advantages", "weights", "lengths"):
            value = getattr(self, name)
            if value is None:
                continue
            read = counted if name != "weights" else counted & self.cross_mask()
            wrong = read & ~torch.isfinite(value)
            rule = "finite"
            if name in ("weights", "lengths"):
                wrong |= read & (value <= 0 if name == "lengths" else value < 0)
                rule = "finite and > 0" if name == "lengths" else "finite and >= 0"
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                raise ValueError(f"{where}: {name} must be {rule}, got {value[first].item()} for sequence {first}.")

    def check_rows(self, where: str, num_rows: int) -> None:
        """cu_seqlens ends at `num_rows` and every per-row field has that length."""
        for name in ("ref_logprobs", "old_logprobs", "loss_mask"):
            value = getattr(self, name)
            if value is not None:
                check_shape(where, f"sequences.{name}", value, (num_rows,), "(N,)")
        if values_are_checked(self.cu_seqlens) and int(self.cu_seqlens[-1]) != num_rows:
            raise ValueError(
                f"{where}: cu_seqlens must end at the number of tokens N = {num_rows}, got {int(self.cu_seqlens[-1])}."
            )

    def check_config(self, where: str, config: HACPOConfig) -> None:
        """What the configuration needs is there."""
        if config.beta > 0 and self.ref_logprobs is None:
            raise ValueError(f"{where}: beta = {config.beta} > 0 needs sequences.ref_logprobs (N,), got None.")
        if config.ratio == "token" and self.old_logprobs is None:
            raise ValueError(f"{where}: ratio='token' needs sequences.old_logprobs (N,), got None.")
        if config.cross == "none" and self.is_cross is not None and values_are_checked(self.is_cross):
            count = int(self.is_cross.sum())
            if count:
                raise ValueError(
                    f"{where}: config.cross = 'none' (GSPO, GRPO) takes self sequences only, got {count} cross "
                    "sequences. Drop them, or use HACPOConfig() or HACPOConfig.naive()."
                )

    def cross_mask(self) -> Tensor:
        """(S,) bool: `is_cross`, all False when it is None."""
        if self.is_cross is None:
            return torch.zeros(self.num_sequences, dtype=torch.bool, device=self.cu_seqlens.device)
        return self.is_cross

    def token_counts(self) -> Tensor:
        """(S,) int64: counted tokens of each sequence."""
        if self.loss_mask is None:
            return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        ends = torch.nn.functional.pad((self.loss_mask != 0).long().cumsum(0), (1, 0))
        rows = self.cu_seqlens.long().clamp(0, self.loss_mask.numel())
        return ends[rows[1:]] - ends[rows[:-1]]

    def sequence_of_row(self, num_rows: int) -> Tensor:
        """(N,) int64: the sequence that owns each row, without a host sync."""
        rows = torch.arange(num_rows, device=self.cu_seqlens.device)
        owner = torch.searchsorted(self.cu_seqlens[1:].long().contiguous(), rows, right=True)
        return owner.clamp_(max=max(self.num_sequences - 1, 0))


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns.

    Attributes:
        loss: 0-d, differentiable. On the first on-policy update it is 0 while its gradient is not: the ratios are 1
            and the advantages of a group sum to 0.
        logprobs: (N,) detached float32 log-probabilities in nats; 0 where loss_mask is False. The next step's
            `old_logprobs`, and their means its `source_mean_logprobs`. float64 when the input was.
        ratios: (S,) detached sequence ratios, before clipping; 1 for an empty sequence.
        live: (S,) bool, False where the gradient is exactly zero: advantage 0, clipped, or empty.
        metrics: name -> 0-d tensor, over the non-empty sequences of this call; NaN where there is nothing to average.
            Nothing in it makes the host wait.
    """

    loss: Tensor
    logprobs: Tensor
    ratios: Tensor
    live: Tensor
    metrics: dict[str, Tensor]
