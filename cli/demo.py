"""`hybridspec demo`: the whole path on the embedded pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli import _options as options

EPILOG = options.epilog(
    ("hybridspec demo", "calibrate, profile, serve and compare; nothing is downloaded"),
    ("hybridspec demo --out /tmp/demo --max-new-tokens 48", "a shorter run, elsewhere"),
)


def demo(
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder for the trace, the bundle and the plots."),
    ] = Path("hybridspec-demo"),
    max_new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens to emit for a prompt.")
    ] = 96,
    prompts_per_category: Annotated[
        int, typer.Option(min=2, metavar="N", help="Held-out prompts to take from each category.")
    ] = 24,
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, metavar="PORT", help="Port of the server; 0: a free one."
        ),
    ] = 0,
) -> None:
    """Calibrate, profile, serve and compare on CPU.

    Uses the small embedded target and drafter and bundled prompts. Decodes the same prompts
    without speculation, with all 16 rows verified, and with the calibrated policy, checks that
    the tokens are the same, and writes the bundle and plots that the other commands write.
    """
    from hybridspec.demo.run import run_demo

    run_demo(
        out=out,
        max_new_tokens=max_new_tokens,
        prompts_per_category=prompts_per_category,
        port=port,
    )
