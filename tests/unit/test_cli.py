"""The commands' help, options in groups, with `BlendConfig`'s defaults, progress on stderr; settings; reports."""

import inspect
import io
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import pytest
import typer
import typer.main
from rich.console import Console
from typer.testing import CliRunner

from cacheblend.cli import app, output
from cacheblend.cli.bench import HOW, WHAT, RoundOptions, SizeOptions
from cacheblend.cli.doctor import _table
from cacheblend.cli.option_groups import numbers, option, with_groups
from cacheblend.cli.options import AnswerOptions, BlendOptions, ChunkOptions, SelectionOptions
from cacheblend.cli.serve import AccessOptions
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.report import BlendReport
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import AllRows, Gradual, Head, Hkvd, NoRows, RandomRows, Threshold
from cacheblend.engines.hf import SamplingParams
from cacheblend.evaluation.candidates import grid
from cacheblend.evaluation.gate import Bar, Summary, Tried
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


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_whole_at_80_columns(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(APPS[path[0]], [*path[1:], "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("Usage: ") and all(name in lines[0].split() for name in path[1:])
    assert max(map(len, lines)) <= 80 and "\u2026" not in result.output
    words = result.output.replace(",", " ").lower().split()
    for each in ALL[path].params:
        names = [*each.opts, *each.secondary_opts] if each.param_type_name != "argument" else [each.name]
        assert getattr(each, "hidden", False) or all({name.lower(), f"[{name}]"} & {*words} for name in names)
    for name in getattr(ALL[path], "commands", {}):
        assert f"  {name}" in result.output


def test_what_is_said_of_an_option_and_commands_are_few() -> None:
    lines = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "110"}).output.splitlines()
    said = {line.split()[0]: line for line in lines if line.startswith("  -")}
    assert "the small model that ships. [required]" in " ".join(" ".join(lines).split())
    assert "Seconds of a request at most.  [default:" in said["--timeout"]
    assert "default" not in said["--salt"]
    assert said["--playground"].endswith("Serve the page at /.  [default: playground]")
    assert len(ALL["cacheblend",].commands) <= 14


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--width", "-w", min=1)]
    height: float = option(2.0, "Of the frame.")


def run(command: object, *arguments: str) -> str:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_groups(command))  # type: ignore[arg-type]
    result = CliRunner().invoke(app, arguments)
    return result.output if result.exit_code == 0 else f"{result.exit_code} {result.exception!r} {result.output}"


def test_groups_become_options_in_their_panels_and_come_back_as_one_object() -> None:
    def show(size: Size, loud: bool = option(False, "Shout."), shown: bool = option(True, "Show it.")) -> None:
        typer.echo(f"{size} {loud} {shown}")

    assert run(show, "-w", "3", "--height", "0.5", "--loud") == "Size(width=3, height=0.5) True True\n"
    assert run(show, "--width", "4", "--no-shown") == "Size(width=4, height=2.0) False False\n"
    assert run(show).startswith("2 ")  # --width is required
    assert run(show, "-w", "0").startswith("2 ")

    def show(size: Size = Size(7)) -> None:
        typer.echo(str(size))

    assert run(show) == "Size(width=7, height=2.0)\n"
    assert run(show, "--height", "1") == "Size(width=7, height=1.0)\n"
    for value in ("nan", "inf", "-inf"):
        told = run(show, f"--height={value}")
        assert "--height" in told and "Size(" not in told

    @dataclass(frozen=True)
    class Wide:
        width: Annotated[int, typer.Option("--width")] = 9

    def show(size: Size, other: Wide) -> None: ...

    with pytest.raises(TypeError, match="width"):
        with_groups(show)

    @dataclass(frozen=True)
    class Measured(RoundOptions, SizeOptions):
        rest: int = option(1, "Neither.", panel=None)

    def show(what: Measured) -> None: ...

    shown = inspect.signature(with_groups(show)).parameters
    panels = {name: get_args(each.annotation)[1].rich_help_panel for name, each in shown.items()}
    assert (panels["runs"], panels["chunks"], panels["rest"]) == (HOW, WHAT, None)


