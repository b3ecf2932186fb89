"""The implementations behind the public functions, chosen by the tensor's device.

A backend is a module with three functions: `logprob_fwd`, `logprob_bwd` and `sequence_terms`.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch

BACKENDS = ("torch", "triton")


def get_backend(where: str, backend: str | None, device: torch.device) -> ModuleType:
    """The backend module for tensors on `device`.

    `HACPO_KERNELS_BACKEND` overrides `backend`; None chooses Triton for CUDA and ROCm tensors where Triton is
    installed, PyTorch for everything else. Triton on CPU tensors works in its interpreter alone (TRITON_INTERPRET=1,
    set before the first import of triton).

    Raises:
        ValueError: an unknown name. RuntimeError: Triton was asked for where it cannot run.
    """
    name, origin = backend, "backend"
    override = os.environ.get("HACPO_KERNELS_BACKEND")
    if override:
        name, origin = override, "HACPO_KERNELS_BACKEND"
    if name is None:
        has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        name = "triton" if has_triton else "torch"
    if name not in BACKENDS:
        raise ValueError(f"{where}: {origin} must be one of {BACKENDS}, got {name!r}.")
    if name == "torch":
        from . import torch_ops

        return torch_ops
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(f"{where}: {origin} = 'triton' but triton is not installed; use backend='torch'.")
    from . import triton_ops

    if device.type == "cpu" and not triton_ops.INTERPRETED:
        raise RuntimeError(
            f"{where}: {origin} = 'triton' on CPU tensors needs Triton's interpreter: set TRITON_INTERPRET=1 before "
            "triton is imported, move the tensors to an accelerator, or use backend='torch'."
        )
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"{where}: {origin} = 'triton' does not run on {device.type} tensors; use backend='torch'.")
    return triton_ops
