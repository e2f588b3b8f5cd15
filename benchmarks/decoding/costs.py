"""Times of rounds on the engine's own graphs, decoding text: by length, draft pass, experts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.engine import GpuEngine, Snapshot
from hybridspec.reference.gpu.round import GpuRound, RoundRules

FORCED_DISTINCT = (16, 48, 96)
_TIMED = 7


def launcher(engine: GpuEngine, round: GpuRound) -> Callable[[], None]:
    """One launch of a round: its masked graph, or (without CUDA) its kernels one by one."""
    return graph_of(engine, round.run)


def graph_of(engine: GpuEngine, work: Callable[[], None]) -> Callable[[], None]:
    """What `work` launches as a graph; requests are forgotten."""
    if engine.target.device.type != "cuda":
        return work
    from hybridspec.reference.gpu.capture import capture

    engine.reset()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = capture(work, pool=torch.cuda.graph_pool_handle())
    engine.reset()
    return graph.replay


@dataclass(frozen=True)
class Costs:
    """Measured times in us.

    Attributes:
        latency_us_L: [17] medians; 0 is a round without a draft pass.
        mean_us_L: [17] means, what rounds cost on average.
        spread_us_2L: 10th and 90th percentiles [2, 17].
        samples_L: rounds behind each.
        draft_us: draft pass and its features. expert_us: of a distinct expert of one layer.
    """

    latency_us_L: np.ndarray
    mean_us_L: np.ndarray
    spread_us_2L: np.ndarray
    samples_L: list[int]
    draft_us: float
    expert_us: float
    expert_points: list[tuple[int, float]]

    def row(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "latency_us": [round(float(v), 1) for v in self.latency_us_L],
            "latency_mean_us": [round(float(v), 1) for v in self.mean_us_L],
            "latency_p10_us": [round(float(v), 1) for v in self.spread_us_2L[0]],
            "latency_p90_us": [round(float(v), 1) for v in self.spread_us_2L[1]],
            "rounds": self.samples_L,
            "draft_us": round(self.draft_us, 1),
            "expert_us": round(self.expert_us, 2),
            "forced": [{"distinct": d, "round_us": round(us, 1)} for d, us in self.expert_points],
        }


def text_rounds(
    engine: GpuEngine,
    decoder: Decoder,
    fixed: Callable[[], None],
    plain: Callable[[], None],
    saved: Sequence[tuple[int, Snapshot]],
    lengths: Sequence[int],
    *,
    tokens: int,
) -> dict[int, list[float]]:
    """Round times in us by length, 0 for plain, decoding from each prefilled prompt.

    Lengths take turns on every prompt; the first round of a text, which waits for the host, is left
    out.
    """
    found: dict[int, list[float]] = {length: [] for length in lengths}
    for turn, (first, snapshot) in enumerate(saved):
        order = list(lengths)[turn % len(lengths) :] + list(lengths)[: turn % len(lengths)]
        for length in order:
            engine.restore(snapshot)
            engine.buffers.fixed_B.fill_(max(length, 1))
            text = decoder.decode(
                plain if length == 0 else fixed,
                [first],
                # About as many rounds of each: short lengths emit less a round.
                max_new_tokens=1 + max(8, tokens * (3 if length > 4 else 2) // 3),
                rows=1 if length == 0 else BLOCK_ROWS,
            )[0]
            found[length] += [line.us for line in text.lines[1:]]
    return found


def replays_us(replay: Callable[[], None], before: Callable[[], None], repeats: int) -> float:
    """Median time of one replay between events; the host is ahead of the device."""
    if not torch.cuda.is_available():
        return 1.0
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        torch.cuda._sleep(400_000)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def draft_us(engine: GpuEngine, saved: tuple[int, Snapshot]) -> float:
    """The draft pass and its features."""
    assert engine.drafter is not None
    drafter, buffers = engine.drafter, engine.buffers

    def work() -> None:
        buffers.read_logits(drafter.draft(), buffers.signals)

    replay = graph_of(engine, work)
    engine.restore(saved[1])
    return replays_us(replay, lambda: None, _TIMED)


def expert_us(
    engine: GpuEngine, prompt: Sequence[int], experts: int
) -> tuple[float, list[tuple[int, float]]]:
    """Slope of a round of 16 rows in the distinct experts of each layer, routes forced."""
    from hybridspec.reference.gpu.measured import EngineRound

    placed = EngineRound(engine, [list(prompt)], rules=RoundRules("fixed"))

    def work() -> None:
        placed.forced.prefix()
        placed.forced.rest(BLOCK_ROWS)

    # It starts at the end of the context, where no row has room.
    placed.place(engine.target.max_context // 2)
    placed.force_routes(min(FORCED_DISTINCT[0], experts), length=BLOCK_ROWS)
    replay = graph_of(engine, work)
    points = []
    for distinct in FORCED_DISTINCT:
        if distinct > experts:
            continue
        placed.force_routes(distinct, length=BLOCK_ROWS)

        def before() -> None:
            placed.restore()
            placed.force_length(BLOCK_ROWS)

        points.append((distinct, replays_us(replay, before, _TIMED)))
    engine.reset()
    x = np.array([d for d, _ in points], dtype=np.float64)
    y = np.array([us for _, us in points])
    if len(points) < 2:
        return 0.0, points
    # Every layer activates so many, so the line's slope is of an expert in each of them.
    return float(np.polyfit(x, y, 1)[0]) / engine.target.config.num_layers, points


def summarise(
    found: dict[int, list[float]], draft: float, expert: float, points: list[tuple[int, float]]
) -> Costs:
    """Medians and spread; lengths that were not run are interpolated (`samples_L` says 0)."""
    measured = sorted(length for length, times in found.items() if length > 0 and times)
    latency, mean, spread = np.zeros(17), np.zeros(17), np.zeros((2, 17))
    for values, pick in (
        (latency, lambda t: float(np.median(t))),
        (mean, lambda t: float(np.mean(t))),
        (spread[0], lambda t: float(np.quantile(t, 0.1))),
        (spread[1], lambda t: float(np.quantile(t, 0.9))),
    ):
        values[1:] = np.interp(
            np.arange(1, 17), measured, [pick(found[length]) for length in measured]
        )
        values[0] = pick(found[0])
    return Costs(
        latency,
        mean,
        spread,
        [len(found.get(length, [])) for length in range(17)],
        draft,
        expert,
        points,
    )
