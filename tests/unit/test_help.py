"""The commands' help: nothing is cut at 80 columns, every name is whole, every default is one that the option has."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from cacheblend.cli import app
from lab.cli import app as lab_app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


APPS = {"cacheblend": app, "lab": lab_app}
ALL = {
    (name, *path): command for name, each in APPS.items() for path, command in commands(typer.main.get_command(each))
}


def test_commands_are_few() -> None:
    assert len(ALL["cacheblend",].commands) <= 14


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_whole_at_80_columns(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(APPS[path[0]], [*path[1:], "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("Usage: ") and all(name in lines[0].split() for name in path[1:])
    assert max(map(len, lines)) <= 80 and "\u2026" not in result.output
    words = result.output.replace(",", " ").split()
    for each in ALL[path].params:
        names = [*each.opts, *each.secondary_opts] if each.param_type_name != "argument" else [each.name.upper()]
        assert getattr(each, "hidden", False) or all(name in words or f"[{name}]" in words for name in names)
    for name in getattr(ALL[path], "commands", {}):
        assert f"  {name}" in result.output


def test_what_is_said_of_an_option() -> None:
    lines = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "110"}).output.splitlines()
    said = {line.split("  ")[1].strip(): line.strip() for line in lines if line.startswith("  -")}
    assert "the small model that ships. (required)" in " ".join(" ".join(lines).split())
    assert said["--timeout VALUE"].endswith("Seconds of a request at most. (default: 600)")
    assert "default" not in said["--salt VALUE"]
    assert said["--playground / --no-playground"] == "--playground / --no-playground"  # its text is below
