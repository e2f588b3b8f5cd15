"""Summary keys and tables of the GDN benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
DEFAULT, BLOCK_4 = "D16", "D23"


def find(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The row with those values, or None."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row
    return None


def ratio(rows: Sequence[Row], base: str, ours: str, batch: int, tokens: int) -> float | None:
    """Time of `base` over time of `ours` in fp32 state; None where either is missing or wrong."""
    times = []
    for method in (base, ours):
        row = find(
            rows, kind="round", method=method, batch=batch, tokens=tokens, state_dtype="float32"
        )
        if row is None or row["problem"] or row["round_us"] is None:
            return None
        times.append(row["round_us"])
    return times[0] / times[1]


def summarise(rows: Sequence[Row], ours: str) -> dict[str, Any]:
    """The keys that people look for; `ours` names the method that stands for this project."""
    summary: dict[str, Any] = {"ours": ours}
    for batch, tokens in ((1, 4), (1, 8), (1, 16), (4, 4), (4, 8), (4, 16)):
        summary[f"b{batch}_t{tokens}"] = ratio(rows, DEFAULT, ours, batch, tokens)
    for batch, tokens in ((1, 4), (1, 8), (1, 16), (4, 4), (4, 8), (4, 16)):
        summary[f"b{batch}_t{tokens}_over_bv4"] = ratio(rows, BLOCK_4, ours, batch, tokens)
    for batch, tokens in ((1, 4), (1, 8), (1, 16), (4, 16)):
        row = find(
            rows, kind="round", method=ours, batch=batch, tokens=tokens, state_dtype="float32"
        )
        usable = row is not None and not row["problem"] and row["round_us"] is not None
        summary[f"b{batch}_t{tokens}_over_floor"] = (
            row["round_us"] / row["floor_us"] if row is not None and usable else None
        )
    checked = [row for row in rows if row["kind"] in ("round", "check")]
    errors = [
        row["state_error"]
        for row in checked
        if row["ours"] and row["state_error"] is not None and row["state_dtype"] == "float32"
    ]
    summary["worst_state_error"] = max(errors, default=None)
    for key, mine in (("failed_checks", True), ("failed_checks_of_baselines", False)):
        summary[key] = sum(bool(row["problem"]) for row in checked if row["ours"] is mine)
    summary["launches_per_round"] = {
        row["method"]: row["launches_per_round"]
        for row in rows
        if row["kind"] == "round" and row["launches_per_round"] is not None
    }
    for tokens in (4, 8, 16):
        inside = {
            name: find(rows, kind="in_model", method=name, batch=1, tokens=tokens)
            for name in (DEFAULT, BLOCK_4, ours)
        }
        mine = inside[ours]
        if mine is None:
            continue
        summary[f"in_model_b1_t{tokens}_us"] = mine["gdn_us"]
        for name, key in ((DEFAULT, ""), (BLOCK_4, "_over_bv4")):
            other = inside[name]
            if other is not None:
                summary[f"in_model_b1_t{tokens}{key}"] = other["gdn_us"] / mine["gdn_us"]
    return summary


def _number(value: float | None, mark: str = "") -> str:
    return ("-" if value is None else f"{value:.0f}") + mark


def round_table(rows: Sequence[Row], batch: int, state_dtype: str, column: str) -> str:
    """Methods across, tokens down; `!` marks a failed check."""
    chosen = [
        row
        for row in rows
        if row["kind"] == "round" and row["batch"] == batch and row["state_dtype"] == state_dtype
    ]
    methods = list(dict.fromkeys(row["method"] for row in chosen))
    widths = [max(6, len(name)) + 1 for name in methods]
    heads = "".join(f"{name:>{width}}" for name, width in zip(methods, widths, strict=True))
    lines = [f"  T  floor{heads}"]
    for tokens in dict.fromkeys(row["tokens"] for row in chosen):
        cells, floor = [], None
        for name, width in zip(methods, widths, strict=True):
            row = find(chosen, method=name, tokens=tokens)
            text = "-" if row is None else _number(row.get(column), "!" if row["problem"] else "")
            cells.append(f"{text:>{width}}")
            floor = row["floor_us"] if row is not None else floor
        lines.append(f"{tokens:>3} {_number(floor):>6}{''.join(cells)}")
    return "\n".join(lines)


def model_table(rows: Sequence[Row]) -> str:
    """In-model cost beside the isolated time of the same method."""
    lines = ["  T  method                    pass us   GDN us [p10..p90]   alone us"]
    for row in (row for row in rows if row["kind"] == "in_model"):
        alone = find(
            rows,
            kind="round",
            method=row["method"],
            batch=row["batch"],
            tokens=row["tokens"],
            state_dtype="float32",
        )
        spread = f"[{row['gdn_p10_us']:.0f}..{row['gdn_p90_us']:.0f}]"
        lines.append(
            f"{row['tokens']:>3}  {row['method']:<24}{row['pass_us']:>9.0f}"
            f"{row['gdn_us']:>9.0f} {spread:<12}{_number(alone['round_us'] if alone else None):>8}"
        )
    return "\n".join(lines)
