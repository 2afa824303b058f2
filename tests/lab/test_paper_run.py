"""The paper's evaluation in one command: seven figures on the model that ships, resumed, and what it leaves out."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import QuestionRow
from cacheblend.data.questions import question_lines
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.scheduler import Scheduler
from cacheblend.engines.tokens import Passage
from cacheblend.evaluation import Settings, make_scorers, runner
from cacheblend.evaluation.records import ROWS
from cacheblend.evaluation.scorers import ExactMatch, WordF1
from cacheblend.nano import model_path
from command_line import Result, Run
from command_line import runner as command
from lab.cli import main
from lab.measurements import Kept
from lab.nano.questions import Prompts, draw_questions
from lab.paper import drawing, quality, run
from lab.paper.context import AGREEMENT, ALL, TITLES, Answered, Context, DataSet, LeftOutError, Sweeps, points, score
from tiny_folder import TinyShape, build_tiny

TINY = Sweeps(
    ratios=(0.15, 0.3),
    chunk_numbers=(2, 3, 64),
    chunk_lengths=(24, 48, 4096),
    batch_sizes=(1, 2),
    load=1,
    load_requests=2,
    clients=2,
    slowness=(1.0,),
    share=0.5,
)
SHORT = Prompts(passages=(3, 4), tokens=(24, 40))
BAD = [{"question": "Who?", "passages": []}, {"question": "Who?", "passages": "none", "answers": ["a"]}]
NAMES = [part.name for part in run.PARTS]
with_the_whole_run = pytest.mark.slow(0)  # all in one turn, as the run takes long


@dataclass
class Done:
    """A finished run of the command."""

    arguments: list[str]
    files: list[Path]
    result: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.result["folder"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two data sets; the first one has rows that cannot be used, and a second right answer."""
    folder = tmp_path_factory.mktemp("data")
    first = [json.loads(line) for line in question_lines(draw_questions(50, 1, ("cross", "direct"), SHORT))]
    first[0]["answers"].append("another right answer")
    first.insert(1, BAD[0])
    written = {
        "first": [*first, BAD[1]],
        "second": list(map(json.loads, question_lines(draw_questions(51, 1, ("chain",), SHORT)))),
    }
    for name, rows in written.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [folder / f"{name}.jsonl" for name in written]


@pytest.fixture
def tiny_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.cli.paper.sweeps_of", lambda *_: TINY)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tiny_sweeps: None) -> Run:
    return command(capsys, "paper", main=main)


