"""What `hybridspec profile-latency` does: measure rounds, fit costs, write."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from hybridspec.artifacts.bundle import load_bundle, write_cost
from hybridspec.artifacts.identity import identity_fields
from hybridspec.calibrate.prompts import load_prompts
from hybridspec.cli import _profile_report as report
from hybridspec.cli._bundle_folder import check_bundle_folder, check_same_pair, command_line
from hybridspec.cli._output import Output
from hybridspec.cli._profile_budget import share_of_budget
from hybridspec.cli._profile_plan import EXPERT_LENGTHS, WARMUP, Plan, Request, make_plan
from hybridspec.costmodels.anchors import anchors_of_samples, write_anchors
from hybridspec.costmodels.expert import ExpertSlope, fit_expert_slope
from hybridspec.costmodels.export import bundle_experts, bundle_samples
from hybridspec.costmodels.measure import Interrupted as Stopped
from hybridspec.costmodels.plots import plot_expert_slope, plot_step_costs
from hybridspec.costmodels.probe import RoundProbe
from hybridspec.costmodels.step import StepFit, fit_step_costs
from hybridspec.costmodels.sweep import EXPERT_SAMPLES_SCHEMA, measure_experts, measure_steps
from hybridspec.errors import BundleError, Interrupted, NotEnoughData
from hybridspec.pricing import fit_bundle_throughput, overall, remembered_trace
from hybridspec.provenance import provenance

# Share of the budget for rounds; the rest is for rounds with forced experts.
_STEP_SHARE = 0.75


def run(request: Request, output: Output) -> None:
    """Do what the command line asks."""
    if request.anchors is None:
        check_bundle_folder(request.out)
    plan = make_plan(request)
    if request.anchors is None:
        check_same_pair(request.out, plan.folders, named=request.target is not None)
    if request.dry_run:
        report.tell_plan(plan, request.anchors or request.out, output)
        return
    samples, experts, num_layers = measure(plan, seed=request.seed, output=output)
    if request.anchors is not None:
        anchors = anchors_of_samples(plan.identity, samples)
        write_anchors(request.anchors, anchors)
        report.tell_anchors(request.anchors, anchors, output)
        return
    slope = _slope(experts, num_layers, output)
    fit = fit_step_costs(samples, expert=slope)
    for warning in fit.warnings:
        output.warn(warning)
    settings = {
        "contexts": list(plan.contexts),
        "batch_sizes": list(plan.batch_sizes),
        "readings_per_case": fit.readings_per_case,
        "worst_drift": fit.worst_drift,
        "seed": request.seed,
    }
    content_id = write_cost(
        request.out,
        identity=plan.identity,
        step=fit.table,
        samples=bundle_samples(samples),
        experts=bundle_experts(experts, num_layers=max(num_layers, 1)),
        throughput=None,
        provenance=provenance("profile-latency", settings),
    )
    _plot(plan, fit, slope, experts, request.out / "plots")
    calibrate = command_line(
        "calibrate",
        request.target,
        request.drafter,
        device=request.device,
        dtype=request.dtype,
        threads=request.threads,
        out=request.out,
    )
    rates = price(request.out, calibrate, output)
    report.tell_result(request.out, fit, slope, content_id=content_id, rates=rates, output=output)


def measure(plan: Plan, *, seed: int, output: Output) -> tuple[pa.Table, pa.Table, int]:
    """Step samples, expert samples (possibly none) and the number of layers with experts.

    Raises:
        Interrupted: Ctrl-C; nothing is written.
        QualityGate: see `measure_interleaved`.
    """
    output.note(
        f"loading {plan.folders.target} ({plan.placement.dtype} on {plan.placement.device}, "
        f"{plan.placement.threads} threads)"
    )
    probe = _probe(plan)
    sweeps = WARMUP + plan.repeats
    try:
        with (
            share_of_budget(plan.budget_s, _STEP_SHARE, "rounds") as step_s,
            _rounds(output, "measuring rounds", sweeps=sweeps, budget_s=step_s) as progress,
        ):
            samples = measure_steps(
                probe,
                batch_sizes=plan.batch_sizes,
                context_tokens=plan.contexts,
                repeats=plan.repeats,
                budget_s=step_s,
                seed=seed,
                warmup=WARMUP,
                progress=progress,
                lengths=plan.lengths,
            )
        if plan.expert_rounds == 0:
            return samples, EXPERT_SAMPLES_SCHEMA.empty_table(), 0
        with (
            share_of_budget(plan.budget_s, 1.0 - _STEP_SHARE, "experts") as expert_s,
            _rounds(output, "measuring experts", sweeps=sweeps, budget_s=expert_s) as progress,
        ):
            experts = measure_experts(
                probe,
                verify_lengths=EXPERT_LENGTHS,
                context_tokens=plan.contexts[0],
                repeats=plan.repeats,
                budget_s=expert_s,
                seed=seed,
                warmup=WARMUP,
                progress=progress,
            )
    except (Stopped, KeyboardInterrupt) as stop:
        whole = f" with {stop.measured.sweeps} whole sweeps" if isinstance(stop, Stopped) else ""
        raise Interrupted(
            f"measuring ended early{whole} and nothing was written: a table needs all its cells; "
            "--quick and --budget bound the time"
        ) from None
    return samples, experts, probe.num_layers


def _probe(plan: Plan) -> RoundProbe:
    """The pair, loaded, as something that can be measured."""
    from hybridspec.demo import assets
    from hybridspec.reference.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(plan.folders.target)
    _, _, prompts_file = assets.require()
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(prompts_file)]
    texts = [ids for ids in texts if ids]
    facts = {name: str(value) for name, value in identity_fields(plan.identity).items()}
    assert plan.folders.drafter is not None
    if plan.captured:
        from hybridspec.reference.gpu.pair_probe import pair_probe

        return pair_probe(
            plan.folders.target,
            plan.folders.drafter,
            device=plan.placement.device,
            max_batch=max(plan.batch_sizes),
            max_context=plan.max_context,
            texts=texts,
            identity=facts,
            control=plan.control,
        )
    from hybridspec.reference.loading import load_pair
    from hybridspec.reference.probe import VARIANTS, EngineProbe

    engine = load_pair(
        plan.folders.target,
        plan.folders.drafter,
        dtype=plan.placement.dtype,
        device=plan.placement.device,
        max_batch=VARIANTS * max(plan.batch_sizes),
        max_context=plan.max_context,
    )
    return EngineProbe(engine, texts, facts)


@contextmanager
def _rounds(
    output: Output, name: str, *, sweeps: int, budget_s: float
) -> Iterator[Callable[[int, int], None]]:
    """Progress in the form that the sweep calls it: (rounds done, rounds planned).

    Args:
        sweeps: planned, warm-up included.
        budget_s: after which measuring ends with the sweep that is running.
    """
    with output.progress(name, 1.0) as bar:
        start, shown = time.monotonic(), 0.0

        def update(done: int, planned: int) -> None:
            nonlocal shown
            spent_s = time.monotonic() - start
            end = _last_round(done, planned, planned // sweeps, spent_s, budget_s)
            # A slow start promises an early end, which must not turn the bar back later.
            share = max(shown, done / end)
            bar.advance(share - shown)
            shown = share

        yield update


def _last_round(done: int, planned: int, cases: int, spent_s: float, budget_s: float) -> int:
    """The round that will be the last one at the pace so far.

    Measuring ends between sweeps of `cases` rounds, at the earliest behind the first one after the
    warm-up.
    """
    if spent_s <= 0.0:
        return planned
    rounds = max(done * budget_s / spent_s, done)
    return min(planned, max(math.ceil(rounds / cases), WARMUP + 1) * cases)


def _slope(experts: pa.Table, num_layers: int, output: Output) -> ExpertSlope | None:
    if num_layers == 0:
        return None
    slope = fit_expert_slope(experts, num_layers=num_layers)
    output.note(slope.line())
    return slope


def _plot(
    plan: Plan, fit: StepFit, slope: ExpertSlope | None, experts: pa.Table, folder: Path
) -> None:
    identity = plan.identity
    title = f"{identity.device}, {identity.engine} {identity.engine_version}, {identity.dtype}"
    plot_step_costs(fit.table, folder, title=f"{title}, {identity.threads} threads")
    if slope is not None:
        plot_expert_slope(slope, experts, folder)


def price(out: Path, calibrate: str, output: Output) -> dict[str, float]:
    """Fit the throughput if the bundle's trace is at hand; predicted tokens/s of each policy.

    Args:
        calibrate: the command that adds the pair's hazards, told where there are none yet.
    """
    calibration = load_bundle(out).calibration
    if calibration is None:
        output.note(f"next: `{calibrate}` adds the pair's hazards, which the policy needs")
        return {}
    remedy = f"run `hybridspec calibrate --from-trace DIR --out {out}` with the pair's trace"
    try:
        trace = remembered_trace(out, calibration)
        if trace is None:
            output.warn(
                f"the throughput is not fitted, because the trace is not where it was: {remedy}"
            )
            return {}
        rates = fit_bundle_throughput(out, trace)
    except (NotEnoughData, BundleError) as error:
        output.warn(f"the throughput is not fitted ({error}): {remedy}")
        return {}
    return {} if rates is None else overall(rates)
