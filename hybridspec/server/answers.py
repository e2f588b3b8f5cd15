"""Runs one job and answers the client, in one body or as a stream of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hybridspec.server.job import Cancelled, Failed, Finished, JobEvent, TextDelta
from hybridspec.server.pending import PendingJob
from hybridspec.server.protocol import CommonRequest
from hybridspec.server.shapes import Shape
from hybridspec.telemetry import Telemetry

HUNG_UP = 499  # nginx's code for "client closed request"; only metrics ever see it


async def answer(
    body: CommonRequest, pending: PendingJob, shape: Shape, telemetry: Telemetry
) -> Response:
    """Wait for the job's first event, then answer.

    A stream's status line waits for the first event too, so that what fails in prefill still
    becomes a proper error status.

    Raises:
        ApiError: the job failed before anything was sent.
    """
    try:
        event = await pending.next_event()
        if body.stream and not isinstance(event, Failed | Cancelled):
            return EventStream(_events(body, pending, event, shape, telemetry), pending)
        while isinstance(event, TextDelta):
            event = await pending.next_event()
    except BaseException:
        pending.close()
        raise
    pending.close()
    match event:
        case Failed(error):
            raise error
        case Cancelled():
            telemetry.count_request(status=HUNG_UP, finish_reason="cancelled")
            return Response(status_code=HUNG_UP)
    job = pending.job
    telemetry.count_request(status=200, finish_reason=job.output.finish_reason)
    return JSONResponse(shape.full(job, options=body.options))


class EventStream(Response):
    """Server-sent events that give the job's slot back however the connection ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], pending: PendingJob) -> None:
        self._events = events
        self._pending = pending
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._pending.close()


async def _events(
    body: CommonRequest,
    pending: PendingJob,
    event: JobEvent,
    shape: Shape,
    telemetry: Telemetry,
) -> AsyncIterator[bytes]:
    if (opening := shape.first_chunk()) is not None:
        yield _event(body, opening)
    while isinstance(event, TextDelta):
        yield _event(body, shape.text_chunk(event.text))
        event = await pending.next_event()
    match event:
        case Failed(error):
            telemetry.count_request(status=200, finish_reason="error")
            yield _data(error.to_json())
            return
        case Cancelled():
            telemetry.count_request(status=HUNG_UP, finish_reason="cancelled")
            return
        case Finished():
            job = pending.job
            telemetry.count_request(status=200, finish_reason=job.output.finish_reason)
            yield _event(body, shape.last_chunk(job, options=body.options))
            if body.include_usage:
                yield _data(shape.usage_chunk(job))
            yield b"data: [DONE]\n\n"


def _event(body: CommonRequest, chunk: dict[str, Any]) -> bytes:
    # OpenAI sends a null usage in every chunk but the last when usage was asked for.
    return _data({**chunk, "usage": None} if body.include_usage else chunk)


def _data(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
