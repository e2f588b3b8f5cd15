"""Decode speed of the captured engine: plain, stock DFlash, fixed lengths, EVICT, the paper, ours.

    python benchmarks/gpu_decode.py prepare --trace lab-rounds.parquet --out PREPARED.npz
    python benchmarks/gpu_decode.py measure PAIR --prepared PREPARED.npz

`prepare` fits hazards and routing on the calibration prompts of recorded rounds (no GPU).
`measure` pads the pair to the shape of Qwen3.6-35B-A3B on the card, measures T(L) on its own
graphs, fits the price of time, and decodes held-out prompts of every category with all arms in
turn: one request, greedy, decode only, rounds in repetition loops left out. Text, acceptance and
routes are the pair's own; time and bytes are the full shape's. Before that the same prompts are
recorded at every anchor and each arm is predicted by walking them. An arm of a policy whose rounds
took the fallback length is reported as failed, without a rate. Stages run one after the other, a
stage that fails is printed with its traceback, and what was measured is kept when the run is told
to end.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from decoding import arms as arm_kinds
from decoding.anchors import record_texts
from decoding.arms import Arm, Text, decode_text, make_arm
from decoding.costs import (
    draft_us,
    expert_us,
    summarise,
    text_rounds,
)
from decoding.differences import judged_places
from decoding.findings import Told, failed_arms, predictions, rows_and_summary
from decoding.launches import keep_faster
from decoding.pair import Prompt, balanced, load_prompts, load_weights
from decoding.prepared import device_tables, device_trees, load_prepared, prepare, step_table
from decoding.walk import AnchorTexts
from fuzzing.exact import exact_logits
from results_file import gpu, machine, write_results
from rounds.timing import Deadline

from hybridspec.artifacts.tables import TREES, HazardKind
from hybridspec.costmodels.recorded import expert_counts
from hybridspec.errors import EnvironmentMissing, HybridSpecError
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import RoundRules

SEED = 0
ROOM = 512
FIXED = (4, 6, 8, 12)
# A round of the recording, the host's reading included.
ANCHOR_S = 0.012
CHOICES = ("load", "check", "costs", "decode", "exact")
EXACT_S = 3.0  # about, of a prompt on the host


class Run:
    """What a run has so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline = Deadline(options.limit)
        cuda = torch.cuda.is_available() and not options.cpu
        self.device = torch.device("cuda" if cuda else "cpu")
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.texts: list[Text] = []
        self.predicted: dict[tuple[str, str], Told] = {}
        self.fixed: dict[str, int] = {}
        self.failed: list[str] = []
        self.where = machine() | (gpu() if cuda else {})

    def stage(self, name: str, work: Callable[[], None]) -> bool:
        """Run a stage; a failure is printed and kept."""
        self.deadline.say(name)
        try:
            work()
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0][:300])
            print(f"FAILED {name}", flush=True)
            traceback.print_exc(file=sys.stdout)
            return False
        return True

    # ------------------------------------------------------------------ stages

    def load(self) -> None:
        """Weights, prompts, the engine and its kernels."""
        options = self.options
        self.prepared = load_prepared(options.prepared)
        self.hazards: HazardKind = self.prepared.kind(options.hazards)
        self.facts["hazards"] = self.hazards
        self.trees = None
        if self.hazards == TREES and self.prepared.trees is not None:
            self.trees = device_trees(self.prepared.trees, self.device)
            self.facts["trees"] = self.prepared.trees.num_trees
        prompts = load_prompts(options.prompt_file or options.pair / "prompts.json")
        self.prompts = balanced(prompts, options.prompts, "test")
        self.cost_prompts = balanced(prompts, options.cost_prompts, "calibration")
        began = time.perf_counter()
        self.weights = load_weights(
            options.pair, padded=not options.unpadded, device=self.device, dtype=self.dtype
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        target, drafter, facts = self.weights
        self.facts |= facts | {
            "load_s": round(time.perf_counter() - began, 1),
            "weights_gib": round(target.num_bytes / 2**30, 2),
            "layers": target.config.num_layers,
            "hidden": target.config.hidden_size,
        }
        self.deadline.say(f"{self.facts['weights_gib']} GiB in {self.facts['load_s']} s")
        self.engine = GpuEngine(target, drafter, batch=1, max_context=ROOM)
        stop = frozenset() if options.ignore_eos else frozenset(target.config.eos_token_ids)
        self.decoder = Decoder(self.engine, stop_tokens=stop)
        if self.device.type == "cuda":
            # Only saves time: a kernel that does not compile says so where it is launched.
            self.stage("compile ahead", self._compile)
            self.engine.capture_prefill()
            self.deadline.say("kernels compiled, prefill captured")

    def _compile(self) -> None:
        """Start every compilation at once; nothing is launched in here."""
        from rounds.subject import compiling

        engine = self.engine
        with compiling():
            for rules in (RoundRules("prefill"), RoundRules("fixed"), RoundRules("quotient"),
                          RoundRules("plain"), *self._policies(self._any_tables())):  # fmt: skip
                engine.round(rules).run()

    def _policies(self, tables: Any) -> list[RoundRules]:
        return [
            RoundRules("policy", tables=tables, trees=self.trees),
            RoundRules("policy", tables=tables, trees=self.trees, correction="paper"),
        ]

    def _any_tables(self) -> Any:
        from hybridspec.reference.gpu.measured import longest_tables

        # Of the size of the fitted ones, so that the same kernels are compiled.
        cost = step_table(np.full(17, 5e3), np.full((2, 17), 5e3), 1e3, 0.0, ROOM // 2)
        try:
            return device_tables(
                self.prepared, cost, self.prepared.price(cost, self.hazards), self.device
            )
        except HybridSpecError:
            return longest_tables(self.device)

    def check(self) -> None:
        """Rows below the length are bitwise equal for every length in the masked graph."""
        engine = self.engine
        self.fixed_replay = make_arm("fixed", engine, self.decoder, RoundRules("fixed")).replay
        first = engine.prefill([self.prompts[0].ids])
        saved = engine.snapshot()
        kept: dict[int, torch.Tensor] = {}
        lengths = (16, 5) if self.options.quick else tuple(range(16, 0, -1))
        for length in lengths:
            engine.restore(saved)
            engine.buffers.fixed_B.fill_(length)
            self.fixed_replay()
            kept[length] = engine.target.logits_RV[:length].clone()
        unequal = [n for n in lengths if not torch.equal(kept[n], kept[16][:n])]
        finite = bool(kept[16].float().isfinite().all())
        self.facts |= {"rows_bitwise_equal": not unequal, "lengths_not_bitwise": unequal}
        self.deadline.say(f"rows bitwise equal: {not unequal} {unequal}, finite: {finite}")
        engine.restore(saved)
        tokens = self.options.tokens
        text = self.decoder.decode(self.fixed_replay, first, max_new_tokens=tokens)[0]
        self.deadline.say(f"first text: {[len(line.emitted) for line in text.lines]}")
        if self.device.type == "cuda":
            self.stage("launches", lambda: self._launches(saved))

    def _launches(self, saved: Any) -> None:
        """The round with the faster kind of launches; the other arms are captured with them too."""
        facts, self.fixed_replay = keep_faster(self.engine, saved, self.fixed_replay)
        self.facts |= facts
        self.deadline.say(f"launches: {facts}")

    def costs(self) -> None:
        """T(L), draft pass and experts; the price of time; predictions."""
        options, engine = self.options, self.engine
        self.plain = make_arm(arm_kinds.AR, engine, self.decoder, RoundRules("plain"))
        saved = []
        for prompt in self.cost_prompts:
            first = engine.prefill([prompt.ids])[0]
            saved.append((first, engine.snapshot()))
        lengths = (0, 1, 4, 16) if options.quick else tuple(range(17))
        found = text_rounds(
            engine,
            self.decoder,
            self.fixed_replay,
            self.plain.replay,
            saved,
            lengths,
            tokens=options.cost_tokens,
        )
        draft = draft_us(engine, saved[0])
        forced: list[tuple[float, list[tuple[int, float]]]] = [(0.0, [])]
        if self.device.type == "cuda":
            experts, ids = engine.target.config.num_experts, self.cost_prompts[0].ids
            self.stage("experts", lambda: forced.append(expert_us(engine, ids, experts)))
        slope, points = forced[-1]
        self.measured = summarise(found, draft, slope, points)
        self.rows.append({"kind": "costs", **self.measured.row()})
        context = int(np.mean([len(p.ids) for p in self.cost_prompts])) + options.tokens // 2
        spread = self.measured.spread_us_2L
        self.cost = step_table(self.measured.latency_us_L, spread, draft, slope, context)
        self.charged = step_table(self.measured.mean_us_L, spread, draft, slope, context)
        self.throughput = self.prepared.price(self.cost, self.hazards)
        lam = float(self.throughput.tokens_per_us[0])
        best = int(self.throughput.best_fixed_length[0])
        self.facts |= {"lam_tokens_per_s": round(lam * 1e6, 2), "fitted_fixed_length": best}
        lengths_fixed = {*FIXED, max(best, 1)}
        self.fixed = {arm_kinds.STOCK: 16, arm_kinds.FULL: 16} | {
            f"fixed-{length}": length for length in sorted(lengths_fixed)
        }
        self.recorded: AnchorTexts | None = None
        self.stage("record", self._record)
        self.stage("predictions", lambda: self._predict(lam))
        self.deadline.say(f"T(L) ms {(self.measured.latency_us_L / 1e3).round(2).tolist()}")
        self.deadline.say(f"draft {draft:.0f} us, expert {slope:.2f} us, {self.facts}")

    def _predict(self, lam: float) -> None:
        fixed = self.fixed | {arm_kinds.AR: 0}
        self.predicted = predictions(
            self.prepared, self.cost, lam, fixed, self.hazards, self.recorded
        )
        found = {arm: value for (arm, c), value in self.predicted.items() if c == "all"}
        told = {arm: round(v.rate, 1) for arm, v in found.items() if v.rate is not None}
        replayed = {arm: round(v.replayed, 1) for arm, v in found.items() if v.replayed}
        self.deadline.say(f"predicted tokens/s, these prompts {told}")
        self.deadline.say(f"replayed tokens/s, the trace's prompts {replayed}")

    def _record(self) -> None:
        """The run's prompts at every anchor, and those that the costs were measured on."""
        options, deadline = self.options, self.deadline

        def rounds_of(prompts: list[Prompt], tokens: int) -> Any:
            needs = ANCHOR_S * tokens
            return record_texts(
                self.engine,
                self.decoder,
                prompts,
                tokens=tokens,
                allows=lambda: deadline.allows("recorded prompts", needs_s=needs + 60.0),
            )

        measured = rounds_of(self.cost_prompts, options.cost_tokens)
        mean = expert_counts(measured)[1]
        self.recorded = AnchorTexts.of(
            rounds_of(self.prompts, options.tokens),
            self.prepared,
            self.cost,
            self.charged,
            mean_distinct_L=None if mean is None else mean.mean(axis=0),
        )
        self.facts["recorded_texts"] = len(self.recorded.texts())
        self.facts["recorded_anchors"] = len(self.recorded.rounds)
        deadline.say(f"{len(self.recorded.rounds)} anchors recorded")

    def arms(self) -> list[Arm]:
        """Capture all arms."""
        engine, decoder = self.engine, self.decoder
        tables = device_tables(self.prepared, self.cost, self.throughput, self.device)
        verify = torch.from_numpy(self.measured.latency_us_L[1:] - self.measured.draft_us)
        engine.buffers.verify_us_L.copy_(verify)
        policy, paper = self._policies(tables)
        found = [self.plain]
        for name, length in self.fixed.items():
            if name != arm_kinds.STOCK:
                found.append(Arm(name, engine, decoder, self.fixed_replay, length))
        for name, rules in (
            (arm_kinds.OURS, policy),
            (arm_kinds.EVICT, RoundRules("quotient")),
            (arm_kinds.PAPER, paper),
        ):
            self.stage(
                f"arm {name}",
                lambda name=name, rules=rules: found.append(make_arm(name, engine, decoder, rules)),
            )
        self.stage("stock arm", lambda: found.insert(1, self._stock()))
        return found

    def _stock(self) -> Arm:
        from decoding.stock_gdn import StockGdn, missing

        reason = "no CUDA device" if self.device.type != "cuda" else missing()
        if reason is not None:
            raise EnvironmentMissing(f"no stock arm: {reason}; over_dflash16 is of our kernels")
        target, drafter, _ = self.weights
        engine = GpuEngine(target, drafter, batch=1, max_context=ROOM, make_gdn=StockGdn)
        engine.capture_prefill()
        decoder = Decoder(engine, stop_tokens=self.decoder.stop_tokens)
        return make_arm(arm_kinds.STOCK, engine, decoder, RoundRules("fixed"), length=16)

    def decode(self) -> None:
        """Every prompt through every arm, arms in another order each time."""
        arms = self.arms()
        self.deadline.say(f"arms: {[arm.name for arm in arms]}")
        for index, prompt in enumerate(self.prompts):
            if not self.deadline.allows(f"prompts from {index} on", needs_s=6.0):
                break
            firsts = self._prefilled(arms, prompt)
            for arm in arms[index % len(arms) :] + arms[: index % len(arms)]:
                first, saved = firsts[id(arm.engine)]
                self.texts.append(
                    decode_text(arm, first, saved, prompt, index, tokens=self.options.tokens)
                )
        self.deadline.say(f"{len(self.texts)} texts")
        failed = failed_arms(self.texts)
        self.failed += [f"arm {arm}: {reason}" for arm, reason in failed.items()]

    def exact(self) -> None:
        """What the target says in float64, on the host, wherever a text left plain decoding's."""
        judge = exact_logits(self.options.pair / "target", max_context=ROOM)
        prompts = [prompt.ids for prompt in self.prompts]
        allows = partial(self.deadline.allows, "differences in float64", needs_s=EXACT_S)
        rows, facts = judged_places(self.texts, prompts, judge, allows=allows)
        self.rows += rows
        self.facts |= facts
        self.deadline.say(f"differences: {rows}")

    def _prefilled(self, arms: list[Arm], prompt: Prompt) -> dict[int, tuple[int, Any]]:
        found = {}
        for engine in {id(arm.engine): arm.engine for arm in arms}.values():
            first = engine.prefill([prompt.ids])[0]
            found[id(engine)] = (first, engine.snapshot())
        return found

    # ------------------------------------------------------------------ end

    def write(self) -> None:
        """The result file of what there is, and a short table."""
        if not self.texts and not self.rows:
            return
        rows, summary = rows_and_summary(self.texts, self.predicted, self.fixed)
        summary |= self.facts
        if self.failed:
            summary["failed"] = self.failed
        if self.deadline.left_out:
            summary["left_out"] = self.deadline.left_out
        path = write_results(
            "gpu_decode",
            rows=[*self.rows, *rows],
            summary=summary,
            seed=SEED,
            where=self.where,
            packages=("torch", "triton", "numpy", "sglang"),
            out=self.options.out,
        )
        print(f"{'arm':24s} tokens/s  a round  ms/round  mean L  fallback  over AR  predicted")
        for row in rows:
            if row["category"] == "all" and row["kind"] == "failed_arm":
                print(f"{row['arm']:24s}   FAILED {row['reason']}")
            elif row["category"] == "all":
                print(
                    f"{row['arm']:24s} {row['tokens_per_s']:8.1f} {row['tokens_a_round']:8.2f} "
                    f"{row['ms_a_round']:9.3f} {row['mean_length']:7.2f} "
                    f"{row['fallback_rounds']:9d} "
                    f"{row.get('over_ar', float('nan')):8.3f} "
                    f"{row.get('predicted_tokens_per_s', float('nan')):9.1f}"
                )
        print(summary)
        print(f"wrote {path.name}", flush=True)


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="fit hazards and routing on recorded rounds")
    make.add_argument("--trace", type=Path, required=True)
    make.add_argument("--model", default="boosted", help="hazard model (boosted)")
    make.add_argument("--layers", type=int, default=40, help="of the padded target (40)")
    make.add_argument("--out", type=Path, required=True, help="the .npz to write")
    add = commands.add_parser("measure", help="measure arms on the GPU").add_argument
    add("pair", type=Path, help="folder with target/ and drafter/")
    add("--prepared", type=Path, required=True)
    add("--prompt-file", type=Path, help="prompts (PAIR/prompts.json)")
    add("--hazards", choices=("auto", "table", "trees"), default="auto",
        help="of the policy arms: trees where the prepared arrays hold some")  # fmt: skip
    add("--prompts", type=int, default=28, help="held-out prompts, balanced over categories")
    add("--cost-prompts", type=int, default=7, help="calibration prompts that T(L) is measured on")
    add("--tokens", type=int, default=96, help="of each answer")
    add("--cost-tokens", type=int, default=30, help="about, of each answer of the cost run")
    add("--stage", choices=CHOICES, default="exact", help="last stage to run")
    add("--limit", type=float, default=240.0, metavar="S", help="of the whole run")
    add("--ignore-eos", action="store_true", help="decode on behind the end token")
    add("--unpadded", action="store_true", help="the pair as it is")
    add("--cpu", action="store_true", help="without a GPU: fp32, interpreted, to try the script")
    add("--quick", action="store_true", help="four lengths in the cost run")
    add("--out", type=Path, default=None, help="folder of the result file")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.trace, options.out, model=options.model, layers=options.layers)
        return
    if not torch.cuda.is_available() and not options.cpu:
        print("gpu_decode measures on a CUDA device, and there is none: run it on a GPU")
        sys.exit(EnvironmentMissing.exit_code)
    run = Run(options)
    # A run that is told to end keeps what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with torch.inference_mode():
            for name in CHOICES:
                if not run.stage(name, getattr(run, name)) or name == options.stage:
                    break
    finally:
        run.write()
    if run.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
