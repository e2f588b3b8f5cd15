"""Fuzz an engine until a violation, a number of rounds or a time; shrink and keep what is found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hybridspec.fuzz.adapter import EngineAdapter
from hybridspec.fuzz.generate import random_history
from hybridspec.fuzz.history_file import Finding, Setting, write_finding
from hybridspec.fuzz.operations import History
from hybridspec.fuzz.play import Tally, Violation, play
from hybridspec.fuzz.shrink import Shrunk, shrink

SHRINK_SECONDS = 60.0


@dataclass
class Report:
    """What a run did. Complete at every moment, so that Ctrl-C loses nothing.

    Attributes:
        histories: played to their end, or to the violation. seconds: of playing, without shrinking.
        finding: the violation, as small as it has become.
        path: where it is kept.
    """

    histories: int = 0
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    finding: Finding | None = None
    path: Path | None = None

    @property
    def rounds(self) -> int:
        """Rounds of the engine under test."""
        return self.tally.counts["rounds"]


def fuzz(
    adapter: EngineAdapter,
    setting: Setting,
    report: Report,
    *,
    seed: int,
    rounds: int,
    seconds: float | None,
    folder: Path,
    progress: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    shrink_seconds: float = SHRINK_SECONDS,
) -> None:
    """Play random histories; fills `report` and stops at the first violation.

    Args:
        report: empty.
        seed: of all histories. rounds: at least so many rounds of the engine are played.
        seconds: stop after so long even where rounds are left; None for no limit.
        folder: where a violation is kept, in a file of its own.
        progress: is told the rounds of each history.
        say: is told, in a line, when shrinking begins.
        shrink_seconds: longest time for making a failing history smaller.

    Raises:
        EnvironmentMissing: the folder cannot be written to.
    """
    began = time.monotonic()
    while report.rounds < rounds:
        if seconds is not None and time.monotonic() - began >= seconds:
            return
        number = report.histories
        history = random_history(adapter.facts, seed=seed, number=number)
        tally = Tally()
        violation = play(adapter, history, tally)
        report.histories += 1
        report.tally.add(tally)
        report.seconds = time.monotonic() - began
        progress(tally.counts["rounds"])
        if violation is not None:
            say(f"history {number}: {violation.message}; making it smaller")
            _shrink_and_keep(
                adapter, setting, report, seed, history, violation, folder, shrink_seconds
            )
            return


def _shrink_and_keep(
    adapter: EngineAdapter,
    setting: Setting,
    report: Report,
    seed: int,
    history: History,
    violation: Violation,
    folder: Path,
    seconds: float,
) -> None:
    number = report.histories - 1
    path = folder / f"fuzz-{seed}-{number}-{violation.kind}.json"

    def keep(shrunk: Shrunk) -> None:
        finding = Finding(setting, seed, number, shrunk.history, shrunk.violation, shrunk.minimal)
        write_finding(path, finding)
        report.finding, report.path = finding, path

    shrink(history, violation, lambda h: play(adapter, h), seconds=seconds, keep=keep)
