"""What GDN costs inside a captured forward pass of 40 layers, where other traffic flushes the L2.

Between the GDN kernels runs what a pass of the full model moves. Each layer has the input
projection, an elementwise kernel in the place of the convolution, GDN (in three of four layers),
another elementwise kernel in the place of the gated norm, the output projection, and the weights of
the distinct experts that the verified rows activate, read once from a pool of several GiB. The time
of the same graph without GDN is subtracted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from gdn.method import Round
from gdn.timing import Graph, measure
from gdn.workload import Workload

LAYERS = 40
ATTENTION_EVERY = 4
HIDDEN = 2048
IN_COLUMNS = 8192 + 4096 + 64
OUT_ROWS = 4096
EXPERTS, EXPERTS_PER_TOKEN = 256, 8
EXPERT_VALUES = 3 * HIDDEN * 512
POOL_EXPERTS = 1024
WITHOUT = "without GDN"


@triton.jit
def _stream_kernel(
    p_pool, p_ids, p_out, VALUES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    """Read one chunk of one expert; the sum keeps the loads alive."""
    i_chunk = tl.program_id(0)
    i_expert = tl.program_id(1)
    expert = tl.load(p_ids + i_expert).to(tl.int64)
    p_chunk = p_pool + expert * VALUES + i_chunk * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        b_sum += tl.load(p_chunk + step * BLOCK).to(tl.float32)
    tl.store(p_out + i_expert * tl.num_programs(0) + i_chunk, tl.sum(b_sum))


def distinct_experts(rows: int) -> int:
    """Expected distinct experts of one layer when rows choose independently and evenly."""
    return round(EXPERTS * (1 - (1 - EXPERTS_PER_TOKEN / EXPERTS) ** rows))


class Traffic:
    """Weights and buffers of everything but GDN; about 9 GiB."""

    def __init__(self, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device)
            return tensor.normal_(std=0.02, generator=generator)

        self.generator = generator
        self.in_weight = normal(LAYERS, HIDDEN, IN_COLUMNS)
        self.out_weight = normal(LAYERS, OUT_ROWS, HIDDEN)
        self.pool = normal(POOL_EXPERTS, EXPERT_VALUES)
        self.hidden = normal(64, HIDDEN)
        self.projected = normal(64, IN_COLUMNS)
        self.normed = normal(64, OUT_ROWS)
        self.idle = normal(64, OUT_ROWS)
        self.sums = torch.empty(EXPERTS * 4096, device=device)

    def draw_experts(self, distinct: int) -> torch.Tensor:
        """Distinct experts of each layer, `[LAYERS, distinct]` int32."""
        device = self.pool.device
        rows = [
            torch.randperm(POOL_EXPERTS, generator=self.generator, device=device)[:distinct]
            for _ in range(LAYERS)
        ]
        return torch.stack(rows).to(torch.int32)

    def forward(self, workload: Workload, ids: torch.Tensor, round_: Round | None) -> None:
        """One pass over slot set 0, with the commit at its end."""
        rows = workload.case.batch * workload.case.tokens
        hidden, projected, normed = (x[:rows] for x in (self.hidden, self.projected, self.normed))
        gdn_layer, block, steps = 0, 2048, 16
        stream: Any = _stream_kernel
        for layer in range(LAYERS):
            torch.matmul(hidden, self.in_weight[layer], out=projected)
            mixed = workload.mixed_NXBTC[0, gdn_layer % workload.case.shape.layers]
            torch.mul(mixed, 1.0, out=mixed)
            found = self.idle[:rows]
            if (layer + 1) % ATTENTION_EVERY:
                if round_ is not None:
                    round_.verify_layer(0, gdn_layer)
                    found = round_.output_BTHV(0, gdn_layer).reshape(rows, OUT_ROWS)
                gdn_layer += 1
            torch.mul(found, 1.0, out=normed)
            torch.matmul(normed, self.out_weight[layer], out=hidden)
            stream[(EXPERT_VALUES // (block * steps), ids.shape[1])](
                self.pool, ids[layer], self.sums, EXPERT_VALUES, block, steps
            )
        if round_ is not None:
            round_.commit(0)


def in_model_cost(
    traffic: Traffic, workload: Workload, rounds: Mapping[str, Round], repeats: int
) -> list[dict[str, float | int | str]]:
    """Rows of the pass with each method; GDN's cost is the median difference within a repeat."""
    distinct = distinct_experts(workload.case.batch * workload.case.tokens)
    ids = traffic.draw_experts(distinct)
    ways: dict[str, Round | None] = {WITHOUT: None, **rounds}
    graphs: dict[str, Graph] = {}
    for name, round_ in ways.items():
        traffic.forward(workload, ids, round_)
        graphs[name] = Graph(lambda r=round_: traffic.forward(workload, ids, r))
    samples = measure(graphs, repeats)
    rows: list[dict[str, float | int | str]] = []
    for name in ways:
        difference = [a - b for a, b in zip(samples[name], samples[WITHOUT], strict=True)]
        tenths = statistics.quantiles(difference, n=10, method="inclusive")
        rows.append(
            {
                "kind": "in_model",
                "method": name,
                "batch": workload.case.batch,
                "tokens": workload.case.tokens,
                "distinct_experts": distinct,
                "pass_us": statistics.median(samples[name]),
                "gdn_us": statistics.median(difference),
                "gdn_p10_us": tenths[0],
                "gdn_p90_us": tenths[-1],
            }
        )
    return rows
