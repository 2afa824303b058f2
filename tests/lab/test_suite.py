"""The suite: its figures from cells made by hand; on a tiny model equal compute, seeds, the gate, the command."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.profile import Measurement, Profile
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import Hkvd, RandomRows, Selector
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.settings import PROFILE_NAME, write_profile
from cacheblend.engines.tokens import Passage
from cacheblend.evaluation import plots
from cacheblend.evaluation.records import ROWS, Cell, RowResult
from cacheblend.evaluation.runner import Evaluation, Settings
from command_line import Run, runner
from lab.cli import main
from lab.nano.questions import Prompts, draw_questions
from lab.nano.scenes import CATEGORIES
from lab.suite import suite as suites
from lab.suite.figures import ACROSS, BARS, at_equal_compute, figures
from lab.suite.suite import (
    ABLATIONS,
    HOP_RATIOS,
    SWEEP_RATIOS,
    MainPlan,
    Suite,
    equal_compute_ratio,
    lean_selector,
    measured_share,
    plan_main,
    run_main,
    sweep_methods,
)
from tiny_folder import TinyShape, build_tiny

METHODS = ("full", "reuse", "blend", "blend lean", "random rows")
COMPUTE = {"full": 1.0, "reuse": 0.02, "blend": 0.16, "blend lean": 0.11, "random rows": 0.162}
PER_CATEGORY = 10
HELD = {"holds": True, "rows": 800}


def make_rows(wrong: dict[tuple[str, str], int] | None = None, without: tuple[str, ...] = ()) -> list[RowResult]:
    """All right but the first so many of (method, category); no cell of the categories in `without`."""
    plain = {("reuse", "cross"): 8} | {("random rows", category): 7 for category in ACROSS}
    wrong = plain | (wrong or {})
    rows = []
    for category in CATEGORIES:
        for number in range(PER_CATEGORY):
            cells = [
                Cell(method, None, 3, answer="no" if number < wrong.get((method, category), 0) else "yes")
                for method in METHODS
                if category not in without
            ]
            cells = [Cell(**asdict(cell) | {"total_compute": COMPUTE[cell.method]}) for cell in cells]
            rows.append(RowResult(len(rows), f"1-{len(rows)}", category, ["yes"], cells))
    return rows


def test_every_bar_has_a_figure_and_holds_where_all_is_well() -> None:
    found = figures(make_rows(), HELD)
    assert set(found["bars"]) == set(BARS)
    assert set(found["figures"]) == {*BARS, "random_compute"}
    assert all(bar["ok"] is True for bar in found["bars"].values())
    assert found["figures"]["full_min"] == 100
    assert found["figures"]["reuse_cross_loss"] == 80
    assert found["figures"]["blend_over_random"] == 70
    assert found["figures"]["random_compute"] == pytest.approx(16.2)
    assert found["figures"]["gate_holds"] is True
    assert found["bars"]["gate_holds"]["n"] == 800
    assert found["bars"]["blend_compute"] == {
        "value": pytest.approx(16), "bar": 17, "at": "most", "ok": True,
        "low": pytest.approx(16), "high": pytest.approx(16), "n": 100,
    }  # fmt: skip


def test_figures_of_cells() -> None:
    # A worst figure carries its category and that one s interval
    bar = figures(make_rows({("blend", "chain"): 1, ("blend", "local"): 2}), HELD)["bars"]["blend_worst_loss"]
    assert (bar["value"], bar["category"], bar["n"], bar["ok"]) == (20, "local", PER_CATEGORY, False)
    assert 0 <= bar["low"] < 20 < bar["high"] <= 60
    # Intervals of differences are paired
    wrong = {("full", "cross"): 5, ("reuse", "cross"): 5}  # the same rows
    bar = figures(make_rows(wrong), HELD)["bars"]["reuse_cross_loss"]
    assert (bar["value"], bar["low"], bar["high"], bar["ok"]) == (0, 0, 0, False)
    # A category without a cell makes its figures none and no other
    found = figures(make_rows(without=("chain",)), HELD)
    unknown = {key for key, value in found["figures"].items() if value is None}
    assert unknown == {
        "full_hard_chain_min", "blend_compute", "blend_loss", "blend_worst_loss", "blend_over_random",
        "random_compute", "lean_compute", "lean_loss",
    }  # fmt: skip
    assert all(found["bars"][key]["ok"] is None and found["bars"][key]["reason"] for key in unknown & set(BARS))
    # A skipped cell is no cell
    rows = make_rows()
    skipped = [
        RowResult(row.number, row.id, row.category, row.answers, [Cell("full", None, 3, skipped="too long")])
        for row in rows
    ]
    assert all(value is None for key, value in figures(skipped, HELD)["figures"].items() if key != "gate_holds")
    # What was not run is none with a reason
    found = figures([], None)
    assert set(found["figures"].values()) == {None}
    assert {bar["reason"] for bar in found["bars"].values()} == {"this part was not run"}
    no_profile = figures([], {"reason": "no profile"})["bars"]["gate_holds"]
    assert (no_profile["value"], no_profile["ok"], no_profile["reason"]) == (None, None, "no profile")
    # A gate that does not hold is a missed bar
    assert figures(make_rows(), {"holds": False, "rows": 20})["bars"]["gate_holds"]["ok"] is False


@pytest.mark.parametrize("category", ["chain2", "chain3", "list"])
def test_no_category_is_spared(category: str) -> None:
    found = figures(make_rows({("blend", category): 4, ("blend lean", category): 4}), HELD)["bars"]
    assert (found["blend_worst_loss"]["value"], found["blend_worst_loss"]["category"]) == (40, category)
    for key in ("blend_worst_loss", "blend_loss", "lean_loss"):
        assert found[key]["ok"] is False
    assert found["lean_loss"]["value"] == 4


def test_equal_compute_is_read_between_neighbours_and_never_beyond() -> None:
    def method(family: str, compute: float | None, mean: float) -> dict[str, Any]:
        scores = {"em": {"all": {"mean": mean}, "by_category": {"cross": {"mean": mean / 2}, "local": None}}}
        return {"kind": "blend", "family": family, "total_compute": compute, "scores": scores}

    methods = [method("a", 0.3, 0.9), method("a", 0.2, 0.5), method("b", 0.5, 0.7), method("b", None, 0.0)]
    found = at_equal_compute({"methods": methods, "categories": ["cross", "local"]})
    assert found[0]["family"] == "a"
    assert found[0]["all"] == [None, *map(pytest.approx, (50, 70, 90))]
    assert found[0]["by_category"]["cross"] == [None, *map(pytest.approx, (25, 35, 45))]
    assert found[0]["by_category"]["local"] == [None] * 4
    assert found[1]["all"] == [None] * 4


def test_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "SWEEP_RATIOS", SWEEP_RATIOS)
    monkeypatch.setattr(suites, "HOP_RATIOS", HOP_RATIOS)
    # The sweep has every selector at real ratios
    labels = [method.label for method in sweep_methods()]
    by_family: dict[str, list[float | None]] = {}
    for label in labels:
        by_family.setdefault(label.family, []).append(label.ratio)
    four = list(SWEEP_RATIOS)
    for family in (
        "hkvd gradual",
        "hkvd @1",
        "hkvd @2",
        "hkvd:measure=v @1",
        "hybrid @2",
        "hybrid @4",
        "head",
        "random",
    ):
        assert by_family[family] == four
    following = [family for family in by_family if family.startswith("query:") and "head_rows=" in family]
    assert len(following) == 1 + sum(map(len, ABLATIONS.values()))
    assert all(by_family[family] == list(HOP_RATIOS) for family in following)
    assert len([family for family in by_family if family.startswith("hybrid:early_ratio=")]) == 3
    assert set(by_family["query"]) > set(four)
    assert len({label.name for label in labels}) == len(labels)
    # The lean profile that ships is a blend of the question
    assert lean_selector().question_rows > 0
    # Parts are sized by the rows of a category
    assert (Suite().sweep_per_category, Suite().gate_rows) == (100, 802)
    assert (Suite(1).sweep_per_category, Suite(1).gate_rows) == (1, 20)
    # An unknown part is refused by name
    with pytest.raises(InvalidInputError, match="'swap'; choose from main, sweep, gate"):
        Suite(parts=("swap",))


# ---- on a tiny model ------------------------------------------------------------------------------------------------


SHAPE = TinyShape(layers=6, width=32, mlp_width=48, heads=4, kv_heads=2, vocab_size=400, context_length=1024)
SHORT = partial(draw_questions, prompts=Prompts(passages=(3, 4), tokens=(24, 40)))
ROWS_A_SEED = len(CATEGORIES)


@pytest.fixture(scope="module", autouse=True)
def small_suites(surroundings: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "draw_questions", SHORT)
        patch.setattr(suites, "SETTINGS", Settings(max_tokens=2))
        patch.setattr(suites, "CALIBRATION_ROWS", 8)
        patch.setattr(suites, "SWEEP_RATIOS", (0.1,))
        patch.setattr(suites, "HOP_RATIOS", (0.1,))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite") / "tiny-llama"
    texts = [text.text for row in SHORT(70, 2) for text in row.passages]
    build_tiny(folder, texts, SHAPE)
    return folder


@pytest.fixture(scope="module")
def engine(built: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(built, device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def plan(engine: BlendEngine) -> MainPlan:
    return plan_main(engine, Suite(1))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the suite in this process."""
    monkeypatch.setenv("COLUMNS", "80")
    return runner(capsys, "suite", main=main)


