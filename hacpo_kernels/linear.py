"""From hidden states and the lm_head weight straight to log-probabilities or the HACPO loss, without (N, V) logits.

The gradient with respect to the logits of a token is c (onehot - softmax), with one number c that is known as soon as
the last token of its sequence is scored and is often exactly zero. So whole sequences go through the head together:
logits once, log-probabilities, ratio, c; then the logits become the unscaled onehot - softmax in place, and the two
products of the gradient follow at once, c folded into rows of hidden states. That is three products of the size
2 N V H, against the four of an implementation that recomputes the logits in its backward pass, and none at all for
sequences with advantage 0, one for those that turn out clipped.

The functions are not registered as `torch.library` custom ops: which rows are live decides the shapes of products while
they run, and gradients are computed together with the loss, so a compiler has nothing to trace or fuse. In a compiled
model they are one graph break.

With `vocab_parallel_group` each rank holds some rows of the vocabulary: maxima, sums and target logits are combined as
(n,) numbers, logits never leave their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .backends import get_backend
from .backends.transform import LogitTransform
from .checks import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    check_dtype,
    check_same_device,
    check_shape,
    check_target_ids,
    check_tensor,
)
from .head import Head, VocabularyShard
from .logprob import IGNORED_ID, check_transform
from .loss import check_sequences
from .objective import normalizers, reduce_loss, reduce_metrics
from .ownership import graph_is_kept
from .padded import padded_sequences
from .plan import TARGET_ROWS, Group, plan_groups, rows_within
from .types import HACPOConfig, LossOutput, SequenceBatch, check_update_index

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_BUDGET = 1 << 30


@dataclass
class Gradients:
    """Gradients of the loss, computed together with it, in the accumulation dtype; None where nobody asks."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def cast(self, name: str) -> Tensor | None:
        """A gradient in its input's dtype."""
        value: Tensor | None = getattr(self, name)
        return None if value is None else value.to(self.dtypes[name])

    def add(self, head: Head, index: Tensor, gradients: Tensor, coefficients: Tensor) -> None:
        """Takes in some rows: gradients (n, V) are unscaled, coefficients (n,) scale them."""
        scale = coefficients.unsqueeze(-1)
        if self.hidden is not None:
            self.hidden[index] = head.hidden_gradient(gradients).mul_(scale).to(self.hidden.dtype)
        if self.weight is not None:
            head.add_weight_gradient(self.weight, gradients, scale * head.rows(index))
        if self.bias is not None:
            self.bias += gradients.t().to(self.bias.dtype) @ coefficients


