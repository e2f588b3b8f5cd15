"""The command line and configuration that start a SGLang server with the plugin."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridspec.artifacts.atomic import write_bytes
from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.artifacts.digest import canonical_json
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import BundleError, UsageError
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.identity import ENGINE
from hybridspec.sglang_plugin.installation import ALGORITHM
from hybridspec.sglang_plugin.refusals import SUPPORTED_VERSION

MODULE = "sglang.launch_server"
# What the command says itself; the same flag twice would leave it to argparse which one counts.
OWN_FLAGS = {
    "--model-path": "name TARGET before --",
    "--model": "name TARGET before --",
    "--speculative-draft-model-path": "use --drafter before --",
    "--speculative-draft-model": "use --drafter before --",
    "--speculative-algorithm": "leave it out, --engine sglang sets it",
    "--host": "use --host before --",
    "--port": "use --port before --",
    "--served-model-name": "use --served-model-name before --",
}

# The same of commands that start servers for themselves.
MEASURED_FLAGS = OWN_FLAGS | dict.fromkeys(
    ("--host", "--port", "--served-model-name"),
    "leave it out, the command talks to a server of its own (--url names one that runs)",
)

RADIX_CACHE_FLAGS = (
    "--disable-radix-cache",
    "--mamba-radix-cache-strategy",
    "--mamba-scheduler-strategy",  # SGLang's older name of it
    "--mamba-track-interval",
)


# `--h`, `--p` and the like stand for more than one of SGLang's flags, which argparse refuses.
_SHORTEST_ABBREVIATION = len("--ab")


@dataclass(frozen=True)
class Launch:
    """One server to start.

    Attributes:
        target, drafter: folders, or names on a hub.
        flags: flags of SGLang, passed on as they are.
    """

    target: str
    drafter: str
    host: str
    port: int
    served_model_name: str | None = None
    config: PluginConfig = field(default_factory=PluginConfig)
    flags: tuple[str, ...] = ()


def check_flags(flags: Sequence[str], own: Mapping[str, str] = OWN_FLAGS) -> None:
    """Refuse flags that the command sets itself, and words that are no flags.

    Args:
        own: what the command sets, and what to do instead.

    Raises:
        UsageError: naming the flag of `hybridspec serve` to use.
    """
    if flags and not flags[0].startswith("-"):
        raise UsageError(f"{flags[0]!r} is no flag: SGLang's flags follow behind --")
    for flag in flags:
        name = flag.split("=", 1)[0]
        if (full := _meant(name, own)) is not None:
            short = "" if full == name else f" ({full})"
            raise UsageError(f"{name}{short} behind -- is set by hybridspec: {own[full]}")


def _meant(name: str, flags: Collection[str]) -> str | None:
    """Which of `flags` a word is or, as argparse allows, abbreviates; None: none of them."""
    if name in flags:
        return name
    if not name.startswith("--") or len(name) < _SHORTEST_ABBREVIATION:
        return None
    return next((flag for flag in flags if flag.startswith(name)), None)


def usable_bundle(folder: Path, *, allow: Collection[str] = ()) -> Bundle:
    """A bundle that the plugin can choose lengths by, as far as its manifest tells.

    The worker compares pair and machine once the engine runs; what can be known before is refused
    before.

    Args:
        allow: fields of the identity that may differ.

    Raises:
        BundleError: a part is missing, or its costs are of another engine or release.
    """
    bundle = load_bundle(folder)
    if bundle.calibration is None:
        raise BundleError(
            f"{folder} has no calibration part; a policy needs hazards: run `hybridspec calibrate "
            f"--out {folder}` for this pair"
        )
    remedy = f"run `hybridspec profile-latency --engine sglang --out {folder}` on this machine"
    if bundle.cost is None:
        raise BundleError(f"{folder} has no cost part; a policy needs this machine's: {remedy}")
    identity = bundle.cost.identity
    if identity.engine != ENGINE and "engine" not in allow:
        raise BundleError(
            f"{folder} has costs of the {identity.engine} engine; rounds in SGLang take other "
            f"times: {remedy}"
        )
    same = identity.engine_version.split(".")[:2] == SUPPORTED_VERSION.split(".")[:2]
    if not same and "engine_version" not in allow:
        raise BundleError(
            f"{folder} has costs of SGLang {identity.engine_version}, here it is "
            f"{SUPPORTED_VERSION}: {remedy}"
        )
    if bundle.cost.throughput is None:
        raise BundleError(
            f"{folder} has no throughput fitted for its two parts; the policy is priced with it: "
            f"run `hybridspec calibrate --from-trace DIR --out {folder}` with the pair's trace"
        )
    return bundle


def with_defaults(flags: Sequence[str], *, max_batch: int | None) -> tuple[str, ...]:
    """`flags` and those that the plugin needs where nothing is said about them.

    Args:
        max_batch: largest batch of the bundle's costs; None without a bundle.
    """

    def says(*watched: str) -> bool:
        return any(_meant(flag.split("=", 1)[0], watched) is not None for flag in flags)

    added = []
    # Who names a strategy or an interval wants the cache; what the plugin cannot serve is refused
    # by name.
    if not says(*RADIX_CACHE_FLAGS):
        added.append("--disable-radix-cache")
    if max_batch is not None and not says("--max-running-requests"):
        added += ["--max-running-requests", str(max_batch)]
    return (*flags, *added)


def added_note(given: Sequence[str], flags: Sequence[str]) -> str | None:
    """What `with_defaults` added to the flags given, in one sentence; None where nothing."""
    added = list(flags[len(given) :])
    if not added:
        return None
    note = f"added to SGLang's flags: {' '.join(added)}"
    if "--disable-radix-cache" in added:
        note += "; for a prefix cache give `-- --mamba-radix-cache-strategy extra_buffer`"
    if any(flag.split("=", 1)[0] == "--config" for flag in given):
        note += "; the file of --config is not read here, and what it says of them loses"
    return note


def plugin_config(
    *,
    bundle: Path | None,
    fixed_length: int | None,
    correction: str,
    allow: tuple[str, ...] = (),
) -> PluginConfig:
    """The configuration of a server.

    Args:
        bundle: None: every round takes `fixed_length`, or all rows.
        fixed_length: rows of every round of requests that ask for nothing; None: the policy.
        allow: fields of the bundle's identity that may differ.
    """
    return PluginConfig.model_validate(
        {
            "bundle": None if bundle is None else bundle.resolve(),
            "force_length": fixed_length,
            "fixed_length": fixed_length or BLOCK_SIZE,
            "correction": correction,
            "allow": allow,
        }
    )


def arguments(launch: Launch) -> list[str]:
    """Arguments behind the Python interpreter."""
    named = {
        "--model-path": launch.target,
        "--speculative-algorithm": ALGORITHM,
        "--speculative-draft-model-path": launch.drafter,
        "--host": launch.host,
        "--port": str(launch.port),
    }
    if launch.served_model_name is not None:
        named["--served-model-name"] = launch.served_model_name
    return ["-m", MODULE, *(part for item in named.items() for part in item), *launch.flags]


def plain_arguments(target: str, host: str, port: int, flags: Sequence[str]) -> list[str]:
    """Arguments of a server without a drafter that is otherwise started with the same flags."""
    kept: list[str] = []
    dropping = False
    for flag in flags:
        if flag.startswith("--"):
            dropping = flag.startswith("--speculative")
        if not dropping:
            kept.append(flag)
    named = ["--model-path", target, "--host", host, "--port", str(port)]
    return ["-m", MODULE, *named, *kept]


def write_config(config: PluginConfig, folder: Path | None = None) -> Path:
    """Write the configuration where the ranks of the server can read it, under its own digest.

    Args:
        folder: None: a folder of this user among the temporary files, which nobody else may enter.

    Raises:
        UsageError: the folder belongs to someone else.
    """
    if folder is None:
        folder = Path(tempfile.gettempdir()) / f"hybridspec-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UsageError(
                f"{folder} is not a private folder of this user: remove it, or set TMPDIR"
            )
    content: dict[str, Any] = config.model_dump(mode="json")
    data = canonical_json(content)
    path = folder / f"serve-{hashlib.sha256(data).hexdigest()[:12]}.json"
    write_bytes(path, data + b"\n")
    return path
