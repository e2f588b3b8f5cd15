"""The one place where a command writes: its result on stdout, all else for people on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

PLAIN_PROGRESS_SECONDS = 15.0


class Progress(Protocol):
    """A bar, a line now and then, or nothing, depending on where stderr goes."""

    def advance(self, amount: float = 1.0, *, note: str = "") -> None:
        """Count `amount` units as done; `note` replaces the text behind the bar."""
        ...


@dataclass(frozen=True)
class Output:
    """Sink of one command.

    Attributes:
        as_json: the result is one JSON document instead of text; tables and progress are off.
        quiet: only the result and warnings are written.
    """

    as_json: bool = False
    quiet: bool = False

    @property
    def decorated(self) -> bool:
        """Whether tables and progress are wanted."""
        return not (self.as_json or self.quiet)

    def result(self, text: str, data: Mapping[str, Any]) -> None:
        """Write the command's result: `text`, or `data` as JSON."""
        write_stdout(json.dumps(data, indent=2, allow_nan=False) if self.as_json else text)

    def note(self, message: str) -> None:
        """Tell what is being done."""
        if not self.quiet:
            _write(sys.stderr, message)

    def warn(self, message: str) -> None:
        """Tell something that the person should act on; written even when quiet."""
        warn(message)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table for people; the first column is text, the others line up right."""
        if not self.decorated:
            return
        if sys.stderr.isatty():
            _rich_table(title, columns, rows)
        else:
            _write(sys.stderr, plain_table(title, columns, rows))

    @contextmanager
    def progress(self, description: str, total: float) -> Iterator[Progress]:
        """Progress over `total` units with the time that is left."""
        if not self.decorated:
            yield _Silent()
        elif sys.stderr.isatty():
            with _rich_progress(description, total) as bar:
                yield bar
        else:
            yield _Lines(description, total)


def write_stdout(text: str) -> None:
    """Write one result to stdout; a reader that went away (`| head`) is no error."""
    try:
        _write(sys.stdout, text)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def warn(message: str) -> None:
    """Write `warning: message` to stderr."""
    _write(sys.stderr, f"warning: {message}")


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table of aligned columns, without colour or frames."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = [title]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  " + "  ".join(cells).rstrip())
    return "\n".join(text)


class _Silent:
    def advance(self, amount: float = 1.0, *, note: str = "") -> None:
        """Nothing is shown."""


class _Lines:
    def __init__(self, description: str, total: float) -> None:
        self._description, self._total, self._done = description, total, 0.0
        self._start = self._last = time.monotonic()

    def advance(self, amount: float = 1.0, *, note: str = "") -> None:
        """Write a line when the last one is old enough."""
        self._done += amount
        now = time.monotonic()
        if now - self._last < PLAIN_PROGRESS_SECONDS or self._done <= 0:
            return
        self._last = now
        left_s = (now - self._start) * max(self._total - self._done, 0.0) / self._done
        share = min(1.0, self._done / self._total) if self._total else 1.0
        suffix = f", {note}" if note else ""
        _write(
            sys.stderr,
            f"{self._description}: {share:.0%}, about {format_seconds(left_s)} left{suffix}",
        )


class _RichBar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: float = 1.0, *, note: str = "") -> None:
        """Move the bar."""
        self._bar.update(self._task, advance=amount, note=note)


@contextmanager
def _rich_progress(description: str, total: float) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    with RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        yield _RichBar(bar, bar.add_task(description, total=total, note=""))


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(stderr=True).print(table)


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 min 5 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_bytes(size: float) -> str:
    """`340 bytes`, `1.2 MiB` or `38 GiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            value = size / factor
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{size:.0f} bytes"


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