# ---- equal compute ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", [Hkvd((1,), (0.15,)), Query(0.2)], ids=["hkvd", "query"])
def test_random_rows_cost_what_the_blend_costs_and_at_most_half_a_point_more(
    engine: BlendEngine, selector: Selector
) -> None:
    # Random rows cost what the blend costs and at most half a point more
    ratio, _ = equal_compute_ratio(engine, selector)
    rows = SHORT(suites.CALIBRATION_SEED, 1, per_scene=1)
    blend, _ = measured_share(engine, rows, selector)
    random_rows, _ = measured_share(engine, rows, RandomRows(ratio))
    assert 0 <= random_rows - blend <= 0.005
    assert 0 < ratio < 1


def test_a_prompt_over_the_context_is_left_out_of_the_measurement(engine: BlendEngine) -> None:
    rows = SHORT(suites.CALIBRATION_SEED, 1, per_scene=1)
    long = QuestionRow("Who?", (Passage("rope " * 5000),), ("x",))
    assert measured_share(engine, [*rows, long], Query(0.2))[0] == measured_share(engine, rows, Query(0.2))[0]


def test_labels_say_the_real_ratio(plan: MainPlan) -> None:
    ratios = {method.label.name: method.label.ratio for method in plan.methods}
    assert ratios["blend"] == ratios[suites.PAPER] == 0.15  # without a profile the blend is the defaults'
    assert ratios[suites.CODE] == 0.16
    lean = suites.lean_selector()
    assert ratios["blend lean"] == (lean.ratios[-1] if isinstance(lean, Hybrid) else getattr(lean, "ratio", None))
    assert 0 < (ratios["random rows"] or 0) < 1


