"""Times of rounds in a SGLang server, from its streams: forced lengths, and plain decoding.

A chunk of a stream is a round. Only an answer's last chunk says how many rounds it had and how many
rows each verified, so answers are read to their end, and where the server put several rounds into
one chunk, the chunks stand for as many rounds each as there were in the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.costmodels.measure import measure_interleaved
from hybridspec.costmodels.probe import rows_expected
from hybridspec.costmodels.sweep import STEP_SAMPLES_SCHEMA, Progress, StepCase, check_rows
from hybridspec.errors import EngineRefusal, QualityGate
from hybridspec.sglang_plugin.server_api import Chunk, ServerApi, generate_body

# Rounds of each request before the clock starts, inside it, and to spare for requests whose
# prompts were read first.
WARMUP_ROUNDS, TIMED_ROUNDS, SPARE_ROUNDS = 3, 24, 16
FEWEST_ROUNDS = 8
# More merged chunks than this share of an answer's rounds, and its times are not of rounds.
MOST_MERGED = 0.05
# Of an answer that is read to its end: rounds emit 1..16 tokens, in most texts 2 to 6, so that an
# answer is neither over after a few rounds nor hundreds of them long.
_TOKENS_A_ROUND = 6


def tokens_of(verify_length: int) -> int:
    """Tokens that a reading asks for; 0 rows: of a server without a drafter."""
    rounds = WARMUP_ROUNDS + TIMED_ROUNDS + SPARE_ROUNDS
    return rounds * min(max(verify_length, 1), _TOKENS_A_ROUND)


# Room that a reading needs behind its prompt.
MOST_TOKENS = tokens_of(BLOCK_SIZE)


@dataclass(frozen=True)
class Reading:
    """One stretch of rounds with all requests of the batch decoding.

    Attributes:
        total_us: mean time of a round.
        rounds: how many it is the mean of.
        rows_run: rows that the batch verified in a round.
    """

    total_us: float
    rounds: int
    rows_run: int


@dataclass
class _Track:
    """Chunks of one request that brought tokens, and what its last one said.

    Attributes:
        tokens: of the answer after each chunk.
        total: rounds of the whole answer, None until it ended.
        rows: verified in a round.
    """

    arrived_s: list[float]
    tokens: list[int]
    total: int | None = None
    rows: float = 1.0

    def rounds(self, *, drafted: bool) -> list[float]:
        """Rounds that the request had had when each chunk arrived."""
        if not drafted:
            return [float(tokens) for tokens in self.tokens]
        # The first chunk is the prefill's token, which no round emitted.
        chunks = len(self.tokens) - 1
        of_a_chunk = 1.0 if not self.total or chunks < 1 else self.total / chunks
        return [place * of_a_chunk for place in range(chunks + 1)]


class StreamReader:
    """Collects chunks of a batch: of plain decoding until there are enough, else to the end.

    Args:
        batch: requests.
        drafted: whether rounds draft; else a round is a token.
    """

    def __init__(self, batch: int, *, drafted: bool) -> None:
        self._drafted = drafted
        self._tracks = [_Track([], []) for _ in range(batch)]

    def add(self, chunk: Chunk) -> bool:
        """Take one chunk; whether the stream may be closed.

        Raises:
            EngineRefusal: an answer ends without a word about its rounds.
            QualityGate: its rounds verified different numbers of rows.
        """
        meta = chunk.meta
        track = self._tracks[chunk.index]
        tokens = meta["completion_tokens"]
        if not track.tokens or tokens > track.tokens[-1]:
            track.arrived_s.append(chunk.arrived_s)
            track.tokens.append(tokens)
        if self._drafted:
            if meta.get("finish_reason") is not None:
                track.rows = _rows_a_round(meta)
                track.total = int(meta["spec_verify_ct"])
            return all(track.total is not None for track in self._tracks)
        start_s = self._start_s()
        return start_s is not None and all(
            self._count_from(track, start_s) >= TIMED_ROUNDS for track in self._tracks
        )

    def reading(self) -> Reading:
        """The time of a round while all requests decoded.

        Raises:
            QualityGate: too few such rounds, too many that came together, or an answer without an
                end, which alone tells its rounds.
        """
        if self._drafted and any(track.total is None for track in self._tracks):
            raise QualityGate("an answer broke off before its end: see the server's log")
        for track in self._tracks:
            chunks = len(track.tokens) - 1
            if track.total is not None and track.total - chunks > MOST_MERGED * track.total:
                raise QualityGate(
                    f"{track.total} rounds arrived in {chunks} chunks, and at most "
                    f"{MOST_MERGED:.0%} may share one, or times are not of rounds: measure on the "
                    "server's own machine while it is idle, without --stream-interval"
                )
        start_s = self._start_s()
        times, counts = [], []
        if start_s is not None:
            stop_s = min(track.arrived_s[-1] for track in self._tracks)
            for track in self._tracks:
                inside = [i for i, at in enumerate(track.arrived_s) if start_s <= at <= stop_s]
                if len(inside) < 2:
                    continue
                first, last = inside[0], inside[-1]
                rounds = track.rounds(drafted=self._drafted)
                count = rounds[last] - rounds[first]
                times.append((track.arrived_s[last] - track.arrived_s[first]) / count)
                counts.append(round(count))
        if len(times) < len(self._tracks) or min(counts) < FEWEST_ROUNDS:
            raise QualityGate(
                f"{len(self._tracks)} requests decoded together for {min(counts, default=0)} "
                f"rounds; at least {FEWEST_ROUNDS} are needed: raise --max-running-requests and "
                "--max-total-tokens of the server, or measure smaller batches"
            )
        rows = sum(track.rows if self._drafted else 1.0 for track in self._tracks)
        return Reading(1e6 * float(np.mean(times)), min(counts), round(rows))

    def _start_s(self) -> float | None:
        """When the last request had its warm-up rounds, None before."""
        starts = []
        for track in self._tracks:
            warm = (
                at
                for at, rounds in zip(
                    track.arrived_s, track.rounds(drafted=self._drafted), strict=True
                )
                if rounds >= WARMUP_ROUNDS
            )
            if (start := next(warm, None)) is None:
                return None
            starts.append(start)
        return max(starts)

    def _count_from(self, track: _Track, start_s: float) -> float:
        rounds = track.rounds(drafted=self._drafted)
        inside = [r for at, r in zip(track.arrived_s, rounds, strict=True) if at >= start_s]
        return inside[-1] - inside[0] if inside else 0.0


def _rows_a_round(meta: Mapping[str, object]) -> float:
    """Mean rows verified; they must be the same in every round, or the mean is of nothing."""
    histogram = meta.get("spec_cap_lens_histogram")
    if not isinstance(histogram, list):
        raise EngineRefusal(
            "the server does not say how many rows it verified, so it does not run HYBRIDSPEC: "
            "start it with `hybridspec serve --engine sglang`"
        )
    lengths = [length for length, count in enumerate(histogram) if count]
    if len(lengths) != 1:
        raise QualityGate(
            f"rounds of one request verified {lengths} rows where one length was forced: another "
            "client or HYBRIDSPEC_CONFIG limits lengths; start the server without max_length"
        )
    return float(lengths[0])


@dataclass(frozen=True)
class Grid:
    """What is measured.

    Attributes:
        contexts: prompt lengths, tokens.
        texts: token ids of texts that prompts are made of.
    """

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    seed: int
    texts: Sequence[Sequence[int]]

    def prompts(self, batch: int, context_tokens: int) -> list[list[int]]:
        """`batch` prompts of `context_tokens` tokens; each begins with another text."""
        return [prompt_of(self.texts, first, context_tokens) for first in range(batch)]


def bundled_texts(target: Path) -> list[list[int]]:
    """The bundled prompts in a target's tokens, which prompts of a measurement are made of.

    Raises:
        EnvironmentMissing: the embedded pair is not installed.
        ModelError: a folder without a tokenizer.
    """
    from hybridspec.calibrate.prompts import load_prompts
    from hybridspec.demo import assets
    from hybridspec.reference.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(target)
    _, _, prompts_file = assets.require()
    texts = [tokenizer.encode(prompt.text) for prompt in load_prompts(prompts_file)]
    return [ids for ids in texts if ids]


def prompt_of(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """A prompt of `length` tokens made of texts from the `first` on, one behind the other."""
    order = (texts[(first + n) % len(texts)] for n in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(order), length))


Readings = Mapping[StepCase, tuple[Reading, ...]]


def measure_server(
    api: ServerApi,
    grid: Grid,
    lengths: Iterable[int],
    *,
    budget_s: float,
    progress: Progress | None = None,
) -> Readings:
    """Readings of every batch, context and length, interleaved.

    Args:
        lengths: 1..16 of a server with HYBRIDSPEC, or 0 alone of a plain one.
        budget_s: measuring stops after the first sweep that ends past this time.

    Raises:
        QualityGate: other rows than asked for, or too few rounds or sweeps.
        Interrupted: Ctrl-C, from `costmodels.measure`.
    """

    def case(key: StepCase) -> Callable[[], Reading]:
        prompts = grid.prompts(key.batch, key.context_tokens)

        def run() -> Reading:
            reading = read_rounds(api, prompts, key.verify_length)
            asked = rows_expected(batch=key.batch, verify_length=key.verify_length)
            check_rows(asked, reading.rows_run, case=key)
            return reading

        return run

    keys = [
        StepCase(batch, context, length)
        for batch in grid.batch_sizes
        for context in grid.contexts
        for length in lengths
    ]
    measured = measure_interleaved(
        {key: case(key) for key in keys},
        repeats=grid.repeats,
        budget_s=budget_s,
        seed=grid.seed,
        group_of=lambda key: (key.batch, key.context_tokens),
        progress=progress,
    )
    return measured.readings


def read_rounds(
    api: ServerApi,
    prompts: Sequence[Sequence[int]],
    verify_length: int,
    *,
    new_tokens: int | None = None,
    distinct_experts: int = 0,
) -> Reading:
    """One reading on an idle server, which is idle again afterwards.

    Args:
        new_tokens: of each answer, `tokens_of(verify_length)` if None.
        distinct_experts: of every layer, on a server whose routes can be forced.
    """
    body = generate_body(
        prompts,
        new_tokens=tokens_of(verify_length) if new_tokens is None else new_tokens,
        verify_length=verify_length,
        distinct_experts=distinct_experts,
    )
    reader = StreamReader(len(prompts), drafted=verify_length > 0)
    chunks = api.stream(body)
    try:
        for chunk in chunks:
            if reader.add(chunk):
                break
    finally:
        chunks.close()  # type: ignore[attr-defined]
        api.wait_until_idle()
    return reader.reading()


def step_samples(drafted: Readings, plain: Readings) -> pa.Table:
    """Readings of both servers as step samples.

    What a draft pass takes is not visible from outside: it is what a drafted round of one row takes
    beyond a plain one, other overheads of a drafted round included.

    Raises:
        QualityGate: plain rounds that take longer than drafted ones of one row.
    """
    columns: dict[str, list[object]] = {name: [] for name in STEP_SAMPLES_SCHEMA.names}
    readings = {**drafted, **plain}
    for key, repeats in sorted(readings.items(), key=lambda item: _order(item[0])):
        draft_us = 0.0
        if key.verify_length:
            one_row = _median(readings[StepCase(key.batch, key.context_tokens, 1)])
            draft_us = one_row - _median(readings[StepCase(key.batch, key.context_tokens, 0)])
            if draft_us <= 0:
                raise QualityGate(
                    f"batch {key.batch}, context {key.context_tokens}: a plain round takes "
                    f"{-draft_us:.0f} us longer than a drafted one of 1 row, so the two servers "
                    "do not compare: start both with the same flags and measure again"
                )
        for repeat, reading in enumerate(repeats):
            row = (
                key.batch, key.context_tokens, key.verify_length, repeat, reading.total_us,
                draft_us, None, None, reading.rows_run,
            )  # fmt: skip
            for name, value in zip(STEP_SAMPLES_SCHEMA.names, row, strict=True):
                columns[name].append(value)
    return pa.table(columns, schema=STEP_SAMPLES_SCHEMA)


def _order(key: StepCase) -> tuple[int, int, int]:
    return key.batch, key.context_tokens, key.verify_length


def _median(readings: Sequence[Reading]) -> float:
    return float(np.median([reading.total_us for reading in readings]))
