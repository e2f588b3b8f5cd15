"""A submitted job as its HTTP handler sees it: events to await, and a watch on the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Receive

from hybridspec.server.job import Job, JobEvent
from hybridspec.server.scheduler import Scheduler


class Inbox:
    """Carries events from the engine's thread into an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[JobEvent] = asyncio.Queue()

    def put(self, event: JobEvent) -> None:
        """Add an event from any thread; never blocks or raises."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def get(self) -> JobEvent:
        """Wait for the next event."""
        return await self._queue.get()


class PendingJob:
    """Submits a job and cancels it as soon as the client hangs up or the handler ends.

    Raises:
        ApiError: from the constructor, when the scheduler refuses the job.
    """

    def __init__(
        self, scheduler: Scheduler, build: Callable[[Inbox], Job], *, receive: Receive
    ) -> None:
        self._scheduler = scheduler
        self._inbox = Inbox()
        self.job = build(self._inbox)
        scheduler.submit(self.job)
        self._watch = asyncio.create_task(self._cancel_on_hang_up(receive))

    async def next_event(self) -> JobEvent:
        """Wait for the job's next event."""
        return await self._inbox.get()

    def close(self) -> None:
        """Stop watching and give the slot back if it is still held. Idempotent."""
        self._watch.cancel()
        self._scheduler.cancel(self.job)

    async def _cancel_on_hang_up(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._scheduler.cancel(self.job)
