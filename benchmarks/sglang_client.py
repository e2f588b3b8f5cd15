"""The `openai` client against real SGLang servers: streams, crowds, aborts, judged by plain ones.

    python benchmarks/sglang_client.py PAIR --out DIR                      # e.g. the small pair
    python benchmarks/sglang_client.py PADDED --source PAIR --out DIR      # the padded pair
    python benchmarks/sglang_client.py PAIR --servers default,radix,retract --out DIR
    python benchmarks/sglang_client.py PADDED --source PAIR --servers policy --bundle B --out DIR
    python benchmarks/sglang_client.py PAIR --url URL --out DIR            # a server that runs

PAIR has target/, drafter/ and prompts.json. A server without speculation answers first: one client,
four clients (the control), once more with the margins of every token, and its own texts in one pass
each, which shows what another order of sums does to a margin. Then servers with the plugin hold the
conversation, and each greedy answer, also an abandoned one, is judged at its first difference from
plain decoding: a token within a tie of its best, the target's choice in float64, or a fault. Short
answers at temperature 1 are counted on both sides and must fit one law.

Servers: `default`; `radix`, with a prefix cache, where prompts go on from answers; `retract`, where
SGLang takes running requests back and reads them again; `evict`, a prefix cache with little room;
`paged`, one in pages of 16 tokens; `policy` and `select`, where a bundle chooses lengths and, in
the second, the first router corrects them. All others take 8 rows. A check, not a benchmark.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.exact import exact_row
from results_file import machine, write_results
from serving.arms import MODEL, NO_MULTICAST, Boot
from serving.client_report import chosen_lengths, retractions, summary, tables
from serving.conversation import MOST_CLIENTS, Conversation, Stage
from serving.decoding import Looping
from serving.judged import CANDIDATES, Judge, Reference, lead_changes, spread
from serving.law import nearest_to
from serving.load import Ask, Prompt, Stream, run_load
from serving.measuring import PACKAGES, read_prompts
from serving.plugin_servers import SERVERS, PluginServer
from serving.servers import (
    Server,
    ServerFailed,
    plugin_names,
    plugin_path,
    sglang_command,
    start,
)
from serving.texts import top_two

from hybridspec.demo.sglang_weights import SOURCE_ENV
from hybridspec.sglang_plugin.server_process import free_port

BEGAN = time.monotonic()
# Memory of the card comes back at once; another server on it would be waited for in vain.
GPU_WAIT_S = 3.0
# Prompts that go on from answers: numbers of their own, tokens of the answer, tokens asked for.
FOLLOW_NUMBER, FOLLOW_TAKES, FOLLOW_TOKENS = 100_000, 0.9, 48
# Answers whose law is compared: behind the ends of so many prompts, of so many tokens.
LAW_NUMBER, LAW_PROMPTS, LAW_PROMPT_TOKENS, LAW_TOKENS = 200_000, 2, 24, 3
# Behind which prompts: where plain decoding's likeliest text leaves about as many to be counted.
SAMPLES_A_TEXT = 100.0


def say(*parts: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *parts, flush=True)


class Run:
    """Servers of one pair, one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.prompts = read_prompts(options.pair / "prompts.json", options.per_category)
        self.ask = Ask(options.tokens, dialect=options.dialect)
        self.until = BEGAN + options.limit
        self.looping = Looping(options.pair / "target" / "tokenizer.json")
        self.judge: Judge | None = None
        self.follow: list[Prompt] = []
        self.sampled: dict[int, list[str]] = {}
        self.law_prompts: list[Prompt] = []
        self.law_ask = dataclasses.replace(self.ask, max_tokens=LAW_TOKENS, temperature=1.0)
        self.rows: list[dict[str, Any]] = []
        self.where = machine()

    # Servers.

    def environment(self, name: str, of: PluginServer | None) -> dict[str, str]:
        """What a server's process gets on top of ours."""
        options, plugin = self.options, of is not None
        algorithm, weights = plugin_names()
        names = [algorithm] * plugin + [weights] * (options.source is not None)
        env = {
            "PYTHONPATH": plugin_path(options.out / "site"),
            # Nothing is called so: without any name SGLang loads every plugin that it finds.
            "SGLANG_PLUGINS": ",".join(names) or "none",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        }
        if options.source is not None:
            env[SOURCE_ENV] = str(options.source)
        if options.tp_size > 1:
            env |= NO_MULTICAST
        if of is not None:
            config: dict[str, Any] = {
                "telemetry": str(options.out / f"{name}.telemetry.json"),
                "telemetry_interval_s": 0.5,
                # Its requests would run beside the first ones here.
                "self_check": False,
                **of.config,
            }
            if of.chooses:
                config |= {"bundle": str(options.bundle)}
            path = options.out / f"{name}.config.json"
            path.write_text(json.dumps(config))
            env |= {"HYBRIDSPEC_CONFIG": str(path), **of.environment}
        return env

    def boot(self, name: str, of: PluginServer | None) -> Server:
        """Start a server of the pair; plain decoding without `of`."""
        options, port = self.options, free_port()
        arguments = Boot(name, "" if of is None else "HYBRIDSPEC").arguments(
            target=options.pair / "target",
            drafter=options.pair / "drafter",
            port=port,
            most_running=MOST_CLIENTS,
            tp_size=options.tp_size,
        )
        if of is not None:
            arguments = of.arguments(arguments)
        say(name, "starts" if of is None else f"starts: {of.about}")
        server = start(
            sglang_command(arguments),
            url=f"http://127.0.0.1:{port}",
            log=options.out / f"{name}.log",
            env=self.environment(name, of),
            timeout_s=options.boot_timeout,
        )
        say(f"{name} is up after {server.boot_s:.1f} s")
        return server

    # Plain decoding.

    def plain(self) -> bool:
        """All that answers are judged by, and how far plain decoding agrees with itself.

        Whether it could be had; without it nothing can be judged.
        """
        try:
            server = self.boot("plain", None)
            try:
                self.ask_plain(server)
            finally:
                server.stop(GPU_WAIT_S)
        except (ServerFailed, OSError) as error:
            self.failed("plain", error)
            return False
        return True

    def failed(self, name: str, error: Exception) -> None:
        """Say and keep that a server could not be had."""
        print(f"error: the server {name!r}: {error}", file=sys.stderr, flush=True)
        print(f"its log: {self.options.out / f'{name}.log'}", file=sys.stderr, flush=True)
        self.keep(name, None, [Stage("start", "FAILED", (str(error) or "?").splitlines()[0])])

    def ask_plain(self, server: Server) -> None:
        """The same with a server that is up."""
        options, prompts = self.options, self.prompts
        reference = Reference()

        def streams(asked: Sequence[Prompt], ask: Ask, clients: int) -> list[Stream]:
            found = run_load(server.url, options.model, asked, ask, clients=clients)
            if wrong := [stream.error for stream in found if stream.error]:
                raise ServerFailed(f"plain decoding failed: {wrong[0]}\n{server.tail(40)}")
            if any(stream.tokens[-1] != ask.max_tokens for stream in found):
                raise ServerFailed(f"plain decoding gave fewer than {ask.max_tokens} tokens")
            return found

        streams(prompts[:MOST_CLIENTS], dataclasses.replace(self.ask, max_tokens=16), MOST_CLIENTS)
        alone = streams(prompts, self.ask, 1)
        scored = top_two(server, prompts, options.tokens, candidates=CANDIDATES)
        reference.add(prompts, alone, scored)
        take = round(FOLLOW_TAKES * options.tokens)
        self.follow = [
            Prompt(FOLLOW_NUMBER + p.number, p.category, [*p.ids, *entry["ids"][:take]])
            for p, entry in zip(prompts, scored, strict=True)
        ]
        ask = dataclasses.replace(self.ask, max_tokens=FOLLOW_TOKENS)
        followed = streams(self.follow, ask, 1)
        margins = top_two(server, self.follow, FOLLOW_TOKENS, candidates=CANDIDATES)
        reference.add(self.follow, followed, margins)
        context = max(len(p.ids) for p in self.follow) + options.tokens
        exact = exact_row((options.source or options.pair) / "target", max_context=context)
        self.judge = Judge(reference, self.looping, exact)
        crowd = self.judge.judge(streams(prompts, self.ask, MOST_CLIENTS))
        say(f"plain, {MOST_CLIENTS} clients:", crowd.told())
        ends = [
            Prompt(LAW_NUMBER + p.number, p.category, p.ids[-LAW_PROMPT_TOKENS:]) for p in prompts
        ]
        texts = options.samples / SAMPLES_A_TEXT
        behind = top_two(server, ends, LAW_TOKENS, candidates=CANDIDATES)
        self.law_prompts = [ends[k] for k in nearest_to(texts, behind)[:LAW_PROMPTS]]
        for prompt in self.law_prompts:
            drawn = streams([prompt] * options.samples, self.law_ask, MOST_CLIENTS)
            self.sampled[prompt.number] = [stream.text for stream in drawn]
        changes = spread(lead_changes(server.post, prompts, scored))
        say("plain, its own texts in one pass: a lead changes by at most", changes)
        self.rows.append(
            {
                "kind": "control",
                "server": "plain",
                "tp_size": options.tp_size,
                "boot_s": round(server.boot_s, 1),
                "clients": MOST_CLIENTS,
                "compared": crowd.compared,
                "differences": list(crowd.rows),
                **{f"lead_change_{key}": value for key, value in changes.items()},
            }
        )

    # The plugin.

    def server(self, name: str) -> bool:
        """Start a server with the plugin and talk to it; whether all was as it must be."""
        of = SERVERS[name]
        try:
            server = self.boot(name, of)
        except ServerFailed as error:
            self.failed(name, error)
            return False
        try:
            return self.converse(of, server.url, server)
        finally:
            server.stop(GPU_WAIT_S)

    def converse(self, of: PluginServer, url: str, server: Server | None) -> bool:
        """The conversation with one server; whether all was as it must be."""
        options = self.options
        talk = Conversation(
            url, options.model, self.prompts, self.ask, judge=self.judge, until=self.until,
            say=say, repeats=of.repeats,
        )  # fmt: skip
        talk.run()
        if of.law and self.sampled:
            talk.stage("law", lambda: talk.law(self.sampled, self.law_prompts, self.law_ask))
        follow = dataclasses.replace(self.ask, max_tokens=FOLLOW_TOKENS)
        if of.caches and not of.evicts:
            talk.stage("prefix hits", lambda: talk.prefix_hits(self.follow, follow))
        if of.evicts:
            talk.stage("evictions", lambda: talk.evictions(self.follow, follow))
        if server is not None and of.retracts:
            talk.stage("retractions", lambda: retractions(server.log))
        if server is not None and of.chooses:
            telemetry = options.out / f"{of.name}.telemetry.json"
            correction = str(of.config.get("correction", "off"))
            talk.stage("chosen lengths", lambda: chosen_lengths(telemetry, correction))
        self.keep(of.name, server, talk.stages)
        if server is not None and not talk.passed:
            say(server.tail(40))
        return talk.passed

    def keep(self, name: str, server: Server | None, stages: Sequence[Stage]) -> None:
        """Take a server's stages, and write all that there is."""
        boot_s = None if server is None else round(server.boot_s, 1)
        self.rows += [
            {"kind": "stage", "server": name, "boot_s": boot_s, **dataclasses.asdict(stage)}
            for stage in stages
        ]
        self.write()

    def write(self) -> None:
        """The result file."""
        where = dict(self.where)
        import torch

        if torch.cuda.is_available():
            from results_file import gpu

            where |= gpu()
        write_results(
            self.options.name, rows=self.rows, summary=summary(self.rows), seed=0, where=where,
            packages=PACKAGES, out=self.options.out,
        )  # fmt: skip


