"""The folder that a command writes its bundle part into."""

from __future__ import annotations

import shlex
from pathlib import Path

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.digest import model_digest
from hybridspec.artifacts.lock import LOCK_NAME
from hybridspec.artifacts.store import MANIFEST_NAME
from hybridspec.errors import BundleError, UsageError
from hybridspec.pair import PairFolders


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


def check_same_pair(folder: Path, folders: PairFolders, *, named: bool) -> None:
    """Refuse to add costs of one pair to hazards of another.

    Args:
        folder: where the costs are to be written; nothing is compared without hazards there.
        folders: the pair that is to be measured.
        named: whether the command line names it; else it is the embedded one.

    Raises:
        BundleError: the hazards there are another pair's.
    """
    if not (folder / MANIFEST_NAME).exists():
        return
    calibration = load_bundle(folder).calibration
    if calibration is None:
        return
    for part in ("target", "drafter"):
        path = getattr(folders, part)
        if path is None:
            continue
        saved, current = getattr(calibration.identity, f"{part}_digest"), model_digest(path)
        if saved != current:
            why = "" if named else ", the embedded one, because TARGET is left out"
            raise BundleError(
                f"{folder} has hazards of another pair: its {part} is {saved[:12]}, here it is "
                f"{current[:12]} ({path}{why}); a bundle is of one pair: name the {part} that it "
                "was calibrated with, or choose another --out"
            )


def command_line(
    verb: str,
    target: Path | None,
    drafter: Path | None,
    *,
    engine: str = "reference",
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    out: Path,
) -> str:
    """The command that goes on with a pair, to be printed: what was named is named again."""
    words: list[str] = ["hybridspec", verb]
    words += [str(target)] if target is not None else []
    words += ["--drafter", str(drafter)] if drafter is not None else []
    words += ["--engine", engine] if engine != "reference" else []
    words += ["--device", device] if device != "auto" else []
    words += ["--dtype", dtype] if dtype != "auto" else []
    words += ["--threads", str(threads)] if threads is not None else []
    return shlex.join([*words, "--out", str(out)])


def beside(folder: Path, suffix: str) -> Path:
    """The sibling of `folder` with `suffix` behind its name."""
    return folder.parent / (folder.resolve().name + suffix)
