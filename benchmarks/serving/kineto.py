"""GPU time of decoding rounds from a trace of torch's profiler: where each microsecond goes.

Kernels of a CUDA graph carry the correlation of the call that launched it, so a trace says which
kernels a graph launch ran. The graph with the most kernels is the target's; a round goes from the
first kernel of one such launch cycle to that of the next. What runs between graphs is launched by
the host, and what is left of a round's time the GPU idles.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GRAPH_CALLS = ("cudaGraphLaunch", "cuGraphLaunch")
_MOST_EAGER = 4
_SMALL = 20
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
DRAFTER, TARGET, EAGER = "drafter graph", "target graph", "between graphs"


class NoRounds(ValueError):
    """The trace holds no whole round."""


@dataclass(frozen=True)
class Work:
    """A kernel, copy or fill; times in microseconds."""

    name: str
    start_us: float
    end_us: float
    correlation: int


@dataclass
class Launch:
    """One launch of a graph."""

    works: list[Work]
    kind: str = TARGET

    @property
    def start_us(self) -> float:
        """Of its first kernel."""
        return self.works[0].start_us

    @property
    def end_us(self) -> float:
        """Of its last kernel."""
        return max(work.end_us for work in self.works)


@dataclass
class Row:
    """One kernel name in one group, a round's share of it."""

    group: str
    name: str
    count: float
    us: float


@dataclass
class Profile:
    """Means over whole rounds, microseconds.

    Attributes:
        busy_us: time in which something of a group runs, by group.
        span_us: from a graph's first kernel to its last, by graph.
        idle_us: nothing runs, by where: inside a graph, or between graphs.
        outside_us_R: of each round, what lies outside the spans of its graphs.
    """

    rounds: int
    round_us: float
    busy_us: dict[str, float]
    span_us: dict[str, float]
    idle_us: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    outside_us_R: list[float] = field(default_factory=list)

    @property
    def outside_least_us(self) -> float:
        """Outside graphs in the round with least of it: the profiler slows the host."""
        return min(self.outside_us_R)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a trace, plain or gzipped JSON."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return json.loads(data)["traceEvents"]


def short_name(name: str) -> str:
    """A kernel's name without namespaces, arguments and most template parameters."""
    name = re.sub(r"^void\s+|\(anonymous namespace\)::|<unnamed>::", "", name)
    head = name.split("(", 1)[0]
    base, _, template = head.partition("<")
    base = base.rsplit("::", 1)[-1]
    inner = re.findall(r"(\w*(?:[Ff]unctor|gemm|tile|sm\d+|Op)\w*)", template)[:2]
    return f"{base}<{', '.join(inner)}>"[:90] if inner else base[:90]


def analyse(events: Iterable[dict[str, Any]], *, skip: int = 2) -> Profile:
    """Means over the rounds of a trace, without the first `skip` and the last one.

    Raises:
        NoRounds: too few launches of graphs.
    """
    calls: set[int] = set()
    works: list[Work] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        correlation = (event.get("args") or {}).get("correlation")
        if event.get("name") in GRAPH_CALLS and correlation is not None:
            calls.add(int(correlation))
        elif event.get("cat") in _GPU:
            start = float(event["ts"])
            end = start + float(event.get("dur", 0.0))
            works.append(
                Work(
                    str(event["name"]), start, end, -1 if correlation is None else int(correlation)
                )
            )
    # Launches by the driver's other entry points are told by how much one call runs.
    many = Counter(work.correlation for work in works if work.correlation >= 0)
    calls |= {correlation for correlation, count in many.items() if count > _MOST_EAGER}
    works.sort(key=lambda work: work.start_us)
    launches, eager = _launches(works, calls)
    starts = _round_starts(launches)
    if len(starts) < skip + 3:
        raise NoRounds(
            f"{len(launches)} launches of graphs and {len(works)} kernels are no {skip + 2} whole "
            "rounds: profile more steps, while a request decodes"
        )
    return _means(starts[skip:-1], launches, eager)


def _launches(works: Sequence[Work], calls: set[int]) -> tuple[list[Launch], list[Work]]:
    by: dict[int, list[Work]] = defaultdict(list)
    eager = []
    for work in works:
        if work.correlation in calls:
            by[work.correlation].append(work)
        else:
            eager.append(work)
    launches = sorted((Launch(found) for found in by.values()), key=lambda one: one.start_us)
    most = max((len(one.works) for one in launches), default=0)
    # A graph of a handful is neither pass: states are committed in one, on a stream beside them.
    eager += [work for one in launches if len(one.works) * _SMALL < most for work in one.works]
    eager.sort(key=lambda work: work.start_us)
    launches = [one for one in launches if len(one.works) * _SMALL >= most]
    for one in launches:
        # The drafter has a fraction of the target's layers.
        if len(one.works) * 2 < most:
            one.kind = DRAFTER
    return launches, eager


