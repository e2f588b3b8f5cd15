"""The `openai` client against a real SGLang server with the plugin: streams, crowds, aborts.

    python benchmarks/sglang_client.py PAIR --out DIR                      # e.g. the small pair
    python benchmarks/sglang_client.py PADDED --source PAIR --out DIR      # the padded pair
    python benchmarks/sglang_client.py PAIR --url URL --out DIR            # a server that runs

PAIR has target/, drafter/ and prompts.json. Greedy answers of one client are what later ones are
compared with: streamed and whole, with four clients, behind aborted streams. Differences with
several clients may be ties of bf16 logits and are shown; a greedy answer of one client on an idle
server must stay the same to the last character. A check, not a benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from serving.arms import MODEL, Boot
from serving.load import Ask, Prompt, Stream, run_load
from serving.measuring import read_prompts
from serving.servers import Server, plugin_names, plugin_path, sglang_command, start

from hybridspec.demo.sglang_weights import SOURCE_ENV
from hybridspec.sglang_plugin.server_process import free_port

BEGAN = time.monotonic()
MOST_CLIENTS = 4
# What an aborted answer would have had, and the chunks that are read before it is left.
LONG_TOKENS, READ_CHUNKS = 1500, 6
IDLE_SECONDS = 10.0


def say(*parts: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *parts, flush=True)


class Failed(AssertionError):
    """The server answered otherwise than it must."""


class Conversation:
    """Stages against one server.

    Args:
        url: of the server.
        model: name that it serves.
        prompts: token ids.
    """

    def __init__(
        self, url: str, model: str, prompts: Sequence[Prompt], ask: Ask, out: Path, until: float
    ) -> None:
        self.url, self.model, self.prompts, self.ask = url, model, prompts, ask
        self.out, self.until = out, until
        self.greedy: dict[int, str] = {}
        self.rows: list[tuple[str, str, str]] = []

    def run(self) -> bool:
        """All stages; whether none failed."""
        for stage in (
            self.streamed, self.whole, self.lengths, self.crowd, self.sampled, self.aborted,
            self.after_abort, self.abort_beside_others, self.refused, self.healthy,
        ):  # fmt: skip
            self.stage(stage.__name__.replace("_", " "), stage)
        width = max(len(name) for name, _, _ in self.rows)
        print("\n".join(f"{name:<{width}}  {state:<7} {told}" for name, state, told in self.rows))
        return all(state == "ok" for _, state, _ in self.rows)

    def stage(self, name: str, work: Callable[[], str]) -> None:
        """Run one stage; a failure is printed and kept, the next stage runs."""
        if time.monotonic() > self.until:
            self.rows.append((name, "skipped", "no time left"))
        else:
            began = time.monotonic()
            try:
                self.rows.append((name, "ok", work()))
            except Exception as error:
                self.rows.append((name, "FAILED", f"{type(error).__name__}: {error}"[:300]))
                traceback.print_exc()
            say(*self.rows[-1], f"({time.monotonic() - began:.1f} s)")
        (self.out / "client.json").write_text(json.dumps(self.rows, indent=1))

    def answers(self, ask: Ask, *, clients: int, count: int | None = None) -> list[Stream]:
        """Streams of the first `count` prompts, none of which may fail."""
        asked = self.prompts[:count]
        streams = run_load(self.url, self.model, asked, ask, clients=clients, timeout_s=60.0)
        wrong = [stream.error for stream in streams if stream.error]
        if wrong or len(streams) != len(asked):
            raise Failed(f"{len(wrong)} of {len(asked)} requests failed: {wrong[:1]}")
        if any(not stream.text for stream in streams):
            raise Failed("an answer is empty")
        return streams

    def compared(self, streams: Sequence[Stream]) -> str:
        """How many answers are the first ones."""
        same = sum(self.greedy[stream.prompt] == stream.text for stream in streams)
        return f"{same} of {len(streams)} as one client got them"

    # Stages.

    def streamed(self) -> str:
        """One client, greedy, streamed: what all others are compared with."""
        self.answers(replace(self.ask, max_tokens=16), clients=MOST_CLIENTS, count=MOST_CLIENTS)
        self.idle()
        streams = self.answers(self.ask, clients=1)
        self.greedy = {stream.prompt: stream.text for stream in streams}
        chunks = [len(stream.tokens) for stream in streams]
        if max(chunks) < 3:
            raise Failed(f"answers came in {chunks} chunks: nothing was streamed")
        took = sum(stream.arrived_s[-1] - stream.arrived_s[0] for stream in streams)
        tokens = sum(stream.tokens[-1] - stream.tokens[0] for stream in streams)
        first_s = sorted(stream.arrived_s[0] - stream.submitted_s for stream in streams)
        middle_ms = 1e3 * first_s[len(first_s) // 2]
        return f"{tokens / took:.0f} tokens/s, first token after {middle_ms:.0f} ms"

    def whole(self) -> str:
        """The same answers in one piece."""
        found = asyncio.run(self._whole(2))
        wrong = [number for number, text in found.items() if text != self.greedy[number]]
        if wrong:
            raise Failed(f"prompts {wrong} have another text than their streams")
        return f"{len(found)} answers as streamed"

    async def _whole(self, count: int) -> dict[int, str]:
        async with self._client() as client:
            found = {}
            for prompt in self.prompts[:count]:
                arguments = self.ask.arguments(prompt)
                arguments |= {"stream": False}
                arguments.pop("stream_options")
                answer = await client.completions.create(model=self.model, **arguments)
                found[prompt.number] = answer.choices[0].text
            return found

    def lengths(self) -> str:
        """One client at forced lengths: differences are ties."""
        told = []
        for length in (1, 5, 16):
            streams = self.answers(replace(self.ask, verify_length=length), clients=1, count=2)
            told.append(f"{length} rows: {self.compared(streams)}")
        return "; ".join(told)

    def crowd(self) -> str:
        """Four clients at once, greedy."""
        return self.compared(self.answers(self.ask, clients=MOST_CLIENTS))

    def sampled(self) -> str:
        """Four clients at temperature 1; one more time with one client."""
        hot = replace(self.ask, temperature=1.0)
        together = self.answers(hot, clients=MOST_CLIENTS)
        alone = self.answers(hot, clients=1, count=2)
        same = sum(self.greedy[stream.prompt] == stream.text for stream in [*together, *alone])
        if same == len(together) + len(alone):
            raise Failed("every sampled answer is the greedy one")
        return f"{len(together) + len(alone)} answers, {same} of them the greedy one"

    def aborted(self) -> str:
        """Four streams are left after some chunks, greedy and sampled; the server gets idle."""
        began = time.monotonic()
        read = asyncio.run(self._leave([0.0, 1.0, 0.0, 1.0]))
        left_s = time.monotonic() - began
        return f"{read} chunks read, idle {self.idle():.1f} s after {left_s:.1f} s of streams"

    async def _leave(self, temperatures: Sequence[float]) -> int:
        async with self._client() as client:

            async def one(prompt: Prompt, temperature: float) -> int:
                ask = replace(self.ask, max_tokens=LONG_TOKENS, temperature=temperature)
                stream = await client.completions.create(model=self.model, **ask.arguments(prompt))
                read = 0
                async for _ in stream:
                    read += 1
                    if read == READ_CHUNKS:
                        break
                await stream.close()
                return read

            pairs = zip(self.prompts, temperatures, strict=False)
            return sum(await asyncio.gather(*(one(prompt, t) for prompt, t in pairs)))

    def after_abort(self) -> str:
        """The first answers once more: nothing of the aborted requests may be left in a state."""
        streams = self.answers(self.ask, clients=1)
        told = self.compared(streams)
        wrong = [s.prompt for s in streams if self.greedy[s.prompt] != s.text]
        if wrong:
            raise Failed(f"{told}; prompts {wrong} differ")
        return told

    def abort_beside_others(self) -> str:
        """Two streams are left while two others decode on."""

        async def both() -> list[Any]:
            work: list[Coroutine[Any, Any, Any]] = [self._leave([0.0, 1.0]), self._texts(2)]
            return await asyncio.gather(*work)

        _, found = asyncio.run(both())
        same = sum(self.greedy[number] == text for number, text in found.items())
        self.idle()
        return f"{same} of {len(found)} answers beside them as one client got them"

    async def _texts(self, count: int) -> dict[int, str]:
        async with self._client() as client:

            async def one(prompt: Prompt) -> tuple[int, str]:
                arguments = self.ask.arguments(prompt)
                pieces = []
                async for chunk in await client.completions.create(model=self.model, **arguments):
                    pieces += [choice.text for choice in chunk.choices]
                return prompt.number, "".join(pieces)

            return dict(await asyncio.gather(*(one(p) for p in self.prompts[-count:])))

    def refused(self) -> str:
        """A length that cannot be is an error of its request alone."""
        streams = run_load(
            self.url,
            self.model,
            self.prompts[:1],
            replace(self.ask, verify_length=99),
            clients=1,
            timeout_s=30.0,
        )
        if not streams[0].error:
            raise Failed("99 rows were not refused")
        return streams[0].error[:120]

    def healthy(self) -> str:
        """Still up, and answering as at first."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10.0) as answer:
            if self.model not in answer.read().decode():
                raise Failed("the model is not served any more")
        return self.compared(self.answers(self.ask, clients=1, count=2))

    def idle(self) -> float:
        """Seconds until nothing runs; a server of SGLang says so, others are given a moment.

        Raises:
            Failed: something still runs.
        """
        began = time.monotonic()
        if self.ask.dialect != "sglang":
            time.sleep(1.0)
            return 1.0
        while time.monotonic() - began < IDLE_SECONDS:
            request = urllib.request.Request(f"{self.url}/flush_cache?timeout=2", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=10.0):
                    return time.monotonic() - began
            except urllib.error.HTTPError:
                time.sleep(0.1)
        raise Failed(f"requests still run {IDLE_SECONDS:g} s after their streams were closed")

    def _client(self) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def boot(options: argparse.Namespace) -> Server:
    """Start a server of the pair with the plugin."""
    port = free_port()
    arguments = Boot("client", "HYBRIDSPEC").arguments(
        target=options.pair / "target",
        drafter=options.pair / "drafter",
        port=port,
        most_running=MOST_CLIENTS,
    )
    algorithm, weights = plugin_names()
    config: dict[str, Any] = {
        "telemetry": str(options.out / "telemetry.json"),
        "telemetry_interval_s": 0.5,
        # Its requests would run beside the first ones here.
        "self_check": False,
    }
    if options.bundle is not None:
        config |= {"bundle": str(options.bundle)}
    path = options.out / "config.json"
    path.write_text(json.dumps(config))
    env = {
        "PYTHONPATH": plugin_path(options.out / "site"),
        "SGLANG_PLUGINS": algorithm if options.source is None else f"{algorithm},{weights}",
        "HYBRIDSPEC_CONFIG": str(path),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    if options.source is not None:
        env[SOURCE_ENV] = str(options.source.resolve())
    say("starting")
    server = start(
        sglang_command(arguments),
        url=f"http://127.0.0.1:{port}",
        log=options.out / "server.log",
        env=env,
        timeout_s=options.boot_timeout,
    )
    say(f"up in {server.boot_s:.1f} s")
    return server


def main() -> int:
    """Run the stages; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--source", type=Path, help="pair that a padded one was made from")
    parser.add_argument("--bundle", type=Path, help="for the policy; else 8 rows a round")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--model", default=MODEL, help="name that it serves")
    parser.add_argument("--dialect", choices=("sglang", "hybridspec"), default="sglang")
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--boot-timeout", type=float, default=200.0, metavar="S")
    parser.add_argument("--limit", type=float, default=280.0, metavar="S")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.pair, options.out = options.pair.resolve(), options.out.resolve()
    options.bundle = options.bundle.resolve() if options.bundle else None
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prompts = read_prompts(options.pair / "prompts.json", options.per_category)
    server = None if options.url else boot(options)
    try:
        ok = Conversation(
            server.url if server else options.url,
            options.model,
            prompts,
            Ask(options.tokens, dialect=options.dialect),
            options.out,
            BEGAN + options.limit,
        ).run()
        if server is not None and not ok:
            say(server.tail(40))
        return int(not ok)
    finally:
        if server is not None:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
