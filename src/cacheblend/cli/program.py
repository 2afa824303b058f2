"""Runs a command line: a user's error, or the system's, is one line and exit code 2. Knows no command."""

import sys
from collections.abc import Sequence

import typer

from cacheblend.cli.errors import empty_value, invalid_text, is_help, is_usage_error, usage_text
from cacheblend.cli.openmp import bound_waiting
from cacheblend.cli.output import error_text, print_error

ERROR = 2


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
        from cacheblend.core.errors import CacheBlendError

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


def _leave(message: str, *, as_json: bool = False) -> None:
    print_error(message, as_json=as_json)
    sys.exit(ERROR)
