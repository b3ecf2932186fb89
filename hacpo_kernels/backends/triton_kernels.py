"""Triton kernels of the from-logits path.

Rows of logits are addressed by 64-bit offsets. A row is one token; `mask` says which rows count. Every kernel writes
each of its outputs from one place and in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_pointer(pointer, row, T, stride_b, stride_t):
    """Start of a row of a (B, T, V) tensor, whatever its strides. `row` is int64, and so is every product with it."""
    batch = row // T
    return pointer + (batch * stride_b + (row - batch * T) * stride_t)


@triton.jit
def _align(pointer, ELEMENT_BYTES: tl.constexpr):
    """(the last 16-byte boundary at or before `pointer`, how many elements before it that is).

    Rows of an odd length start anywhere. Blocks that begin on the boundary keep every access inside the row 16 bytes
    wide; only the block at either end of the row needs a mask, and a mask makes narrow accesses. On which lane a column
    falls then depends on where its row starts: the same row at another place in memory can differ in the last bit.
    """
    shift = ((pointer.to(tl.int64) & 15) // ELEMENT_BYTES).to(tl.int32)
    return tl.multiple_of(pointer - shift.to(tl.int64), 16), shift


@triton.jit
def _tanh(z):
    """tanh from exp alone: it exists on every target and in the interpreter, and its error stays below one ulp of 1."""
    e = tl.exp(-2.0 * tl.abs(z))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(z < 0.0, -t, t)


@triton.jit
def _transformed(raw, factor, peak, HAS_SOFTCAP: tl.constexpr):
    """x from the head's output: peak * tanh(factor * raw) with a softcap, factor * raw without."""
    return peak * _tanh(raw * factor) if HAS_SOFTCAP else raw * factor


@triton.jit
def _row_factors(
    temperature_ptr, row, scale, softcap, temperature, ACC: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ROW_TEMPERATURE: tl.constexpr,
):  # fmt: skip
    """(factor, peak, slope at 0) of a row; the temperature is folded in once per row, not once per logit."""
    if HAS_ROW_TEMPERATURE:
        row_temperature = tl.load(temperature_ptr + row).to(ACC)
    else:
        row_temperature = tl.full((), temperature, ACC)
    wide_scale = tl.full((), scale, ACC)
    slope = wide_scale / row_temperature
    if HAS_SOFTCAP:
        wide_softcap = tl.full((), softcap, ACC)
        return wide_scale / wide_softcap, wide_softcap / row_temperature, slope
    else:
        return slope, slope, slope


@triton.jit
def _online_update(x, maximum, total, weighted, HAS_ENTROPY: tl.constexpr):
    """Takes a block of x into the running maximum m, sum of exp(x - m) and sum of exp(x - m) (x - m)."""
    new_maximum = tl.maximum(maximum, tl.max(x, 0))
    # while everything is -inf any finite stand-in keeps -inf - -inf = NaN out
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = tl.exp(maximum - shift)
    e = tl.exp(x - shift)
    if HAS_ENTROPY:
        moved = tl.where(total > 0.0, total * (maximum - shift), 0.0)
        weighted = decay * (weighted + moved) + tl.sum(tl.where(e > 0.0, e * (x - shift), 0.0), 0)
    total = total * decay + tl.sum(e, 0)
    return new_maximum, total, weighted


