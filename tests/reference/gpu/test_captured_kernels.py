"""Kernels between the projections of a captured round, against plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.costmodels.policies import best_ratio
from hybridspec.costmodels.rounds import expected_emitted
from hybridspec.reference.gpu import cursors
from hybridspec.reference.gpu.flash import Pieces, attend
from hybridspec.reference.gpu.heads import place_heads, rotary_halves
from hybridspec.reference.gpu.routing import route
from hybridspec.reference.layers import rotary_tables, rotate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("rows", "causal", "starts"),
    [
        pytest.param(3, True, (0, 70), id="empty-context-and-two-blocks"),
        pytest.param(3, False, (250, 61), id="all-pieces-full-block-crossed"),
        pytest.param(1, True, (130, 319), id="one-row-pieces-of-two-blocks"),
    ],
)
def test_attention_over_split_contexts(rows: int, causal: bool, starts: tuple[int, ...]) -> None:
    batch, heads, kv_heads, dim, capacity = 2, 4, 2, 32, 336
    q = random(batch * rows, heads, dim)
    keys, values = random(2, batch, capacity, kv_heads, dim, seed=1).unbind(0)
    for b, start in enumerate(starts):
        # What lies behind the new rows is never looked at.
        keys[b, start + rows :], values[b, start + rows :] = NAN, NAN
    gate = random(batch * rows, 2 * heads * dim, seed=2)[:, heads * dim :]
    out = torch.full((batch * rows, heads * dim), NAN, device=DEVICE)
    pieces = Pieces.allocate(batch * rows, heads, dim, 4, DEVICE)
    for part in vars(pieces).values():
        part.fill_(NAN)
    attend(q, keys, values, ints(*starts), pieces, out, rows=rows, causal=causal, gate_RX=gate)
    for b, start in enumerate(starts):
        for row in range(rows):
            seen = start + row + 1 if causal else start + rows
            for head in range(heads):
                i = b * rows + row
                group = head // (heads // kv_heads)
                weights = (keys[b, :seen, group] @ q[i, head]).softmax(0)
                part = slice(head * dim, (head + 1) * dim)
                wanted = weights @ values[b, :seen, group] * gate[i, part].sigmoid()
                torch.testing.assert_close(out[i, part], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("query_rows", [16, 32])
def test_attention_leaves_out_rows_past_the_length(query_rows: int) -> None:
    """Live rows have the bits they have at full length, dead ones are zeros, nothing of theirs is
    read: two heads a group, so that 16 query rows are 8 rows."""
    rows, lengths, starts = 16, (3, 0, 9), (70, 5, 131)
    heads, kv_heads, dim = 4, 2, 32
    q = random(3 * rows, heads, dim)
    keys, values = random(2, 3, 160, kv_heads, dim, seed=1).unbind(0)
    gate = random(3 * rows, heads * dim, seed=2)

    def run(limits: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
        out = torch.full((3 * rows, heads * dim), NAN, device=DEVICE)
        pieces = Pieces.allocate(3 * rows, heads, dim, 4, DEVICE)
        for part in vars(pieces).values():
            part.fill_(NAN)
        attend(
            q, keys, values, ints(*starts), pieces, out, rows=rows, causal=True,
            lengths_B=limits, query_rows=query_rows, gate_RX=gate,
        )  # fmt: skip
        return out.view(3, rows, -1)

    whole = run(None, q)
    assert torch.equal(run(ints(16, 16, 16), q), whole)
    poisoned = q.clone().view(3, rows, heads, dim)
    for b, length in enumerate(lengths):
        poisoned[b, length:] = NAN
    found = run(ints(*lengths), poisoned.flatten(0, 1))
    for b, length in enumerate(lengths):
        assert torch.equal(found[b, :length], whole[b, :length])
        assert not found[b, length:].any()


def test_heads_are_normed_rotated_and_placed() -> None:
    rows, heads, kv_heads, dim, rotary_dim, eps = 2, 2, 1, 32, 8, 1e-6
    starts = (5, 9)
    front = random(4, (heads + 2 * kv_heads) * dim + 7)
    weight = random(2, dim, seed=3)
    q = torch.full((4, heads, dim), NAN, device=DEVICE)
    keys, values = torch.full((2, 2, 16, kv_heads, dim), NAN, device=DEVICE).unbind(0)
    place_heads(
        front,
        weight,
        rotary_halves(16, rotary_dim, 1e4, DEVICE),
        ints(*starts),
        eps,
        rows=rows,
        q_RHD=q,
        keys_BCGD=keys,
        values_BCGD=values,
    )
    cos, sin, permutation = rotary_tables(
        16, head_dim=dim, rotary_dim=rotary_dim, theta=1e4, dtype=torch.float32, device=DEVICE
    )
    for i in range(4):
        b, t = divmod(i, rows)
        at = starts[b] + t
        x = front[i, : (heads + kv_heads) * dim].view(heads + kv_heads, dim)
        norms = torch.cat([weight[:1].expand(heads, dim), weight[1:].expand(kv_heads, dim)])
        y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * norms
        wanted = rotate(y, cos[at], sin[at], permutation)
        torch.testing.assert_close(q[i], wanted[:heads])
        torch.testing.assert_close(keys[b, at], wanted[heads:])
        v = front[i, (heads + kv_heads) * dim : (heads + 2 * kv_heads) * dim]
        torch.testing.assert_close(values[b, at, 0], v)
    written = keys.isfinite().all(-1).all(-1)
    assert written.sum(1).tolist() == [rows, rows]


@pytest.mark.parametrize("normalise", [True, False])
def test_routes_are_the_top_experts_and_nothing_past_the_length(normalise: bool) -> None:
    rows, experts, top_k, shared = 3, 12, 4, 8
    front = random(2 * rows, experts + 2 * shared + 4)
    front[1, 5] = front[1, 2] = 4.0
    ids = torch.full((2 * rows, top_k), -7, dtype=torch.int32, device=DEVICE)
    weights = torch.full((2 * rows, top_k), NAN, device=DEVICE)
    inner = torch.full((2 * rows, shared), NAN, device=DEVICE)
    route(front, ints(2, 0), ids, weights, inner, rows=rows, experts=experts, normalise=normalise)
    logits = front[:, :experts]
    gate, up = front[:, experts : experts + 2 * shared].chunk(2, -1)
    torch.testing.assert_close(inner, torch.nn.functional.silu(gate) * up)
    for i in range(2):
        values, chosen = logits[i].topk(top_k)
        assert sorted(ids[i].tolist()) == sorted(chosen.tolist())
        wanted = values.softmax(-1) if normalise else logits[i].softmax(-1)[chosen]
        torch.testing.assert_close(weights[i].sort().values, wanted.sort().values)
    # Of equals the lower expert comes first.
    assert ids[1, :2].tolist() == [2, 5]
    assert ids[2:].eq(-1).all()
    assert weights[2:].eq(0).all()


def test_quotient_is_evicts_rule() -> None:
    rng = np.random.default_rng(0)
    p1 = rng.uniform(0.2, 1.0, size=(12, 15)).astype(np.float32)
    times = 3000.0 + 350.0 * np.arange(17)
    caps = np.full(12, 16)
    caps[3:6] = (1, 4, 0)
    lengths = ints(*[-1] * 12)
    cursors.best_quotient(
        torch.from_numpy(p1).to(DEVICE),
        torch.from_numpy(times[1:]).to(DEVICE),
        ints(*caps.tolist()),
        lengths,
    )
    latency_NL = np.tile(times, (12, 1)).astype(np.float64)
    wanted = best_ratio(expected_emitted(p1.astype(np.float64)), latency_NL)
    free = caps == 16
    assert lengths.cpu().numpy()[free].tolist() == wanted[free].tolist()
    assert (lengths.cpu().numpy() <= caps).all()
    assert lengths[5] == 0
    assert len(set(wanted.tolist())) > 3


def test_cursors_keep_within_limits_and_context() -> None:
    caps, lengths, fallback = (ints(-1, -1, -1, -1) for _ in range(3))
    cursors.begin(
        ints(16, 4, 0, 16),
        ints(10, 10, 10, 90),
        caps,
        max_context=96,
        fixed_B=ints(7, 7, 7, 7),
        lengths_B=lengths,
        fallback_B=fallback,
    )
    assert fallback.tolist() == [0, 0, 0, 0]
    assert caps.tolist() == [16, 4, 0, 5]
    assert lengths.tolist() == [7, 4, 0, 5]
    starts, anchors, commit = ints(3, 8), ints(50, 60), ints(-1, -1)
    tokens = ints(*range(100, 132)).view(2, 16)
    cursors.advance(tokens, ints(5, 0), starts, anchors, commit)
    assert starts.tolist() == [8, 8]
    assert anchors.tolist() == [104, 60]
    assert commit.tolist() == [5, 0]
