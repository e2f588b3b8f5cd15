"""Load generator: the `openai` client against an OpenAI-compatible server, streams timed by chunk.

Each of `clients` workers takes the next prompt as soon as its last answer has ended. What comes
back is every chunk's arrival and the tokens so far, from which `serving.decoding` takes all rates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MOST_FAILURES = 2
Dialect = Literal["sglang", "hybridspec"]


@dataclass(frozen=True)
class Prompt:
    """One prompt: token ids for SGLang, which decodes exactly these."""

    number: int
    category: str
    ids: list[int]


@dataclass
class Stream:
    """One answer as it arrived.

    Attributes:
        prompt: number of the prompt.
        submitted_s, arrived_s: seconds on one clock; one arrival a chunk.
        tokens: completion tokens so far, one count a chunk.
        characters: of the text so far, one count a chunk.
        error: what went wrong, empty without.
    """

    prompt: int
    category: str
    submitted_s: float
    arrived_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Ask:
    """What every request of a run asks for.

    Attributes:
        max_tokens: of each answer that `lengths` does not name.
        verify_length: rows of every round; None leaves it to the server.
        lengths: tokens of answers by prompt number.
        dialect: of the server: SGLang counts tokens in every chunk and takes `custom_params`.
    """

    max_tokens: int
    verify_length: int | None = None
    temperature: float = 0.0
    dialect: Dialect = "sglang"
    lengths: Mapping[int, int] | None = None

    def arguments(self, prompt: Prompt) -> dict[str, Any]:
        """Arguments of `client.completions.create`."""
        usage: dict[str, Any] = {"include_usage": True}
        extra: dict[str, Any] = {}
        if self.dialect == "sglang":
            usage["continuous_usage_stats"] = True
            extra["ignore_eos"] = True
            if self.verify_length is not None:
                extra["custom_params"] = {"hybridspec": {"verify_length": self.verify_length}}
        elif self.verify_length is not None:
            extra["hybridspec"] = {"fixed_length": self.verify_length}
        return {
            "prompt": prompt.ids,
            "max_tokens": (self.lengths or {}).get(prompt.number, self.max_tokens),
            "temperature": self.temperature,
            "stream": True,
            "stream_options": usage,
            "extra_body": extra,
        }


async def _answer(client: Any, model: str, prompt: Prompt, ask: Ask) -> Stream:
    stream = Stream(prompt.number, prompt.category, time.perf_counter())
    pieces: list[str] = []
    length = 0
    try:
        chunks = await client.completions.create(model=model, **ask.arguments(prompt))
        async for chunk in chunks:
            now = time.perf_counter()
            if not chunk.choices:
                continue
            pieces.append(chunk.choices[0].text)
            length += len(pieces[-1])
            counted = chunk.usage.completion_tokens if chunk.usage else len(stream.tokens) + 1
            if stream.tokens and counted == stream.tokens[-1]:
                # A last chunk that only says why the answer ended.
                stream.characters[-1] = length
                continue
            stream.arrived_s.append(now)
            stream.tokens.append(counted)
            stream.characters.append(length)
    except Exception as error:  # one failed request is a result, not the end of the run
        stream.error = f"{type(error).__name__}: {error}"
    stream.text = "".join(pieces)
    return stream


async def _run(
    url: str, model: str, prompts: Sequence[Prompt], ask: Ask, clients: int, timeout_s: float
) -> list[Stream]:
    from openai import AsyncOpenAI

    waiting = list(reversed(prompts))
    done: list[Stream] = []

    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s
    ) as client:

        async def work() -> None:
            while waiting:
                done.append(await _answer(client, model, waiting.pop(), ask))
                if sum(bool(stream.error) for stream in done) >= MOST_FAILURES:
                    # A server that hangs would take every request's time limit.
                    waiting.clear()

        await asyncio.gather(*(work() for _ in range(clients)))
    return sorted(done, key=lambda stream: stream.submitted_s)


def run_load(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    ask: Ask,
    *,
    clients: int,
    timeout_s: float = 120.0,
) -> list[Stream]:
    """Answers to all prompts from `clients` clients at once, in the order of submission."""
    return asyncio.run(_run(url, model, prompts, ask, clients, timeout_s))
