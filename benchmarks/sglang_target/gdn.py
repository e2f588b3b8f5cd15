"""GDN verification and commit inside SGLang's pools, against SGLang's own and its decoding."""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang_target.engine import ROWS, Shape, Target, rows_of
from sglang_target.stages import Report

# Both sides round outputs to bf16 once; states differ by the order of fp32 sums.
OUTPUT_GATE = 1e-2
STATE_GATE = 3e-5
PROMPT = 37
# Of rounds: requests (slot each), lengths and accepted rows.
SLOTS = [3, 1, 2]
ROUNDS = [
    ([16, 16, 16], [16, 1, 7]),
    ([5, 1, 16], [3, 1, 16]),
    ([2, 12, 9], [1, 12, 4]),
    ([4, 4, 4], [4, 2, 1]),
    ([16, 3, 8], [2, 3, 8]),
]


class Pair:
    """A target with SGLang's snapshots and one with ours: same parameters, same states."""

    def __init__(self, shape: Shape, device: torch.device, *, dependent: bool | None = None):
        from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
        from hybridspec.sglang_plugin.target.install import install_target
        from hybridspec.sglang_plugin.target.launches import LaunchOptions
        from hybridspec.sglang_plugin.target.memory import install_memory_patch

        install_memory_patch()
        self.shape, self.device = shape, device
        self.stock = Target(shape, device, compact=False)
        self.ours = Target(shape, device, compact=True)
        self.state = RoundState(shape.requests, device)
        self.half = install_target(
            self.ours.runner,
            self.state,
            TargetOptions(),
            launches=LaunchOptions(dependent_launch=dependent),
        )
        for target in (self.stock, self.ours):
            target.fill(1)

    def set_lengths(self, lengths: list[int]) -> None:
        """Lengths of the round; batch rows past them are inactive."""
        rows = torch.zeros(self.state.max_requests, dtype=torch.int32)
        rows[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        self.state.lengths_B.copy_(rows)
        self.state.router_rows_B.copy_(rows)

    def commit(self, accepted: list[int]) -> None:
        """Both targets keep these rows, each in its own way."""
        rows = torch.tensor(accepted, dtype=torch.int32, device=self.device)
        slots = self.ours.gdn.forward_metadata.mamba_cache_indices
        self.half.commit(rows, slots, len(accepted))
        self.stock.hybrid.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=rows.to(torch.int64) - 1,
            mamba_track_indices=None,
            mamba_steps_to_track=None,
            model=None,
        )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite where NaN is in either."""
    difference = (found.double() - expected.double()).norm()
    ratio = float(difference / expected.double().norm().clamp_min(1e-30))
    return ratio if math.isfinite(ratio) else math.inf


def compare_outputs(
    report: Report, what: str, ours: list[Any], stock: list[Any], lengths: list[int]
) -> None:
    """Rows that count agree; rows that do not are zeros."""
    worst, clean = 0.0, True
    for our_layer, stock_layer in zip(ours, stock, strict=True):
        width = our_layer.shape[-2:]
        our_rows = our_layer.reshape(-1, ROWS, *width)
        stock_rows = stock_layer.reshape(-1, ROWS, *width)
        for request, length in enumerate(lengths):
            found, expected = our_rows[request, :length], stock_rows[request, :length]
            worst = max(worst, relative(found, expected))
            clean &= not bool(our_rows[request, length:].any())
        clean &= not bool(our_rows[len(lengths) :].any())
    report.require(f"{what}: outputs", worst < OUTPUT_GATE, f"{worst:.2e}")
    report.require(f"{what}: rows past the length are zeros", clean)
    entry = report.found[report.stage]
    entry["worst_output"] = max(worst, entry.get("worst_output", 0.0))


def compare_states(report: Report, what: str, pair: Pair) -> None:
    """States agree, windows have the same bits, slots of nobody are as they were."""
    worst = max(
        relative(pair.ours.state_XSHVK[:, slot], pair.stock.state_XSHVK[:, slot]) for slot in SLOTS
    )
    report.require(f"{what}: states", worst < STATE_GATE, f"{worst:.2e}")
    same = torch.equal(pair.ours.windows_XSCW, pair.stock.windows_XSCW)
    report.require(f"{what}: windows of all slots have SGLang's bits", same)
    entry = report.found[report.stage]
    entry["worst_state"] = max(worst, entry.get("worst_state", 0.0))


def poisoned(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """A copy with NaN in every row past its request's length."""
    copy = rows.clone().view(rows.shape[0], -1, ROWS, rows.shape[-1])
    for request in range(copy.shape[1]):
        length = lengths[request] if request < len(lengths) else 0
        copy[:, request, length:] = float("nan")
    return copy.view_as(rows)


