"""How help looks: typer's own, with the options of each panel under its title; nothing is cut.

Model:
  -m, --model VALUE  Model folder, or nano: the small model that ships.
                     [required]
"""

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from cacheblend.cli.option_groups import with_groups

C = TypeVar("C", bound=Callable[..., Any])
MOST_COLUMNS = 110


class _InPanels:
    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx) if isinstance(self, TyperGroup) else ():
            command = self.commands[name]
            panels.setdefault(_panel(command, "Commands"), []).append((name, command.get_short_help_str(limit=1000)))
        rows = [(_panel(each, each.param_type_name.title() + "s"), each) for each in self.get_params(ctx)]
        for panel, each in sorted(rows, key=lambda row: row[0] == "Options"):  # those without a panel come last
            if (row := each.get_help_record(ctx)) is not None:
                panels.setdefault(panel, []).append(row)
        for title, lines in panels.items():
            with formatter.section(title):
                formatter.write_dl(lines)


class Command(_InPanels, TyperCommand):
    """A command with this help."""


class CommandGroup(_InPanels, TyperGroup):
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


def _panel(each: Any, otherwise: str) -> str:
    panel = getattr(each, "rich_help_panel", None)
    return panel if isinstance(panel, str) else otherwise
