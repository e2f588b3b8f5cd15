"""`hybridspec bundle ...`: look into bundles, check them, compare, transfer and hand them on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hybridspec.cli import _options as options

BundleFolder = Annotated[
    Path, typer.Argument(metavar="BUNDLE", help="Folder of the bundle.", show_default=False)
]
OutFolder = Annotated[
    Path,
    typer.Option("--out", "-o", metavar="DIR", help="Folder of the bundle to write."),
]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Put it in the place of another bundle that is there already."),
]

app = typer.Typer(
    help="Show, check, compare and hand on bundles. Transfer their costs to another machine.",
    epilog=options.epilog(
        ("hybridspec bundle show ./bundle", "what a bundle was made for and what it says"),
        ("hybridspec bundle verify ./bundle --here", "whether it is intact and fits this machine"),
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.command(
    "show",
    epilog=options.epilog(
        ("hybridspec bundle show ./bundle", "what a bundle was made for and what it says"),
        ("hybridspec bundle show ./bundle --json", "the same for a program"),
    ),
)
def show(
    bundle: BundleFolder, as_json: options.AsJson = False, quiet: options.Quiet = False
) -> None:
    """Show what a bundle was made for. Also its costs and how good its hazards are."""
    from hybridspec.cli import _bundle_show_run as runner
    from hybridspec.cli._output import Output

    runner.show(bundle, Output(as_json=as_json, quiet=quiet))


@app.command(
    "verify",
    epilog=options.epilog(
        (
            "hybridspec bundle verify ./bundle",
            "digests, schemas, values, paths, shape of the costs",
        ),
        ("hybridspec bundle verify ./bundle --here", "and whether it fits this machine"),
        (
            "hybridspec bundle verify ./bundle --target ./target --drafter ./drafter --device cuda",
            "and this pair on its GPU",
        ),
    ),
)
def verify(
    bundle: BundleFolder,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Also check that it fits this machine, engine and pair. Needs PyTorch.",
        ),
    ] = False,
    target: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Target model of the pair to check against, with --drafter; implies --here. "
            "Left out: the embedded pair.",
        ),
    ] = None,
    drafter: options.DrafterFolder = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Lower the refusal of this field of the identity to a warning; repeat for more. "
            "falling-cost does so for costs that fall when rows are added.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Check a bundle in full. The first thing that is wrong is named and ends the command."""
    from hybridspec.cli import _bundle_verify_run as runner
    from hybridspec.cli._output import Output

    runner.verify(
        runner.Request(
            bundle=bundle,
            here=here or target is not None,
            target=target,
            drafter=drafter,
            dtype=dtype,
            device=device,
            threads=threads,
            allow=tuple(allow or ()),
        ),
        Output(as_json=as_json, quiet=quiet),
    )


@app.command(
    "diff",
    epilog=options.epilog(
        ("hybridspec bundle diff ./a ./b", "fields that differ and the largest differences"),
    ),
)
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the first bundle.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the second bundle.")],
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare two bundles. Differences are a result, not an error: the exit code is 0."""
    from hybridspec.cli import _bundle_show_run as runner
    from hybridspec.cli._output import Output

    runner.diff(a, b, Output(as_json=as_json, quiet=quiet))


@app.command(
    "drift",
    epilog=options.epilog(
        (
            "hybridspec bundle drift ./bundle ./new.trace",
            "whether the hazards still hold on newly recorded rounds",
        ),
    ),
)
def drift(
    bundle: BundleFolder,
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Folder or Parquet file of rounds recorded later or of other prompts.",
            show_default=False,
        ),
    ],
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Trace whose held-out rounds are compared with. Default: the one that the bundle "
            "was calibrated on.",
            show_default=False,
        ),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Test whether a bundle's hazards still hold on a new trace. Exit code 5 if they do not.

    Whole prompts are permuted between the new rounds and held-out ones of the bundle's trace, for
    each feature's distribution and for acceptance less hazard; the chance of any false alarm is
    1 %. Inputs that moved while acceptance is as predicted are a warning.
    """
    from hybridspec.cli import _bundle_drift_run as runner
    from hybridspec.cli._output import Output

    runner.run(bundle, trace, reference, seed, Output(as_json=as_json, quiet=quiet))


