"""Where the embedded pair and its prompts lie inside the installed package."""

from __future__ import annotations

from pathlib import Path

from hybridspec.errors import EnvironmentMissing

FOLDER = Path(__file__).parent / "pair"
TARGET = FOLDER / "target"
DRAFTER = FOLDER / "drafter"
PROMPTS = FOLDER / "prompts.jsonl"


def require() -> tuple[Path, Path, Path]:
    """Target folder, drafter folder and prompts file of the embedded pair.

    Raises:
        EnvironmentMissing: the package was installed without them.
    """
    for path in (TARGET / "config.json", DRAFTER / "config.json", PROMPTS):
        if not path.is_file():
            raise EnvironmentMissing(
                f"the embedded pair is incomplete ({path.name} of {path.parent.name}/ is missing): "
                "install the package again"
            )
    return TARGET, DRAFTER, PROMPTS
