"""Owner of the engine: one thread that admits, steps, delivers and frees.

Everything that touches the engine runs in that thread. Other threads submit and cancel under one
lock; an idle scheduler sleeps on its condition variable.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridspec.errors import UsageError
from hybridspec.server import api_error
from hybridspec.server.api_error import ApiError
from hybridspec.server.job import Cancelled, Failed, Finished, Job, JobEvent, TextDelta
from hybridspec.server.round_times import RoundTimes
from hybridspec.telemetry import DriftMonitor, Telemetry

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine

logger = logging.getLogger(__name__)

State = Literal["running", "draining", "stopped", "failed"]


@dataclass(frozen=True)
class Health:
    """What `/health` tells.

    Attributes:
        reason: why the state is not `running`, else None.
    """

    state: State
    reason: str | None
    active: int
    waiting: int


class Scheduler:
    """Serves jobs with one engine, all active ones together in every step.

    Args:
        engine: only the scheduler's thread calls it once `start` has run.
        queue_limit: requests that may wait beyond those that find a slot, >= 0.
        drift: watch on predicted round times; when it declares drift, the engine's policy is made
            static.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        telemetry: Telemetry,
        queue_limit: int = 64,
        drift: DriftMonitor | None = None,
    ) -> None:
        if queue_limit < 0:
            raise UsageError(f"queue limit {queue_limit} is below 0; use 0 or more")
        self._engine = engine
        self._telemetry = telemetry
        self._queue_limit = queue_limit
        self._times = RoundTimes(engine.policy, telemetry, drift or DriftMonitor())
        self._condition = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._state: State = "running"
        self._reason: str | None = None
        self._deadline_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="hybridspec-engine", daemon=True)
        telemetry.slots.set(engine.max_batch)
        telemetry.healthy.set(1)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server drains or its engine failed.
        """
        with self._condition:
            if self._state != "running":
                raise self._refusal()
            waiting = len(self._waiting) + len(self._active) - self._engine.max_batch
            if waiting >= self._queue_limit:
                raise api_error.queue_full(waiting, self._queue_limit)
            self._waiting.append(job)
            self._update_gauges()
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """Give a job up: now if it waits, before the next step if it holds a slot. Idempotent."""
        with self._condition:
            job.cancelled = True
            if job not in self._waiting:
                return
            self._waiting.remove(job)
            self._update_gauges()
        job.deliver(Cancelled())

    def health(self) -> Health:
        """Return the state and the load."""
        with self._condition:
            return Health(self._state, self._reason, len(self._active), len(self._waiting))

    def begin_drain(self, timeout_s: float) -> None:
        """Refuse new jobs from now on; finish the accepted ones within `timeout_s` seconds.

        A later call may shorten the time that is left, not extend it.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            if self._state == "running":
                self._state = "draining"
                self._reason = "the server is shutting down"
            self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)
            self._condition.notify()

    def stop(self, timeout_s: float) -> bool:
        """Drain and wait for the thread; return whether it ended in time."""
        self.begin_drain(timeout_s)
        if self._thread.is_alive():
            self._thread.join(timeout_s + 5.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._admit_one()
                self._drop_cancelled()
                self._step()
        except Exception as error:
            logger.exception("the engine failed")
            self._end_all(
                "failed",
                f"the engine failed ({type(error).__name__}: {error}) and takes no more requests: "
                "see the server's log and restart it",
            )

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not self._waiting and not self._active:
                if self._state == "draining":
                    self._state = "stopped"
                    return False
                self._condition.wait()
            late = self._deadline_s is not None and time.monotonic() >= self._deadline_s
        if late:
            self._end_all("stopped", "the server shut down before this request was complete")
        return not late

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._active if job.cancelled]:
            self._release(job, Cancelled())

    def _admit_one(self) -> None:
        with self._condition:
            if not self._waiting or len(self._active) >= self._engine.max_batch:
                return
            job = self._waiting.popleft()
            self._active.append(job)
            self._update_gauges()
        started_s = time.perf_counter()
        try:
            request = self._engine.add(
                job.prompt_tokens, sampling=job.sampling, length_rule=job.length_rule
            )
        except UsageError as error:
            self._release(job, Failed(api_error.bad_request(str(error))))
            return
        prefill_s = time.perf_counter() - started_s
        job.engine_request = request
        job.stats.queue_us = (started_s - job.arrived_s) * 1e6
        job.stats.prefill_us = prefill_s * 1e6
        self._telemetry.queue_seconds.observe(started_s - job.arrived_s)
        self._telemetry.prefill_seconds.observe(prefill_s)
        self._telemetry.tokens.labels("prompt").inc(len(job.prompt_tokens))
        self._deliver_text(job, request.tokens[request.num_prompt_tokens :])
        self._finish_if_done(job)

    def _step(self) -> None:
        jobs = list(self._active)
        if not jobs:
            return
        requests = [job.engine_request for job in jobs if job.engine_request is not None]
        rounds = self._engine.step(requests)
        longest = max(request.context_tokens for request in requests)
        self._times.observe(rounds, longest_context=longest)
        for job, round_ in zip(jobs, rounds, strict=True):
            self._telemetry.observe_round(round_, mode=job.length_rule.kind)
            delivered = self._deliver_text(job, round_.emitted)
            job.stats.add_round(round_, delivered=delivered)
            self._finish_if_done(job)

    def _deliver_text(self, job: Job, tokens: Sequence[int]) -> int:
        """Hand tokens to the job's output; return how many of them belong to it."""
        before = len(job.output.token_ids)
        text = job.output.push(tokens)
        request = job.engine_request
        if request is not None and request.finished:
            # Its `eos` ended the output already; an unfinished output means a full context.
            text += job.output.close("length")
        delivered = len(job.output.token_ids) - before
        self._telemetry.tokens.labels("generated").inc(delivered)
        if text and job.wants_text:
            job.deliver(TextDelta(text))
        return delivered

    def _finish_if_done(self, job: Job) -> None:
        if job.output.finish_reason is not None:
            self._release(job, Finished())

    def _release(self, job: Job, event: JobEvent) -> None:
        if job.engine_request is not None:
            self._engine.remove(job.engine_request)
            # A job may outlive its request by minutes, as its handler's task and the exception that
            # ended it refer to each other; its KV need not.
            job.engine_request = None
        with self._condition:
            self._active.remove(job)
            self._update_gauges()
        job.deliver(event)

    def _end_all(self, state: State, reason: str) -> None:
        with self._condition:
            self._state = state
            self._reason = reason
            jobs = [*self._active, *self._waiting]
            self._active.clear()
            self._waiting.clear()
            self._update_gauges()
        self._telemetry.healthy.set(state != "failed")
        error = (
            api_error.engine_failed(reason)
            if state == "failed"
            else api_error.unavailable(reason, code="shutting_down")
        )
        for job in jobs:
            if job.engine_request is not None:
                with contextlib.suppress(Exception):  # the engine may be beyond repair
                    self._engine.remove(job.engine_request)
                job.engine_request = None
            job.deliver(Failed(error))

    def _refusal(self) -> ApiError:
        if self._state == "failed":
            return api_error.unavailable(self._reason or "the engine failed", code="engine_failed")
        return api_error.unavailable(
            "the server is shutting down; it takes no new requests: use another server",
            code="shutting_down",
        )

    def _update_gauges(self) -> None:
        self._telemetry.queue_depth.set(len(self._waiting))
        self._telemetry.active_slots.set(len(self._active))
