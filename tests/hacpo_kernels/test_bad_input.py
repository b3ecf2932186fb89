"""Wrong arguments are refused with the function, the argument, the rule and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from hacpo_kernels import (
    HACPOConfig,
    HACPOLoss,
    SequenceBatch,
    hacpo_loss,
    hacpo_loss_from_logprobs,
    token_logprobs,
)
from hacpo_kernels.checks import values_are_checked

NAN = float("nan")
META = torch.device("meta")


class DTensor(torch.Tensor):
    """Has the name that is refused."""


def sharded(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).as_subclass(DTensor)


def batch(**changes: Any) -> SequenceBatch:
    fields: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, 2, 5]), "source_mean_logprobs": torch.zeros(2), "advantages": torch.ones(2),
    }  # fmt: skip
    return SequenceBatch(**fields | changes)


def three() -> dict[str, Any]:
    """A batch of three sequences of which the second is empty, and the last cross."""
    return {
        "cu_seqlens": torch.tensor([0, 2, 2, 5]), "source_mean_logprobs": torch.zeros(3), "advantages": torch.ones(3),
        "is_cross": torch.tensor([False, False, True]),
    }  # fmt: skip


def loss(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(5, 4), "target_ids": torch.zeros(5, dtype=torch.long), "sequences": batch(),
        "config": HACPOConfig(),
    }  # fmt: skip
    return hacpo_loss(**arguments | changes)


def from_logprobs(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"logprobs": -torch.ones(5), "sequences": batch(), "config": HACPOConfig()}
    return hacpo_loss_from_logprobs(**arguments | changes)


def scored(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"logits": torch.zeros(3, 4), "target_ids": torch.zeros(3, dtype=torch.long)}
    return token_logprobs(**arguments | changes)


def module(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 3, 4), "target_ids": torch.zeros(2, 3, dtype=torch.long),
        "loss_mask": torch.ones(2, 3), "source_mean_logprobs": torch.zeros(2), "advantages": torch.ones(2),
    }  # fmt: skip
    arguments["loss_mask"] = arguments["loss_mask"].bool()
    return HACPOLoss()(**arguments | changes)


Case = tuple[Callable[..., Any], dict[str, Any], type[Exception], str]

SEQUENCE_BATCH: list[Case] = [
    (batch, {"cu_seqlens": [0, 2, 5]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    (batch, {"cu_seqlens": sharded(3)}, TypeError, r"cu_seqlens is a DTensor .*full_tensor\(\)"),
    (batch, {"cu_seqlens": torch.tensor([0.0, 2.0, 5.0])}, TypeError,
     "cu_seqlens must be int32 or int64, got torch.float32"),
    (batch, {"cu_seqlens": torch.tensor(3)}, ValueError, r"cu_seqlens must have shape \(S \+ 1,\), got \(\)"),
    (batch, {"cu_seqlens": torch.zeros(0).long()}, ValueError, r"cu_seqlens must have shape \(S \+ 1,\), got \(0,\)"),
    (batch, {"cu_seqlens": torch.tensor([1, 2, 5])}, ValueError,
     r"must start at 0 and never decrease, got \[1, 2, 5\]"),
    (batch, {"cu_seqlens": torch.tensor([0, 6, 5])}, ValueError,
     r"must start at 0 and never decrease, got \[0, 6, 5\]"),
    (batch, {"cu_seqlens": torch.tensor([0, -1, 5])}, ValueError, r"must start at 0 and never decrease"),
    (batch, {"advantages": torch.ones(4)}, ValueError,
     r"advantages must have shape \(S,\) = \(2,\) like cu_seqlens says, got \(4,\)"),
    (batch, {"advantages": torch.ones(2, 1)}, ValueError, r"advantages must have shape \(S,\) = \(2,\).*got \(2, 1\)"),
    (batch, {"advantages": torch.ones(2).long()}, TypeError, "advantages must be a floating dtype, got torch.int64"),
    (batch, {"advantages": None}, TypeError, "advantages must be a torch.Tensor, got NoneType"),
    (batch, {"advantages": torch.tensor([1.0, NAN])}, ValueError, "advantages must be finite, got nan for sequence 1"),
    (batch, {"advantages": torch.ones(2, device=META)}, ValueError, "advantages is on meta but cu_seqlens is on cpu"),
    (batch, {"source_mean_logprobs": None}, TypeError, "source_mean_logprobs must be a torch.Tensor, got NoneType"),
    (batch, {"source_mean_logprobs": torch.zeros(3)}, ValueError,
     r"source_mean_logprobs must have shape \(S,\) = \(2,\)"),
    (batch, {"source_mean_logprobs": torch.tensor([-float("inf"), 0.0])}, ValueError,
     "source_mean_logprobs must be finite, got -inf for sequence 0"),
    (SequenceBatch, three() | {"weights": torch.tensor([1.0, 1.0, -0.5])}, ValueError,
     "weights must be finite and >= 0, got -0.5 for sequence 2"),
    (SequenceBatch, three() | {"weights": torch.tensor([1.0, 1.0, NAN])}, ValueError,
     "weights must be finite and >= 0, got nan for sequence 2"),
    (batch, {"weights": torch.ones(2, dtype=torch.int32)}, TypeError, "weights must be a floating dtype"),
    (batch, {"is_cross": torch.zeros(2)}, TypeError, "is_cross must be bool, got torch.float32"),
    (batch, {"is_cross": torch.zeros(3).bool()}, ValueError, r"is_cross must have shape \(S,\) = \(2,\)"),
    (batch, {"lengths": torch.tensor([2, 0])}, ValueError, "lengths must be finite and > 0, got 0 for sequence 1"),
    (batch, {"lengths": torch.tensor([-2.0, 1.0])}, ValueError,
     "lengths must be finite and > 0, got -2.0 for sequence 0"),
    (batch, {"lengths": torch.ones(2).bool()}, TypeError,
     "lengths must be an integer or floating dtype, got torch.bool"),
    (batch, {"ref_logprobs": torch.zeros(1, 5)}, ValueError, r"ref_logprobs must have shape \(N,\), got \(1, 5\)"),
    (batch, {"ref_logprobs": torch.zeros(5).int()}, TypeError, "ref_logprobs must be a floating dtype"),
    (batch, {"old_logprobs": torch.zeros(1, 5)}, ValueError, r"old_logprobs must have shape \(N,\), got \(1, 5\)"),
    (batch, {"loss_mask": torch.ones(5)}, TypeError, "loss_mask must be bool or an integer dtype, got torch.float32"),
    (batch, {"loss_mask": torch.ones(1, 5).bool()}, ValueError, r"loss_mask must have shape \(N,\), got \(1, 5\)"),
    (batch, {"loss_mask": torch.ones(5, device=META).bool()}, ValueError,
     "loss_mask is on meta but cu_seqlens is on cpu"),
]  # fmt: skip

TOKEN_LOGPROBS: list[Case] = [
    (scored, {"logits": [[0.0]]}, TypeError, "logits must be a torch.Tensor, got list"),
    (scored, {"logits": sharded(3, 4)}, TypeError, r"logits is a DTensor .*forward of the wrapped module"),
    (scored, {"target_ids": sharded(3)}, TypeError, "target_ids is a DTensor"),
    (scored, {"logits": torch.zeros(3, 4).int()}, TypeError,
     "logits must be float16, bfloat16, float32 or float64, got torch.int32"),
    (scored, {"logits": torch.zeros(3, 4, dtype=torch.complex64)}, TypeError, "got torch.complex64"),
    (scored, {"logits": torch.zeros(4)}, ValueError, r"logits must have shape \(N, V\) or \(B, T, V\), got \(4,\)"),
    (scored, {"logits": torch.zeros(1, 1, 3, 4)}, ValueError, r"\(N, V\) or \(B, T, V\), got \(1, 1, 3, 4\)"),
    (scored, {"logits": torch.zeros(3, 0)}, ValueError, r"logits must have at least one column, got shape \(3, 0\)"),
    (scored, {"target_ids": torch.zeros(4).long()}, ValueError,
     r"target_ids must have shape logits.shape\[:-1\] = \(3,\), got \(4,\)"),
    (scored, {"target_ids": torch.zeros(3)}, TypeError, "target_ids must be an integer dtype, got torch.float32"),
    (scored, {"target_ids": torch.zeros(3).bool()}, TypeError, "target_ids must be an integer dtype, got torch.bool"),
    (scored, {"target_ids": torch.zeros(3, device=META).long()}, ValueError,
     "target_ids is on meta but logits is on cpu"),
    (scored, {"target_ids": torch.tensor([0, 10, 4])}, ValueError,
     r"target_ids must lie in \[0, V\) = \[0, 4\), got 10 at position 1 \(2 such ids\).*tokenizer"),
    (scored, {"target_ids": torch.tensor([0, 0, -1])}, ValueError, "got -1 at position 2 .1 such"),
    (scored, {"logits": torch.zeros(2, 2, 4), "target_ids": torch.tensor([[0, 0], [4, 0]])}, ValueError,
     r"got 4 at position \(1, 0\)"),
    (scored, {"temperature": 0.0}, ValueError, "temperature must be a finite number > 0, got 0.0"),
    (scored, {"temperature": -1}, ValueError, "temperature must be a finite number > 0, got -1"),
    (scored, {"temperature": NAN}, ValueError, "temperature must be a finite number > 0, got nan"),
    (scored, {"temperature": "1"}, TypeError, "temperature must be a number, got str"),
    (scored, {"temperature": torch.ones(2)}, ValueError,
     r"temperature must have shape one per sequence = \(3,\), got \(2,\)"),
    (scored, {"temperature": torch.tensor([1.0, 0.0, 1.0])}, ValueError,
     r"temperature must be finite and > 0, got \[1.0, 0.0, 1.0\]"),
    (scored, {"temperature": torch.ones(3).long()}, TypeError, "temperature must be a floating dtype, got torch.int64"),
    (scored, {"logit_scale": 0.0}, ValueError, "logit_scale must be a finite number > 0, got 0.0"),
    (scored, {"logit_scale": True}, TypeError, "logit_scale must be a number, got bool"),
    (scored, {"softcap": 0.0}, ValueError, "softcap must be a finite number > 0, got 0.0"),
    (scored, {"softcap": float("inf")}, ValueError, "softcap must be a finite number > 0, got inf"),
]  # fmt: skip

LOSS: list[Case] = [
    (loss, {"logits": torch.zeros(6, 4), "target_ids": torch.zeros(6).long()}, ValueError,
     "cu_seqlens must end at the number of tokens N = 6, got 5"),
    (loss, {"sequences": {"advantages": torch.ones(2)}}, TypeError, "sequences must be a SequenceBatch, got dict"),
    (loss, {"config": {"alpha": 1.0}}, TypeError, "config must be a HACPOConfig, got dict"),
    (loss, {"config": HACPOConfig(beta=0.1)}, ValueError,
     r"beta = 0.1 > 0 needs sequences.ref_logprobs \(N,\), got None"),
    (loss, {"config": HACPOConfig.grpo()}, ValueError, r"ratio='token' needs sequences.old_logprobs \(N,\), got None"),
    (loss, {"sequences": batch(ref_logprobs=torch.zeros(4))}, ValueError,
     r"sequences.ref_logprobs must have shape \(N,\) = \(5,\), got \(4,\)"),
    (loss, {"sequences": batch(old_logprobs=torch.zeros(6))}, ValueError,
     r"sequences.old_logprobs must have shape \(N,\) = \(5,\), got \(6,\)"),
    (loss, {"sequences": batch(loss_mask=torch.ones(6).bool())}, ValueError,
     r"sequences.loss_mask must have shape \(N,\) = \(5,\), got \(6,\)"),
    (loss, {"logits": torch.zeros(5, 4, device=META), "target_ids": torch.zeros(5, device=META).long()}, ValueError,
     "sequences is on cpu but logits is on meta"),
    (loss, {"target_ids": torch.tensor([0, 0, -100, 0, 0])}, ValueError,
     r"target_ids must lie in \[0, V\) = \[0, 4\), got -100 at position 2"),
    (loss, {"temperature": torch.ones(5)}, ValueError,
     r"temperature must have shape one per sequence = \(2,\), got \(5,\)"),
    (loss, {"backend": "cuda"}, ValueError, "backend must be one of .*, got 'cuda'"),
    (from_logprobs, {"logprobs": torch.zeros(1, 5)}, ValueError,
     r"logprobs must have shape \(N,\), got \(1, 5\).*flatten"),
    (from_logprobs, {"logprobs": torch.zeros(5).int()}, TypeError,
     "logprobs must be a floating dtype, got torch.int32"),
    (from_logprobs, {"logprobs": [0.0]}, TypeError, "logprobs must be a torch.Tensor, got list"),
    (from_logprobs, {"logprobs": sharded(5)}, TypeError, "logprobs is a DTensor"),
    (from_logprobs, {"logprobs": torch.zeros(4)}, ValueError,
     "cu_seqlens must end at the number of tokens N = 4, got 5"),
    (from_logprobs, {"logprobs": torch.zeros(5, device=META)}, ValueError,
     "sequences is on cpu but logprobs is on meta"),
    (module, {"logits": torch.zeros(6, 4)}, ValueError, r"logits must have shape \(B, T, V\), got \(6, 4\)"),
    (module, {"loss_mask": torch.ones(3, 2).bool()}, ValueError,
     r"loss_mask must have shape \(B, T\) = \(2, 3\), got \(3, 2\)"),
    (module, {"loss_mask": torch.ones(2, 3)}, TypeError,
     "loss_mask must be bool or an integer dtype, got torch.float32"),
    (module, {"ref_logprobs": torch.zeros(6)}, ValueError,
     r"ref_logprobs must have shape \(B, T\) = \(2, 3\), got \(6,\)"),
    (module, {"old_logprobs": torch.zeros(3, 2)}, ValueError,
     r"old_logprobs must have shape \(B, T\) = \(2, 3\), got \(3, 2\)"),
    (module, {"target_ids": torch.zeros(2, 4).long()}, ValueError,
     r"target_ids must have shape .* = \(2, 3\), got \(2, 4\)"),
    (module, {"logits": sharded(2, 3, 4)}, TypeError, "logits is a DTensor"),
]  # fmt: skip

COUNTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"update_index": -1}, ValueError, "update_index counts the updates already done in this step, >= 0, got -1"),
    ({"update_index": 1.0}, TypeError, "update_index must be an int, got float"),
    ({"update_index": torch.tensor(1)}, TypeError, "update_index must be a Python int, got Tensor"),
    ({"update_index": True}, TypeError, "update_index must be a Python int, got bool"),
    ({"update_index": None}, TypeError, "update_index must be an int, got NoneType"),
    ({"num_sequences": 0}, ValueError, "num_sequences must be a finite number > 0, got 0"),
    ({"num_sequences": -4}, ValueError, "num_sequences must be a finite number > 0, got -4"),
    ({"num_sequences": NAN}, ValueError, "num_sequences must be a finite number > 0, got nan"),
    ({"num_sequences": "4"}, TypeError, "num_sequences must be a number, got str"),
    ({"num_sequences": torch.ones(2)}, ValueError, r"num_sequences must be a number or one element, got shape \(2,\)"),
    ({"num_sequences": torch.tensor(0)}, ValueError, "num_sequences must be a finite number > 0, got 0"),
    ({"num_sequences": torch.tensor(NAN)}, ValueError, "num_sequences must be a finite number > 0, got nan"),
    ({"num_self_sequences": -1}, ValueError, "num_self_sequences must be a finite number >= 0, got -1"),
    ({"num_self_sequences": torch.tensor(-1.0)}, ValueError,
     "num_self_sequences must be a finite number >= 0, got -1.0"),
    ({"num_self_sequences": torch.ones(2)}, ValueError, "num_self_sequences must be a number or one element"),
]  # fmt: skip


def names(cases: list[Case]) -> list[str]:
    return [f"{'+'.join(changes)}-{message[:40]}" for _, changes, _, message in cases]


@pytest.mark.parametrize("call, changes, error, message", SEQUENCE_BATCH, ids=names(SEQUENCE_BATCH))
def test_sequence_batch_wrong_field_is_refused_by_name(
    call: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^SequenceBatch: (.*){message}"):
        call(**changes)


@pytest.mark.parametrize("call, changes, error, message", TOKEN_LOGPROBS, ids=names(TOKEN_LOGPROBS))
def test_token_logprobs_wrong_argument_is_refused_by_name(
    call: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^token_logprobs: (.*){message}"):
        call(**changes)


@pytest.mark.parametrize("call, changes, error, message", LOSS, ids=names(LOSS))
def test_loss_wrong_argument_is_refused_by_name(
    call: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    where = {loss: "hacpo_loss", from_logprobs: "hacpo_loss_from_logprobs", module: "(HACPOLoss|hacpo_loss)"}[call]
    with pytest.raises(error, match=f"^{where}: (.*){message}"):
        call(**changes)


@pytest.mark.parametrize("call, where", [(loss, "hacpo_loss"), (from_logprobs, "hacpo_loss_from_logprobs")])
@pytest.mark.parametrize("changes, error, message", COUNTS, ids=[c[2][:60] for c in COUNTS])
def test_loss_wrong_count_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str, call: Callable[..., Any], where: str
) -> None:
    with pytest.raises(error, match=f"^{where}: {message}"):
        call(**changes)


def test_hacpo_loss_module_wrong_config_is_refused() -> None:
    with pytest.raises(TypeError, match="HACPOLoss: config must be a HACPOConfig, got dict"):
        HACPOLoss({"alpha": 1.0})  # type: ignore[arg-type]


def test_sequence_batch_values_of_an_empty_sequence_are_not_read() -> None:
    fields = three()
    fields["advantages"][1] = NAN
    fields["source_mean_logprobs"][1] = NAN
    assert SequenceBatch(**fields, lengths=torch.tensor([2, 0, 3])).num_sequences == 3


def test_sequence_batch_weights_of_self_sequences_are_not_read() -> None:
    assert SequenceBatch(**three(), weights=torch.tensor([NAN, -1.0, 1.0])).num_sequences == 3


def test_hacpo_loss_target_outside_the_mask_may_be_anything() -> None:
    mask = torch.tensor([True, True, False, True, True])
    out = loss(target_ids=torch.tensor([0, 0, 99, 0, 0]), sequences=batch(loss_mask=mask))
    assert torch.isfinite(out.loss)


def test_values_on_an_accelerator_are_looked_at_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HACPO_KERNELS_CHECK", raising=False)
    assert values_are_checked(torch.zeros(1))
    assert not values_are_checked(torch.zeros(1, device=META))
    monkeypatch.setenv("HACPO_KERNELS_CHECK", "1")
    assert values_are_checked(torch.zeros(1, device=META))


def test_update_index_may_be_anything_that_indexes() -> None:
    assert torch.equal(loss(update_index=numpy.int64(3)).loss, loss(update_index=3).loss)
