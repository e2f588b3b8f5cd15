"""Recording through a running SGLang server: prompts go in tagged, rounds come from its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.calibrate.rounds import RoundRow, TraceIdentity, trace_identity
from hybridspec.calibrate.trace import read_trace
from hybridspec.collect import Progress, TokenPrompt
from hybridspec.errors import EnvironmentMissing, ModelError
from hybridspec.sglang_plugin.server_api import ServerApi

# Between the end of an answer and its rounds on disk: a second; the first time the server also
# reads its weights for their digest.
FIRST_SECONDS, NEXT_SECONDS = 300.0, 30.0
ATTEMPTS = 2
_POLL_SECONDS = 0.1
# What a server's files say of their pair and sampling; prompts and limits are the client's.
_SAME = (
    "target_digest", "drafter_digest", "layers", "topk", "experts", "vocab_size", "temperature",
    "top_p", "dtype",
)  # fmt: skip


class RecordedFolder:
    """Files that a server writes into its `record` folder, as they come.

    Args:
        folder: of the server's configuration; files that are there already are left alone.
        identity: of the trace that is made; every file must be of its pair and sampling.
    """

    def __init__(self, folder: Path, identity: TraceIdentity) -> None:
        self._folder = folder
        self._identity = identity
        self._read = set(folder.glob("*.parquet"))
        self._rows: dict[str, list[RoundRow]] = {}
        self.found_any = False

    def look(self) -> None:
        """Read what is new.

        Raises:
            ModelError: rounds of another pair, type or sampling.
            BundleError: a damaged file.
        """
        for path in sorted(set(self._folder.glob("*.parquet")) - self._read):
            table = read_trace(path)
            self._read.add(path)
            self._check(trace_identity(table, path=path), path)
            self.found_any = True
            for row in table.to_pylist():
                self._rows.setdefault(row["prompt_id"], []).append(RoundRow(**row))

    def rows(self, name: str) -> list[RoundRow] | None:
        """Rounds of one answer in their order, None if there are none yet."""
        found = self._rows.get(name)
        return None if found is None else sorted(found, key=lambda row: row.round)

    def _check(self, found: TraceIdentity, path: Path) -> None:
        for name in _SAME:
            here, there = getattr(self._identity, name), getattr(found, name)
            if here != there:
                raise ModelError(
                    f"{path}: the server recorded with {name} = {there!r}, here it is {here!r}: "
                    "name the pair that it serves"
                )


def record_prompts(
    api: ServerApi,
    recorded: RecordedFolder,
    group: Sequence[TokenPrompt],
    identity: TraceIdentity,
    *,
    run: str,
    progress: Progress,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RoundRow]:
    """Decode one group together, every round verified in full.

    Args:
        recorded: the folder that this server records into.
        run: tells this run's rounds from those of others.

    Returns:
        rows by prompt, then round.

    Raises:
        EnvironmentMissing: the server went away, refused a prompt, or recorded no rounds of it.
    """
    rows: dict[str, list[RoundRow]] = {}
    missing = list(group)
    for attempt in range(ATTEMPTS):
        names = {p.prompt.prompt_id: f"{run}.{attempt}:{p.prompt.prompt_id}" for p in missing}
        ends = _send(api, missing, names, identity, progress if attempt == 0 else None)
        since = time.monotonic()
        while True:
            before = len(missing)
            recorded.look()
            for prompt_id, end in ends.items():
                found = recorded.rows(names[prompt_id]) if end > 1 else []
                if found is not None and (end <= 1 or _whole(found, end)):
                    rows[prompt_id] = [replace(row, prompt_id=prompt_id) for row in found]
            missing = [p for p in group if p.prompt.prompt_id not in rows]
            if not missing:
                return [row for p in group for row in rows[p.prompt.prompt_id]]
            if len(missing) < before:
                since = time.monotonic()
            if time.monotonic() - since > (NEXT_SECONDS if recorded.found_any else FIRST_SECONDS):
                break
            sleep(_POLL_SECONDS)
    raise EnvironmentMissing(
        f"the server answered prompt {missing[0].prompt.prompt_id} and recorded no whole story of "
        "it: its log says what it left out and why; is this the folder that it records into?"
    )


def _whole(rows: Sequence[RoundRow], end: int) -> bool:
    """Whether rounds tell an answer of `end` tokens from its first to its last."""
    start = 1
    for number, row in enumerate(rows):
        if row.round != number or row.generated_tokens != start:
            return False
        start += row.accepted + 1
    return start >= end


def _send(
    api: ServerApi,
    group: Sequence[TokenPrompt],
    names: dict[str, str],
    identity: TraceIdentity,
    progress: Progress | None,
) -> dict[str, int]:
    """Tokens that each prompt was answered with."""
    counts = [0] * len(group)
    for chunk in api.stream(recording_body(group, names, identity)):
        reason = chunk.meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise EnvironmentMissing(
                f"{api.url} aborted prompt {group[chunk.index].prompt.prompt_id}: "
                f"{reason.get('message', 'no reason given')}"
            )
        done = max(int(chunk.meta["completion_tokens"]), counts[chunk.index])
        if progress is not None:
            progress.advance(float(done - counts[chunk.index]))
        counts[chunk.index] = done
    if progress is not None:
        progress.advance(float(len(group) * identity.max_new_tokens - sum(counts)))
    return {p.prompt.prompt_id: n for p, n in zip(group, counts, strict=True)}


def recording_body(
    group: Sequence[TokenPrompt], names: dict[str, str], identity: TraceIdentity
) -> dict[str, Any]:
    """A batch of streams whose rounds are recorded under `names`, by prompt id."""

    def sampling(member: TokenPrompt) -> dict[str, Any]:
        prompt = member.prompt
        tag = {
            "prompt_id": names[prompt.prompt_id],
            "category": prompt.category,
            "split": prompt.split,
        }
        return {
            "temperature": identity.temperature,
            "top_p": identity.top_p,
            "max_new_tokens": identity.max_new_tokens,
            "custom_params": {"hybridspec": {"verify_length": BLOCK_SIZE, "record": tag}},
        }

    return {
        "input_ids": [list(member.token_ids) for member in group],
        "sampling_params": [sampling(member) for member in group],
        "stream": True,
    }
