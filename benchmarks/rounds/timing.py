"""Rounds timed in turn between events, the device kept busy while the host enqueues them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

HEAD_START_CYCLES = 600_000
WARM_SAMPLES = 2


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        replay: one round or a run of them.
        before: enqueued in front of the clock: restores state, sets lengths, poisons outputs.
        rounds: in one replay.
    """

    replay: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    rounds: int = 1


@dataclass(frozen=True)
class Latency:
    """Microseconds a round, over samples."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int

    def row(self) -> dict[str, float | int]:
        """Rounded for a result file."""
        return {
            "median_us": round(self.median_us, 2),
            "p10_us": round(self.p10_us, 2),
            "p90_us": round(self.p90_us, 2),
            "samples": self.samples,
        }


class Deadline:
    """Seconds that a run may take; what does not fit is left out and said so."""

    def __init__(self, limit_s: float) -> None:
        self._began = time.perf_counter()
        self.limit_s = limit_s
        self.left_out: list[str] = []

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def allows(self, what: str, *, needs_s: float) -> bool:
        """Whether a stage of about `needs_s` seconds still fits; notes it where not."""
        fits = self.elapsed_s + needs_s <= self.limit_s
        if not fits:
            self.left_out.append(what)
            self.say(f"left out for lack of time: {what}")
        return fits

    def say(self, text: str) -> None:
        """A line with the elapsed time."""
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)


def interleaved(cases: Mapping[str, Case], repeats: int) -> dict[str, Latency]:
    """Latency of each case; in each repeat all of them run in turn, from another start on."""
    names = list(cases)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for case in cases.values():
        for _ in range(WARM_SAMPLES):
            case.before()
            case.replay()
    for repeat in range(repeats):
        turn = repeat * 5 % len(names)
        for name in names[turn:] + names[:turn]:
            case = cases[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            case.before()
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            case.replay()
            end.record()
            events[name].append((begin, end))
        # A bound on what is enqueued.
        torch.cuda.synchronize()
    return {
        name: latency([1e3 * b.elapsed_time(e) / cases[name].rounds for b, e in pairs])
        for name, pairs in events.items()
    }


def latency(samples_us: Sequence[float]) -> Latency:
    """Median and 10 to 90 % band."""
    ordered = sorted(samples_us)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return Latency(statistics.median(ordered), low, high, len(ordered))
