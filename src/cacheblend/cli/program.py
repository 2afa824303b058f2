"""Runs a command line: a user's error, or the system's, is one line and exit code 2. Knows no command."""

import os
import sys
from collections.abc import Sequence

import typer

from cacheblend.cli.errors import empty_value, invalid_text, is_help, is_usage_error, usage_text
from cacheblend.cli.output import error_text, print_error
from cacheblend.core.errors import CacheBlendError

ERROR = 2
BOUNDED = {"GOMP_SPINCOUNT": "50000", "KMP_BLOCKTIME": "2"}
"""How long OpenMP's threads spin while they wait for each other. By default GNU's runtime, torch's own, spins for some
15 ms, Intel's and LLVM's for 200: longer than the time after which a busy system gives a core to somebody else, so that
threads that wait use the time that the one they wait for would get. A few milliseconds are more than what lies between
two operations, and cost nothing on a quiet machine. GNU's runtime counts turns, the others milliseconds; each ignores
the other's."""


def run_program(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Runs the commands of an app; errors go to stderr, one line each.

    With ``--json`` the error is an object on stdout instead; arguments that do not parse are always a line on stderr.

    Args:
        app: the commands.
        name: of the program, as a user starts it.
        arguments: without the program's name; None takes the process's own.
    """
    bound_waiting()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if problem := empty_value(arguments) or invalid_text(arguments):
        _leave(problem)
    code = 0
    try:
        code = app(arguments, prog_name=name, standalone_mode=False)
    except Exception as error:
        if is_help(error):
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


def _leave(message: str, *, as_json: bool = False) -> None:
    print_error(message, as_json=as_json)
    sys.exit(ERROR)
