"""`hybridspec replay`: what length policies would have made of recorded rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridspec.cli import _options as options

# Both forms of costmodels/curve.py; also for `hybridspec plan`.
CURVE_FORMS = """\b
A JSON cost curve, us a round by verify length (0 without a draft pass, then 1 to 16):
  {"schema_id": "hybridspec.curve/1", "name": "my machine", "draft_us": 900, "latency_us":
   [4240, 5140, 5610, 5950, 6220, 6440, 6630, 6790, 6930, 7050, 7160, 7260, 7350, 7430, 7510,
    7580, 7650]}

\b
or by distinct experts, for traces with routes (us without experts, us for one in all layers):
  {"schema_id": "hybridspec.curve/1", "name": "my machine", "draft_us": 900, "base_us": 3738,
   "expert_us": 62.9, "layers": 40}"""

EPILOG = options.epilog(
    (
        "hybridspec replay ./hybridspec-bundle.trace --cost ./hybridspec-bundle",
        "the trace that `hybridspec calibrate` recorded, on this machine",
    ),
    (
        "hybridspec replay ./trace --cost ./bundle --what-if ./h200.json "
        "--policies ar,fixed-16,hybridspec,oracle --json",
        "and on another machine, for a program",
    ),
)
EPILOG += "\n\n" + CURVE_FORMS

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="Folder or Parquet file of recorded rounds, every one verified in full.",
        show_default=False,
    ),
]
CostPath = Annotated[
    Path,
    typer.Option(
        "--cost",
        metavar="PATH",
        help="Bundle with a cost part, or a JSON cost curve (written out below).",
        show_default=False,
    ),
]
HazardSource = Annotated[
    str | None,
    typer.Option(
        "--hazard",
        metavar="BUNDLE|NAME",
        help="Bundle whose hazards are used, or a hazard model to fit on the trace's calibration "
        "split. Default: those of the --cost bundle, else the default model.",
        show_default=False,
    ),
]
Resamples = Annotated[
    int,
    typer.Option(
        min=20,
        # Ends of an interval move by less than their rounding from here on; each costs time.
        max=100_000,
        metavar="N",
        help="Bootstrap resamples of prompts for intervals, 20 to 100000.",
    ),
]
Batch = Annotated[
    int,
    typer.Option("--batch", min=1, metavar="N", help="Requests decoded together, equal lengths."),
]


def replay(
    trace: TracePath,
    cost: CostPath,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Policies to compare; fixed-1 to fixed-16 among them. Default: one of each kind.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Another cost to replay the same rounds against: another machine's bundle or "
            "curve.",
            show_default=False,
        ),
    ] = None,
    hazard: HazardSource = None,
    split: Annotated[
        Literal["test", "calibration", "all"],
        typer.Option(help="Rounds to report on; policies are fitted on the calibration split."),
    ] = "test",
    batch: Batch = 1,
    resamples: Resamples = 400,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict tokens/s of length policies on recorded rounds.

    Fits each policy on the trace's calibration split, replays the held-out rounds, and reports
    tokens/s, tokens a round, mean length and the gap to the oracle length, overall and by
    category, with intervals from resampling prompts; rounds inside repetition loops apart. Reads
    the trace piece by piece. A round that a policy cuts short goes on from an anchor that was
    never recorded: the walked figure stands in the rest of the old block for it.
    """
    from hybridspec.cli import _replay_run as runner
    from hybridspec.cli._output import Output

    runner.run(
        runner.Request(
            trace=trace,
            cost=cost,
            policies=runner.policy_names(policies),
            what_if=what_if,
            hazard=hazard,
            split=split,
            batch=batch,
            resamples=resamples,
            seed=seed,
        ),
        Output(as_json=as_json, quiet=quiet),
    )
