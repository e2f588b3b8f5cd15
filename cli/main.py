"""The `hybridspec` command: what exists, and how errors leave it.

Only this shell is imported for `--help`; each command imports what it needs when it runs.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any

import typer

from hybridspec import __version__, environ
from hybridspec.cli._options import EXIT_CODES
from hybridspec.cli._output import warn, write_stdout
from hybridspec.cli.bundle import app as bundle_app
from hybridspec.cli.calibrate import EPILOG as CALIBRATE_EPILOG
from hybridspec.cli.calibrate import calibrate
from hybridspec.cli.certify import EPILOG as CERTIFY_EPILOG
from hybridspec.cli.certify import certify
from hybridspec.cli.demo import EPILOG as DEMO_EPILOG
from hybridspec.cli.demo import demo
from hybridspec.cli.doctor import EPILOG as DOCTOR_EPILOG
from hybridspec.cli.doctor import doctor
from hybridspec.cli.fuzz import EPILOG as FUZZ_EPILOG
from hybridspec.cli.fuzz import fuzz
from hybridspec.cli.plan import EPILOG as PLAN_EPILOG
from hybridspec.cli.plan import plan
from hybridspec.cli.profile_latency import EPILOG as PROFILE_EPILOG
from hybridspec.cli.profile_latency import profile_latency
from hybridspec.cli.replay import EPILOG as REPLAY_EPILOG
from hybridspec.cli.replay import replay
from hybridspec.cli.serve import EPILOG as SERVE_EPILOG
from hybridspec.cli.serve import serve
from hybridspec.errors import EnvironmentMissing, HybridSpecError, Interrupted

# What the person can mend outside of hybridspec, so neither a bug nor worth a traceback.
_ENVIRONMENT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})

# As a shell names the end by this signal.
_TERMINATED = 128 + signal.SIGTERM

# Typer is built on a private or a public copy of click, by version; both keep this base.
_UsageError = typer.BadParameter.__base__ or typer.BadParameter


def _environment_help() -> str:
    width = max(map(len, environ.VARIABLES))
    lines = [f"  {name:<{width}}  {text}" for name, text in environ.VARIABLES.items()]
    return "\n".join(["\b", "Environment:", *lines])


app = typer.Typer(
    help="Choose how many draft tokens to verify, per request and per round, for hybrid "
    "GDN-MoE models with DFlash drafters. `hybridspec demo` shows the whole path on CPU.",
    epilog=_environment_help() + "\n\n" + EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write_stdout(f"hybridspec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Write the version and stop.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    import logging

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("hybridspec").setLevel(environ.log_level())
    environ.force_length()  # a wrong one is refused here, before a server's ranks meet it
    environ.pass_on()
    for sentence in environ.unrecognised():
        warn(sentence)


app.command("calibrate", epilog=CALIBRATE_EPILOG)(calibrate)
app.command("profile-latency", epilog=PROFILE_EPILOG)(profile_latency)
app.command("plan", epilog=PLAN_EPILOG)(plan)
app.command("replay", epilog=REPLAY_EPILOG)(replay)
app.add_typer(bundle_app, name="bundle")
app.command("serve", epilog=SERVE_EPILOG)(serve)
app.command("demo", epilog=DEMO_EPILOG)(demo)
app.command("fuzz", epilog=FUZZ_EPILOG)(fuzz)
app.command("certify", epilog=CERTIFY_EPILOG)(certify)
app.command("doctor", epilog=DOCTOR_EPILOG)(doctor)


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        code = app(args=list(arguments), prog_name="hybridspec", standalone_mode=False)
    except Interrupted as stop:
        return _refuse(f"interrupted: {stop}", stop.exit_code)
    except HybridSpecError as refusal:
        return _refuse(f"error: {refusal}", refusal.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted: nothing was written", Interrupted.exit_code)
    except Exception as error:
        return _leave(error)
    if code == Interrupted.exit_code:  # Typer turns Ctrl-C into this code, without a word
        return _refuse("interrupted: nothing was written", code)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `hybridspec` script and of `python -m hybridspec.cli.main`.

    SIGTERM, by which schedulers and containers end a command, keeps and says what Ctrl-C does.
    """
    ended: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        # `timeout` sends it twice; what is being kept must not be cut by the second.
        if not ended:
            ended.append(number)
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    code = run(sys.argv[1:])
    sys.exit(_TERMINATED if ended and code == Interrupted.exit_code else code)


def _leave(error: Exception) -> int:
    if isinstance(error, _UsageError):
        _name_value(error)
        _name_dashes(error)
        error.show()  # type: ignore[attr-defined]
        return 2
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT_ERRNOS:
        where = f"{error.filename}: " if error.filename else ""
        reason = os.strerror(error.errno or 0)
        remedy = "make room or choose another folder, then run again"
        return _refuse(f"error: {where}{reason}: {remedy}", EnvironmentMissing.exit_code)
    if os.environ.get("HYBRIDSPEC_LOG", "").strip().lower() == "debug":
        traceback.print_exception(error)
    return _refuse(
        f"error: unexpected {type(error).__name__}: {' '.join(str(error).split())} -- this is a "
        "bug of hybridspec: run again with HYBRIDSPEC_LOG=debug and report the traceback together "
        "with the output of `hybridspec doctor`",
        1,
    )


def _name_value(error: Exception) -> None:
    """Put the value into a refusal by pydantic, which typer checks with since 0.29."""
    errors: Any = getattr(error.__cause__, "errors", None)
    message = getattr(error, "message", None)
    if errors is None or not isinstance(message, str):
        return
    value = repr(str(errors()[0]["input"]))
    rule = message.removeprefix("Value error, ").removeprefix("Input ")
    if not rule.startswith(value):
        rule = f"{value} {rule}"
    error.message = rule  # type: ignore[attr-defined]


def _name_dashes(error: Exception) -> None:
    """Tell where SGLang's flags go, if one may stand among the options of a command."""
    unknown: Any = error
    command = getattr(getattr(error, "ctx", None), "command", None)
    takes_flags = any(parameter.name == "flags" for parameter in getattr(command, "params", ()))
    if not takes_flags or not hasattr(error, "possibilities"):
        return
    unknown.message = f"{unknown.format_message()}; flags of SGLang go behind --"
    unknown.possibilities = None


def _refuse(message: str, code: int) -> int:
    # One line, whatever a library put into the exception that the message quotes.
    print(" ".join(message.splitlines()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
