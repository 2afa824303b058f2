"""The texts that ship beside the model: they are what the generator draws, and their answers are right."""

import json
from pathlib import Path

import pytest

from cacheblend.evaluation.demo import CATEGORIES, DATA, demo_questions
from cacheblend.nano.examples import NOTES, notes
from cacheblend.nano.language import Sentence
from cacheblend.nano.scene_reader import read_scene
from lab.nano import data
from lab.nano.data import FURTHER, ROUNDS, SEEDS, draw_demo, draw_notes, record
from lab.nano.scenes import Style


@pytest.mark.parametrize("seed", SEEDS)
def test_the_demo_that_ships_is_what_is_drawn(seed: int) -> None:
    drawn = draw_demo(seed, ROUNDS, FURTHER)
    assert demo_questions(seed, ROUNDS + FURTHER) == drawn
    assert draw_demo(seed) == drawn[: ROUNDS * len(CATEGORIES)]


def test_the_notes_that_ship_are_what_is_drawn() -> None:
    assert list(notes()) == draw_notes()


@pytest.mark.parametrize("seed", [3, 11])
def test_every_answer_is_what_the_words_say_in_that_order(seed: int) -> None:
    """Also of styles that repeat themselves, and beyond the rounds that choose the scene."""
    for row in draw_demo(seed, 1, 3, Style(3, 60, dense=1.0, hard=0.4, chains=0.9)):
        passages = [
            [Sentence([*part.split(), "."]) for part in text.text.removesuffix(".").split(". ")]
            for text in row.passages
        ]
        owners = {fact.thing: fact.owner for fact in read_scene(passages).facts}
        things = [word.rstrip("?") for word in row.question.split() if word.rstrip("?") in owners]
        if row.category != "unanswerable":
            assert row.answers[0].partition(":")[0] == " and ".join(owners[thing] for thing in things)


def test_both_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / name for name in ("NOTES", "DATA")}
    for name, file in files.items():
        monkeypatch.setattr(data, name, file)
    monkeypatch.setattr(data, "SEEDS", (1,))
    data.main()
    assert files["NOTES"].read_bytes() == NOTES.read_bytes()
    assert files["DATA"].read_text().splitlines() == [DATA.read_text().splitlines()[1]]
    assert json.loads(files["DATA"].read_text()) == record(1)
