"""Tiles around the shipped ones, timed, and the best of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moe.graphs import capture, medians_us
from moe.workload import Call, Calls, Layer, work_of

from hybridspec.kernels.small_moe.tiles import (
    NARROW_ROWS,
    GroupedTiles,
    Tiles,
    grouped_tiles_for,
    tiles_for,
)

AnyTiles = Tiles | GroupedTiles
# Fields that are chosen together; what one group is best with does not ask for another's choice.
FIELDS = (
    ("item_rows",),
    ("gate_up_n", "gate_up_k", "gate_up_stages", "gate_up_programs", "gate_up_fused"),
    ("down_n", "down_parts", "down_stages"),
)
NARROW_GATE_UP = (
    *((16, 256, 4), (32, 64, 6), (32, 64, 10), (32, 128, 3), (32, 128, 4), (32, 128, 5)),
    *((32, 128, 6), (32, 128, 8), (32, 256, 3), (32, 256, 4)),
    *((64, 64, 5), (64, 128, 3), (64, 128, 4), (64, 128, 6)),
)
GROUPED_GATE_UP = (
    *((32, 64, 6, 3, False), (32, 64, 8, 2, False), (32, 64, 12, 2, False)),
    *((32, 128, 3, 3, False), (32, 128, 4, 2, False), (32, 128, 6, 2, False)),
    *((64, 64, 6, 2, False), (64, 128, 3, 2, False)),
    *((32, 64, 10, 2, True), (32, 64, 6, 3, True), (32, 128, 5, 2, True), (32, 64, 20, 1, True)),
)
GROUPED_DOWN = ((16, 4, 4), (16, 4, 5), (16, 4, 7), (16, 4, 8), (16, 2, 6), (16, 1, 6))


def default_tiles(num_rows: int) -> AnyTiles:
    """Shipped tiles of an H200."""
    return tiles_for(num_rows, 90) if num_rows <= NARROW_ROWS else grouped_tiles_for(90)


def variants(num_rows: int) -> list[AnyTiles]:
    """Tiles around the shipped ones, one thing changed at a time; the shipped ones first."""
    base = default_tiles(num_rows)
    changes: list[dict[str, Any]] = [{}]
    if num_rows > NARROW_ROWS:
        changes += [{"item_rows": 16}]
        changes += [dict(zip(FIELDS[1], values, strict=True)) for values in GROUPED_GATE_UP]
        changes += [dict(zip(FIELDS[2], values, strict=True)) for values in GROUPED_DOWN]
    else:
        changes += [
            dict(zip(FIELDS[1][:3], values, strict=True))
            for values in NARROW_GATE_UP
            if num_rows > 2 or values[0] < 64
        ]
        changes += [{"down_stages": stages} for stages in (3, 4, 5, 6, 7)]
    changes += [{"dependent": False}]
    return list(dict.fromkeys(dataclasses.replace(base, **change) for change in changes))


def sweep(
    call_of: Callable[[AnyTiles], Call],
    layers: list[Layer],
    row_counts: list[int],
    num_calls: int,
    repeats: int,
) -> dict[int, AnyTiles]:
    """Best tiles for each row count up to 16, and one choice for all beyond."""
    print("rows  us/call  tiles of ours", flush=True)
    best: dict[int, AnyTiles] = {}
    grouped: dict[AnyTiles, list[float]] = {}
    for num_rows in row_counts:
        kind = "independent" if num_rows <= NARROW_ROWS else "masked"
        times: dict[AnyTiles, float] = {}
        calls = Calls(num_calls, num_rows, kind)
        for tiles in variants(num_rows):
            try:
                graph = capture(work_of(call_of(tiles), calls, layers))
            except Exception as error:  # more shared memory than there is
                print(f"{num_rows:4d}  {type(error).__name__} {tiles}", flush=True)
                continue
            times[tiles] = medians_us(
                {"it": graph}, num_calls, repeats, calls.refill, calls.refill_x
            )["it"]
            print(f"{num_rows:4d}  {times[tiles]:7.2f}  {short(tiles)}", flush=True)
        if num_rows <= NARROW_ROWS:
            best[num_rows] = _chosen(default_tiles(num_rows), times)
            continue
        for tiles, time in times.items():
            grouped.setdefault(tiles, []).append(time / times[default_tiles(num_rows)])
    if grouped:
        counts = [num_rows for num_rows in row_counts if num_rows > NARROW_ROWS]
        means = {
            tiles: sum(ratios) / len(ratios)
            for tiles, ratios in grouped.items()
            if len(ratios) == len(counts)
        }
        chosen = _chosen(default_tiles(counts[0]), means)
        best |= dict.fromkeys(counts, chosen)
    return best


def _chosen(base: AnyTiles, times: dict[AnyTiles, float]) -> AnyTiles:
    """The best of every group of fields, each found with the others as shipped."""
    names = [field.name for field in dataclasses.fields(base)]
    chosen = base
    for group in FIELDS:
        fields = [name for name in group if name in names]
        rest = [name for name in names if name not in fields]
        same = [t for t in times if all(getattr(t, n) == getattr(base, n) for n in rest)]
        if fields and same:
            winner = min(same, key=times.__getitem__)
            changes = {name: getattr(winner, name) for name in fields}
            chosen = dataclasses.replace(chosen, **changes)
    return chosen


def short(tiles: AnyTiles) -> str:
    grouped = (
        f"items of {tiles.item_rows}, {tiles.gate_up_programs} programs"
        + (" fused, " if tiles.gate_up_fused else ", ")
        if isinstance(tiles, GroupedTiles)
        else ""
    )
    return (
        f"{grouped}gate_up {tiles.gate_up_n}x{tiles.gate_up_k} s{tiles.gate_up_stages}, down "
        f"{tiles.down_n}x{tiles.down_parts} s{tiles.down_stages}"
        + ("" if tiles.dependent else ", no dependent launch")
    )
