"""Routed experts + shared expert of one layer, split at the router.

The split is what the first-router stop needs: `route` runs no routed expert, `combine` runs only
experts that the rows it is given picked, and reads each distinct expert's weights once, so its time
grows with distinct experts and not with rows x top-k.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.layers import accumulate_dtype, swiglu

# Above this many rows almost every expert is active, and a product over all of them for all rows
# wastes more arithmetic than sorting rows by expert costs (measured at 64 and 256 experts).
UNION_MAX_ROWS = 32


class Routed(NamedTuple):
    """Rows at a router, before any routed expert ran.

    Attributes:
        hidden_RH: normed input of the block.
        experts_RK: int64, chosen experts.
        weights_RK: their weights, in the precision of the router's softmax.
        shared_R: fused gate and up projection of the shared expert, and its sigmoid gate's logit.
    """

    hidden_RH: torch.Tensor
    experts_RK: torch.Tensor
    weights_RK: torch.Tensor
    shared_R: torch.Tensor

    def rows(self, index: torch.Tensor | slice) -> Routed:
        """Keep some rows."""
        return Routed(*(part[index] for part in self))


class MoeBlock:
    """Weights of one sparse block, packed for few launches a row."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, config: TargetConfig, dtype: torch.dtype
    ) -> None:
        hidden, width = config.hidden_size, config.expert_width
        self.config = config
        self.wide = accumulate_dtype(dtype)
        self.num_experts = config.num_experts
        # For measuring: experts int64 [R, top-k] to take instead of the router's, rows in order.
        self.forced_experts_RK: torch.Tensor | None = None
        self.last_distinct_experts = 0

        def read(name: str, *shape: int) -> torch.Tensor:
            return checkpoint.tensor(prefix + name, shape, dtype)

        shared = config.shared_width
        self.front = torch.cat(
            [
                read("gate.weight", config.num_experts, hidden),
                read("shared_expert.gate_proj.weight", shared, hidden),
                read("shared_expert.up_proj.weight", shared, hidden),
                read("shared_expert_gate.weight", 1, hidden),
            ]
        )
        self.shared_down = read("shared_expert.down_proj.weight", hidden, shared)
        if prefix + "experts.gate_up_proj" in checkpoint:
            gate_up = read("experts.gate_up_proj", config.num_experts, 2 * width, hidden)
            down = read("experts.down_proj", config.num_experts, hidden, width)
        else:
            gate_up = torch.stack(
                [
                    torch.cat(
                        [
                            read(f"experts.{e}.gate_proj.weight", width, hidden),
                            read(f"experts.{e}.up_proj.weight", width, hidden),
                        ]
                    )
                    for e in range(config.num_experts)
                ]
            )
            down = torch.stack(
                [
                    read(f"experts.{e}.down_proj.weight", hidden, width)
                    for e in range(config.num_experts)
                ]
            )
        self.gate_up_EWH = gate_up.contiguous()
        self.down_EIH = down.transpose(1, 2).contiguous()

    def route(self, hidden_RH: torch.Tensor) -> Routed:
        """Router and the shared expert's first projection; no routed expert."""
        config = self.config
        front = F.linear(hidden_RH, self.front)
        logits, shared = front.split((config.num_experts, front.shape[1] - config.num_experts), 1)
        if logits.dtype != self.wide:
            logits = logits.to(self.wide)
        if config.normalise_top_k:
            # The softmax over the chosen logits is the renormalised softmax over all of them.
            values, experts = logits.topk(config.experts_per_token, -1)
            weights = values.softmax(-1)
        else:
            weights, experts = logits.softmax(-1).topk(config.experts_per_token, -1)
        if self.forced_experts_RK is not None:
            experts = self.forced_experts_RK[: experts.shape[0]]
        return Routed(hidden_RH, experts, weights, shared)

    def combine(self, routed: Routed) -> torch.Tensor:
        """Run the routed experts of the given rows and add the shared expert. Returns [R, H]."""
        width = self.config.shared_width
        rows = routed.hidden_RH.shape[0]
        experts = self._union(routed) if rows <= UNION_MAX_ROWS else self._sorted(routed)
        gate, up, switch = routed.shared_R.split((width, width, 1), 1)
        shared = F.linear(F.silu(gate).mul_(up), self.shared_down)
        return experts.addcmul_(switch.sigmoid(), shared)

    def _union(self, routed: Routed) -> torch.Tensor:
        """One product over the union of the rows' experts; a row weights the others with zero."""
        hidden, width = routed.hidden_RH, self.config.expert_width
        rows, size = hidden.shape
        if rows == 1:
            used, weights = routed.experts_RK.view(-1), routed.weights_RK
        else:
            table = routed.weights_RK.new_zeros(rows, self.num_experts)
            table.scatter_(1, routed.experts_RK, routed.weights_RK)
            used = table.amax(0).nonzero().view(-1)
            weights = table.index_select(1, used)
        if weights.dtype != hidden.dtype:
            weights = weights.to(hidden.dtype)
        count = self.last_distinct_experts = used.shape[0]
        gate_up = F.linear(
            hidden, self.gate_up_EWH.index_select(0, used).view(count * 2 * width, size)
        )
        inner = swiglu(gate_up.view(rows, count, 2 * width), width).mul_(weights.unsqueeze(-1))
        down = self.down_EIH.index_select(0, used).view(count * width, size)
        return torch.mm(inner.view(rows, count * width), down)

    def _sorted(self, routed: Routed) -> torch.Tensor:
        """Rows sorted by expert, one grouped product; for prefill."""
        hidden, width = routed.hidden_RH, self.config.expert_width
        flat = routed.experts_RK.reshape(-1)
        order = flat.argsort(stable=True)
        source = order // routed.experts_RK.shape[1]
        ends = torch.bincount(flat, minlength=self.num_experts).cumsum(0).to(torch.int32)
        gate_up = _grouped(hidden[source], self.gate_up_EWH.transpose(1, 2), ends)
        inner = swiglu(gate_up, width)
        inner.mul_(routed.weights_RK.reshape(-1, 1)[order].to(hidden.dtype))
        out = _grouped(inner, self.down_EIH, ends)
        return torch.zeros_like(hidden).index_add_(0, source, out)


def _grouped(
    rows_NX: torch.Tensor, weights_EXY: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """Product of each run of rows with its expert's matrix."""
    aligned = all(n * rows_NX.element_size() % 16 == 0 for n in weights_EXY.shape[1:])
    if aligned and rows_NX.dtype != torch.float64:
        return F.grouped_mm(rows_NX, weights_EXY, offs=ends_E)
    # grouped_mm knows no fp64 and wants rows of whole 16 bytes.
    ends = [0, *ends_E.tolist()]
    return torch.cat([rows_NX[a:b] @ weights_EXY[e] for e, (a, b) in enumerate(pairwise(ends))])