def prefill(pair: Pair, report: Report) -> None:
    """Prompts go through SGLang's own path in both; the patched one must not differ in a bit."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    count = len(SLOTS)
    rows = rows_of(pair.shape, count * 3, pair.device, 7)
    rows = tuple(x[:, : count * PROMPT].contiguous() for x in rows)
    outputs = []
    for target in (pair.ours, pair.stock):
        batch = target.batch(SLOTS)
        lengths = torch.full((count,), PROMPT, dtype=torch.int32, device=pair.device)
        batch.forward_mode = ForwardMode.EXTEND
        batch.extend_seq_lens = lengths
        batch.extend_prefix_lens = torch.zeros_like(lengths)
        batch.extend_start_loc = torch.arange(count, dtype=torch.int32, device=pair.device) * PROMPT
        batch.extend_seq_lens_cpu = [PROMPT] * count
        batch.mamba_track_mask = None
        batch._original_batch_size = None
        target.hybrid.init_forward_metadata(batch)
        outputs.append(target.run(batch, *rows))
    same = all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
    report.require("prefill: outputs have SGLang's bits", same)
    same = torch.equal(pair.ours.state_XSHVK, pair.stock.state_XSHVK)
    report.require("prefill: states have SGLang's bits", same)


def rounds(report: Report, shape: Shape, device: torch.device, *, dependent: bool | None) -> None:
    """Ragged rounds without a graph; rows past the length hold NaN on our side."""
    pair = Pair(shape, device, dependent=dependent)
    prefill(pair, report)
    for number, (lengths, accepted) in enumerate(ROUNDS):
        rows = rows_of(shape, shape.requests, device, 100 + number)
        outputs = []
        pair.set_lengths(lengths)
        for target in (pair.ours, pair.stock):
            batch = target.batch(SLOTS, shape.requests)
            target.prepare(batch)
            given = rows
            if target is pair.ours:
                given = tuple(poisoned(x, lengths) for x in rows)
            outputs.append(target.run(batch, *given))
        compare_outputs(report, f"round {number}", outputs[0], outputs[1], lengths)
        pair.commit(accepted)
        compare_states(report, f"round {number}", pair)
    entry = report.found[report.stage]
    report.note(worst_output=entry["worst_output"], worst_state=entry["worst_state"])
    nothing(report, pair)


def nothing(report: Report, pair: Pair) -> None:
    """Commits of 0 and -1 rows, and of requests without a slot, change no bit."""
    before = pair.ours.state_XSHVK.clone(), pair.ours.windows_XSCW.clone()
    slots = torch.tensor([*SLOTS, -1], dtype=torch.int32, device=pair.device)
    rows = torch.tensor([0, -1, 0, 5], dtype=torch.int32, device=pair.device)
    pair.half.commit(rows, slots, 4)
    same = torch.equal(before[0], pair.ours.state_XSHVK)
    report.require("commit of nothing: states", same)
    report.require("commit of nothing: windows", torch.equal(before[1], pair.ours.windows_XSCW))


def decode(report: Report, shape: Shape, device: torch.device) -> None:
    """Rounds against SGLang's plain decoding of the rows that were kept."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    pair = Pair(shape, device)
    for number, (lengths, accepted) in enumerate(ROUNDS):
        mixed, a, b = rows_of(shape, len(SLOTS), device, 200 + number)
        # SGLang's decoding rounds beta = sigmoid(b) to bf16, its verification and ours do not: of
        # these inputs it is 0, 1/2 or 1 in either.
        b = torch.where(b > 0.4, 20.0, torch.where(b < -0.4, -120.0, 0.0)).to(b.dtype)
        rows = (mixed, a, b)
        pair.set_lengths(lengths)
        batch = pair.ours.batch(SLOTS)
        pair.ours.prepare(batch)
        outputs = pair.ours.run(batch, *rows)
        kept = torch.tensor(accepted, dtype=torch.int32, device=device)
        pair.half.commit(kept, pair.ours.gdn.forward_metadata.mamba_cache_indices, len(SLOTS))
        worst = 0.0
        for request, count in enumerate(accepted):
            one = pair.stock.batch([SLOTS[request]])
            one.forward_mode = ForwardMode.DECODE
            pair.stock.prepare(one)
            for row in range(count):
                place = request * ROWS + row
                plain = pair.stock.run(one, *(x[:, place : place + 1].contiguous() for x in rows))
                for found, expected in zip(outputs, plain, strict=True):
                    worst = max(
                        worst, relative(found[0, place], expected.reshape(found[0, 0].shape))
                    )
        report.require(f"round {number}: outputs of decoding", worst < OUTPUT_GATE, f"{worst:.2e}")
        compare_states(report, f"round {number}", pair)
    report.note(worst_state=report.found[report.stage]["worst_state"])


