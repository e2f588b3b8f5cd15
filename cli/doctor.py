"""`hybridspec doctor`: what this machine has, and what works on it."""

from __future__ import annotations

from hybridspec.cli import _options as options

EPILOG = options.epilog(
    ("hybridspec doctor", "check the installation; paste the output into an issue"),
    ("hybridspec doctor --json", "the same for a program"),
)


def doctor(as_json: options.AsJson = False) -> None:
    """Report versions, devices and what works here.

    Each check that fails says what to do about it. Exits with 4 when something
    that every command needs is missing.
    """
    import typer

    from hybridspec import doctor as checks
    from hybridspec.cli._output import Output
    from hybridspec.errors import EnvironmentMissing

    report = checks.examine()
    Output(as_json=as_json).result(checks.as_text(report), checks.as_data(report))
    if not report.usable:
        raise typer.Exit(EnvironmentMissing.exit_code)