def test_defaults_are_those_of_the_configuration() -> None:
    config = BlendConfig()
    plain = BlendOptions().settings()
    assert {name: getattr(config, name) for name in plain} == plain
    assert set(ChunkOptions().settings()) == {"anchor", "anchor_text", "block_size", "codec", "salt"}
    assert SelectionOptions().settings() == {}
    sampling = AnswerOptions()
    assert sampling.params() == SamplingParams(max_new_tokens=256, temperature=0.0, seed=None)
    served, server = AccessOptions().of(ServeSettings()), ServeSettings(hosts=("127.0.0.1",))
    assert {**vars(served), "keys": server.keys, "metrics_keys": server.metrics_keys} == vars(server)
    known = {field.name for field in fields(BlendConfig)}
    everything = BlendOptions(ratio=["0.3,0.2"], selector="hkvd", check_layers="1,2", measure="v").settings()
    assert set(everything) <= known
    assert BlendConfig(**everything).ratios == (0.3, 0.2)


def test_what_belongs_together_in_a_selection() -> None:
    # ratios and check layers
    assert SelectionOptions(["0.3"]).settings() == {"recompute_ratio": 0.3}
    assert SelectionOptions(check_layers="2").settings() == {"recompute_ratio": 0.15, "check_layers": (2,)}
    for wrong in (
        SelectionOptions(["0.3", "0.2"]),
        SelectionOptions(["0.3,0.2"]),
        SelectionOptions(["0.3,0.2"], "head"),
        SelectionOptions(["0.9"], "none"),
        SelectionOptions(["x"]),
    ):
        with pytest.raises(InvalidInputError, match="--ratio"):
            wrong.settings()
    with pytest.raises(InvalidInputError, match=r"--x 1,nan: expected finite"):
        numbers("--x", "1,nan", float)
    # a selector's own settings, and those of another, which would have no effect
    for wrong in ("hkvd:hops=1", "head:pool=4", "query:recency=1", "none:measure=k", "threshold:rank=either"):
        setting = re.split("[:=]", wrong)[1]
        with pytest.raises(InvalidInputError, match=rf"selector '{wrong}': there is no setting '{setting}' here"):
            SelectionOptions(selector=wrong).settings()
    chosen = SelectionOptions(selector="hybrid:hops=1,hop_spans=3", measure="k")
    assert chosen.settings() == {"selector": "hybrid", "hops": 1, "hop_spans": 3, "measure": "k"}
    for selector in ("query", "head", "random", "none", "all"):
        for wrong in (SelectionOptions(None, selector, "2"), SelectionOptions(None, selector, measure="k")):
            with pytest.raises(InvalidInputError, match=f"no effect with --selector {selector}"):
                wrong.settings()


def test_figures_of_settings_can_be_read_at_80_columns() -> None:
    figures = Summary(300, 297, 0.99, 0.9717, 0.0123, None, None, 0.2712, 2.3, 300, 0.5, -0.012, -0.034)
    candidates = grid(12, ["hybrid:question_words=1,hops=1,hop_spans=2,correction=0.5"], [0.2])
    out = Console(width=80, file=io.StringIO(), record=True)
    out.print(_table("search", [Tried(each, figures, True, False) for each in candidates], Bar()))
    text = out.export_text()
    assert "…" not in text and all(one in text for one in ("27.1 %", "297/300", "97.2 %", "-0.012", "2.3 x passes"))


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


def test_stages_say_where_they_are_while_they_last_and_a_status_what_is_done(shown: Callable[[str], str]) -> None:
    titles = {"warming": "warming, passages", "answering": "answering, rows", "never": "never"}
    with output.stages(titles, quiet=False) as advance:
        advance("warming", 1, 3)
        assert "warming, passages 1/3 (0 s)\n" in shown("1/3")
        shown("1/3")  # again: it takes long
        advance("warming", 3, 3)
        advance("answering", 0, 5)
        shown("answering, rows 0/5 (")
        advance("answering", 2, 5)
        shown("answering, rows 2/5, about 0 s left (")
    assert shown("answering").endswith("warming, passages 3/3\nanswering, rows 2/5\n")
    assert [output.duration_text(each) for each in (0.2, 89, 90, 5399, 5400)] == [
        "0 s",
        "89 s",
        "2 min",
        "90 min",
        "2 h",
    ]
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


