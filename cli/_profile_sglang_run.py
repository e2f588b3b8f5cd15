"""What `hybridspec profile-latency --engine sglang` does: time rounds of SGLang, fit, write."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridspec.artifacts.bundle import write_cost
from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.cli import _profile_report as report
from hybridspec.cli._bundle_folder import check_bundle_folder, check_same_pair, command_line
from hybridspec.cli._output import Output, format_seconds
from hybridspec.cli._profile_budget import share_of_budget
from hybridspec.cli._profile_plan import EXPERT_LENGTHS
from hybridspec.cli._profile_run import price
from hybridspec.cli._profile_sglang_experts import NO_EXPERTS, Experts, measure_experts
from hybridspec.cli._serve_sglang_run import refuse_options
from hybridspec.cli._sglang_server import check_server, server, warn_of_installation
from hybridspec.costmodels.expert import ExpertSlope
from hybridspec.costmodels.export import bundle_experts, bundle_samples
from hybridspec.costmodels.measure import Interrupted as Stopped
from hybridspec.costmodels.plots import plot_expert_slope, plot_step_costs
from hybridspec.costmodels.step import StepFit, fit_step_costs
from hybridspec.costmodels.sweep import expert_grid
from hybridspec.errors import EnvironmentMissing, Interrupted, UsageError
from hybridspec.pair import PairFolders, pair_folders
from hybridspec.provenance import provenance
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.identity import engine_cost_identity
from hybridspec.sglang_plugin.installation import ALGORITHM, check_installation
from hybridspec.sglang_plugin.launch import (
    MEASURED_FLAGS,
    Launch,
    arguments,
    check_flags,
    plain_arguments,
    with_defaults,
    write_config,
)
from hybridspec.sglang_plugin.server_api import ServerApi
from hybridspec.sglang_plugin.server_process import free_port
from hybridspec.sglang_plugin.server_rounds import (
    MOST_TOKENS,
    Grid,
    Readings,
    bundled_texts,
    measure_server,
    step_samples,
)

STANDARD_GRID = ((512, 4096), (1, 2, 4, 8), 5)
QUICK_GRID = ((512,), (1, 4), 5)
LENGTHS = range(1, BLOCK_SIZE + 1)
# Shares of the budget: drafted lengths are 16 of 17, and forced routes are of one request at one
# context. Without experts the rounds of a drafter have their share.
_PLAIN_SHARE, _EXPERTS_SHARE = 0.1, 0.15


@dataclass(frozen=True)
class Request:
    """The command line, in its words; None leaves a grid to `quick`."""

    target: Path | None
    drafter: Path | None
    out: Path
    contexts: tuple[int, ...] | None
    batch_sizes: tuple[int, ...] | None
    repeats: int | None
    budget_s: float
    quick: bool
    url: str | None
    plain_url: str | None
    seed: int
    dry_run: bool
    given: frozenset[str]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What will be measured, settled before anything starts.

    Attributes:
        readings: of rounds, warm-up included.
        expert_pairs: (verify length, distinct experts of every layer) with forced routes; none of
            models without experts, and none at servers that run already.
        num_layers: of the target; all have experts or none.
    """

    folders: PairFolders
    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    repeats: int
    readings: int
    expert_pairs: tuple[tuple[int, int], ...]
    num_layers: int

    @property
    def drafted_share(self) -> float:
        """Share of the budget for rounds of forced lengths."""
        return 1.0 - _PLAIN_SHARE - (_EXPERTS_SHARE if self.expert_pairs else 0.0)

    @property
    def expert_readings(self) -> int:
        """Readings with forced routes, warm-up included."""
        return (1 + self.repeats) * len(self.expert_pairs)


def run(request: Request, output: Output) -> None:
    """Do what the command line asks."""
    check_bundle_folder(request.out)
    check_usage(request)
    if request.url is None and not request.dry_run:
        check_installation()
    plan = make_plan(request)
    check_same_pair(request.out, plan.folders, named=True)
    if request.dry_run:
        if request.url is None:
            warn_of_installation(output)
        _tell_plan(plan, request, output)
        return
    gpu, grid = _gpu(), _grid(request, plan)
    logs, keeps_logs = Path(tempfile.mkdtemp(prefix="hybridspec-profile-")), False
    try:
        drafted, identity = _drafted(request, plan, grid, gpu, logs, output)
        plain = _plain(request, plan, grid, logs, output)
    except (Stopped, KeyboardInterrupt):
        raise Interrupted(
            "measuring ended early and nothing was written: a table needs all its cells; --quick "
            "and --budget bound the time"
        ) from None
    samples = step_samples(drafted, plain)
    # Written now, so that nothing that happens to the third server takes it away.
    written = _write(request, plan, samples, NO_EXPERTS, identity)
    for warning in written.fit.warnings:
        output.warn(warning)
    if plan.expert_pairs:
        ended_early = Interrupted(
            f"rounds with forced routes ended early: {request.out} has the costs of all lengths "
            "and no price of an expert"
        )
        try:
            experts = _experts(request, plan, grid, logs, output)
        except KeyboardInterrupt:
            raise ended_early from None
        if experts.interrupted:
            raise ended_early
        if experts is NO_EXPERTS:
            output.note(f"the servers' logs are in {logs}")
            keeps_logs = True
        else:
            said = written.fit.warnings
            written = _write(request, plan, samples, experts, identity)
            for warning in written.fit.warnings:
                if warning not in said:
                    output.warn(warning)
    if not keeps_logs:
        shutil.rmtree(logs, ignore_errors=True)
    calibrate = command_line(
        "calibrate", request.target, request.drafter, engine="sglang", out=request.out
    )
    rates = price(request.out, calibrate, output)
    report.tell_result(
        request.out,
        written.fit,
        written.slope,
        content_id=written.content_id,
        rates=rates,
        output=output,
    )


