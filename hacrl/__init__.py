"""A thin training layer in which several language-model agents learn from each other's rollouts.

Heavy imports happen on first use: `import hacrl` loads neither torch nor transformers.
"""

from typing import Any

__all__ = ["apply_fused_head"]


def __getattr__(name: str) -> Any:
    if name == "apply_fused_head":
        from .policy import apply_fused_head

        return apply_fused_head
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
