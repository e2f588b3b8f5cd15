"""Measuring: one server after the other, everything recorded, a failed arm never ends the run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tarfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_file import commit, machine, versions
from serving.arms import MODEL, NO_MULTICAST, Boot, boots_of
from serving.costs import load_rounds, recorded_costs, write_bundle
from serving.decoding import Looping, Rounds, rates, rounds_of
from serving.load import Ask, Prompt, Stream, run_load
from serving.moe_files import write_configs
from serving.servers import (
    Server,
    ServerFailed,
    memory_of,
    plugin_names,
    plugin_path,
    sglang_command,
    start,
)
from serving.sizes import read_prompts, sizes_of
from serving.texts import top_two

from hybridspec.demo.sglang_weights import SOURCE_ENV

RAW = "sglang_decode_raw.json"
COST_TOKENS = 40
PACKAGES = ("sglang", "torch", "triton", "openai", "transformers", "numpy")


class OutOfTime(RuntimeError):
    """The limit is near."""


def plain(stream: Stream) -> dict[str, Any]:
    """A stream as JSON, times to 10 us."""
    found = dataclasses.asdict(stream)
    found["submitted_s"] = round(stream.submitted_s, 5)
    found["arrived_s"] = [round(at, 5) for at in stream.arrived_s]
    return found


class Measuring:
    """A run: options, time left, and the recording that is written after every step."""

    recording = RAW

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path("/tmp") / f"sglang-decode-{int(time.time())}"
        self.work.mkdir()
        self.clients = [int(count) for count in options.clients.split(",")]
        self.sizes = sizes_of(
            self.clients,
            per_category=options.per_category,
            tokens=options.tokens,
            at=options.at,
            spread=options.spread_lengths,
        )
        most = max(size.per_category for size in self.sizes.values())
        self.prompts = read_prompts(options.padded / "prompts.json", most)
        self.looping = Looping(options.padded / "target" / "tokenizer.json")
        self.bundle: Path | None = options.bundle
        self.earlier: dict[str, Any] = {}
        if options.earlier is not None:
            self.earlier = json.loads(options.earlier.read_text(encoding="utf-8"))["arms"]
        self.raw: dict[str, Any] = {
            "about": {
                "commit": commit(),
                "machine": _where(),
                "versions": versions(PACKAGES),
                "arms": options.arms,
                "clients": self.clients,
                "tokens": options.tokens,
                "prompts": len(self.prompts),
                "sizes": {str(c): size.described(self.prompts) for c, size in self.sizes.items()},
                "prefill_graphs": list(options.prefill_graphs),
                "prompt_tokens_mean": sum(len(p.ids) for p in self.prompts) / len(self.prompts),
                "tp_size": options.tp_size,
            },
            "arms": {},
            "boots": {},
        }

    # ------------------------------------------------------------------ time, output

    @property
    def left_s(self) -> float:
        return self.options.limit - (time.monotonic() - self.began)

    def say(self, *words: object) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s]", *words, flush=True)

    def save(self) -> None:
        """Write the recording, whole or not at all."""
        self.raw["about"]["seconds"] = round(time.monotonic() - self.began, 1)
        partial = self.out / f"{self.recording}.partial"
        partial.write_text(json.dumps(self.raw), encoding="utf-8")
        partial.replace(self.out / self.recording)

    def archive(self) -> None:
        """Keep the servers' logs and the bundle in one file."""
        with tarfile.open(self.out / "sglang_decode_logs.tar.xz", "w:xz") as archive:
            for path in sorted(self.work.glob("*.log")) + sorted(self.work.glob("bundle")):
                archive.add(path, arcname=path.name)

    def take_costs(self, path: Path) -> None:
        """Write the bundle from an earlier recording with the same flags on a machine alike."""
        earlier = json.loads(path.read_text(encoding="utf-8"))
        boot = earlier["boots"]["hybridspec-fixed"]
        flags = dict(zip(boot["flags"][:-1], boot["flags"][1:], strict=True))
        info = {
            "model_path": str(self.options.padded.resolve() / "target"),
            "speculative_draft_model_path": str(self.options.padded.resolve() / "drafter"),
            "tp_size": earlier["about"]["tp_size"],
            "attention_backend": flags["--attention-backend"],
            "linear_attn_backend": flags["--linear-attn-backend"],
            "moe_runner_backend": flags["--moe-runner-backend"],
            "cuda_graph_config": boot["graph_config"],
        }
        rounds = recorded_costs(earlier, self.looping, self.clients)
        self.raw["costs"] = {
            **self.write_bundle(info, rounds),
            "recorded_by_commit": earlier["about"]["commit"],
        }
        self.say("bundle:", json.dumps(self.raw["costs"])[:2500])
        self.save()

    # ------------------------------------------------------------------ one server

    def environment(self, boot: Boot) -> dict[str, str]:
        """What the server's process gets on top of ours."""
        import torch
        import triton

        algorithm, weights = plugin_names()
        found = {
            "PYTHONPATH": plugin_path(self.work / "plugins"),
            "SGLANG_PLUGINS": weights if boot.config is None else f"{algorithm},{weights}",
            SOURCE_ENV: str(self.options.source.resolve()),
            # A scheduler that dies ends the server at once, not after a minute of core dumps.
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            # Two processes import the same packages one after the other: let the second read what
            # the first compiled, also where the machine's image says otherwise.
            "PYTHONDONTWRITEBYTECODE": "",
        }
        if self.options.tp_size > 1:
            found |= NO_MULTICAST
        if torch.cuda.is_available():
            folder = write_configs(
                self.work / "moe",
                gpu_name=torch.cuda.get_device_name(0),
                triton_version=triton.__version__,
            )
            found["SGLANG_MOE_CONFIG_DIR"] = str(folder)
        if boot.config is not None:
            config = {
                "telemetry": str(self.telemetry(boot)),
                "telemetry_interval_s": 0.5,
                # Its requests would run beside ours; costs here are of this run and its texts.
                "self_check": False,
                **boot.config,
            }
            if boot.needs_bundle:
                config["bundle"] = str(self.bundle)
                if boot.config.get("switches"):
                    # The bundle is of all kernels; what a switch costs is what is measured.
                    config["allow"] = ["backends"]
                if self.options.costs_from is not None:
                    # Backends are named by flags there, by what the server made of them here.
                    config["allow"] = ["backends", "graph_tiers"]
            path = self.work / f"{boot.name}.json"
            path.write_text(json.dumps(config, indent=1), encoding="utf-8")
            found["HYBRIDSPEC_CONFIG"] = str(path)
        return found

    def telemetry(self, boot: Boot) -> Path:
        """File that the plugin writes counters to."""
        return self.work / f"{boot.name}.telemetry.json"

    def counters(self, boot: Boot) -> dict[str, Any] | None:
        """The plugin's counters since its start, once they are written."""
        time.sleep(0.7)
        path = self.telemetry(boot)
        return json.loads(path.read_text()) if path.exists() else None

    def run_boot(self, boot: Boot, port: int) -> None:
        """Start, measure, stop."""
        options = self.options
        record: dict[str, Any] = {"name": boot.name}
        self.raw["boots"][boot.name] = record
        arguments = boot.arguments(
            target=options.padded.resolve() / "target",
            drafter=options.padded.resolve() / "drafter",
            port=port,
            most_running=max(self.clients),
            tp_size=options.tp_size,
            prefill_graphs=options.prefill_graphs,
        )
        record["flags"] = [a for a in arguments if not a.startswith(str(options.padded.resolve()))]
        log = self.work / f"{boot.name}.log"
        server = start(
            sglang_command(arguments),
            url=f"http://127.0.0.1:{port}",
            log=log,
            env=self.environment(boot),
            timeout_s=min(options.boot_timeout, max(self.left_s - 10.0, 1.0)),
        )
        try:
            record["boot_s"] = round(server.boot_s, 1)
            self.say(boot.name, f"up in {server.boot_s:.1f} s")
            self.describe(server, record)
            self.save()
            self.tasks(boot, server)
        finally:
            record["facts"] = server.facts()
            server.stop()
            self.save()

    def describe(self, server: Server, record: dict[str, Any]) -> None:
        """What the server says of its memory and limits."""
        record["memory"] = memory_of(server.facts())
        for fact in server.facts():
            self.say("   ", fact[:220])
        try:
            info = server.get("/server_info")
        except OSError as error:
            self.say("server_info:", error)
            return
        state = (info.get("internal_states") or [{}])[0]
        server.info = {**info, **state}
        record["max_running_requests"] = state.get("effective_max_running_requests_per_dp")
        record["memory_usage"] = state.get("memory_usage")
        record["graph_config"] = state.get("cuda_graph_config") or info.get("cuda_graph_config")

    # ------------------------------------------------------------------ what is asked of a server

    def tasks(self, boot: Boot, server: Server) -> None:
        """Everything that is measured on one server."""
        most = max(self.clients)
        self.load(server, self.prompts[:most], Ask(24), clients=most)
        self.load(server, self.prompts[-2:], Ask(32), clients=1)
        if boot.name == "hybridspec-fixed":
            for length in self.options.fixed_lengths:
                self.arm(f"fixed{length}", boot, server, verify_length=length, skip=(2, 8))
            self.costs(server)
            return
        self.arm(boot.name, boot, server)
        if boot.name == "hybridspec" and self.options.costs_from is not None:
            # The machine of the costs may be another of its kind: the same arms say how alike.
            for length in (5, 16):
                self.arm(f"again{length}", boot, server, verify_length=length, skip=(2, 4, 8))
        if boot.name == "ar":
            self.raw["scored"] = top_two(server, self.prompts, self.options.tokens)
            self.say("scored plain decoding")

    def load(
        self, server: Server, prompts: Sequence[Prompt], ask: Ask, *, clients: int
    ) -> list[Stream]:
        """Run the load generator; the first failure is shown.

        Raises:
            OutOfTime: before it would run past the limit.
            ServerFailed: the server ended, or every request failed.
        """
        if self.left_s < 12.0:
            raise OutOfTime(f"{self.left_s:.0f} s left")
        streams = run_load(server.url, MODEL, prompts, ask, clients=clients, timeout_s=60.0)
        failed = [stream.error for stream in streams if stream.error]
        unanswered = len(prompts) - len(streams)
        if failed:
            self.say(f"{len(failed)} of {len(streams)} requests failed: {failed[0][:300]}")
        if unanswered or len(failed) == len(streams) or server.process.poll() is not None:
            raise ServerFailed(
                f"{len(failed)} requests failed and {unanswered} were not sent\n{server.tail()}"
            )
        return streams

    def arm(
        self,
        name: str,
        boot: Boot,
        server: Server,
        *,
        verify_length: int | None = None,
        skip: tuple[int, ...] = (),
    ) -> None:
        """One arm at all client counts."""
        record = self.raw["arms"].setdefault(name, {"boot": boot.name, "runs": {}})
        for clients in self.clients:
            if clients in skip:
                continue
            size = self.sizes[clients]
            prompts = size.prompts(self.prompts)
            ask = Ask(size.tokens, verify_length, lengths=size.lengths(prompts))
            before = len(server.prefill_passes())
            streams = self.load(server, prompts, ask, clients=clients)
            record["runs"][str(clients)] = [plain(stream) for stream in streams]
            passes = server.prefill_passes()[before:]
            record.setdefault("prefill_passes", {})[str(clients)] = passes
            if boot.config is not None:
                record.setdefault("counters", {})[str(clients)] = self.counters(boot)
            self.save()
            rounds = rounds_of(streams, self.looping, clients=clients)
            found = rates(rounds, streams, clients=clients).get("all", {})
            shown = ", ".join(
                f"{key} {found[key]:.2f}"
                for key in ("tokens_per_s", "tokens_a_round", "ms_a_round", "wall_tokens_per_s")
                if key in found
            )
            self.say(f"{name}, {clients} clients: {shown or 'no counted round'}")

    def costs(self, server: Server) -> None:
        """Measure round times by length, and write the bundle that the policy runs with."""
        options = self.options
        plain_decoding = {**self.earlier, **self.raw["arms"]}.get("ar", {"runs": {}})["runs"]
        missing = [count for count in self.clients if str(count) not in plain_decoding]
        if options.prepared is None or missing:
            self.say("no bundle of this run: it takes --prepared, and ar here or in --earlier")
            return
        cells: dict[tuple[int, int], list[Stream]] = {}
        for sweep in range(options.cost_sweeps):
            if sweep and self.left_s < 150.0:
                break
            for clients in self.clients:
                for turn in range(16):
                    # Neighbouring lengths apart in time, the second sweep in another order.
                    length = (5 * turn + 8 * sweep) % 16 + 1
                    count = 2 if clients == 1 else clients
                    first = (turn + 16 * sweep) % max(len(self.prompts) - count, 1)
                    streams = self.load(
                        server,
                        self.prompts[first : first + count],
                        Ask(COST_TOKENS, length),
                        clients=clients,
                    )
                    cells.setdefault((clients, length), []).extend(streams)
            self.say(f"cost sweep {sweep + 1} done")
        self.raw["cost_streams"] = {
            f"{clients} clients, {length} rows": [plain(stream) for stream in streams]
            for (clients, length), streams in cells.items()
        }
        rounds = recorded_costs(
            {**self.raw, "arms": {**self.earlier, **self.raw["arms"]}}, self.looping, self.clients
        )
        self.raw["costs"] = self.write_bundle(server.info, rounds)
        self.say("bundle:", json.dumps(self.raw["costs"])[:1500])

    def write_bundle(
        self, info: dict[str, Any], rounds: dict[tuple[int, int], Rounds]
    ) -> dict[str, Any]:
        """Write the bundle with this machine's identity as the plugin will see it.

        Args:
            info: what the measured server said of itself (`/server_info`).
        """
        import torch

        from hybridspec.sglang_plugin.identity import engine_cost_identity, pair_of

        options = self.options
        context = round(self.raw["about"]["prompt_tokens_mean"] + options.tokens / 2)
        gpu = torch.cuda.get_device_properties(0)
        from importlib.metadata import version

        identity = engine_cost_identity(
            info,
            pair_of(info),
            version=version("sglang"),
            gpu_name=gpu.name,
            multiprocessors=gpu.multi_processor_count,
            torch_version=torch.__version__,
            max_batch=max(self.clients),
        )
        out = self.work / "bundle"
        found = write_bundle(
            options.prepared / "bundle",
            out,
            rounds,
            load_rounds(options.prepared / "rounds.npz"),
            identity,
            context_tokens=context,
            settings={"engine": "sglang", "clients": self.clients, "tokens": COST_TOKENS},
        )
        if self.bundle is None:
            self.bundle = out
        return {**found, "identity": dataclasses.asdict(identity), "context_tokens": context}


