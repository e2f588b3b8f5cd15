"""Rounds of requests that ask to be recorded, put together on the host and written as traces.

A request's rounds are kept until it has ended, because only then is it known which of them count:
with the overlap scheduler a round may run after the last token. A request whose rounds do not tell
the text that it answered with (retracted, or with a round lost) is left out whole.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.errors import BundleError

if TYPE_CHECKING:
    import pyarrow as pa

    from hybridspec.calibrate.rounds import RoundRow, TraceIdentity
    from hybridspec.sglang_plugin.controls import RecordTag

logger = logging.getLogger(__name__)

# Words of a round, int32 each; probabilities and entropies are float32 in the same bits.
LENGTH, ACCEPTED, CONTEXT, ANCHOR = 0, 1, 2, 3
DRAFTS = slice(4, 4 + NUM_DRAFTS)
TARGETS = slice(DRAFTS.stop, DRAFTS.stop + BLOCK_SIZE)
P1 = slice(TARGETS.stop, TARGETS.stop + NUM_DRAFTS)
P2 = slice(P1.stop, P1.stop + NUM_DRAFTS)
ENTROPY = slice(P2.stop, P2.stop + NUM_DRAFTS)
TARGET_P1 = slice(ENTROPY.stop, ENTROPY.stop + BLOCK_SIZE)
NUM_WORDS = TARGET_P1.stop

# What one request may keep in memory until it ends; longer ones are left out.
MOST_ROUNDS = 4096
# Rows that are written at once at the latest.
MOST_ROWS = 2048


@dataclass(frozen=True)
class Ending:
    """How a request ended.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: what it answered with, the end-of-sequence token included.
        aborted: whether it ended before its end.
    """

    prompt_tokens: int
    tokens: list[int]
    aborted: bool


@dataclass
class _Open:
    request: Any
    tag: RecordTag
    rounds: list[tuple[int, npt.NDArray[np.int32], bytes]] = field(default_factory=list)
    seen: int = 0
    problem: str = ""
    ended: bool = False


class RecordedRequests:
    """Collects rounds by request and writes those of ended requests.

    Args:
        folder: of the files; each is a trace of its own.
        ending: how a request ended, None while it runs.
        sampling: temperature and top-p of a request.
        identity: of a trace with this temperature and top-p.

    Attributes:
        written, left_out: requests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ending: Callable[[Any], Ending | None],
        sampling: Callable[[Any], tuple[float, float]],
        identity: Callable[[float, float], TraceIdentity],
    ) -> None:
        self._folder = folder
        self._ending = ending
        self._sampling = sampling
        self._identity = identity
        self._open: dict[str, _Open] = {}
        self._tables: dict[tuple[float, float], list[pa.Table]] = defaultdict(list)
        self._stamp = f"{int(time.time())}-{os.getpid()}"
        self._files = 0
        self.written = self.left_out = 0

    def add(
        self, key: str, request: Any, tag: RecordTag, words: npt.NDArray[np.int32], routes: bytes
    ) -> None:
        """Take in one round.

        Args:
            key: of the request.
            words: int32 [NUM_WORDS].
            routes: uint8 or uint16 [layers, 16, top-k] in C order, empty if not recorded.
        """
        held = self._held(key, request, tag)
        held.seen += 1
        if held.problem or words[LENGTH] != BLOCK_SIZE:
            return
        if len(held.rounds) == MOST_ROUNDS:
            held.problem = f"more than {MOST_ROUNDS} rounds"
            held.rounds.clear()
            return
        held.rounds.append((held.seen - 1, words, routes))

    def lost(self, key: str, request: Any, tag: RecordTag) -> None:
        """A round was not copied: the ring was full."""
        held = self._held(key, request, tag)
        held.problem = "a round was lost, because the recorder fell behind"
        held.rounds.clear()

    def _held(self, key: str, request: Any, tag: RecordTag) -> _Open:
        held = self._open.get(key)
        if held is None or held.request is not request:
            held = self._open[key] = _Open(request, tag)
        return held

    def settle(self) -> None:
        """Close requests that had ended at the last call; all rounds copied until then are in.

        To be called when no round waits to be taken in: then what had ended before is complete.
        """
        for key, held in list(self._open.items()):
            if held.ended:
                self._close(self._open.pop(key))
            elif self._ending(held.request) is not None:
                held.ended = True

    @property
    def num_rows(self) -> int:
        """Rounds of ended requests that are not written yet."""
        return sum(table.num_rows for tables in self._tables.values() for table in tables)

    def write(self) -> list[Path]:
        """Write the rounds of ended requests, a file for each temperature and top-p."""
        import pyarrow as pa

        from hybridspec.artifacts.atomic import write_parquet
        from hybridspec.calibrate.rounds import sealed

        paths = []
        for sampling, tables in list(self._tables.items()):
            path = self._folder / f"rounds-{self._stamp}-{self._files:06d}.parquet"
            write_parquet(path, sealed(pa.concat_tables(tables)))
            del self._tables[sampling]
            self._files += 1
            paths.append(path)
        return paths

    def _close(self, held: _Open) -> None:
        from hybridspec.calibrate.consistency import check_consistency
        from hybridspec.calibrate.rounds import rows_to_table

        ending = self._ending(held.request)
        assert ending is not None
        rows: list[RoundRow] = []
        if not held.problem and ending.aborted:
            held.problem = "it was aborted"
        if not held.problem:
            held.problem, rows = _rows(held, ending)
        if rows:
            sampling = self._sampling(held.request)
            identity = self._identity(*sampling)
            try:
                table = check_consistency(rows_to_table(rows, identity), path="its rounds")
                self._tables[sampling].append(table)
            except BundleError as error:
                held.problem = str(error)
        if held.problem:
            self.left_out += 1
            logger.warning(
                "HYBRIDSPEC: prompt %s is not recorded: %s", held.tag.prompt_id, held.problem
            )
        else:
            self.written += 1


