"""A causal language model whose head computes log-probabilities, or the HACPO loss, in place of returning logits.

The head's weight is read inside `lm_head`'s own forward, patched on the instance: whatever wraps the module (sharding,
gathering, adapters, tied embeddings) has made the weight whole there, and nowhere else reliably.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hacpo_kernels import HACPOConfig, LossOutput, SequenceBatch, linear_hacpo_loss, linear_token_logprobs

from .batching import TokenBatch

# what a consumer is given: hidden states (N, H), the weight (V, H) and the bias (V,) of the head
Consumer = Callable[[Tensor, Tensor, Tensor | None], dict[str, Tensor]]


@dataclass(frozen=True)
class HeadTransform:
    """What a model does to the product of hidden states and head weight: scale, then softcap."""

    logit_scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> HeadTransform:
        """Read from a transformers configuration."""
        scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return cls(scale, float(cap) if cap else None)


def apply_fused_head(model: Any) -> HeadTransform:
    """Lets `model(..., fused=consumer, rows=rows)` hand hidden states and the head's weight to `consumer`.

    Without `fused` the model's forward is what it was, so `generate`, `save_pretrained` and other callers see no
    difference. With it, the trunk runs, and `consumer(hidden, weight, bias)` is called inside `lm_head`'s own call,
    with the hidden states (N, H) at `rows` ((N,) indices into the flattened (B * T) positions). What it returns is
    returned. A refused model is left as it was. Call it before the model is sharded or compiled.

    A peft model works too. Where LoRA adapts the head itself, `weight` is what is applied, W + scaling * B A, made
    inside the call (one (V, H) tensor), so that the adapters get their gradients.

    Returns:
        The scale and softcap that the model applies to its logits, checked against the model's own forward.

    Raises:
        TypeError: the model has no output embeddings, or they are neither an `nn.Linear` nor one with plain LoRA.
        ValueError: the head's LoRA has dropout or is a variant such as DoRA; the model's logits are not scale and
            softcap of the head's product, so that the loss would belong to another distribution; or a fused head is
            there already.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise TypeError(f"apply_fused_head: {type(model).__name__} has no output embeddings (lm_head).")
    weight_of = _weight_reader(head)
    # a peft model calls the forward of the model inside it, so that is the one to patch
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(inner, "_fused_head", None) is not None:
        raise ValueError(f"apply_fused_head: this {type(inner).__name__} has a fused head already.")
    head_forward: Callable[..., Any] = head.forward
    inner_forward: Callable[..., Any] = inner.forward

    @functools.wraps(head_forward)
    def fused_head_forward(hidden: Tensor, *args: Any, fused: Consumer | None = None, **kwargs: Any) -> Any:
        return head_forward(hidden, *args, **kwargs) if fused is None else fused(hidden, weight_of(), head.bias)

    @functools.wraps(inner_forward)
    def fused_forward(*args: Any, fused: Consumer | None = None, rows: Tensor | None = None, **kwargs: Any) -> Any:
        if fused is None:
            return inner_forward(*args, **kwargs)
        kwargs = {**kwargs, "use_cache": False}
        hidden = inner.base_model(*args, **kwargs).last_hidden_state
        return head(hidden.reshape(-1, hidden.shape[-1])[rows], fused=fused)

    transform = HeadTransform.of(inner.config.get_text_config())
    head.forward, inner.forward = fused_head_forward, fused_forward
    try:
        _check_against_forward(model, transform)
    except ValueError:
        head.forward, inner.forward = head_forward, inner_forward
        raise
    inner._fused_head = transform
    return transform