# ---- seeds, in runs of their own --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_runs(
    engine: BlendEngine, plan: MainPlan, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Evaluation, Evaluation]:
    """Seed 2, then both, into one folder."""
    out = tmp_path_factory.mktemp("two")
    first, last = (run_main(engine, Suite(1, seeds=seeds), plan, out) for seeds in ((2,), (2, 1)))
    return first, last


def test_seeds_in_runs_of_their_own(
    two_runs: tuple[Evaluation, Evaluation], engine: BlendEngine, plan: MainPlan, tmp_path: Path
) -> None:
    # A seed that was run alone is read by a run of all
    first, last = two_runs
    assert (first.config["seeds"], len(first.rows), first.resumed) == ([2], ROWS_A_SEED, 0)
    assert (last.config["seeds"], last.resumed) == ([1, 2], ROWS_A_SEED)
    assert [row.id for row in last.rows] == [f"{seed}-{n}" for seed in (1, 2) for n in range(ROWS_A_SEED)]
    assert last.rows[ROWS_A_SEED:] == first.rows
    assert first.folder == last.folder
    # An interrupted seed goes on and says what was torn
    whole = two_runs[1]
    assert whole.folder is not None
    folder = shutil.copytree(whole.folder, tmp_path / whole.folder.name)
    (file,) = (path / ROWS for path in folder.glob("seed-1-*"))
    file.write_bytes(file.read_bytes()[:-20])
    other = run_main(engine, Suite(1, seeds=(2,)), plan, tmp_path)
    assert (other.config["seeds"], other.resumed) == ([2], ROWS_A_SEED)
    again = run_main(engine, Suite(1, seeds=(1, 2)), plan, tmp_path)
    assert (again.torn, again.resumed) == (True, 2 * ROWS_A_SEED - 1)
    answers = [[[cell.token_ids for cell in row.cells] for row in found.rows] for found in (whole, again)]
    assert answers[0] == answers[1]
    # Another plan has a folder of its own
    assert two_runs[0].folder is not None
    out = shutil.copytree(two_runs[0].folder.parent, tmp_path / "out")
    other = MainPlan(plan.methods[:1], plan.config | {"methods": [repr(plan.methods[0])]})
    found = run_main(engine, Suite(1, seeds=(1,)), other, out)
    assert found.folder is not None
    assert found.folder.name != two_runs[0].folder.name
    assert (found.config["seeds"], found.resumed) == ([1], 0)


# ---- the gate ---------------------------------------------------------------------------------------------


def profiled(built: Path, folder: Path, engine: BlendEngine, **settings: Any) -> Path:
    """A copy of the model with a profile that was held to 60 %."""
    model = shutil.copytree(built, folder / "tiny-llama")
    measured = Measurement(threshold=0.6, confidence=0.95)
    write_profile(model / PROFILE_NAME, Profile(engine.fingerprint, settings, measured))
    return model


