"""`hybridspec serve`: an OpenAI-compatible server over one pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridspec.cli import _options as options
from hybridspec.errors import UsageError

EPILOG = options.epilog(
    ("hybridspec serve --bundle ./bundle", "the embedded pair with its calibrated policy"),
    (
        "hybridspec serve ./target --drafter ./drafter --bundle ./bundle --device cuda",
        "your pair on the GPU",
    ),
    ("hybridspec serve --policy fixed --fixed-length 4", "always verify 4 rows; needs no bundle"),
    ("hybridspec serve --policy none", "plain decoding, for comparison"),
    (
        "hybridspec serve ./target --drafter ./drafter --bundle ./bundle --engine sglang -- "
        "--tp-size 2",
        "SGLang with the plugin; its own flags follow behind --",
    ),
)


def serve(
    context: typer.Context,
    target: options.TargetFolder = None,
    flags: options.EngineFlags = None,
    drafter: options.DrafterFolder = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Bundle of this pair and machine. A bundle that does not fit is refused.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, metavar="PORT", help="Port; 0 takes a free one."),
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name in /v1/models. Default: the target folder's."),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Requests that are decoded together. Default: 4, or fewer if the bundle was "
            "measured with fewer.",
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=32,
            metavar="N",
            help="Prompt and answer together, in tokens. Default: 2048, or the target's limit if "
            "that is lower.",
        ),
    ] = None,
    policy: Annotated[
        Literal["auto", "fixed", "none"],
        typer.Option(
            help="How rows to verify are chosen: auto by the bundle (without one: fixed 16), "
            "fixed by --fixed-length, none for plain decoding."
        ),
    ] = "auto",
    fixed_length: Annotated[
        int,
        typer.Option(
            min=1, max=16, metavar="K", help="Rows a round verifies; for --policy fixed alone."
        ),
    ] = 16,
    router_correction: Annotated[
        Literal["select", "paper", "off"],
        typer.Option(
            help="What the first router's experts may change: off nothing, paper one row more or "
            "not, select any length up to one row more. It has not paid for itself yet "
            "(benchmarks/results/cpu_demo.json)."
        ),
    ] = "off",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Lower the refusal of this field of the bundle's identity to a warning; repeat "
            "for more, as with `hybridspec bundle verify`.",
        ),
    ] = None,
    queue_limit: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Requests that may wait; the next gets status 429."),
    ] = 64,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    engine: options.Engine = "reference",
) -> None:
    """Serve a pair over HTTP with the OpenAI API.

    Answers completions, chat completions, models, health and metrics. Output is that of the
    target alone; the bundle decides only how many drafted rows each round verifies, hence the
    speed. Ctrl-C finishes the requests that run, then stops.
    """
    options.check_target(target)
    given = options.given(context)
    if "fixed_length" in given and policy != "fixed":
        raise UsageError(
            f"`--fixed-length {fixed_length}` has no effect with `--policy {policy}`: add "
            "`--policy fixed`, or leave it out"
        )

    from hybridspec.cli import _serve_sglang_run as sglang_runner
    from hybridspec.cli._output import Output

    if engine == "sglang":
        sglang_runner.run(
            sglang_runner.Request(
                target=target,
                drafter=drafter,
                bundle=bundle,
                host=host,
                port=port,
                served_model_name=served_model_name,
                policy=policy,
                fixed_length=fixed_length,
                router_correction=router_correction,
                allow=tuple(allow or ()),
                given=given,
                flags=tuple(flags or ()),
            ),
            Output(),
        )
        return
    options.refuse_sglang(flags, {})

    from hybridspec.cli import _serve_run as runner

    runner.run(
        runner.Request(
            target=target,
            drafter=drafter,
            bundle=bundle,
            host=host,
            port=port,
            served_model_name=served_model_name,
            max_batch=max_batch,
            max_context=max_context,
            policy=policy,
            fixed_length=fixed_length,
            router_correction=router_correction,
            allow=tuple(allow or ()),
            queue_limit=queue_limit,
            dtype=dtype,
            device=device,
            threads=threads,
            engine=engine,
        ),
        Output(),
    )
