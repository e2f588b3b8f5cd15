"""Route masks, correction and small experts inside SGLang's own expert block."""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sglang_target.engine import ROWS, expert_block
from sglang_target.stages import Report

Sizes = dict[str, Any]
LENGTHS = [[4], [16], [1], [9, 2], [16, 1], [3, 7, 16, 5], [2, 0, 11, 0]]


class Blocks:
    """Blocks of a target with our half installed, beside the lengths that it reads."""

    def __init__(
        self,
        device: torch.device,
        *,
        count: int = 2,
        correction: str = "off",
        small: bool = False,
        requests: int = 4,
        sizes: Sizes | None = None,
    ) -> None:
        from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
        from hybridspec.sglang_plugin.target.experts import RoutedExperts
        from hybridspec.sglang_plugin.target.launches import LaunchOptions
        from hybridspec.sglang_plugin.target.scope import VerifyScope

        self.device = device
        self.blocks = [
            expert_block(device, layer_id=layer, seed=layer, **(sizes or {}))
            for layer in range(count)
        ]
        self.state = RoundState(requests, device)
        self.scope = VerifyScope()
        corrects = correction != "off"
        options = TargetOptions(
            correction=correction,
            lookahead=1 if corrects else 0,
            tables=price_tables(device) if corrects else None,
        )
        self.half = RoutedExperts(
            self.blocks, self.scope, self.state, options, LaunchOptions(small_moe=small)
        )
        self.half.install()

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Lengths of the round, as the drafter's graph leaves them."""
        rows = torch.zeros(self.state.max_requests, dtype=torch.int32)
        rows[: len(lengths)] = torch.tensor(list(lengths), dtype=torch.int32)
        self.state.lengths_B.copy_(rows)
        self.state.selection.lengths_B.copy_(rows)

    def hidden(self, requests: int, seed: int) -> torch.Tensor:
        """Random rows [requests x 16, hidden]."""
        generator = torch.Generator(self.device).manual_seed(seed)
        width = self.blocks[0].gate.weight.shape[1]
        values = torch.randn(requests * ROWS, width, generator=generator, device=self.device)
        return values.to(torch.bfloat16)


def price_tables(device: torch.device) -> Any:
    """Tables that price an expert, all else flat."""
    from hybridspec.kernels.select.tables import pack_tables

    rows = np.arange(17, dtype=np.float64)
    return pack_tables(
        weights_F=np.array([1.0, 1.0, 0.0, 0.0, 0.0]),
        position_bias_D=np.zeros(15),
        knots_x=np.linspace(0, 1, 9),
        knots_y=np.linspace(0, 1, 9),
        batch_sizes=[1, 4],
        context_tokens=[1, 4096],
        latency_us=np.broadcast_to(1000 + 100 * rows, (2, 2, 17)),
        tokens_per_us=np.array([1.5e-3, 1.5e-3]),
        best_fixed_length=[8, 8],
        first_mean_L=8 * np.arange(1, 17, dtype=np.float64) ** 0.8,
        slope_L=np.full(16, 30.0),
        expert_slope_us=1.0,
        device=device,
    )


