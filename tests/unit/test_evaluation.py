"""Evaluation from its parts: methods, templates, scorers, intervals, records, figures, tables and plots; the demo."""

import importlib.util
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import SelectorChoice
from cacheblend.core.select.selectors import Hkvd, RandomRows, Threshold
from cacheblend.data import QuestionRow
from cacheblend.evaluation import (
    Evaluation,
    bootstrap,
    make_methods,
    read_template,
    scorers,
    summarise,
    with_cells,
)
from cacheblend.evaluation.bootstrap import bootstrap_means
from cacheblend.evaluation.demo import (
    CATEGORIES,
    by_difference,
    demo_methods,
    demo_questions,
    find_example,
    method_figures,
)
from cacheblend.evaluation.methods import Fused, Label
from cacheblend.evaluation.plots import draw
from cacheblend.evaluation.records import ROWS as ROWS_FILE
from cacheblend.evaluation.records import Cell, LineLog, RowResult, folder_name
from cacheblend.evaluation.report import notes, tables
from cacheblend.evaluation.scorers import ExactMatch, TokenF1, WordF1, best, make_scorers, normalise
from cacheblend.evaluation.templates import PromptLayout, Template, fill
from cacheblend.nano import lexicon
from lab.nano.tokenizer import MAX_POSITIONS, build_tokenizer


# ---- methods by name ------------------------------------------------------------------------------------------------
def names(**choices: Any) -> list[str]:
    return [method.label.name for method in make_methods(["blend"], **choices)]


def test_methods_by_name() -> None:
    # All methods by name
    methods = make_methods(["full", "prefix", "reuse", "blend", "map-reduce", "map-rerank", "full"])
    assert [method.label.kind for method in methods] == ["full", "prefix", "reuse", "blend", "map-reduce", "map-rerank"]
    assert methods[3].label.name == "blend hkvd gradual r=0.15"
    assert isinstance(methods[3], Fused) and methods[3].selector == BlendConfig().make_selector()
    # Blend is every combination
    found = names(selectors=["hkvd", "random"], ratios=[0.05, 0.3], check_layers=[(1,), (2,)])
    assert found == [
        "blend hkvd @1 r=0.05",
        "blend hkvd @1 r=0.3",
        "blend hkvd @2 r=0.05",
        "blend hkvd @2 r=0.3",
        "blend random r=0.05",
        "blend random r=0.3",
    ]
    # Methods of one family differ by their ratio
    methods = make_methods(["blend"], selectors=["hkvd", "none"], ratios=[0.05, 0.3])
    assert [(method.label.family, method.label.ratio) for method in methods] == [
        ("hkvd gradual", 0.05),
        ("hkvd gradual", 0.3),
        ("none", None),
    ]
    # Settings stand behind the selectors name
    assert SelectorChoice.parse("hkvd:measure=v").selector((0.1,), (2,)) == Hkvd((2,), (0.1,), "v")
    assert SelectorChoice.parse("threshold:threshold=2.5").selector((0.1,), (1,)) == Threshold(2.5, (1,))
    assert SelectorChoice.parse("random").selector((0.1,), (1,)) == RandomRows(0.1)
    found = names(selectors=["hkvd", "hkvd:measure=v"], check_layers=[None, (1,)])
    both = ("hkvd", "hkvd:measure=v")
    assert found == [f"blend {name} {checks} r=0.15" for name in both for checks in ("gradual", "@1")]
    # The profile stands beside the same settings given by hand
    methods = make_methods(["blend"], selectors=["hkvd", "profile"], profile=BlendConfig())
    assert [method.label.name for method in methods] == ["blend", "blend hkvd gradual r=0.15"]
    # With no selector a model's settings are compared, at the ratios that are asked for; check layers are hkvd's
    own = BlendConfig(selector="head", recency=1.0, recompute_ratio=0.2)
    (blend,) = make_methods(["blend"], profile=own)
    assert isinstance(blend, Fused) and (blend.selector, blend.label.ratio) == (own.make_selector(), 0.2)
    for blend, ratio in zip(make_methods(["blend"], ratios=[0.1, 0.3, 0.1], profile=own), (0.1, 0.3), strict=True):
        assert isinstance(blend, Fused) and (blend.selector, blend.label.ratio) == (own.make_selector(ratio), ratio)
    (blend,) = make_methods(["blend"], check_layers=[(1,)], profile=own)
    assert blend.label.name == "blend hkvd @1 r=0.15"
    # Decreasing ratios go with as many check layers
    methods = make_methods(["blend"], ratios=[0.15, (0.45, 0.3, 0.15)], check_layers=[(1,), (1, 2, 3)])
    assert [method.label.name for method in methods] == [
        "blend hkvd @1 r=0.15",
        "blend hkvd @1,2,3 r=0.15",
        "blend hkvd @1,2,3 r=0.45,0.3,0.15",
    ]
    assert isinstance(methods[2], Fused) and methods[2].selector == Hkvd((1, 2, 3), (0.45, 0.3, 0.15))
    assert methods[2].label.ratio == 0.15
    with pytest.raises(InvalidInputError, match=r"2 decreasing ratios \(0.3, 0.1\) need as many check layers"):
        names(ratios=[(0.3, 0.1)], check_layers=[(1,), (1, 2, 3)])
    # Unknown methods, and none at all
    with pytest.raises(InvalidInputError, match="there is no method 'blnd'; choose from full, prefix, reuse, blend"):
        make_methods(["full", "blnd"])
    with pytest.raises(InvalidInputError, match="there is no method"):
        make_methods([])
    with pytest.raises(InvalidInputError, match="are those of blend, which is not among full, reuse"):
        make_methods(["full", "reuse"], ratios=[0.3])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"selectors": ["hkvdd"]}, "no selector is called 'hkvdd'"),
        ({"selectors": ["hkvd:colour=red"]}, "there is no setting 'colour' here; settings are measure"),
        ({"selectors": ["hkvd:measure"]}, "'measure' is not of the form setting=value"),
        ({"selectors": ["hkvd:ratios=3"]}, "there is no setting 'ratios' here; settings are measure"),
        ({"selectors": ["hkvd:measure=w"]}, "measure must be one of kv, k, v, got 'w'"),
        ({"selectors": ["threshold:threshold=high"]}, "threshold must be a number or None, got 'high'"),
        ({"selectors": ["profile"]}, "needs a model's settings"),
        ({"selectors": ["profile"], "profile": BlendConfig(), "check_layers": [(1,)]}, "has check layers of its own"),
        ({"selectors": ["profile"], "profile": BlendConfig(), "ratios": [(0.3, 0.1)]}, "has check layers|need as many"),
        ({"ratios": [1.5]}, r"must be in 0..1, got 1.5"),
        ({"check_layers": [(0,)]}, "at least 1"),
    ],
)
def test_a_wrong_choice_is_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        names(**choices)


