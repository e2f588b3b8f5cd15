"""Weights of several layers, and routes with a given overlap between rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 256, 8, 2048, 512
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
# 8 layers hold 12.9 GB: by the time a layer comes again, at least 350 MB went through the L2.
NUM_LAYERS = 8
# A row takes over each expert of the row before with this chance. 0.45 gives about 0.65 of the
# distinct experts of independent rows, which is what text does.
KEEP = {"independent": 0.0, "text-like": 0.45, "masked": 0.0, "masked-text-like": 0.45}
MASKED_LIVE_ROWS = 4
# Rows of a request; requests of a batch share no text.
BLOCK_ROWS = 16


@dataclass(frozen=True)
class Layer:
    """bf16 weights: gate_up [experts, 2 * width, hidden], down [experts, hidden, width]."""

    gate_up: torch.Tensor
    down: torch.Tensor


def make_layers(count: int = NUM_LAYERS) -> list[Layer]:
    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(
            std=shape[-1] ** -0.5
        )

    return [
        Layer(random(NUM_EXPERTS, 2 * WIDTH, HIDDEN), random(NUM_EXPERTS, HIDDEN, WIDTH))
        for _ in range(count)
    ]


class Calls:
    """Inputs and outputs of consecutive MoE calls, one layer each in turn; refilled in place.

    Attributes:
        x: hidden states bf16 [calls, rows, hidden]. SGLang overwrites them, as in its models.
        ids: int32 [calls, rows, top_k].
        weights: fp32 [calls, rows, top_k].
        out: bf16 [calls, rows, hidden].
    """

    def __init__(self, num_calls: int, num_rows: int, kind: str) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(num_calls, num_rows, *shape, dtype=dtype, device="cuda")

        self.kind = kind
        self.num_rows = num_rows
        self.x = empty(HIDDEN, dtype=torch.bfloat16)
        self.out = empty(HIDDEN, dtype=torch.bfloat16)
        self.ids = empty(TOP_K, dtype=torch.int32)
        self.weights = empty(TOP_K, dtype=torch.float32)
        self.refill()

    def refill(self) -> None:
        """Fresh hidden states and routes; the output is poisoned."""
        ids, weights = random_routes(len(self.x), self.num_rows, KEEP[self.kind])
        if self.kind.startswith("masked"):
            # Rows past a device length, as the round masks them: the experts of their request's
            # first row with weight 0.
            for first in range(0, self.num_rows, BLOCK_ROWS):
                past = slice(first + MASKED_LIVE_ROWS, first + BLOCK_ROWS)
                ids[:, past] = ids[:, first : first + 1]
                weights[:, past] = 0
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.refill_x()
        self.out.fill_(float("nan"))

    def refill_x(self) -> None:
        self.x.normal_()

    def mean_distinct(self) -> float:
        present = torch.zeros(len(self.ids), NUM_EXPERTS, device="cuda")
        present.scatter_(1, self.ids.flatten(1).long(), 1.0)
        return float(present.sum(1).mean())


def random_routes(num_calls: int, num_rows: int, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 and renormalised weights fp32 [calls, rows, top_k]; uniform where `keep` is 0."""
    scores = torch.rand(num_calls, num_rows, NUM_EXPERTS, device="cuda")
    kept = torch.rand(num_calls, num_rows, TOP_K, device="cuda") < keep
    rows = [scores[:, 0].topk(TOP_K).indices]
    for row in range(1, num_rows):
        bonus = torch.zeros(num_calls, NUM_EXPERTS, device="cuda")
        if row % BLOCK_ROWS:
            bonus.scatter_(1, rows[-1], kept[:, row].float())
        rows.append((scores[:, row] + bonus).topk(TOP_K).indices)
    weights = torch.rand(num_calls, num_rows, TOP_K, device="cuda") + 0.1
    return torch.stack(rows, 1).int(), weights / weights.sum(-1, keepdim=True)


Call = Callable[[Layer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def work_of(call: Call, calls: Calls, layers: list[Layer]) -> Callable[[], None]:
    """All calls in order: `call(layer, x, ids, weights, out)`."""

    def work() -> None:
        for index in range(len(calls.x)):
            call(
                layers[index % len(layers)],
                calls.x[index],
                calls.ids[index],
                calls.weights[index],
                calls.out[index],
            )

    return work
