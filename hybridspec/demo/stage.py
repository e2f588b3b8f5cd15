"""What training stages share: torch settings, progress lines and the log file."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from hybridspec.demo.optim import StageClock
from hybridspec.errors import QualityGate

_STARTED = time.monotonic()


def say(message: str) -> None:
    """Prints one line with the seconds since the program began."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {message}", flush=True)


def prepare_torch(device: torch.device) -> None:
    """Chooses fast matrix products and repeatable kernels."""
    # Read when cuBLAS starts; without it its products may differ from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("high")
    # warn_only: a few kernels (cumsum) have no variant that is declared deterministic.
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    if device.type == "cuda":
        # Its backward pass is not deterministic; the flash kernel's can be.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch._dynamo.config.recompile_limit = 64


class Progress:
    """Prints a line about every ten seconds with a forecast of the time left."""

    def __init__(self, stage: str, clock: StageClock, *, unit: str, every_s: float = 10.0) -> None:
        self.stage, self.clock, self.unit, self.every_s = stage, clock, unit, every_s
        self.last = 0.0
        self.last_count = 0

    def due(self) -> bool:
        """Tells whether a line should be printed now."""
        return time.monotonic() - self.last >= self.every_s

    def line(self, count: int, **values: float) -> None:
        """Prints the line.

        Args:
            count: units done since the stage began.
            values: figures to show.

        Raises:
            QualityGate: one of them is not finite.
        """
        now = time.monotonic()
        rate = (count - self.last_count) / (now - self.last) if self.last else 0.0
        self.last, self.last_count = now, count
        shown = "".join(f", {k} {v:.3f}" for k, v in values.items())
        say(
            f"{self.stage} step {self.clock.done}{shown}, {count / 1e6:.2f}M {self.unit}, "
            f"{rate / 1e3:.1f}k/s, {self.clock.progress():.0%}, ETA {self.clock.eta_s():.0f} s"
        )
        if not all(map(math.isfinite, values.values())):
            raise QualityGate(f"{self.stage} diverged ({shown[2:]}): use a lower learning rate")


def environment(device: torch.device) -> dict[str, str]:
    """Returns versions and the device's name for the log."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name or device.type,
    }


def update_log(file: Path, stage: str, values: dict[str, Any]) -> None:
    """Merges the values of a stage into the JSON log."""
    log = json.loads(file.read_text()) if file.is_file() else {}
    log[stage] = values
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(log, indent=1) + "\n")
