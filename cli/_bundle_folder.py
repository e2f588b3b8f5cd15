"""The folder that a command writes its bundle part into."""

from __future__ import annotations

from pathlib import Path

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.lock import LOCK_NAME
from hybridspec.artifacts.store import MANIFEST_NAME
from hybridspec.errors import UsageError


def check_bundle_folder(folder: Path) -> None:
    """Refuse to write a bundle where one is damaged or where other files lie.

    Raises:
        BundleError: a damaged bundle.
        UsageError: a folder with other content, or no folder.
    """
    if (folder / MANIFEST_NAME).exists():
        load_bundle(folder)
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file; a bundle is a folder: choose another name")
    known = {LOCK_NAME, "calibration", "cost", "plots", "README.md"}
    other = sorted({p.name for p in folder.iterdir()} - known) if folder.is_dir() else []
    if other:
        raise UsageError(
            f"--out {folder} holds {other[0]!r} and no bundle; a bundle needs a folder of its own: "
            "choose an empty or new folder"
        )


def beside(folder: Path, suffix: str) -> Path:
    """The sibling of `folder` with `suffix` behind its name."""
    return folder.parent / (folder.resolve().name + suffix)
