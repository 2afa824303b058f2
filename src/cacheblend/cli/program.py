"""Runs a command line: a user's error, or the system's, is one line and exit code 2. Knows no command."""

import os
import sys
from collections.abc import Sequence

import typer

from cacheblend.cli.errors import is_usage_error, usage_text, wrong_text
from cacheblend.cli.output import print_json, visible
from cacheblend.core.errors import CacheBlendError

ERROR = 2
BOUNDED = {"GOMP_SPINCOUNT": "50000", "KMP_BLOCKTIME": "2"}
"""How long OpenMP's threads spin while they wait for each other. By default GNU's runtime, torch's own, spins for some
15 ms, Intel's and LLVM's for 200: longer than the time after which a busy system gives a core to somebody else, so that
threads that wait use the time that the one they wait for would get. A few milliseconds are more than what lies between
two operations, and cost nothing on a quiet machine. GNU's runtime counts turns, the others milliseconds; each ignores
the other's."""


def run_program(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Runs the commands of an app; `arguments` are without the program's name, None takes the process's own.

    Errors go to stderr, one line each. With ``--json`` the error is an object on stdout instead; arguments that do not
    parse are always a line on stderr.
    """
    bound_waiting()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if problem := wrong_text(arguments):
        _leave(problem)
    code = 0
    try:
        code = app(arguments, prog_name=name, standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # of a group of commands that was called without one
            typer.echo(error)
            sys.exit(ERROR)
        elif is_usage_error(error):
            _leave(usage_text(error, arguments))
        elif isinstance(error, CacheBlendError | OSError):
            _leave(error_text(error), as_json="--json" in arguments)
        else:
            raise
    if code:
        sys.exit(code)


def bound_waiting() -> None:
    """Sets `BOUNDED`, unless the environment says how threads wait. Has an effect before torch is loaded only."""
    if "torch" not in sys.modules and not any(name in os.environ for name in ("OMP_WAIT_POLICY", *BOUNDED)):
        os.environ.update(BOUNDED)


def error_text(error: Exception) -> str:
    """An error for people; of the system's errors the file and the reason."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _leave(message: str, *, as_json: bool = False) -> None:
    # A path in the message may have bytes that are no text, or a terminal's escapes.
    line = visible(message.encode("utf-8", "backslashreplace").decode())
    if as_json:
        print_json({"error": line})
    else:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
        typer.echo(line, err=True)
    sys.exit(ERROR)
