"""Results go to stdout alone; notes, tables and progress to stderr or nowhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybridspec.cli import _output
from hybridspec.cli._output import Output, format_seconds, plain_table


def use(output: Output) -> None:
    output.note("loading")
    with output.progress("decoding", 2) as progress:
        progress.advance(1, note="one")
        progress.advance(1)
    output.table("Fit", ("split", "loss"), [("test", "0.5")])
    output.result("done", {"loss": 0.5})


def test_text_result(capsys: pytest.CaptureFixture[str]) -> None:
    use(Output())
    out, err = capsys.readouterr()
    assert out == "done\n"
    assert err == "loading\nFit\n  split  loss\n  test    0.5\n"


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    use(Output(as_json=True))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"loss": 0.5}
    assert err == "loading\n"


def test_quiet_leaves_result_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(quiet=True)
    use(output)
    output.warn("slow")
    assert capsys.readouterr() == ("done\n", "warning: slow\n")


def test_json_refuses_numbers_that_json_lacks() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output(as_json=True).result("", {"loss": float("nan")})


def test_plain_progress_writes_when_the_last_line_is_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    # Not the clock of the whole process, by which other threads sleep.
    monkeypatch.setattr(_output, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Output().progress("decoding", 4) as progress:
        for _ in range(4):
            now[0] += 10.0
            progress.advance(1, note="5 tokens/round")
    assert capsys.readouterr().err.splitlines() == [
        "decoding: 50%, about 20 s left, 5 tokens/round",
        "decoding: 100%, about 0 s left, 5 tokens/round",
    ]


def test_terminal_gets_a_bar_and_a_framed_table() -> None:
    program = (
        "from hybridspec.cli._output import Output\n"
        "output = Output()\n"
        "with output.progress('decoding', 2) as progress:\n"
        "    progress.advance(2, note='last')\n"
        "output.table('Fit [best]', ('split', 'loss'), [('test', '0.5')])\n"
        "output.result('done', {})\n"
    )
    parent, child = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=child,
        text=True,
        env=os.environ | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100"},
    )
    os.close(child)
    shown = os.read(parent, 1 << 16).decode()
    os.close(parent)
    assert done.returncode == 0
    assert done.stdout == "done\n"
    assert "100%" in shown
    assert "Fit [best]" in shown
    assert "test" in shown


def test_table_lines_up() -> None:
    assert plain_table("T", ("a", "bb"), [("long", "1"), ("x", "222")]) == (
        "T\n  a      bb\n  long    1\n  x     222"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3600, "1 h 0 min"), (7805, "2 h 10 min")],
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
