"""Runs a command line: an error of the user, or the system's, is one line that says what to do, and exit code 2.

Knows no command; typer's errors by what they carry (`format_message`, `param`,
`option_name`), since their classes move between typer's versions.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import pairwise
from typing import Any

import typer

from cacheblend.cli.output import print_json, visible
from cacheblend.core.errors import CacheBlendError

ERROR = 2
BOUNDED = {"GOMP_SPINCOUNT": "50000", "KMP_BLOCKTIME": "2"}
"""How long OpenMP's threads spin while they wait for each other. By default GNU's runtime, torch's own, spins for some
15 ms, Intel's and LLVM's for 200: longer than a busy system takes to give a core to somebody else, so that waiting
threads use the time that the one they wait for would get. A few milliseconds are more than what lies between two
operations, and cost a quiet machine nothing. GNU's runtime counts turns, the others milliseconds; each ignores that."""

MAY_BE_EMPTY = ("--salt", "--system")


def run_program(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Runs the commands of an app; `arguments` are without the program's name, None takes the process's own. Errors go
    to stderr, one line each; with ``--json`` to stdout, as an object, but for arguments that do not parse."""
    bound_waiting()
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal lacks is no reason to print nothing
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
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
        elif hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's, of arguments
            _leave(usage_text(error))
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


def usage_text(error: Any) -> str:
    """One line for an error of typer's."""
    context = getattr(error, "ctx", None)
    see = f"; see {context.command_path} --help" if context is not None else ""
    option = getattr(error, "option_name", None)
    param = getattr(error, "param", None)
    if type(error).__name__ == "NoSuchOption":
        near = ", ".join(sorted(error.possibilities or ()))
        return f"there is no option {option}{f', did you mean {near}?' if near else ''}{see}"
    if param is not None:
        name = next((name for name in param.opts if name.startswith("--")), str(param.name).upper())
        is_missing = type(error).__name__ == "MissingParameter"
        return f"{name} is missing{see}" if is_missing else f"{name}: {_problem(error, param)}{see}"
    return f"{_clean(error.format_message())}{see}"


def wrong_text(arguments: Sequence[str]) -> str | None:
    """An error for an option or argument that is empty, or not text in the terminal's encoding; None if there is none.
    Salt and system prompt may be empty: those are their defaults. Python hands other bytes over as lone surrogates,
    which no tokenizer, store or JSON output takes."""
    for before, argument in pairwise(("", *arguments)):
        ends = argument.startswith("--") and argument.endswith("=") and argument.count("=") == 1
        name = argument[:-1] if ends else before
        if (ends or not argument) and name not in MAY_BE_EMPTY:
            where = f"{name}: the value is empty" if name.startswith("-") else "an argument is empty"
            return f"{where}; give one, or leave it out"
    for number, argument in enumerate(arguments, start=1):
        if any("\ud800" <= character <= "\udfff" for character in argument):
            shown = argument if len(argument) <= 80 else f"{argument[:80]}..."
            return f"argument {number}, {shown!r}, has bytes that are not UTF-8; give it in UTF-8"
    return None


def _problem(error: Any, param: Any) -> str:
    """The value and what is wrong with it. Typer's text leaves the value out; it is in the error that caused it."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if not found:
        return _clean(error.message)
    value, kind = found[0]["input"], found[0]["type"]
    if kind in ("greater_than_equal", "less_than_equal"):
        least, most = getattr(param, "min", None), getattr(param, "max", None)
        one = f"at least {least}" if most is None else f"at most {most}"
        return f"{value} is out of range, {one if least is None or most is None else f'{least}..{most}'}"
    if wanted := {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(kind.split("_")[0]):
        return f"{str(value)[:80]!r} is not {wanted}"
    return f"{str(value)[:80]!r}: {_clean(found[0]['msg']).removeprefix('Value error, ')}"


def _clean(message: str) -> str:
    return " ".join(message.split()).rstrip(".")
