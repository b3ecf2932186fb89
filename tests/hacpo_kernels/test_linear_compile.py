"""The fused head inside torch.compile."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hacpo_kernels import HACPOConfig, SequenceBatch, linear_hacpo_loss


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Embedding(33, 8), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 33, bias=False)

    def forward(self, ids: Tensor, targets: Tensor, sequences: SequenceBatch) -> Tensor:
        hidden = self.trunk(ids)
        loss = linear_hacpo_loss(hidden, self.head.weight, targets, sequences, HACPOConfig()).loss
        return loss * 2.0


def test_linear_hacpo_loss_compiled_model_equals_eager_with_one_graph_break() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = Model()
    compiled = torch.compile(model, backend="aot_eager")
    for tokens in (7, 8, 13):
        ids, targets = torch.randint(0, 33, (2, tokens))
        sequences = SequenceBatch(torch.tensor([0, 3, tokens]), torch.tensor([-3.5, -3.4]), torch.tensor([1.0, -1.0]))
        results = []
        for function in (model, compiled):
            model.zero_grad()
            loss = function(ids, targets, sequences)
            loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=0, atol=0)
        if tokens == 7:
            assert sum(counters["graph_break"].values()) == 1
