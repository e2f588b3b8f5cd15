"""GPU time of a round in a SGLang server, kernel by kernel: drafter, target, between, idle.

    python benchmarks/sglang_profile.py measure --padded PADDED --source PAIR --out DIR
    python benchmarks/sglang_profile.py analyse DIR/sglang_profile_raw.json [--traces DIR ...]
    python benchmarks/sglang_profile.py analyse TRACE.json.gz [...]

`measure` starts one server an arm, decodes one request with 4 rows a round, and has SGLang profile
some of its rounds (`/start_profile`, GPU activity alone: recording operators would slow the host,
which is what the gaps show). Rounds of the same request are timed before the profiler starts.
`analyse` makes the result file of a recording, and prints the tables of traces.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import signal
import statistics
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
from serving.load import Ask, Prompt, Stream
from serving.measuring import Measuring
from serving.profiles import write_profile
from serving.servers import Server

TOKENS = 1000
# What the answer leaves of the servers' context length of 4096.
LONGEST_PROMPT = 3000
# Rounds that are timed without the profiler come right before it.
BEFORE_S = 0.4


class Profiling(Measuring):
    """One arm after the other; its `tasks` profiles instead of measuring rates."""

    recording = "sglang_profile_raw.json"

    def prompt(self) -> Prompt:
        """The first prompt, with the next ones behind it up to `--context` tokens."""
        first = self.prompts[0]
        if self.options.context is None:
            return first
        ids = [token for prompt in self.prompts for token in prompt.ids]
        if len(ids) < self.options.context:
            raise SystemExit(
                f"--context {self.options.context}: all prompts have {len(ids)} tokens"
            )
        return Prompt(first.number, first.category, ids[: self.options.context])

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
        prompt = self.prompt()
        found: list[Stream] = []

        def decode() -> None:
            found.extend(self.load(server, [prompt], Ask(TOKENS, length), clients=1))

        if self.options.context is not None:
            # A prompt of another length compiles kernels once.
            self.load(server, [prompt], Ask(24, length), clients=1)
        decoding = threading.Thread(target=decode, daemon=True)
        decoding.start()
        # Its prefill, then the rounds that are timed.
        time.sleep(BEFORE_S + 0.1 + 0.3 * len(prompt.ids) / 1000)
        started_s = time.perf_counter()
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
        arm: dict[str, Any] = {
            "verify_length": length,
            "prompt_tokens": len(prompt.ids),
            "ms_a_round_unprofiled": plain.get("ms_a_round"),
            "trace": trace.name,
        }
        if found:
            arm |= around_profile(found[0], len(prompt.ids), started_s)
        profile = analyse(read_events(trace))
        self.say(boot.name, json.dumps({k: v for k, v in arm.items() if k != "trace"}))
        print(table(profile), flush=True)
        self.raw["arms"][boot.name] = {**arm, "profile": dataclasses.asdict(profile)}
        self.save()

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


def around_profile(stream: Stream, prompt_tokens: int, started_s: float) -> dict[str, Any]:
    """Rounds of the profiled request right before the profiler was started, and its context then.

    Args:
        started_s: when it was started, on the clock of the stream.
    """
    arrived = stream.arrived_s
    timed = [
        after - before
        for before, after in itertools.pairwise(arrived)
        if started_s - BEFORE_S <= before and after <= started_s
    ]
    last = max((i for i, at in enumerate(arrived) if at <= started_s), default=None)
    found: dict[str, Any] = {}
    if last is not None:
        found["context_tokens"] = prompt_tokens + stream.tokens[last]
    if timed:
        found["ms_a_round_before_profile"] = 1e3 * statistics.median(timed)
        found["rounds_before_profile"] = len(timed)
    return found


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
    if run.raw["arms"]:
        write_profile(run.out / run.recording, traces=[], most=14, out=run.out)
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
    add("--context", type=int, help="tokens of the prompt (as the first prompt has)")
    add("--port", type=int, default=30100)
    add("--boot-timeout", type=float, default=200.0, metavar="S")
    add("--limit", type=float, default=400.0, metavar="S")
    add("--out", type=Path, required=True)
    analysing = commands.add_parser("analyse", help="result file of a recording, tables of traces")
    add = analysing.add_argument
    add("paths", type=Path, nargs="+", metavar="RECORDING.json|TRACE.json.gz")
    add("--traces", type=Path, nargs="*", default=[], metavar="DIR", help="of the recording")
    add("--most", type=int, default=40, help="kernels of a group (40)")
    add("--out", type=Path, help="folder of the result file (benchmarks/results)")
    options = parser.parse_args()
    if options.command == "analyse":
        for path in options.paths:
            if path.suffix == ".json":
                written = write_profile(
                    path, traces=options.traces, most=options.most, out=options.out
                )
                print(written.name)
            else:
                print(f"{path.name}: {table(analyse(read_events(path)), most=options.most)}")
        return 0
    if options.context is not None and not 1 <= options.context <= LONGEST_PROMPT:
        parser.error(f"--context {options.context}: 1 to {LONGEST_PROMPT}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # What the recording of rates also takes, and a profile has no use for.
    unused: dict[str, Any] = {
        "clients": "1", "tokens": 96, "per_category": 4, "tp_size": 1, "bundle": None,
        "earlier": None, "costs_from": None, "prepared": None, "cost_sweeps": 0, "at": "",
        "spread_lengths": False, "prefill_graphs": (), "fixed_lengths": (),
    }  # fmt: skip
    for name, value in unused.items():
        setattr(options, name, value)
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
