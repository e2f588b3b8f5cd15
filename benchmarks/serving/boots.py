"""Starts of servers in recordings: memory, limits, and why arms are missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Where a run keeps its files says nothing about it.
_FOLDERS = re.compile(r"/(?:tmp|root|opt|work)/(?:[\w.-]+/)*")
_ERROR = re.compile(r"^\w*(?:Error|Exception)\b.*$", re.MULTILINE)
_FRAME = re.compile(r'File "[^"]*?([\w-]+)\.py", line \d+, in (\w+)')
STATIC_SHARE = 0.85
"""`--mem-fraction-static` of all arms."""


def without_folders(text: str) -> str:
    """A line of a log without the folders of the machine."""
    return _FOLDERS.sub("PATH/", text)


def capacity(boot: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """State of one request, GiB as SGLang prints them, and how many requests' the card holds.

    What weights leave of SGLang's static share is taken for states alone, without keys and values.
    """
    memory = boot.get("memory") or {}
    if not memory.get("mamba_slots"):
        return {}
    # Pools have one slot more than requests, for padding.
    slots = memory["mamba_slots"] + 1
    total = sum(value for key, value in memory.items() if key.endswith("_gb"))
    own = memory.get("factors_mib_a_request", 0.0) + memory.get("conv_rows_mib_a_request", 0.0)
    state = total / slots + own / 1024
    found: dict[str, Any] = {"state_gib_a_request": round(state, 4)}
    weights = (boot.get("memory_usage") or {}).get("weight")
    card = about["machine"].get("gpu_memory_gib")
    if weights and card:
        found["requests_whose_states_fit"] = int((STATIC_SHARE * card - weights) / state)
    return found


def boot_rows(raws: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Starts of servers: seconds, memory, limits, refusals."""
    found = []
    for raw in raws:
        for name, boot in raw["boots"].items():
            row: dict[str, Any] = {"kind": "boot", **boot, "name": name}
            row |= capacity(boot, raw["about"])
            if "failed" in row:
                row["reason"] = reason_of(row["failed"])
                row["failed"] = without_folders(row["failed"][-1500:])
            row["facts"] = [without_folders(fact) for fact in row.get("facts", [])[:30]]
            found.append(row)
    return found


def reason_of(failed: str) -> str:
    """What a failure says first, and the last error in its log with the calls that led there."""
    failed = without_folders(failed)
    first = (failed.strip() or "no reason was given").splitlines()[0]
    error = next(reversed(list(_ERROR.finditer(failed))), None)
    if error is None:
        return first
    frames = [".".join(frame) for frame in _FRAME.findall(failed[: error.start()])]
    where = f" in {' > '.join(frames[-4:])}" if frames else ""
    return f"{first}; {error[0]}{where}"


def not_measured(raws: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Servers that failed or were not started though asked for, and why."""
    known = {name for raw in raws for name in raw["boots"]}
    found: dict[str, str] = {}
    for raw in raws:
        for name, boot in raw["boots"].items():
            if "failed" in boot:
                found[name] = reason_of(boot["failed"])
            elif "skipped" in boot:
                found[name] = f"skipped: {boot['skipped']}"
        if "arms_taken" not in raw["about"]:
            for name in raw["about"].get("arms", "").split(","):
                if name and name not in known:
                    found[name] = "asked for; no server of it is in the recording"
    return found
