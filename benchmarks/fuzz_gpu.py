"""The rollback fuzzer on a GPU: on the captured engine, and in SGLang with the plugin.

    python benchmarks/fuzz_gpu.py captured [--rounds 20000] [--limit 420] [--processes 5]
    python benchmarks/fuzz_gpu.py sglang PAIR --out DIR [--rounds 2000] [--processes 2] [--radix]

`captured` plays random histories on a pair of random weights in bfloat16, then plants the faults of
`tests/fuzz/gpu_fault_kit.py` one by one. `sglang` plays sessions in an engine with the plugin: PAIR
has target/, drafter/ and prompts.json; texts are compared with plain decoding in a second engine,
states with rounds of one row. States need the worker to call `state_probe.watch`; without it the
result says that none were compared. With `--radix` there is a prefix cache, and requests go on from
answers. Each leaves its part in results/fuzz_gpu.json beside the
other's; what there is is kept when time is over or on SIGTERM. Exit codes: 0, 4 without a GPU or
SGLang, 5 where something was found or nothing could be played.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from results_file import RESULTS, gpu, machine, write_results

BEGAN = time.monotonic()
NAME = "fuzz_gpu"
FAULT_SECONDS, SHARE_OF_CLEAN_ROUNDS = 30.0, 0.7
CHUNK_TOKENS, CONTEXT_TOKENS, NEW_TOKENS = 256, 1024, 64
TIE_LOGITS = 0.25
BOOT_SECONDS = 70.0
# With a prefix cache: tokens of requests that go on, and between states that are kept.
FOLLOW_TOKENS, TRACK_TOKENS, STATE_SLOTS = 12, 64, 96


def say(*parts: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *parts, flush=True)


def keep(part: str, row: dict[str, Any], where: dict[str, Any], seed: int, folder: Path) -> None:
    """Write a part beside the other's, as it stands."""
    path = folder / f"{NAME}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [other for other in rows if other["part"] != part] + [{"part": part, **row}]
    summary = {
        f"{other['part']}_{key}": value
        for other in rows
        for key, value in other.items()
        if isinstance(value, int | float)
    }
    write_results(
        NAME, rows=rows, summary=summary, seed=seed, where=where,
        packages=("torch", "triton", "sglang"), out=folder,
    )  # fmt: skip