@triton.jit
def _masked_block(base, index, shift, width, stride_v, factor, peak, ACC: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """x of a block that reaches beyond the row: -inf outside it."""
    inside = (index >= shift) & (index < width)
    raw = tl.load(base + index.to(tl.int64) * stride_v, mask=inside, other=0.0).to(ACC)
    return tl.where(inside, _transformed(raw, factor, peak, HAS_SOFTCAP), float("-inf"))


@triton.jit
def _logprob_fwd_kernel(
    logits_ptr, target_ids_ptr, mask_ptr, temperature_ptr, logprobs_ptr, stats_ptr, entropies_ptr,
    N, T, V, stride_b, stride_t, stride_v, scale, softcap, temperature,
    ACC: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ROW_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, PEEL: tl.constexpr, ELEMENT_BYTES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row a program: log-probability, row maximum, log of the sum and optionally entropy, each logit read once.

    PEEL says that columns are adjacent and rows start anywhere; without it they are known to start on 16 bytes, or no
    wide access is possible.
    """
    row = tl.program_id(0).to(tl.int64)
    if HAS_MASK:
        if tl.load(mask_ptr + row) == 0:
            tl.store(logprobs_ptr + row, tl.zeros((), ACC))
            tl.store(stats_ptr + row, tl.zeros((), ACC))
            tl.store(stats_ptr + (N + row), tl.zeros((), ACC))
            if HAS_ENTROPY:
                tl.store(entropies_ptr + row, tl.zeros((), ACC))
            return
    start_of_row = _row_pointer(logits_ptr, row, T, stride_b, stride_t)
    base = start_of_row
    shift = 0
    if PEEL:
        base, shift = _align(start_of_row, ELEMENT_BYTES)
    factor, peak, _ = _row_factors(
        temperature_ptr, row, scale, softcap, temperature, ACC, HAS_SOFTCAP, HAS_ROW_TEMPERATURE
    )
    maximum = tl.full((), float("-inf"), ACC)
    total = tl.zeros((), ACC)
    weighted = tl.zeros((), ACC)
    lanes = tl.arange(0, BLOCK_V)
    width = V + shift
    first = 0
    if PEEL:
        if shift > 0:
            x = _masked_block(base, lanes, shift, width, stride_v, factor, peak, ACC, HAS_SOFTCAP)
            maximum, total, weighted = _online_update(x, maximum, total, weighted, HAS_ENTROPY)
            first = BLOCK_V
    full = width // BLOCK_V * BLOCK_V
    for start in range(first, full, BLOCK_V):
        raw = tl.load(base + (start + lanes).to(tl.int64) * stride_v).to(ACC)
        x = _transformed(raw, factor, peak, HAS_SOFTCAP)
        maximum, total, weighted = _online_update(x, maximum, total, weighted, HAS_ENTROPY)
    if (full < width) & (full >= first):
        x = _masked_block(base, full + lanes, shift, width, stride_v, factor, peak, ACC, HAS_SOFTCAP)
        maximum, total, weighted = _online_update(x, maximum, total, weighted, HAS_ENTROPY)
    target = tl.load(target_ids_ptr + row).to(tl.int64)
    inside = (target >= 0) & (target < V)
    raw_target = tl.load(start_of_row + target * stride_v, mask=inside, other=float("nan")).to(ACC)
    log_total = tl.log(total)
    x_target = _transformed(raw_target, factor, peak, HAS_SOFTCAP)
    tl.store(logprobs_ptr + row, (x_target - maximum) - log_total)
    tl.store(stats_ptr + row, maximum)
    tl.store(stats_ptr + (N + row), log_total)
    if HAS_ENTROPY:
        tl.store(entropies_ptr + row, log_total - weighted / total)


@triton.jit
def _logit_gradient(
    raw, is_target, maximum, log_total, entropy, grad_logprob, grad_entropy, factor, peak, slope,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """d loss / d raw of a block: grad_logprob (onehot - p) - grad_entropy p (log p + entropy), times dx/draw."""
    if HAS_SOFTCAP:
        t = _tanh(raw * factor)
        logp = (peak * t - maximum) - log_total
        local_slope = slope * (1.0 - t * t)
    else:
        logp = (raw * factor - maximum) - log_total
        local_slope = slope
    p = tl.exp(logp)
    gradient = grad_logprob * (tl.where(is_target, 1.0, 0.0) - p)
    if HAS_ENTROPY:
        gradient -= grad_entropy * tl.where(p > 0.0, p * (logp + entropy), 0.0)
    return gradient * local_slope


@triton.jit
def _logprob_bwd_kernel(
    logits_ptr, grad_logits_ptr, target_ids_ptr, mask_ptr, temperature_ptr, stats_ptr, entropies_ptr,
    grad_logprobs_ptr, grad_entropies_ptr,
    N, T, V, stride_b, stride_t, stride_v, grad_stride_b, grad_stride_t, grad_stride_v, scale, softcap, temperature,
    ACC: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ROW_TEMPERATURE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr, PEEL: tl.constexpr, ELEMENT_BYTES: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One block of one row a program; the gradient may be written over the logits. A dead row is not read.

    PEEL says that columns are adjacent in both tensors and that their rows start equally far from a 16-byte boundary.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_V
    index = first + tl.arange(0, BLOCK_V)
    base = _row_pointer(logits_ptr, row, T, stride_b, stride_t)
    out = _row_pointer(grad_logits_ptr, row, T, grad_stride_b, grad_stride_t)
    shift = 0
    if PEEL:
        base, shift = _align(base, ELEMENT_BYTES)
        out = tl.multiple_of(out - shift.to(tl.int64), 16)
    base += index.to(tl.int64) * stride_v
    out += index.to(tl.int64) * grad_stride_v
    whole = (first >= shift) & (first + BLOCK_V <= V + shift)
    inside = (index >= shift) & (index < V + shift)

    grad_logprob = tl.load(grad_logprobs_ptr + row).to(ACC)
    grad_entropy = tl.zeros((), ACC)
    entropy = tl.zeros((), ACC)
    if HAS_ENTROPY:
        grad_entropy = tl.load(grad_entropies_ptr + row).to(ACC)
        entropy = tl.load(entropies_ptr + row).to(ACC)
    dead = (grad_logprob == 0.0) & (grad_entropy == 0.0)
    if HAS_MASK:
        dead = dead | (tl.load(mask_ptr + row) == 0)
    if dead:
        zeros = tl.zeros((BLOCK_V,), grad_logits_ptr.dtype.element_ty)
        if whole:
            tl.store(out, zeros)
        else:
            tl.store(out, zeros, mask=inside)
        return
    factor, peak, slope = _row_factors(
        temperature_ptr, row, scale, softcap, temperature, ACC, HAS_SOFTCAP, HAS_ROW_TEMPERATURE
    )
    maximum = tl.load(stats_ptr + row).to(ACC)
    log_total = tl.load(stats_ptr + (N + row)).to(ACC)
    is_target = index == tl.load(target_ids_ptr + row) + shift
    if whole:
        raw = tl.load(base).to(ACC)
        gradient = _logit_gradient(
            raw, is_target, maximum, log_total, entropy, grad_logprob, grad_entropy, factor, peak, slope,
            HAS_SOFTCAP, HAS_ENTROPY,
        )  # fmt: skip
        tl.store(out, gradient.to(grad_logits_ptr.dtype.element_ty))
    else:
        raw = tl.load(base, mask=inside, other=0.0).to(ACC)
        gradient = _logit_gradient(
            raw, is_target, maximum, log_total, entropy, grad_logprob, grad_entropy, factor, peak, slope,
            HAS_SOFTCAP, HAS_ENTROPY,
        )  # fmt: skip
        tl.store(out, gradient.to(grad_logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _self_rule(ratio, outside, advantage, epsilon_low, epsilon_high):
    """(J, dJ/dlog s, clip side) under the self rule (Eq. 47), of sequences or of tokens."""
    # in float64: 1 + 4e-4 in float32 would be off by up to 6e-8
    upper = 1.0 + tl.full((), epsilon_high, tl.float64)
    lower = 1.0 - tl.full((), epsilon_low, tl.float64)
    bounded = tl.minimum(tl.maximum(ratio, lower), upper)
    side = tl.where((advantage > 0.0) & (ratio > upper), 1.0, outside)
    side = tl.where((advantage < 0.0) & (ratio < lower), -1.0, side)
    side = tl.where(advantage == 0.0, 0.0, side)
    scaled = ratio * advantage
    # NaN must come out as NaN: min and max drop it
    objective = tl.where(scaled == scaled, tl.minimum(scaled, bounded * advantage), scaled)
    objective = tl.where(advantage == 0.0, 0.0, objective)
    return objective, tl.where((side == 0.0) & (advantage != 0.0), scaled, 0.0), side


@triton.jit
def _sequence_kernel(
    logprobs_ptr, mask_ptr, cu_seqlens_ptr, source_mean_ptr, advantages_ptr, weights_ptr, is_cross_ptr, lengths_ptr,
    ref_logprobs_ptr, old_logprobs_ptr, denominators_ptr,
    coefficients_ptr, ratios_ptr, objectives_ptr, kl_ptr, live_ptr, clipped_ptr,
    N, alpha, cross_low, cross_high, epsilon_low, epsilon_high, beta,
    HAS_MASK: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_CROSS: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_KL: tl.constexpr, TOKEN_RATIO: tl.constexpr, CROSS_RULE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One sequence a program: ratio, clip, J and the coefficient of each token; see `objective` for the equations.

    Sums and ratios are float64: they are few, and the self clip radius is only 3e-4. CROSS_RULE is 0 for none, 1 for
    the self rule, 2 for HACPO's.
    """
    sequence = tl.program_id(0).to(tl.int64)
    alpha = tl.full((), alpha, tl.float64)
    beta = tl.full((), beta, tl.float64)
    cross_low = tl.full((), cross_low, tl.float64)
    cross_high = tl.full((), cross_high, tl.float64)
    # boundaries that were not checked on the host still cannot lead outside the N rows
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence).to(tl.int64), 0), N)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + (sequence + 1)).to(tl.int64), start), N)
    lanes = tl.arange(0, BLOCK_N)
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.float64)
    for first in range(start, end, BLOCK_N):
        rows = first + lanes
        counted = rows < end
        if HAS_MASK:
            counted = counted & (tl.load(mask_ptr + rows, mask=counted, other=0) != 0)
        total += tl.sum(tl.load(logprobs_ptr + rows, mask=counted, other=0.0).to(tl.float64), 0)
        count += tl.sum(tl.where(counted, 1.0, 0.0).to(tl.float64), 0)
    empty = count == 0.0
    tokens = tl.where(empty, 1.0, count)

    is_cross = tl.zeros((), tl.int1)
    if HAS_CROSS:
        is_cross = tl.load(is_cross_ptr + sequence) != 0
    advantage = tl.where(empty, 0.0, tl.load(advantages_ptr + sequence).to(tl.float64))
    if HAS_CROSS and CROSS_RULE == 0:
        advantage = tl.where(is_cross, 0.0, advantage)
    divisor = tokens
    if HAS_LENGTHS:
        divisor = tl.where(empty, 1.0, tl.load(lengths_ptr + sequence).to(tl.float64))
    source_mean = tl.load(source_mean_ptr + sequence).to(tl.float64)
    log_ratio = tl.where(empty, 0.0, total / divisor - source_mean)
    bounded = tl.minimum(tl.maximum(log_ratio, -10.0), 10.0)
    bounded = tl.where(log_ratio == log_ratio, bounded, log_ratio)
    outside = tl.where(log_ratio > 10.0, 1.0, tl.where(log_ratio < -10.0, -1.0, 0.0)).to(tl.float64)
    ratio = tl.exp(bounded)

    objective, slope, side = _self_rule(ratio, outside, advantage, epsilon_low, epsilon_high)
    by_cross_rule = tl.zeros((), tl.int1)
    if HAS_CROSS and CROSS_RULE == 2:
        by_cross_rule = is_cross
        weight = tl.zeros((), tl.float64) + 1.0
        if HAS_WEIGHTS:
            weight = tl.where(is_cross, tl.load(weights_ptr + sequence).to(tl.float64), 1.0)
        clamped = tl.minimum(tl.maximum(ratio, cross_low), cross_high)
        clamped = tl.where(ratio == ratio, clamped, ratio)
        below = (ratio < cross_low) | ((cross_low >= cross_high) & (ratio <= cross_low))
        cross_side = tl.where(below, -1.0, outside)
        cross_side = tl.where(ratio > cross_high, 1.0, cross_side)
        cross_side = tl.where(advantage == 0.0, 0.0, cross_side)
        scale = tl.where(advantage == 0.0, 0.0, weight * advantage)
        power = 1.0 + alpha
        cross_objective = tl.where(advantage == 0.0, 0.0, tl.exp(power * tl.log(clamped)) * scale)
        cross_slope = tl.where((cross_side == 0.0) & (advantage != 0.0), tl.exp(power * bounded) * scale, 0.0)
        objective = tl.where(is_cross, cross_objective, objective)
        slope = tl.where(is_cross, cross_slope, slope)
        side = tl.where(is_cross, cross_side, side)
    live = slope != 0.0

    policy_denominator = tl.load(denominators_ptr).to(tl.float64)
    kl_denominator = tl.load(denominators_ptr + 1).to(tl.float64)
    token_objective = tl.zeros((), tl.float64)
    live_tokens = tl.zeros((), tl.float64)
    self_lanes = (tl.zeros((BLOCK_N,), tl.float64) + is_cross.to(tl.float64)) == 0.0
    token_lanes = (tl.zeros((BLOCK_N,), tl.float64) + by_cross_rule.to(tl.float64)) == 0.0
    lane_advantages = tl.zeros((BLOCK_N,), tl.float64) + advantage
    divergence = tl.zeros((), tl.float64)
    for first in range(start, end, BLOCK_N):
        rows = first + lanes
        counted = rows < end
        if HAS_MASK:
            counted = counted & (tl.load(mask_ptr + rows, mask=counted, other=0) != 0)
        coefficient = tl.zeros((BLOCK_N,), tl.float64) + slope / divisor
        if TOKEN_RATIO or HAS_KL:
            logprob = tl.load(logprobs_ptr + rows, mask=counted, other=0.0).to(tl.float64)
        if TOKEN_RATIO:
            old = tl.load(old_logprobs_ptr + rows, mask=counted, other=0.0).to(tl.float64)
            token_log = tl.where(counted, logprob - old, 0.0)
            limited = tl.minimum(tl.maximum(token_log, -10.0), 10.0)
            limited = tl.where(token_log == token_log, limited, token_log)
            token_outside = tl.where(token_log > 10.0, 1.0, tl.where(token_log < -10.0, -1.0, 0.0))
            j, token_slope, token_side = _self_rule(
                tl.exp(limited), token_outside.to(tl.float64), lane_advantages, epsilon_low, epsilon_high
            )
            by_token_rule = counted & token_lanes
            token_objective += tl.sum(tl.where(by_token_rule, j, 0.0), 0)
            token_alive = by_token_rule & (token_side == 0.0) & (lane_advantages != 0.0)
            live_tokens += tl.sum(tl.where(token_alive, 1.0, 0.0).to(tl.float64), 0)
            coefficient = tl.where(by_token_rule, token_slope / tokens, coefficient)
        coefficient = -coefficient / policy_denominator
        if HAS_KL:
            in_kl = counted & self_lanes
            ref = tl.load(ref_logprobs_ptr + rows, mask=in_kl, other=0.0).to(tl.float64)
            delta = tl.where(in_kl, ref - logprob, 0.0)
            e = tl.exp(delta)
            divergence += tl.sum(e - delta - 1.0, 0)
            coefficient += beta / kl_denominator * (1.0 - e) / tokens
        coefficient = tl.where(counted, coefficient, 0.0)
        tl.store(coefficients_ptr + rows, coefficient.to(coefficients_ptr.dtype.element_ty), mask=rows < end)
    if TOKEN_RATIO:
        if by_cross_rule == 0:
            objective = token_objective / tokens
            live = live_tokens > 0.0
            gone = (advantage != 0.0) & (live_tokens == 0.0)
            side = tl.where(gone, tl.where(advantage > 0.0, 1.0, -1.0), 0.0).to(tl.float64)
    if HAS_KL:
        live = live | ((is_cross == 0) & (count > 0.0))
    kl = divergence / tokens
    tl.store(ratios_ptr + sequence, ratio.to(ratios_ptr.dtype.element_ty))
    tl.store(objectives_ptr + sequence, objective.to(objectives_ptr.dtype.element_ty))
    tl.store(kl_ptr + sequence, kl.to(kl_ptr.dtype.element_ty))
    tl.store(live_ptr + sequence, live.to(tl.int8))
    tl.store(clipped_ptr + sequence, side.to(tl.int8))
