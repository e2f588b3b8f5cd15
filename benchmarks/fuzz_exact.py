"""Text differences that a run of `fuzz_gpu.py sglang` left beyond a tie, decided in float64.

    python benchmarks/fuzz_exact.py PAIR [--results FILE]

For results that were written before the fuzzer did this itself: each difference's session is drawn
again from its seed, its prompt decoded on the host in float64 and in bfloat16. It counts as decided
where float64's text has the token found at that place, float64 prefers it to plain decoding's, and
bfloat16 on the host goes plain decoding's way. Limits of states are those that the fuzzer sets now,
from the run's own control. The result file is rewritten, its command and commit stay those of the
run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_gpu import session_facts
from fuzzing.exact import exact_logits, plain_text
from fuzzing.judge import decision
from results_file import RESULTS

from hybridspec.fuzz import sessions
from hybridspec.fuzz.noise import SIGNAL_OVER_TOLERANCE
from hybridspec.fuzz.sglang_adapter import allowed_of

NAME = re.compile(r"fuzz-(?:varied-)?(\d+)-(\d+)-(\d+)$")
PLACE = re.compile(r"token (\d+) of the output is (\d+), plain decoding's (\d+),")


def decide(fault: dict[str, Any], pair: Path) -> dict[str, Any]:
    """The fault's entry, with texts of the host up to its place."""
    name, place = NAME.search(fault["name"]), PLACE.match(fault["message"])
    if name is None or place is None:
        raise SystemExit(f"error: {fault} names no session and place")
    told = session_facts(pair)
    facts = sessions.LiveFacts(
        told["vocab_size"], told["max_context"], told["max_new_tokens"],
        tuple(told["boundaries"]), tuple(told["source"]),
    )  # fmt: skip
    seed, number, index = map(int, name.groups())
    visit = sessions.random_session(facts, seed=seed, number=number)[index]
    if visit.name != fault["name"]:
        raise SystemExit(f"error: session {number} of seed {seed} has {visit.name} there")
    at, found, expected = map(int, place.groups())
    target = pair / "target"
    texts = {
        dtype: plain_text(target, visit.prompt, at + 1, dtype)
        for dtype in (torch.float64, torch.bfloat16)
    }
    exact = exact_logits(target, max_context=told["max_context"] + told["max_new_tokens"])
    prefix = [*visit.prompt, *texts[torch.float64][:at]]
    entry = decision(sessions.Fault(**fault), (expected, found), exact(prefix, (expected, found)))
    entry["host_float64_text"] = texts[torch.float64]
    entry["host_bfloat16_text"] = texts[torch.bfloat16]
    alike = texts[torch.float64][:at] == texts[torch.bfloat16][:at]
    ends = texts[torch.float64][at], texts[torch.bfloat16][at]
    entry["decided"] = alike and ends == (found, expected) and entry["float64_prefers_found"]
    return entry


def judge_again(states: dict[str, Any]) -> None:
    """Limits of states from the control and the change by one token that the run saw."""
    for part, control in states["control"].items():
        signal = states["signal"][part]
        states["allowed"][part] = allowed_of(control, signal)
        if not states["largest"][part] <= states["allowed"][part]:
            raise SystemExit(f"error: {part}: {states['largest'][part]} is beyond its limit")
    states["blind"] = [
        part
        for part, allowed in states["allowed"].items()
        if states["signal"][part] < SIGNAL_OVER_TOLERANCE * allowed
    ]


def main() -> int:
    """Rewrite the result file; 5 if a difference stays a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", type=Path, help="that was fuzzed")
    parser.add_argument("--results", type=Path, default=RESULTS / "fuzz_gpu_sglang.json")
    options = parser.parse_args()
    told = json.loads(options.results.read_text())
    (row,) = [row for row in told["rows"] if row["part"] == "sglang"]
    for states in row.get("processes") or [row["states"]]:
        judge_again(states)
    entries = {fault["name"]: decide(fault, options.pair) for fault in row["faults"]}
    row["beyond_tie"] = row.get("beyond_tie", []) + list(entries.values())
    row["faults"] = [f for f in row["faults"] if not entries[f["name"]]["decided"]]
    row["texts_beyond_tie"] = len(row["beyond_tie"])
    row["texts_beyond_tie_as_float64"] = sum(e["float64_prefers_found"] for e in row["beyond_tie"])
    row["text_faults"] = len(row["faults"]) + len(row["errors"])
    kept = ("texts_beyond_tie", "texts_beyond_tie_as_float64", "text_faults")
    told["summary"] |= {f"sglang_{key}": row[key] for key in kept}
    told["judged_by"] = "python benchmarks/fuzz_exact.py PAIR"
    options.results.write_text(json.dumps(told, indent=1) + "\n")
    for entry in entries.values():
        print(json.dumps(entry))
    return 5 if row["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
