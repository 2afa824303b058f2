"""The commands' help, options as groups of fields, with `BlendConfig`'s defaults, and progress on stderr."""

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from cacheblend.cli import app, output
from cacheblend.cli.bench import HOW, WHAT, RoundOptions, SizeOptions
from cacheblend.cli.option_groups import numbers, option, with_groups
from cacheblend.cli.options import AnswerOptions, BlendOptions, ChunkOptions, SelectionOptions
from cacheblend.cli.serve import BoundOptions, ServerOptions, _settings
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import SamplingParams
from cacheblend.serve.settings import ServeSettings
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


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--width", "-w", min=1)]
    height: float = option(2.0, "Of the frame.")


@dataclass(frozen=True)
class Wide:
    width: Annotated[int, typer.Option("--width")] = 9


def run(command: object, *arguments: str) -> str:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_groups(command))  # type: ignore[arg-type]
    result = CliRunner().invoke(app, arguments)
    return result.output if result.exit_code == 0 else f"{result.exit_code} {result.exception!r} {result.output}"


def test_a_group_becomes_options_and_comes_back_as_one_object() -> None:
    def show(size: Size, loud: bool = option(False, "Shout."), shown: bool = option(True, "Show it.")) -> None:
        typer.echo(f"{size} {loud} {shown}")

    assert run(show, "-w", "3", "--height", "0.5", "--loud") == "Size(width=3, height=0.5) True True\n"
    assert run(show, "--width", "4", "--no-shown") == "Size(width=4, height=2.0) False False\n"
    assert run(show).startswith("2 ")  # --width is required
    assert run(show, "-w", "0").startswith("2 ")


def test_each_option_stands_in_the_panel_of_the_group_that_declares_it() -> None:
    @dataclass(frozen=True)
    class Measured(RoundOptions, SizeOptions):
        rest: int = option(1, "Neither.", panel=None)

    def show(what: Measured) -> None: ...

    shown = inspect.signature(with_groups(show)).parameters
    panels = {name: get_args(each.annotation)[1].rich_help_panel for name, each in shown.items()}
    assert (panels["runs"], panels["chunks"], panels["rest"]) == (HOW, WHAT, None)


def test_an_instance_as_default_sets_every_default_and_numbers_are_finite() -> None:
    def show(size: Size = Size(7)) -> None:
        typer.echo(str(size))

    assert run(show) == "Size(width=7, height=2.0)\n"
    assert run(show, "--height", "1") == "Size(width=7, height=1.0)\n"
    for value in ("nan", "inf", "-inf"):
        told = run(show, f"--height={value}")
        assert "--height" in told and "Size(" not in told


def test_two_groups_with_one_field_are_a_mistake_of_the_program() -> None:
    def show(size: Size, other: Wide) -> None: ...

    with pytest.raises(TypeError, match="width"):
        with_groups(show)


def test_defaults_are_those_of_the_configuration() -> None:
    config = BlendConfig()
    plain = BlendOptions().settings()
    assert {name: getattr(config, name) for name in plain} == plain
    assert set(ChunkOptions().settings()) == {"anchor", "block_size", "codec", "salt"}
    assert SelectionOptions().settings() == {}
    sampling = AnswerOptions()
    assert sampling.params() == SamplingParams(max_new_tokens=256, temperature=0.0, seed=None)
    served, server = _settings(ServerOptions(), BoundOptions()), ServeSettings(hosts=("127.0.0.1",))
    assert {**vars(served), "keys": server.keys, "metrics_keys": server.metrics_keys} == vars(server)
    known = {field.name for field in fields(BlendConfig)}
    everything = BlendOptions(ratio=["0.3,0.2"], selector="hkvd", check_layers="1,2", measure="v").settings()
    assert set(everything) <= known
    assert BlendConfig(**everything).ratios == (0.3, 0.2)


def test_hops_belong_to_selectors_that_ask_the_question() -> None:
    chosen = SelectionOptions(selector="query", hops=1, hop_spans=3)
    assert chosen.settings() == {"selector": "query", "hops": 1, "hop_spans": 3}
    by_words = SelectionOptions(selector="query:question_words=2", hops=1, hop_rows=0)
    assert by_words.settings() == {"selector": "query", "question_words": 2, "hops": 1, "hop_rows": 0}
    assert SelectionOptions(selector="hybrid", hops=0).settings() == {"selector": "hybrid", "hops": 0}
    for field, value in (("hops", 1), ("hop_rows", 0), ("hop_spans", 2)):
        told = f"--{field.replace('_', '-')} {value} has no effect without --selector query or hybrid"
        for selector in (None, "hkvd"):
            with pytest.raises(InvalidInputError, match=told):
                SelectionOptions(selector=selector, **{field: value}).settings()  # type: ignore[arg-type]


def test_ratios_and_check_layers_belong_together() -> None:
    assert SelectionOptions(["0.3"]).settings() == {"recompute_ratio": 0.3}
    assert SelectionOptions(check_layers="2").settings() == {"recompute_ratio": 0.15, "check_layers": (2,)}
    for wrong in (
        SelectionOptions(["0.3", "0.2"]),
        SelectionOptions(["0.3,0.2"]),
        SelectionOptions(["0.3,0.2"], "head", "1,2"),
        SelectionOptions(["x"]),
    ):
        with pytest.raises(InvalidInputError, match="--ratio"):
            wrong.settings()
    with pytest.raises(InvalidInputError, match=r"--x 1,nan: expected finite"):
        numbers("--x", "1,nan", float)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Waits until a text is on stderr; returns all since the last one."""
    monkeypatch.setattr(output, "EVERY_S", 0.02)

    def wait(text: str) -> str:
        found, end = "", time.monotonic() + 60
        while text not in found and time.monotonic() < end:
            time.sleep(0.01)
            found += capsys.readouterr().err
        assert text in found
        return found

    return wait


def test_stages_say_where_they_are_while_they_last(shown: Callable[[str], str]) -> None:
    titles = {"warming": "warming, passages", "answering": "answering, rows", "never": "never"}
    with output.stages(titles, quiet=False) as advance:
        advance("warming", 1, 3)
        assert "warming, passages 1/3 (0 s)\n" in shown("1/3")
        shown("1/3")  # again: it takes long
        advance("warming", 3, 3)
        advance("answering", 2, 5)
        shown("answering, rows 2/5")
    assert shown("answering").endswith("warming, passages 3/3\nanswering, rows 2/5\n")


def test_a_status_says_what_is_done(shown: Callable[[str], str]) -> None:
    with output.status("examining ...", quiet=False) as say:
        shown("examining ... (")
        say("done: a [check]")
        shown("examining ... done: a [check] (")


def test_errors_and_quiet_commands_leave_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), output.progress("warming", "passages", quiet=False) as advance:
        advance(1, 2)
        raise typer.Exit
    with output.progress("warming", "passages", quiet=True) as advance, output.status("x", quiet=True) as say:
        advance(1, 2)
        say("y")
    assert capsys.readouterr().err == ""