# ---- settings: each bad one is refused at once, by name; and the report ---------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [  # see also tests/integration/test_wrong_uses
        ({"recompute_ratio": -0.1}, r"0\.\.1, got -0.1"),
        ({"recompute_ratio": 1.01}, r"0\.\.1, got 1.01"),
        ({"recompute_ratio": math.nan}, r"0\.\.1, got nan"),
        ({"recompute_ratio": math.inf}, r"0\.\.1, got inf"),
        ({"recompute_ratio": None}, r"0\.\.1, got None"),
        ({"check_layers": ()}, r"ascending, at least 1.*got \(\)"),
        ({"check_layers": (0,)}, r"at least 1.*layer 0.*got \(0,\)"),
        ({"check_layers": (-1, 2)}, r"at least 1.*got \(-1, 2\)"),
        ({"check_layers": (3, 2)}, r"ascending.*got \(3, 2\)"),
        ({"check_layers": (2, 2)}, r"ascending.*got \(2, 2\)"),
        ({"selector": "threshold", "threshold": 1.0, "check_layers": (0,)}, "at least 1"),
        ({"ratios": (0.1, 0.2), "check_layers": (1, 2)}, r"must not rise.*got \(0.1, 0.2\)"),
        ({"ratios": (1.5,)}, r"0\.\.1, got \(1.5,\)"),
        ({"ratios": (math.nan,)}, r"0\.\.1, got \(nan,\)"),
        ({"selector": "threshold", "threshold": -1.0}, "at least 0, got -1.0"),
        ({"selector": "threshold", "threshold": math.nan}, "finite.*got nan"),
        ({"selector": "threshold", "threshold": 1.0, "measure": "q"}, "one of kv, k, v, got 'q'"),
        ({"selector": "query", "pool": "word"}, "'sentence' or 1 to 2147483648 tokens, got 'word'"),
        ({"selector": "hybrid", "pool": True}, "1 to 2147483648 tokens, got True"),
        ({"selector": "query", "question_rows": 1}, "question_rows must be a whole number, at least 2 .*, got 1"),
        ({"selector": "query", "lead": -1}, "lead must be a whole number of spans"),
        ({"selector": "query", "question_rows": 2.5}, "whole number.*got 2.5"),
        ({"selector": "query", "question_rows": "64"}, "whole number.*got '64'"),
        ({"selector": "query", "question_words": -0.5}, "finite weight of at least 0, got -0.5"),
        ({"selector": "hybrid", "question_words": float("nan")}, "finite weight of at least 0, got nan"),
        ({"selector": "query", "hops": -1}, r"hops must be a whole number, 0 to 4 .*, got -1"),
        ({"selector": "hybrid", "hops": 5}, r"0 to 4 .*, got 5"),
        ({"selector": "query", "hops": True}, "whole number.*got True"),
        ({"selector": "query", "hops": 1.0}, "whole number.*got 1.0"),
        ({"selector": "query", "hop_spans": 0}, "hop_spans must be a whole number of spans, 1 to 8, got 0"),
        ({"selector": "hybrid", "hop_spans": 9}, "1 to 8, got 9"),
        ({"selector": "query", "head_rows": -1}, "head_rows must be a whole number of rows, at least 0, got -1"),
        ({"selector": "hybrid", "head_rows": 1.5}, "at least 0, got 1.5"),
        ({"selector": "query", "hops": 1}, "look for rare words; set question_words above 0, or hops to 0"),
        ({"selector": "query", "pool": 10**30}, "1 to 2147483648 tokens"),
        ({"selector": "hybrid", "check_layers": ()}, "check layers|as many ratios"),
        ({"selector": "hybrid", "ratios": (-0.5,)}, "0..1, got .-0.5"),
        ({"selector": "hybrid", "rank": "both"}, "one of deviation, either, got 'both'"),
        ({"selector": "hybrid", "early_ratio": 1.5}, r"0\.\.1, got 1.5"),
        ({"selector": "hybrid", "early_ratio": -0.5}, r"0\.\.1, got -0.5"),
        ({"selector": "hybrid", "ratios": (0.1, 0.2), "check_layers": (1, 2)}, "must not rise"),
        ({"block_size": 1.5}, "block_size must be a whole number, got 1.5"),
        ({"capture_queue": float("nan")}, "capture_queue must be a whole number, got nan"),
        ({"capture": "false"}, "capture must be true or false, got 'false'"),
        ({"salt": "a\udcff"}, r"salt 'a\\udcff' has a lone surrogate at character 1"),
        ({"tile_rows": -1}, "tile_rows must be at least 0, got -1"),
        ({"capture_batch_tokens": 0}, "capture_batch_tokens must be at least 1, got 0"),
        ({"read_ahead": -1}, "read_ahead must be at least 0, got -1"),
        ({"capture_queue": -1}, "capture_queue must be at least 0, got -1"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BlendConfig(**settings)
    with pytest.raises(InvalidInputError, match=message):
        BlendConfig.of(settings)


def test_what_decides_quality_is_a_type_of_its_own_and_the_report_is_json() -> None:
    # a device decides the tiles
    config = BlendConfig(recompute_ratio=0.1, selector="query", pool=8, block_size=64)
    assert config.selection == Selection(recompute_ratio=0.1, selector="query", pool=8)
    assert config.selection.make_selector() == config.make_selector() == Query(0.1, pool=8)
    assert BlendConfig.of({"recompute_ratio": 0.1, "selector": "query", "pool": 8, "block_size": 64}) == config
    assert BlendConfig(check_layers=(1, 2), ratios=(0.5, 0.25)).selection.final_ratio == 0.25
    with pytest.raises(InvalidInputError, match="no field 'ratio'; it has recompute_ratio, selector"):
        BlendConfig.of({"ratio": 0.1})
    with pytest.raises(InvalidInputError, match=r"0\.\.1, got 2"):
        Selection(recompute_ratio=2)
    assert [BlendConfig().on(device).tile_rows for device in ("cpu", "cuda")] == [1024, 4096]
    assert [BlendConfig(tile_rows=7).on(device).tile_rows for device in ("cpu", "cuda")] == [7, 7]
    # the report has its sum, and shares nothing
    report = BlendReport(prompt_tokens=10, hit_tokens={"prefix": 2, "memory": 3, "disk": 0}, fallbacks=["why"])
    read = json.loads(json.dumps(report.to_dict()))
    assert read["loaded_tokens"] == report.loaded_tokens == 5 and read["fallbacks"] == ["why"]
    assert read["hit_tokens"] == {"prefix": 2, "memory": 3, "disk": 0}
    report.to_dict()["fallbacks"].append("y")
    assert report.fallbacks == ["why"] and BlendReport().loaded_tokens == 0


def test_settings_and_a_requests_ratio_make_the_selector() -> None:
    # every selector can be named, and one check by its layer or its ratio
    for kind in (Query, Hybrid, Threshold, Head, RandomRows, NoRows, AllRows):
        name = kind.__name__.removesuffix("Rows").lower().replace("no", "none")
        assert isinstance(BlendConfig(selector=name, threshold=1.0).make_selector(), kind)
    assert BlendConfig(selector="hkvd").make_selector() == BlendConfig().make_selector() == Gradual(0.15, "kv")
    assert BlendConfig(check_layers=(1,)).make_selector() == Hkvd((1,), (0.15,))
    assert BlendConfig(ratios=(0.2,)).make_selector() == Hkvd((1,), (0.2,))
    assert BlendConfig(ratios=(0.2,)).make_selector(0.3) == Hkvd((1,), (0.3,))
    assert BlendConfig(measure="v").make_selector(0.3) == Gradual(0.3, "v")
    config = BlendConfig(check_layers=(1, 3), ratios=(0.5, 0.25))
    assert config.make_selector() == Hkvd((1, 3), (0.5, 0.25))
    assert config.make_selector(0.75) == Hkvd((1, 3), (0.75, 0.75))
    assert config.make_selector(0) == Hkvd((1, 3), (0, 0))
    assert BlendConfig(selector="head").make_selector(0.5) == Head(0.5)
    with pytest.raises(InvalidInputError, match="got 2"):
        config.make_selector(2)
    # hybrid's early share follows the ratios
    config = BlendConfig(selector="hybrid", check_layers=(1, 3), ratios=(0.5, 0.25), pool=4, question_rows=8)
    assert config.make_selector() == Hybrid((1, 3), (0.5, 0.25), 0.75, pool=4, question_rows=8)
    assert config.make_selector(0.5) == Hybrid((1, 3), (0.5, 0.5), 1.0, pool=4, question_rows=8)
    fixed = BlendConfig(selector="hybrid", ratios=(0.25,), early_ratio=0.375, rank="deviation", measure="k")
    assert fixed.make_selector() == Hybrid((1,), (0.25,), 0.375, "deviation", "k")
    assert fixed.make_selector(0.5) == Hybrid((1,), (0.5,), 0.5, "deviation", "k")
    # hops reach the selectors that ask
    assert BlendConfig(selector="query").make_selector() == Query(0.15)  # hops 0
    config = BlendConfig(selector="query", question_words=2.0, hops=2, hop_spans=1)
    assert config.make_selector() == config.selection.make_selector() == Query(0.15, words=2.0, hops=2, hop_spans=1)
    config = BlendConfig(selector="hybrid", early_ratio=0.5, question_words=1.0, hops=1)
    assert config.make_selector() == Hybrid((1,), (0.15,), 0.5, words=1.0, hops=1, hop_spans=2)
    assert config.make_selector(0.25) == Hybrid((1,), (0.25,), 0.5, words=1.0, hops=1, hop_spans=2)
