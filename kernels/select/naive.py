"""Select, joint select and correct in plain torch: the same operations in the same order.

Works on any device; every result equals the kernels' to the last bit. Tables are those of
tables.py, one row a request or one for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridspec.kernels.select import elementary
from hybridspec.kernels.select.tables import (
    BIAS,
    BLOCK_SIZE,
    EXPERT_PRICE,
    FIRST_MEAN,
    KNOT_RANGE,
    KNOTS,
    NUM_DRAFTS,
    STATIC,
    DeviceTables,
)

TIE_TOKENS = 1e-9
CONTEXT_BUCKET = 64
GAIN_SCALE, LAM_SCALE, LARGEST_LAM = float(2**40), float(2**50), 64.0


def polynomial(x: torch.Tensor, terms: Sequence[float]) -> torch.Tensor:
    """`sum_n terms[n] x^n` for twelve terms, even and odd powers apart."""
    square = x * x
    even = square * terms[10] + terms[8]
    odd = square * terms[11] + terms[9]
    for n in range(4):
        even = even * square + terms[6 - 2 * n]
        odd = odd * square + terms[7 - 2 * n]
    return even + x * odd


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of normal positive fp64 numbers."""
    bits = x.contiguous().view(torch.int64)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & elementary.MANTISSA_BITS) | (1022 << 52)).view(torch.float64)
    small = mantissa < elementary.SQRT_HALF_VALUE
    mantissa = torch.where(small, mantissa + mantissa, mantissa)
    k = torch.where(small, exponent - 1, exponent).to(torch.float64)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    remainder = z * polynomial(z, elementary.LOG_COEFFICIENTS)
    low = s * (f - remainder) - k * elementary.LN2_LOW_PART
    return k * elementary.LN2_HIGH_PART + (f - low)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Exponential of fp64 numbers in [-700, 700]."""
    k = torch.floor(x * elementary.INVERSE_LN2_VALUE + 0.5)
    r = (x - k * elementary.LN2_HIGH_PART) - k * elementary.LN2_LOW_PART
    value = 1.0 + (r + r * r * polynomial(r, elementary.EXP_COEFFICIENTS))
    scale = ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return value * scale


def clip(x: torch.Tensor, low: torch.Tensor | float, high: torch.Tensor | float) -> torch.Tensor:
    """`x` within [low, high]."""
    low = torch.as_tensor(low, dtype=x.dtype, device=x.device)
    high = torch.as_tensor(high, dtype=x.dtype, device=x.device)
    x = torch.where(x < low, low, x)
    return torch.where(x > high, high, x)


def survival(
    p1_BD: torch.Tensor,
    p2_BD: torch.Tensor,
    entropy_BD: torch.Tensor,
    context_tokens_B: torch.Tensor,
    tables: DeviceTables,
    hazards_BD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S_0 .. S_15, fp64 [B, 16], and which requests have broken signals, bool [B, 1]."""
    if hazards_BD is not None:
        broken = ~((hazards_BD >= 0.0) & (hazards_BD <= 1.0)).all(1, keepdim=True)
        return survival_of(torch.where(broken, 0.0, hazards_BD)), broken
    table = tables.values_TP.expand(p1_BD.shape[0], -1)
    column = table.unsqueeze(-1).unbind(1)
    context = context_tokens_B.clamp(min=0).to(torch.float64)[:, None]
    finite = p1_BD.isfinite() & p2_BD.isfinite() & entropy_BD.isfinite()
    half = torch.full_like(p1_BD, 0.5)
    p1 = clip(torch.where(finite, p1_BD, half).to(torch.float64), 1e-6, 1.0 - 1e-6)
    p2 = clip(torch.where(finite, p2_BD, half).to(torch.float64), 1e-9, 1.0)
    linear = table[:, BIAS : BIAS + NUM_DRAFTS] + column[4] * log(context + 1.0)
    linear = linear + (column[0] * log(p1) - column[1] * log(1.0 - p1))
    linear = linear + column[2] * entropy_BD.to(torch.float64)
    linear = linear + column[3] * (p1 - p2)
    finite = finite & linear.isfinite()
    broken = ~finite.all(1, keepdim=True)
    linear = clip(torch.where(finite, linear, torch.zeros_like(linear)), -700.0, 700.0)
    x = 1.0 / (1.0 + exp(0.0 - linear))
    x = clip(x, column[KNOT_RANGE], column[KNOT_RANGE + 1])
    piece = torch.zeros_like(x, dtype=torch.int64)
    for j in range(tables.knots):
        piece += x >= column[KNOTS + j]
    offset = table.gather(1, KNOTS + tables.knots + piece)
    slope = table.gather(1, KNOTS + 2 * tables.knots + piece)
    hazard = offset + slope * x
    hazard = torch.where(hazard > 1.0, 1.0, hazard)
    hazard = torch.where((hazard < 0.0) | broken, 0.0, hazard)
    return survival_of(hazard), broken