def check_usage(request: Request) -> None:
    """Refuse options that do not fit together, before anything is read."""
    refuse_options(request.given)
    check_flags(request.flags, MEASURED_FLAGS)
    if request.target is None:
        raise UsageError(
            "--engine sglang needs TARGET and --drafter; the embedded pair runs in --engine "
            "reference alone"
        )
    if (request.url is None) != (request.plain_url is None):
        raise UsageError(
            "--url and --plain-url go together: plain rounds are priced too, and a server with a "
            "drafter has none; give both, or neither to have the servers started"
        )
    if request.url is not None and request.flags:
        raise UsageError("flags behind -- are for servers that the command starts: leave --url out")


def make_plan(request: Request) -> Plan:
    """Settle the grid and refuse what cannot be measured, before any server starts."""
    from hybridspec.reference.config import check_pair, load_drafter_config, load_target_config

    folders = pair_folders(request.target, request.drafter)
    assert folders.drafter is not None
    config = load_target_config(folders.target)
    check_pair(config, load_drafter_config(folders.drafter), folders.drafter)
    contexts, batch_sizes, repeats = QUICK_GRID if request.quick else STANDARD_GRID
    contexts = _contexts(request.contexts, contexts, config.max_position_embeddings)
    batch_sizes = request.batch_sizes or batch_sizes
    repeats = request.repeats or repeats
    readings = (1 + repeats) * len(contexts) * len(batch_sizes) * (BLOCK_SIZE + 1)
    pairs: list[tuple[int, int]] = []
    if config.num_experts and request.url is None:
        pairs = expert_grid(
            verify_lengths=EXPERT_LENGTHS,
            experts_per_token=config.experts_per_token,
            num_experts=config.num_experts,
        )
    return Plan(folders, contexts, batch_sizes, repeats, readings, tuple(pairs), config.num_layers)


def _contexts(
    asked: tuple[int, ...] | None, default: tuple[int, ...], most: int
) -> tuple[int, ...]:
    """Contexts that fit into a target of `most` positions; those asked for all have to."""
    if asked is None:
        fitting = tuple(context for context in default if context + MOST_TOKENS <= most)
        if not fitting:
            raise UsageError(
                f"the target holds {most} tokens; the smallest default context {min(default)} "
                f"needs {min(default) + MOST_TOKENS} with room for the rounds behind it: give "
                "--contexts N,N,..."
            )
        return fitting
    if max(asked) + MOST_TOKENS > most:
        raise UsageError(
            f"--contexts {max(asked)} with room for the rounds behind it needs "
            f"{max(asked) + MOST_TOKENS} tokens; the target holds {most}: lower it"
        )
    return asked


def _drafted(
    request: Request, plan: Plan, grid: Grid, gpu: Any, logs: Path, output: Output
) -> tuple[Readings, CostIdentity]:
    flags = with_defaults(request.flags, max_batch=max(plan.batch_sizes))
    launch = Launch(
        str(plan.folders.target), str(plan.folders.drafter), "127.0.0.1", free_port(), flags=flags
    )
    variables = {"HYBRIDSPEC_CONFIG": str(write_config(PluginConfig()))}
    with server(
        request.url,
        arguments(launch),
        port=launch.port,
        variables=variables,
        log=logs / "drafted.log",
        output=output,
    ) as api:
        info = api.info()
        _check_server(info, plan, algorithm=ALGORITHM)
        identity = engine_cost_identity(
            info,
            plan.folders,
            version=str(info["version"]),
            gpu_name=gpu.name,
            multiprocessors=gpu.multi_processor_count,
            torch_version=gpu.torch_version,
            max_batch=max(plan.batch_sizes),
        )
        share = plan.drafted_share
        return _measure(api, request, plan, grid, LENGTHS, share, output), identity


def _plain(request: Request, plan: Plan, grid: Grid, logs: Path, output: Output) -> Readings:
    flags = with_defaults(request.flags, max_batch=max(plan.batch_sizes))
    port = free_port()
    command = plain_arguments(str(plan.folders.target), "127.0.0.1", port, flags)
    with server(
        request.plain_url,
        command,
        port=port,
        variables={},
        log=logs / "plain.log",
        output=output,
    ) as api:
        _check_server(api.info(), plan, algorithm=None)
        return _measure(api, request, plan, grid, (0,), _PLAIN_SHARE, output)


