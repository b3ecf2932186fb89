"""The fused head beside its peers: time and memory of forward and backward, from hidden states to the loss.

    python -m benchmarks.head [--tokens 1024] [--vocab 32768] [--hidden 512] [--sequence 128] [--dtype fp32]

Every contestant computes the same thing on the same inputs in one process, in turns, and its gradients are checked
before it is timed. A peer that is not installed is left out (trl, liger-kernel, cut-cross-entropy); peers that have no
sequence-level objective get the per-token log-probabilities from the peer and the objective from this package.

`floor` is the three matrix products that a head needs, alone. Times are the best of several rounds; memory is the peak
of the tensors allocated during the call, exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hacpo_kernels import (
    HACPOConfig,
    SequenceBatch,
    hacpo_loss,
    hacpo_loss_from_logprobs,
    linear_hacpo_loss,
    linear_token_logprobs,
)

from .memory import peak_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONFIG = HACPOConfig.gspo(epsilon_low=0.2, epsilon_high=0.28)  # wide: only advantages decide what is dead


@dataclass
class Inputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    sequences: SequenceBatch
    length: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.hidden.shape[0], self.weight.shape[0], self.hidden.shape[1]


def make_inputs(tokens: int, vocab: int, hidden_size: int, length: int, dead: float, dtype: torch.dtype) -> Inputs:
    """On-policy responses of one length; the first `dead` share of them has advantage 0."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=generator) * hidden_size**-0.5).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    count = tokens // length
    advantages = torch.randn(count, generator=generator)
    advantages[: round(dead * count)] = 0.0
    with torch.no_grad():
        scored = linear_token_logprobs(hidden, weight, targets)
    assert isinstance(scored, Tensor)
    means = scored.view(count, length).mean(-1)
    sequences = SequenceBatch(torch.arange(count + 1) * length, means, advantages)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), targets, sequences, length)


def ours(inputs: Inputs) -> Tensor:
    return linear_hacpo_loss(inputs.hidden, inputs.weight, inputs.targets, inputs.sequences, CONFIG).loss


def plain(inputs: Inputs) -> Tensor:
    """All logits in memory, then this package's loss from logits."""
    logits = inputs.hidden @ inputs.weight.t()
    return hacpo_loss(logits, inputs.targets, inputs.sequences, CONFIG).loss


def eager(inputs: Inputs) -> Tensor:
    """All logits in memory, log_softmax and gather in eager PyTorch."""
    logits = (inputs.hidden @ inputs.weight.t()).float()
    logprobs = logits.log_softmax(-1).gather(-1, inputs.targets.unsqueeze(-1)).squeeze(-1)
    return hacpo_loss_from_logprobs(logprobs, inputs.sequences, CONFIG).loss


def trl(inputs: Inputs) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logprobs = ChunkedLogProbFunction.apply(
        inputs.hidden, inputs.weight, None, inputs.targets, 1.0, 32768, None, 1.0, ()
    )[0]
    return hacpo_loss_from_logprobs(logprobs, inputs.sequences, CONFIG).loss


def liger(inputs: Inputs) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=1, epsilon_low=CONFIG.epsilon_low,
        epsilon_high=CONFIG.epsilon_high, loss_type="grpo", importance_sampling_level="sequence",
    )  # fmt: skip
    count = inputs.sequences.num_sequences
    shape = (count, inputs.length)
    old = inputs.sequences.source_mean_logprobs.unsqueeze(-1).expand(shape).contiguous()
    return loss(
        inputs.hidden.view(*shape, -1), inputs.weight, inputs.targets.view(shape), torch.ones(shape),
        inputs.sequences.advantages, old_per_token_logps=old,
    )[0]  # fmt: skip


def cut_cross_entropy(inputs: Inputs) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    implementation = "cce" if inputs.hidden.is_cuda else "torch_compile"
    nll = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, reduction="none", impl=implementation)
    return hacpo_loss_from_logprobs(-nll, inputs.sequences, CONFIG).loss


