"""The command line's reference, written from the commands themselves, so that it cannot be out of date.

Takes the place of `<!-- commands -->` on the page cli.md. Importing the command line imports no torch.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the reference in its place."""
    return markdown.replace(MARK, "\n".join(_reference())) if MARK in markdown else markdown


def _reference() -> list[str]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    try:
        from cacheblend.cli import app
    finally:
        sys.path.pop(0)
    import typer.main

    return list(_lines(typer.main.get_command(app), ["cacheblend"]))


def _lines(command: Any, path: list[str]) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from _lines(each, [*path, name])
        return
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name != "argument" and not each.hidden]
    usage = " ".join([*path, *(each.name.upper() for each in arguments), *(["[OPTIONS]"] if options else [])])
    yield from (f"### {' '.join(path)}", "", "```", usage, "```", "", _text(command.help or ""), "")
    for title, shown in _panels(options):
        yield from (f"| {title} | default | |", "|---|---|---|")
        for each in shown:
            yield f"| {_names(each)} | {_default(each)} | {_cell(each.help or '')} |"
        yield ""


def _panels(options: list[Any]) -> list[tuple[str, list[Any]]]:
    """Options by their help's panels, in the order of first appearance."""
    panels: dict[str, list[Any]] = {}
    for each in options:
        panels.setdefault(getattr(each, "rich_help_panel", None) or "Other", []).append(each)
    return list(panels.items())


def _names(option: Any) -> str:
    names = " ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    return " / ".join([names, *(f"`{name}`" for name in option.secondary_opts)])


def _default(option: Any) -> str:
    if option.required:
        return "required"
    value = option.default
    if value is None or callable(value) or value in ((), [], ""):
        return ""
    if isinstance(value, bool):
        return "on" if value and option.secondary_opts else ""
    values = value if isinstance(value, list | tuple) else [value]
    return "`" + ", ".join(str(getattr(each, "value", each)) for each in values) + "`"


def _cell(text: str) -> str:
    return " ".join(_text(text).split()).replace("|", "\\|")


def _text(text: str) -> str:
    """Help as Markdown: without the terminal's markup, and with nothing that reads as HTML."""
    plain = re.sub(r"\[/?(?:bold|dim|italic|cyan|green|yellow|red)\]", "", text).replace("\b", "")
    return plain.replace("<", "&lt;")