def test_the_gate_s_setting_is_checked_once_and_kept(
    built: Path, engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = profiled(built, tmp_path, engine, selector="hkvd", recompute_ratio=1.0)
    steps: list[tuple[int, int]] = []
    with BlendEngine.from_pretrained(model, device="cpu") as opened:
        found = suites.check_gate(opened, Suite(1), tmp_path / "out", lambda *step: steps.append(step))
        assert found["holds"] is True
        assert (found["threshold"], found["f1_margin"]) == (0.6, 0.01)
        assert found["rows"] == found["f1_rows"] == found["agreed"] == 20  # at least 20, as many of each category
        assert steps[-1] == (20, 20)
        monkeypatch.setattr(suites, "check", None)  # would be an error if it were called
        assert suites.check_gate(opened, Suite(1), tmp_path / "out") == found
        (folder,) = (tmp_path / "out").iterdir()
        (folder / ROWS).write_text("{}\n")
        with pytest.raises(InvalidInputError, match="line 1: damaged"):
            suites.check_gate(opened, Suite(1), tmp_path / "out")


def test_without_a_setting_there_is_nothing_to_check(built: Path, engine: BlendEngine, tmp_path: Path) -> None:
    found = suites.check_gate(engine, Suite(1), tmp_path)
    assert list(found) == ["reason"]
    assert "has no profile" in found["reason"]
    with BlendEngine.from_pretrained(profiled(built, tmp_path, engine, selector="all"), device="cpu") as opened:
        assert "disables blending" in suites.check_gate(opened, Suite(1), tmp_path)["reason"]


# ---- the command ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_reports_every_part_and_a_missed_bar_is_exit_code_1(
    built: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(plots, "draw", lambda summary, folder, data: drawn.append(data) or [])  # takes seconds
    file = tmp_path / "nano.json"
    where = ("--model", built, "--device", "cpu", "--out", tmp_path / "out")
    done = run("nano", "--limit", 1, "--suite-seed", 5, *where, "--json-file", file)
    assert done.code == 1  # random weights know no answer
    found = json.loads(file.read_text())
    assert set(found["bars"]) == set(BARS)
    assert found["figures"]["full_min"] == 0
    assert abs(found["figures"]["random_compute"] - found["figures"]["blend_compute"]) < 2
    assert (found["figures"]["gate_holds"], list(found["gate"])) == (None, ["reason"])
    assert (found["suite"]["seeds"], found["suite"]["parts"]) == ([5], ["main", "sweep", "gate"])
    assert [len(part["cells"]) for part in (found, found["sweep"])] == [ROWS_A_SEED, ROWS_A_SEED]
    labels = [method.label for method in suites.sweep_methods()]
    families = {label.family for label in labels if label.kind == "blend"}
    assert {line["family"] for line in found["sweep"]["at_equal_compute"]} == families
    assert all(line in done.out for line in ("full_min", "missed", "unknown"))
    assert max(map(len, done.out.splitlines())) <= 120
    folders = sorted(path.name.rsplit("-", 1)[0] for path in (tmp_path / "out").iterdir())
    assert folders == ["suite-nano", "suite-nano-sweep"]
    assert drawn == ["the suite nano, sweep", "the suite nano, main"]
    assert all((path / "summary.json").is_file() for path in (tmp_path / "out").iterdir())


def test_a_part_alone_is_judged_by_its_own_bars(built: Path, engine: BlendEngine, tmp_path: Path, run: Run) -> None:
    model = profiled(built, tmp_path, engine, selector="hkvd", recompute_ratio=1.0)
    where = ("--model", model, "--device", "cpu", "--out", tmp_path / "out")
    done = run("nano", "--limit", 1, "--part", "gate", *where, "--json")
    found = done.json
    assert done.code == 0
    assert found["figures"]["gate_holds"] is True
    assert found["figures"]["full_min"] is None
    assert found["sweep"] is None


@pytest.mark.parametrize(
    "given",
    [
        ("--methods", "full"), ("--selector", "hkvd"), ("--ratio", "0.15"), ("--check-layers", "1"), ("--scorer", "em"),
        ("--top-k", "2"), ("--template", "bare"), ("--templates", "x.toml"), ("--chat",), ("--store", "memory"),
        ("--anchor", "auto"), ("--max-tokens", "32"), ("--format", "auto"), ("--data", "x.jsonl"),
        ("--chunk-tokens", "512"),
    ],
    ids=lambda given: str(given[0]),
)  # fmt: skip
def test_an_option_that_the_suite_would_not_heed_is_refused_by_name(given: tuple[str, ...], run: Run) -> None:
    done = run("nano", *given)
    assert done.code == 2 and given[0] in done.err


@pytest.mark.parametrize(("given", "named"), [(("micro",), "'micro'"), (("nano", "--part", "swap"), "'swap'")])
def test_what_the_suite_does_not_have_is_refused(given: tuple[str, ...], named: str, run: Run) -> None:
    done = run(*given)
    assert done.code == 2 and named in done.err