def live_rows(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Which of the packed rows count."""
    column = torch.tensor(list(lengths), device=device)[:, None]
    return (torch.arange(ROWS, device=device)[None] < column).flatten()


def mask(report: Report, device: torch.device, sizes: Sizes | None = None) -> None:
    """A masked pass leaves every row that counts as it was, bit for bit, eager and captured."""
    blocks = Blocks(device, count=1, sizes=sizes)
    block = blocks.blocks[0]
    for number, lengths in enumerate(LENGTHS):
        x = blocks.hidden(len(lengths), number)
        live = live_rows(lengths, device)
        full = block(x.clone())
        blocks.set_lengths(lengths)
        with blocks.scope.entered():
            masked = block(x.clone())
        same = torch.equal(full[live], masked[live])
        report.require(f"{lengths}: rows that count have the same bits", same)
        report.require(f"{lengths}: finite", bool(masked.isfinite().all()))
        ids, weights = routes(blocks, block, x)
        anchors = ids.view(len(lengths), ROWS, -1)[:, :1].expand(-1, ROWS, -1).flatten(0, 1)
        active = torch.tensor([length > 0 for length in lengths], device=device)
        dead = ~live & active.repeat_interleave(ROWS)
        report.require(f"{lengths}: masked weights", not bool(weights[~live].any()))
        report.require(f"{lengths}: masked ids", torch.equal(ids[dead], anchors[dead]))
        # Rows that do not count may hold anything but infinity and NaN.
        y = x.clone()
        y[~live] = 100.0
        with blocks.scope.entered():
            other = block(y)
        report.require(
            f"{lengths}: independent of masked rows", torch.equal(other[live], full[live])
        )


def routes(blocks: Blocks, block: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the experts of a masked pass are given."""
    logits, _ = block.gate(x)
    found = block.topk(x, logits)
    blocks.half._mask(found.topk_ids, found.topk_weights)
    return found.topk_ids, found.topk_weights


def in_graph(report: Report, device: torch.device, sizes: Sizes | None = None) -> None:
    """One graph a batch size on two streams, lengths changed between replays."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    blocks = Blocks(device, count=2, sizes=sizes)
    for requests in (1, 2, 4):
        x = blocks.hidden(requests, 50)
        blocks.set_lengths([ROWS] * requests)

        def run(x: torch.Tensor = x) -> torch.Tensor:
            with blocks.scope.entered():
                y = x
                for block in blocks.blocks:
                    y = y + block(y.clone())
            return y

        with model_capture_mode():
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
        for lengths in LENGTHS:
            if len(lengths) != requests:
                continue
            x.copy_(blocks.hidden(requests, sum(lengths)))
            blocks.set_lengths([ROWS] * requests)
            graph.replay()
            full = out.clone()
            blocks.set_lengths(lengths)
            graph.replay()
            live = live_rows(lengths, device)
            same = torch.equal(out[live], full[live])
            report.require(f"graph {lengths}: rows that count", same)
            report.require(f"graph {lengths}: finite", bool(out.isfinite().all()))


def correction(report: Report, device: torch.device, sizes: Sizes | None = None) -> None:
    """Lengths behind the first router are those of the oracle on the same routes."""
    from hybridspec.kernels.select import naive
    from hybridspec.kernels.select.select import select

    for rule in ("select", "paper"):
        blocks = Blocks(device, count=2, correction=rule, sizes=sizes)
        state, tables = blocks.state, blocks.half.options.tables
        assert tables is not None
        requests = state.max_requests
        generator = torch.Generator(device).manual_seed(3)
        changed = 0
        for trial in range(6):
            p1 = torch.rand(requests, 15, generator=generator, device=device) * 0.4 + 0.6
            context = torch.full((requests,), 512, dtype=torch.int32, device=device)
            state.caps_B.copy_(torch.tensor([16, 16, 7, 0], dtype=torch.int32))
            selection = state.selection_of(requests)
            select(
                p1,
                (1 - p1) / 2,
                1 - p1,
                context,
                state.caps_B,
                state.batch_size,
                tables,
                out=selection,
            )
            state.lengths_B.copy_(selection.lengths_B)
            x = blocks.hidden(requests, 70 + trial)
            block = blocks.blocks[0]
            logits, _ = block.gate(x)
            ids = block.topk(x, logits).topk_ids.view(requests, ROWS, -1)
            expected = naive.correct(
                ids,
                selection.lengths_B,
                selection.score_BL,
                selection.price_B,
                selection.fallback_B,
                state.caps_B,
                tables,
                num_experts=block.num_experts,
                rule=rule,
                lookahead=1,
            )
            with blocks.scope.entered():
                block(x)
            found = state.lengths_B.cpu()
            changed += int((found != selection.lengths_B.cpu()).sum())
            what = f"{rule} trial {trial}: {found.tolist()}"
            report.require(what, torch.equal(found, expected[0].cpu().to(torch.int32)))
        report.note(**{f"{rule}_changed": changed})


def small(report: Report, device: torch.device, sizes: Sizes | None = None) -> None:
    """Our experts in two launches against SGLang's runner, one request."""
    ours = Blocks(device, count=1, small=True, sizes=sizes)
    theirs = Blocks(device, count=1, sizes=sizes)
    for lengths in ([16], [4], [1]):
        x = ours.hidden(1, 5)
        outputs = []
        for blocks in (ours, theirs):
            blocks.set_lengths(lengths)
            with blocks.scope.entered():
                outputs.append(blocks.blocks[0](x.clone()))
        live = live_rows(lengths, device)
        error = float((outputs[0] - outputs[1])[live].double().norm() / outputs[1][live].norm())
        report.require(f"small_moe {lengths}", error < 1e-2, f"{error:.2e}")
        report.note(**{f"error_L{lengths[0]}": error})


def timing(report: Report, device: torch.device, time_us: Callable[[Any], float]) -> None:
    """One request, all layers of experts in a graph: lengths, with and without small_moe."""
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    for name, small_moe in (("engine", False), ("small", True)):
        blocks = Blocks(device, count=8, small=small_moe)
        x = blocks.hidden(1, 9)

        def run(blocks: Blocks = blocks, x: torch.Tensor = x) -> None:
            with blocks.scope.entered():
                for block in blocks.blocks:
                    block(x)

        with model_capture_mode():
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        found = {}
        for length in (1, 4, 8, 16):
            blocks.set_lengths([length])
            found[f"{name}_layer_us_L{length}"] = time_us(graph.replay) / len(blocks.blocks)
        report.note(**found)
