"""Stages of a check: each prints where it is, none stops the next, what was found is kept."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Stage = Callable[["Report"], None]


class OutOfTime(Exception):
    """The limit was reached, or the process was asked to end."""


class Report:
    """Findings of all stages so far, written to a file after each."""

    def __init__(self, path: Path | None, limit_s: float) -> None:
        self.path, self.limit_s = path, limit_s
        self.start = time.monotonic()
        self.found: dict[str, dict[str, Any]] = {}
        self.stage = ""
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        raise OutOfTime("SIGTERM")

    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        """One line with the time since the start."""
        print(f"[{self.elapsed_s():6.1f} s] {self.stage}: {text}", flush=True)

    def note(self, **values: Any) -> None:
        """Numbers of this stage, printed and kept."""
        self.found[self.stage].update(values)
        self.say(", ".join(f"{name} {_short(value)}" for name, value in values.items()))

    def require(self, what: str, condition: bool, detail: str = "") -> None:
        """One check; a failed one does not end its stage."""
        entry = self.found[self.stage]
        entry["checks"] = entry.get("checks", 0) + 1
        if not condition:
            entry.setdefault("failed", []).append(f"{what} {detail}".strip())
            self.say(f"FAILED {what} {detail}")

    def run(self, stages: dict[str, Stage]) -> bool:
        """Run the stages in order; whether all of them passed."""
        for name, stage in stages.items():
            self.stage = name
            self.found[name] = {}
            if self.elapsed_s() > self.limit_s:
                self.found[name]["skipped"] = f"past the limit of {self.limit_s:.0f} s"
                continue
            self.say("start")
            try:
                stage(self)
            except OutOfTime as error:
                self.found[name]["error"] = str(error)
                break
            except Exception:
                self.found[name]["error"] = traceback.format_exc()
                print(self.found[name]["error"], flush=True)
            finally:
                self.save()
        return self.summary()

    def save(self) -> None:
        """What was found so far."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def summary(self) -> bool:
        """A line a stage; whether all of them passed."""
        good = True
        print("\nstage                     checks  outcome", flush=True)
        for name, entry in self.found.items():
            bad = [key for key in ("error", "failed", "skipped") if key in entry]
            good &= not bad
            outcome = "ok" if not bad else bad[0]
            if "failed" in entry:
                outcome += f" {len(entry['failed'])}: {entry['failed'][0]}"
            print(f"{name:24}  {entry.get('checks', 0):6}  {outcome}", flush=True)
        sys.stdout.flush()
        return good


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
