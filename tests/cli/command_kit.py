"""Running the commands as a person would, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Few tokens, one thread: other work on the machine then costs little time.
CALIBRATE = ("--threads", "1", "--max-prompts", "28", "--max-new-tokens", "24", "--batch-size", "4")
PROFILE = ("--threads", "1", "--contexts", "64", "--batch-sizes", "1", "--repeats", "9")
PROFILE_ATTEMPTS = 8
NOISY = 5


def hybridspec(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hybridspec.cli.main", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run profile-latency; a machine that drifts is refused (exit 5), so it may try again."""
    done = hybridspec("profile-latency", *PROFILE, *arguments)
    for _ in range(PROFILE_ATTEMPTS - 1):
        if done.returncode == NOISY:
            done = hybridspec("profile-latency", *PROFILE, *arguments)
    return done


@dataclass(frozen=True)
class Made:
    """A complete bundle, its trace, and what the two commands wrote."""

    bundle: Path
    trace: Path
    calibrate: subprocess.CompletedProcess[str]
    profile: subprocess.CompletedProcess[str]

    def copy(self, folder: Path) -> Path:
        """A copy of bundle and trace, lying to each other as these do; the bundle's path."""
        shutil.copytree(self.bundle, folder / self.bundle.name)
        shutil.copytree(self.trace, folder / self.trace.name)
        return folder / self.bundle.name


def make(folder: Path) -> Made:
    """Calibrate and profile the embedded pair in a folder."""
    bundle = folder / "bundle"
    calibrated = hybridspec("calibrate", "--out", bundle, *CALIBRATE, "--json")
    assert calibrated.returncode == 0, calibrated.stderr
    profiled = profile("--out", bundle, "--json")
    assert profiled.returncode == 0, profiled.stderr
    return Made(bundle, folder / "bundle.trace", calibrated, profiled)
