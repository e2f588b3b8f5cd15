"""Decoding speed of the embedded pair on CPU: plain, stock DFlash-16, fixed lengths, ours.

Calibrates on the calibration prompts, profiles this machine, then decodes the held-out prompts
every way in one process, ways of one prompt behind one another in turning order, several repeats,
medians. Decode only, outside repetition loops. Thread counts are tried for each way and each way is
reported at its own best, so that no baseline is held back.

    python benchmarks/cpu_demo.py [--repeats 3] [--threads 1,2] [--prompts-per-category 40]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from results_file import machine, write_results

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.calibrate.prompts import Prompt, load_prompts
from hybridspec.demo import assets
from hybridspec.demo.comparison import Comparison, Decoded, compare
from hybridspec.demo.margin import next_margin
from hybridspec.demo.page import result_table
from hybridspec.policy import Correction, Policy
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule

AR, STOCK, OURS, ROUTER = "AR", "DFlash-16", "HybridSpec", "HybridSpec+router"
FIXED = (4, 6, 8)


def make_bundle(folder: Path, threads: int, max_new_tokens: int) -> Path:
    """Calibrate and profile with the commands a user types."""
    bundle = folder / f"bundle-{threads}"
    base = [sys.executable, "-m", "hybridspec.cli.main"]
    common = ["--threads", str(threads), "--out", str(bundle), "--quiet"]
    trace = ["--trace", str(folder / f"trace-{threads}"), "--max-new-tokens", str(max_new_tokens)]
    grid = ["--contexts", "96,224", "--batch-sizes", "1", "--budget", "60", "--repeats", "25"]
    for command in (["calibrate", *common, *trace], ["profile-latency", *common, *grid]):
        subprocess.run([*base, *command], check=True, stdout=sys.stderr)
    return bundle


def load_policy(bundle_folder: Path, correction: Correction) -> Policy:
    bundle = load_bundle(bundle_folder)
    if bundle.calibration is None or bundle.cost is None or bundle.cost.throughput is None:
        raise SystemExit(f"{bundle_folder} lacks a part")
    return Policy(
        bundle.calibration.hazard,
        bundle.cost.step,
        bundle.cost.throughput,
        bundle.calibration.routing,
        correction=correction,
    )


def decode(
    engine: Engine, prompt: Prompt, tokens: list[int], rule: LengthRule, limit: int
) -> Decoded:
    """One prompt, one way; the rounds as the engine timed them."""
    request = engine.add(tokens, length_rule=rule)
    rounds = []
    while not request.finished and request.num_emitted < limit:
        rounds += engine.step([request])
    engine.remove(request)
    return Decoded(
        prompt.prompt_id,
        prompt.category,
        tuple(request.tokens[len(tokens) :][:limit]),
        tuple(len(r.emitted) for r in rounds),
        tuple(r.observed_us for r in rounds),
        tuple(r.verify_length for r in rounds),
    )


def measure(
    engines: dict[str, Engine],
    prompts: list[tuple[Prompt, list[int]]],
    ways: dict[str, LengthRule],
    *,
    repeats: int,
    limit: int,
) -> Comparison:
    """All ways over all prompts, interleaved."""
    for way, rule in ways.items():
        decode(engines[way], *prompts[0], rule, limit)
    runs: dict[str, list[list[Decoded]]] = {way: [[] for _ in prompts] for way in ways}
    names, began = list(ways), time.monotonic()
    for repeat in range(repeats):
        for i, (prompt, tokens) in enumerate(prompts):
            turn = (i + repeat) % len(names)
            for way in names[turn:] + names[:turn]:
                runs[way][i].append(decode(engines[way], prompt, tokens, ways[way], limit))
        print(f"  repeat {repeat + 1}/{repeats}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return compare(runs, reference=AR)


def margins(engine: Engine, comparison: Comparison, prompts: list, limit: int) -> list[float]:
    """Logit margin of plain decoding at each first difference."""
    by_id = {prompt.prompt_id: (prompt, tokens) for prompt, tokens in prompts}
    found = []
    for _, prompt_id, index in comparison.different:
        prompt, tokens = by_id[prompt_id]
        truth = decode(engine, prompt, tokens, LengthRule("none"), limit).token_ids
        found.append(next_margin(engine, [*tokens, *truth[:index]]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", default="1,2", help="thread counts to try, comma-separated")
    parser.add_argument("--prompts-per-category", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--work", type=Path, help="folder for bundles (kept), else temporary")
    parser.add_argument("--out", type=Path, help="folder for the result file")
    options = parser.parse_args()
    where = machine()
    target, drafter, prompts_file = assets.require()
    tokenizer = Tokenizer.load(target)
    chosen: dict[str, list[Prompt]] = {}
    for prompt in load_prompts(str(prompts_file)):
        if prompt.split == "test":
            chosen.setdefault(prompt.category, []).append(prompt)
    prompts = [
        (prompt, tokenizer.encode(prompt.text))
        for group in chosen.values()
        for prompt in group[: options.prompts_per_category]
    ]
    ways = {
        AR: LengthRule("none"),
        STOCK: LengthRule("fixed", 16),
        **{f"fixed-{k}": LengthRule("fixed", k) for k in FIXED},
        OURS: LengthRule("policy"),
        ROUTER: LengthRule("policy"),
    }
    work = options.work or Path(tempfile.mkdtemp(prefix="hybridspec-cpu-demo-"))
    results: dict[int, Comparison] = {}
    ties: list[float] = []
    for threads in (int(t) for t in options.threads.split(",")):
        bundle = make_bundle(work, threads, options.max_new_tokens)
        torch.set_num_threads(threads)
        plain, corrected = (
            load_pair(target, drafter, max_batch=1, policy=load_policy(bundle, correction))
            for correction in ("off", "select")
        )
        engines = {way: corrected if way == ROUTER else plain for way in ways}
        print(f"{threads} thread(s):", file=sys.stderr)
        results[threads] = measure(
            engines, prompts, ways, repeats=options.repeats, limit=options.max_new_tokens
        )
        ties += margins(plain, results[threads], prompts, options.max_new_tokens)
        print(f"\n{threads} thread(s)\n" + result_table(results[threads], base=AR), flush=True)
    report(results, ties, where, options.out)


def report(
    results: dict[int, Comparison], ties: list[float], where: dict, out: Path | None
) -> None:
    """Each way at its own best thread count; ratios; result file."""

    def best(way: str) -> tuple[float, int]:
        return max((c.total(way).tokens_per_s, t) for t, c in results.items())

    speed_ours, threads_ours = best(OURS)
    ours = results[threads_ours]
    fixed = [way for way in ours.by_category if way.startswith("fixed-")] + [STOCK]
    best_fixed = max(fixed, key=lambda way: best(way)[0])
    _, threads_ar = best(AR)
    categories = {
        name: part.tokens_per_s / results[threads_ar].by_category[AR][name].tokens_per_s
        for name, part in ours.by_category[OURS].items()
        if part.rounds and results[threads_ar].by_category[AR][name].rounds
    }
    rows = [
        {
            "way": way,
            "threads": threads,
            "category": category,
            "tokens": part.tokens,
            "time_us": part.time_us,
            "rounds": part.rounds,
            "rows": part.rows,
            "tokens_per_s": part.tokens_per_s if part.rounds else None,
        }
        for threads, comparison in results.items()
        for way, parts in comparison.by_category.items()
        for category, part in [*parts.items(), ("all", comparison.total(way))]
    ]
    summary = {
        "over_ar": speed_ours / best(AR)[0],
        "over_dflash16": speed_ours / best(STOCK)[0],
        "over_best_fixed": speed_ours / best(best_fixed)[0],
        "min_category_over_ar": min(categories.values()),
        "tokens_per_round_dflash16": ours.total(STOCK).tokens_per_round,
        "tokens_per_s": speed_ours,
        "tokens_per_s_ar": best(AR)[0],
        "tokens_per_s_dflash16": best(STOCK)[0],
        "tokens_per_s_best_fixed": best(best_fixed)[0],
        "best_fixed_way": best_fixed,
        "threads": threads_ours,
        "threads_ar": threads_ar,
        "threads_dflash16": best(STOCK)[1],
        "router_correction_over_none": ours.over(ROUTER, OURS),
        "mean_verify_length": ours.total(OURS).mean_verify_length,
        "tokens_per_round": ours.total(OURS).tokens_per_round,
        "category_over_ar": categories,
        "loop_prompts": ours.loop_prompts,
        "different_outputs": sum(len(c.different) for c in results.values()),
        "largest_margin_at_difference": max(ties, default=0.0),
    }
    path = write_results("cpu_demo", rows=rows, summary=summary, seed=0, where=where, out=out)
    for key, value in summary.items():
        print(f"{key}: {value}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
