"""Seeds of a run: each random decision has its own, derived from what it is for.

No random state has to be saved: a resumed run derives the same seeds for the same step.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2**63) for one purpose of a run, for example derive_seed(0, "sample", "digits", step)."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Runs its body with torch's global generators seeded, and restores them afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
