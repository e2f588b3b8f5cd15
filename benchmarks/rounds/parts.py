"""Launches of one kind out of a round, to be captured and timed on their own.

Every part works on the buffers that a whole round has just filled, with the same live rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridspec.reference.gpu import flash
from hybridspec.reference.gpu.heads import place_heads, rotary_halves
from hybridspec.reference.gpu.measured import EngineRound
from hybridspec.reference.gpu.projections import project
from hybridspec.reference.gpu.round import GpuRound, RoundRules
from hybridspec.reference.gpu.weights import AttentionWeights


class _DraftsAtHand:
    """In place of a drafter: the logits of its last pass."""

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self._logits_RV = logits_RV

    def draft(self) -> torch.Tensor:
        return self._logits_RV


def part_launches(
    placed: EngineRound,
    rules: RoundRules,
    *,
    rows: int,
    length: int,
    query_rows: int | None = None,
) -> dict[str, Callable[[], None]]:
    """One callable a part.

    Args:
        placed: the engine; its table of forced routes gives the experts.
        rules: of the round that the control launches belong to.
        rows: of the geometry. length: live rows, on the device as well.
        query_rows: of the tiles of attention; None: as the round has them.
    """
    engine = placed.engine
    target, drafter, config = engine.target, engine.drafter, engine.target.config
    weights, count = target.weights, engine.batch * rows
    assert drafter is not None
    device, dtype = target.device, weights.dtype
    hidden = target.hidden_RH[:count]
    lengths_B = torch.full_like(target.starts_B, length)
    capacity = target.keys_XBCGD.shape[2]
    rotary = rotary_halves(capacity, config.rotary_dim, config.rope_theta, device)

    def buffer(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 1.0)

    mixer_in = {w.front_FH.shape[0]: buffer(count, w.front_FH.shape[0]) for w in weights.mixers}
    inner = {w.out_HX.shape[1]: buffer(count, w.out_HX.shape[1]) for w in weights.mixers}
    routers = buffer(count, weights.blocks[0].front_FH.shape[0])
    shared = buffer(count, config.shared_width)
    out = buffer(count, config.hidden_size)
    gdn_layers = len(config.gdn_layers)
    fronts = buffer(gdn_layers, count, mixer_in_width(placed))
    # A GDN front as wide as the real one, of values that a norm would leave.
    ids = placed.forced_XRK.clone()
    row_of_request = torch.arange(placed.forced_XRK.shape[1], device=device)
    ids[:, row_of_request % placed.drafted.max_rows >= length] = -1
    if rows != placed.drafted.max_rows:
        ids = ids[:, :count].contiguous()
    route_weights = torch.full(ids.shape[1:], 1.0 / ids.shape[2], device=device)

    def dense() -> None:
        for mixer, block in zip(weights.mixers, weights.blocks, strict=True):
            project(hidden, mixer.front_FH, mixer_in[mixer.front_FH.shape[0]])
            project(inner[mixer.out_HX.shape[1]], mixer.out_HX, out)
            project(hidden, block.front_FH, routers)
            project(shared, block.shared_down_HS, out)

    def moe() -> None:
        for layer, block in enumerate(weights.blocks):
            target.moe(block, hidden, ids[layer], route_weights, out, rows=rows)

    def gdn() -> None:
        for index in range(gdn_layers):
            target.gdn.verify(index, rows, fronts[index], lengths_B)

    q = torch.empty(count, config.num_heads, config.head_dim, dtype=dtype, device=device)
    attended = torch.empty(count, config.num_heads * config.head_dim, dtype=dtype, device=device)

    def attention() -> None:
        index = 0
        for mixer in weights.mixers:
            if not isinstance(mixer, AttentionWeights):
                continue
            front = mixer_in[mixer.front_FH.shape[0]]
            keys, values = target.keys_XBCGD[index], target.values_XBCGD[index]
            place_heads(
                front, mixer.norm_2D, rotary, target.starts_B, config.rms_norm_eps,
                rows=rows, q_RHD=q, keys_BCGD=keys, values_BCGD=values,
            )  # fmt: skip
            flash.attend(
                q, keys, values, target.starts_B, target.pieces, attended,
                rows=rows, causal=True, lengths_B=lengths_B,
                query_rows=query_rows, gate_RX=front[:, front.shape[1] - attended.shape[1] :],
            )  # fmt: skip
            index += 1

    control_round = engine.round(rules)
    control_round.drafter = _DraftsAtHand(drafter.logits_RV)  # type: ignore[assignment]

    return {
        "dense": dense,
        "moe": moe,
        "gdn": gdn,
        "attention": attention,
        "lm_head": lambda: (target.head(rows), None)[1],
        "draft": lambda: (drafter.draft(), None)[1],
        "draft_context": lambda: drafter.inject(rows),
        "control": lambda: control(control_round, rows),
        "control_select": lambda: select_length(control_round),
        "control_accept": lambda: control_round._accept(rows),
        "control_commit": lambda: commit(control_round),
    }


def mixer_in_width(placed: EngineRound) -> int:
    """Columns of a GDN layer's projection."""
    weights = placed.engine.target.weights
    gdn = [w for w in weights.mixers if not isinstance(w, AttentionWeights)]
    return gdn[0].front_FH.shape[0]


def control(round: GpuRound, rows: int) -> None:
    """Caps, features, select, correct, accept and commit: all that a round is more than two passes.

    The round's own steps, with a drafter that has drafted already.
    """
    select_length(round)
    round._accept(rows)
    commit(round)


def select_length(round: GpuRound) -> None:
    """Caps, features of the drafts, select and correct."""
    round._begin()
    round._draft()
    if round.rules.correction != "off":
        round._correct()


def commit(round: GpuRound) -> None:
    """Recurrent states and conv windows of all GDN layers."""
    round.target.gdn.commit(round.buffers.report.commit_rows_B)
