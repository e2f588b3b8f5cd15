"""How long prompts were read, from streams: whole runs hold prefills, decode rates leave them out.

A prompt is being read from its submission to its first token. Where several overlap they are one
group, and while one is read the server decodes nobody else's rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.load import Stream


@dataclass(frozen=True)
class Reading:
    """Prompts read in one run.

    Attributes:
        wall_s: from the first submission to the last token.
        groups: prompts read in each group of overlapping ones, in order.
        reading_s: in which at least one prompt is read.
        tokens: emitted in the whole run.
    """

    wall_s: float
    groups: tuple[int, ...]
    reading_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Of the whole run."""
        return self.tokens / self.wall_s

    def row(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "requests": sum(self.groups),
            "groups_read": len(self.groups),
            "group_ms_mean": round(1e3 * self.reading_s / len(self.groups), 1),
            "reading_s": round(self.reading_s, 3),
            "not_reading_s": round(self.wall_s - self.reading_s, 3),
            "whole_run_s": round(self.wall_s, 3),
            "tokens": self.tokens,
            "whole_run_tokens_per_s": round(self.tokens_per_s, 2),
        }


def reading_of(streams: Sequence[Stream]) -> Reading | None:
    """How prompts were read in a run, None where no stream has a token."""
    seen = [stream for stream in streams if stream.arrived_s]
    if not seen:
        return None
    groups: list[int] = []
    total, until = 0.0, float("-inf")
    for start, end in sorted((s.submitted_s, s.arrived_s[0]) for s in seen):
        if start < until:
            groups[-1] += 1
            total += max(end - until, 0.0)
        else:
            groups.append(1)
            total += end - start
        until = max(until, end)
    return Reading(
        wall_s=max(s.arrived_s[-1] for s in seen) - min(s.submitted_s for s in seen),
        groups=tuple(groups),
        reading_s=total,
        tokens=sum(s.tokens[-1] for s in seen),
    )


def same_requests(ours: Sequence[Stream], theirs: Sequence[Stream]) -> bool:
    """Whether two runs answered the same prompts at the same lengths, without an error."""

    def asked(streams: Sequence[Stream]) -> list[tuple[int, int]]:
        return sorted((s.prompt, s.tokens[-1]) for s in streams if s.tokens and not s.error)

    return asked(ours) == asked(theirs) and len(ours) == len(theirs) == len(asked(ours))


def shortest_and_longest(streams: Sequence[Stream]) -> tuple[int, int]:
    """Tokens of the shortest and the longest answer."""
    lengths = [stream.tokens[-1] for stream in streams if stream.tokens]
    return min(lengths), max(lengths)


def reading_rows(
    streams: Mapping[tuple[str, int], Sequence[Stream]],
    passes: Mapping[tuple[str, int], Sequence[int]],
) -> list[dict[str, Any]]:
    """One row an arm and client count.

    Args:
        passes: prompts of each prefill pass by the server's log, where it was recorded.
    """
    found = []
    for (name, clients), run in sorted(streams.items()):
        reading = reading_of(run)
        if reading is None:
            continue
        row: dict[str, Any] = {
            "kind": "reading", "arm": name, "clients": clients, **reading.row(),
        }  # fmt: skip
        row["tokens_shortest"], row["tokens_longest"] = shortest_and_longest(run)
        if (name, clients) in passes:
            row["prefill_passes"] = len(passes[name, clients])
        plain = streams.get(("ar", clients))
        if plain is not None and same_requests(run, plain):
            other = reading_of(plain)
            assert other is not None
            row["whole_run_over_ar"] = round(reading.tokens_per_s / other.tokens_per_s, 4)
        found.append(row)
    return found


def reading_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Prompts read, for people."""
    lines = [
        f"{'whole runs':18s}{'clients':>8s}{'groups read':>12s}{'passes':>7s}{'ms a group':>11s}"
        f"{'reading s':>10s}{'other s':>8s}{'t/s':>8s}{'over ar':>8s}"
    ]
    for row in rows:
        over = row.get("whole_run_over_ar")
        lines.append(
            f"{row['arm']:18s}{row['clients']:8d}"
            f"{str(row['groups_read']) + ' of ' + str(row['requests']):>12s}"
            f"{row.get('prefill_passes', '-')!s:>7s}"
            f"{row['group_ms_mean']:11.0f}{row['reading_s']:10.2f}{row['not_reading_s']:8.2f}"
            f"{row['whole_run_tokens_per_s']:8.1f}{'' if over is None else f'{over:.2f}x':>8s}"
        )
    return "\n".join(lines)