def survival_of(hazard_BD: torch.Tensor) -> torch.Tensor:
    """S_0 .. S_15 as products from the first draft on, [B, 16]."""
    steps = [torch.ones_like(hazard_BD[:, 0])]
    for d in range(NUM_DRAFTS):
        steps.append(steps[-1] * hazard_BD[:, d])
    return torch.stack(steps, 1)


def expected_emitted(survival_BL: torch.Tensor) -> torch.Tensor:
    """E(L) for L = 1..16, added from the first survival to the last."""
    steps = [survival_BL[:, 0]]
    for d in range(1, BLOCK_SIZE):
        steps.append(steps[-1] + survival_BL[:, d])
    return torch.stack(steps, 1)


def batch_columns(
    tables: DeviceTables, batch_size: torch.Tensor, num_requests: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row of the measured batch size, lam and best fixed length there; all [B]."""
    table = tables.values_TP.expand(num_requests, -1)
    start, count = KNOTS + 3 * tables.knots, tables.batches
    below = table[:, start : start + count - 1] < batch_size.to(torch.float64)
    row = below.sum(1)
    lam = table.gather(1, (start + count + row)[:, None])[:, 0]
    fixed = table.gather(1, (start + 2 * count + row)[:, None])[:, 0]
    return row, lam, fixed.to(torch.int32)


def latency(
    tables: DeviceTables, batch_row_B: torch.Tensor, context_tokens_B: torch.Tensor
) -> torch.Tensor:
    """T(L) for L = 1..16 in us, fp64 [B, 16], at the middle of each context's bucket."""
    table = tables.values_TP.expand(len(context_tokens_B), -1)
    count = tables.contexts
    start = KNOTS + 3 * tables.knots + 3 * tables.batches
    grid = table[:, start : start + count]
    bucket = context_tokens_B.clamp(min=0) // CONTEXT_BUCKET
    centre = (bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2).to(torch.float64)[:, None]
    centre = clip(centre, grid[:, :1], grid[:, -1:])
    right = (grid[:, :-1] < centre).sum(1, keepdim=True)
    left = (right - 1).clamp(min=0)
    at_left = grid.gather(1, left)
    span = grid.gather(1, right) - at_left
    share = (centre - at_left) / torch.where(span > 0.0, span, 1.0)
    lengths = torch.arange(1, BLOCK_SIZE + 1, device=table.device)
    rows = start + count + batch_row_B[:, None] * (count * (BLOCK_SIZE + 1)) + lengths
    left_us = table.gather(1, rows + left * (BLOCK_SIZE + 1))
    right_us = table.gather(1, rows + right * (BLOCK_SIZE + 1))
    return left_us * (1.0 - share) + right_us * share


def shortest_best(score_BL: torch.Tensor, allowed_BL: torch.Tensor) -> torch.Tensor:
    """Index of the first allowed score that is the best but for rounding, int64 [B]."""
    score = torch.where(allowed_BL, score_BL, float("-inf"))
    near_best = allowed_BL & (score >= score.amax(1, keepdim=True) - TIE_TOKENS)
    return near_best.to(torch.uint8).argmax(1)


def fallback_lengths(
    lengths_B: torch.Tensor,
    fixed_B: torch.Tensor,
    caps_B: torch.Tensor,
    broken_B: torch.Tensor,
    tables: DeviceTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths with the fixed one where the choice cannot be made, 0 where inactive; reasons."""
    static = tables.values_TP[:, STATIC].expand(len(caps_B)) != 0.0
    active = caps_B > 0
    fallback = torch.where(static, 2, broken_B.to(torch.int32))
    fallback = torch.where(active, fallback, 0).to(torch.int32)
    fixed = torch.minimum(fixed_B.clamp(min=1), caps_B)
    lengths = torch.where(fallback != 0, fixed, lengths_B)
    return torch.where(active, lengths, 0).to(torch.int32), fallback


def select(
    p1_BD: torch.Tensor,
    p2_BD: torch.Tensor,
    entropy_BD: torch.Tensor,
    context_tokens_B: torch.Tensor,
    caps_B: torch.Tensor,
    batch_size: torch.Tensor,
    tables: DeviceTables,
    *,
    lam_B: torch.Tensor | None = None,
    hazards_BD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Lengths, E, score, survival, price and fallback, as `Selection` lists them."""
    row, table_lam, fixed = batch_columns(tables, batch_size, len(caps_B))
    lam = table_lam if lam_B is None else lam_B.to(torch.float64)
    survival_BL, broken = survival(p1_BD, p2_BD, entropy_BD, context_tokens_B, tables, hazards_BD)
    broken = broken[:, 0] | ~lam.isfinite()
    lam = torch.where(lam.isfinite(), lam, 0.0)
    expected = expected_emitted(survival_BL)
    score = expected - lam[:, None] * latency(tables, row, context_tokens_B)
    position = torch.arange(BLOCK_SIZE, device=score.device)
    allowed = (position < caps_B[:, None]) | (position == 0)
    lengths = shortest_best(score, allowed) + 1
    lengths, fallback = fallback_lengths(lengths, fixed, caps_B, broken, tables)
    return lengths, expected, score, survival_BL, lam, fallback


def distinct_experts(
    experts_BRK: torch.Tensor, rows_B: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Distinct experts among the first k rows, int32 [B, 16]; 0 from row `rows_B` on.

    Ids outside [0, num_experts) are no experts.
    """
    requests = experts_BRK.shape[0]
    experts = experts_BRK[:, :BLOCK_SIZE].to(torch.int64)
    known = (experts >= 0) & (experts < num_experts)
    every_expert = torch.arange(num_experts, device=experts.device)
    seen = torch.zeros(requests, num_experts, dtype=torch.bool, device=experts.device)
    counts = torch.zeros(requests, BLOCK_SIZE, dtype=torch.int32, device=experts.device)
    for k in range(experts.shape[1]):
        for j in range(experts.shape[2]):
            seen |= (experts[:, k, j, None] == every_expert) & known[:, k, j, None]
        counts[:, k] = torch.where(k < rows_B, seen.sum(1), 0)
    return counts


def correct(
    experts_BRK: torch.Tensor,
    lengths_B: torch.Tensor,
    score_BL: torch.Tensor,
    price_B: torch.Tensor,
    fallback_B: torch.Tensor,
    caps_B: torch.Tensor,
    tables: DeviceTables,
    *,
    num_experts: int,
    rule: str = "select",
    lookahead: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Final lengths, int32 [B], and distinct experts of every prefix at hand, int32 [B, 16]."""
    cap = caps_B.clamp(max=min(BLOCK_SIZE, experts_BRK.shape[1]))
    ahead = torch.minimum(lengths_B + lookahead, cap)
    looks = (lengths_B > 1) & (lengths_B < cap) & (fallback_B == 0)
    rows = torch.where(looks, ahead, lengths_B) if rule != "off" else lengths_B
    distinct = distinct_experts(experts_BRK, rows, num_experts)
    if rule == "off":
        return lengths_B.clone(), distinct
    table = tables.values_TP.expand(len(lengths_B), -1)
    mean = table[:, FIRST_MEAN : FIRST_MEAN + BLOCK_SIZE]
    price = table[:, EXPERT_PRICE : EXPERT_PRICE + BLOCK_SIZE]
    surplus = (distinct.to(torch.float64) - mean) * price
    score = score_BL - price_B[:, None] * surplus
    position = torch.arange(BLOCK_SIZE, device=score.device)
    allowed = position < rows[:, None]
    if rule == "paper":
        allowed &= position >= lengths_B[:, None] - 1
    final = (shortest_best(score, allowed) + 1).to(torch.int32)
    keeps = (lengths_B <= 1) | (fallback_B != 0)
    return torch.where(keeps, lengths_B, final), distinct


def mean_row_latency(
    latency_L: torch.Tensor, rows: torch.Tensor, num_active: torch.Tensor
) -> torch.Tensor:
    """T at rows / num_active rows a request in us, linear between whole lengths, flat beyond 16."""
    whole = rows // num_active
    part = (rows - whole * num_active).to(torch.float64) / num_active.to(torch.float64)
    whole = whole.clamp(1, BLOCK_SIZE)
    after = (whole + 1).clamp(max=BLOCK_SIZE)
    return latency_L[whole - 1] * (1.0 - part) + latency_L[after - 1] * part


def select_jointly(
    p1_BD: torch.Tensor,
    p2_BD: torch.Tensor,
    entropy_BD: torch.Tensor,
    context_tokens_B: torch.Tensor,
    caps_B: torch.Tensor,
    batch_size: torch.Tensor,
    tables: DeviceTables,
    *,
    lam_B: torch.Tensor | None = None,
    hazards_BD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Lengths, E, score, survival, price and fallback of one round chosen together."""
    caps = caps_B.clamp(0, BLOCK_SIZE)
    active = caps > 0
    num_active = active.sum().clamp(min=1)
    context = torch.where(active, context_tokens_B.clamp(min=0), 0).to(torch.int64).sum()
    mean_context = (context // num_active).to(torch.int32)[None]
    row, table_lam, fixed = batch_columns(tables, batch_size, 1)
    latency_L = latency(tables, row, mean_context)[0]
    lam = table_lam.expand(len(caps)) if lam_B is None else lam_B.to(torch.float64)
    survival_BL, broken = survival(p1_BD, p2_BD, entropy_BD, context_tokens_B, tables, hazards_BD)
    broken = broken[:, 0] | ~lam.isfinite()
    lam = torch.where(lam.isfinite() & active, lam, 0.0).clamp(0.0, LARGEST_LAM)
    total_lam = torch.floor(lam * LAM_SCALE).to(torch.int64).sum().to(torch.float64) / LAM_SCALE
    least, fallback = fallback_lengths(
        torch.ones_like(caps), fixed.expand(len(caps)), caps, broken, tables
    )
    gain = torch.floor(survival_BL * GAIN_SCALE).to(torch.int64).tolist()
    candidates = sorted(
        (-gain[i][position], position, i)
        for i, cap in enumerate(caps.tolist())
        for position in range(1, cap)
        if fallback[i] == 0
    )
    sums = [0]
    for negative_gain, _, _ in candidates:
        sums.append(sums[-1] - negative_gain)
    extra = torch.arange(len(sums), device=caps.device)
    emitted = torch.tensor(sums, device=caps.device).to(torch.float64) / GAIN_SCALE
    emitted = emitted + active.sum().to(torch.float64)
    least_rows = least.sum()
    objective = emitted - total_lam * mean_row_latency(latency_L, least_rows + extra, num_active)
    chosen = int((objective >= objective.max() - TIE_TOKENS).to(torch.uint8).argmax())
    lengths = least.clone()
    for _, _, i in candidates[:chosen]:
        lengths[i] += 1
    expected = expected_emitted(survival_BL)
    others = (least_rows + chosen - lengths)[:, None]
    rows = others + torch.arange(1, BLOCK_SIZE + 1, device=caps.device)
    score = expected - total_lam * mean_row_latency(latency_L, rows, num_active)
    return lengths, expected, score, survival_BL, total_lam.expand(len(caps)), fallback