def captured(options: argparse.Namespace, where: dict[str, Any]) -> bool:
    """Play on the captured engine and plant faults; whether all is as it should be.

    One process goes from launch to launch of the host, so several, with seeds of their own, share
    the GPU; only the first plants faults.
    """
    others: list[tuple[Path, subprocess.Popen[bytes]]] = []
    folder = Path(tempfile.mkdtemp())
    options.rounds = -(-options.rounds // options.processes)
    for index in range(1, options.processes):
        out = folder / str(index)
        out.mkdir()
        command = [
            sys.executable, __file__, "captured", "--rounds", str(options.rounds),
            "--seed", str(options.seed + index), "--limit", str(options.limit - 10.0),
            "--no-faults", "--out", str(out),
        ]  # fmt: skip
        with (out / "log.txt").open("wb") as log:
            others.append((out, subprocess.Popen(command, stdout=log, stderr=log)))
    good = all([play_captured(options, where), *outcomes(others, options.limit)])
    if others:
        join_rows([options.results, *(out for out, _ in others)], where, options.seed)
    return good


def outcomes(others: list[tuple[Path, subprocess.Popen[bytes]]], limit_s: float) -> list[bool]:
    """Wait for the other processes, end those that are late; whether each was content."""
    for out, process in others:
        try:
            process.wait(max(1.0, limit_s - (time.monotonic() - BEGAN)))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        say((out / "log.txt").read_text(errors="replace")[-300:])
    return [process.returncode == 0 for _, process in others]


def rows_of(part: str, folders: list[Path]) -> list[dict[str, Any]]:
    """The row of a part in each folder that has one."""
    rows = []
    for folder in folders:
        path = folder / f"{NAME}.json"
        found = json.loads(path.read_text())["rows"] if path.exists() else []
        rows += [row for row in found if row["part"] == part]
    return rows


def join_rows(folders: list[Path], where: dict[str, Any], seed: int) -> None:
    """Sums of what several processes played, in the first one's row."""
    rows = rows_of("captured", folders)
    first = {key: value for key, value in rows[0].items() if key != "part"}
    for key in ("rounds", "histories", "violations", "wanted_rounds"):
        first[key] = sum(row[key] for row in rows)
    first["seconds"] = max(row["seconds"] for row in rows)
    first["counts"] = {
        key: sum(row["counts"].get(key, 0) for row in rows)
        for key in {key: None for row in rows for key in row["counts"]}
    }
    first["largest_difference"] = {
        key: max(row["largest_difference"].get(key, 0.0) for row in rows)
        for key in first["largest_difference"]
    }
    first["processes"] = [
        {key: row[key] for key in ("rounds", "violations", "violation", "history", "noise")}
        for row in rows
    ]
    keep("captured", first, where, seed, folders[0])


def play_captured(options: argparse.Namespace, where: dict[str, Any]) -> bool:
    """One process of it."""
    from hybridspec.artifacts.digest import model_digest
    from hybridspec.fuzz.gpu_adapter import GpuAdapter
    from hybridspec.fuzz.gpu_pair import random_pair
    from hybridspec.fuzz.history_file import Setting
    from hybridspec.fuzz.run import Report, fuzz

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fuzz"))
    faults = importlib.import_module("gpu_fault_kit").GPU_FAULTS
    with random_pair() as folders, tempfile.TemporaryDirectory() as found:
        adapter = GpuAdapter(*folders)
        noise, facts = adapter.noise, adapter.facts
        say("noise", noise)
        digests = (model_digest(folders[0]), model_digest(folders[1]))
        setting = Setting(facts.name, facts.dtype, *digests, facts.max_requests, facts.max_context)

        def hunt(engine: GpuAdapter, rounds: int, seconds: float) -> Report:
            report = Report()
            try:
                fuzz(
                    engine, setting, report, seed=options.seed, rounds=rounds, seconds=seconds,
                    folder=Path(found), say=say, shrink_seconds=15.0,
                )  # fmt: skip
            except KeyboardInterrupt:
                say("told to end")
            return report

        def row_of(report: Report) -> dict[str, Any]:
            finding = report.finding
            return {
                "rounds": report.rounds,
                "histories": report.histories,
                "seconds": round(report.seconds, 1),
                "violations": int(finding is not None),
                "violation": None if finding is None else vars(finding.violation),
                "history": report.path.read_text() if report.path else None,
                "counts": dict(report.tally.counts),
                "largest_difference": report.tally.worst,
            }

        seconds = SHARE_OF_CLEAN_ROUNDS * options.limit - (time.monotonic() - BEGAN)
        row: dict[str, Any] = {
            **row_of(hunt(adapter, options.rounds, seconds)),
            "wanted_rounds": options.rounds,
            "noise": vars(noise),
            "planted": [],
        }
        say({key: value for key, value in row.items() if key != "history"})
        keep("captured", row, where, options.seed, options.results)
        del adapter
        for fault in faults if options.faults else ():
            left = options.limit - (time.monotonic() - BEGAN)
            if left < 5.0:
                say(f"LEFT OUT {fault.name}: no time left")
                continue
            try:
                wrong = GpuAdapter(*folders, make_gdn=fault.make_gdn, noise=noise)
                result = row_of(hunt(wrong, 1_000_000, min(FAULT_SECONDS, left)))
            except Exception:
                result = {"violations": 0, "error": traceback.format_exc()[-4000:]}
                say(result["error"])
            say(fault.name, result.get("violation"))
            row["planted"].append({"fault": fault.name, **result})
            row["planted_faults"] = len(row["planted"])
            row["planted_faults_found"] = sum(r["violations"] for r in row["planted"])
            keep("captured", row, where, options.seed, options.results)
    good = row["violations"] == 0 and row["rounds"] >= options.rounds
    return good and (not options.faults or row.get("planted_faults_found") == len(faults))


def sglang(options: argparse.Namespace, where: dict[str, Any]) -> bool:
    """Play in SGLang and judge; whether all is as it should be.

    Several processes share the GPU, each with engines, ports and seeds of its own.
    """
    others: list[tuple[Path, subprocess.Popen[bytes]]] = []
    options.rounds = -(-options.rounds // options.processes)
    for index in range(1, options.processes):
        out = options.out / str(index)
        out.mkdir(exist_ok=True)
        command = [
            sys.executable, __file__, "sglang", str(options.pair), "--rounds", str(options.rounds),
            "--seed", str(options.seed + index), "--limit", str(options.limit - 10.0),
            "--mem-fraction", str(options.mem_fraction), "--load-format", options.load_format,
            "--port", str(options.port + 4000 * index), "--out", str(out), "--results", str(out),
            *(["--radix"] if options.radix else []),
        ]  # fmt: skip
        with (out / "log.txt").open("wb") as log:
            others.append((out, subprocess.Popen(command, stdout=log, stderr=log)))
    good = all([play_sglang(options, where), *outcomes(others, options.limit)])
    if others:
        rows = rows_of(options.name, [options.results, *(out for out, _ in others)])
        keep(options.name, joined_sessions(rows), where, options.seed, options.results)
    return good


def joined_sessions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over processes; of a gap the largest; each process's states."""
    joined: dict[str, Any] = {"processes": [row.pop("states") for row in rows]}
    for row in rows:
        for key, value in row.items():
            if key in ("part", "tie_logits"):
                joined.setdefault(key, value)
            elif key.startswith("largest"):
                joined[key] = max(joined.get(key, 0.0), value)
            elif isinstance(value, int | float | list):
                joined[key] = joined.get(key, type(value)()) + value
            else:
                joined[key] = value
    joined.pop("part")
    return joined


def session_facts(pair: Path) -> dict[str, Any]:
    """What sessions are drawn for."""
    prompts = json.loads((pair / "prompts.json").read_text())
    config = json.loads((pair / "target" / "config.json").read_text())
    return {
        "vocab_size": config.get("text_config", config)["vocab_size"],
        "max_context": CONTEXT_TOKENS,
        "max_new_tokens": NEW_TOKENS,
        # A page is one token in a hybrid model; 64 is a tile of attention and of prefill.
        "boundaries": [64, CHUNK_TOKENS],
        "source": [token for prompt in prompts for token in prompt["ids"]][:100_000],
    }


def play_sglang(options: argparse.Namespace, where: dict[str, Any]) -> bool:
    """One process of it."""
    from engine_smoke.engines import Arm
    from fuzzing.exact import exact_logits
    from fuzzing.judge import judge_states, judge_texts, prefix_hits, read_sessions
    from sglang_smoke import engine

    out: Path = options.out
    arguments, environment = engine("hybridspec", options, options.port)
    arguments |= {"chunked_prefill_size": CHUNK_TOKENS, "context_length": 4 * CONTEXT_TOKENS}
    if options.radix:
        arguments |= {
            "disable_radix_cache": False,
            "mamba_radix_cache_strategy": "extra_buffer",
            "mamba_track_interval": TRACK_TOKENS,
            "max_mamba_cache_size": STATE_SLOTS,
        }
    config = json.loads((options.pair / "target" / "config.json").read_text())
    text = config.get("text_config", config)
    lines_file, digests = out / "sessions.jsonl", out / "digests.jsonl"
    for old in (lines_file, digests):
        old.unlink(missing_ok=True)
    task = {
        "engine": arguments,
        "facts": session_facts(options.pair),
        "seed": options.seed,
        "rounds": options.rounds,
        "seconds": 0.6 * options.limit - BOOT_SECONDS,
        "follow": FOLLOW_TOKENS if options.radix else 0,
        "out": str(lines_file),
    }
    (out / "task.json").write_text(json.dumps(task))
    log = out / "live.log"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).parent / "fuzzing" / "live.py"),
             str(out / "task.json")],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **environment, "HYBRIDSPEC_STATE_DIGEST": str(digests)},
        )  # fmt: skip
    try:
        code = child.wait(timeout=0.75 * options.limit)
        say(f"the play ended with {code}")
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        say("the play took too long or was told to end; judging what there is")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), flush=True)
    lines = read_sessions(lines_file)
    row: dict[str, Any] = {"wanted_request_rounds": options.rounds, "sessions": len(lines)}
    row["states"] = judge_states(lines, digests, layers=text["num_hidden_layers"])
    row["state_faults"] = len(row["states"].get("faults", ()))
    row["states_compared"] = row["states"]["compared"]
    if options.radix:
        row |= prefix_hits(lines)
    say("states", row["states"])
    keep(options.name, row, where, options.seed, options.results)

    arguments, environment = engine("ar", options, options.port + 2000)
    arm = Arm("ar", out, arguments | {"context_length": 4 * CONTEXT_TOKENS}, environment)
    try:
        arm.wait_until_up(BEGAN + options.limit)

        def until() -> float:
            return BEGAN + options.limit

        def plain(prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
            sampling = [
                {"temperature": 0.0, "max_new_tokens": number, "ignore_eos": True}
                for number in tokens
            ]
            asked = {"do": "generate", "prompts": prompts, "sampling": sampling, "batch": 8}
            return [answer["ids"] for answer in arm.ask(asked, until())["rows"]]

        def gaps(prefixes: list[list[int]], pairs: list[tuple[int, int]]) -> list[float | None]:
            if not prefixes:
                return []
            answer = arm.ask({"do": "margins", "prefixes": prefixes}, until())
            found: list[float | None] = []
            for (a, b), best in zip(pairs, answer["rows"], strict=True):
                of = {token: value for value, token in best}
                found.append(abs(of[a] - of[b]) if a in of and b in of else None)
            return found

        exact = exact_logits(options.pair / "target", max_context=CONTEXT_TOKENS + NEW_TOKENS)
        row |= judge_texts(lines, plain, gaps, tie=TIE_LOGITS, exact=exact)
        row["text_faults"] = len(row["faults"]) + len(row["errors"])
    except Exception:
        row["failed"] = traceback.format_exc()[-4000:]
        say(row["failed"])
    finally:
        arm.kill()
    say({key: value for key, value in row.items() if key != "states"})
    keep(options.name, row, where, options.seed, options.results)
    enough = row.get("request_rounds", 0) >= options.rounds and row["states_compared"] > 0
    enough = enough and not row["states"].get("blind")
    enough = enough and (not options.radix or row["hits_that_end_inside_an_answer"] > 0)
    return enough and row.get("text_faults") == 0 and row["state_faults"] == 0


def main() -> int:
    """Run one part; see the module's docstring for exit codes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, rounds in (("captured", 20_000), ("sglang", 2_000)):
        part = parts.add_parser(name)
        part.add_argument("--rounds", type=int, default=rounds)
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--limit", type=float, default=420.0, metavar="S")
        part.add_argument("--processes", type=int, default=1, help="that share the GPU (1)")
        if name == "captured":
            part.add_argument("--no-faults", dest="faults", action="store_false")
            part.add_argument("--out", type=Path, dest="results", default=RESULTS, metavar="DIR")
        if name == "sglang":
            part.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
            part.add_argument("--port", type=int, default=31000)
            part.add_argument("pair", type=Path)
            part.add_argument("--out", type=Path, required=True)
            part.add_argument("--load-format", default="auto")
            part.add_argument("--mem-fraction", type=float, default=0.6)
            part.add_argument("--radix", action="store_true", help="with a prefix cache")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device; run it on a GPU", file=sys.stderr)
        return 4
    if options.part == "sglang":
        if importlib.util.find_spec("sglang") is None:
            print("sglang cannot be imported; install sglang==0.5.16", file=sys.stderr)
            return 4
        options.pair, options.out = options.pair.resolve(), options.out.resolve()
        options.out.mkdir(parents=True, exist_ok=True)
        options.bundle, options.any_bundle, options.correction = None, False, "off"
        options.name = "sglang_radix" if options.radix else "sglang"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    where = {**machine(), **gpu()}
    return 0 if {"captured": captured, "sglang": sglang}[options.part](options, where) else 5


if __name__ == "__main__":
    sys.exit(main())
