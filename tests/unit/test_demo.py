"""The demo's demo: what is asked follows from the order; what is shown follows from the answers."""

from pathlib import Path

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation import Evaluation, Label, summarise
from cacheblend.evaluation.demo import CATEGORIES, Demo, draw_story, find_example
from cacheblend.evaluation.demo_results import Standing, demo_methods, standings, telling_rows
from cacheblend.evaluation.records import Cell, RowResult
from cacheblend.evaluation.scorers import ExactMatch
from cacheblend.nano import lexicon
from cacheblend.nano.tokenizer import MAX_POSITIONS, build_tokenizer

METHODS = (
    Label("full", "full", "full"),
    Label("prefix", "prefix", "prefix"),
    Label("reuse", "reuse", "reuse", "none", 0.0),
    Label("blend profile", "blend", "profile", "profile", 0.1, (1,)),
    Label("blend hkvd @1 r=0.15", "blend", "hkvd @1", "hkvd", 0.15, (1,)),
)


@pytest.fixture(scope="module")
def demo() -> Demo:
    return draw_story(seed=0)


def test_a_seed_is_a_story(demo: Demo) -> None:
    assert draw_story(0) == demo
    assert draw_story(1).told != demo.told
    with pytest.raises(InvalidInputError, match="at least 1"):
        draw_story(0, per_category=0)


def test_the_same_passages_stand_in_other_orders(demo: Demo) -> None:
    stored, rows = demo.passages(), demo.rows()
    assert [row.category for row in rows] == [*CATEGORIES] * 4
    assert len({asked.order for asked in demo.asked}) == len(rows)
    for asked, row in zip(demo.asked, rows, strict=True):
        assert sorted(row.passages, key=lambda text: text.title) == stored
        assert [text.text for text in row.passages] == asked.scene.texts()
    assert len({row.question for row in rows}) == len(rows)


def test_the_right_answer_is_that_of_the_order(demo: Demo) -> None:
    """Of "The boot belongs to him." whoever of his kind stands last in front of it, by searching the text."""
    for asked, row in zip(demo.asked, demo.rows(), strict=True):
        (answer,), text = row.answers, " ".join(passage.text for passage in row.passages)
        if row.category == "unanswerable":
            assert answer == "unknown"
            continue
        if row.category in ("cross", "local"):
            (thing,) = asked.question.owners
            before, told = text.split(f"The {thing} ", 1)
            case = told.split(".")[0].split()[-1]
            kind = next(kind for kind, words in lexicon.OBJECT_CASE.items() if words[-1] == case)
            names = [word.strip(".") for word in before.split()]
            assert answer == [name for name in names if lexicon.KIND_OF.get(name) == kind][-1]


@pytest.mark.parametrize("seed", range(5))
def test_prompts_fit_the_model(seed: int) -> None:
    tokenizer = build_tokenizer()
    for row in draw_story(seed, 1).rows():
        text = "\n\n".join(passage.text for passage in row.passages) + f"\n\n{row.question}"
        assert 1700 < len(tokenizer.encode(text).ids) < MAX_POSITIONS - 16


@pytest.mark.parametrize("seed", range(5))
def test_the_example_shows_who_is_meant(seed: int) -> None:
    demo = draw_story(seed)
    example = find_example(demo)
    titles = [f"passage {index + 1}" for index in example.asked.order]
    assert titles.index(example.named.title) < titles.index(example.told.title)
    assert example.asked.question.answer == (example.owner,)
    assert example.named.word == example.owner
    assert example.owner in example.named.sentence
    assert example.told.sentence.startswith(f"The {example.thing} ")
    assert example.told.sentence.endswith(f"{example.told.word}.")
    assert example.elsewhere not in ("unknown", example.owner)


def test_methods() -> None:
    own = demo_methods(BlendConfig(selector="query", recompute_ratio=0.1), 0.15)
    assert [method.label.name for method in own] == [label.name for label in METHODS]
    same = demo_methods(BlendConfig(), 0.15)
    assert [method.label.name for method in same] == [label.name for label in METHODS if label.selector != "profile"]


# ---- results ----------------------------------------------------------------------------------------------


def evaluation(rows: list[tuple[str, str]]) -> Evaluation:
    """Rows of (category, answers): a letter a method, r(ight) or w(rong)."""
    seconds = {"full": 4.0, "prefix": 4.0, "reuse": 0.5, "blend profile": 1.0, "blend hkvd @1 r=0.15": 2.0}
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
    return Evaluation({"model": "m"}, METHODS, (None,), found)


def test_standings() -> None:
    found = evaluation([("direct", "rrrrr"), ("cross", "rrwrw"), ("cross", "rwwrr")])
    full, prefix, reuse, blend, hkvd = standings(found, summarise(found, [ExactMatch()], resamples=2))
    assert [method.score for method in (full, prefix, reuse, blend, hkvd)] == [(3, 3), (2, 3), (1, 3), (3, 3), (2, 3)]
    assert hkvd.right["cross"] == [False, True]
    assert (blend.title, hkvd.title) == ("blend", "blend, HKVD r = 0.15")
    assert (blend.speedup, reuse.speedup) == (4.0, 8.0)
    assert (full.recomputed, prefix.recomputed, reuse.recomputed, blend.recomputed) == (None, None, 0.0, 0.15)
    assert hkvd.compute == 0.5


def test_rows_that_tell_the_most_come_first() -> None:
    rows = [("direct", "rrrrr"), ("cross", "rrwww"), ("cross", "rrwrr"), ("chain", "rrwww"), ("chain", "wwwww")]
    assert [row.number for row in telling_rows(evaluation(rows))] == [2, 3, 1, 0]
    plain = evaluation([("direct", "wwwww"), ("direct", "rrrrr"), ("local", "rrrrr")])
    assert [row.number for row in telling_rows(plain, 2)] == [1, 2]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_picture(count: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cacheblend.evaluation.demo_plot import draw_story_plot

    right = {category: [index % 2 == 0 for index in range(count)] for category in CATEGORIES}
    methods = [
        Standing("full recompute", "full", right, 1.0, 1.0, 1.0, None),
        Standing("x", "hkvd", right, 0.3, 3, 0.2, 0),
    ]
    draw_story_plot(methods, tmp_path / "a.svg", title="The title", remark="The remark")
    drawn = (tmp_path / "a.svg").read_text()
    for text in ("The title", "The remark", "300 ms", "3.0 x faster, 20 % computed", f"/ {7 * count}"):
        assert f"<!-- {text} -->" in drawn
