"""Facts beside a bundle part that do not count for its identity: when, with what, how."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from hybridspec import __version__

TRACKED_PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "pyarrow", "tokenizers")


def provenance(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with the command, its settings, versions and the time.

    No paths, host or user names: bundles are made to be handed on.
    """
    return {
        "command": f"hybridspec {command}",
        "settings": dict(settings),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hybridspec": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in TRACKED_PACKAGES},
    }