class PrecomputedLoss(torch.autograd.Function):
    """A loss whose gradients with respect to hidden states, weight and bias are there already."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: Tensor, gradients: Gradients
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        gradients: Gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError(
                "linear_hacpo_loss: backward was called a second time after its gradients were given away; call the "
                "first with retain_graph=True."
            )
        kept = graph_is_kept()
        results: list[Tensor | None] = []
        for name in ("hidden", "weight", "bias"):
            value = getattr(gradients, name)
            if value is not None:
                # in place unless another backward needs them again
                value = value * grads[0] if kept else value.mul_(grads[0])
                value = value.to(gradients.dtypes[name])
            results.append(value)
        if not kept:
            ctx.gradients = None
        return results[0], results[1], results[2], None, None


def _check_head(
    where: str, hidden_states: object, lm_head_weight: object, target_ids: object, bias: object
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    hidden = check_tensor(where, "hidden_states", hidden_states)
    weight = check_tensor(where, "lm_head_weight", lm_head_weight)
    targets = check_tensor(where, "target_ids", target_ids)
    check_dtype(where, "hidden_states", hidden, FLOAT_DTYPES, "a floating dtype")
    check_dtype(where, "lm_head_weight", weight, FLOAT_DTYPES, "a floating dtype")
    check_dtype(where, "target_ids", targets, INTEGER_DTYPES, "an integer dtype")
    if weight.numel() == 0 or weight.dim() != 2 or weight.untyped_storage().size() == 0:
        detail = "has ds_id, so it is a ZeRO-3 shard" if hasattr(weight, "ds_id") else "looks like a sharded parameter"
        raise ValueError(
            f"{where}: lm_head_weight must have shape (V, H), got {tuple(weight.shape)} in a storage of "
            f"{weight.untyped_storage().size()} bytes; it {detail}. Compute the loss inside the forward of the wrapped "
            "lm_head, where the weight is gathered."
        )
    if hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{where}: hidden_states must have shape (N, H) or (B, T, H) with H = {weight.shape[1]} like "
            f"lm_head_weight, got {tuple(hidden.shape)}."
        )
    check_shape(where, "target_ids", targets, tuple(hidden.shape[:-1]), "hidden_states.shape[:-1]")
    for name, other in (("lm_head_weight", weight), ("target_ids", targets)):
        check_same_device(where, name, other, "hidden_states", hidden)
    if bias is None:
        return hidden, weight, targets, None
    bias = check_tensor(where, "bias", bias)
    check_shape(where, "bias", bias, (weight.shape[0],), "(V,)")
    check_dtype(where, "bias", bias, FLOAT_DTYPES, "a floating dtype")
    check_same_device(where, "bias", bias, "hidden_states", hidden)
    return hidden, weight, targets, bias


def _shard(group: ProcessGroup | None, weight: Tensor) -> VocabularyShard | None:
    return None if group is None else VocabularyShard(group, weight.shape[0], weight.device)


def _select(sequences: SequenceBatch, chosen: Tensor, rows: Tensor, lengths: Tensor) -> SequenceBatch:
    """Some sequences with their counted rows alone; values were checked with the whole batch."""
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    picked: dict[str, Any] = {"cu_seqlens": boundaries, "loss_mask": None}
    for item in fields(SequenceBatch):
        if item.name not in picked:
            value = getattr(sequences, item.name)
            index = rows if item.name in ("ref_logprobs", "old_logprobs") else chosen
            picked[item.name] = None if value is None else value[index]
    subset = object.__new__(SequenceBatch)
    for name, value in picked.items():
        object.__setattr__(subset, name, value)
    return subset


@dataclass
class _Work:
    """One call of the loss: what its groups share."""

    head: Head
    ops: ModuleType
    targets: Tensor
    transform: LogitTransform
    sequences: SequenceBatch
    config: HACPOConfig
    update_index: int
    denominators: Tensor
    logprobs: Tensor
    gradients: Gradients | None

    def run(self, group: Group, chosen: Tensor, rows: Tensor, lengths: Tensor) -> None:
        """Scores the rows of a group and adds the gradients of those that are live."""
        tiles = rows.split(group.tile_rows)
        cached: dict[int, tuple[Tensor, Any]] = {}
        done = 0
        for number, tile in enumerate(tiles):
            scored = self.ops.score_head(self.head, tile, self.targets[tile], self.transform.of_rows(tile))
            self.logprobs[tile] = scored[0]
            done += tile.numel()
            if done <= group.cached_rows and self.gradients is not None:
                cached[number] = scored[1:]
            del scored
        if self.gradients is None:
            return
        subset = _select(self.sequences, chosen, rows, lengths)
        terms = self.ops.sequence_terms(self.logprobs[rows], subset, self.config, self.update_index, self.denominators)
        for number, (tile, coefficients) in enumerate(
            zip(tiles, terms.coefficients.split(group.tile_rows), strict=True)
        ):
            live = coefficients.nonzero().squeeze(-1)
            if live.numel() == 0:
                cached.pop(number, None)
                continue
            state = cached.pop(number, None)
            if state is None:
                state = self.ops.score_head(self.head, tile, self.targets[tile], self.transform.of_rows(tile))[1:]
            gradients, factor = self.ops.head_gradient(
                self.head, *state, self.targets[tile], self.transform.of_rows(tile), live
            )
            kept = tile if live.numel() == tile.numel() else tile[live]
            self.gradients.add(self.head, kept, gradients, coefficients[live] * factor)


@torch.compiler.disable
def linear_hacpo_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    sequences: SequenceBatch,
    config: HACPOConfig,
    *,
    bias: Tensor | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    update_index: int = 0,
    num_sequences: float | Tensor | None = None,
    num_self_sequences: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
) -> LossOutput:
    """The HACPO loss from hidden states and the lm_head weight, without (N, V) logits (Eq. 11-14).

    Equivalent to::

        logits = hidden_states.float() @ lm_head_weight.float().T + bias
        return hacpo_loss(logits, target_ids, sequences, config, ...)

    with the gradients computed together with the loss. Logits and log-probabilities are float32 (float64 where an
    operand is); the weight gradient is summed in float32 over groups of rows, and every gradient is returned in its
    input's dtype. Under autocast the operands are rounded as `torch.nn.functional.linear` would round them.

    Args:
        hidden_states: (N, H), or (B, T, H) with N = B * T; row i scores target i.
        lm_head_weight: (V, H), whole. An input that does not require a gradient costs no product and no memory.
        target_ids: (N,) or (B, T), integer, in [0, V) where they count.
        bias: (V,) or None.
        memory_budget: bytes for logits at any moment, besides the gradients. Sequences go through the head together as
            far as it allows; the part of a longer one that does not fit is computed twice, if the sequence is live.
        vocab_parallel_group: lm_head_weight and bias are this rank's contiguous rows of the vocabulary, in rank order
            (their number may differ); all other arguments, and which inputs require a gradient, are equal on all ranks
            of the group. The gradient of the hidden states is summed over the group, those of weight and bias are of
            this rank's rows. Log-probabilities, liveness and loss are the same on every rank.
        The rest: see `hacpo_loss`.

    Returns:
        LossOutput. Sequences with advantage 0 (and not in a KL term) never go through the head: their `ratios` and
        `logprobs` are NaN, they are not `live`, and the ratio metrics leave them out.

    Raises:
        ValueError, TypeError: an argument that does not fit, named; a weight that is a shard.
    """
    where = "linear_hacpo_loss"
    hidden, weight, targets, bias = _check_head(where, hidden_states, lm_head_weight, target_ids, bias)
    rows = targets.numel()
    check_sequences(where, sequences, config, rows, "hidden_states", hidden)
    index = check_update_index(where, update_index)
    transform = check_transform(where, temperature, logit_scale, softcap, (sequences.num_sequences,))
    mask = None if sequences.loss_mask is None else sequences.loss_mask != 0
    targets = targets.reshape(-1)
    shard = _shard(vocab_parallel_group, weight)
    check_target_ids(where, targets, weight.shape[0] if shard is None else shard.total, mask)
    ops = get_backend(where, backend, hidden.device)

    flat = hidden.reshape(-1, hidden.shape[-1])
    wanted = [tensor is not None and tensor.requires_grad for tensor in (flat, weight, bias)]
    head = Head(flat, weight, bias, shard)
    if isinstance(transform.temperature, Tensor):
        spread = transform.temperature.detach().to(head.dtype)[sequences.sequence_of_row(rows)]
        transform = replace(transform, temperature=spread)
    denominators = normalizers(where, sequences, num_sequences, num_self_sequences, head.dtype)
    work = _Work(
        head, ops, targets, transform, sequences, config, index, denominators,
        logprobs=torch.full((rows,), float("nan"), dtype=head.dtype, device=hidden.device),
        gradients=empty_gradients(wanted, flat, weight, bias, head) if torch.is_grad_enabled() else None,
    )  # fmt: skip
    scored = _run_groups(where, work, memory_budget, mask)

    if mask is not None:
        work.logprobs.masked_fill_(~mask, 0.0)
    terms = ops.sequence_terms(work.logprobs, sequences, config, index, denominators)
    unscored = ~scored & (sequences.token_counts() > 0)
    terms = replace(terms, ratios=torch.where(unscored, float("nan"), terms.ratios))
    loss = reduce_loss(terms, config, denominators)
    metrics = reduce_metrics(terms, sequences, config, index, scored)
    if work.gradients is not None:
        loss = PrecomputedLoss.apply(flat, weight, bias, loss, work.gradients)
    return LossOutput(loss, work.logprobs, terms.ratios, terms.live, metrics)


def empty_gradients(
    needed: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head
) -> Gradients | None:
    """Zeros for what needs a gradient, in the order hidden, weight, bias; None when nothing does."""
    gradients = Gradients()
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    for (name, tensor), wanted in zip(tensors.items(), needed, strict=False):
        if tensor is not None and wanted:
            # rows of hidden states are written once, so their own dtype does; sums need the wide one
            dtype = tensor.dtype if name == "hidden" else head.dtype
            setattr(gradients, name, torch.zeros(tensor.shape, dtype=dtype, device=tensor.device))
            gradients.dtypes[name] = tensor.dtype
    if not gradients.dtypes:
        return None
    return gradients


def _run_groups(where: str, work: _Work, memory_budget: int, mask: Tensor | None) -> Tensor:
    """Sends every needed sequence through the head; (S,) bool, which those were.

    The plan needs lengths and advantages on the host: one wait a call, and one a group for what is live in it.
    """
    sequences, config, device = work.sequences, work.config, work.targets.device
    counts = sequences.token_counts()
    needed = sequences.advantages != 0
    if config.beta > 0:
        needed = needed | ~sequences.cross_mask()
    needed = needed & (counts > 0)
    lengths, flags = torch.stack([counts, needed.long()]).tolist()
    per_logit = work.head.dtype.itemsize + (work.head.operand_dtype.itemsize if work.head.low else 0)
    try:
        rows_fit = rows_within(memory_budget, work.head.planned_columns, per_logit)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    counted = torch.arange(work.targets.numel(), device=device) if mask is None else mask.nonzero().squeeze(-1)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    for group in plan_groups(lengths, [bool(flag) for flag in flags], rows_fit):
        rows = torch.cat([counted[ends[i] : ends[i + 1]] for i in group.sequences])
        chosen = torch.tensor(group.sequences, device=device)
        work.run(group, chosen, rows, counts[chosen])
    return needed


@dataclass(frozen=True)
class LinearLogprobParams:
    """What `LinearLogprobFunction` needs besides tensors that autograd must see."""

    ops: ModuleType
    head: Head
    transform: LogitTransform
    entropy: bool
    tile_rows: int


class LinearLogprobFunction(torch.autograd.Function):
    """(hidden (N, H), weight, bias, target_ids (N,), mask (N,)) -> (logprobs (N,), entropies (N,) or None).

    Logits exist for a tile of rows at a time, and once more in the backward pass for rows with a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        mask: Tensor,
        params: LinearLogprobParams,
    ) -> tuple[Tensor, Tensor | None]:
        head, rows = params.head, target_ids.numel()
        logprobs = torch.zeros(rows, dtype=head.dtype, device=hidden.device)
        stats = torch.zeros(2, rows, dtype=head.dtype, device=hidden.device)
        entropies = torch.zeros_like(logprobs) if params.entropy else None
        for tile in mask.nonzero().squeeze(-1).split(params.tile_rows):
            logits, ids = head.logits(head.rows(tile)), target_ids[tile]
            columns = ids if head.shard is None else head.shard.local(ids)
            scored = params.ops.logprob_fwd(logits, columns, None, params.transform.of_rows(tile), params.entropy)
            if head.shard is not None:
                scored = head.shard.combine(ids, *scored)
            logprobs[tile], stats[:, tile] = scored[0], scored[1]
            if entropies is not None:
                entropies[tile] = scored[2]
            del logits, scored
        ctx.save_for_backward(hidden, weight, bias, target_ids, mask, stats, entropies)
        ctx.params = params
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, target_ids, mask, stats, entropies = ctx.saved_tensors
        params: LinearLogprobParams = ctx.params
        gradients = empty_gradients(ctx.needs_input_grad, hidden, weight, bias, params.head)
        grad_logprobs, grad_entropies = grads
        if gradients is None or (grad_logprobs is None and grad_entropies is None):
            return None, None, None, None, None, None
        live = torch.zeros_like(mask)
        for grad in grads:
            if grad is not None:
                live |= mask & (grad != 0)
        shard = params.head.shard
        if shard is not None:  # one list of rows, and of collectives, for all ranks
            live = shard.max(live.int()).bool()
        for tile in live.nonzero().squeeze(-1).split(params.tile_rows):
            logits = params.head.logits(params.head.rows(tile))
            coefficients = torch.ones(tile.numel(), dtype=params.head.dtype, device=tile.device)
            own, surprise = grad_logprobs, grad_entropies
            if grad_logprobs is not None and grad_entropies is None:
                # scaling the (n, H) side instead of the (n, V) one keeps small gradients out of low precision
                coefficients = grad_logprobs[tile].to(params.head.dtype)
                own = torch.ones_like(grad_logprobs)
            ids, transform = target_ids[tile], params.transform.of_rows(tile)
            params.ops.logprob_bwd(
                logits, ids if shard is None else ids.long() - shard.start, None, transform,
                stats[:, tile].contiguous(),
                None if entropies is None else entropies[tile], None if own is None else own[tile],
                None if surprise is None else surprise[tile], logits,
            )  # fmt: skip
            gradients.add(params.head, tile, logits.to(params.head.operand_dtype), coefficients)
        return gradients.hidden, gradients.cast("weight"), gradients.cast("bias"), None, None, None


