"""What `hybridspec fuzz` does: load the pair, fuzz or play again, tell what was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from hybridspec.artifacts.atomic import make_folder
from hybridspec.artifacts.digest import model_digest
from hybridspec.cli._output import Output, format_seconds
from hybridspec.errors import BundleError, EnvironmentMissing, Interrupted
from hybridspec.pair import PairFolders, pair_folders, place

if TYPE_CHECKING:
    from hybridspec.fuzz.adapter import EngineAdapter
    from hybridspec.fuzz.history_file import Finding, Setting
    from hybridspec.fuzz.play import Violation
    from hybridspec.fuzz.run import Report

VIOLATION_EXIT_CODE = 1


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec fuzz`, in its words."""

    target: Path | None
    drafter: Path | None
    engine: Literal["reference", "captured"]
    rounds: int
    seconds: float | None
    seed: int
    replay: Path | None
    out: Path
    threads: int | None


def run(request: Request, output: Output) -> None:
    """Do what the command line asks; leaves with 1 where something is found."""
    try:
        where = place(
            device="cpu" if request.engine == "reference" else "cuda",
            dtype="auto",
            threads=request.threads,
        )
    except EnvironmentMissing:
        raise EnvironmentMissing(
            "--engine captured plays on a GPU, and torch sees none here: use --engine reference, "
            "or see `hybridspec doctor`"
        ) from None
    with _folders(request) as folders:
        if request.replay is not None:
            _replay(request.replay, request.engine, folders, where.device, output)
            return
        adapter, setting = _load(request.engine, folders, where.device)
        make_folder(request.out)
        report = _fuzz(request, adapter, setting, output)
    _tell(report, output)
    output.result(_line(report), report_as_json(report))
    if report.finding is not None:
        raise typer.Exit(VIOLATION_EXIT_CODE)


@contextmanager
def _folders(request: Request) -> Iterator[PairFolders]:
    """The named pair, or one that suits the engine."""
    if request.engine == "reference" or request.target is not None or request.drafter is not None:
        yield pair_folders(request.target, request.drafter)
        return
    from hybridspec.fuzz.gpu_pair import random_pair

    with random_pair() as (target, drafter):
        yield pair_folders(target, drafter)


def _load(
    engine: str, folders: PairFolders, device: str, setting: Setting | None = None
) -> tuple[EngineAdapter, Setting]:
    from hybridspec.fuzz.history_file import Setting
    from hybridspec.fuzz.reference_adapter import MAX_CONTEXT, MAX_REQUESTS, ReferenceAdapter
    from hybridspec.reference.config import load_target_config

    assert folders.drafter is not None
    limit = load_target_config(folders.target).max_position_embeddings
    requests = setting.max_requests if setting else MAX_REQUESTS
    context = setting.max_context if setting else min(MAX_CONTEXT, limit)
    adapter: EngineAdapter
    if engine == "captured":
        from hybridspec.fuzz.gpu_adapter import GpuAdapter

        adapter = GpuAdapter(
            folders.target,
            folders.drafter,
            device=device,
            max_requests=requests,
            max_context=context,
        )
    else:
        adapter = ReferenceAdapter(
            folders.target, folders.drafter, max_requests=requests, max_context=context
        )
    facts = adapter.facts
    return adapter, Setting(
        facts.name,
        facts.dtype,
        model_digest(folders.target),
        model_digest(folders.drafter),
        facts.max_requests,
        facts.max_context,
    )


def _fuzz(request: Request, adapter: EngineAdapter, setting: Setting, output: Output) -> Report:
    from hybridspec.fuzz.run import Report, fuzz

    report = Report()
    facts = adapter.facts
    prefixes = (
        "" if facts.prefix_cache else "; it has no prefix cache, so prefix hits are not played"
    )
    try:
        output.note(
            f"{facts.name} engine, {facts.dtype}: {facts.max_requests} requests of up to "
            f"{facts.max_context} tokens, compared after every operation{prefixes}"
        )
        with output.progress("fuzzing", float(request.rounds)) as bar:
            fuzz(
                adapter,
                setting,
                report,
                seed=request.seed,
                rounds=request.rounds,
                seconds=request.seconds,
                folder=request.out,
                progress=lambda rounds: bar.advance(float(rounds)),
                say=output.warn,
            )
    except KeyboardInterrupt:
        if report.path:
            kept = (
                f"a violation is kept in {report.path}, not yet as small as it can be: "
                + _again(report)
            )
        elif report.rounds == 0:
            kept = "nothing was played to its end, so nothing is known; nothing was written"
        else:
            kept = f"no violation in {report.rounds} rounds; nothing was written"
        raise Interrupted(kept) from None
    return report


