"""Whether SGLang and the plugin can work together in this environment, and why not.

Nothing here imports SGLang into this process: what takes an import runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from hybridspec.errors import EngineRefusal, EnvironmentMissing
from hybridspec.sglang_plugin.refusals import SUPPORTED_VERSION, check_version, installed_version

GROUP = "sglang.srt.plugins"
PLUGIN = "hybridspec"
ALGORITHM = "HYBRIDSPEC"
REGISTRATION_SECONDS = 180.0
INSTALL_REMEDY = f"install sglang=={SUPPORTED_VERSION} beside hybridspec, or use --engine reference"

_REGISTERED = f"""
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
print(type(SpeculativeAlgorithm.from_string({ALGORITHM!r})).__name__)
"""


@dataclass(frozen=True)
class Installation:
    """What was found.

    Attributes:
        version: of SGLang, None where it is not installed.
        version_problem: why this version cannot be used, empty where it can.
        entry_point: what the plugin's entry point names, None without one.
        load_problem: why the entry point does not load, empty where it does.
        registration_problem: why SGLang does not know the algorithm, empty where it does; None
            where it was not tried.
    """

    version: str | None
    version_problem: str
    entry_point: str | None
    load_problem: str
    registration_problem: str | None


def examine(*, register: bool = True) -> Installation:
    """Look at the installation.

    Args:
        register: also start a process in which SGLang loads its plugins (many seconds).
    """
    version = installed_version()
    problem = ""
    if version is not None:
        try:
            check_version(version)
        except EngineRefusal as refusal:
            problem = str(refusal)
    point = _entry_point()
    load_problem = ""
    if point is not None:
        try:
            point.load()
        except Exception as error:  # whatever the module's import raises is the finding
            load_problem = f"{type(error).__name__}: {error}"
    tried = register and version is not None and not problem and point is not None
    return Installation(
        version=version,
        version_problem=problem,
        entry_point=None if point is None else point.value,
        load_problem=load_problem,
        registration_problem=_registration_problem() if tried and not load_problem else None,
    )


def check_installation(variables: Mapping[str, str] = os.environ) -> None:
    """Refuse to start where SGLang could not load the plugin; takes no import of SGLang.

    Raises:
        EnvironmentMissing: SGLang, the entry point or a GPU is not there.
        EngineRefusal: another release of SGLang, or plugins switched off by `SGLANG_PLUGINS`.
    """
    version = installed_version()
    if version is None:
        raise EnvironmentMissing(
            "--engine sglang needs SGLang, which is not installed in this environment: "
            + INSTALL_REMEDY
        )
    check_version(version)
    if _entry_point() is None:
        raise EnvironmentMissing(
            f"this installation of hybridspec has no entry point in {GROUP!r}, so SGLang would not "
            "find the plugin: install hybridspec again in this environment"
        )
    allowed = [name.strip() for name in variables.get("SGLANG_PLUGINS", "").split(",")]
    if any(allowed) and PLUGIN not in allowed:
        raise EngineRefusal(
            f"SGLANG_PLUGINS={variables['SGLANG_PLUGINS']} leaves the plugin out: add {PLUGIN} to "
            "it, or unset it"
        )
    if cuda_devices() == 0:
        raise EnvironmentMissing(
            "--engine sglang needs an NVIDIA GPU and the driver reports none: see `hybridspec "
            "doctor`, or use --engine reference"
        )


def cuda_devices() -> int:
    """NVIDIA GPUs that this process may use, by the driver alone: torch takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _entry_point() -> metadata.EntryPoint | None:
    return next(iter(metadata.entry_points(group=GROUP, name=PLUGIN)), None)


def _registration_problem() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _REGISTERED],
            capture_output=True,
            text=True,
            check=False,
            timeout=REGISTRATION_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"loading SGLang took longer than {REGISTRATION_SECONDS:g} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"
