"""Cost of a round on the GPU at the shape of Qwen3.6-35B-A3B: controls, parts, experts, batches.

Random weights made on the card, routes forced to a chosen overlap, one captured round: draft 15,
features, select, layer 0 and router, correct, the other layers, accept, commit. What is checked
comes first: live rows are finite and do not depend on the length (bitwise, masked graph); a
mechanism gives the bits of its own launches, and bodies of fewer rows are as near to fp32 as those
of 16.

    python benchmarks/gpu_round.py [--limit 150] [--lengths 1-16] [--reuse 0.3] [--out DIR]

Every stage runs on its own; a stage that fails is reported with its traceback and the others go on.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from results_file import gpu, machine, write_results
from rounds.agreement import check_geometries, check_mechanisms
from rounds.bench import SEED, Bench, load
from rounds.parts import part_launches
from rounds.random_pair import distinct_of_prefixes, target_config
from rounds.subject import MAX_ROWS, Subject, compiling
from rounds.timing import Case, interleaved

from hybridspec.errors import QualityGate
from hybridspec.reference.gpu.capture import capture
from hybridspec.reference.gpu.control import CONTROL_NAMES, DEFAULT_BODIES, GraphControl
from hybridspec.reference.gpu.driver import driver
from hybridspec.reference.gpu.engine import GpuEngine

BASE_CONTEXT = 1024
CONTEXTS = (1024, 4096, 16384, 32768)
BATCHES = (2, 4, 8)
PART_LENGTHS = (1, 4, 16)
# Those whose launches depend on how many rows a graph is for.
OWN_PARTS = ("dense", "moe", "gdn", "attention", "lm_head", "draft_context", "control_accept")
AGREEING_LENGTHS = (1, 2, 3, 4, 7, 11, 16)
REUSES = (0.0, 0.3, 0.6, 0.9)
MIX_ROUNDS = 64
ROOM = 4096
# About what the stages behind compiling take, those that may be left out aside.
MEASURING_S = 40.0
SNAPSHOT_ROWS = 16
_MIB = 2**20


def make_subject(bench: Bench, weights: Any, *, batch: int, room: int) -> Subject:
    engine = GpuEngine(*weights, batch=batch, max_context=room)
    return Subject(engine, bench.routes(bench.options.reuse, batch))


def compile_all(bench: Bench, weights: Any, lengths: Sequence[int], room: int) -> list[int]:
    """Start compilations of whole waves of lengths at once; nothing is launched in here.

    Returns:
        the lengths that there was time for.
    """
    began, deadline = bench.deadline.elapsed_s, bench.deadline
    first = sorted({*DEFAULT_BODIES})
    others = [length for length in lengths if length not in first]
    with compiling():
        subject = make_subject(bench, weights, batch=1, room=room)
        subject.placed.plain()
        for rows in first:
            subject.launch(rows)
    took_s = deadline.elapsed_s - began
    deadline.say(f"  lengths {first} in {took_s:.1f} s")
    needs_s = MEASURING_S + took_s * len(others) / len(first)
    if others and deadline.allows("per-length graphs of all lengths", needs_s=needs_s):
        with compiling():
            for rows in others:
                subject.launch(rows)
        first += others
    torch.cuda.synchronize()
    bench.summary["compile_s"] = round(deadline.elapsed_s - began, 1)
    return sorted(set(lengths) & set(first))


def check_masked(bench: Bench, subject: Subject, masked: GraphControl) -> torch.Tensor:
    """Live rows of every length are bitwise those of length 16; returns the logits of 16."""
    full = subject.outcome(masked.replay, MAX_ROWS)
    off = []
    for length in range(1, MAX_ROWS + 1):
        found = subject.outcome(masked.replay, length)
        if not torch.equal(found, full[:length]):
            off.append(length)
    bench.summary["masked_bitwise_lengths"] = MAX_ROWS - len(off)
    if off:
        raise QualityGate(f"rows of the masked graph depend on the length at lengths {off}")
    return full


def lengths_stage(
    bench: Bench, subject: Subject, masked: GraphControl, lengths: Sequence[int]
) -> dict[int, float]:
    """T(L) of per-length graphs against the masked graph; returns the former."""
    graphs = {length: subject.per_length(length) for length in lengths}
    plain = subject.plain()
    cases: dict[str, Case] = {"plain": subject.case(plain.replay, 1)}
    for length, graph in graphs.items():
        cases[f"per-length {length}"] = subject.case(graph.replay, length)
        cases[f"masked {length}"] = subject.case(masked.replay, length)
    found = interleaved(cases, bench.repeats)
    bench.summary["t0_us"] = round(bench.add("plain", found["plain"], length=0), 1)
    distinct = distinct_of_prefixes(bench.routes(bench.options.reuse))
    per_length, ratio = {}, {}
    for length in graphs:
        facts = {"length": length, "distinct_experts_a_layer": round(distinct[length - 1], 2)}
        per_length[length] = bench.add("per_length", found[f"per-length {length}"], **facts)
        ratio[length] = bench.add("masked", found[f"masked {length}"], **facts) / per_length[length]
        bench.deadline.say(
            f"  L={length:2d} per-length {per_length[length]:8.1f} us, masked x{ratio[length]:.3f}"
        )
    bench.summary["masked_over_per_length_max"] = round(max(ratio.values()), 4)
    bench.summary["masked_over_per_length_lengths"] = len(ratio)
    if {4, 16} <= set(per_length):
        bench.summary["t16_over_t4"] = round(per_length[16] / per_length[4], 4)
        both = [found[f"masked {length}"].median_us for length in (16, 4)]
        bench.summary["t16_over_t4_masked"] = round(both[0] / both[1], 4)
    return per_length


def controls_stage(
    bench: Bench, subject: Subject, controls: dict[str, GraphControl], per_length: dict[int, float]
) -> None:
    """Lengths that the device chooses, round by round, under each mechanism."""
    rng = random.Random(7)
    mixes = {
        "short": [rng.randint(1, 6) for _ in range(MIX_ROUNDS)],
        "uniform": [rng.randint(1, 16) for _ in range(MIX_ROUNDS)],
    }
    for mix, lengths in mixes.items():
        schedule = torch.tensor(lengths, dtype=torch.int32, device=bench.device)[:, None]
        cases = {name: subject.mix(control.replay, schedule) for name, control in controls.items()}
        found = interleaved(cases, 5)
        for name, latency in found.items():
            median = bench.add("gpu_chosen", latency, mix=mix, control=name)
            bench.summary[f"{mix}_mix_{name}_us"] = round(median, 1)
        text = ", ".join(f"{name} {found[name].median_us:.1f}" for name in found)
        if set(lengths) <= set(per_length):
            ideal = statistics.mean(per_length[length] for length in lengths)
            bench.summary[f"{mix}_mix_per_length_us"] = round(ideal, 1)
            text += f"; mean of T(L) {ideal:.1f}"
        bench.deadline.say(f"  {mix} mix, us a round: {text}")


def parts_stage(bench: Bench, subject: Subject, per_length: dict[int, float]) -> None:
    """Launches of one kind alone, in the masked graph's geometry and in the length's own."""
    cases, kept = {}, {}
    # Acceptance of the control part reads them.
    subject.logits_RV.normal_()
    for length in PART_LENGTHS:
        launches = part_launches(subject.placed, subject.rules, rows=MAX_ROWS, length=length)
        kept[length] = launches
        for part, work in launches.items():
            subject.placed.force_length(length)
            graph = subject.graph(work)
            cases[f"{part} {length}"] = subject.case(graph.replay, length, poison=False)
        if length < MAX_ROWS:
            own = part_launches(subject.placed, subject.rules, rows=length, length=length)
            for part in OWN_PARTS:
                subject.placed.force_length(length)
                graph = subject.graph(own[part])
                cases[f"own {part} {length}"] = subject.case(graph.replay, length, poison=False)
    found = interleaved(cases, bench.repeats)
    for length in (n for n in PART_LENGTHS if n < MAX_ROWS):
        # Where the masked graph's extra time lies.
        extra = {}
        for part in OWN_PARTS:
            us = bench.add(
                "part_of_own_rows", found[f"own {part} {length}"], part=part, length=length
            )
            extra[part] = round(found[f"{part} {length}"].median_us - us, 1)
        bench.summary[f"masked_extra_{length}_us"] = extra
        bench.deadline.say(f"  L={length}, masked over its own rows: {extra} us")
    for length, parts in kept.items():
        medians = {
            part: bench.add("part", found[f"{part} {length}"], part=part, length=length)
            for part in parts
        }
        text = ", ".join(f"{part} {us:.0f}" for part, us in medians.items())
        bench.deadline.say(f"  L={length}: {text} us")
        bench.summary[f"parts_{length}_us"] = {p: round(us, 1) for p, us in medians.items()}
        if length == 4:
            bench.summary["control_us"] = round(medians["control"], 1)
        if length in per_length:
            # The pieces of control are in it already.
            whole = sum(us for part, us in medians.items() if not part.startswith("control_"))
            bench.summary[f"parts_{length}_share"] = round(whole / per_length[length], 4)
    if {4, 16} <= set(per_length):
        draft = found["draft 4"].median_us
        bench.summary["t16_over_t4_without_draft"] = round(
            (per_length[16] - draft) / (per_length[4] - draft), 4
        )


def experts_stage(bench: Bench, subject: Subject, masked: GraphControl) -> None:
    """What one more distinct expert of all layers costs, at lengths where only that differs."""
    points: list[tuple[int, float, float]] = []
    for reuse in REUSES:
        routes = bench.routes(reuse)
        subject.route(routes)
        distinct = distinct_of_prefixes(routes)
        cases = {str(length): subject.case(masked.replay, length) for length in (4, 8, 16)}
        for name, found in interleaved(cases, bench.repeats).items():
            length = int(name)
            facts = {"distinct_experts_a_layer": round(distinct[length - 1], 2)}
            us = bench.add("experts", found, length=length, reuse=reuse, **facts)
            points.append((length, distinct[length - 1], us))
    subject.route(bench.routes(bench.options.reuse))
    # One intercept a length: rows cost something themselves.
    means = {
        length: [statistics.mean(p[i] for p in points if p[0] == length) for i in (1, 2)]
        for length in {p[0] for p in points}
    }
    x = [distinct - means[length][0] for length, distinct, _ in points]
    y = [us - means[length][1] for length, _, us in points]
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    error = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    bench.summary["us_per_distinct_expert_all_layers"] = round(slope, 2)
    bench.summary["expert_slope_r2"] = round(1.0 - error / sum(b * b for b in y), 5)
    config = target_config(bench.shape)
    expert_bytes = 3 * config.hidden_size * config.expert_width * 2 * config.num_layers
    bench.summary["expert_tb_per_s"] = round(expert_bytes / slope / 1e6, 3)
    bench.deadline.say(f"  {slope:.1f} us a distinct expert over all layers")


def contexts_stage(bench: Bench, subject: Subject, masked: GraphControl) -> None:
    """One request at longer contexts."""
    plain = subject.plain()
    room = subject.engine.target.max_context
    for context in (c for c in CONTEXTS if c + ROOM // 2 <= room):
        subject.placed.place(context)
        cases = {"0": subject.case(plain.replay, 1)}
        cases |= {str(length): subject.case(masked.replay, length) for length in PART_LENGTHS}
        for name, found in interleaved(cases, bench.repeats).items():
            bench.add("context", found, context_tokens=context, length=int(name))
        tiles = {}
        for length, rows in ((4, 16), (4, 32), (4, 64), (16, 16), (16, 32), (16, 64)):
            work = part_launches(
                subject.placed, subject.rules, rows=MAX_ROWS, length=length, query_rows=rows
            )["attention"]
            subject.placed.force_length(length)
            graph = subject.graph(work)
            tiles[f"{length} {rows}"] = subject.case(graph.replay, length, poison=False)
        text = []
        for name, found in interleaved(tiles, bench.repeats).items():
            length, rows = (int(part) for part in name.split())
            facts = {"length": length, "query_rows": rows, "context_tokens": context}
            text.append(f"L={length} tiles of {rows} {bench.add('attention', found, **facts):.0f}")
        bench.deadline.say(f"  context {context}: attention in us: {', '.join(text)}")
    subject.placed.place(BASE_CONTEXT)


def batch_stage(bench: Bench, weights: Any, batch: int) -> None:
    """Several requests of the same length at a short context; forced routes of their own."""
    with compiling():
        subject = make_subject(bench, weights, batch=batch, room=ROOM)
        subject.launch(MAX_ROWS)
        subject.placed.plain()
    subject = make_subject(bench, weights, batch=batch, room=ROOM)
    subject.placed.place(BASE_CONTEXT)
    masked, plain = subject.controlled("masked", DEFAULT_BODIES), subject.plain()
    cases = {"0": subject.case(plain.replay, 1)}
    cases |= {str(length): subject.case(masked.replay, length) for length in PART_LENGTHS}
    for name, found in interleaved(cases, max(5, bench.repeats // 2)).items():
        us = bench.add("batch", found, batch=batch, context_tokens=BASE_CONTEXT, length=int(name))
        bench.deadline.say(f"  batch {batch} L={name}: {us:.0f} us")
    for length in PART_LENGTHS:
        case = cases[str(length)]
        case.before()
        case.replay()
        if subject.placed.rows_run() != batch * length:
            raise QualityGate(
                f"batch {batch}: {subject.placed.rows_run()} rows ran where {batch * length} were "
                "asked for"
            )


def measure(bench: Bench) -> None:
    """All stages, the ones that the summary needs first."""
    options, deadline = bench.options, bench.deadline
    lengths = options.lengths
    room = ROOM if options.small else max(CONTEXTS) + ROOM
    with bench.stage("weights"):
        weights = load(bench)
    if bench.failed:
        return
    with bench.stage("compiling"):
        lengths = compile_all(bench, weights, lengths, room)
    before = len(bench.failed)
    with bench.stage("engine"):
        subject = make_subject(bench, weights, batch=1, room=room)
        subject.placed.place(BASE_CONTEXT)
        gdn = subject.engine.target.gdn
        bench.summary["gdn_snapshots_mib_a_request"] = round(
            SNAPSHOT_ROWS * gdn.state_XSHVK.numel() * 4 / _MIB, 1
        )
        factors = getattr(gdn, "factors", None)
        if factors is not None:
            kept = (factors.key_XRHTK, factors.update_XRHTV, factors.decay_XRHT)
            size = sum(t.numel() * t.element_size() for t in kept)
            bench.summary["gdn_factors_mib_a_request"] = round(size / _MIB, 2)
            # Inputs of the convolution, which the windows are advanced from.
            rows = gdn.windows_XSCW[..., 0].numel() * MAX_ROWS
            size = rows * gdn.windows_XSCW.element_size()
            bench.summary["gdn_conv_rows_mib_a_request"] = round(size / _MIB, 2)
        masked = subject.controlled("masked", DEFAULT_BODIES)
    if len(bench.failed) > before:
        return
    with bench.stage("launches of a round"):
        pool = torch.cuda.graph_pool_handle()
        kept = capture(lambda: subject.launch(MAX_ROWS), pool=pool, keep_graph=True)
        bench.summary["masked_graph_nodes"] = driver().count_nodes(kept.raw_cuda_graph())
    full = None
    with bench.stage("masked graph: rows do not depend on the length"):
        full = check_masked(bench, subject, masked)
    controls: dict[str, GraphControl] = {"masked": masked}
    names = {name: DEFAULT_BODIES for name in CONTROL_NAMES if name != "masked"}
    if set(lengths) >= set(range(1, MAX_ROWS + 1)):
        names |= {"switch16": tuple(range(1, MAX_ROWS + 1))}
    for name, bodies in names.items():
        with bench.stage(f"capturing {name}"):
            controls[name] = subject.controlled(name.removesuffix("16"), bodies)
    per_length: dict[int, float] = {}
    with bench.stage("T(L): per-length graphs against the masked graph"):
        per_length = lengths_stage(bench, subject, masked, lengths)
    with bench.stage("parts"):
        parts_stage(bench, subject, per_length)
    with bench.stage("experts"):
        experts_stage(bench, subject, masked)
    if deadline.allows("contexts", needs_s=5.0):
        with bench.stage("contexts"):
            contexts_stage(bench, subject, masked)
    with bench.stage("lengths chosen on the device"):
        controls_stage(bench, subject, controls, per_length)
    outcomes: dict[tuple[str, int], torch.Tensor] = {}
    with bench.stage("mechanisms give the bits of their launches"):
        bodies = {name: names.get(name, (MAX_ROWS,)) for name in controls}
        outcomes = check_mechanisms(bench, subject, controls, bodies, AGREEING_LENGTHS)
    with bench.stage("geometries against fp32"):
        if full is None:
            full = subject.outcome(masked.replay, MAX_ROWS)
        check_geometries(bench, subject, outcomes, masked, full, context=BASE_CONTEXT)
    for batch in BATCHES:
        if deadline.allows(f"batch {batch}", needs_s=20.0):
            with bench.stage(f"batch {batch}"):
                batch_stage(bench, weights, batch)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds to stay within")
    parser.add_argument("--lengths", type=length_range, default="1-16", help="per-length graphs")
    parser.add_argument("--reuse", type=float, default=0.3, help="chance to repeat an expert")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    return parser.parse_args()


def length_range(text: str) -> list[int]:
    """`1-16` or `1,4,16` as numbers."""
    if "-" in text:
        first, last = (int(part) for part in text.split("-"))
        return list(range(first, last + 1))
    return [int(part) for part in text.split(",")]


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device", file=sys.stderr)
        raise SystemExit(4)
    signal.signal(signal.SIGTERM, stop)
    torch.manual_seed(SEED)
    where = {**machine(), **gpu()}
    bench = Bench(options)
    stopped = False
    try:
        with torch.no_grad():
            measure(bench)
    except KeyboardInterrupt:
        stopped = True
        bench.deadline.say("stopped; what was measured is kept")
    bench.summary |= {
        "complete": not (stopped or bench.failed or bench.deadline.left_out),
        "failed": bench.failed,
        "left_out": bench.deadline.left_out,
        "elapsed_s": round(bench.deadline.elapsed_s, 1),
    }
    path = write_results(
        "gpu_round_small" if options.small else "gpu_round",
        rows=bench.rows,
        summary=bench.summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "numpy"),
        out=options.out,
    )
    for key, value in bench.summary.items():
        print(f"{key:36s} {value}")
    print(path)
    if stopped or bench.failed:
        raise SystemExit(130 if stopped else 5)


if __name__ == "__main__":
    main()