def read_options() -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--source", type=Path, help="pair that a padded one was made from")
    parser.add_argument("--bundle", type=Path, help="of the servers policy and select")
    parser.add_argument("--servers", help=f"some of {','.join(SERVERS)} (default)")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs that share the target")
    parser.add_argument("--url", help="of a server that runs already; nothing judges its answers")
    parser.add_argument("--model", default=MODEL, help="name that it serves")
    parser.add_argument(
        "--dialect", choices=("sglang", "hybridspec"), default="sglang",
        help="keys that the server at --url takes: SGLang's, or those of --engine reference",
    )  # fmt: skip
    parser.add_argument("--per-category", type=int, default=2, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=160, help="of each greedy answer")
    parser.add_argument("--samples", type=int, default=1500, help="answers of each compared law")
    parser.add_argument(
        "--boot-timeout", type=float, default=200.0, metavar="S", help="for a server"
    )
    parser.add_argument(
        "--limit", type=float, default=420.0, metavar="S", help="for all; then stages are skipped"
    )
    parser.add_argument("--name", help="of the result file (sglang_client, sglang_client_padded)")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    options = parser.parse_args()
    for key in ("pair", "source", "bundle", "out"):
        if getattr(options, key) is not None:
            setattr(options, key, getattr(options, key).resolve())
    if options.url is not None:
        if not options.url.startswith(("http://", "https://")):
            parser.error(f"--url {options.url}: begin it with http:// or https://")
        if given := [
            key
            for key in ("servers", "bundle", "source", "tp_size")
            if (getattr(options, key) != parser.get_default(key))
        ]:
            flags = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            parser.error(f"{flags} with --url: that server runs as it was started; leave them out")
    options.servers = (options.servers or "default").split(",")
    if wrong := [name for name in options.servers if name not in SERVERS]:
        parser.error(f"--servers {','.join(wrong)}: choose of {', '.join(SERVERS)}")
    chooses = [name for name in options.servers if SERVERS[name].chooses]
    if chooses and options.bundle is None:
        parser.error(f"--servers {','.join(chooses)}: add --bundle, whose policy chooses lengths")
    if options.bundle is not None and not chooses:
        parser.error(f"--bundle {options.bundle}: add policy or select to --servers, none reads it")
    for key in ("source", "bundle"):
        if (folder := getattr(options, key)) is not None and not folder.is_dir():
            parser.error(f"--{key} {folder}: there is no such folder")
    for name, least in (
        ("per_category", 1), ("tokens", 8), ("samples", 100), ("tp_size", 1), ("limit", 1),
        ("boot_timeout", 1),
    ):  # fmt: skip
        if getattr(options, name) < least:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} {getattr(options, name)}: {least} at least")
    if not (options.pair / "prompts.json").is_file():
        parser.error(
            f"{options.pair} has no prompts.json: name a folder with target/, drafter/ and it, a "
            'list of {"split": "test", "cat": CATEGORY, "ids": TOKENS}'
        )
    options.name = options.name or ("sglang_client_padded" if options.source else "sglang_client")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}")
    return options


def main() -> int:
    """Run all; 1 where a stage failed."""
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run = Run(options)
    if options.url:
        passed = [run.converse(SERVERS["default"], options.url.rstrip("/"), None)]
    else:
        passed = [run.plain()]
        passed += [run.server(name) for name in options.servers if passed[0]]
    print(tables(run.rows), flush=True)
    print(json.dumps(summary(run.rows), indent=1), flush=True)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
