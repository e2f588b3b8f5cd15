"""Stages of a conversation with a server through the `openai` client, greedy answers judged."""

from __future__ import annotations

import asyncio
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from serving.judged import Judge
from serving.law import compare_samples
from serving.load import Ask, Prompt, Stream, run_load

MOST_CLIENTS = 4
FORCED_LENGTHS = (1, 5, 16)
# What an aborted answer would have had, and the chunks that are read before it is left.
LONG_TOKENS, READ_CHUNKS = 1500, 6
IDLE_SECONDS, OTHER_WAIT_S = 10.0, 0.5


class Failed(AssertionError):
    """The server answered otherwise than it must."""


@dataclass
class Stage:
    """What came of a stage.

    Attributes:
        state: ok, FAILED or skipped.
        compared: greedy answers that were judged. differences: from plain decoding.
        laws: comparisons of sampled answers with plain decoding's.
    """

    name: str
    state: str = "ok"
    told: str = ""
    seconds: float = 0.0
    compared: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    laws: list[dict[str, Any]] = field(default_factory=list)


class Conversation:
    """Stages against one server.

    Args:
        url: of the server.
        model: name that it serves.
        prompts: token ids.
        judge: of greedy answers; None where plain decoding was not asked, then equality with the
            first answers is told.
        until: on the monotonic clock; later stages are skipped.
        say: told what happens.
        repeats: whether one client's greedy answers must come again to the last character.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[Prompt],
        ask: Ask,
        *,
        judge: Judge | None,
        until: float,
        say: Callable[..., None],
        repeats: bool = True,
    ) -> None:
        self.url, self.model, self.prompts, self.ask = url, model, prompts, ask
        self.judge, self.until, self.say, self.repeats = judge, until, say, repeats
        self.greedy: dict[int, str] = {}
        # Prompt tokens that a prefix cache had, of servers that tell.
        self.cached: dict[int, int] = {}
        self.stages: list[Stage] = []

    def run(self) -> bool:
        """All stages; whether none failed."""
        for work in (
            self.streamed, self.whole, self.lengths, self.crowd, self.sampled, self.aborted,
            self.after_abort, self.abort_beside_others, self.refused, self.healthy,
        ):  # fmt: skip
            self.stage(work.__name__.replace("_", " "), work)
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether every stage ran and none failed."""
        return all(stage.state == "ok" for stage in self.stages)

    def stage(self, name: str, work: Callable[[], str]) -> None:
        """Run one stage; a failure is printed and kept, the next stage runs."""
        stage = Stage(name)
        self.stages.append(stage)
        if time.monotonic() > self.until:
            stage.state, stage.told = "skipped", "no time left"
        else:
            began = time.monotonic()
            try:
                stage.told = work()
            except Exception as error:
                stage.state, stage.told = "FAILED", f"{type(error).__name__}: {error}"[:400]
                traceback.print_exc()
            stage.seconds = round(time.monotonic() - began, 1)
        self.say(stage.name, stage.state, stage.told, f"({stage.seconds:.1f} s)")

    def answers(self, ask: Ask, *, clients: int, count: int | None = None) -> list[Stream]:
        """Streams of the first `count` prompts, none of which may fail."""
        return self.asked(self.prompts[:count], ask, clients=clients)

    def asked(self, prompts: Sequence[Prompt], ask: Ask, *, clients: int) -> list[Stream]:
        """Streams of prompts, none of which may fail."""
        streams = run_load(self.url, self.model, prompts, ask, clients=clients, timeout_s=60.0)
        wrong = [stream.error for stream in streams if stream.error]
        if wrong or len(streams) != len(prompts):
            raise Failed(f"{len(wrong)} of {len(prompts)} requests failed: {wrong[:1]}")
        return self.complete(streams, ask)

    def complete(self, streams: list[Stream], ask: Ask) -> list[Stream]:
        """Streams that have all the tokens that were asked for.

        Raises:
            Failed: one ended before; what it says would be compared as far as it goes.
        """
        if self.ask.dialect == "sglang":  # end tokens are ignored there
            short = [s.prompt for s in streams if not s.tokens or s.tokens[-1] != ask.max_tokens]
            if short:
                raise Failed(f"answers to prompts {short} are not {ask.max_tokens} tokens long")
        return streams

    def judged(self, streams: Sequence[Stream]) -> str:
        """Greedy answers against plain decoding's.

        Raises:
            Failed: one of them parts by more than a tie.
        """
        if self.judge is None:
            same = sum(self.greedy[stream.prompt] == stream.text for stream in streams)
            return f"{same} of {len(streams)} as one client got them"
        found = self.judge.judge(streams)
        stage = self.stages[-1]
        stage.compared += found.compared
        stage.differences += found.rows
        if found.faults:
            raise Failed(f"{found.told()}: {found.faults[:2]}")
        return found.told()

    def same_again(self, streams: Sequence[Stream]) -> str:
        """Greedy answers of one client on an idle server, once more.

        Raises:
            Failed: one is another one now.
        """
        wrong = [s.prompt for s in streams if self.greedy[s.prompt] != s.text]
        if wrong and self.repeats:
            raise Failed(f"prompts {wrong} are answered otherwise than at first")
        return f"{len(streams) - len(wrong)} of {len(streams)} as at first"

    # Stages.

    def streamed(self) -> str:
        """One client, greedy, streamed."""
        begun = replace(self.ask, max_tokens=min(16, self.ask.max_tokens))
        first = self.answers(begun, clients=MOST_CLIENTS, count=MOST_CLIENTS)
        self.idle()
        streams = self.answers(self.ask, clients=1)
        if any(not stream.text for stream in streams):
            raise Failed("an answer is empty")
        self.greedy = {stream.prompt: stream.text for stream in streams}
        chunks = [len(stream.tokens) for stream in streams]
        if max(chunks) < 3:
            raise Failed(f"answers came in {chunks} chunks: nothing was streamed")
        took = sum(stream.arrived_s[-1] - stream.arrived_s[0] for stream in streams)
        tokens = sum(stream.tokens[-1] - stream.tokens[0] for stream in streams)
        first_s = sorted(stream.arrived_s[0] - stream.submitted_s for stream in streams)
        middle_ms = 1e3 * first_s[len(first_s) // 2]
        speed = f"{tokens / took:.0f} tokens/s, first token after {middle_ms:.0f} ms"
        return f"{self.judged([*first, *streams] if self.judge else streams)}; {speed}"

    def whole(self) -> str:
        """The same answers in one piece."""
        found = asyncio.run(self._whole(2))
        return f"{self.same_again(found)}; {self.judged(found)}"

    async def _whole(self, count: int) -> list[Stream]:
        async with self._client() as client:
            found = []
            for prompt in self.prompts[:count]:
                arguments = self.ask.arguments(prompt)
                arguments |= {"stream": False}
                arguments.pop("stream_options")
                answer = await client.completions.create(model=self.model, **arguments)
                stream = Stream(prompt.number, prompt.category, time.perf_counter())
                stream.text = answer.choices[0].text
                stream.tokens = [answer.usage.completion_tokens]
                found.append(stream)
            return self.complete(found, self.ask)

    def lengths(self) -> str:
        """One client at forced lengths."""
        told = []
        for length in FORCED_LENGTHS:
            streams = self.answers(replace(self.ask, verify_length=length), clients=1)
            told.append(f"{length} rows: {self.judged(streams)}")
        return "; ".join(told)

    def crowd(self) -> str:
        """Four clients at once, greedy."""
        return self.judged(self.answers(self.ask, clients=MOST_CLIENTS))

    def sampled(self) -> str:
        """Four clients at temperature 1; one more time with one client."""
        hot = replace(self.ask, temperature=1.0)
        together = self.answers(hot, clients=MOST_CLIENTS)
        alone = self.answers(hot, clients=1, count=2)
        same = sum(self.greedy[stream.prompt] == stream.text for stream in [*together, *alone])
        if same == len(together) + len(alone):
            raise Failed("every sampled answer is the greedy one")
        return f"{len(together) + len(alone)} answers, {same} of them the greedy one"

    def law(self, plain: Mapping[int, Sequence[str]], prompts: Sequence[Prompt], ask: Ask) -> str:
        """Short answers at temperature 1, as many as plain decoding's: one law must fit both.

        Args:
            plain: plain decoding's answers by number of prompt. prompts: of them.

        Raises:
            Failed: chi-square says otherwise, or every prompt's answers were too many to count.
        """
        told, failed, compared = [], False, False
        for prompt in prompts:
            theirs = plain[prompt.number]
            streams = self.asked([prompt] * len(theirs), ask, clients=MOST_CLIENTS)
            found = compare_samples([stream.text for stream in streams], theirs)
            failed, compared = failed or not found.passed, compared or found.compares
            self.stages[-1].laws.append({"prompt": prompt.number, **asdict(found)})
            told.append(
                f"{len(theirs)} answers of {ask.max_tokens} tokens, {found.texts} texts in "
                f"{found.bins} bins: p = {found.p_value:.3g}, "
                f"{100 * found.total_variation:.1f} points apart"
            )
        if failed or not compared:
            raise Failed("; ".join(told))
        return "; ".join(told)

    def aborted(self) -> str:
        """Four streams are left after some chunks, greedy and sampled; the server gets idle."""
        began = time.monotonic()
        left = asyncio.run(self._leave([0.0, 1.0, 0.0, 1.0]))
        left_s = time.monotonic() - began
        read = sum(len(stream.tokens) for _, stream in left)
        greedy = [stream for temperature, stream in left if not temperature]
        idle_s = self.idle()
        told = f"{read} chunks read, idle {idle_s:.1f} s after {left_s:.1f} s of streams"
        return told if self.judge is None else f"{told}; {self.judged(greedy)}"

    async def _leave(self, temperatures: Sequence[float]) -> list[tuple[float, Stream]]:
        async with self._client() as client:

            async def one(prompt: Prompt, temperature: float) -> tuple[float, Stream]:
                ask = replace(self.ask, max_tokens=LONG_TOKENS, temperature=temperature)
                stream = await self._read(client, prompt, ask, chunks=READ_CHUNKS)
                if not stream.text:
                    raise Failed(f"nothing came of prompt {prompt.number} before it was left")
                return temperature, stream

            pairs = zip(self.prompts, temperatures, strict=False)
            return list(await asyncio.gather(*(one(prompt, t) for prompt, t in pairs)))

    async def _read(
        self, client: Any, prompt: Prompt, ask: Ask, *, chunks: int | None = None
    ) -> Stream:
        """A stream to its end, or left after some chunks."""
        found = Stream(prompt.number, prompt.category, time.perf_counter())
        stream = await client.completions.create(model=self.model, **ask.arguments(prompt))
        async for chunk in stream:
            details = getattr(chunk.usage, "prompt_tokens_details", None)
            if details is not None:
                self.cached[prompt.number] = details.cached_tokens or 0
            if not chunk.choices:
                continue
            found.text += chunk.choices[0].text
            counted = chunk.usage.completion_tokens if chunk.usage else len(found.tokens) + 1
            found.tokens.append(counted)
            if len(found.tokens) == chunks:
                break
        await stream.close()
        return found

    def after_abort(self) -> str:
        """The first answers once more: nothing of the aborted requests may be left in a state."""
        streams = self.answers(self.ask, clients=1)
        return f"{self.same_again(streams)}; {self.judged(streams)}"

    def abort_beside_others(self) -> str:
        """Two streams are left while others decode on."""

        async def both() -> list[Any]:
            work: list[Coroutine[Any, Any, Any]] = [self._leave([0.0, 1.0]), self._texts(2)]
            return await asyncio.gather(*work)

        left, found = asyncio.run(both())
        greedy = [stream for temperature, stream in left if not temperature]
        told = self.judged(found if self.judge is None else [*found, *greedy])
        self.idle()
        return told

    async def _texts(self, count: int) -> list[Stream]:
        async with self._client() as client:
            asked = (self._read(client, prompt, self.ask) for prompt in self.prompts[-count:])
            return self.complete(list(await asyncio.gather(*asked)), self.ask)

    async def _one_by_one(self, prompts: Sequence[Prompt], ask: Ask) -> list[Stream]:
        async with self._client() as client:
            return self.complete([await self._read(client, p, ask) for p in prompts], ask)

    def prefix_hits(self, follow: Sequence[Prompt], ask: Ask) -> str:
        """Prompts go on from answers that the server has just given, whose states it keeps.

        Args:
            follow: prompts that begin with one of `prompts` and its answer.

        Raises:
            Failed: no cached prefix ends inside an answer.
        """
        self.idle()
        first = self.answers(self.ask, clients=1)
        again = self.answers(self.ask, clients=1)
        self.cached.clear()
        alone = asyncio.run(self._one_by_one(follow, ask))
        hits = dict(self.cached)
        together = self.asked(follow, ask, clients=MOST_CLIENTS)
        turn = max(len(prompt.ids) for prompt in self.prompts)
        deep = sum(hits.get(prompt.number, 0) > turn for prompt in follow)
        told = (
            f"{sum(hits.values())} of {sum(len(p.ids) for p in follow)} prompt tokens cached, "
            f"{deep} of {len(follow)} prefixes end inside an answer; "
            f"{self.judged([*first, *again, *alone, *together])}"
        )
        if not deep:
            raise Failed(told)
        return told

    def evictions(self, follow: Sequence[Prompt], ask: Ask) -> str:
        """The same prompts twice, with all the others between: what was cached is read again.

        Args:
            follow: as for `prefix_hits`.

        Raises:
            Failed: nothing was cached at first, or the second time more than half of that still is.
        """
        self.idle()
        few = follow[:MOST_CLIENTS]
        found = self.answers(self.ask, clients=1, count=len(few))
        cached = []
        for _ in range(2):
            self.cached.clear()
            found += asyncio.run(self._one_by_one(few, ask))
            cached.append(sum(self.cached.values()))
            found += self.answers(self.ask, clients=MOST_CLIENTS)
            found += self.asked(follow[len(few) :], ask, clients=MOST_CLIENTS)
        told = (
            f"of {len(few)} prompts {cached[0]} tokens were cached, with others between "
            f"{cached[1]}; {self.judged(found)}"
        )
        if not 2 * cached[1] <= cached[0] or not cached[0]:
            raise Failed(told)
        return told

    def refused(self) -> str:
        """A length that cannot be is an error of its request alone."""
        wrong = replace(self.ask, verify_length=99)
        streams = run_load(self.url, self.model, self.prompts[:1], wrong, clients=1, timeout_s=30.0)
        told = streams[0].error
        if not told:
            raise Failed("99 rows were not refused")
        # Any other error, also of a server that is gone, says nothing about the length.
        if "99" not in told or "length" not in told:
            raise Failed(f"99 rows were answered by another error: {told[:200]}")
        return told[:120]

    def healthy(self) -> str:
        """Still up, and answering as at first."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10.0) as answer:
            if self.model not in answer.read().decode():
                raise Failed("the model is not served any more")
        streams = self.answers(self.ask, clients=1, count=2)
        return f"{self.same_again(streams)}; {self.judged(streams)}"

    def idle(self) -> float:
        """Seconds until nothing runs; a server of SGLang says so, others are given a moment.

        Raises:
            Failed: something still runs.
        """
        began = time.monotonic()
        if self.ask.dialect != "sglang":
            time.sleep(OTHER_WAIT_S)
            return OTHER_WAIT_S
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
