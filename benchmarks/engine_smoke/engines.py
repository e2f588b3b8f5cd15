"""Engines side by side, asked one after the other; and what is left when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ARM = Path(__file__).with_name("arm.py")
# Lines around which a log says why a process died.
_SIGNS = ("Traceback", "Error", "error:", "Exception", "SIGQUIT", "HYBRIDSPEC", "hybridspec")


class EngineDied(RuntimeError):
    """The engine ended or did not answer in time; the message is the end of its log."""


class Arm:
    """An engine in a process group of its own.

    Args:
        folder: of its files; its log is FOLDER/NAME.log.
        environment: on top of this process's.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.log"
        self._asked = 0
        for old in (folder / f"{name}.up", *folder.glob(f"{name}.[0-9]*.json")):
            old.unlink(missing_ok=True)
        (folder / f"{name}.engine.json").write_text(json.dumps(dict(arguments), indent=1))
        with self.log.open("wb") as out:
            # -P: the folder of arm.py must not shadow modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(ARM), name, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )

    def wait_until_up(self, until: float) -> float:
        """Seconds that the start took.

        Raises:
            EngineDied: it ended, or was not up by then.
        """
        up = self.folder / f"{self.name}.up"
        self._wait(up.exists, until, "start")
        return float(json.loads(up.read_text())["boot_s"])

    def ask(self, task: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Do a task and give its result.

        Raises:
            EngineDied: it ended, did not answer by then, or the task raised.
        """
        number = self._asked
        self._asked += 1
        draft = self.folder / f"{self.name}.{number}.task.tmp"
        draft.write_text(json.dumps(dict(task)))
        draft.replace(self.folder / f"{self.name}.{number}.task.json")
        answer = self.folder / f"{self.name}.{number}.result.json"
        self._wait(answer.exists, until, f"task {number} ({task['do']})")
        result = json.loads(answer.read_text())
        if "error" in result:
            raise EngineDied(f"{self.name}: task {number} raised\n{result['error']}")
        return result

    def _wait(self, done: Callable[[], bool], until: float, what: str) -> None:
        while not done():
            if (code := self._process.poll()) is not None:
                # A child of the engine may still be writing why.
                time.sleep(1.0)
                raise EngineDied(f"{self.name}: ended with {code} in {what}\n{self.report()}")
            if time.monotonic() > until:
                raise EngineDied(f"{self.name}: no answer in time in {what}\n{self.report()}")
            time.sleep(0.02)

    def report(self, last: int = 60) -> str:
        """What the log says of errors, then its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        kept: list[str] = []
        shown = -1
        for number, line in enumerate(lines[:-last]):
            if "Traceback" in line:
                shown = number + 40
            if number <= shown or any(sign in line for sign in _SIGNS[1:]):
                kept.append(line[:300])
        return "\n".join([*kept[-120:], "--- end of the log ---", *lines[-last:]])

    def facts(self) -> list[str]:
        """Lines of the log about the plugin, memory and graphs."""
        signs = ("HYBRIDSPEC", "hybridspec", "Mamba Cache", "KV Cache is", "DFLASH", "Capture cuda")
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[:300] for line in lines if any(sign in line for sign in signs)][:40]

    def kill(self) -> None:
        """End the process group; a second call does nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