@app.command(
    "transfer",
    epilog=options.epilog(
        (
            "hybridspec bundle transfer ./a100 --anchors ./h200-few -o ./h200",
            "costs of ./a100 on the machine that ./h200-few was profiled on",
        ),
    ),
)
def transfer(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="Bundle with measured costs of another machine or engine version.",
        ),
    ],
    anchors: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Costs measured on this machine at some cells of SOURCE: a bundle that "
            "`hybridspec profile-latency` wrote with fewer batch sizes and contexts, or a Parquet "
            "file of schema hybridspec.cost.anchors/1. At least 4 lengths with both ends, and "
            "length 0, at each of its batch sizes and contexts.",
            show_default=False,
        ),
    ],
    out: OutFolder = Path("hybridspec-transferred"),
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Take over costs from another machine with measured anchors.

    The ratio of the two machines is interpolated between anchors, never beyond them. Cells outside
    are left out; a single factor, another memory class or anchors that miss each other by more
    than 15 % are refused. The result says that it is transferred, from what, and how far it may be
    off.
    """
    from hybridspec.cli import _bundle_transfer_run as runner
    from hybridspec.cli._output import Output

    runner.transfer(source, anchors, out, dry_run, Output(as_json=as_json, quiet=quiet))


@app.command(
    "export",
    epilog=options.epilog(
        ("hybridspec bundle export ./bundle -o bundle.tar.gz", "one file to hand on"),
        (
            "hybridspec bundle export ./bundle --format sglang -o ./dspark",
            "dspark_sps.json and dspark_sts.json for SGLang's DSpark planner",
        ),
    ),
)
def export(
    bundle: BundleFolder,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="archive: a file ending in .tar.gz, .tgz or .zip; sglang: a folder.",
            show_default=False,
        ),
    ],
    form: Annotated[
        Literal["archive", "sglang"],
        typer.Option("--format", help="One file with the whole bundle, or SGLang's two tables."),
    ] = "archive",
    context: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="sglang: context of the costs, one of the measured; its format has no axis for "
            "it. Default: the middle one.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a bundle as one file, or as the tables that SGLang reads."""
    from hybridspec.cli import _bundle_move_run as runner
    from hybridspec.cli._output import Output

    runner.export(bundle, out, form, context, Output(as_json=as_json, quiet=quiet))


@app.command(
    "import",
    epilog=options.epilog(
        ("hybridspec bundle import bundle.tar.gz -o ./bundle", "unpack and check an archive"),
    ),
)
def import_(
    archive: Annotated[
        Path,
        typer.Argument(metavar="ARCHIVE", help="File that `hybridspec bundle export` wrote."),
    ],
    out: OutFolder = Path("hybridspec-bundle"),
    replace: Replace = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Unpack an archive that may come from anyone. All of it is checked before it is written."""
    from hybridspec.cli import _bundle_move_run as runner
    from hybridspec.cli._output import Output

    runner.import_archive(archive, out, replace, Output(as_json=as_json, quiet=quiet))


@app.command(
    "push",
    epilog=options.epilog(
        ("hybridspec bundle push ./bundle /mnt/share/bundle", "to a folder"),
        ("hybridspec bundle push ./bundle hf://me/qwen-h200", "to a dataset on the hub"),
    ),
)
def push(
    bundle: BundleFolder,
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE", help="A folder, file:///folder or hf://owner/name[/folder][@revision]."
        ),
    ],
    private: Annotated[
        bool, typer.Option("--private", help="hf://: make a missing repository private.")
    ] = False,
    replace: Replace = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Copy a bundle, with a card, to a folder or the Hugging Face hub.

    A hub keeps its history, so --replace matters for folders alone.
    """
    from hybridspec.cli import _bundle_move_run as runner
    from hybridspec.cli._output import Output

    runner.push(bundle, place, private, replace, Output(as_json=as_json, quiet=quiet))


@app.command(
    "pull",
    epilog=options.epilog(
        ("hybridspec bundle pull hf://me/qwen-h200 -o ./bundle", "from the hub"),
        ("hybridspec bundle pull file:///mnt/share/bundle -o ./bundle", "from a folder"),
    ),
)
def pull(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE", help="A folder, file:///folder or hf://owner/name[/folder][@revision]."
        ),
    ],
    out: OutFolder = Path("hybridspec-bundle"),
    replace: Replace = False,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Fetch a bundle from a folder or the hub. All of it is checked before it is written."""
    from hybridspec.cli import _bundle_move_run as runner
    from hybridspec.cli._output import Output

    runner.pull(place, out, replace, Output(as_json=as_json, quiet=quiet))
