from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def module() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m benchmarks.NAME ARGUMENTS` without Triton's interpreter, which replaces the kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    return run
