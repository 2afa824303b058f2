"""The words, scenes, encoding and rows of the shipped model; the texts that ship beside it are what is drawn."""

import json
import random
from pathlib import Path

import pytest

from cacheblend.data import read_questions
from cacheblend.data.questions import question_lines
from cacheblend.evaluation.demo import CATEGORIES as OF_THE_DEMO
from cacheblend.evaluation.demo import DATA, demo_questions
from cacheblend.nano import lexicon
from cacheblend.nano.examples import NOTES, notes
from cacheblend.nano.language import Scene, Sentence, read_scene, spell
from lab.nano import data
from lab.nano.data import FURTHER, ROUNDS, SEEDS, draw_demo, draw_notes, record
from lab.nano.encoding import LABELS, Encoder, draw_questions
from lab.nano.questions import Prompts
from lab.nano.questions import draw_questions as draw_rows
from lab.nano.recipe import Probe
from lab.nano.scenes import CATEGORIES, Style, draw_scene, questions_of
from lab.nano.tokenizer import SEPARATOR, SYSTEM_PROMPT, build_tokenizer, save_tokenizer

STYLE = Style(passages=5, tokens=64, dense=0.5, hard=0.4, chains=0.7)


def scenes(count: int, style: Style = STYLE) -> list[Scene]:
    rng = random.Random(7)
    return [draw_scene(rng, style) for _ in range(count)]


def test_every_word_is_one_token_at_the_start_and_inside() -> None:
    tokenizer = build_tokenizer()
    for word in lexicon.words():
        assert len(tokenizer.encode(word).ids) == 1, word
        assert len(tokenizer.encode(f" {word}").ids) == 1 or word in ".?:", word


@pytest.mark.parametrize("text", ["naïve café, 東京 🎉\n\n\n x", "<|end|> is text to nobody", "  two  spaces "])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    assert decoded == text


def test_the_tokenizer_is_the_same_every_time() -> None:
    assert build_tokenizer().to_str() == build_tokenizer().to_str()


