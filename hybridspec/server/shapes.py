"""Bodies and stream chunks of answers, in the two shapes of the OpenAI interface."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridspec.server.job import Job
from hybridspec.server.protocol import HybridSpecOptions


class Shape(Protocol):
    """How one request's answer is written."""

    def full(self, job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ...

    def first_chunk(self) -> dict[str, Any] | None:
        """Return the chunk that opens a stream, if the shape has one."""
        ...

    def text_chunk(self, text: str) -> dict[str, Any]:
        """Return a chunk with more text."""
        ...

    def last_chunk(self, job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
        """Return the chunk that tells why the output ended, with the `hybridspec` object."""
        ...

    def usage_chunk(self, job: Job) -> dict[str, Any]:
        """Return the chunk of usage counts."""
        ...


def usage(job: Job) -> dict[str, int]:
    """Token counts of an answer."""
    prompt, completion = len(job.prompt_tokens), len(job.output.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _details(job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
    details = job.stats.to_json()
    if options.return_token_ids:
        details["token_ids"] = list(job.output.token_ids)
    if options.return_rounds:
        details["round_log"] = job.stats.log_json()
    return details


@dataclass(frozen=True)
class CompletionShape:
    """Answers of /v1/completions."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    @staticmethod
    def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def full(self, job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choice = self._choice(job.output.text, job.output.finish_reason)
        return self._body([choice], usage=usage(job), hybridspec=_details(job, options=options))

    def first_chunk(self) -> None:
        """Completions open with text."""
        return None

    def text_chunk(self, text: str) -> dict[str, Any]:
        """Return a chunk with more text."""
        return self._body([self._choice(text, None)])

    def last_chunk(self, job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
        """Return the chunk that tells why the output ended."""
        choice = self._choice("", job.output.finish_reason)
        return self._body([choice], hybridspec=_details(job, options=options))

    def usage_chunk(self, job: Job) -> dict[str, Any]:
        """Return the chunk of usage counts."""
        return self._body([], usage=usage(job))


@dataclass(frozen=True)
class ChatShape:
    """Answers of /v1/chat/completions."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._body("chat.completion.chunk", [choice], **more)

    def full(self, job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": job.output.text, "refusal": None},
            "logprobs": None,
            "finish_reason": job.output.finish_reason,
        }
        return self._body(
            "chat.completion",
            [choice],
            usage=usage(job),
            hybridspec=_details(job, options=options),
        )

    def first_chunk(self) -> dict[str, Any]:
        """Return the chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def text_chunk(self, text: str) -> dict[str, Any]:
        """Return a chunk with more text."""
        return self._chunk({"content": text})

    def last_chunk(self, job: Job, *, options: HybridSpecOptions) -> dict[str, Any]:
        """Return the chunk that tells why the output ended."""
        details = _details(job, options=options)
        return self._chunk({}, job.output.finish_reason, hybridspec=details)

    def usage_chunk(self, job: Job) -> dict[str, Any]:
        """Return the chunk of usage counts."""
        return self._body("chat.completion.chunk", [], usage=usage(job))
