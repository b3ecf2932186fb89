"""Which backend runs: by device, by argument, by environment, and without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hacpo_kernels import token_logprobs
from hacpo_kernels.backends import get_backend

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter without the settings of the test run."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "HACPO"))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=keep | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def name_of(backend: str | None, device: torch.device = CPU) -> str:
    return get_backend("f", backend, device).__name__.rsplit(".", 1)[1]


def test_get_backend_on_cpu_is_torch_although_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HACPO_KERNELS_BACKEND", raising=False)
    assert name_of(None) == "torch_ops"


def test_get_backend_on_an_accelerator_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HACPO_KERNELS_BACKEND", raising=False)
    assert name_of(None, torch.device("cuda", 1)) == "triton_ops"


def test_get_backend_on_any_other_device_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HACPO_KERNELS_BACKEND", raising=False)
    assert name_of(None, torch.device("meta")) == "torch_ops"


def test_get_backend_by_name_is_that_one(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HACPO_KERNELS_BACKEND", raising=False)
    assert name_of(backend) == f"{backend}_ops"


@pytest.mark.parametrize("asked", (None, "torch", "triton"))
def test_get_backend_environment_overrides_the_argument(
    asked: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACPO_KERNELS_BACKEND", backend)
    assert name_of(asked) == f"{backend}_ops"


def test_get_backend_empty_environment_is_no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HACPO_KERNELS_BACKEND", "")
    assert name_of("triton") == "triton_ops"


def test_token_logprobs_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token_logprobs: backend must be one of \('torch', 'triton'\), got 'cuda'"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([0]), backend="cuda")


def test_token_logprobs_unknown_backend_in_the_environment_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HACPO_KERNELS_BACKEND", "Triton")
    with pytest.raises(ValueError, match=r"HACPO_KERNELS_BACKEND must be one of .*, got 'Triton'"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([0]))


def test_get_backend_triton_on_a_device_without_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="'triton' does not run on meta tensors; use backend='torch'"):
        get_backend("f", "triton", torch.device("meta"))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import hacpo_kernels
from hacpo_kernels.backends import get_backend
logits = torch.zeros(2, 4, requires_grad=True)
hacpo_kernels.token_logprobs(logits, torch.tensor([0, 1])).sum().backward()
assert logits.grad.abs().max() > 0
assert get_backend("f", None, torch.device("cuda")).__name__.endswith("torch_ops")
try:
    hacpo_kernels.token_logprobs(logits, torch.tensor([0, 1]), backend="triton")
except RuntimeError as error:
    print(error)
"""


def test_package_without_triton_works_and_says_so_when_asked_for_it() -> None:
    assert "backend = 'triton' but triton is not installed; use backend='torch'" in python(WITHOUT_TRITON)


def test_triton_on_cpu_without_its_interpreter_names_the_variable() -> None:
    code = """
import torch, hacpo_kernels
try:
    hacpo_kernels.token_logprobs(torch.zeros(1, 2), torch.tensor([0]), backend="triton")
except RuntimeError as error:
    print(error)
"""
    assert "TRITON_INTERPRET=1" in python(code)


def test_import_loads_neither_the_kernels_nor_the_reference() -> None:
    code = """
import sys, torch, hacpo_kernels
hacpo_kernels.token_logprobs(torch.zeros(1, 2), torch.tensor([0]))
print(sorted(m for m in sys.modules if m.startswith("hacpo_kernels") and m.endswith(("triton_ops", "reference"))))
"""
    assert python(code).strip() == "[]"
