"""Options that several commands share, spelled and explained once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridspec.errors import UsageError

DtypeName = Literal["auto", "float32", "bfloat16"]
GraphControlName = Literal["auto", "masked", "switch", "host", "eager"]

TargetFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="TARGET",
        help="Folder of the target model in Hugging Face layout. Left out: the embedded pair.",
        show_default=False,
    ),
]
DrafterFolder = Annotated[
    Path | None,
    typer.Option(
        "--drafter",
        metavar="DIR",
        help="Folder of the DFlash drafter trained for TARGET.",
        show_default=False,
    ),
]
Dtype = Annotated[
    DtypeName,
    typer.Option(help="Type of weights and activations; auto: float32 on CPU, bfloat16 on a GPU."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N; auto takes a GPU if there is one."
    ),
]
ThreadsWithoutBundle = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="CPU threads of the engine. Default: PyTorch's choice."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="CPU threads of the engine. Default: what the bundle's costs were measured with; "
        "without them PyTorch's choice.",
    ),
]
EngineFlags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- FLAGS",
        help="Flags of SGLang, as `sglang serve` takes them; for --engine sglang alone.",
        show_default=False,
    ),
]
Engine = Annotated[
    Literal["reference", "sglang"],
    typer.Option(
        help="Engine that decodes: reference is ours, for laboratories; sglang is SGLang with the "
        "plugin, for production."
    ),
]
# What numpy and scikit-learn both take.
Seed = Annotated[
    int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Seed of every random choice.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done and what it costs, then stop.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write the result as one JSON document.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Write only the result and warnings.")]

EXIT_CODES = """\b
Exit codes:
  0 ok, 1 bug, 2 usage, 3 refused (model, bundle or trace does not fit),
  4 environment (device, port, package, disk), 5 too few or too noisy samples,
  or a check of quality that failed,
  130 interrupted, 143 by SIGTERM (the message says what was kept)"""


def epilog(*examples: tuple[str, str]) -> str:
    """Examples (command, what it does) and the exit codes, for the end of `--help`."""
    lines = ["\b", "Examples:"]
    for command, purpose in examples:
        lines += [f"  # {purpose}", f"  {command}"]
    return "\n".join(lines) + "\n\n" + EXIT_CODES


def given(context: typer.Context) -> frozenset[str]:
    """Names of the parameters that the command line or the environment names."""
    return frozenset(
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    )


def check_target(target: Path | None) -> None:
    """Refuse a flag in the place of TARGET, which takes the first word behind `--` if left out.

    Raises:
        UsageError: before any option is blamed for the words behind it.
    """
    if target is not None and str(target).startswith("-"):
        raise UsageError(
            f"TARGET is missing: {str(target)!r} behind -- is taken for it, and only the words "
            "after TARGET are flags of SGLang; name the target in front of --, with "
            "--engine sglang"
        )


def refuse_sglang(flags: Sequence[str] | None, named: Mapping[str, object]) -> None:
    """Refuse what only --engine sglang understands, where it is given to another engine.

    Args:
        flags: what stands behind `--`.
        named: options by their flags, None where they are not given.
    """
    given_flags = [flag for flag, value in named.items() if value is not None]
    if flags and not flags[0].startswith("-"):
        raise UsageError(
            f"{flags[0]!r} is one word too many: one TARGET is taken, and its drafter with "
            "--drafter DIR; flags behind -- are for --engine sglang"
        )
    if flags:
        raise UsageError(
            f"{flags[0]!r} is not understood by --engine reference: flags behind -- are for "
            "--engine sglang"
        )
    if given_flags:
        raise UsageError(f"{given_flags[0]} is for --engine sglang: add it, or leave the flag out")


def refuse_reference(named: Mapping[str, object], graph_control: str) -> None:
    """Refuse what only --engine reference understands, where it is given to another engine."""
    given_flags = [flag for flag, value in named.items() if value is not None]
    given_flags += ["--graph-control"] if graph_control != "auto" else []
    if given_flags:
        raise UsageError(
            f"{given_flags[0]} is for --engine reference: use that, or leave the flag out"
        )


def integers(text: str | None, *, flag: str, at_least: int = 1) -> tuple[int, ...] | None:
    """Parse the value of `flag`, such as `128,512`, into distinct increasing integers."""
    if text is None:
        return None
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{flag} {text!r} is not a list of integers: write them with commas, such as 1,2,4"
        ) from None
    if min(values) < at_least or sorted(set(values)) != list(values):
        raise UsageError(
            f"{flag} {text!r} must increase from at least {at_least} without repeats: "
            "write it such as 1,2,4"
        )
    return values
