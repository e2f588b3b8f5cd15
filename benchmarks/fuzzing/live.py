"""A SGLang engine with the plugin in a process of its own, which plays sessions.

    python live.py TASK.json

The task holds `engine` (arguments of `sglang.Engine`), `facts` of the sessions, `seed`, `rounds`,
`seconds` and `out`, a file that gets a line for every session: visits with what they were told,
requests that go on from their answers where `follow` says how far, the same prompts one row a round
alone, and of every fourth session with neighbours.
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
CONTROL_EVERY = 4


def play(live: Any, loop: Any, task: dict[str, Any], number: int) -> dict[str, Any]:
    """One session and its references."""
    from hybridspec.fuzz import sessions

    told = task["facts"]
    facts = sessions.LiveFacts(
        told["vocab_size"],
        told["max_context"],
        told["max_new_tokens"],
        tuple(told["boundaries"]),
        tuple(told["source"]),
    )
    session = sessions.random_session(facts, seed=task["seed"], number=number)

    def run(visits: Sequence[sessions.Visit]) -> list[dict[str, Any]]:
        heard = loop.run_until_complete(sessions.play_session(live, visits, timeout_s=TIMEOUT_S))
        return [sessions.as_json(v, h) for v, h in zip(visits, heard, strict=True)]

    def one_row(kind: str) -> list[sessions.Visit]:
        return [
            sessions.Visit(
                f"fuzz-{kind}-{number:06d}-{index:03d}", visit.prompt, visit.max_new_tokens, 1
            )
            for index, visit in enumerate(session)
        ]

    line: dict[str, Any] = {"number": number, "visits": run(session)}
    if task.get("follow"):
        heard = [sessions.Heard(row["tokens"]) for row in line["visits"]]
        line["after"] = run(
            sessions.follow_ups(
                session, heard, seed=task["seed"], number=number, tokens=task["follow"]
            )
        )
    line["alone"] = [run([visit])[0] for visit in one_row("alone")]
    line["together"] = run(one_row("rows")) if number % CONTROL_EVERY == 0 else []
    return line


def main() -> None:
    """Play until rounds or seconds are over; a session that fails ends the play."""
    task = json.loads(Path(sys.argv[1]).read_text())
    import sglang
    from sglang.srt.server_args import ServerArgs

    from hybridspec.fuzz.sglang_adapter import SglangLive

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    arguments = {key: value for key, value in task["engine"].items() if key in known}
    if left_out := sorted(task["engine"].keys() - known):
        print(f"not in ServerArgs, left out: {left_out}", flush=True)
    began = time.monotonic()
    engine = sglang.Engine(**arguments)
    print(f"up after {time.monotonic() - began:.1f} s", flush=True)
    live, rounds, number = SglangLive(engine), 0, 0
    began = time.monotonic()
    with Path(task["out"]).open("a", encoding="utf-8") as out:
        while rounds < task["rounds"] and time.monotonic() - began < task["seconds"]:
            try:
                line = play(live, engine.loop, task, number)
            except Exception:
                line = {"number": number, "error": traceback.format_exc()}
            out.write(json.dumps(line) + "\n")
            out.flush()
            if "error" in line:
                print(line["error"], flush=True)
                break
            rounds += sum(v["rounds"] for v in [*line["visits"], *line.get("after", ())])
            number += 1
            print(f"session {number}: {rounds} rounds of requests", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