# ---- templates ------------------------------------------------------------------------------------------------------


FILE = """
[short]
system = "Be short."
heading = "Passage {number}, {title}:\\n"
question = "Q: {question}\\nA:"
reduce_answer = "{number}. {answer}\\n"
reduce_question = "{answers}So, {question}"
stop = ["\\n"]
chat = false
"""


def test_templates(tmp_path: Path) -> None:
    file = tmp_path / "templates.toml"
    file.write_text(FILE)
    # Those that ship
    for name in ("bare", "qa", "summary"):
        template = read_template(name)
        assert "{question}" in template.question and "{question}" in template.map_layout.question
        assert "Ann" in template.reduce_text(["Ann", "Bob"], "Who?") and "Who?" in template.reduce_text(["Ann"], "Who?")
    # The default is nothing but passages and question
    assert read_template() == Template()
    assert vars(PromptLayout()).items() <= vars(Template()).items()
    # A template of a file
    template = read_template("short", file)
    assert template.system == "Be short."
    assert template.chat is False
    assert template.stop == ("\n",)
    assert template.map_layout.question == "Q: {question}\nA:"  # as `question`, where there is none of its own
    # Joined answers are numbered stripped and never read as templates
    text = read_template("short", file).reduce_text([" Ann\n", "{question}"], "who {answers}?")
    assert text == "1. Ann\n2. {question}\nSo, who {answers}?"
    # Only named slots are filled
    assert fill('{"a": {question}} {x}', {"question": "{x}?"}) == '{"a": {x}?} {x}'
    # A file that is not there
    with pytest.raises(InvalidInputError, match=r"none.toml cannot be read"):
        read_template("short", tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[short]\nsytem = 'x'", r"\[short\]: there is no field 'sytem'; fields are system"),
        ("[short]\nsystem = 3", r"\[short\], field 'system': expected a text, found 3"),
        ("[short]\nchat = 'yes'", r"field 'chat': expected true or false, found 'yes'"),
        ("[short]\nstop = 'x'", r"field 'stop': expected a list of texts"),
        ("[short]\nstop = ['']", r"field 'stop': expected a list of texts, none of them empty"),
        ("[short]\nquestion = '{context}'", r"field 'question': \{context\} is unknown there, only \{question\}"),
        ("[other]\nsystem = 'x'", r"there is no template \[short\]; the file has other"),
        ("short = 3", r"there is no template \[short\]; the file has none"),
        ("[short", r"templates.toml: not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_template_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "templates.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_template("short", file)


# ---- scorers --------------------------------------------------------------------------------------------------------
def letters(text: str) -> list[int]:
    return [ord(c) for c in text if c != " "]


def test_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Exact match and F1 by words
    for answer, gold, exact, f1 in (
        ("the Exeter College.", "exeter college", 1, 1),
        ("Exeter", "Exeter College", 0, 2 / 3),
        ("Exeter College in Oxford", "Exeter College", 0, 2 * 2 / 6),
        ("Oxford", "Exeter College", 0, 0),
        ("one one two", "one two two", 0, 2 / 3),
        ("", "Exeter", 0, 0),
        ("the", "a", 1, 1),
    ):
        assert (ExactMatch().score(answer, gold), WordF1().score(answer, gold)) == (exact, pytest.approx(f1))
    # Normalisation is squads
    assert normalise(" The  Exeter-College, an (old) one!\n") == "exetercollege old one"
    assert normalise("Theatre and another") == "theatre and another"
    # F1 by tokens counts ids of the normalised first line
    scorer = TokenF1(letters)
    assert scorer.score("\nABC.\nand more", "abd") == pytest.approx(2 / 3)
    assert scorer.score("Yes, because", "yes") == 1
    assert scorer.score("no, not at all", "no") == 1
    assert scorer.score("", "abc") == 0
    assert scorer.score("\n", "the") == 1
    # The best gold answer counts
    assert best(WordF1(), "Exeter", ["Oxford", "Exeter College", "Exeter"]) == 1
    assert best(WordF1(), "Exeter", ["Oxford", "Exeter College"]) == pytest.approx(2 / 3)
    # Rouge l is the f measure of the longest common subsequence
    (rouge,) = make_scorers(["rouge-l"], letters)
    # "police the gunman" is not in order in the answer; "the gunman" or "police gunman" is: 2 of 4 and 2 of 4.
    assert rouge.score("the gunman police killed", "police killed the gunman") == pytest.approx(0.5)
    assert rouge.score("running", "run") == 1  # stemmed
    # Scorers are made once each in order
    assert [scorer.name for scorer in make_scorers(["f1", "em", "f1", "f1-tokens"], letters)] == [
        "f1",
        "em",
        "f1-tokens",
    ]
    # One that is unknown, and one that is not installed
    with pytest.raises(
        InvalidInputError, match="there is no scorer 'bleu'; choose from em, contains, f1, f1-tokens, rouge-l"
    ):
        make_scorers(["bleu"], letters)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(scorers, "find_spec", lambda name: None if name == "rouge_score" else find_spec(name))
    with pytest.raises(InvalidInputError, match=r"needs the package rouge-score: pip install 'cacheblend\[evaluate\]'"):
        make_scorers(["rouge-l"], letters)


# ---- intervals ------------------------------------------------------------------------------------------------------


NAN = float("nan")


def test_bootstrap_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    # A plain loop over the same draws gives the same interval
    values = np.random.default_rng(1).random((13, 3))
    found = bootstrap_means(values, resamples=400, seed=5)
    draws = np.random.default_rng(5).integers(13, size=(400, 13))
    means = np.array([values[rows].mean(axis=0) for rows in draws])
    np.testing.assert_allclose(found.mean, values.mean(axis=0))
    np.testing.assert_allclose(found.low, np.percentile(means, 2.5, axis=0))
    np.testing.assert_allclose(found.high, np.percentile(means, 97.5, axis=0))
    assert found.count.tolist() == [13, 13, 13]
    # The interval is as wide as the normal one for many rows
    values = (np.random.default_rng(2).random((2000, 1)) < 0.3).astype(float)
    found = bootstrap_means(values, resamples=4000)
    error = 1.96 * np.sqrt(values.var() / 2000)
    assert found.low[0] == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert found.high[0] == pytest.approx(values.mean() + error, abs=0.1 * error)
    # A difference has the paired interval
    full = (np.random.default_rng(3).random(200) < 0.5).astype(float)
    other = full.copy()
    other[0] = 1 - other[0]
    found = bootstrap_means(np.stack([full, other, other - full], axis=1))
    assert found.high[2] - found.low[2] < (found.high[0] - found.low[0]) / 3
    assert abs(found.mean[2]) == pytest.approx(1 / 200)
    # Rows without a value count for nothing
    values = np.array([[1.0, 1.0, NAN], [0.0, NAN, NAN], [1.0, 1.0, NAN]])
    found = bootstrap_means(values, resamples=300)
    assert found.count.tolist() == [3, 2, 0]
    assert found.mean[:2].tolist() == [pytest.approx(2 / 3), 1]
    assert (found.low[1], found.high[1]) == (1, 1)
    assert np.isnan([found.mean[2], found.low[2], found.high[2]]).all()
    # A seed draws the same and blocks do not matter
    values = np.random.default_rng(4).random((50, 2))
    first, again, other = (bootstrap_means(values, resamples=200, seed=seed) for seed in (1, 1, 2))
    assert first.low.tolist() == again.low.tolist() != other.low.tolist()
    monkeypatch.setattr(bootstrap, "BLOCK", 120)  # two draws at once
    small = bootstrap_means(values, resamples=200, seed=1)
    np.testing.assert_allclose(small.low, first.low)


# ---- records --------------------------------------------------------------------------------------------------------
def record(number: int) -> RowResult:
    cell = Cell("full", None, 3, answer="Größe", token_ids=[1, 2], ttft_s=0.25, kl=0.5, top_1=True)
    return RowResult(number, f"id{number}", "direct", ["Ann"], [cell], [(5, "too long")])


def opened(folder: Path | None, config: dict[str, Any]) -> LineLog[RowResult]:
    return LineLog(folder, config, RowResult.of_dict)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    with opened(tmp_path / "run", {"a": 1}) as log:
        log.append(asdict(record(0)))
        log.append(asdict(record(2)))
    with opened(tmp_path / "run", {"a": 1}) as log:
        assert log.items == [record(0), record(2)]
        assert not log.torn
    # two runs do not write into one folder
    with opened(tmp_path / "two", {}), pytest.raises(InvalidInputError, match="written by another process"):
        opened(tmp_path / "two", {})
    opened(tmp_path / "two", {}).close()
    # without a folder nothing is kept
    with opened(None, {}) as log:
        log.append(asdict(record(3)))
    # which is named by what shapes its results
    name = folder_name("my model/x y", {"a": 1, "b": [2]})
    assert name == folder_name("my model/x y", {"b": [2], "a": 1})
    assert name != folder_name("my model/x y", {"a": 1, "b": [3]})
    assert name.startswith("my-model-x-y-") and "/" not in name
    assert folder_name("../..", {}).startswith("run-")


def test_a_torn_last_line_is_written_over_and_one_damaged_in_the_middle_an_error(tmp_path: Path) -> None:
    with opened(tmp_path / "run", {}) as log:
        log.append(asdict(record(0)))
        log.append(asdict(record(1)))
    file = tmp_path / "run" / ROWS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    with opened(tmp_path / "run", {}) as log:
        assert log.torn and [row.number for row in log.items] == [0]
        log.append(asdict(record(1)))
    assert file.read_bytes() == whole
    # in the middle
    with opened(tmp_path / "damaged", {}) as log:
        log.append(asdict(record(0)))
        log.append(asdict(record(1)))
    file = tmp_path / "damaged" / ROWS_FILE
    file.write_bytes(b"{" + file.read_bytes())
    with pytest.raises(InvalidInputError, match=r"rows.jsonl, line 1: damaged .*delete that line"):
        opened(tmp_path / "damaged", {})


# ---- figures --------------------------------------------------------------------------------------------------------


METHODS = make_methods(["full", "reuse", "blend"], ratios=[0.1, 0.3])
SCORERS = make_scorers(["em", "f1"], lambda text: [])


def cell(method: int, answer: str, seconds: float, compute: float, top_k: int | None = None) -> Cell:
    name = METHODS[method].label.name
    return Cell(
        name, top_k, 4, "", answer, [len(answer)], seconds, seconds, 100, total_compute=compute, top_1=method != 1
    )


def row(number: int, gold: str | None, answers: list[str], category: str, top_k: int | None = None) -> RowResult:
    cells = [cell(i, answer, 1.0 / (i + 1), 1.0 / (i + 2), top_k) for i, answer in enumerate(answers)]
    return RowResult(number, str(number), category, [] if gold is None else [gold], cells)


def evaluation(rows: list[RowResult], top_k: tuple[int | None, ...] = (None,)) -> Evaluation:
    return Evaluation({"model": "tiny"}, tuple(method.label for method in METHODS), top_k, rows)


ROWS = [
    row(0, "ann", ["ann", "bob", "ann", "ann"], "direct"),
    row(1, "ann", ["ann", "ann", "ann", "ann"], "direct"),
    row(2, "carl", ["bob", "bob", "carl", "carl"], "cross"),
    row(3, None, ["x", "y", "x", "x"], "cross"),
]


def rendered(summary: dict[str, object], width: int = 80) -> str:
    console = Console(width=width, record=True, file=StringIO())
    for table in tables(summary):
        console.print(table)
    return console.export_text()


def test_figures_of_rows_in_eighty_columns() -> None:
    # Quality differences and categories
    summary = summarise(evaluation(ROWS), SCORERS)
    full, reuse, blend, _ = summary["methods"]
    assert full["scores"]["em"]["all"]["mean"] == pytest.approx(2 / 3)
    assert reuse["scores"]["em"]["all"]["mean"] == pytest.approx(1 / 3)
    assert blend["scores"]["em"]["all"]["n"] == 3  # the row without a gold answer counts for no scorer
    difference = blend["scores"]["em"]["all"]["difference"]
    assert (difference["mean"], difference["n"]) == (pytest.approx(1 / 3), 3)
    assert difference["low"] == 0 and difference["high"] == 1
    assert full["scores"]["em"]["all"]["difference"]["mean"] == 0
    assert reuse["scores"]["em"]["by_category"]["direct"]["mean"] == 0.5
    assert blend["scores"]["f1"]["by_category"]["cross"]["difference"]["mean"] == 1
    # Time compute and agreement
    assert (reuse["speedup"], full["speedup"]) == (2, 1)
    assert blend["ttft_s"]["median"] == pytest.approx(1 / 3)
    assert blend["total_compute"] == pytest.approx(1 / 4)
    assert reuse["agreement"]["top_1"]["all"]["mean"] == 0
    share = {"n": 4, "mean": 1, "low": pytest.approx(0.025 ** (1 / 4)), "high": 1, "difference": None}
    assert blend["agreement"]["top_1"]["all"] == share  # however rows are drawn, 4 of 4 stays 4 of 4
    assert reuse["agreement"]["same_answer"]["all"]["mean"] == 1  # as many letters: the ids of this test
    assert reuse["agreement"]["equal_tokens"]["all"]["mean"] == 1
    assert blend["agreement"]["equal_tokens"]["all"]["mean"] == 0.75  # one of four answers differs, at once
    assert blend["agreement"]["same_answer"]["by_category"]["cross"]["mean"] == 0.5
    # Every cell is written with its scores
    found = evaluation(ROWS)
    cells = with_cells(summary, found, SCORERS)["cells"]
    assert cells[2]["cells"][0]["scores"] == {"em": 0, "f1": 0}
    assert cells[2]["cells"][2]["scores"] == {"em": 1, "f1": 1}
    assert "scores" not in cells[3]["cells"][0]
    # Tables name every method and figure
    text = rendered(summary)
    for part in (
        "Exact match",
        "F1 by words",
        "blend hkvd gradual r=0.3",
        "66.7 [9.4, 99.2]",
        "+33.3",
        "cross",
        "1st token",
    ):
        assert part in text
    # Eighty columns show every figure whole, of longer names as well
    longer = {method.label.name: method.label.name.replace("hkvd gradual", "hybrid @1,2") for method in METHODS}
    labels = tuple(replace(method.label, name=longer[method.label.name]) for method in METHODS)
    rows = [replace(of, cells=[replace(c, method=longer[c.method]) for c in of.cells]) for of in ROWS]
    text = rendered(summarise(Evaluation({"model": "tiny"}, labels, (None,), rows), SCORERS))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in ("compute, %", "tokens", "KL", "+33.3 [+0.0, +100.0]", "75.0"):
        assert part in text


def test_what_a_run_left_out_does_not_have_and_mixed_is_said() -> None:
    skipped = replace(ROWS[0], number=4, cells=[replace(c, skipped="too long") for c in ROWS[0].cells[3:]])
    cut = replace(ROWS[0], number=5, cells=[], too_long=[(None, "the prompt has 900 tokens")])
    missed = replace(ROWS[0], number=6, cells=[replace(c, missed_tokens=7) for c in ROWS[0].cells[1:2]])
    summary = summarise(evaluation([*ROWS, skipped, cut, missed]), SCORERS)
    assert notes(summary) == [
        "1 of 7 rows have no gold answers and are not scored",
        "1 of 7 prompts exceed the model's context and were skipped",
        "reuse: 1 rows missed passages in the store; enlarge the store",
        "blend hkvd gradual r=0.3: 1 rows skipped: a prompt of its own exceeds the context, or the model overflowed",
    ]
    assert [method["rows"] for method in summary["methods"]] == [4, 5, 4, 4]
    # Rows that are all alike give no interval
    alike = summarise(evaluation([ROWS[0]]), SCORERS)
    assert "has the same value in all rows" in notes(alike)[-1] and "+0.0 [" not in rendered(alike)
    assert alike["methods"][2]["scores"]["f1"]["all"]["difference"] == {"n": 1, "mean": 0, "low": None, "high": None}
    # Without any gold answer agreement is still reported
    rows = [replace(row, answers=[]) for row in ROWS]
    summary = summarise(evaluation(rows), SCORERS)
    assert summary["methods"][0]["scores"]["em"]["all"] is None
    assert "there are no scores" in notes(summary)[0]
    text = rendered(summary)
    assert "Exact match" not in text and "Agreement with full recompute" in text
    # A run without full has no differences
    labels = tuple(method.label for method in METHODS[1:])
    rows = [replace(row, cells=row.cells[1:]) for row in ROWS]
    summary = summarise(Evaluation({"model": "tiny"}, labels, (None,), rows), SCORERS)
    reuse = summary["methods"][0]
    assert reuse["speedup"] is None
    assert reuse["scores"]["em"]["all"]["difference"] is None
    assert reuse["agreement"]["same_answer"]["all"] is None
    assert rendered(summary)
    # Times of several machines
    rows = [replace(of, machine="a processor, 2 threads" if of.number == 3 else "a processor, 1 thread") for of in ROWS]
    assert summarise(evaluation(rows), SCORERS)["machines"] == {"a processor, 1 thread": 3, "a processor, 2 threads": 1}
    (line,) = [line for line in notes(summarise(evaluation(rows), SCORERS)) if "times" in line]
    assert "a processor, 2 threads: 1 rows" in line
    assert "quality is not affected" in line
    same = [replace(of, machine="a processor, 1 thread") for of in ROWS]
    assert not any("times" in line for line in notes(summarise(evaluation(same), SCORERS)))


def test_plots_are_drawn_for_what_there_is(tmp_path: Path) -> None:
    # Plots are drawn for what there is
    files = draw(summarise(evaluation(ROWS), SCORERS), tmp_path, data="rows.json")
    assert [drawn.name for drawn in files] == [
        f"{s}-{axis}.png" for s in ("em", "f1") for axis in ("ratio", "ttft", "compute")
    ]
    assert all(drawn.read_bytes()[:4] == b"\x89PNG" for drawn in files)
    # Without scores agreement is drawn and chunks where they vary
    rows = [
        replace(
            row(0, None, ["a", "b", "a", "a"], "", 2), cells=[cell(i, "a", 1, 1, k) for k in (2, 4) for i in range(4)]
        )
    ]
    files = draw(summarise(evaluation(rows, (2, 4)), SCORERS), tmp_path)
    assert [drawn.name for drawn in files] == [f"top_1-{axis}.png" for axis in ("ratio", "ttft", "compute", "chunks")]


@pytest.mark.filterwarnings("error")
def test_numbers_of_passages_that_never_fitted_are_not_drawn(tmp_path: Path) -> None:
    rows = [row(0, "a", ["a", "b", "a", "a"], "", 2), row(1, "a", ["a", "a", "a", "a"], "", 2)]
    files = draw(summarise(evaluation(rows, (2, 9)), SCORERS), tmp_path)
    assert "em-compute.png" in {drawn.name for drawn in files}
    nothing = [replace(of, cells=[], too_long=[(2, "long")]) for of in rows]
    assert draw(summarise(evaluation(nothing, (2,)), SCORERS), tmp_path) == []


# ---- the demo: answers follow from the order of the passages, and what is shown from the answers given --------


DEMO_METHODS = (
    Label("full recompute", "full", "full"),
    Label("prefix caching", "prefix", "prefix"),
    Label("full reuse", "reuse", "reuse"),
    Label("blend", "blend", "blend"),
    Label("HKVD, gradual, r = 0.15", "blend", "gradual", "hkvd", 0.15, (1, 2, 3, 4)),
    Label("HKVD, one check, r = 0.15", "blend", "one check", "hkvd", 0.15, (1,)),
)


@pytest.fixture(scope="module")
def demo() -> list[QuestionRow]:
    return demo_questions(seed=0)


def test_the_demos_questions(demo: list[QuestionRow]) -> None:
    # Every question has the same passages in another order
    stored = sorted(demo[0].passages, key=lambda text: text.title)
    assert [text.title for text in stored] == [f"passage {number}" for number in range(1, 9)]
    assert [row.category for row in demo] == [*CATEGORIES] * 4
    assert len({row.passages for row in demo}) == len(demo)
    for row in demo:
        assert sorted(row.passages, key=lambda text: text.title) == stored
    assert len({row.question for row in demo}) == len(demo)
    # For "The boot belongs to him.", the last name of that kind in the preceding text.
    for row in demo:
        (answer,), text = row.answers, " ".join(passage.text for passage in row.passages)
        if row.category == "unanswerable":
            assert answer == "unknown"
            continue
        if row.category in ("cross", "local"):
            thing = row.question.split()[-1].rstrip("?")
            before, after = text.split(f"The {thing} ", 1)
            case = after.split(".")[0].split()[-1]
            kind = next(kind for kind, words in lexicon.OBJECT_CASE.items() if words[-1] == case)
            names = [word.strip(".") for word in before.split()]
            assert answer == [name for name in names if lexicon.KIND_OF.get(name) == kind][-1]
    # A seed determines the demo
    assert demo_questions(0) == demo
    assert set(demo_questions(1)[0].passages).isdisjoint(demo[0].passages)
    assert demo_questions(0, 2) == demo[: 2 * len(CATEGORIES)] == demo_questions(0, 12)[: 2 * len(CATEGORIES)]
    for count in (0, 13, -1):
        with pytest.raises(InvalidInputError, match=f"1 to 12 questions of each category, not {count}"):
            demo_questions(0, per_category=count)
    for seed in (-1, 10):
        with pytest.raises(InvalidInputError, match=f"seeds 0 to 9, not {seed}"):
            demo_questions(seed)


@pytest.mark.parametrize("seed", range(5))
def test_the_example_shows_the_antecedent_and_prompts_fit_the_model(seed: int) -> None:
    demo = demo_questions(seed)
    example = find_example(demo)
    titles = [text.title for text in example["row"].passages]
    (above, antecedent), (below, stated) = example["antecedent"], example["stated"]
    (owner,), thing = example["row"].answers, example["row"].question.split()[-1].rstrip("?")
    pronoun = " ".join(lexicon.OBJECT_CASE[lexicon.KIND_OF[owner]])
    assert titles.index(above) < titles.index(below)
    assert f" [{owner}]" in antecedent
    assert stated.endswith(f" [{pronoun}].")
    assert stated.startswith(f"The {thing} ")
    texts = {text.title: text.text for text in demo[0].passages}
    for title, sentence in (example["antecedent"], example["stated"]):
        assert sentence.replace("[", "").replace("]", "") in texts[title]
    assert example["elsewhere"] not in ("unknown", owner)
    tokenizer = build_tokenizer()
    for row in demo_questions(seed, 1):
        text = "\n\n".join(passage.text for passage in row.passages) + f"\n\n{row.question}"
        assert 1700 < len(tokenizer.encode(text).ids) < MAX_POSITIONS - 16


# ---- results ----------------------------------------------------------------------------------------------
def demo_evaluation(rows: list[tuple[str, str]]) -> dict[str, Any]:
    """Rows of (category, answers): one letter per method, r(ight) or w(rong)."""
    seconds = {
        "full recompute": 4.0,
        "prefix caching": 4.0,
        "full reuse": 0.5,
        "blend": 1.0,
        "HKVD, gradual, r = 0.15": 2.0,
        "HKVD, one check, r = 0.15": 2.0,
    }
    found = []
    for number, (category, answers) in enumerate(rows):
        cells = [
            Cell(
                method=label.name,
                top_k=None,
                chunks=8,
                answer="Vaden" if answer == "r" else "Karin",
                ttft_s=seconds[label.name],
                total_compute=seconds[label.name] / 4,
                loaded_tokens=0 if label.kind in ("full", "prefix") else 200,
                recomputed_tokens=30 if label.kind == "blend" else 0,
            )
            for label, answer in zip(DEMO_METHODS, answers, strict=True)
        ]
        found.append(RowResult(number, str(number), category, ["Vaden"], cells))
    whole = Evaluation({"model": "m"}, DEMO_METHODS, (None,), found)
    return with_cells(summarise(whole, [ExactMatch()]), whole, [ExactMatch()])


def test_results_by_method() -> None:
    found = demo_evaluation([("direct", "rrrrrw"), ("cross", "rrwrww"), ("cross", "rwwrrr")])
    full, prefix, reuse, blend, hkvd, one_check = method_figures(found)
    scores = [method["score"] for method in (full, prefix, reuse, blend, hkvd, one_check)]
    assert scores == [(3, 3), (2, 3), (1, 3), (3, 3), (2, 3), (1, 3)]
    assert hkvd["right"]["cross"] == [False, True]
    assert (blend["title"], hkvd["title"]) == ("blend", "HKVD, gradual, r = 0.15")
    assert (blend["speedup"], reuse["speedup"]) == (4.0, 8.0)
    assert [method["recomputed"] for method in (full, prefix, reuse, blend)] == [None, None, 0.0, 0.15]
    assert hkvd["compute"] == 0.5
    # Rows that show the difference come first
    answers = ("rrrrrr", "rrwwww", "rrwrrr", "rrwwww", "wwwwww")
    rows = list(zip(("direct", "cross", "cross", "chain", "chain"), answers, strict=True))
    assert by_difference(demo_evaluation(rows)) == [2, 1, 3, 0, 4]
    plain = demo_evaluation([("direct", "wwwwww"), ("direct", "rrrrrr"), ("local", "rrrrrr")])
    assert by_difference(plain) == [1, 2, 0]
    # The methods themselves
    own = demo_methods(BlendConfig(selector="query", recompute_ratio=0.1), 0.15)
    assert [method.label for method in own] == list(DEMO_METHODS)
    same = demo_methods(BlendConfig(), 0.15)
    assert [method.label.name for method in same] == [label.name for label in DEMO_METHODS if label.name != "blend"]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_picture(count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cacheblend.evaluation.demo import draw_demo_plot

    right = {category: [index % 2 == 0 for index in range(count)] for category in CATEGORIES}
    common = {"right": right, "score": (7, 7 * count)}
    methods = [
        {"title": "full recompute", "kind": "full", "ttft_s": 1.0, "speedup": 1.0, "compute": 1.0, **common},
        {"title": "x", "kind": "gradual", "ttft_s": 0.3, "speedup": 3.0, "compute": 0.2, **common},
    ]
    draw_demo_plot(methods, tmp_path / "a.svg", title="The title", remark="The remark")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("The title", "The remark", "300 ms", "3.0 x faster, 20 % computed", f"/ {7 * count}"):
        assert f"<!-- {text} -->" in drawn
