"""`hybridspec fuzz`: look for a history of rounds that leaves the wrong state behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridspec.cli import _options as options

EPILOG = options.epilog(
    ("hybridspec fuzz", "the embedded pair on the reference engine"),
    ("hybridspec fuzz ./target --drafter ./drafter --seconds 600 --rounds 1000000", "your pair"),
    ("hybridspec fuzz --engine captured --rounds 20000", "the captured engine on a GPU"),
    ("hybridspec fuzz --replay fuzz-0-17-conv_window.json", "play a kept history again"),
)


def fuzz(
    target: options.TargetFolder = None,
    drafter: options.DrafterFolder = None,
    engine: Annotated[
        Literal["reference", "captured"],
        typer.Option(
            help="Engine to play on: the reference engine on CPU, or its captured CUDA graphs."
        ),
    ] = "reference",
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Play at least N rounds of the engine; the last history is played to its end.",
        ),
    ] = 500,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="S",
            help="Stop after so many seconds even where rounds are left.",
            show_default=False,
        ),
    ] = None,
    seed: options.Seed = 0,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Play the history in FILE once, instead of random ones.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that a failing history is written to.")
    ] = Path(),
    threads: options.ThreadsWithoutBundle = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Play random histories and compare with plain decoding.

    Requests join, leave and are aborted; rounds verify no, one, some or all 16 rows and accept a
    chosen number of drafts, over the engine's page, chunk and block boundaries. Behind each step
    KV, conv windows, recurrent states and the logits of every emitted token must be those of plain
    decoding of the same tokens. The first history that fails is made small, written to a file and
    named; the command then leaves with exit code 1. The reference engine runs on CPU in float64,
    where any difference that can be seen is a fault. The captured engine runs on a GPU in bfloat16,
    with tolerances measured between two ways of plain decoding, by default on a pair of random
    weights that sends every token to all experts; other pairs are refused where rounding could hide
    a fault. SGLang with the plugin is played by benchmarks/fuzz_gpu.py of the repository.
    """
    from hybridspec.cli import _fuzz_run as runner
    from hybridspec.cli._output import Output

    runner.run(
        runner.Request(
            target=target,
            drafter=drafter,
            engine=engine,
            rounds=rounds,
            seconds=seconds,
            seed=seed,
            replay=replay,
            out=out,
            threads=threads,
        ),
        Output(as_json=as_json, quiet=quiet),
    )
