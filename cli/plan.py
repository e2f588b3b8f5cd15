"""`hybridspec plan`: whether speculation will pay here, before anything is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli import _options as options
from hybridspec.cli.replay import CURVE_FORMS, Batch, CostPath, HazardSource, Resamples

EPILOG = options.epilog(
    (
        "hybridspec plan --cost ./hybridspec-bundle --trace ./hybridspec-bundle.trace",
        "from recorded rounds",
    ),
    (
        "hybridspec plan --cost ./h200.json --acceptance 0.8,0.7,0.65 --target ./target",
        "from acceptance at each draft position, with the memory of a request",
    ),
)
EPILOG += "\n\n" + CURVE_FORMS


def plan(
    cost: CostPath,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Recorded rounds: lengths chosen by round are predicted, with intervals.",
            show_default=False,
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="P,P,...",
            help="Share of drafts accepted at each position, given that those before were; the "
            "last holds for all behind it. Fixed lengths alone can be judged with it.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with the target's config.json, for the memory of a request.",
            show_default=False,
        ),
    ] = None,
    hazard: HazardSource = None,
    batch: Batch = 1,
    resamples: Resamples = 400,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Say whether speculation will pay on a machine.

    Takes a cost and either recorded rounds or an acceptance profile. Gives the verdict with the
    predicted gain over plain decoding and its interval, the best fixed length, the acceptance at
    which drafting breaks even, and the memory of a request for rolling its recurrent state back.
    Nothing is loaded or served.
    """
    from hybridspec.cli import _plan_run as runner
    from hybridspec.cli._output import Output

    runner.run(
        runner.Request(
            cost=cost,
            trace=trace,
            acceptance=acceptance,
            target=target,
            hazard=hazard,
            batch=batch,
            resamples=resamples,
            seed=seed,
        ),
        Output(as_json=as_json, quiet=quiet),
    )
