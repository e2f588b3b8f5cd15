"""One request on its way through the scheduler, and the events that it sends back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridspec.request import LengthRule, SamplingParams
from hybridspec.server.api_error import ApiError
from hybridspec.server.output import OutputAssembler, RequestStats

if TYPE_CHECKING:
    from hybridspec.reference.engine import Request


@dataclass(frozen=True)
class TextDelta:
    """Text that became final (never empty)."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The output is complete; `job.output` and `job.stats` will not change any more."""


@dataclass(frozen=True)
class Failed:
    """The request ended with an error instead of an output."""

    error: ApiError


@dataclass(frozen=True)
class Cancelled:
    """The request ended because nobody waits for it any more."""


JobEvent = TextDelta | Finished | Failed | Cancelled


@dataclass(eq=False)
class Job:
    """A request of the scheduler.

    Attributes:
        prompt_tokens: token ids, at least one.
        deliver: called with every event, from the engine's thread or the one that cancels; must
            not block or raise. The last event is `Finished`, `Failed` or `Cancelled`.
        wants_text: whether `TextDelta` events are wanted on the way.
        engine_request: the engine's side, set while the job holds a slot.
    """

    prompt_tokens: list[int]
    sampling: SamplingParams
    length_rule: LengthRule
    output: OutputAssembler
    deliver: Callable[[JobEvent], None]
    wants_text: bool = False
    arrived_s: float = field(default_factory=time.perf_counter)
    stats: RequestStats = field(default_factory=RequestStats)
    engine_request: Request | None = None
    cancelled: bool = False
