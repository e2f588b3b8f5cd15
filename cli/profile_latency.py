"""`hybridspec profile-latency`: measure what a round costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli import _options as options

EPILOG = options.epilog(
    ("hybridspec profile-latency --out ./bundle", "the embedded pair on this machine"),
    (
        "hybridspec profile-latency ./target --drafter ./drafter --contexts 512,4096 "
        "--batch-sizes 1,4 --device cuda --out ./bundle",
        "your pair on the GPU",
    ),
    ("hybridspec profile-latency --quick --dry-run", "print the grid and the time it would take"),
    (
        "hybridspec profile-latency ./target --drafter ./drafter --engine sglang --out ./bundle "
        "-- --tp-size 2",
        "rounds in SGLang, in servers that the command starts with these flags",
    ),
)


def profile_latency(
    context: typer.Context,
    target: options.TargetFolder = None,
    flags: options.EngineFlags = None,
    drafter: options.DrafterFolder = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Bundle to write; its calibration part, if it has one, is kept."
        ),
    ] = Path("hybridspec-bundle"),
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Context lengths to measure at, in tokens. Default: 128,512 (--quick: 128); with "
            "captured rounds 1024,4096,16384,32768 (1024); with --engine sglang 512,4096 (512), as "
            "far as the target holds them.",
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Requests in a round to measure at. Default: 1,2,4 (--quick: 1,4); with captured "
            "rounds and with --engine sglang 1,2,4,8 (1,4). The largest bounds what `hybridspec "
            "serve` runs together.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=5, metavar="N", help="Interleaved repeats of each point. Default: 9 (--quick: 5)."
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            min=1.0,
            metavar="SECONDS",
            help="Stop repeating after this long; every point is measured 5 times or refused.",
        ),
    ] = 600.0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer points and repeats: a first look."),
    ] = False,
    engine: options.Engine = "reference",
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Running server of `serve --engine sglang`, idle, with --plain-url. Default: "
            "servers are started one after the other.",
        ),
    ] = None,
    plain_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Running SGLang server of TARGET without a drafter."),
    ] = None,
    anchors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure a few lengths only and write them to FILE, for `hybridspec bundle "
            "transfer --anchors FILE`; no bundle is written.",
        ),
    ] = None,
    graph_control: Annotated[
        options.GraphControlName,
        typer.Option(
            help="What captures rounds as CUDA graphs: masked (one graph), switch (the GPU picks a "
            "body), host (reads the length). eager: none, as `serve` runs the reference engine. "
            "auto: masked on a GPU where the kernels take the pair's shape.",
        ),
    ] = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.ThreadsWithoutBundle = None,
    seed: options.Seed = 0,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what a round costs at each verify length.

    Runs real rounds of the pair at every batch size, context and verify length (0 is a round
    without a draft pass), interleaved, and keeps medians with their spread; measures what one
    more distinct expert costs. Writes the cost part of a bundle. Costs hold
    for this machine, device, type and thread count alone.
    """
    options.check_target(target)
    context_grid = options.integers(contexts, flag="--contexts", at_least=4)
    batch_grid = options.integers(batch_sizes, flag="--batch-sizes")
    if engine == "sglang":
        options.refuse_reference({"--anchors": anchors}, graph_control)
        from hybridspec.cli import _profile_sglang_run as sglang_runner
        from hybridspec.cli._output import Output

        sglang_runner.run(
            sglang_runner.Request(
                target=target,
                drafter=drafter,
                out=out,
                contexts=context_grid,
                batch_sizes=batch_grid,
                repeats=repeats,
                budget_s=budget,
                quick=quick,
                url=url,
                plain_url=plain_url,
                seed=seed,
                dry_run=dry_run,
                given=options.given(context),
                flags=tuple(flags or ()),
            ),
            Output(as_json=as_json, quiet=quiet),
        )
        return
    options.refuse_sglang(flags, {"--url": url, "--plain-url": plain_url})

    from hybridspec.cli import _profile_run as runner
    from hybridspec.cli._output import Output
    from hybridspec.cli._profile_plan import Request

    runner.run(
        Request(
            target=target,
            drafter=drafter,
            out=out,
            contexts=context_grid,
            batch_sizes=batch_grid,
            repeats=repeats,
            budget_s=budget,
            quick=quick,
            dtype=dtype,
            device=device,
            threads=threads,
            seed=seed,
            dry_run=dry_run,
            anchors=anchors,
            graph_control=graph_control,
        ),
        Output(as_json=as_json, quiet=quiet),
    )