def _weight_reader(head: Any) -> Callable[[], Tensor]:
    """A function that returns the weight that the head applies, to be called inside the head's own forward."""
    if type(head) is torch.nn.Linear:
        return lambda: head.weight
    adapters = getattr(head, "lora_A", None)
    if not hasattr(head, "base_layer") or not adapters or type(head.base_layer) is not torch.nn.Linear:
        raise TypeError(
            f"apply_fused_head: the head must be an nn.Linear, or one with LoRA, got {type(head).__name__}: the "
            "weight of what it wraps is not the weight that is applied. Merge the adapter, or leave the head out of it."
        )
    variants = [name for name in adapters if getattr(head, "lora_variant", {}).get(name) is not None]
    biased = [name for name in adapters if head.lora_bias.get(name)] if hasattr(head, "lora_bias") else []
    dropout = [name for name in adapters if not isinstance(head.lora_dropout[name], torch.nn.Identity)]
    if variants or biased or dropout:
        raise ValueError(
            f"apply_fused_head: LoRA on the head must be plain, got adapters with dropout {dropout}, with a bias "
            f"{biased}, of a variant such as DoRA {variants}: no single weight does the same. Leave lm_head out of the "
            "adapter."
        )

    def effective_weight() -> Tensor:
        weight: Tensor = head.base_layer.weight
        if head.disable_adapters or head.merged:
            return weight
        for name in head.active_adapters:
            if name in adapters:
                weight = weight + head.get_delta_weight(name)
        return weight

    return effective_weight


@torch.no_grad()
def _check_against_forward(model: Any, transform: HeadTransform) -> None:
    """The log-probabilities through the fused head are those of the model's own logits."""
    device = next(model.parameters()).device
    vocab_size = model.config.get_text_config().vocab_size
    ids = (torch.arange(1, 5, device=device) % vocab_size).unsqueeze(0)
    training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids).logits[0]
        own = torch.log_softmax(logits.float(), -1).gather(-1, ids[0].unsqueeze(-1)).squeeze(-1)

        keywords = {"logit_scale": transform.logit_scale, "softcap": transform.softcap}
        fused = model(input_ids=ids, fused=_scorer(ids[0], keywords), rows=torch.arange(4, device=device))["logprobs"]
    finally:
        model.train(training)
    # low precision: the model may round its logits after scaling them
    tolerance = 1e-4 if logits.dtype == torch.float32 else 5e-2
    if not torch.allclose(own, fused, rtol=tolerance, atol=tolerance):
        raise ValueError(
            f"apply_fused_head: {type(model).__name__} (model_type {model.config.model_type!r}) does more to its "
            f"logits than scale and softcap: its own log-probabilities are {own.tolist()}, through the head "
            f"{fused.tolist()}."
        )


def _scorer(target_ids: Tensor, keywords: dict[str, Any]) -> Consumer:
    """The consumer that returns log-probabilities of the targets."""

    def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        scored = linear_token_logprobs(hidden, weight, target_ids, bias=bias, **keywords)
        assert isinstance(scored, Tensor)
        return {"logprobs": scored}

    return score


class Policy:
    """A model with a fused head, and the two things that training asks of it."""

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.transform = apply_fused_head(model)

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """(N,) float32 log-probabilities of the response tokens, at the sampling temperature; differentiable."""
        return self._forward(batch, _scorer(batch.target_ids, self._transform()))["logprobs"]

    def loss(
        self,
        batch: TokenBatch,
        sequences: SequenceBatch,
        config: HACPOConfig,
        *,
        update_index: int,
        num_sequences: int,
        num_self_sequences: int,
    ) -> LossOutput:
        """The HACPO loss of one micro-batch; its backward reaches the whole model."""
        kept: list[LossOutput] = []

        def consume(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
            out = linear_hacpo_loss(
                hidden, weight, batch.target_ids, sequences, config, bias=bias, update_index=update_index,
                num_sequences=num_sequences, num_self_sequences=num_self_sequences, **self._transform(),
            )  # fmt: skip
            kept.append(out)
            return {"loss": out.loss}

        loss = self._forward(batch, consume)["loss"]
        (out,) = kept
        return LossOutput(loss, out.logprobs, out.ratios, out.live, out.metrics)

    def _transform(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "logit_scale": self.transform.logit_scale,
            "softcap": self.transform.softcap,
        }

    def _forward(self, batch: TokenBatch, consumer: Consumer) -> dict[str, Tensor]:
        result: dict[str, Tensor] = self.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            fused=consumer,
            rows=batch.rows,
        )
        return result
