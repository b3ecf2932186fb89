"""Fused kernels from logits, or from hidden states and the lm_head weight, to the HACPO loss and its gradient.

HACPO (arXiv 2603.02604) lets agents learn from each other's scored responses. This package knows tensors: no tokenizer,
model or trainer, and of process groups only the one over which a head's vocabulary may be split. It imports without a
GPU and without Triton.
"""

from .linear import LinearHACPOLoss, linear_hacpo_loss, linear_token_logprobs
from .logprob import token_logprobs
from .loss import hacpo_loss, hacpo_loss_from_logprobs
from .padded import HACPOLoss
from .types import HACPOConfig, LossOutput, SequenceBatch

__version__ = "0.1.0"

__all__ = [
    "HACPOConfig",
    "HACPOLoss",
    "LinearHACPOLoss",
    "LossOutput",
    "SequenceBatch",
    "hacpo_loss",
    "hacpo_loss_from_logprobs",
    "linear_hacpo_loss",
    "linear_token_logprobs",
    "token_logprobs",
]