def _replay(path: Path, engine: str, folders: PairFolders, device: str, output: Output) -> None:
    from hybridspec.fuzz.history_file import read_finding
    from hybridspec.fuzz.play import play

    finding = read_finding(path)
    adapter, setting = _load(engine, folders, device, finding.setting)
    for name in ("target_digest", "drafter_digest", "engine", "dtype"):
        saved, current = getattr(finding.setting, name), getattr(setting, name)
        if saved != current:
            raise BundleError(
                f"{path} was found with {name} {saved}; here it is {current}: name the pair and "
                "--engine that it was found with"
            )
    violation = play(adapter, finding.history)
    _tell_history(finding, output)
    if violation is None:
        text = f"no violation: {path} ({finding.violation.kind} when it was found) is mended"
    else:
        text = f"violation: {violation.message}"
    output.result(text, {"file": str(path), "violation": _violation_as_json(violation)})
    if violation is not None:
        raise typer.Exit(VIOLATION_EXIT_CODE)


def _line(report: Report) -> str:
    took = f"{report.rounds} rounds of {report.histories} histories in " + format_seconds(
        report.seconds
    )
    if report.finding is None:
        return f"no violation: {took}"
    return f"violation: {report.finding.violation.message} ({took}); {_again(report)}"


def _again(report: Report) -> str:
    engine = report.finding.setting.engine if report.finding else "reference"
    named = "" if engine == "reference" else f" --engine {engine}"
    return f"play it again with `hybridspec fuzz{named} --replay {report.path}`"


def _tell(report: Report, output: Output) -> None:
    counts = report.tally.counts
    output.table(
        "played",
        ("what", "times"),
        [[name.replace("_", " "), str(counts[name])] for name in sorted(counts)],
    )
    output.table(
        "largest difference from plain decoding",
        ("part", "absolute"),
        [
            [part.replace("_", " "), f"{difference:.1e}"]
            for part, difference in sorted(report.tally.worst.items())
        ],
    )
    if report.finding is not None:
        _tell_history(report.finding, output)


def _tell_history(finding: Finding, output: Output) -> None:
    from hybridspec.fuzz.operations import Join, Step

    rows = []
    for operation in finding.history:
        match operation:
            case Join():
                behind = "" if operation.follows is None else f" behind {operation.follows}"
                how = f", temperature {operation.temperature}" if operation.temperature else ""
                rows.append([f"join {operation.key}{behind}: {len(operation.prompt)} tokens{how}"])
            case Step():
                plans = [
                    f"{key}: no drafts"
                    if plan.rows == 0
                    else f"{key}: {plan.rows} rows, {plan.right} right"
                    + (f", {plan.dropped} more dropped" if plan.dropped else "")
                    for key, plan in operation.plans.items()
                ]
                rows.append(["round of " + "; ".join(plans)])
            case _:
                rows.append([f"{'abort' if operation.aborted else 'leave'} {operation.key}"])
    output.table("history" if finding.minimal else "history, not yet minimal", ("step",), rows)


def report_as_json(report: Report) -> dict[str, Any]:
    """A run as a JSON object."""
    return {
        "rounds": report.rounds,
        "histories": report.histories,
        "seconds": round(report.seconds, 3),
        "counts": dict(sorted(report.tally.counts.items())),
        "largest_difference": dict(sorted(report.tally.worst.items())),
        "violation": _violation_as_json(report.finding.violation if report.finding else None),
        "file": None if report.path is None else str(report.path),
    }


def _violation_as_json(violation: Violation | None) -> dict[str, Any] | None:
    return None if violation is None else vars(violation) | {"difference": _plain(violation)}


def _plain(violation: Violation) -> float | None:
    from math import isfinite

    difference = violation.difference
    return difference if difference is not None and isfinite(difference) else None
