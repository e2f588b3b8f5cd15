"""A few rounds of a server that has just started, compared with the costs of its bundle.

    python -m hybridspec.sglang_plugin.self_check < settings.json

A process of its own, started by the worker: it waits until the server is up, sends requests of
forced lengths as `profile-latency --engine sglang` does, with its prompts, and times their streams
the same way, so that the figures compare. They are ordinary requests: nothing of the engine is
touched, no state can be spoiled, and other requests are neither stopped nor waited for. A server
can be slower for some seconds, where rounds wait for its host above all: times that have drifted
are measured again after pauses. Its last line is a JSON object: the `attempts`, or why there are
none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.errors import EnvironmentMissing, HybridSpecError, QualityGate
from hybridspec.sglang_plugin.installation import ALGORITHM
from hybridspec.sglang_plugin.server_api import ServerApi, generate_body
from hybridspec.sglang_plugin.server_rounds import (
    StreamReader,
    bundled_texts,
    prompt_of,
    tokens_of,
)

LENGTHS = (1, 4, 8, 16)
READINGS = 3
# Ahead of the second and the third attempt. On an H200 lengths of a small pair took 15 % to 35 %
# more in one attempt and 2 % to 7 % in another (benchmarks/results/sglang_commands.txt).
PAUSES_SECONDS = (5.0, 20.0)
WAIT_SECONDS = 600.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Settings:
    """What the worker tells.

    Attributes:
        key: begins the request ids, so that the worker knows these requests from others.
        lengths: that the server may be asked for.
        drift: share by which a round may take more or less than the bundle says.
    """

    url: str
    api_key: str | None
    bundle: str
    target: str
    key: str
    lengths: tuple[int, ...]
    drift: float


@dataclass(frozen=True)
class Anchor:
    """One cell of a bundle's costs: a batch of one request."""

    verify_length: int
    context_tokens: int
    expected_us: float


def anchors_of(bundle: Bundle, lengths: Sequence[int]) -> list[Anchor]:
    """Cells of the smallest context with one request, empty where the bundle has none."""
    if bundle.cost is None:
        return []
    step = bundle.cost.step
    if int(step.batch_sizes[0]) != 1:
        return []
    context = int(step.context_tokens[0])
    return [Anchor(n, context, float(step.latency_us[0, 0, n])) for n in lengths]


def measure(
    api: ServerApi, anchors: Sequence[Anchor], texts: Sequence[Sequence[int]], *, key: str
) -> dict[int, float]:
    """Times over the bundle's by length, medians of interleaved readings after a warm-up."""
    readings: dict[Anchor, list[float]] = {anchor: [] for anchor in anchors}
    for number in range(1 + READINGS):
        for anchor in anchors:
            prompt = prompt_of(texts, 0, anchor.context_tokens)
            rid = f"{key}-{number}-{anchor.verify_length}"
            took_us = read_once(api, prompt, anchor.verify_length, rid=rid)
            if number:
                readings[anchor].append(took_us)
    return {
        anchor.verify_length: float(np.median(took_us)) / anchor.expected_us
        for anchor, took_us in readings.items()
    }


@dataclass(frozen=True)
class Attempt:
    """One look at all anchors.

    Attributes:
        began_s, ended_s: of the host's monotonic clock, which its processes share.
        ratios: times over the bundle's by length.
    """

    began_s: float
    ended_s: float
    ratios: Mapping[int, float]

    def drifted(self, limit: float) -> bool:
        """Whether any length takes more or less than `limit` of what the bundle says."""
        return max(abs(ratio - 1.0) for ratio in self.ratios.values()) > limit


def measure_until_known(
    api: ServerApi,
    anchors: Sequence[Anchor],
    texts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    pause: Callable[[float], None] = time.sleep,
) -> list[Attempt]:
    """Attempts up to the first within the limit."""
    attempts: list[Attempt] = []
    for wait_s in (0.0, *PAUSES_SECONDS):
        pause(wait_s)
        began_s = time.monotonic()
        ratios = measure(api, anchors, texts, key=f"{settings.key}-{len(attempts)}")
        attempts.append(Attempt(began_s, time.monotonic(), ratios))
        if not attempts[-1].drifted(settings.drift):
            break
    return attempts


def read_once(api: ServerApi, prompt: Sequence[int], verify_length: int, *, rid: str) -> float:
    """Mean time of a round of one request in microseconds.

    The stream is read to its end: a request that is dropped would still run beside the next one.
    """
    new_tokens = tokens_of(verify_length)
    body = generate_body([prompt], new_tokens=new_tokens, verify_length=verify_length)
    reader = StreamReader(1, drafted=True)
    for chunk in api.stream({**body, "rid": [rid]}):
        reader.add(chunk)
    return reader.reading().total_us


def check(settings: Settings) -> dict[str, Any]:
    """What the last line says."""
    try:
        anchors = anchors_of(load_bundle(Path(settings.bundle)), settings.lengths)
        if not anchors:
            raise QualityGate("the bundle has no costs of a single request")
        texts = bundled_texts(Path(settings.target))
        api = ServerApi(settings.url, timeout_s=60.0, api_key=settings.api_key)
        until = time.monotonic() + WAIT_SECONDS
        while not api.healthy():
            if time.monotonic() > until:
                raise EnvironmentMissing(f"{settings.url} was not up in {WAIT_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        info = api.info()
        served = info.get("speculative_algorithm"), info.get("model_path")
        if served != (ALGORITHM, settings.target):
            raise QualityGate(f"{settings.url} is another server: it runs {served}")
        attempts = measure_until_known(api, anchors, texts, settings)
        return {
            "attempts": [asdict(attempt) for attempt in attempts],
            "anchors": [asdict(anchor) for anchor in anchors],
        }
    except HybridSpecError as error:
        return {"problem": str(error)}


def attempts_of(result: Mapping[str, Any]) -> list[Attempt]:
    """Attempts from what `check` returned, through JSON."""
    return [
        Attempt(
            float(one["began_s"]),
            float(one["ended_s"]),
            {int(length): round(float(ratio), 4) for length, ratio in one["ratios"].items()},
        )
        for one in result.get("attempts", [])
    ]


def settings_of(raw: Mapping[str, Any]) -> Settings:
    """Settings from their JSON."""
    return Settings(**{**raw, "lengths": tuple(raw["lengths"])})


if __name__ == "__main__":
    print(json.dumps(check(settings_of(json.load(sys.stdin)))), flush=True)
