"""The loss as an nn.Module over padded (batch, time) tensors, as most trainers hold them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .checks import INTEGER_DTYPES, check_dtype, check_shape, check_tensor
from .loss import hacpo_loss
from .types import HACPOConfig, LossOutput, SequenceBatch


def padded_sequences(
    where: str,
    loss_mask: Tensor,
    source_mean_logprobs: Tensor,
    advantages: Tensor,
    *,
    weights: Tensor | None = None,
    is_cross: Tensor | None = None,
    lengths: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    old_logprobs: Tensor | None = None,
) -> SequenceBatch:
    """A SequenceBatch over the B * T rows of padded tensors: every row of the batch is a sequence of T rows, of which
    those in `loss_mask` count. Nothing is moved, so padding may sit anywhere."""
    loss_mask = check_tensor(where, "loss_mask", loss_mask)
    check_dtype(where, "loss_mask", loss_mask, (torch.bool, *INTEGER_DTYPES), "bool or an integer dtype")
    if loss_mask.dim() != 2:
        raise ValueError(f"{where}: loss_mask must have shape (B, T), got {tuple(loss_mask.shape)}.")
    batch, time = loss_mask.shape
    per_token = {"ref_logprobs": ref_logprobs, "old_logprobs": old_logprobs}
    for name, value in per_token.items():
        if value is not None:
            check_shape(where, name, check_tensor(where, name, value), (batch, time), "(B, T)")
    flat = {name: None if value is None else value.reshape(-1) for name, value in per_token.items()}
    return SequenceBatch(
        cu_seqlens=torch.arange(batch + 1, device=loss_mask.device) * time,
        source_mean_logprobs=source_mean_logprobs,
        advantages=advantages,
        weights=weights,
        is_cross=is_cross,
        lengths=lengths,
        loss_mask=loss_mask.reshape(-1) != 0,
        **flat,
    )


class HACPOLoss(nn.Module):
    """`hacpo_loss` for padded logits.

    Example::

        loss_fn = HACPOLoss(HACPOConfig())
        logits = model(input_ids).logits                    # (B, T + 1, V)
        out = loss_fn(logits[:, :-1], input_ids[:, 1:], loss_mask[:, 1:], source_mean_logprobs, advantages,
                      is_cross=is_cross, weights=weights)
        del logits                                           # else they outlive the backward pass
        out.loss.backward()
    """

    def __init__(self, config: HACPOConfig | None = None) -> None:
        super().__init__()
        self.config = HACPOConfig() if config is None else config
        if not isinstance(self.config, HACPOConfig):
            raise TypeError(f"HACPOLoss: config must be a HACPOConfig, got {type(config).__name__}.")

    def forward(
        self,
        logits: Tensor,
        target_ids: Tensor,
        loss_mask: Tensor,
        source_mean_logprobs: Tensor,
        advantages: Tensor,
        *,
        weights: Tensor | None = None,
        is_cross: Tensor | None = None,
        lengths: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        update_index: int = 0,
        num_sequences: float | Tensor | None = None,
        num_self_sequences: float | Tensor | None = None,
        temperature: float | Tensor = 1.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> LossOutput:
        """The loss of a padded batch.

        Args:
            logits: (B, T, V); position t scores target t. Positions outside `loss_mask` are not read.
            target_ids: (B, T) integer; anything, -100 included, outside `loss_mask`.
            loss_mask: (B, T) bool or int, True where a token counts; left, right or inner padding alike.
            source_mean_logprobs, advantages, weights, is_cross, lengths: (B,), as in `SequenceBatch`.
            ref_logprobs, old_logprobs: (B, T), as in `SequenceBatch`.
            The rest: see `hacpo_loss`.

        Returns:
            LossOutput with `logprobs` of shape (B, T), 0 outside `loss_mask`.
        """
        where = "HACPOLoss"
        logits = check_tensor(where, "logits", logits)
        if logits.dim() != 3:
            raise ValueError(f"{where}: logits must have shape (B, T, V), got {tuple(logits.shape)}.")
        check_shape(where, "loss_mask", check_tensor(where, "loss_mask", loss_mask), logits.shape[:2], "(B, T)")
        sequences = padded_sequences(
            where, loss_mask, source_mean_logprobs, advantages, weights=weights, is_cross=is_cross, lengths=lengths,
            ref_logprobs=ref_logprobs, old_logprobs=old_logprobs,
        )  # fmt: skip
        out = hacpo_loss(
            logits, target_ids, sequences, self.config, update_index=update_index, num_sequences=num_sequences,
            num_self_sequences=num_self_sequences, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
            backend=backend,
        )  # fmt: skip
        return LossOutput(out.loss, out.logprobs.view(loss_mask.shape), out.ratios, out.live, out.metrics)

    def extra_repr(self) -> str:
        return repr(self.config)