def _rows(held: _Open, ending: Ending) -> tuple[str, list[RoundRow]]:
    """Why the rounds cannot be used, or the rows of those before the end."""
    from hybridspec.calibrate.loops import round_loop_periods
    from hybridspec.calibrate.rounds import RoundRow

    kept = []
    for number, words, routes in held.rounds:
        start = int(words[CONTEXT]) - ending.prompt_tokens + 1
        if start >= len(ending.tokens):
            continue  # ran while the end of the text was not known yet
        if start < 1 or words[ANCHOR] != ending.tokens[start - 1]:
            return "its rounds do not tell the text it answered with", []
        reals = words[P1.start : TARGET_P1.stop].view(np.float32)
        if not np.isfinite(reals).all():
            return "a signal is not finite", []
        kept.append((number, start, words, routes))
    starts = [start for _, start, _, _ in kept]
    stops = [min(start + int(w[ACCEPTED]) + 1, len(ending.tokens)) for _, start, w, _ in kept]
    periods = round_loop_periods(ending.tokens, starts=starts, stops=stops)
    tag = held.tag
    return "", [
        RoundRow(
            prompt_id=tag.prompt_id,
            category=tag.category,
            split=tag.split,
            round=number,
            generated_tokens=start,
            context_tokens=int(words[CONTEXT]),
            accepted=int(words[ACCEPTED]),
            anchor=int(words[ANCHOR]),
            draft_tokens=words[DRAFTS].tolist(),
            target_tokens=words[TARGETS].tolist(),
            p1=words[P1].view(np.float32).tolist(),
            p2=words[P2].view(np.float32).tolist(),
            entropy_nats=words[ENTROPY].view(np.float32).tolist(),
            target_p1=words[TARGET_P1].view(np.float32).tolist(),
            routes=routes,
            loop_period=int(period),
        )
        for (number, start, words, routes), period in zip(kept, periods, strict=True)
    ]
