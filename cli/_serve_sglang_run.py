"""What `hybridspec serve --engine sglang` does: check, write the configuration, become SGLang."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.identity import check_field_names
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.cli._certificates import say_served_match
from hybridspec.cli._output import Output
from hybridspec.environ import force_length
from hybridspec.errors import ModelError, UsageError
from hybridspec.pair import PairFolders
from hybridspec.sglang_plugin.installation import check_installation
from hybridspec.sglang_plugin.launch import (
    Launch,
    added_note,
    arguments,
    check_flags,
    plugin_config,
    usable_bundle,
    with_defaults,
    write_config,
)

# Options of the reference engine, and what SGLang has in their place.
NOT_FOR_SGLANG = {
    "max_batch": ("--max-batch", "--max-running-requests N"),
    "max_context": ("--max-context", "--context-length N"),
    "queue_limit": ("--queue-limit", "--max-queued-requests N"),
    "dtype": ("--dtype", "--dtype"),
    "device": ("--device", "--base-gpu-id N, or CUDA_VISIBLE_DEVICES"),
    "threads": ("--threads", "OMP_NUM_THREADS"),
}


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec serve --engine sglang`, in its words.

    Attributes:
        given: names of the options that were written out, and not left at their defaults.
        flags: what stands behind `--`.
    """

    target: Path | None
    drafter: Path | None
    bundle: Path | None
    host: str
    port: int
    served_model_name: str | None
    policy: Literal["auto", "fixed", "none"]
    fixed_length: int
    router_correction: Literal["select", "paper", "off"]
    allow: tuple[str, ...]
    given: frozenset[str]
    flags: tuple[str, ...]


def run(request: Request, output: Output) -> None:
    """Replace this process by SGLang's server, so that signals reach it.

    Raises:
        UsageError: options that do not fit together.
        ModelError: a folder that is not there.
        BundleError: a bundle that no policy can be made of.
        EnvironmentMissing, EngineRefusal: see `check_installation`.
    """
    launch, note = make_launch(request)
    check_installation()
    tell_certificate(request, launch, output)
    path = write_config(launch.config)
    command = [sys.executable, *arguments(launch)]
    for role, model in (("target", launch.target), ("drafter", launch.drafter)):
        if not Path(model).is_dir():
            output.warn(f"{role} {model} is no folder here: SGLang takes it as a name on a hub")
    output.note(f"{note}; requests can ask for another (docs/sglang.md)")
    if (added := added_note(request.flags, launch.flags)) is not None:
        output.note(added)
    output.note(f"running: HYBRIDSPEC_CONFIG={shlex.quote(str(path))} {shlex.join(command)}")
    sys.stdout.flush()
    os.execve(sys.executable, command, {**os.environ, "HYBRIDSPEC_CONFIG": str(path)})


def tell_certificate(request: Request, launch: Launch, output: Output) -> None:
    """Say whether a certificate of the bundle is for what will be served."""
    if request.bundle is None or request.policy != "auto":
        return
    folders = PairFolders(Path(launch.target), Path(launch.drafter), None, launch.target)
    say_served_match(load_bundle(request.bundle), folders, output)


def make_launch(request: Request) -> tuple[Launch, str]:
    """The server to start, and what chooses its lengths, in one sentence."""
    refuse_options(request.given)
    check_field_names(request.allow)
    target, drafter = _pair(request)
    check_flags(request.flags)
    if request.port == 0:
        raise UsageError("--port 0 is not possible with --engine sglang: name a free port")
    if os.environ.get("HYBRIDSPEC_CONFIG"):
        raise UsageError(
            "HYBRIDSPEC_CONFIG is set, and `hybridspec serve` writes a configuration of its own: "
            "unset it, or start SGLang directly (docs/sglang.md)"
        )
    bundle = None if request.bundle is None else usable_bundle(request.bundle, allow=request.allow)
    max_batch = None
    if bundle is not None and bundle.cost is not None:
        max_batch = bundle.cost.identity.max_batch
    fixed = None
    if request.policy == "fixed":
        fixed, note = request.fixed_length, f"every round verifies {request.fixed_length} rows"
    elif bundle is None:
        note = f"no bundle is given, so every round verifies {BLOCK_SIZE} rows, as with DFLASH"
    else:
        note = f"bundle {request.bundle}: 1 to {BLOCK_SIZE} rows a round"
    if (forced := force_length()) is not None:
        note = (
            f"HYBRIDSPEC_FORCE_LENGTH={forced} is set, so every round verifies {forced} rows, "
            "whatever bundle or --policy say: unset it to let them choose"
        )
    config = plugin_config(
        bundle=request.bundle,
        fixed_length=fixed,
        correction=request.router_correction,
        allow=request.allow,
    )
    launch = Launch(
        target=target,
        drafter=drafter,
        host=request.host,
        port=request.port,
        served_model_name=request.served_model_name,
        config=config,
        flags=with_defaults(request.flags, max_batch=max_batch),
    )
    return launch, note


def refuse_options(given: Collection[str]) -> None:
    """Refuse options of the reference engine by name, with SGLang's own.

    Raises:
        UsageError: the first of them.
    """
    for name, (flag, instead) in NOT_FOR_SGLANG.items():
        if name in given:
            raise UsageError(
                f"{flag} is an option of --engine reference; with --engine sglang use {instead}"
                + (", behind --" if instead.startswith("--") else "")
            )


def _pair(request: Request) -> tuple[str, str]:
    if request.target is None:
        raise UsageError(
            "--engine sglang needs TARGET and --drafter; the embedded pair runs in --engine "
            "reference alone"
        )
    if request.policy == "none":
        raise UsageError(
            "--policy none is plain decoding, for which SGLang needs no plugin: run `sglang serve "
            f"{request.target}`"
        )
    if request.drafter is None:
        raise UsageError(
            f"TARGET {request.target} is given without its drafter; drafting needs one: add "
            "--drafter DIR"
        )
    return folder_or_name("target", request.target), folder_or_name("drafter", request.drafter)


def folder_or_name(role: str, given: Path) -> str:
    """What SGLang is given: a folder of this machine, or what may be a name on a hub.

    Such a name is ORGANISATION/MODEL, and where a folder here is called as the organisation it is
    a path: SGLang would look a mistyped one up on the hub.

    Raises:
        ModelError: it can only be a folder and is not there, or holds no model.
    """
    folder = given.expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{role} {given} has no config.json: name a model's folder")
    elif folder.exists():
        raise ModelError(f"{role} {given} is no folder: name the folder of a model")
    elif len(folder.parts) != 2 or ".." in folder.parts or folder.is_absolute():
        raise ModelError(f"{role} {given} is not there: name a folder, or ORGANISATION/MODEL")
    elif folder.parent.is_dir():
        raise ModelError(
            f"{role} {given} is not there, though {folder.parent} is a folder: name one inside, or "
            "start elsewhere to name a model on a hub"
        )
    return str(folder)
