"""The matrix products of a language-model head: float32 out of whatever the operands are.

Rounding logits to a low precision moves a sequence ratio by more than the self clip radius, so logits are float32 (or
float64) always, and so is the sum of weight gradients over groups of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# bytes of a float32 copy of a part of the weight, where no product of low-precision operands gives float32
_TILE_BYTES = 1 << 24


class VocabularyShard:
    """This rank's contiguous rows of a vocabulary that is split over a process group in rank order.

    Everything a rank decides by comes out of an all-reduce, so it is the same on every rank bit for bit, and all of
    them take the same way through the same collectives.

    Attributes:
        start, size: first id here and how many. total: ids in the whole vocabulary. largest: the longest shard.
    """

    def __init__(self, group: ProcessGroup, size: int, device: torch.device) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        gathered = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, torch.tensor([size], device=device), group=group)
        sizes = torch.cat(gathered).tolist()
        self.start, self.size = sum(sizes[: dist.get_rank(group)]), size
        self.total, self.largest = sum(sizes), max(sizes)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        self._dist.all_reduce(values, self._dist.ReduceOp.SUM, group=self._group)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over the ranks, in place."""
        self._dist.all_reduce(values, self._dist.ReduceOp.MAX, group=self._group)
        return values

    def owns(self, target_ids: Tensor) -> Tensor:
        ids = target_ids.long()
        return (ids >= self.start) & (ids < self.start + self.size)

    def local(self, target_ids: Tensor) -> Tensor:
        """Columns of the targets here; 0 for those of other ranks, which the caller must leave out."""
        return torch.where(self.owns(target_ids), target_ids.long() - self.start, 0)

    def combine(
        self, target_ids: Tensor, logprobs: Tensor, stats: Tensor, entropies: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(log-probabilities, statistics, entropies) of the whole vocabulary from those of the shards, all (n,).

        Two all-reduces. exp(x - statistics[0] - statistics[1]) is the probability of a column, on every rank.
        """
        maximum, log_total = stats
        impossible = maximum == float("-inf")  # no column here has a probability
        own = torch.where(impossible, float("-inf"), maximum + log_total)
        peak = self.max(own.clone())
        share = (own - peak).exp()
        target = torch.where(impossible, float("-inf"), logprobs + (own - peak))
        parts = [share, torch.where(self.owns(target_ids), target, 0.0)]
        if entropies is not None:
            parts.append(torch.where(share == 0, 0.0, share * (own - peak - entropies)))
        total, target, *mean = self.sum(torch.stack(parts))
        log_total = total.log()
        known = (target_ids >= 0) & (target_ids < self.total)
        logprobs = torch.where(known, target - log_total, float("nan"))
        return logprobs, torch.stack([peak, log_total]), log_total - mean[0] / total if mean else None


class Head:
    """hidden (N, H) @ weight (V, H)^T + bias (V,), and the products of its gradient.

    Attributes:
        dtype: float32, or float64 when an operand is: the dtype of logits and of accumulation.
        shard: which rows of the vocabulary weight and bias are; None: all.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard | None = None
    ) -> None:
        self.shard = shard
        self.hidden, self.weight, self.bias = hidden.detach(), weight.detach(), bias if bias is None else bias.detach()
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):  # eager PyTorch would round both operands to this dtype
            rounded = torch.get_autocast_dtype(kind)
            if rounded.itemsize < 4 and hidden.dtype != torch.float64:
                self.hidden, self.weight = self.hidden.to(rounded), self.weight.to(rounded)
        wide = torch.float64 in (hidden.dtype, weight.dtype)
        self.dtype = torch.float64 if wide else torch.float32
        same = self.hidden.dtype == self.weight.dtype
        # cuBLAS multiplies low-precision operands into float32; elsewhere parts of the weight are widened exactly
        self.native = same and (self.hidden.dtype == self.dtype or self.hidden.is_cuda)
        self.low = self.native and self.hidden.dtype != self.dtype

    @property
    def planned_columns(self) -> int:
        """The vocabulary that a plan reckons with: the same on all ranks."""
        return self.weight.shape[0] if self.shard is None else self.shard.largest

    @property
    def operand_dtype(self) -> torch.dtype:
        """What a matrix of gradients is rounded to before its products."""
        return self.hidden.dtype if self.low else self.dtype

    def _parts(self) -> Iterator[slice]:
        """Slices of the vocabulary whose widened weight is small."""
        step = max(1, _TILE_BYTES // (4 * self.weight.shape[1]))
        for start in range(0, self.weight.shape[0], step):
            yield slice(start, min(start + step, self.weight.shape[0]))

    def _mm(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b, out_dtype=self.dtype) if self.low else torch.mm(a, b)

    def rows(self, index: Tensor | slice) -> Tensor:
        """Hidden states of some rows, in the dtype of the products."""
        rows = self.hidden[index]
        return rows if self.native else rows.to(self.dtype)

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """(n, H) -> (n, V) in `dtype`, written to `out` where it is given."""
        if self.low:
            logits = self._mm(rows, self.weight.t())
            if out is not None:
                logits = out.copy_(logits)
        else:
            logits = rows.new_empty(rows.shape[0], self.weight.shape[0], dtype=self.dtype) if out is None else out
            if self.native:
                torch.mm(rows, self.weight.t(), out=logits)
            else:
                for part in self._parts():
                    logits[:, part] = rows @ self.weight[part].to(self.dtype).t()
        return logits if self.bias is None else logits.add_(self.bias.to(self.dtype))

    def hidden_gradient(self, gradients: Tensor) -> Tensor:
        """(n, V) -> (n, H) in `dtype`: gradients @ weight, summed over the shards of the vocabulary."""
        result = self._local_hidden_gradient(gradients)
        return result if self.shard is None else self.shard.sum(result)

    def _local_hidden_gradient(self, gradients: Tensor) -> Tensor:
        if self.native:
            return self._mm(gradients, self.weight)
        result = torch.zeros(gradients.shape[0], self.weight.shape[1], dtype=self.dtype, device=gradients.device)
        for part in self._parts():
            torch.addmm(result, gradients[:, part], self.weight[part].to(self.dtype), out=result)
        return result

    def add_weight_gradient(self, total: Tensor, gradients: Tensor, rows: Tensor) -> None:
        """total (V, H) += gradients^T (V, n) @ rows (n, H), in `dtype`."""
        rows = rows.to(self.operand_dtype)
        if not self.low:
            torch.addmm(total, gradients.t(), rows, out=total)
            return
        for part in self._parts():  # a product for the whole vocabulary would need a second (V, H) tensor
            total[part] += self._mm(gradients[:, part].t(), rows)
