"""How help looks: names on the left, what they mean on the right, wrapped to the terminal; nothing is cut.

    Model:
      -m, --model VALUE   Model folder, or nano: the small model that ships. (required)

Bounds and types of values are left out: whoever exceeds them is told.
"""

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from cacheblend.cli.option_groups import with_groups

C = TypeVar("C", bound=Callable[..., Any])
MOST_COLUMNS = 110
COLUMN = 28  # columns of names; the text of a longer one begins on the next line


class _Help:
    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help(self, ctx, formatter)


class Command(_Help, TyperCommand):
    """A command with this help."""


class CommandGroup(_Help, TyperGroup):
    """A group of commands with this help."""


class App(typer.Typer):
    """A typer application in which all commands and the group itself have this help, and options as `with_groups`."""

    def __init__(self, **settings: Any) -> None:
        context = {"help_option_names": ["-h", "--help"], "max_content_width": MOST_COLUMNS}
        super().__init__(
            cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, context_settings=context, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[C], C]:
        """See `typer.Typer.command`."""
        add = super().command(name, **{"cls": Command, **settings})

        def register(command: C) -> C:
            add(with_groups(command))
            return command

        return register


def write_help(command: Any, context: Any, formatter: Any) -> None:
    """Writes a command's help: usage, commands and options by panel, epilog; `formatter` is click's."""
    params = command.get_params(context)
    commands = (
        [command.commands[name] for name in command.list_commands(context)] if isinstance(command, CommandGroup) else []
    )
    arguments = [each for each in params if each.param_type_name == "argument"]
    options = [each for each in params if each.param_type_name != "argument" and not each.hidden]
    options.sort(key=lambda each: _panel(each, "") == "")  # those without a panel come last
    panels: dict[str, list[tuple[str, str]]] = {}
    for each in arguments:
        panels.setdefault("Arguments", []).append((_argument(each), _described(each)))
    for each in commands:
        panels.setdefault(_panel(each, "Commands"), []).append((str(each.name), _paragraphs(each.help or "")[0]))
    for each in options:
        panels.setdefault(_panel(each, "Options"), []).append((_names(each), _described(each)))

    usage = [context.command_path, *(["COMMAND"] if commands else map(_argument, arguments)), "[OPTIONS]"]
    parts = [f"Usage: {' '.join(usage)}", *_paragraphs(command.help or "")]
    parts = ["\n".join(_wrapped(part, formatter.width)) for part in parts]
    longest = max(len(name) for rows in panels.values() for name, _ in rows)
    column = min(longest, COLUMN) + 4
    for title, rows in panels.items():
        written = [f"{title}:"]
        for name, text in rows:  # which begins in `column`
            lines = [" " * column + line for line in _wrapped(text, formatter.width - column)] or [""]
            head = f"  {name}"
            written += [head + lines[0][len(head) :], *lines[1:]] if len(head) < column - 1 else [head, *lines]
        parts.append("\n".join(written))
    parts += [command.epilog] if command.epilog else []
    formatter.write("\n\n".join(parts) + "\n")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]


def _panel(each: Any, otherwise: str) -> str:
    panel = getattr(each, "rich_help_panel", None)
    return panel if isinstance(panel, str) else otherwise


def _names(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        return f"{names} / {', '.join(option.secondary_opts)}"
    return names if option.is_flag or option.count else f"{names} {option.metavar or 'VALUE'}"


def _described(param: Any) -> str:
    """What it means, and its default where that is a value and no flag that is off."""
    text = (getattr(param, "help", None) or "").strip()
    if param.required:
        return f"{text} (required)"
    default = param.default[0] if isinstance(param.default, list | tuple) and len(param.default) == 1 else param.default
    if isinstance(default, bool):
        switch = param.opts[0] if default else next(iter(param.secondary_opts), None)
        return f"{text} (default: {switch})" if switch and param.secondary_opts else text
    is_shown = isinstance(default, str | int | float | Path) and default != "" and param.show_default
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{text} (default: {shown})" if is_shown else text


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"
