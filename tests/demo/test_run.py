"""What the demo says of rounds that the policy did not choose."""

from __future__ import annotations

import subprocess
import sys

from hybridspec.demo import run
from hybridspec.demo.comparison import Decoded
from hybridspec.server.round_times import DRIFTED


def decoded(rounds: int, *fallbacks: str) -> list[Decoded]:
    return [Decoded("p", "code", (1,), (1,) * rounds, (1.0,) * rounds, (1,) * rounds, fallbacks)]


def test_rounds_after_a_drift_are_told_from_rounds_that_do_not_pay() -> None:
    runs = {run.POLICY: [decoded(6, DRIFTED, "other"), decoded(2)], run.AR: [decoded(9, DRIFTED)]}
    assert run._static_share(runs) == 1 / 8
    assert run._static_share({run.POLICY: [decoded(0)]}) == 0.0


def test_what_a_server_says_after_its_start_is_passed_on_whatever_its_length() -> None:
    script = "import sys; sys.stderr.write('x' * 99 + '\\n'); sys.stderr.write('late\\n' * 20000)"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    told: list[str] = []
    run._pass_on(told.append, process)
    assert process.wait(20) == 0
    assert told[0] == "  serve: " + "x" * 99
    assert told[1:] == ["  serve: late"] * 20000
