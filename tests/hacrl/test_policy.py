"""The fused head: equal to the model's own forward, and its loss to the reference."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

from hacpo_kernels import HACPOConfig, SequenceBatch
from hacpo_kernels.reference import reference_hacpo_loss
from hacrl.batching import TokenBatch
from hacrl.policy import HeadTransform, Policy, apply_fused_head

SIZES = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
}


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "pad_token_id": 0, **FAMILIES[family]})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def batch() -> TokenBatch:
    return TokenBatch.build([([1, 2], [3, 4, 5]), ([6, 7, 8, 9], [10])], torch.device("cpu"))


def own_logits(model: Any, tokens: TokenBatch) -> torch.Tensor:
    logits = model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).logits
    return logits.reshape(-1, logits.shape[-1])[tokens.rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_model_s_own_forward(family: str) -> None:
    model, tokens = tiny(family), batch()
    expected = torch.log_softmax(own_logits(model, tokens) / 0.7, -1)
    expected = expected.gather(-1, tokens.target_ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(Policy(model, 0.7).logprobs(tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_loss_gradient_equals_autograd_of_the_reference(family: str) -> None:
    tokens = batch()
    sequences = SequenceBatch(
        tokens.cu_seqlens, torch.tensor([-3.5, -3.4]), torch.tensor([1.0, -0.5]), is_cross=torch.tensor([True, False])
    )
    config = HACPOConfig(cross_clip_low=0.1, cross_clip_high=9.0, epsilon_low=0.9, epsilon_high=9.0)
    plain = tiny(family)
    expected = reference_hacpo_loss(own_logits(plain, tokens), tokens.target_ids, sequences, config)
    expected.loss.backward()
    policy = Policy(tiny(family), 1.0)
    out = policy.loss(tokens, sequences, config, update_index=0, num_sequences=2, num_self_sequences=1)
    out.loss.backward()
    torch.testing.assert_close(out.loss.double(), expected.loss)
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_apply_fused_head_leaves_the_plain_forward_and_generate_as_they_were() -> None:
    ids = torch.tensor([[1, 2, 3]])
    model = tiny("Llama")
    logits = model(input_ids=ids).logits
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    apply_fused_head(model)
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=0, atol=0)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), generated)


def test_apply_fused_head_twice_raises() -> None:
    model = tiny("Llama")
    apply_fused_head(model)
    with pytest.raises(ValueError, match="has a fused head already"):
        apply_fused_head(model)


def test_apply_fused_head_model_that_does_more_to_its_logits_raises() -> None:
    model = tiny("Llama")
    forward = model.forward

    def sharper(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = sharper
    with pytest.raises(ValueError, match="does more to its logits than scale and softcap"):
        apply_fused_head(model)
    assert model.forward is sharper


def test_apply_fused_head_adapter_around_the_head_is_refused() -> None:
    model = tiny("Llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match=r"must be an nn\.Linear, or one with LoRA, got Sequential"):
        apply_fused_head(model)


def lora(targets: list[str], **settings: Any) -> Any:
    """A tiny Llama with LoRA whose adapters are not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    model = peft.get_peft_model(tiny("Llama"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["lm_head"], ["q_proj", "lm_head"]])
def test_loss_with_lora_gives_the_adapters_the_gradients_of_the_plain_forward(targets: list[str]) -> None:
    tokens = batch()
    sequences = SequenceBatch(tokens.cu_seqlens, torch.tensor([-3.5, -3.4]), torch.tensor([1.0, -0.5]))
    config = HACPOConfig.gspo(epsilon_low=0.99, epsilon_high=99.0)
    plain = lora(targets)
    expected = reference_hacpo_loss(own_logits(plain, tokens), tokens.target_ids, sequences, config)
    expected.loss.backward()
    model = lora(targets)
    model.load_state_dict(plain.state_dict())
    out = Policy(model, 1.0).loss(tokens, sequences, config, update_index=0, num_sequences=2, num_self_sequences=2)
    out.loss.backward()
    torch.testing.assert_close(out.loss.double(), expected.loss)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == ("lora" not in name), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_apply_fused_head_lora_on_the_head_that_no_weight_equals_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LoRA on the head must be plain"):
        apply_fused_head(lora(["lm_head"], **settings))


def test_apply_fused_head_model_without_a_head_raises() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "pad_token_id": 0})
    with pytest.raises(TypeError, match="LlamaModel has no output embeddings"):
        apply_fused_head(transformers.LlamaModel(config))


def test_head_transform_reads_scale_and_softcap_of_the_family() -> None:
    assert HeadTransform.of(tiny("Granite").config) == HeadTransform(0.25, None)
    assert HeadTransform.of(tiny("Gemma2").config) == HeadTransform(1.0, 3.0)
