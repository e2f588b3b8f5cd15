"""GPU time of a round in a SGLang server, kernel by kernel: drafter, target, between, idle.

    python benchmarks/sglang_profile.py measure --padded PADDED --source PAIR --out DIR
    python benchmarks/sglang_profile.py analyse TRACE.json.gz [...]

`measure` starts one server an arm, decodes one request with 4 rows a round, and has SGLang profile
some of its rounds (`/start_profile`, GPU activity alone: recording operators would slow the host,
which is what the gaps show). The same rounds are timed without the profiler beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serving.arms import Boot, boots_of
from serving.decoding import rates, rounds_of
from serving.kineto import analyse, read_events, table
from serving.load import Ask
from serving.measuring import Measuring
from serving.servers import Server

TOKENS = 1000


class Profiling(Measuring):
    """One arm after the other; its `tasks` profiles instead of measuring rates."""

    def tasks(self, boot: Boot, server: Server) -> None:
        """Rounds without the profiler, then with it."""
        options = self.options
        length = options.length if boot.algorithm == "HYBRIDSPEC" else None
        self.load(server, self.prompts[:1], Ask(48, length), clients=1)
        streams = self.load(server, self.prompts[1:4], Ask(96, length), clients=1)
        rounds = rounds_of(streams, self.looping, clients=1)
        plain = rates(rounds, streams, clients=1).get("all", {})
        folder = (self.out / f"profile-{boot.name}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.glob("*.json.gz"))
        decoding = threading.Thread(
            target=self.load,
            args=(server, self.prompts[:1], Ask(TOKENS, length)),
            kwargs={"clients": 1},
            daemon=True,
        )
        decoding.start()
        time.sleep(0.5)
        server.post_text(
            "/start_profile",
            {
                "output_dir": str(folder),
                "num_steps": options.steps,
                "activities": ["GPU"],
                "with_stack": False,
                "record_shapes": False,
            },
        )
        trace = self.trace_of(folder, before)
        decoding.join(60.0)
        profile = analyse(read_events(trace))
        self.say(boot.name, f"without the profiler {plain.get('ms_a_round', 0.0):.3f} ms a round")
        print(table(profile), flush=True)
        self.raw["arms"][boot.name] = {
            "verify_length": length,
            "ms_a_round_unprofiled": plain.get("ms_a_round"),
            "trace": trace.name,
            "profile": dataclasses.asdict(profile),
        }
        (self.out / "sglang_profile.json").write_text(json.dumps(self.raw["arms"], indent=1))

    def trace_of(self, folder: Path, before: set[Path]) -> Path:
        """The trace once it is written whole.

        Raises:
            TimeoutError: there is none in time.
        """
        until = time.monotonic() + min(90.0, self.left_s)
        size = -1
        while time.monotonic() < until:
            new = sorted(set(folder.glob("*.json.gz")) - before)
            now = new[0].stat().st_size if new else 0
            if now and now == size:
                return new[0]
            size = now
            time.sleep(1.0)
        raise TimeoutError(f"no trace in {folder}")


def measure(options: argparse.Namespace) -> int:
    """Profile every arm; 1 where one failed."""
    run = Profiling(options)
    failed = 0
    for index, boot in enumerate(boots_of(options.arms.split(","))):
        try:
            run.run_boot(boot, options.port + 20 * index)
        except Exception:  # the next arm may run all the same
            failed += 1
            run.say(boot.name, "FAILED")
            traceback.print_exc()
    return int(failed > 0)


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="start servers and profile them")
    add = measuring.add_argument
    add("--padded", type=Path, required=True, help="folder made by inflate --no-weights")
    add("--source", type=Path, required=True, help="pair that it was made from")
    add("--arms", default="hybridspec-fixed,ar,dflash16")
    add("--length", type=int, default=4, help="rows of every round of HYBRIDSPEC (4)")
    add("--steps", type=int, default=24, help="rounds to profile (24)")
    add("--port", type=int, default=30100)
    add("--boot-timeout", type=float, default=200.0, metavar="S")
    add("--limit", type=float, default=400.0, metavar="S")
    add("--out", type=Path, required=True)
    analysing = commands.add_parser("analyse", help="tables of traces")
    analysing.add_argument("trace", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "analyse":
        for path in options.trace:
            print(f"{path.name}: {table(analyse(read_events(path)))}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # What the recording of rates also takes, and a profile has no use for.
    unused: dict[str, Any] = {
        "clients": "1", "tokens": 96, "per_category": 1, "tp_size": 1, "bundle": None,
        "earlier": None, "costs_from": None, "prepared": None, "cost_sweeps": 0,
    }  # fmt: skip
    for name, value in unused.items():
        setattr(options, name, value)
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
