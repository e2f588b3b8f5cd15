"""The result file of profiled rounds: groups of kernels by arm, and the kernels of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results_file import write_results
from serving.kineto import DRAFTER, EAGER, TARGET, Profile, Row, analyse, read_events, table

GROUPS = (DRAFTER, TARGET, EAGER)
PACKAGES = ("sglang", "torch", "triton", "openai")


def profile_of(arm: Mapping[str, Any], folders: Sequence[Path]) -> Profile:
    """An arm's profile: read again from its trace where that lies in one of `folders`."""
    for folder in folders:
        for path in (folder / arm["trace"], *folder.glob(f"*/{arm['trace']}")):
            if path.is_file():
                return analyse(read_events(path))
    kept = dict(arm["profile"])
    return Profile(**{**kept, "rows": [Row(**row) for row in kept["rows"]]})


def profile_rows(name: str, profile: Profile, *, most: int) -> list[dict[str, Any]]:
    """Groups of an arm, and of each group the kernels that take longest.

    Args:
        most: kernels of a group that get a row; the others share one.
    """
    found: list[dict[str, Any]] = []
    for group in GROUPS:
        rows = [row for row in profile.rows if row.group == group]
        if not rows:
            continue
        entry: dict[str, Any] = {
            "kind": "group", "arm": name, "group": group,
            "busy_us": round(profile.busy_us[group], 1),
            "idle_us": round(profile.idle_us.get(group if group == EAGER else f"in the {group}",
                                                 0.0), 1),
            "launches_a_round": round(sum(row.count for row in rows), 2),
        }  # fmt: skip
        if group in profile.span_us:
            entry["span_us"] = round(profile.span_us[group], 1)
        found.append(entry)
        shown = [(row.name, row.count, row.us) for row in rows[:most]]
        rest = rows[most:]
        if rest:
            shown.append(
                (f"{len(rest)} others", sum(r.count for r in rest), sum(r.us for r in rest))
            )
        found += [
            {
                "kind": "kernel", "arm": name, "group": group, "kernel": kernel,
                "us_a_round": round(us, 2), "launches_a_round": round(count, 2),
            }
            for kernel, count, us in shown
        ]  # fmt: skip
    return found


def summary_of(arm: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """Plain numbers of an arm, microseconds of a profiled round.

    Between graphs, the smallest over rounds stands beside the mean: the profiler slows the host,
    and in most rounds the GPU then waits for it.
    """
    found: dict[str, Any] = {
        "rounds": profile.rounds,
        "round_us": round(profile.round_us, 1),
        "drafter_us": round(profile.span_us.get(DRAFTER, 0.0), 1),
        "target_us": round(profile.span_us[TARGET], 1),
        "between_us": round(
            profile.round_us - sum(profile.span_us.values()), 1
        ),
        "idle_us": round(sum(profile.idle_us.values()), 1),
    }  # fmt: skip
    if profile.outside_us_R:
        found["between_least_us"] = round(profile.outside_least_us, 1)
    for key in ("ms_a_round_unprofiled", "ms_a_round_before_profile"):
        if arm.get(key) is not None:
            found[key] = round(arm[key], 3)
    for key in ("verify_length", "prompt_tokens", "context_tokens"):
        if arm.get(key) is not None:
            found[key] = arm[key]
    return found


def write_profile(recording: Path, *, traces: Sequence[Path], most: int, out: Path | None) -> Path:
    """Write `sglang_profile.json` of a recording and print its tables.

    Args:
        traces: folders with the recording's traces besides its own.
    """
    raw = json.loads(recording.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name, arm in raw["arms"].items():
        profile = profile_of(arm, [recording.parent, *traces])
        print(f"{name}: {table(profile, most=most)}")
        rows += profile_rows(name, profile, most=most)
        summary[name] = summary_of(arm, profile)
    rows.append({"kind": "recording", **raw["about"]})
    path = write_results(
        "sglang_profile",
        rows=rows,
        summary=summary,
        seed=0,
        where=raw["about"]["machine"],
        packages=PACKAGES,
        out=out,
    )
    # The machine that measured had the packages and the commit that count.
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {key: raw["about"][key] for key in ("commit", "versions")}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
