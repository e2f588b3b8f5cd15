r"""The commands around SGLang on one GPU: doctor, serve, calibrate, profile-latency, serve again.

    python benchmarks/sglang_commands.py PAIR --out DIR [--limit SECONDS]
    python benchmarks/sglang_commands.py PADDED --source PAIR --prepared PREPARED --out DIR \
        --stages profile,checked --mem-fraction 0.85

PAIR is a folder with target/ and drafter/. PADDED is one that was written without weights from the
pair in --source (`hybridspec.demo.inflate --no-weights`), PREPARED what `sglang_prepare.py` made of
its recorded rounds: a bundle that costs are added to, and the rounds that price them. `serve`
tries forced lengths, a wrong request and Ctrl-C; `calibrate` and `profile` make a bundle; `checked`
serves with it and waits for the self-check. Stages that fail print their traceback and the others
go on. A check, not a benchmark: times of a small pair are those of the host that it waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from serving.costs import load_rounds
from serving.moe_files import write_configs
from serving.servers import Server, plugin_names, plugin_path, start

from hybridspec.artifacts.bundle import load_bundle, write_throughput
from hybridspec.artifacts.tables import TREES, ThroughputTable
from hybridspec.calibrate.trace import read_trace
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.demo.assets import PROMPTS
from hybridspec.demo.sglang_weights import SOURCE_ENV
from hybridspec.sglang_plugin.server_api import ServerApi, generate_body
from hybridspec.sglang_plugin.server_process import free_port

BEGAN = time.monotonic()
HYBRIDSPEC = [sys.executable, "-m", "hybridspec.cli.main"]
MAX_BATCH = 2
# Three attempts of the self-check with their pauses.
CHECK_SECONDS = 90.0
STOP_SECONDS = 90.0
# Of the three servers of profile-latency: about 30 s each on an H200, and what they leave.
START_SECONDS = 110.0
# Of the self-check's lines in the log.
VERDICTS = ("what the bundle says", "costs are not checked")
# What runs without a network and without FlashInfer; see `docs/sglang.md` for what others need.
FLAGS = [
    "--dtype", "bfloat16", "--attention-backend", "triton", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--moe-runner-backend", "triton", "--mm-attention-backend",
    "triton_attn", "--speculative-draft-attention-backend", "triton",
    "--disable-custom-all-reduce", "--disable-flashinfer-autotune", "--disable-prefill-cuda-graph",
    "--skip-server-warmup", "--cuda-graph-max-bs-decode", str(MAX_BATCH), "--max-running-requests",
    str(MAX_BATCH), "--max-total-tokens", "16384",
]  # fmt: skip
# The vision stub of a test pair needs processors that nothing ever calls.
PROCESSOR = {
    "size": {"longest_edge": 1 << 24, "shortest_edge": 1 << 16},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}


def say(*parts: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *parts, flush=True)


def servable(target: Path, folder: Path) -> Path:
    """The target's files by links, with processors where it has none."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in target.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    for name, kind, value in (
        ("preprocessor_config.json", "image_processor_type", "Qwen2VLImageProcessorFast"),
        ("video_preprocessor_config.json", "video_processor_type", "Qwen3VLVideoProcessor"),
    ):
        if not (folder / name).exists():
            (folder / name).write_text(json.dumps({**PROCESSOR, kind: value}))
    return folder


def priced(bundle: Path, rounds: Path) -> ThroughputTable:
    """Throughput of a bundle with costs, on rounds that are recorded in `sglang_prepare`'s form."""
    found = load_bundle(bundle)
    assert found.calibration is not None
    assert found.cost is not None
    fitted = fit_throughput(load_rounds(rounds), found.cost.step)
    # The prepared rounds' hazards are the trees' where the bundle has trees.
    return replace(fitted, hazard=TREES) if found.calibration.trees is not None else fitted


