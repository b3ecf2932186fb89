from __future__ import annotations

import pytest

from .builders import BACKENDS


def pytest_configure(config: pytest.Config) -> None:
    # the interpreter computes both sides of tl.where, so that -inf - -inf and 0 * inf are met and then dropped
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def objective_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend for functions that take no `backend` argument."""
    monkeypatch.setenv("HACPO_KERNELS_BACKEND", backend)
    return backend