def _experts(request: Request, plan: Plan, grid: Grid, logs: Path, output: Output) -> Experts:
    return measure_experts(
        plan.folders,
        with_defaults(request.flags, max_batch=max(plan.batch_sizes)),
        grid,
        plan.expert_pairs,
        num_layers=plan.num_layers,
        budget_s=request.budget_s,
        share=_EXPERTS_SHARE,
        logs=logs,
        output=output,
    )


def _measure(
    api: ServerApi,
    request: Request,
    plan: Plan,
    grid: Grid,
    lengths: Any,
    share: float,
    output: Output,
) -> Readings:
    api.wait_until_idle()
    total = plan.readings * len(lengths) // (BLOCK_SIZE + 1)
    what = "plain rounds" if tuple(lengths) == (0,) else "drafted rounds"
    with (
        share_of_budget(request.budget_s, share, what) as budget_s,
        output.progress(f"measuring {what}", total) as bar,
    ):
        return measure_server(
            api, grid, lengths, budget_s=budget_s, progress=lambda done, planned: bar.advance()
        )


def _grid(request: Request, plan: Plan) -> Grid:
    return Grid(
        batch_sizes=plan.batch_sizes,
        contexts=plan.contexts,
        repeats=plan.repeats,
        seed=request.seed,
        texts=bundled_texts(plan.folders.target),
    )


def _check_server(info: Mapping[str, Any], plan: Plan, *, algorithm: str | None) -> None:
    """Refuse a server of another pair, release or kind, or one that holds fewer requests."""
    check_server(
        info,
        plan.folders,
        algorithm=algorithm,
        most=max(plan.batch_sizes),
        batch_flag="--batch-sizes",
        remedy="exchange --url and --plain-url, or start the other server",
    )


@dataclass(frozen=True)
class _Gpu:
    name: str
    multi_processor_count: int
    torch_version: str


def _gpu() -> _Gpu:
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentMissing(
            "costs are of a GPU, and torch sees none here: measure on the machine of the server"
        )
    found = torch.cuda.get_device_properties(0)
    return _Gpu(found.name, found.multi_processor_count, torch.__version__)


@dataclass(frozen=True)
class _Written:
    """Costs as they are in the bundle."""

    fit: StepFit
    slope: ExpertSlope | None
    content_id: str


def _write(
    request: Request, plan: Plan, samples: Any, experts: Experts, identity: CostIdentity
) -> _Written:
    slope = experts.slope
    fit = fit_step_costs(samples, expert=slope)
    settings = {
        "engine": "sglang",
        "contexts": list(plan.contexts),
        "batch_sizes": list(plan.batch_sizes),
        "readings_per_case": fit.readings_per_case,
        "worst_drift": fit.worst_drift,
        "seed": request.seed,
        "flags": list(request.flags),
    }
    content_id = write_cost(
        request.out,
        identity=identity,
        step=fit.table,
        samples=bundle_samples(samples),
        experts=bundle_experts(experts.samples, num_layers=plan.num_layers),
        throughput=None,
        provenance=provenance("profile-latency", settings),
    )
    plots = request.out / "plots"
    title = f"{identity.device}, {identity.engine} {identity.engine_version}, {identity.backends}"
    plot_step_costs(fit.table, plots, title=title)
    if slope is not None:
        plot_expert_slope(slope, experts.samples, plots)
    else:
        # Of an earlier run, whose price the bundle no longer has.
        for earlier in plots.glob("expert-slope.*"):
            earlier.unlink()
    return _Written(fit, slope, content_id)


def _tell_plan(plan: Plan, request: Request, output: Output) -> None:
    contexts = ", ".join(map(str, plan.contexts))
    batches = ", ".join(map(str, plan.batch_sizes))
    data = {
        "pair": plan.folders.name,
        "engine": "sglang",
        "contexts": list(plan.contexts),
        "batch_sizes": list(plan.batch_sizes),
        "repeats": plan.repeats,
        "readings": plan.readings,
        "expert_readings": plan.expert_readings,
        "budget_s": request.budget_s,
        "bundle": str(request.out),
    }
    servers = "three" if plan.expert_pairs else "two"
    where = f"in {servers} servers that it starts" if request.url is None else f"at {request.url}"
    experts = (
        f", and {plan.expert_readings} readings of one request with forced experts"
        if plan.expert_pairs
        else ""
    )
    # Only SGLang's own parser resolves the defaults and aliases that the refusals look at.
    flags = "flags behind -- are checked when the server starts; " if request.flags else ""
    output.result(
        f"would measure {plan.folders.target} in SGLang {where}: lengths 1 to {BLOCK_SIZE} with "
        f"the drafter and plain rounds, at contexts {contexts} and batch sizes {batches}, "
        f"{plan.repeats} repeats after a warm-up, {plan.readings} readings{experts}, in at most "
        f"about {format_seconds(request.budget_s)} beside the starts, then write {request.out}; "
        f"{flags}nothing was done",
        data,
    )
