"""CUDA graphs of rounds, replayed in turn."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

# Keeps the card busy while the host issues a replay, so that no sample holds host time.
HEAD_START_CYCLES = 600_000


@dataclass(frozen=True)
class Latency:
    """Of one round, from samples of whole replays."""

    median_us: float
    p10_us: float
    p90_us: float


class Graph:
    """A captured sequence of launches; `work` has run before, so nothing compiles in it.

    Attributes:
        rounds: rounds in one replay.
        nodes: launches in one replay, or None where the driver does not tell.
    """

    def __init__(self, work: Callable[[], None], *, rounds: int = 1) -> None:
        self.rounds = rounds
        # Replays write to what the work holds: kept, or it would be freed and handed out again.
        self.work = work
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        # Without torch.cuda.graph, which may collect garbage and empty the cache at every capture.
        with torch.cuda.stream(torch.cuda.Stream()):
            self.graph.capture_begin()
            work()
            self.graph.capture_end()
        self.graph.instantiate()
        self.nodes = _num_nodes(self.graph)
        self.graph.replay()

    def replay(self) -> None:
        self.graph.replay()


def _num_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_size_t(0)
        handle = ctypes.c_void_p(graph.raw_cuda_graph())
        failed = driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    except (OSError, AttributeError, RuntimeError):
        return None
    return None if failed else int(count.value)


def measure(graphs: Mapping[str, Graph], repeats: int) -> dict[str, list[float]]:
    """Microseconds a round of each graph, `repeats` samples, all graphs in turn in each repeat."""
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for name in names:
        graphs[name].replay()
    for repeat in range(repeats):
        turn = repeat % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            graphs[name].replay()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: [1e3 * begin.elapsed_time(end) / graphs[name].rounds for begin, end in pairs]
        for name, pairs in events.items()
    }


def summarise(samples_us: Sequence[float]) -> Latency:
    """Median, 10th and 90th percentile; needs two samples."""
    tenths = statistics.quantiles(samples_us, n=10, method="inclusive")
    return Latency(statistics.median(samples_us), tenths[0], tenths[-1])


@triton.jit
def _empty_kernel():
    return


def empty_launches(launches: int, repeats: int, rounds: int = 6) -> float:
    """Microseconds that a graph spends on so many launches one after another that do nothing."""
    kernel: Any = _empty_kernel

    def work() -> None:
        for _ in range(launches * rounds):
            kernel[(1,)](num_warps=1)

    work()
    return statistics.median(measure({"empty": Graph(work, rounds=rounds)}, repeats)["empty"])


def copy_bandwidth(device: torch.device, repeats: int = 9, num_bytes: int = 2 << 30) -> float:
    """Bytes a second of a large copy, bytes read and bytes written."""
    source = torch.empty(num_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    samples = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(1e-3 * begin.elapsed_time(end))
    return 2 * num_bytes / statistics.median(samples[2:])
