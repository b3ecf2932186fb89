"""The fused head with its vocabulary split over ranks."""

from __future__ import annotations

import datetime
import itertools
import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from hacpo_kernels import HACPOConfig, LinearHACPOLoss, SequenceBatch, linear_hacpo_loss, linear_token_logprobs

LENGTHS = (3, 0, 4, 1, 5, 2)
VOCAB, HIDDEN = 33, 7
# one shard may be a single id
SHARDS = {2: (20, 13), 3: (17, 1, 15)}
SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS), HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def targets() -> Tensor:
    return torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def loss(hidden: Tensor, weight: Tensor, bias: Tensor, **keywords: Any) -> list[Tensor]:
    """Loss, log-probabilities and ratios; some sequences live, some clipped, one without advantage."""
    means = torch.tensor([-4.0, 0.0, -6.0, -2.0, -4.0, -4.0])
    sequences = SequenceBatch(
        torch.tensor(list(itertools.accumulate(LENGTHS, initial=0))), means,
        torch.tensor([1.0, 1.0, -1.0, 0.5, 0.0, -1.0]), torch.tensor([0.5, 1.0, 1.5, 0.7, 1.0, 1.2]),
        torch.tensor([False, True, True, False, True, True]), ref_logprobs=torch.full((sum(LENGTHS),), -4.0),
    )  # fmt: skip
    config = HACPOConfig(beta=0.1, cross_clip_low=0.01, epsilon_low=0.9)
    out = linear_hacpo_loss(hidden, weight, targets(), sequences, config, bias=bias, **keywords)
    return [out.loss, out.logprobs, out.ratios]


def scores(hidden: Tensor, weight: Tensor, bias: Tensor, **keywords: Any) -> list[Tensor]:
    """A weighted sum, log-probabilities and entropies, with a row to ignore and one without a gradient."""
    ids = targets()
    ids[2] = -100
    result = linear_token_logprobs(hidden, weight, ids, bias=bias, **keywords)
    values = list(result) if isinstance(result, tuple) else [result]
    factors = torch.randn(2, ids.numel(), generator=torch.Generator().manual_seed(2))
    factors[:, 3] = 0.0
    total = torch.stack([(f * v).sum() for f, v in zip(factors, values, strict=False)]).sum()
    return [total, *values]


def padded(hidden: Tensor, weight: Tensor, bias: Tensor, **keywords: Any) -> list[Tensor]:
    rows = 3 * 5
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 3:] = False
    out = LinearHACPOLoss(HACPOConfig(epsilon_low=0.9, epsilon_high=50.0))(
        hidden[:rows].view(3, 5, HIDDEN), weight, targets()[:rows].view(3, 5), mask, torch.full((3,), -4.0),
        torch.tensor([1.0, -1.0, 0.5]), bias=bias, **keywords,
    )  # fmt: skip
    return [out.loss, out.logprobs, out.ratios]


CALLS: list[tuple[Any, dict[str, Any]]] = [
    (loss, {}),
    (loss, {"softcap": 5.0, "logit_scale": 0.7, "temperature": 0.8}),
    (loss, {"memory_budget": 3 * VOCAB * 4}),  # several groups, and sequences above the budget
    (loss, {"temperature": torch.tensor([0.5, 1.0, 1.5, 0.7, 1.0, 1.2])}),
    (scores, {}),
    (scores, {"entropy": True, "memory_budget": 8 * VOCAB * 4}),
    (scores, {"entropy": True, "softcap": 5.0, "temperature": 0.8}),
    (padded, {}),
]


def run(function: Any, tensors: list[Tensor], keywords: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    values = function(*tensors, **keywords)
    return [value.detach() for value in values], list(torch.autograd.grad(2.0 * values[0], tensors))


def worker(rank: int, world: int, port: int, backend: str, calls: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=SECONDS)
    )
    try:
        sizes = SHARDS[world]
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        hidden, weight, bias = leaves()
        for number in calls:
            function, keywords = CALLS[number]
            keywords = {**keywords, "backend": backend}
            values, gradients = run(function, [hidden, weight, bias], keywords)
            shard = {**keywords, "vocab_parallel_group": dist.group.WORLD}
            ours, ours_gradients = run(function, [hidden, weight[mine], bias[mine]], shard)
            expected = [gradients[0], gradients[1][mine], gradients[2][mine]]
            assert any(bool(gradient.any()) for gradient in gradients)
            for a, b in zip([*ours, *ours_gradients], [*values, *expected], strict=True):
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m, n=number: f"{n} {m}"
                )
            replicated = torch.cat([value.reshape(-1) for value in (*ours, ours_gradients[0])]).nan_to_num()
            everywhere = [torch.empty_like(replicated) for _ in range(world)]
            dist.all_gather(everywhere, replicated)
            assert all(torch.equal(other, replicated) for other in everywhere)
    finally:
        dist.destroy_process_group()


def spawn(world: int, backend: str, calls: list[int]) -> None:
    context = mp.start_processes(
        worker, (world, free_port(), backend, calls), nprocs=world, join=False, start_method="spawn"
    )
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=2 * SECONDS)
    try:
        while not context.join(timeout=1):
            assert datetime.datetime.now() < deadline, "ranks wait for each other"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


@pytest.mark.parametrize("world", sorted(SHARDS))
def test_linear_functions_sharded_vocabulary_equals_the_whole_one(world: int) -> None:
    spawn(world, "torch", list(range(len(CALLS))))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_linear_functions_sharded_vocabulary_on_triton_equals_the_whole_one() -> None:
    spawn(2, "triton", [1, 5])