def captured(pair: Pair, target: Target, requests: int, rows: Any) -> tuple[Any, list[Any]]:
    """A graph of all layers as SGLang captures one: metadata, two warm-ups, capture."""
    batch = target.batch(list(range(1, requests + 1)))
    target.prepare(batch, capture=True)
    for _ in range(2):
        target.run(batch, *rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = target.run(batch, *rows)
    return graph, outputs


def graphs(
    report: Report, shape: Shape, device: torch.device, batch_sizes: tuple[int, ...]
) -> None:
    """One graph a batch size; lengths, slots and rows change between replays."""
    pair = Pair(shape, device)
    for requests in batch_sizes:
        rows = rows_of(shape, requests, device, 300)
        before = pair.ours.state_XSHVK.clone(), pair.ours.windows_XSCW.clone()
        graph, outputs = captured(pair, pair.ours, requests, rows)
        same = torch.equal(before[0], pair.ours.state_XSHVK)
        same &= torch.equal(before[1], pair.ours.windows_XSCW)
        report.require(f"batch {requests}: warm-ups leave states and windows", same)
        for number, (lengths, accepted) in enumerate(ROUNDS):
            active = min(len(SLOTS), requests)
            fresh = rows_of(shape, requests, device, 400 + number)
            for static, new in zip(rows, fresh, strict=True):
                static.copy_(new)
            pair.set_lengths(lengths[:active])
            for target in (pair.ours, pair.stock):
                target.prepare(target.batch(SLOTS[:active], requests))
            graph.replay()
            stock = pair.stock.run(pair.stock.batch(SLOTS[:active], requests), *rows)
            what = f"batch {requests} round {number}"
            compare_outputs(report, what, outputs, stock, lengths[:active])
            pair.commit(accepted[:active])
            compare_states(report, what, pair)
    report.note(worst_state=report.found[report.stage]["worst_state"])


def memory(report: Report, shape: Shape, device: torch.device) -> None:
    """Device memory of both kinds of pool, as allocated."""
    from hybridspec.sglang_plugin.target.memory import install_memory_patch

    install_memory_patch()
    used = {}
    for compact in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        target = Target(shape, device, compact=compact)
        used[compact] = torch.cuda.memory_allocated() - before
        if compact:
            found = target.pool.mamba_pool.hybridspec_memory
            report.note(
                factor_mib_per_request=found.factor_bytes_per_request / 2**20,
                row_mib_per_request=found.row_bytes_per_request / 2**20,
                snapshot_mib_per_request=found.snapshot_bytes_per_request / 2**20,
            )
        del target
    report.note(stock_gib=used[False] / 2**30, compact_gib=used[True] / 2**30, slots=shape.requests)


def timing(
    report: Report, shape: Shape, device: torch.device, time_us: Callable[[Any], float]
) -> None:
    """Verification of all layers in a graph and the commit behind it, both sides in one run."""
    for requests in (1, 4):
        for dependent in (True, False):
            pair = Pair(shape, device, dependent=dependent)
            rows = rows_of(shape, requests, device, 500)
            ours, _ = captured(pair, pair.ours, requests, rows)
            found: dict[str, float] = {}
            for length in (1, 4, 8, 16):
                pair.set_lengths([length] * requests)
                pair.ours.prepare(pair.ours.batch(list(range(1, requests + 1))))
                found[f"b{requests}_verify_us_L{length}"] = time_us(ours.replay)
            kept = torch.full((requests,), 3, dtype=torch.int32, device=device)
            slots = pair.ours.gdn.forward_metadata.mamba_cache_indices
            found[f"b{requests}_commit_us"] = time_us(
                lambda kept=kept, slots=slots, n=requests, half=pair.half: half.commit(
                    kept, slots, n
                )
            )
            name = "dependent" if dependent else "plain"
            report.note(**{f"{name}_{key}": value for key, value in found.items()})
        pair.stock.prepare(pair.stock.batch(list(range(1, requests + 1))))
        stock, _ = captured(pair, pair.stock, requests, rows)
        last = SimpleNamespace(rows=kept.to(torch.int64) - 1)
        commit_us = time_us(
            lambda last=last, pair=pair: pair.stock.hybrid.update_mamba_state_after_mtp_verify(
                last.rows, None, None, None
            )
        )
        report.note(
            **{
                f"stock_b{requests}_verify_us": time_us(stock.replay),
                f"stock_b{requests}_commit_us": commit_us,
            }
        )