def _round_starts(launches: Sequence[Launch]) -> list[float]:
    """Of the first graph of each round: the drafter's where there is one, else the target's."""
    kinds = {one.kind for one in launches}
    first = DRAFTER if DRAFTER in kinds else TARGET
    return [one.start_us for one in launches if one.kind == first]


def _means(starts: Sequence[float], launches: Sequence[Launch], eager: Sequence[Work]) -> Profile:
    edges = np.asarray(starts)
    rounds = len(edges) - 1
    busy: dict[str, list[list[tuple[float, float]]]] = {
        kind: [[] for _ in range(rounds)] for kind in (DRAFTER, TARGET, EAGER)
    }
    spans: dict[str, list[list[tuple[float, float]]]] = {
        kind: [[] for _ in range(rounds)] for kind in (DRAFTER, TARGET)
    }
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def place(at_us: float) -> int:
        return int(np.searchsorted(edges, at_us, side="right")) - 1

    def take(kind: str, index: int, work: Work) -> None:
        busy[kind][index].append((work.start_us, work.end_us))
        row = sums[kind, short_name(work.name)]
        row[0] += 1
        row[1] += work.end_us - work.start_us

    for one in launches:
        index = place(one.start_us)
        if 0 <= index < rounds:
            spans[one.kind][index].append((one.start_us, one.end_us))
            for work in one.works:
                take(one.kind, index, work)
    for work in eager:
        index = place(work.start_us)
        if 0 <= index < rounds:
            take(EAGER, index, work)

    idle: dict[str, float] = defaultdict(float)
    outside = []
    for index in range(rounds):
        everything = [part for kind in busy.values() for part in kind[index]]
        round_us = edges[index + 1] - edges[index]
        total = round_us - covered(everything, edges[index], edges[index + 1])
        inside = 0.0
        for kind, found in spans.items():
            for low, high in found[index]:
                gap = (high - low) - covered(everything, low, high)
                idle[f"in the {kind}"] += gap
                inside += gap
        idle[EAGER] += total - inside
        graphs = sum(high - low for found in spans.values() for low, high in found[index])
        outside.append(float(round_us - graphs))
    return Profile(
        rounds=rounds,
        round_us=float(edges[-1] - edges[0]) / rounds,
        busy_us={
            kind: sum(covered(found) for found in parts) / rounds for kind, parts in busy.items()
        },
        span_us={
            kind: sum(high - low for found in parts for low, high in found) / rounds
            for kind, parts in spans.items()
        },
        idle_us={where: value / rounds for where, value in idle.items()},
        rows=sorted(
            (Row(kind, name, n / rounds, us / rounds) for (kind, name), (n, us) in sums.items()),
            key=lambda row: -row.us,
        ),
        outside_us_R=outside,
    )


def covered(
    parts: Iterable[tuple[float, float]], low: float = -np.inf, high: float = np.inf
) -> float:
    """Length of the union of intervals inside [low, high]."""
    total, reached = 0.0, low
    for start, end in sorted(parts):
        start, end = max(start, reached), min(end, high)
        if end > start:
            total += end - start
            reached = end
    return total


def table(profile: Profile, *, most: int = 14) -> str:
    """The profile as text: groups first, then the kernels of each."""
    lines = [
        f"{profile.rounds} rounds of {profile.round_us:.0f} us, "
        f"outside graphs {np.mean(profile.outside_us_R):.0f}, least {profile.outside_least_us:.0f}"
        if profile.outside_us_R
        else f"{profile.rounds} rounds of {profile.round_us:.0f} us"
    ]
    for kind in (DRAFTER, TARGET, EAGER):
        if not profile.busy_us[kind]:
            continue
        span = f", first to last kernel {profile.span_us[kind]:.0f}" if kind != EAGER else ""
        lines.append(f"  {kind}: busy {profile.busy_us[kind]:.0f} us{span}")
    for where, value in profile.idle_us.items():
        if value > 0.05:
            lines.append(f"  idle {where}: {value:.0f} us")
    for kind in (DRAFTER, TARGET, EAGER):
        rows = [row for row in profile.rows if row.group == kind]
        if not rows:
            continue
        lines.append(f"{kind}, us a round | launches a round | kernel")
        lines += [f"  {row.us:9.1f} {row.count:7.1f}  {row.name}" for row in rows[:most]]
        rest = rows[most:]
        if rest:
            us, count = sum(row.us for row in rest), sum(row.count for row in rest)
            lines.append(f"  {us:9.1f} {count:7.1f}  {len(rest)} others")
    return "\n".join(lines)
