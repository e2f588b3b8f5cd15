"""The environment variables that HybridSpec reads: one table, and one reader for each.

Everything else is a flag. A value that cannot be right is refused, never ignored.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hybridspec.errors import UsageError

PREFIX = "HYBRIDSPEC_"

VARIABLES: dict[str, str] = {
    "HYBRIDSPEC_HOME": "folder for downloaded data sets (default: the cache of `datasets`)",
    "HYBRIDSPEC_OFFLINE": "1: never use the network (HF_HUB_OFFLINE counts too)",
    "HYBRIDSPEC_LOG": "debug, info, warning or error: log to stderr (debug adds tracebacks)",
    "HYBRIDSPEC_CONFIG": "JSON file of the SGLang plugin (bundle, lengths, correction, telemetry)",
    "HYBRIDSPEC_PADDED_SOURCE": "pair whose weights fill a padded pair as SGLang loads it",
    "HYBRIDSPEC_STATE_DIGEST": "file for digests of states in SGLang (debugging; slows rounds)",
    "HYBRIDSPEC_FORCE_LENGTH": "1..16: rows of every round in SGLang of requests that ask for none",
}

# What tests and benchmarks of the repository read. No command does, so they are not in the table.
_OF_THE_REPOSITORY = frozenset(
    f"{PREFIX}{name}" for name in ("COMMIT", "TEST_EXAMPLES", "SGLANG_PYTHON", "SGLANG_NEXT")
)

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Folder for what is downloaded; None leaves it to the libraries that download."""
    value = environ.get("HYBRIDSPEC_HOME")
    return Path(value).expanduser() if value else None


def offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the network must not be used."""
    return _flag("HYBRIDSPEC_OFFLINE", environ) or _flag("HF_HUB_OFFLINE", environ)


def log_level(environ: Mapping[str, str] = os.environ) -> int:
    """Level of the `hybridspec` logger, as in `logging`."""
    value = environ.get("HYBRIDSPEC_LOG", "warning").strip().lower() or "warning"
    if value not in _LEVELS:
        raise UsageError(f"HYBRIDSPEC_LOG={value} is not one of {', '.join(_LEVELS)}: set one")
    return _LEVELS[value]


def sglang_config(environ: Mapping[str, str] = os.environ) -> Path | None:
    """File with the configuration of the SGLang plugin; None: the defaults."""
    value = environ.get("HYBRIDSPEC_CONFIG")
    return Path(value).expanduser() if value else None


def state_digest(environ: Mapping[str, str] = os.environ) -> Path | None:
    """File for digests of states before every round in SGLang; None: nothing is looked at."""
    value = environ.get("HYBRIDSPEC_STATE_DIGEST")
    return Path(value).expanduser() if value else None


def force_length(environ: Mapping[str, str] = os.environ) -> int | None:
    """Length of every round in SGLang, in rows; None leaves it to the policy."""
    value = environ.get("HYBRIDSPEC_FORCE_LENGTH", "").strip()
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 16:
        raise UsageError(
            f"HYBRIDSPEC_FORCE_LENGTH={value} is no number of rows: set 1..16, or unset it"
        )
    return int(value)


def pass_on(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell the libraries that reach the network for us; what they are told already stands."""
    if offline(environ):
        environ.setdefault("HF_HUB_OFFLINE", "1")
        environ.setdefault("HF_DATASETS_OFFLINE", "1")
    if (folder := home(environ)) is not None:
        environ.setdefault("HF_DATASETS_CACHE", str(folder / "datasets"))


def unrecognised(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One sentence for each `HYBRIDSPEC_*` variable that nothing reads, in name order."""
    sentences = []
    for name in sorted(environ):
        if name in VARIABLES or name in _OF_THE_REPOSITORY:
            continue
        if name.startswith(PREFIX):
            close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(VARIABLES)}"
            sentences.append(f"{name} is set but not a variable of hybridspec; {hint}")
    return sentences


def _flag(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name}={value} is neither true nor false: set 1 or 0, or unset it")
