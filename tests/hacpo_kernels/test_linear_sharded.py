"""The fused head in a model whose parameters are sharded by FSDP2."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hacpo_kernels import HACPOConfig, SequenceBatch
from hacrl.batching import TokenBatch
from hacrl.policy import Policy

from .test_linear_parallel import free_port

WORLD, SECONDS = 2, 60
SIZES = {
    "vocab_size": 33, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# (layout, tied embeddings): a head of its own group cannot share its weight with the root's embeddings
LAYOUTS = [("layers", False), ("layers", True), ("resharded", False), ("resharded", True), ("head", False)]


def policy(tied: bool) -> Policy:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))
    return Policy(model.eval(), 0.7)


def shard(model: Any, layout: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if layout == "head":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=layout != "layers")


def losses(learner: Policy, rank: int) -> list[torch.Tensor]:
    """The fused loss and a loss of log-probabilities, of this rank's responses."""
    pairs = [[([1, 2], [3, 4, 5]), ([6, 7, 8, 9], [10])], [([11, 12, 13], [14, 15]), ([16], [17, 18, 19, 20])]][rank]
    batch = TokenBatch.build(pairs, torch.device("cpu"))
    # ratios of about 1, so that one sequence is live and the other clipped
    sequences = SequenceBatch(batch.cu_seqlens, torch.tensor([-6.0, -4.5]), torch.tensor([-1.0, 1.0]))
    config = HACPOConfig(epsilon_low=0.9, epsilon_high=0.1)
    out = learner.loss(batch, sequences, config, update_index=0, num_sequences=2, num_self_sequences=2)
    assert bool(out.live.any())
    return [out.loss, learner.logprobs(batch).square().mean()]


def worker(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=SECONDS)
    )
    try:
        for layout, tied in LAYOUTS:
            whole, ours = policy(tied), policy(tied)
            shard(ours.model, layout)
            for kind in range(2):
                whole.model.zero_grad()
                ours.model.zero_grad()
                torch.stack([losses(whole, other)[kind] for other in range(WORLD)]).mean().backward()
                losses(ours, rank)[kind].backward()
                expected = dict(whole.model.named_parameters())
                for name, parameter in ours.model.named_parameters():
                    gradient, truth = parameter.grad.full_tensor(), expected[name].grad
                    message = f"{layout}, tied {tied}, loss {kind}: {name}"
                    torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-6, msg=message)
                    assert bool(truth.any()), message
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_policy_sharded_by_fsdp2_has_the_mean_gradient_of_the_ranks() -> None:
    context = mp.start_processes(worker, (free_port(),), nprocs=WORLD, join=False, start_method="spawn")
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=2 * SECONDS)
    try:
        while not context.join(timeout=1):
            assert datetime.datetime.now() < deadline, "ranks wait for each other"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
