"""Turns a wrong invocation into one line that names value, limit and way out.

Knows typer's errors by what they carry (`format_message`, `param`, `option_name`), since their classes move between
typer's versions; and the options and commands that were renamed.
"""

import re
from collections.abc import Sequence
from typing import Any

RENAMED_OPTIONS = {
    "--rows": "--limit",
    "--check-layer": "--check-layers",
    "--arm": "--methods",
    "--rounds": "--runs",
    "--machine": "--cost-model",
    "--max-tokens": "--max-prompt-tokens",
}
MAY_BE_EMPTY = ("--salt", "--system")
RENAMED_COMMANDS = {"profile": "calibrate"}
MOVED = {
    "cacheblend inspect": "inspect",
    "cacheblend paper": "paper",
    "cacheblend suite": "suite nano",
    "cacheblend evaluate --paper": "paper",
    "cacheblend evaluate --suite": "suite",
    "cacheblend evaluate --suite-seed": "suite nano --suite-seed",
    "cacheblend evaluate --part": "suite nano --part",
    "cacheblend evaluate --deviation-rows": "evaluate --deviation-rows",
} | {
    f"cacheblend bench {name}": name
    for name in (
        *("agent", "codecs", "controller", "core", "cuda", "evict", "load", "match", "memory", "peers", "plan"),
        *("random-shapes", "routing", "serve", "store", "sync", "vllm"),
    )
}
"""Commands and options that measure for this project's own figures, and where they are: in the lab, in a checkout."""


def is_usage_error(error: BaseException) -> bool:
    """Whether typer raised it for arguments that do not parse."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def is_help(error: BaseException) -> bool:
    """Whether typer raised it to show the help of a group of commands that was called without one."""
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_text(error: Any, arguments: Sequence[str]) -> str:
    """One line for an error of typer's.

    Args:
        error: see `is_usage_error`.
        arguments: of the command line.
    """
    context = getattr(error, "ctx", None)
    see = f"; see {context.command_path} --help" if context is not None else ""
    option = getattr(error, "option_name", None)
    param = getattr(error, "param", None)
    if type(error).__name__ == "NoSuchOption":
        return _unknown_option(str(option), error, see)
    if type(error).__name__ == "MissingParameter" and param is not None:
        return f"{_name(param)} is missing{see}"
    if param is not None:
        return f"{_name(param)}: {_problem(error, param)}{see}"
    text = _clean(error.format_message())
    value = _value_of_json(arguments)
    if value is not None and (option == "--json" or "extra argument" in text):
        return f"--json takes no value, got {value!r}: it prints to stdout; --json-file {value} writes a file{see}"
    if unknown := re.match(r"No such command '([^']*)'", text):
        if moved := _moved(context, unknown[1]):
            return moved
        if new := RENAMED_COMMANDS.get(unknown[1]):
            return f"there is no command {unknown[1]!r}: it is called {new}"
    return f"{text}{see}"


def empty_value(arguments: Sequence[str]) -> str | None:
    """An error for an option or argument that is the empty string; None if there is none.

    Salt and system prompt may be empty: those are their defaults.
    """
    for at, argument in enumerate(arguments):
        before = arguments[at - 1] if at else ""
        if argument == "" and before not in MAY_BE_EMPTY:
            where = f"{before}: the value is empty" if before.startswith("-") else "an argument is empty"
            return f"{where}; give one, or leave it out"
        if argument.startswith("--") and argument.endswith("=") and argument[:-1] not in MAY_BE_EMPTY:
            return f"{argument[:-1]}: the value is empty; give one, or leave it out"
    return None


def invalid_text(arguments: Sequence[str]) -> str | None:
    """An error for an argument that is not text in the terminal's encoding; None if there is none.

    Python hands such bytes over as lone surrogates, which no tokenizer, store or JSON output takes.
    """
    for number, argument in enumerate(arguments, start=1):
        if any("\ud800" <= character <= "\udfff" for character in argument):
            shown = argument if len(argument) <= 80 else f"{argument[:80]}..."
            return f"argument {number}, {shown!r}, has bytes that are not UTF-8; give it in UTF-8"
    return None


def _value_of_json(arguments: Sequence[str]) -> str | None:
    """What follows ``--json``, which once took a file."""
    for at, argument in enumerate(arguments):
        if argument.startswith("--json="):
            return argument.removeprefix("--json=")
        if argument == "--json" and at + 1 < len(arguments) and not arguments[at + 1].startswith("-"):
            return arguments[at + 1]
    return None


def _moved(context: Any, name: str) -> str | None:
    """Where a command or an option went; None if it never was one."""
    old = f"{context.command_path} {name}" if context is not None else name
    return f"`{old}` is now `python -m lab {MOVED[old]}`, in a checkout after `make lab`" if old in MOVED else None


def _unknown_option(option: str, error: Any, see: str) -> str:
    known = {name for each in error.ctx.command.params for name in each.opts} if error.ctx is not None else set()
    if moved := _moved(error.ctx, option):
        return moved
    new = RENAMED_OPTIONS.get(option)
    if new in known:
        return f"there is no option {option}: it is called {new}"
    near = ", ".join(sorted(error.possibilities or ()))
    return f"there is no option {option}{f', did you mean {near}?' if near else ''}{see}"


def _problem(error: Any, param: Any) -> str:
    """The value and what is wrong with it. Typer's text leaves the value out; it is in the error that caused it."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    if not found:
        return _clean(error.message)
    value, kind = found[0]["input"], found[0]["type"]
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"{value} is out of range, {_range(param)}"
    words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    wanted = words.get(kind.split("_")[0])
    if wanted is not None:
        return f"{str(value)[:80]!r} is not {wanted}"
    return f"{str(value)[:80]!r}: {_clean(found[0]['msg']).removeprefix('Value error, ')}"


def _range(param: Any) -> str:
    least, most = getattr(param, "min", None), getattr(param, "max", None)
    if least is None or most is None:
        return f"at least {least}" if most is None else f"at most {most}"
    return f"{least}..{most}"


def _name(param: Any) -> str:
    names = [name for name in param.opts if name.startswith("--")]
    return str(names[0]) if names else str(param.name).upper()


def _clean(message: str) -> str:
    return " ".join(message.split()).rstrip(".")
