"""SGLang servers of the commands that measure or record: started here or named by their URL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridspec.cli._output import Output
from hybridspec.errors import EngineRefusal, EnvironmentMissing, ModelError, UsageError
from hybridspec.pair import PairFolders
from hybridspec.sglang_plugin import installation
from hybridspec.sglang_plugin.identity import pair_of
from hybridspec.sglang_plugin.refusals import check_version
from hybridspec.sglang_plugin.server_api import ServerApi
from hybridspec.sglang_plugin.server_process import running

# The target of a production pair is read from disk first.
_BOOT_SECONDS = 1200.0


def warn_of_installation(output: Output) -> None:
    """Say what would stop a run here; a dry run may be of another machine's."""
    if installation.installed_version() is None:
        output.warn(f"SGLang is not installed here: {installation.INSTALL_REMEDY}")
        return
    try:
        installation.check_installation()
    except (EnvironmentMissing, EngineRefusal) as refusal:
        output.warn(str(refusal))


@contextmanager
def server(
    url: str | None,
    command: Sequence[str],
    *,
    port: int,
    variables: Mapping[str, str],
    log: Path,
    output: Output,
) -> Iterator[ServerApi]:
    """The server at `url`, or one of our own for as long as the block runs."""
    if url is not None:
        yield ServerApi(url)
        return
    output.note(f"starting SGLang; its log is {log}")
    with running(command, port=port, variables=variables, log=log, boot_s=_BOOT_SECONDS) as api:
        yield api


def check_server(
    info: Mapping[str, Any],
    folders: PairFolders,
    *,
    algorithm: str | None,
    most: int,
    batch_flag: str,
    remedy: str,
) -> None:
    """Refuse a server of another pair, release or kind, or one that holds fewer requests.

    Args:
        info: fields of its `ServerArgs`, and its `version`.
        algorithm: it must run, None for plain decoding.
        most: requests together that it must hold.
        batch_flag: what asks for them.
        remedy: where it runs another algorithm.

    Raises:
        EngineRefusal, UsageError, ModelError: in this order.
    """
    check_version(str(info.get("version")))
    found = info.get("speculative_algorithm")
    if found != algorithm:
        raise UsageError(
            f"the server runs {found or 'no drafter'}, where {algorithm or 'no drafter'} is "
            f"needed: {remedy}"
        )
    served = pair_of(info)
    for name, here, there in (
        ("target", folders.target, served.target),
        ("drafter", folders.drafter, served.drafter if algorithm else folders.drafter),
    ):
        if here is None or there is None or here.resolve() != there.resolve():
            raise ModelError(f"the server runs the {name} {there}, not {here}: name its folder")
    holds = info.get("max_running_requests")
    if holds is not None and holds < most:
        raise UsageError(
            f"the server runs {holds} requests together; {batch_flag} asks for {most}: start it "
            f"with --max-running-requests {most}"
        )
