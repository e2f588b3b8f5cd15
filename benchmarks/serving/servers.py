"""Server processes: SGLang started as users start it, one at a time, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"
WEIGHTS_PLUGIN = "hybridspec_padded_weights"
_WEIGHTS_ENTRY = "hybridspec.demo.sglang_weights:install"
# Lines of SGLang's log that say what a server holds and how long its start took.
_FACTS = (
    "Load weight end", "Mamba Cache is allocated", "KV Cache is allocated", "ReplaySSM ring",
    "Capture cuda graph end", "max_total_num_tokens=", "Using MoE kernel config", "HYBRIDSPEC",
    "hybridspec", "Memory pool end", "tensors,", "Using default MoE kernel config",
)  # fmt: skip


class ServerFailed(RuntimeError):
    """The server did not come up, with the end of its log."""


@dataclass
class Server:
    """A running server.

    Attributes:
        boot_s: from the start of the process to the first healthy answer.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    boot_s: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> list[str]:
        """What the log says of memory, weights, graphs and the plugin."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[-400:] for line in lines if any(fact in line for fact in _FACTS)][:80]

    def prefill_passes(self) -> list[int]:
        """Prompts of every prefill pass since the start, as the log tells them."""
        text = self.log.read_text(errors="replace")
        return [int(count) for count in re.findall(r"Prefill batch, #new-seq: (\d+)", text)]

    def tail(self, count: int = 60) -> str:
        """End of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def get(self, path: str, timeout_s: float = 20.0) -> Any:
        """JSON of a GET request."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout_s) as answer:
            return json.load(answer)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> Any:
        """JSON of a POST request."""
        return json.loads(self.post_text(path, body, timeout_s))

    def post_text(self, path: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> str:
        """Text of a POST request."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.read().decode()

    def stop(self, wait_for_gpu_s: float = 20.0) -> None:
        """End the server with its processes and wait until the card is free again."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until = time.monotonic() + wait_for_gpu_s
        while time.monotonic() < until and (used := gpu_memory_mib()) is not None and used > 2000:
            time.sleep(0.5)


def gpu_memory_mib() -> int | None:
    """Used memory of the card, None without one."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        return max(int(line) for line in found.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def start(
    command: Sequence[str],
    *,
    url: str,
    log: Path,
    env: Mapping[str, str],
    timeout_s: float,
    health: str = "/v1/models",
) -> Server:
    """Start a server and wait until it answers.

    Raises:
        ServerFailed: it ended, or was not healthy in time.
    """
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
            start_new_session=True,
        )
    server = Server(process, url, log)
    try:
        while time.monotonic() - began < timeout_s:
            if process.poll() is not None:
                raise ServerFailed(f"ended with {process.returncode}\n{server.tail()}")
            try:
                with urllib.request.urlopen(f"{url}{health}", timeout=5.0):
                    server.boot_s = time.monotonic() - began
                    return server
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise ServerFailed(f"not healthy within {timeout_s:.0f} s\n{server.tail()}")
    except BaseException:
        server.stop()
        raise


def plugin_path(folder: Path) -> str:
    """A folder for PYTHONPATH that makes the checkout an installed distribution with its plugins.

    What `pip install` does, for machines that cannot build the package.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = dict(project.get("entry-points", {}).get(GROUP, {}))
    if _WEIGHTS_ENTRY not in entries.values():
        entries[WEIGHTS_PLUGIN] = _WEIGHTS_ENTRY
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])


def plugin_names() -> tuple[str, str]:
    """Names of the entry points of the algorithm and of the padded weights, joined by commas."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = dict(project.get("entry-points", {}).get(GROUP, {}))
    weights = [name for name, value in entries.items() if value == _WEIGHTS_ENTRY]
    others = [name for name in entries if name not in weights]
    return ",".join(others), ",".join(weights or [WEIGHTS_PLUGIN])


def memory_of(facts: Sequence[str]) -> dict[str, float]:
    """Sizes in SGLang's log lines, GB as it prints them."""
    found: dict[str, float] = {}
    text = "\n".join(facts)
    for name, pattern in (
        ("mamba_slots", r"max_mamba_cache_size: (\d+)"),
        ("conv_state_gb", r"conv_state size: ([\d.]+)"),
        ("ssm_state_gb", r"ssm_state size: ([\d.]+)"),
        ("intermediate_ssm_gb", r"intermediate_ssm_state_cache size: ([\d.]+)"),
        ("intermediate_conv_gb", r"intermediate_conv_window_cache size: ([\d.]+)"),
        ("factors_mib_a_request", r"keeps ([\d.]+) MiB of factors"),
        ("conv_rows_mib_a_request", r"and ([\d.]+) MiB of conv rows a request"),
    ):
        if match := re.search(pattern, text):
            found[name] = float(match[1])
    return found


def sglang_command(arguments: Sequence[str]) -> list[str]:
    """Command line of SGLang's own server without its multimodal parts."""
    return [sys.executable, "-P", str(Path(__file__).with_name("launch.py")), *arguments]