@pytest.fixture(scope="module")
def done(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("paper")
    arguments = ["--model", "nano", *(text for file in files for text in ("--data", str(file)))]
    arguments += ["--skip-bad", "--max-tokens", "4", "--out", str(out), "--json-file", str(out / "whole.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.cli.paper.sweeps_of", lambda *_: TINY)
        main(["paper", *arguments])
    return Done(arguments, files, json.loads((out / "whole.json").read_text()))


# ---- the report ------------------------------------------------------------------------------------------------


@with_the_whole_run
def test_the_report_has_all_figures_methods_and_notes(done: Done) -> None:
    # All seven figures are there
    assert done.result["figures"] == {"paper_report": 7}
    assert list(done.result["pictures"]) == list(done.result["parts"]) == NAMES
    text = (done.folder / run.FILE).read_text()
    for name, file in done.result["pictures"].items():
        assert (done.folder / file).read_bytes().startswith(b"\x89PNG")
        assert f"({file})" in text
        assert done.result["parts"][name]["points"]
        assert "left_out" not in done.result["parts"][name]
    assert json.loads((done.folder / run.DATA).read_text()) == done.result
    # Every method is compared on every set
    points = {name: done.result["parts"][name]["points"] for name in NAMES}
    found = [(point["data"], point["method"]) for point in points["quality"]]
    assert sorted(found) == sorted((data, title) for data in ("first", "second") for title in TITLES.values())
    assert {(p["family"], p["ratio"]) for p in points["ratio"]} >= {
        (family, ratio) for family in ("blend", "gradual", "one check") for ratio in TINY.ratios
    }
    assert {p["x"] for p in points["chunk-number"]} == {2, 3}
    assert {p["x"] for p in points["chunk-length"]} == {24, 48}
    assert {p["x"] for p in points["batch"]} == {1, 2}
    assert {p["family"] for p in points["rate"]} == {"full", "prefix", "blend"}
    assert {p["device"] for p in points["device"]} == {"memory", "disk", "1 x prefill"}
    # Full recompute agrees with itself everywhere
    for name in set(NAMES) - {"rate"}:
        for point in done.result["parts"][name]["points"]:
            if point["family"] == "full":
                assert point["quality"]["top_1"]["mean"] == 1
                # side by side, the last layer computes its last row only
                assert 0.9 < point["compute"] < 1 if name == "batch" else point["compute"] == pytest.approx(1)
            assert set(point["quality"]) == {"f1", "em", "top_1"}
    # Points that cannot be had; bad rows, with their reasons; prefix caching.
    text = (done.folder / run.FILE).read_text()
    assert "64 passages: left out, most rows have" in text
    assert "passages of 4096 tokens: left out, most rows are then one passage" in text
    first, second = done.result["data"]
    assert (first["rows"], len(first["bad_rows"]), second["bad_rows"]) == (2, 2, [])
    assert "line 2, field 'passages': it is empty" in first["bad_rows"][0]
    assert "first: 2 rows cannot be used; the first: " in text
    quality = done.result["parts"]["quality"]
    gained = any(p["recomputed"] is not None for p in quality["points"] if p["family"] == "prefix")
    assert any("prefix caching gains nothing" in note for note in quality["notes"]) != gained


# ---- resuming --------------------------------------------------------------------------------------------------


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("something is run again")


@with_the_whole_run
def test_a_second_run_runs_nothing_again(done: Done, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlendEngine, "prefill", never)
    monkeypatch.setattr(BlendEngine, "warm", never)
    monkeypatch.setattr(Scheduler, "submit", never)
    monkeypatch.setattr(runner, "_run", never)
    again = cli(*done.arguments)
    assert again.code == 0, again.err
    result = json.loads((done.folder / run.DATA).read_text())
    for name, part in result["parts"].items():
        assert part["points"] == done.result["parts"][name]["points"]
        assert part["resumed"] > 0


@with_the_whole_run
def test_without_matplotlib_the_report_has_tables(
    done: Done, cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Without matplotlib the report has tables
    monkeypatch.setattr(run, "can_draw", lambda: False)
    said = cli(*done.arguments)
    assert said.code == 0
    assert "no figures are drawn, that needs matplotlib" in said.err
    text = (done.folder / run.FILE).read_text()
    assert "No figures are drawn" in text
    assert text.count("| method | rows |") == 7
    # Other settings have a folder of their own
    monkeypatch.setattr(run, "PARTS", run.PARTS[:1])
    before = sorted(path.name for path in done.folder.parent.iterdir())
    arguments = [text if text != "4" else "3" for text in done.arguments]
    said = cli(*arguments, "--limit", "1")
    assert said.code == 0, said.err
    after = sorted(path.name for path in done.folder.parent.iterdir())
    assert len(after) == len(before) + 1
    assert json.loads((done.folder / run.DATA).read_text())["max_tokens"] == 4


# ---- interrupts, on a tiny model ------------------------------------------------------------------------------

PASSAGES = [
    f"The {name} was lit in {year} and its keepers wrote down the weather."
    for name, year in zip(("lighthouse", "clock", "bridge", "harbour", "tower"), range(1871, 1876), strict=True)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("paper-model") / "tiny"
    build_tiny(model, PASSAGES, TinyShape(layers=2, width=32, mlp_width=48, heads=2, kv_heads=1, context_length=192))
    return model


@pytest.fixture
def engine(folder: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(folder, config={"capture": False}, device="cpu") as engine:
        yield engine


def rows_of(count: int, passages: int) -> list[QuestionRow]:
    order = random.Random(count)
    return [
        QuestionRow("When was it lit?", tuple(Passage(order.choice(PASSAGES)) for _ in range(passages)), ("1871",))
        for _ in range(count)
    ]


def evaluate_paper(engine: BlendEngine, rows: list[QuestionRow], out: Path, sweeps: Sweeps = TINY) -> dict[str, Any]:
    assert engine.runtime.builder is not None
    scorers = make_scorers(["f1"], engine.runtime.builder.encode)
    return run.run_paper(
        engine, [DataSet("data", rows)], scorers, settings=Settings(max_tokens=2), sweeps=sweeps, out=out
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_interrupted_anywhere_goes_on(
    engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each row, and each method at each point, is finished once, however often the run is interrupted."""
    draw, finished = random.Random(seed), list[tuple[str, int]]()
    until = [draw.randint(1, 6)]
    answer, submit = runner._run, Scheduler.submit

    def count(what: str, done: Any) -> Any:
        def run_it(*arguments: Any, **options: Any) -> Any:
            until[0] -= 1
            if not until[0]:
                until[0] = draw.randint(8, 60)
                raise KeyboardInterrupt
            found = done(*arguments, **options)
            finished.append((what, 1))
            return found

        return run_it

    monkeypatch.setattr(runner, "_run", count("row", answer))
    monkeypatch.setattr(Scheduler, "submit", count("request", submit))
    monkeypatch.setattr(run, "can_draw", lambda: False)  # nothing is drawn
    rows, interrupts = rows_of(4, 3), 0
    while True:
        try:
            result = evaluate_paper(engine, rows, tmp_path)
            break
        except KeyboardInterrupt:
            interrupts += 1
            (at,) = tmp_path.glob("paper-*")
            assert interrupts < 200
    assert interrupts
    assert {name for name, part in result["parts"].items() if part["points"]} == set(NAMES)
    kept = [path for path in at.glob("*/rows.jsonl") if not path.parent.name.startswith(("batch", "rate", "device-"))]
    written = [json.loads(line) for path in at.glob("*/rows.jsonl") for line in path.read_text().splitlines()]
    assert len(kept) >= 3
    assert sum(what == "row" for what, _ in finished) == sum("cells" in line for line in written)
    keys = [line["key"] for line in written if "key" in line]
    assert len(keys) == len(set(keys))


@with_the_whole_run
def test_ctrl_c_leaves_a_report_and_says_how_to_go_on(
    done: Done, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(context: Context) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "PARTS", [run.PARTS[0], replace(run.PARTS[1], measure=interrupt), *run.PARTS[2:]])
    copy = tmp_path / "out"
    shutil.copytree(done.folder.parent, copy)
    arguments = [text.replace(str(done.folder.parent), str(copy)) for text in done.arguments]
    said = cli(*arguments)
    assert said.code == 130
    assert "the same command goes on from there" in said.err
    text = (copy / done.folder.name / run.FILE).read_text()
    assert text.count("Not measured yet.") == 6


# ---- what the data or the model cannot have --------------------------------------------------------------------


def context_of(engine: BlendEngine, rows: list[QuestionRow], tmp_path: Path, sweeps: Sweeps) -> Context:
    assert engine.runtime.builder is not None
    scorers = make_scorers(["f1"], engine.runtime.builder.encode)
    return Context(engine, [DataSet("data", rows)], Settings(max_tokens=2), scorers, sweeps, tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_numbers_of_passages_fit_rows_and_context(engine: BlendEngine, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = [rows_of(1, draw.randint(1, 14))[0] for _ in range(draw.randint(1, 7))]
    numbers = tuple(draw.sample(range(1, 16), 5))
    context = context_of(engine, rows, tmp_path, replace(TINY, chunk_numbers=numbers, share=1.0))
    try:
        used, points, notes = quality.choose_points(context)
    except LeftOutError as reason:
        assert "passages" in str(reason)
        return
    assert set(points) <= set(numbers)
    assert used
    for row in used:
        prompt = Settings().template.prompt(engine, row.passages[: points[-1]], "?")
        assert len(prompt) <= (engine.runtime.survey.max_length or 0)
        assert len(row.passages) >= points[-1]
    missing = set(numbers) - set(points)
    assert all(any(str(number) in note for note in notes) for number in missing)


@pytest.mark.parametrize("tokens", [9, 17, 40])
def test_text_is_kept_when_it_is_cut_anew(engine: BlendEngine, tmp_path: Path, tokens: int) -> None:
    rows = rows_of(4, 3)
    context = context_of(engine, rows, tmp_path, replace(TINY, share=1.0))
    assert engine.runtime.builder is not None
    for row, cut in zip(rows, quality.cut_anew(context, tokens), strict=True):
        assert "".join("".join(part.text for part in cut.passages).split()) == "".join(
            "".join(part.text for part in row.passages).split()
        )
        assert all(len(engine.runtime.builder.encode(part.text)) <= tokens for part in cut.passages)


def test_rows_of_one_passage_leave_sweeps_out_and_say_so(engine: BlendEngine, tmp_path: Path) -> None:
    result = evaluate_paper(engine, rows_of(2, 1), tmp_path, replace(TINY, chunk_lengths=(2048,)))
    assert "most rows have 1 passages" in result["parts"]["chunk-number"]["left_out"]
    assert "one passage" in result["parts"]["chunk-length"]["left_out"]
    assert result["figures"] == {"paper_report": 5}
    assert "Left out: " in (Path(result["folder"]) / run.FILE).read_text()


# ---- wrong input -----------------------------------------------------------------------------------------------


def fails(cli: Run, *arguments: object) -> str:
    said: Result = cli(*arguments)
    assert said.code == 2
    assert said.err.count("\n") == 1
    return said.err


def test_wrong_files_are_one_line(
    cli: Run, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Wrong files are one line
    data = ["--model", "nano", "--data"]
    assert "--skip-bad" in fails(cli, *data, files[0])
    assert "first.jsonl, line 2" in fails(cli, *data, files[0])
    assert "is given twice" in fails(cli, *data, files[1], "--data", files[1].parent / "." / files[1].name)
    (tmp_path / "empty.jsonl").write_text("")
    assert "has no rows" in fails(cli, *data, tmp_path / "empty.jsonl")
    (tmp_path / "bad.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in BAD))
    assert "none of its 2 rows can be used" in fails(cli, *data, tmp_path / "bad.jsonl", "--skip-bad")
    assert "there are no questions" in fails(cli, "--model", "nano")
    assert "needs a model" in fails(cli, "--data", files[1])
    for refused in (("--selector", "hkvd"), ("--store", "memory"), ("--methods", "full"), ("--seed", 1)):
        assert f"there is no option {refused[0]}" in fails(cli, *data, files[1], *refused)
    # A model without a tokenizer is refused
    bare = tmp_path / "bare"
    shutil.copytree(model_path(), bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "has no tokenizer that transformers can open" in fails(cli, "--model", bare, "--data", files[1])
    # Several files are the papers alone
    said = command(capsys, "evaluate")("--model", "nano", "--data", files[1], "--data", files[0])
    assert (said.code, "--data is given 2 times" in said.err) == (2, True)


def test_files_of_one_name_are_told_apart_by_their_folders(files: list[Path], tmp_path: Path) -> None:
    from cacheblend.cli.options import QuestionOptions
    from lab.cli.paper import read_files

    copies = [tmp_path / name / "dev.jsonl" for name in ("one", "two")]
    for copy in copies:
        copy.parent.mkdir()
        shutil.copy(files[1], copy)
    assert list(read_files(QuestionOptions(data=[*copies, files[1]]))) == [
        *(str(copy.with_suffix("")) for copy in copies),
        "second",
    ]


def test_plain_evaluation_skips_and_counts_bad_rows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"question": "When was it lit?", "passages": [{"text": text} for text in PASSAGES[:2]], "answers": ["1871"]}
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in (BAD[0], good, BAD[1])))
    cli = command(capsys, "evaluate", *map(str, ("--model", folder, "--data", file, "--out", tmp_path, "-n", 2)))
    assert "line 1" in cli().err
    assert "--skip-bad" in cli().err
    said = cli("--skip-bad", "--json")
    assert said.code == 0
    assert (said.json["rows"], len(said.json["bad_rows"])) == (1, 2)
    assert "2 rows cannot be used and were left out" in cli("--skip-bad").err


answered = st.builds(
    Answered,
    data=st.sampled_from(["a", "b"]),
    method=st.sampled_from([(family, title) for family, title in TITLES.items()][:3]),
    ratio=st.none(),
    x=st.sampled_from([1, 2, None]),
    ttft_s=st.floats(0.001, 10),
    scores=st.one_of(st.just({}), st.fixed_dictionaries({"f1": st.floats(0, 1)})),
    agrees=st.sampled_from([None, 0.0, 1.0]),
    compute=st.sampled_from([None, 0.25, 1.0]),
)


@given(st.lists(answered, min_size=1, max_size=25), st.booleans())
def test_points_are_means_of_their_answers(answers: list[Answered], by_data: bool) -> None:
    found = points(answers, by_data=by_data)
    assert sum(point["rows"] for point in found) == len(answers)
    for point in found:
        of = [
            each
            for each in answers
            if (each.method[1], each.x, each.data if by_data else ALL) == (point["method"], point["x"], point["data"])
        ]
        assert point["ttft_s"]["median"] == pytest.approx(np.median([each.ttft_s for each in of]))
        for name, values in (
            ("f1", [each.scores["f1"] for each in of if each.scores]),
            (AGREEMENT, [each.agrees for each in of if each.agrees is not None]),
        ):
            assert (name in point["quality"]) == bool(values)
            if values:
                quality = point["quality"][name]
                assert quality["n"] == len(values)
                assert quality["mean"] == pytest.approx(np.mean(np.array(values, dtype=float)))
                assert quality["low"] - 1e-9 <= quality["mean"] <= quality["high"] + 1e-9
    assert json.loads(json.dumps(found)) == found


def test_the_best_of_several_answers_counts() -> None:
    # The best of several answers counts
    scorers = [WordF1(), ExactMatch()]
    assert score(scorers, "the red bridge", ["a clock", "red bridge"]) == {"f1": 1.0, "em": 1.0}
    assert score(scorers, "the red bridge", []) == {}
    # Without gold answers the first token is drawn
    assert drawing.measure_of([{"quality": {}}]) == AGREEMENT
    assert drawing.measure_of([{"quality": {AGREEMENT: {}}}]) == AGREEMENT
    assert drawing.measure_of([{"quality": {}}, {"quality": {"f1": {}, AGREEMENT: {}}}]) == "f1"
    # Every family has a colour and a marker of its own
    assert set(drawing.COLOURS) == set(drawing.MARKERS) == set(TITLES)
    assert len(set(drawing.COLOURS.values())) == len(set(drawing.MARKERS.values())) == len(TITLES)
    # Wrong points are refused
    with pytest.raises(InvalidInputError, match=r"0\.\.1"):
        Sweeps(ratios=(1.5,))
    with pytest.raises(InvalidInputError, match="at least 1, got 0"):
        Sweeps(chunk_numbers=(0, 2))


@pytest.mark.parametrize("seed", range(5))
def test_measurements_are_kept_over_kills(tmp_path: Path, seed: int) -> None:
    """Each is measured once; a line that was cut off is measured again."""
    draw, measured = random.Random(seed), list[str]()
    wanted = {f"point {number}": {"value": draw.random()} for number in range(8)}

    def measure(key: str) -> Any:
        measured.append(key)
        return wanted[key]

    cuts = 0
    for _ in range(6):
        with Kept(tmp_path, {"a": 1}) as kept:
            for key in draw.sample(sorted(wanted), draw.randint(0, 4)):
                assert kept.get(key, lambda key=key: measure(key)) == wanted[key]  # type: ignore[misc]
        file = tmp_path / ROWS
        if draw.random() < 0.5 and file.read_bytes():
            cuts += 1
            file.write_bytes(file.read_bytes()[: -draw.randint(1, 8)])
    with Kept(tmp_path, {"a": 1}) as kept:
        for key, value in wanted.items():
            assert kept.get(key, lambda key=key: measure(key)) == value  # type: ignore[misc]
        assert len(kept.machines) == 1
    assert set(measured) == set(wanted)
    assert len(measured) <= len(wanted) + cuts
