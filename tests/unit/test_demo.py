"""The demo: correct answers follow from the order of the passages, and what is shown from the answers given."""

from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.data import QuestionRow
from cacheblend.evaluation import Evaluation, Label, summarise, with_cells
from cacheblend.evaluation.demo import (
    CATEGORIES,
    by_difference,
    demo_methods,
    demo_questions,
    find_example,
    method_figures,
)
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.scorers import ExactMatch
from cacheblend.nano import lexicon
from lab.nano.tokenizer import MAX_POSITIONS, build_tokenizer

METHODS = (
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
def test_prompts_fit_the_model(seed: int) -> None:
    tokenizer = build_tokenizer()
    for row in demo_questions(seed, 1):
        text = "\n\n".join(passage.text for passage in row.passages) + f"\n\n{row.question}"
        assert 1700 < len(tokenizer.encode(text).ids) < MAX_POSITIONS - 16


@pytest.mark.parametrize("seed", range(5))
def test_the_example_shows_the_antecedent(seed: int) -> None:
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


def test_methods() -> None:
    own = demo_methods(BlendConfig(selector="query", recompute_ratio=0.1), 0.15)
    assert [method.label for method in own] == list(METHODS)
    same = demo_methods(BlendConfig(), 0.15)
    assert [method.label.name for method in same] == [label.name for label in METHODS if label.name != "blend"]


# ---- results ----------------------------------------------------------------------------------------------


def evaluation(rows: list[tuple[str, str]]) -> dict[str, Any]:
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
            for label, answer in zip(METHODS, answers, strict=True)
        ]
        found.append(RowResult(number, str(number), category, ["Vaden"], cells))
    whole = Evaluation({"model": "m"}, METHODS, (None,), found)
    return with_cells(summarise(whole, [ExactMatch()], resamples=2), whole, [ExactMatch()])


def test_results_by_method() -> None:
    found = evaluation([("direct", "rrrrrw"), ("cross", "rrwrww"), ("cross", "rwwrrr")])
    full, prefix, reuse, blend, hkvd, one_check = method_figures(found)
    scores = [method["score"] for method in (full, prefix, reuse, blend, hkvd, one_check)]
    assert scores == [(3, 3), (2, 3), (1, 3), (3, 3), (2, 3), (1, 3)]
    assert hkvd["right"]["cross"] == [False, True]
    assert (blend["title"], hkvd["title"]) == ("blend", "HKVD, gradual, r = 0.15")
    assert (blend["speedup"], reuse["speedup"]) == (4.0, 8.0)
    assert [method["recomputed"] for method in (full, prefix, reuse, blend)] == [None, None, 0.0, 0.15]
    assert hkvd["compute"] == 0.5


def test_rows_that_show_the_difference_come_first() -> None:
    answers = ("rrrrrr", "rrwwww", "rrwrrr", "rrwwww", "wwwwww")
    rows = list(zip(("direct", "cross", "cross", "chain", "chain"), answers, strict=True))
    assert by_difference(evaluation(rows)) == [2, 1, 3, 0, 4]
    plain = evaluation([("direct", "wwwwww"), ("direct", "rrrrrr"), ("local", "rrrrrr")])
    assert by_difference(plain) == [1, 2, 0]


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