CONTESTANTS: dict[str, Callable[[Inputs], Tensor]] = {
    "eager": eager,
    "plain": plain,
    "trl": trl,
    "liger": liger,
    "cut-cross-entropy": cut_cross_entropy,
}


def step(inputs: Inputs, contestant: Callable[[Inputs], Tensor]) -> tuple[Tensor, Tensor]:
    """One forward and backward; the gradients."""
    loss = contestant(inputs)
    return torch.autograd.grad(loss, (inputs.hidden, inputs.weight))


def floor(inputs: Inputs) -> None:
    """The three products that a head needs, in the dtype of the operands."""
    with torch.no_grad():
        logits = inputs.hidden @ inputs.weight.t()
        logits @ inputs.weight
        logits.t() @ inputs.hidden


def agrees(inputs: Inputs, contestant: Callable[[Inputs], Tensor]) -> float:
    """Largest relative difference, in norm, of its gradients from ours."""
    differences = []
    for a, b in zip(step(inputs, contestant), step(inputs, ours), strict=True):
        differences.append(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)))
    return max(differences)


def available(name: str, inputs: Inputs) -> str | None:
    """None if a contestant runs here, else why not."""
    try:
        step(inputs, CONTESTANTS[name])
    except ImportError as error:
        return f"not installed ({error.name})"
    except Exception as error:  # a peer that needs an accelerator or a compiler says so in many ways
        return f"does not run here: {str(error).splitlines()[0][:100]}"
    return None


def best(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best seconds of each call over rounds in which they take turns."""
    times = {name: float("inf") for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def run(
    tokens: int, vocab: int, hidden_size: int, length: int, dtype: torch.dtype, rounds: int
) -> list[dict[str, Any]]:
    """Rows of the table."""
    inputs = {dead: make_inputs(tokens, vocab, hidden_size, length, dead, dtype) for dead in (0.0, 0.5, 0.8)}
    alive = inputs[0.0]
    calls: dict[str, Callable[[], object]] = {"floor": lambda: floor(alive)}
    notes: dict[str, str] = {}
    for dead, batch in inputs.items():
        calls[f"ours, {dead:.0%} dead"] = lambda batch=batch: step(batch, ours)
    for name, contestant in CONTESTANTS.items():
        missing = available(name, alive)
        if missing:
            notes[name] = missing
            continue
        difference = agrees(alive, contestant)
        notes[name] = f"gradients differ by {difference:.1e}"
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        if difference > tolerance:
            notes[name] += " (not timed: more than the tolerance)"
            continue
        calls[name] = lambda contestant=contestant: step(alive, contestant)
    times = best(calls, rounds)
    reference = times["ours, 0% dead"]
    rows = []
    for name, seconds in times.items():
        memory = peak_bytes(calls[name])
        rows.append(
            {"name": name, "seconds": seconds, "to_ours": seconds / reference, "to_floor": seconds / times["floor"],
             "peak_mib": None if memory is None else memory / 2**20, "note": notes.get(name, "")}
        )  # fmt: skip
    rows += [{"name": name, "note": note} for name, note in notes.items() if name not in times]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.head", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a response")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tokens % options.sequence:
        parser.error(f"--tokens must be a multiple of --sequence, got {options.tokens} and {options.sequence}")
    torch.set_num_threads(options.threads)
    rows = run(options.tokens, options.vocab, options.hidden, options.sequence, DTYPES[options.dtype], options.rounds)
    print(f"N = {options.tokens}, V = {options.vocab}, H = {options.hidden}, {options.dtype}, "
          f"{options.threads} threads, torch {torch.__version__}")  # fmt: skip
    print(f"{'':<20}{'seconds':>9}{'to ours':>9}{'to floor':>10}{'peak MiB':>10}")
    for row in rows:
        if "seconds" in row:
            memory = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
            print(f"{row['name']:<20}{row['seconds']:>9.3f}{row['to_ours']:>9.2f}{row['to_floor']:>10.2f}"
                  f"{memory:>10}  {row['note']}")  # fmt: skip
        else:
            print(f"{row['name']:<20}{'-':>9}{'-':>9}{'-':>10}{'-':>10}  {row['note']}")
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