@torch.compiler.disable
def linear_token_logprobs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    *,
    bias: Tensor | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    backend: str | None = None,
    vocab_parallel_group: ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each target from hidden states and the lm_head weight, without (N, V) logits.

    Equivalent to::

        logits = hidden_states.float() @ lm_head_weight.float().T + bias
        return token_logprobs(logits, target_ids, ...)

    Differentiable for any incoming gradient, which costs a second product for the logits of rows whose gradient is not
    zero: four in all. `linear_hacpo_loss` knows its gradient beforehand and needs three.

    Args:
        hidden_states: (N, H) or (B, T, H). lm_head_weight: (V, H), whole. bias: (V,) or None.
        target_ids: (N,) or (B, T), integer; -100 marks a row to ignore: 0, without a gradient, and not multiplied.
        memory_budget: bytes for logits at any moment, besides the gradients.
        temperature: > 0, a number or one per row of the first dimension. The rest: see `token_logprobs`.
        vocab_parallel_group: as in `linear_hacpo_loss`; incoming gradients are equal on all ranks too.

    Returns:
        float32 (float64 where an operand is) of the shape of `target_ids`; with `entropy` a tuple with the entropies.

    Raises:
        ValueError, TypeError: an argument that does not fit, named; a weight that is a shard.
    """
    where = "linear_token_logprobs"
    hidden, weight, targets, bias = _check_head(where, hidden_states, lm_head_weight, target_ids, bias)
    transform = check_transform(where, temperature, logit_scale, softcap, tuple(hidden.shape[:1]))
    counts = targets != IGNORED_ID
    shard = _shard(vocab_parallel_group, weight)
    check_target_ids(where, targets, weight.shape[0] if shard is None else shard.total, counts)
    flat = hidden.reshape(-1, hidden.shape[-1])
    head = Head(flat, weight, bias, shard)
    if isinstance(transform.temperature, Tensor):
        per_row = targets.numel() // max(transform.temperature.numel(), 1)
        spread = transform.temperature.detach().to(head.dtype).repeat_interleave(per_row)
        transform = replace(transform, temperature=spread)
    per_logit = head.dtype.itemsize + (head.operand_dtype.itemsize if head.low else 0)
    try:
        tile_rows = min(rows_within(memory_budget, head.planned_columns, per_logit), TARGET_ROWS)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    params = LinearLogprobParams(get_backend(where, backend, hidden.device), head, transform, entropy, tile_rows)
    logprobs, entropies = LinearLogprobFunction.apply(
        flat, weight, bias, targets.reshape(-1), counts.reshape(-1), params
    )
    logprobs = logprobs.reshape(targets.shape)
    return (logprobs, entropies.reshape(targets.shape)) if entropy else logprobs


class LinearHACPOLoss(nn.Module):
    """`linear_hacpo_loss` for padded hidden states.

    Example::

        loss_fn = LinearHACPOLoss(HACPOConfig())
        hidden = model.model(input_ids).last_hidden_state          # (B, T + 1, H)
        out = loss_fn(hidden[:, :-1], model.lm_head.weight, input_ids[:, 1:], loss_mask[:, 1:], source_mean_logprobs,
                      advantages, is_cross=is_cross, weights=weights)
        out.loss.backward()
    """

    def __init__(self, config: HACPOConfig | None = None, memory_budget: int = DEFAULT_BUDGET) -> None:
        super().__init__()
        self.config = HACPOConfig() if config is None else config
        self.memory_budget = memory_budget
        if not isinstance(self.config, HACPOConfig):
            raise TypeError(f"LinearHACPOLoss: config must be a HACPOConfig, got {type(config).__name__}.")

    def forward(
        self,
        hidden_states: Tensor,
        lm_head_weight: Tensor,
        target_ids: Tensor,
        loss_mask: Tensor,
        source_mean_logprobs: Tensor,
        advantages: Tensor,
        *,
        bias: Tensor | None = None,
        weights: Tensor | None = None,
        is_cross: Tensor | None = None,
        lengths: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        old_logprobs: Tensor | None = None,
        **keywords: Any,
    ) -> LossOutput:
        """The loss of a padded batch.

        Args:
            hidden_states: (B, T, H); position t scores target t. lm_head_weight: (V, H). bias: (V,) or None.
            target_ids: (B, T); anything, -100 included, outside `loss_mask`.
            loss_mask: (B, T) bool or int, True where a token counts; the others are not multiplied.
            source_mean_logprobs, advantages, weights, is_cross, lengths: (B,), as in `SequenceBatch`.
            ref_logprobs, old_logprobs: (B, T).
            keywords: those of `linear_hacpo_loss`.

        Returns:
            LossOutput with `logprobs` of shape (B, T).
        """
        where = "LinearHACPOLoss"
        hidden = check_tensor(where, "hidden_states", hidden_states)
        if hidden.dim() != 3:
            raise ValueError(f"{where}: hidden_states must have shape (B, T, H), got {tuple(hidden.shape)}.")
        check_shape(where, "loss_mask", check_tensor(where, "loss_mask", loss_mask), hidden.shape[:2], "(B, T)")
        sequences = padded_sequences(
            where, loss_mask, source_mean_logprobs, advantages, weights=weights, is_cross=is_cross, lengths=lengths,
            ref_logprobs=ref_logprobs, old_logprobs=old_logprobs,
        )  # fmt: skip
        keywords = {"memory_budget": self.memory_budget, **keywords}
        out = linear_hacpo_loss(hidden, lm_head_weight, target_ids, sequences, self.config, bias=bias, **keywords)
        return replace(out, logprobs=out.logprobs.view(loss_mask.shape))

    def extra_repr(self) -> str:
        return f"{self.config}, memory_budget={self.memory_budget}"
