"""Option groups: a frozen dataclass becomes a command's options; defaults are those of `BlendConfig`."""

import inspect
from dataclasses import dataclass, fields
from typing import Annotated, get_args

import pytest
import typer
from typer.testing import CliRunner

from cacheblend.cli.bench import HOW, WHAT, RoundOptions, SizeOptions
from cacheblend.cli.option_groups import numbers, option, with_groups
from cacheblend.cli.options import AnswerOptions, BlendOptions, ChunkOptions, SelectionOptions
from cacheblend.cli.serve import BoundOptions, ServerOptions, _settings
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf import SamplingParams
from cacheblend.serve.settings import ServeSettings


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


def test_an_instance_as_default_sets_every_default() -> None:
    def show(size: Size = Size(7)) -> None:
        typer.echo(str(size))

    assert run(show) == "Size(width=7, height=2.0)\n"
    assert run(show, "--height", "1") == "Size(width=7, height=1.0)\n"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused_by_name(value: str) -> None:
    def show(size: Size) -> None:
        pytest.fail("ran")

    assert "--height" in run(show, "-w", "1", f"--height={value}")


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
    for selector in (None, "hkvd"):
        with pytest.raises(InvalidInputError, match="--hops 1 has no effect without --selector query or hybrid"):
            SelectionOptions(selector=selector, hops=1).settings()
        with pytest.raises(InvalidInputError, match="--hop-rows 0 has no effect without --selector query or hybrid"):
            SelectionOptions(selector=selector, hop_rows=0).settings()
        with pytest.raises(InvalidInputError, match="--hop-spans 2 has no effect without --selector query or hybrid"):
            SelectionOptions(selector=selector, hop_spans=2).settings()


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