def test_encoding_is_what_the_chat_template_gives(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    encoder, rng = Encoder(build_tokenizer()), random.Random(3)
    for scene in scenes(5):
        questions = draw_questions(scene, rng, 3, dict.fromkeys(CATEGORIES, 1.0))
        user = "".join(f"{text}{SEPARATOR}" for text in scene.texts())
        messages = [{"role": "system", "content": SYSTEM_PROMPT}]
        for question in questions:
            messages.append({"role": "user", "content": user + spell(question.words)})
            messages.append({"role": "assistant", "content": spell(question.answer)})
            user = ""
        wanted = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert encoder.example(scene, questions, system=True).ids == wanted


def test_gaps_move_positions_and_nothing_else() -> None:
    encoder, scene = Encoder(build_tokenizer()), scenes(1)[0]
    plain, apart = encoder.example(scene, []), encoder.example(scene, [], [0, 5, 0, 7, 1])
    assert apart.ids == plain.ids
    assert plain.positions == list(range(len(plain.ids)))
    assert apart.positions[-1] == plain.positions[-1] + 13
    assert all(b > a for a, b in zip(apart.positions, apart.positions[1:], strict=False))


def test_probes_are_where_the_fact_becomes_known() -> None:
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    names = {encoder.word(name) for names in lexicon.NAMES.values() for name in names}
    things = {encoder.word(thing) for thing in lexicon.OBJECTS}
    expected = {Probe.THING: things, Probe.VERDICT: {encoder.word("yes"), encoder.word("no")}}
    seen = set()
    for scene in scenes(20):
        example = encoder.example(scene, draw_questions(scene, rng, 4, {"cross": 1.0, "chain": 1.0, "comparison": 1.0}))
        for probe, index, token in example.probes:
            seen.add(probe)
            assert token in expected.get(probe, names | {encoder.word(lexicon.UNKNOWN)})
            if probe is Probe.CHAIN:
                assert example.ids[index] in things
            if probe is Probe.THING:
                assert token in example.ids[:index]
    assert seen == set(Probe)


def test_labels_mark_answers_only() -> None:
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    scene = scenes(1)[0]
    (question,) = draw_questions(scene, rng, 1, {"cross": 1.0})
    example = encoder.example(scene, [question])
    answers = [i for i, label in zip(example.ids, example.labels, strict=True) if LABELS[label] == "cross"]
    assert answers == [encoder.word(question.answer[0], first=True)]
    assert LABELS[example.labels[-1]] == "end"


def test_passages_keep_to_their_length() -> None:
    tokenizer = build_tokenizer()
    for tokens in (64, 256):
        for scene in scenes(10, Style(passages=3, tokens=tokens)):
            lengths = [len(tokenizer.encode(text).ids) for text in scene.texts()]
            assert all(tokens - 5 < length <= tokens for length in lengths), lengths


def test_categories_are_what_they_say() -> None:
    """Read off the text: where the antecedent stands, and whether the pronoun ends its sentence."""
    counts = dict.fromkeys(CATEGORIES, 0)
    for scene in scenes(60):
        where = {fact.thing: fact for fact in scene.facts}
        for number, passage in enumerate(scene.passages):
            for sentence in passage:
                for index, (thing, owner) in sentence.knows.items():
                    if not thing:
                        continue
                    fact = where[thing]
                    counts[fact.category] = counts.get(fact.category, 0) + 1
                    named_here = any(owner in other.words for other in passage)
                    named_before = any(owner in s.words for earlier in scene.passages[:number] for s in earlier)
                    assert fact.passage == number and fact.owner == owner
                    if fact.category == "direct":
                        assert sentence.words[index] == owner
                    if fact.category in ("cross", "cross-hard", "chain2", "chain3"):
                        assert named_before
                    if fact.category == "local":
                        assert named_here
                    if fact.category in ("cross", "local"):
                        assert index == len(sentence.words) - 2 and sentence.words[index] in ("him", "her", "firm")
                    if fact.category == "cross-hard":
                        assert index != len(sentence.words) - 2 or sentence.words[0] in ("He", "She", "The")
                    if fact.category == "unanswerable":
                        assert owner == lexicon.UNKNOWN
    assert all(counts[c] for c in CATEGORIES if c not in ("comparison", "list"))


def test_comparisons_join_two_passages_and_are_fair() -> None:
    verdicts = []
    for scene in scenes(40):
        where = {fact.thing: fact for fact in scene.facts}
        for question in questions_of(scene, random.Random(1))["comparison"]:
            one, other = (where[thing] for thing in question.owners)
            assert one.passage != other.passage
            assert question.answer == (one.owner, "and", other.owner, ":", "yes" if one.owner == other.owner else "no")
            verdicts.append(question.answer[-1] == "yes")
    assert 0.3 < sum(verdicts) / len(verdicts) < 0.7


def test_lists_name_two_owners_that_two_passages_tell() -> None:
    found = 0
    for scene in scenes(40):
        where = {fact.thing: fact for fact in scene.facts}
        for question in questions_of(scene, random.Random(1))["list"]:
            one, other = (where[thing] for thing in question.owners)
            assert one.passage != other.passage and one.owner != other.owner
            assert {one.category, other.category} == {"cross"}
            assert question.answer == (one.owner, "and", other.owner)
            found += 1
    assert found > 40


def test_chains_take_one_hop_more_with_each_name() -> None:
    """Read off the text: the other thing of a chain has the category of one hop less, in an earlier passage."""
    fewer = {"chain": ("direct", "local", "local-hard"), "chain2": ("cross", "cross-hard"), "chain3": ("chain2",)}
    seen = dict.fromkeys(fewer, 0)
    for scene in scenes(150):
        where = {fact.thing: fact for fact in scene.facts}
        for sentence in (sentence for passage in scene.passages for sentence in passage):
            words = sentence.words
            if words[-4:-2] != ["with", "the"] or where[words[1]].category not in fewer:
                continue
            fact, other = where[words[1]], where[words[-2]]
            assert other.category in fewer[fact.category]
            assert other.passage < fact.passage and other.owner == fact.owner
            seen[fact.category] += 1
    assert min(seen.values()) >= 10


def test_rows_are_drawn_alike_for_a_seed_and_differ_between_seeds() -> None:
    assert draw_rows(1, 3) == draw_rows(1, 3)
    assert {row.question + row.passages[0].text for row in draw_rows(1, 3)}.isdisjoint(
        row.question + row.passages[0].text for row in draw_rows(2, 3)
    )


def test_rows_have_every_category_and_stay_below_the_context() -> None:
    tokenizer = build_tokenizer()
    rows = draw_rows(5, 20)
    assert {c: sum(row.category == c for row in rows) for c in CATEGORIES} == dict.fromkeys(CATEGORIES, 20)
    lengths = [sum(len(tokenizer.encode(text.text).ids) + 1 for text in row.passages) for row in rows]
    assert max(lengths) < 2000
    short = draw_rows(5, 4, ["cross"], Prompts(passages=(2, 2), tokens=(64, 64)))
    assert {len(row.passages) for row in short} == {2}


def test_rows_are_read_back_by_the_projects_own_format(tmp_path: Path) -> None:
    rows = draw_rows(1, 2)
    (tmp_path / "rows.jsonl").write_text("\n".join(question_lines(rows)))
    assert read_questions(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("seed", SEEDS)
def test_the_demo_that_ships_is_what_is_drawn(seed: int) -> None:
    drawn = draw_demo(seed, ROUNDS, FURTHER)
    assert demo_questions(seed, ROUNDS + FURTHER) == drawn
    assert draw_demo(seed) == drawn[: ROUNDS * len(OF_THE_DEMO)]


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
