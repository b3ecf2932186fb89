"""What turns the head's output into the logits of the distribution that is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """x = softcap * tanh(scale * raw / softcap) / temperature: scale, then softcap, then temperature.

    Attributes:
        scale: > 0. softcap: > 0 or None for none.
        temperature: > 0, one number, or one per row as a contiguous (N,) tensor in the accumulation dtype.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def of_rows(self, rows: Tensor) -> LogitTransform:
        """The transform of some rows alone."""
        if not isinstance(self.temperature, Tensor):
            return self
        return LogitTransform(self.scale, self.softcap, self.temperature[rows])

    def apply(self, raw: Tensor, rows: Tensor | slice) -> Tensor:
        """Transformed logits of some rows, (n, V), in the dtype of `raw`; `raw` may be overwritten."""
        return self._cool(self._cap(raw) if self.softcap is not None else raw.mul_(self.scale), rows)

    def apply_with_slope(self, raw: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor | float]:
        """The same and dx/draw, (n, V) or a number or (n, 1)."""
        slope: Tensor | float = self.scale
        if self.softcap is not None:
            capped = self._cap(raw)
            slope = (1.0 - (capped / self.softcap).square()) * self.scale
            raw = capped
        else:
            raw = raw.mul_(self.scale)
        if isinstance(self.temperature, Tensor):
            slope = slope / self.temperature[rows].unsqueeze(-1)
        else:
            slope = slope / self.temperature
        return self._cool(raw, rows), slope

    def _cap(self, raw: Tensor) -> Tensor:
        assert self.softcap is not None
        return torch.tanh(raw * (self.scale / self.softcap)) * self.softcap

    def _cool(self, values: Tensor, rows: Tensor | slice) -> Tensor:
        if isinstance(self.temperature, Tensor):
            return values.div_(self.temperature[rows].unsqueeze(-1))
        return values if self.temperature == 1.0 else values.div_(self.temperature)
