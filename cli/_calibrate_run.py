"""What `hybridspec calibrate` does: plan, record, fit, write."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hybridspec.artifacts.bundle import load_bundle, write_calibration
from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.calibrate.fit import fit_calibration
from hybridspec.calibrate.plots import plot_reliability
from hybridspec.calibrate.rounds import TraceIdentity, trace_identity
from hybridspec.calibrate.trace import TraceWriter, read_trace
from hybridspec.cli import _calibrate_report as report
from hybridspec.cli._bundle_folder import beside, check_bundle_folder, command_line
from hybridspec.cli._calibrate_plan import Plan, Request, make_plan
from hybridspec.cli._calibrate_sglang_run import check_request
from hybridspec.cli._calibrate_sglang_run import record as record_in_sglang
from hybridspec.cli._output import Output
from hybridspec.cli._sglang_server import warn_of_installation
from hybridspec.collect import collect, group_prompts
from hybridspec.errors import Interrupted, NotEnoughData, UsageError
from hybridspec.pricing import TRACE_KEY, fit_bundle_throughput, overall, trace_reference
from hybridspec.provenance import provenance

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine


def run(request: Request, output: Output) -> None:
    """Do what the command line asks."""
    check_bundle_folder(request.out)
    if request.engine == "sglang":
        check_request(request)
    if request.from_trace is not None:
        _refuse_beside_from_trace(request)
        trace_folder = request.from_trace
        trace = read_trace(trace_folder)
        identity = _identity_of(trace_identity(trace, path=trace_folder))
    else:
        trace_folder = request.trace or beside(request.out, ".trace")
        plan = make_plan(request)
        if request.dry_run:
            if request.engine == "sglang" and request.url is None:
                warn_of_installation(output)
            report.tell_plan(plan, trace_folder, request.out, output)
            return
        if request.engine == "sglang":
            record_in_sglang(plan, trace_folder, request, output)
        else:
            record(plan, trace_folder, resume=request.resume, output=output)
        trace, identity = read_trace(trace_folder), plan.calibration
    try:
        _fit(request, trace_folder, trace, identity, output)
    except KeyboardInterrupt:
        words = ["hybridspec", "calibrate", "--from-trace", str(trace_folder)]
        words += ["--model", request.model, "--seed", str(request.seed)]
        line = shlex.join([*words, "--out", str(request.out)])
        raise Interrupted(
            f"the trace in {trace_folder} is complete and kept; run `{line}` to fit it"
        ) from None


def _fit(
    request: Request,
    trace_folder: Path,
    trace: pa.Table,
    identity: CalibrationIdentity,
    output: Output,
) -> None:
    output.note(f"fitting hazards on {trace.num_rows} rounds")
    result = fit_calibration(trace, model=request.model, seed=request.seed)
    content_id = write_calibration(
        request.out,
        identity=identity,
        hazard=result.hazard,
        routing=result.routing,
        reliability=result.reliability,
        metrics=result.metrics,
        trees=result.trees,
        temperatures=result.temperatures,
        provenance={
            **provenance("calibrate", _settings(request, trace)),
            TRACE_KEY: trace_reference(trace_folder, request.out),
        },
    )
    plot_reliability(
        result.reliability, result.metrics, request.out / "plots", model=result.summary.model
    )
    rates = _price(request, trace, output)
    report.tell_result(
        request.out, trace_folder, trace, result, content_id=content_id, rates=rates, output=output
    )


def record(plan: Plan, folder: Path, *, resume: bool, output: Output) -> None:
    """Record the plan's rounds into a trace folder; loads the pair only if some are missing."""

    def load_engine() -> Engine:
        from hybridspec.reference.loading import load_pair

        output.note(
            f"loading {plan.folders.target} ({plan.placement.dtype} on {plan.placement.device}, "
            f"{plan.placement.threads} threads)"
        )
        return load_pair(
            plan.folders.target,
            plan.folders.drafter,
            dtype=plan.placement.dtype,
            device=plan.placement.device,
            max_batch=plan.identity.group_size,
            max_context=plan.max_context,
        )

    num_groups = len(group_prompts(plan.prompts, plan.identity.group_size))
    output.note(f"recording {len(plan.prompts)} prompts into {folder}")
    with TraceWriter.open(folder, plan.identity, num_groups=num_groups, resume=resume) as writer:
        done = collect(
            load_engine,
            plan.prompts,
            writer,
            record_routes=plan.record_routes,
            progress=partial(output.progress, "recording"),
        )
    if done.groups_kept:
        output.note(
            f"{done.groups_kept} of {num_groups} groups of prompts were recorded before and kept"
        )


def _identity_of(trace: TraceIdentity) -> CalibrationIdentity:
    return CalibrationIdentity(
        target_digest=trace.target_digest,
        drafter_digest=trace.drafter_digest,
        dtype=trace.dtype,
        temperature=trace.temperature,
        top_p=trace.top_p,
        prompts_digest=trace.prompts_digest,
    )


def _refuse_beside_from_trace(request: Request) -> None:
    given = {
        "TARGET": request.target,
        "--drafter": request.drafter,
        "--prompts": request.prompts,
        "--trace": request.trace,
        "--resume": request.resume or None,
        "--dry-run": request.dry_run or None,
        "--url": request.url,
        "flags behind --": request.flags or None,
    }
    surplus = [name for name, value in given.items() if value is not None]
    if surplus:
        raise UsageError(
            f"{surplus[0]} is given beside --from-trace, which decodes nothing and reads "
            "everything from the trace: leave one of them out"
        )


def _settings(request: Request, trace: pa.Table) -> dict[str, Any]:
    identity = trace_identity(trace, path="trace")
    return {
        "max_new_tokens": identity.max_new_tokens,
        "temperature": identity.temperature,
        "top_p": identity.top_p,
        "model": request.model,
        "seed": request.seed,
        "rounds": trace.num_rows,
        "prompts": len(trace.column("prompt_id").unique()),
    }


def _price(request: Request, trace: pa.Table, output: Output) -> dict[str, float]:
    """Fit the throughput if the bundle has costs too; predicted tokens/s of each policy."""
    out = request.out
    if load_bundle(out).cost is None:
        line = command_line(
            "profile-latency",
            request.target,
            request.drafter,
            engine=request.engine,
            device=request.device,
            dtype=request.dtype,
            threads=request.threads,
            out=out,
        )
        output.note(f"next: `{line}` adds this machine's costs, which the policy needs")
        return {}
    try:
        rates = fit_bundle_throughput(out, trace)
    except NotEnoughData as error:
        output.warn(f"the throughput is not fitted: {error}")
        return {}
    return {} if rates is None else overall(rates)
