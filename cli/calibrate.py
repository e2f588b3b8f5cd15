"""`hybridspec calibrate`: record fully verified rounds, fit the hazards, write a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridspec.cli import _options as options

ModelName = Literal["beta", "boosted", "isotonic", "platt"]

EPILOG = options.epilog(
    ("hybridspec calibrate --out ./bundle", "the embedded pair and its bundled prompts, on CPU"),
    (
        "hybridspec calibrate ./target --drafter ./drafter --prompts prompts.jsonl --out ./bundle",
        "your pair, your prompts: a JSON object a line with `prompt` and perhaps `category`",
    ),
    (
        "hybridspec calibrate ./target --drafter ./drafter --prompts prompts.jsonl --out ./bundle "
        "--resume",
        "go on where an interrupted run stopped",
    ),
    (
        "hybridspec calibrate --from-trace ./bundle.trace --out ./other",
        "fit again from a trace, without decoding",
    ),
    (
        "hybridspec calibrate ./target --drafter ./drafter --prompts prompts.jsonl --out ./bundle "
        "--engine sglang -- --tp-size 1",
        "record in a SGLang server; its own flags follow behind --",
    ),
)


def calibrate(
    context: typer.Context,
    target: options.TargetFolder = None,
    flags: options.EngineFlags = None,
    drafter: options.DrafterFolder = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="A .jsonl, .json or .parquet file with a `prompt` or `text` in each row, or a "
            "data set as owner/name. "
            "Default: the bundled prompts (embedded pair only).",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Put each prompt into the model's chat template as a turn."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Bundle to write; its cost part, if it has one, is kept."),
    ] = Path("hybridspec-bundle"),
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for the recorded rounds. Default: OUT.trace beside OUT."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the finished prompts of an interrupted trace.")
    ] = False,
    from_trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Fit from this trace; decode nothing, load no model.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        ModelName,
        typer.Option(
            help="Hazard model: `beta` is logistic with isotonic knots; `boosted` adds trees over "
            "block, emitted text and history, and stores a table distilled from them beside.",
        ),
    ] = "beta",
    max_new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens to emit for a prompt, at most.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, metavar="T", help="0 is greedy decoding.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="P", help="Nucleus of the sampling.")
    ] = 1.0,
    seed: options.Seed = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that are decoded together.")
    ] = 8,
    max_prompts: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Take this many prompts, evenly over categories."),
    ] = None,
    test_fraction: Annotated[
        float,
        typer.Option(
            min=0.05,
            max=0.95,
            metavar="F",
            help="Share of prompts to hold out, where the prompts name no split.",
        ),
    ] = 0.3,
    record_routes: Annotated[
        bool,
        typer.Option(
            "--record-routes/--no-record-routes",
            help="Record the experts of each row: the router correction needs them. "
            "2 x layers x 16 x top-k bytes a round at most.",
        ),
    ] = True,
    engine: options.Engine = "reference",
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="A SGLang server that runs already and records; default: one is started.",
            show_default=False,
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that the server at --url records into: `record` of its configuration.",
            show_default=False,
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.ThreadsWithoutBundle = None,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Record verified rounds, fit the hazards, write a bundle.

    Decodes the prompts with every draft verified, so that acceptance is seen uncensored; fits
    the hazard of each draft position on one part of the prompts and measures it on the other;
    writes the calibration part of a bundle with its plots. Needs no GPU, but takes one.
    """
    options.check_target(target)
    if engine == "reference":
        options.refuse_sglang(flags, {"--url": url, "--recorded": recorded})
    from hybridspec.cli import _calibrate_run as runner
    from hybridspec.cli._calibrate_plan import Request
    from hybridspec.cli._output import Output

    runner.run(
        Request(
            target=target,
            drafter=drafter,
            prompts=prompts,
            chat=chat,
            out=out,
            trace=trace,
            resume=resume,
            from_trace=from_trace,
            model=model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
            max_prompts=max_prompts,
            test_fraction=test_fraction,
            record_routes=record_routes,
            dtype=dtype,
            device=device,
            threads=threads,
            dry_run=dry_run,
            engine=engine,
            url=url,
            recorded=recorded,
            given=options.given(context),
            flags=tuple(flags or ()),
        ),
        Output(as_json=as_json, quiet=quiet),
    )