def _where() -> dict[str, Any]:
    import torch
    from results_file import gpu

    return {**machine(), **(gpu() if torch.cuda.is_available() else {})}


def measure(options: argparse.Namespace) -> None:
    """Run all arms that time allows."""
    run = Measuring(options)
    if options.costs_from is not None:
        run.take_costs(options.costs_from)
    run.say("by clients:", json.dumps(run.raw["about"]["sizes"]))
    for index, boot in enumerate(boots_of(options.arms.split(","))):
        if boot.needs_bundle and run.bundle is None:
            run.raw["boots"][boot.name] = {"skipped": "no bundle"}
            run.say(boot.name, "skipped: no bundle")
            continue
        if run.left_s < boot.least_s:
            run.raw["boots"][boot.name] = {"skipped": f"{run.left_s:.0f} s left"}
            run.say(boot.name, "skipped:", f"{run.left_s:.0f} s left")
            continue
        try:
            run.run_boot(boot, options.port + 20 * index)
        except Exception as error:  # the next arm may run all the same
            run.raw["boots"].setdefault(boot.name, {})["failed"] = str(error)[-6000:]
            run.say(boot.name, "FAILED")
            traceback.print_exc()
            print(str(error)[-6000:], flush=True)
        finally:
            run.save()
    run.archive()
    run.say(f"recorded in {RAW}")
    from serving.report import report

    report([run.out / RAW], options.padded / "target" / "tokenizer.json", run.out)