class Check:
    """The stages, what they found and what failed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out
        self.until = BEGAN + options.limit
        self.target = servable(options.pair / "target", self.out / "target")
        self.drafter: Path = options.pair / "drafter"
        path = plugin_path(self.out / "site")
        self.env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        self.flags = [*FLAGS, "--mem-fraction-static", str(options.mem_fraction)]
        if options.source is not None:
            self.env |= self._padded(options.source)
        self.prepared: Path | None = options.prepared
        self.bundle = self.out / "bundle"
        if options.bundle or options.prepared:
            given = options.bundle or options.prepared / "bundle"
            shutil.copytree(given, self.bundle, dirs_exist_ok=True)
        self.found: dict[str, Any] = {}

    def _padded(self, source: Path) -> dict[str, str]:
        """What servers of a pair without weights need: its source, and the tuned experts."""
        import torch
        import triton

        name = torch.cuda.get_device_name(0)
        folder = write_configs(self.out / "moe", gpu_name=name, triton_version=triton.__version__)
        return {
            "SGLANG_PLUGINS": ",".join(plugin_names()),
            SOURCE_ENV: str(source.resolve()),
            "SGLANG_MOE_CONFIG_DIR": str(folder),
        }

    def stage(self, name: str, run: Callable[[], Any]) -> None:
        """Run one stage unless the time is over; keep its result or its traceback."""
        if time.monotonic() > self.until:
            self.found[name] = "skipped: no time left"
            return
        try:
            self.found[name] = run()
            say("ok", name, self.found[name])
        except BaseException as error:
            self.found[name] = f"FAILED {type(error).__name__}: {error}"
            say("FAILED", name, traceback.format_exc())
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            (self.out / "commands.json").write_text(json.dumps(self.found, indent=1))

    def command(self, *arguments: object) -> str:
        """Output of a command that must succeed; it is interrupted when the time is over."""
        process = subprocess.Popen(
            [*HYBRIDSPEC, *map(str, arguments)],
            env={**os.environ, **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, told = process.communicate(timeout=max(10.0, self.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            out, told = self._interrupted(process)
            told += f"\ninterrupted after {time.monotonic() - BEGAN:.0f} s"
        except BaseException:
            self._interrupted(process)
            raise
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {told[-3000:]}")
        return out + told

    def _interrupted(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """What a command says to Ctrl-C: killed at once, it would leave its server behind."""
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()

    def doctor(self) -> list[str]:
        """Lines of doctor about SGLang."""
        lines = [line for line in self.command("doctor").splitlines() if "sglang" in line]
        if not any("SGLang knows HYBRIDSPEC" in line for line in lines):
            raise RuntimeError("\n".join(lines))
        return lines

    def serve(self) -> dict[str, Any]:
        """One server: that the process became SGLang, forced lengths, a wrong request, Ctrl-C."""
        port = free_port()
        serve = ["serve", self.target, "--drafter", self.drafter, "--engine", "sglang"]
        command = [*serve, "--port", port, "--", *self.flags]
        server = start(
            [*HYBRIDSPEC, *map(str, command)],
            url=f"http://127.0.0.1:{port}",
            log=self.out / "serve.log",
            env=self.env,
            timeout_s=max(10.0, self.until - time.monotonic()),
        )
        try:
            return self._serving(server)
        except BaseException:
            say(server.tail(80))
            raise
        finally:
            server.stop()

    def _serving(self, server: Server) -> dict[str, Any]:
        found: dict[str, Any] = {"boot_s": round(server.boot_s, 1)}
        words = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode().split("\0")
        found["process_is_sglang"] = "sglang.launch_server" in words
        api = ServerApi(server.url)
        info = api.info()
        found["algorithm"] = info.get("speculative_algorithm")
        for length in (1, 5, 16, 0):
            body = generate_body([[5, 6, 7], [8, 9]], new_tokens=40, verify_length=length)
            last = {chunk.index: chunk.meta for chunk in api.stream(body)}
            key = "spec_cap_lens_histogram"
            found[f"rows_{length or 'default'}"] = [last[i].get(key) for i in sorted(last)]
        api.wait_until_idle()
        wrong = generate_body([[5]], new_tokens=4, verify_length=17)
        try:
            found["wrong_length"] = [dict(chunk.meta) for chunk in api.stream(wrong)]
        except Exception as error:
            found["wrong_length"] = str(error)
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGINT)
        try:
            server.process.wait(60)
            found["seconds_to_stop"] = round(time.monotonic() - began, 1)
        except Exception as error:
            found["seconds_to_stop"] = str(error)
        return found

    def calibrate(self) -> dict[str, Any]:
        """Hazards by the command, recorded in a server that it starts."""
        bundle = self.bundle
        said = self.command(
            "calibrate", self.target, "--drafter", self.drafter, "--engine", "sglang",
            "--prompts", PROMPTS, "--max-prompts", 28, "--max-new-tokens", 48,
            "--batch-size", MAX_BATCH, "--out", bundle, "--json", "--", *self.flags,
        )  # fmt: skip
        calibration = load_bundle(bundle).calibration
        assert calibration is not None
        trace = read_trace(bundle.with_name("bundle.trace"))
        return {
            "rounds": trace.num_rows,
            "tokens_a_round": 1.0 + float(np.mean(trace.column("accepted").to_numpy())),
            "routing": calibration.routing is not None,
            "said": said[-1500:],
        }

    def checked(self) -> dict[str, Any]:
        """A server with the bundle of the stages before: what its self-check says."""
        port = free_port()
        serve = ["serve", self.target, "--drafter", self.drafter, "--engine", "sglang"]
        command = [*serve, "--bundle", self.bundle, "--port", port, "--", *self.flags]
        server = start(
            [*HYBRIDSPEC, *map(str, command)],
            url=f"http://127.0.0.1:{port}",
            log=self.out / "checked.log",
            env=self.env,
            timeout_s=max(10.0, self.until - time.monotonic()),
        )
        try:
            until = time.monotonic() + CHECK_SECONDS
            while time.monotonic() < until:
                lines = [line for line in server.tail(400).splitlines() if "HYBRIDSPEC: " in line]
                if found := [line for line in lines if any(word in line for word in VERDICTS)]:
                    return {"boot_s": round(server.boot_s, 1), "said": found[0][-600:]}
                time.sleep(0.5)
            raise RuntimeError(f"no verdict in {CHECK_SECONDS:g} s\n{server.tail(40)}")
        finally:
            server.stop()

    def certify(self) -> dict[str, Any]:
        """The certificate over HTTP: SGLang with the plugin against SGLang without it."""
        ports = free_port(), free_port()
        tested = [
            *HYBRIDSPEC, "serve", self.target, "--drafter", self.drafter, "--engine", "sglang",
            "--port", ports[0], "--", *self.flags,
        ]  # fmt: skip
        flags = self.flags
        at = flags.index("--speculative-draft-attention-backend")
        plain = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", self.target,
            "--host", "127.0.0.1", "--port", ports[1], *flags[:at], *flags[at + 2 :],
        ]  # fmt: skip
        servers: list[Server] = []
        try:
            for name, command, port in (("tested", tested, ports[0]), ("plain", plain, ports[1])):
                servers.append(
                    start(
                        list(map(str, command)),
                        url=f"http://127.0.0.1:{port}",
                        log=self.out / f"certify-{name}.log",
                        env=self.env,
                        timeout_s=max(10.0, self.until - time.monotonic()),
                    )
                )
            said = self.command(
                "certify", "--url", servers[0].url, "--baseline-url", servers[1].url,
                "--dtype", "bfloat16", "--prompts", PROMPTS, "--max-prompts", 48,
                "--max-new-tokens", 96, "--batch", MAX_BATCH, "--out", self.out / "certificate",
                "--json",
            )  # fmt: skip
            return {"said": said[-6000:]}
        finally:
            for server in servers:
                server.stop()

    def profile(self) -> dict[str, Any]:
        """Costs by the command, in servers that it starts."""
        bundle = self.bundle
        profile = ["profile-latency", self.target, "--drafter", self.drafter, "--engine", "sglang"]
        grid = ["--contexts", "128", "--batch-sizes", f"1,{MAX_BATCH}", "--repeats", "5"]
        budget = max(60, int(self.until - time.monotonic() - START_SECONDS))
        said = self.command(
            *profile, *grid, "--budget", budget, "--out", bundle, "--json", "--", *self.flags
        )
        cost = load_bundle(bundle).cost
        assert cost is not None
        if self.prepared is not None:
            write_throughput(bundle, priced(bundle, self.prepared / "rounds.npz"))
        latency_us = cost.step.latency_us[:, 0].round(1).tolist()
        return {
            "identity": repr(cost.identity),
            "latency_us": latency_us,
            "expert_slope_us": cost.step.expert_slope_us,
            "expert_slope_r2": cost.step.expert_slope_r2,
            "said": said[-1500:],
        }


def main() -> None:
    """Run the stages and leave with 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all stages")
    parser.add_argument("--source", type=Path, help="pair that PAIR was inflated from")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--bundle", type=Path, help="bundle to begin with, copied into --out")
    begin.add_argument("--prepared", type=Path, help="folder of sglang_prepare.py with a bundle")
    parser.add_argument("--mem-fraction", type=float, default=0.5, help="of each server")
    parser.add_argument("--stages", default="doctor,serve,calibrate,profile,checked")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check = Check(options)
    for name in options.stages.split(","):
        check.stage(name, getattr(check, name))
    print(json.dumps(check.found, indent=1))
    sys.exit(any("FAILED" in str(value) for value in check.found.values()))


if __name__ == "__main__":
    main()
