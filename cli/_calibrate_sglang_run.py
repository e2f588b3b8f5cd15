"""Recording of `hybridspec calibrate --engine sglang`: a server records what it verifies."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from hybridspec.calibrate.trace import TraceWriter
from hybridspec.cli._calibrate_plan import Plan, Request
from hybridspec.cli._output import Output
from hybridspec.cli._serve_sglang_run import refuse_options
from hybridspec.cli._sglang_server import check_server, server
from hybridspec.collect import check_same_routes, group_prompts
from hybridspec.errors import Interrupted, UsageError
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.installation import ALGORITHM, check_installation
from hybridspec.sglang_plugin.launch import (
    MEASURED_FLAGS,
    Launch,
    arguments,
    check_flags,
    with_defaults,
    write_config,
)
from hybridspec.sglang_plugin.server_api import ServerApi
from hybridspec.sglang_plugin.server_process import free_port
from hybridspec.sglang_plugin.server_recording import RecordedFolder, record_prompts


def check_request(request: Request) -> None:
    """Refuse what does not go together, before anything is read.

    Raises:
        UsageError: naming the option.
    """
    refuse_options(request.given)
    check_flags(request.flags, MEASURED_FLAGS)
    if request.from_trace is None and request.target is None:
        raise UsageError(
            "--engine sglang needs TARGET and --drafter; the embedded pair runs in --engine "
            "reference alone"
        )
    if (request.url is None) != (request.recorded is None):
        raise UsageError(
            "--url and --recorded go together: rounds come from the folder that the server there "
            "records into (`record` of its configuration); give both, or neither to have a server "
            "started"
        )
    if request.url is not None and request.flags:
        raise UsageError(
            "flags behind -- are for a server that the command starts: leave --url out"
        )
    if request.recorded is not None and not request.recorded.is_dir():
        raise UsageError(
            f"--recorded {request.recorded} is no folder: name the one that the server at "
            f"{request.url} records into, on this machine"
        )


def record(plan: Plan, folder: Path, request: Request, output: Output) -> None:
    """Record the plan's rounds into a trace folder; starts a server only if some are missing.

    Raises:
        Interrupted: Ctrl-C; finished groups are on disk.
        EnvironmentMissing: no SGLang, no GPU, or a server that went away.
        UsageError, ModelError, EngineRefusal: a server that does not fit.
    """
    groups = group_prompts(plan.prompts, plan.identity.group_size)
    if request.url is None and not request.resume:
        check_installation()  # before a folder is made that only --resume would take
    output.note(f"recording {len(plan.prompts)} prompts into {folder}")
    with TraceWriter.open(
        folder, plan.identity, num_groups=len(groups), resume=request.resume
    ) as writer:
        kept = writer.completed
        if kept:
            check_same_routes(folder, plan.record_routes)
            output.note(
                f"{len(kept)} of {len(groups)} groups of prompts were recorded before and kept"
            )
        left = {index: group for index, group in enumerate(groups) if index not in kept}
        if not left:
            return
        if request.url is None:
            check_installation()
        logs = Path(tempfile.mkdtemp(prefix="hybridspec-calibrate-"))
        recorded = request.recorded or logs / "rounds"
        recorded.mkdir(exist_ok=True)
        try:
            with _server(plan, request, recorded, logs / "server.log", output) as api:
                _check(api, plan)
                found = RecordedFolder(recorded, plan.identity)
                run = secrets.token_hex(4)
                total = plan.identity.max_new_tokens * sum(map(len, left.values()))
                with output.progress("recording", total) as bar:
                    for index, group in left.items():
                        rows = record_prompts(
                            api, found, group, plan.identity, run=run, progress=bar
                        )
                        writer.write_group(index, rows)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(writer.completed)} of {len(groups)} groups of prompts are recorded in "
                f"{folder} and kept; run the same command with --resume to go on"
            ) from None
        shutil.rmtree(logs, ignore_errors=True)


def _server(
    plan: Plan, request: Request, recorded: Path, log: Path, output: Output
) -> AbstractContextManager[ServerApi]:
    config = PluginConfig(record=recorded, record_routes=plan.record_routes, self_check=False)
    launch = Launch(
        str(plan.folders.target),
        str(plan.folders.drafter),
        "127.0.0.1",
        free_port(),
        flags=with_defaults(request.flags, max_batch=plan.identity.group_size),
    )
    return server(
        request.url,
        arguments(launch),
        port=launch.port,
        variables={} if request.url else {"HYBRIDSPEC_CONFIG": str(write_config(config))},
        log=log,
        output=output,
    )


def _check(api: ServerApi, plan: Plan) -> None:
    check_server(
        api.info(),
        plan.folders,
        algorithm=ALGORITHM,
        most=plan.identity.group_size,
        batch_flag="--batch-size",
        remedy="start it with `--speculative-algorithm HYBRIDSPEC`",
    )
