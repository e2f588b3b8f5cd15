"""`hybridspec certify`: does decoding with drafts still say what the target says?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridspec.cli import _options as options

EPILOG = options.epilog(
    ("hybridspec certify --bundle ./bundle", "the embedded pair, its bundle, its prompts"),
    (
        "hybridspec certify ./target --drafter ./drafter --bundle ./bundle --prompts p.jsonl "
        "--questions gsm8k.jsonl",
        "your pair on the reference engine, with task quality",
    ),
    (
        "hybridspec certify --url :30001 --baseline-url :30000 --prompts p.jsonl --out ./made",
        "two running servers of any engine, the second one without drafts",
    ),
    ("hybridspec certify --bundle ./bundle --gates law,state --samples 20000", "two gates, longer"),
)


def certify(
    target: options.TargetFolder = None,
    drafter: options.DrafterFolder = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Bundle whose policy chooses the lengths; the certificate is written into it. "
            "Left out: --fixed-length, and --out is needed.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the certificate, instead of DIR of --bundle."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSONL, JSON or Parquet with `text` or `prompt`. Default: the embedded pair's "
            "held-out prompts.",
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL with `question` (or `prompt`) and `answer`, such as GSM8K's, where what "
            "stands behind #### counts; `match` may be number, exact or prefix. Left out: task "
            "quality is not tested.",
        ),
    ] = None,
    gates: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Gates to run, of control, greedy, law, state, degenerate, quality. Default: all "
            "that can be; over --url not law and state, without --questions not quality.",
        ),
    ] = None,
    max_prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts to decode, evenly over categories.")
    ] = 48,
    max_questions: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Questions to ask, the first ones. Default: all."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens generated behind each prompt.")
    ] = 96,
    max_answer_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens generated behind each question.")
    ] = 256,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Requests decoded together; plain decoding also runs alone. Default: 4, or fewer "
            "if the bundle was measured with fewer.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=100, metavar="N", help="Sampled texts a prompt, of law.")
    ] = 2000,
    law_prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts that law samples behind.")
    ] = 4,
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="State plays at least N rounds, in float64; its last history is played to its "
            "end.",
        ),
    ] = 300,
    margin: Annotated[
        float,
        typer.Option(
            min=0.0001, max=0.5, metavar="X", help="Loss of right answers that is still no loss."
        ),
    ] = 0.01,
    fixed_length: Annotated[
        int,
        typer.Option(min=1, max=16, metavar="K", help="Rows a round verifies without --bundle."),
    ] = 16,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Running OpenAI-compatible server with drafts."),
    ] = None,
    baseline_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Running server of the same target without drafts."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the servers by chat, not by completion.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again instead of going on where Ctrl-C stopped.")
    ] = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Certify that drafts preserve the output of the target.

    Gates: control (plain decoding against itself, alone and in batches), greedy (plain decoding
    against drafts; a difference must be a tie of the target), law (joint law of several sampled
    tokens at temperature 1), state (what the engine remembers after random rounds), degenerate
    (repetition loops, counted and left out of the speed), quality (paired noninferiority of right
    answers). Rows and a one-page report go into the bundle; `serve` and `bundle show` read them.
    Leaves with 5 where a gate fails. Ctrl-C keeps finished gates; the same command goes on.
    """
    from hybridspec.cli._certify_plan import Request
    from hybridspec.cli._certify_run import run
    from hybridspec.cli._output import Output

    run(
        Request(
            target=target,
            drafter=drafter,
            bundle=bundle,
            out=out,
            prompts=prompts,
            questions=questions,
            gates=gates,
            max_prompts=max_prompts,
            max_questions=max_questions,
            max_new_tokens=max_new_tokens,
            max_answer_tokens=max_answer_tokens,
            batch=batch,
            samples=samples,
            law_prompts=law_prompts,
            rounds=rounds,
            margin=margin,
            fixed_length=fixed_length,
            url=url,
            baseline_url=baseline_url,
            chat=chat,
            fresh=fresh,
            seed=seed,
            dtype=dtype,
            device=device,
            threads=threads,
        ),
        Output(as_json=as_json, quiet=quiet),
    )
