"""What this installation and machine have, and what works on them."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

from hybridspec import __version__, environ
from hybridspec.errors import EnvironmentMissing

Status = Literal["ok", "limited", "missing"]

REQUIRED = (
    "numpy",
    "scipy",
    "scikit-learn",
    "pyarrow",
    "pydantic",
    "typer",
    "rich",
    "safetensors",
    "tokenizers",
    "jinja2",
    "matplotlib",
    "fastapi",
    "uvicorn",
    "prometheus-client",
    "torch",
)
OPTIONAL = ("triton", "datasets", "transformers", "sglang")


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: `ok`; `limited` when only some commands or devices suffer; `missing` when no
            command can work.
        detail: what was found.
        remedy: what to do about it; empty when ok.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """Everything `hybridspec doctor` says.

    Attributes:
        packages: version of each required or optional distribution, None when not installed.
        environment: the recognised variables that are set.
        checks: findings, in reading order.
    """

    version: str
    python: str
    platform: str
    cpu_cores: int
    memory_bytes: int | None
    packages: dict[str, str | None]
    environment: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def usable(self) -> bool:
        """Whether every command has what it needs."""
        return all(check.status != "missing" for check in self.checks)


def examine() -> Report:
    """Look at the installation; imports torch, writes no file and uses no network."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    return Report(
        version=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        platform=platform.platform(),
        cpu_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        packages=packages,
        environment={name: os.environ[name] for name in environ.VARIABLES if name in os.environ},
        checks=(
            _packages_check(packages),
            *_torch_checks(packages),
            *_sglang_checks(),
            _pair_check(),
            *_home_checks(),
        ),
    )


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data for JSON."""
    return asdict(report) | {"usable": report.usable}


def as_text(report: Report) -> str:
    """The report as a page to read or to paste."""
    memory = f"{report.memory_bytes / 2**30:.1f} GiB" if report.memory_bytes else "unknown"
    lines = [
        f"hybridspec  {report.version}",
        f"python      {report.python}",
        f"platform    {report.platform}",
        f"cpu         {report.cpu_cores} cores, memory {memory}",
        "packages    " + ", ".join(f"{k} {v}" for k, v in report.packages.items() if v),
    ]
    lines += [f"{name}={value}" for name, value in report.environment.items()]
    lines.append("")
    width = max(len(check.name) for check in report.checks)
    for check in report.checks:
        lines.append(f"[{check.status:^7}] {check.name:<{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':{width + 12}}{check.remedy}")
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _packages_check(packages: dict[str, str | None]) -> Check:
    absent = [name for name in REQUIRED if packages[name] is None]
    if absent:
        return Check(
            "packages",
            "missing",
            f"not installed: {', '.join(absent)}",
            "install hybridspec again in this environment",
        )
    return Check("packages", "ok", f"all {len(REQUIRED)} required packages are installed")


def _torch_checks(packages: dict[str, str | None]) -> list[Check]:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return [Check("torch", "missing", f"does not import: {error}", "install torch again")]
    checks = [Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} CPU threads")]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        detail = "no CUDA device" if built else "this build of torch has no CUDA"
        checks.append(
            Check("gpu", "limited", detail, "CPU works for the embedded pair and small models")
        )
        return checks
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        checks.append(
            Check(
                f"gpu {index}",
                "ok",
                f"{device.name}, sm_{device.major}{device.minor}, "
                f"{device.multi_processor_count} SMs, {device.total_memory / 2**30:.0f} GiB",
            )
        )
    if packages["triton"] is None:
        checks.append(
            Check("triton", "limited", "not installed: no fused kernels", "install triton")
        )
    return checks


def _sglang_checks() -> list[Check]:
    from hybridspec.sglang_plugin import installation

    found = installation.examine()
    wanted = f"install sglang=={installation.SUPPORTED_VERSION} for `serve --engine sglang`"
    if found.version is None:
        return [Check("sglang", "limited", "not installed; --engine reference works", wanted)]
    if found.version_problem:
        return [Check("sglang", "limited", found.version_problem)]
    checks = [Check("sglang", "ok", f"{found.version}, the release that the plugin is written for")]
    again = "install hybridspec again in this environment, then run `hybridspec doctor`"
    if found.entry_point is None:
        detail = f"no entry point in {installation.GROUP}"
        return [*checks, Check("sglang plugin", "limited", detail, again)]
    if problem := found.load_problem or found.registration_problem:
        what = "does not load" if found.load_problem else "is not registered"
        detail = f"{found.entry_point} {what}: {problem}"
        return [*checks, Check("sglang plugin", "limited", detail, again)]
    detail = f"{found.entry_point} loads; SGLang knows {installation.ALGORITHM}"
    return [*checks, Check("sglang plugin", "ok", detail)]


def _pair_check() -> Check:
    from hybridspec.demo import assets

    try:
        target, _, _ = assets.require()
    except EnvironmentMissing as error:
        return Check("embedded pair", "limited", str(error), "name a TARGET of your own until then")
    return Check("embedded pair", "ok", str(target.parent))


def _home_checks() -> list[Check]:
    folder = environ.home()
    if folder is None:
        return []
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return [Check("download folder", "ok", str(folder))]
    detail = f"{folder} cannot be written"
    return [Check("download folder", "limited", detail, "set HYBRIDSPEC_HOME to another folder")]
