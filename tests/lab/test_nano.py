"""The language, texts, rows and training of the shipped model; what ships beside it is what is drawn."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheblend.core.errors import InvalidInputError
from cacheblend.data import read_questions
from cacheblend.data.questions import question_lines
from cacheblend.evaluation.demo import CATEGORIES as OF_THE_DEMO
from cacheblend.evaluation.demo import DATA, demo_questions
from cacheblend.nano import lexicon
from cacheblend.nano.examples import EXAMPLES, NOTES, ExampleAnswer, answer_of, notes
from cacheblend.nano.language import UNASKED, Scene, Sentence, read_scene, spell
from campaign import rotating
from lab.nano import data, train
from lab.nano.data import FURTHER, ROUNDS, SEEDS, draw_demo, draw_notes
from lab.nano.encoding import LABELS, Encoder, collate, draw_batch, draw_example, draw_questions
from lab.nano.model import BLOCK, Tally, build_model, exact_match
from lab.nano.questions import Prompts
from lab.nano.questions import draw_questions as draw_rows
from lab.nano.recipe import RECIPE, Probe, Recipe, Shape, Stage
from lab.nano.scenes import CATEGORIES, Style, draw_scene, questions_of
from lab.nano.tokenizer import MAX_POSITIONS, SEPARATOR, SYSTEM_PROMPT, build_tokenizer, save_tokenizer
from lab.nano.train import Trainer, TrainingFailedError
from lab.nano.words import KINDS, every_word

# ---- words, scenes, rows --------------------------------------------------------------------------------------------


STYLE = Style(passages=5, tokens=64, dense=0.5, hard=0.4, chains=0.7)


def scenes(count: int, style: Style = STYLE) -> list[Scene]:
    rng = random.Random(7)
    return [draw_scene(rng, style) for _ in range(count)]


def test_the_tokenizer() -> None:
    # Every word is one token at the start and inside
    tokenizer = build_tokenizer()
    for word in every_word():
        assert len(tokenizer.encode(word).ids) == 1, word
        assert len(tokenizer.encode(f" {word}").ids) == 1 or word in ".?:", word
    # The tokenizer is the same every time
    assert build_tokenizer().to_str() == build_tokenizer().to_str()
    # Passages keep to their length
    tokenizer = build_tokenizer()
    for tokens in (64, 256):
        for scene in scenes(10, Style(passages=3, tokens=tokens)):
            lengths = [len(tokenizer.encode(text).ids) for text in scene.texts()]
            assert all(tokens - 5 < length <= tokens for length in lengths), lengths


@pytest.mark.parametrize("text", ["naïve café, 東京 🎉\n\n\n x", "<|end|> is text to nobody", "  two  spaces "])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    decoded = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    assert decoded == text


def test_an_example_has_gaps_labels_and_the_templates_ids(tmp_path: Path) -> None:
    # Encoding is what the chat template gives
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
    # Gaps move positions and nothing else
    encoder, scene = Encoder(build_tokenizer()), scenes(1)[0]
    plain, apart = encoder.example(scene, []), encoder.example(scene, [], [0, 5, 0, 7, 1])
    assert apart.ids == plain.ids
    assert plain.positions == list(range(len(plain.ids)))
    assert apart.positions[-1] == plain.positions[-1] + 13
    assert all(b > a for a, b in zip(apart.positions, apart.positions[1:], strict=False))
    # Labels mark answers only
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    scene = scenes(1)[0]
    (question,) = draw_questions(scene, rng, 1, {"cross": 1.0})
    example = encoder.example(scene, [question])
    answers = [i for i, label in zip(example.ids, example.labels, strict=True) if LABELS[label] == "cross"]
    assert answers == [encoder.word(question.answer[0], first=True)]
    assert LABELS[example.labels[-1]] == "end"


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


def test_comparisons_lists_and_chains() -> None:
    # Comparisons join two passages and are fair
    verdicts = []
    for scene in scenes(40):
        where = {fact.thing: fact for fact in scene.facts}
        for question in questions_of(scene, random.Random(1))["comparison"]:
            one, other = (where[thing] for thing in question.owners)
            assert one.passage != other.passage
            assert question.answer == (one.owner, "and", other.owner, ":", "yes" if one.owner == other.owner else "no")
            verdicts.append(question.answer[-1] == "yes")
    assert 0.3 < sum(verdicts) / len(verdicts) < 0.7
    # Lists name two owners that two passages tell
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
    # Read off the text: the other thing of a chain has the category of one hop less, in an earlier passage.
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


def test_rows_are_drawn(tmp_path: Path) -> None:
    # Rows are drawn alike for a seed and differ between seeds
    assert draw_rows(1, 3) == draw_rows(1, 3)
    assert {row.question + row.passages[0].text for row in draw_rows(1, 3)}.isdisjoint(
        row.question + row.passages[0].text for row in draw_rows(2, 3)
    )
    # Rows have every category and stay below the context
    tokenizer = build_tokenizer()
    rows = draw_rows(5, 20)
    assert {c: sum(row.category == c for row in rows) for c in CATEGORIES} == dict.fromkeys(CATEGORIES, 20)
    lengths = [sum(len(tokenizer.encode(text.text).ids) + 1 for text in row.passages) for row in rows]
    assert max(lengths) < 2000
    short = draw_rows(5, 4, ["cross"], Prompts(passages=(2, 2), tokens=(64, 64)))
    assert {len(row.passages) for row in short} == {2}
    # Rows are read back by the projects own format
    rows = draw_rows(1, 2)
    (tmp_path / "rows.jsonl").write_text("\n".join(question_lines(rows)))
    assert read_questions(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("seed", rotating(SEEDS, [1, 9]))
def test_the_demo_that_ships_is_what_is_drawn(seed: int) -> None:
    drawn = draw_demo(seed, ROUNDS, FURTHER)
    assert demo_questions(seed, ROUNDS + FURTHER) == drawn
    if seed == 1:
        assert draw_demo(seed) == drawn[: ROUNDS * len(OF_THE_DEMO)]


def test_what_ships_is_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The notes that ship are what is drawn
    assert list(notes()) == draw_notes()
    # Both files are written
    files = {name: tmp_path / name for name in ("NOTES", "DATA")}
    for name, file in files.items():
        monkeypatch.setattr(data, name, file)
    monkeypatch.setattr(data, "SEEDS", (1,))
    data.main()
    assert files["NOTES"].read_bytes() == NOTES.read_bytes()
    assert files["DATA"].read_text().splitlines() == [DATA.read_text().splitlines()[1]]


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


# ---- reading --------------------------------------------------------------------------------------------------------


HARD = Style(passages=6, tokens=90, dense=0.5, hard=0.5, chains=0.9)


def sentences_of(*texts: str) -> list[Sentence]:
    return [Sentence(text.replace(".", " .").split()) for text in texts]


def owners(scene: Scene) -> dict[str, tuple[str, str]]:
    return {fact.thing: (fact.owner, fact.category) for fact in scene.facts}


@pytest.mark.parametrize("style", [HARD, Style(8, 200), Style(3, 30, direct_only=1.0), Style(1, 60, dense=1.0)])
def test_reading_finds_the_facts_that_were_drawn(style: Style) -> None:
    rng, categories = random.Random(style.tokens), set[str]()
    for _ in range(150):
        drawn = draw_scene(rng, style)
        read = read_scene([[Sentence(sentence.words) for sentence in passage] for passage in drawn.passages])
        assert read.facts == drawn.facts
        assert read.passages == drawn.passages  # `knows` too
        assert set(drawn.unmentioned) <= set(read.unmentioned)
        categories |= {fact.category for fact in drawn.facts}
    if style is HARD:
        assert categories == (set(CATEGORIES) - {"comparison", "list"}) | {"local-hard"}


def test_after_shuffling_a_pronoun_means_who_is_named_last_in_front() -> None:
    rng = random.Random(3)
    changed = unasked = 0
    for _ in range(60):
        drawn = draw_scene(rng, HARD)
        order = rng.sample(range(6), 6)
        read = read_scene([drawn.passages[index] for index in order])
        before, after = owners(drawn), owners(read)
        assert after.keys() == before.keys()
        stated = {(fact.passage, fact.thing) for fact in read.facts}
        assert stated == {(order.index(fact.passage), fact.thing) for fact in drawn.facts}
        for thing, (owner, category) in after.items():
            if before[thing][1] in ("direct", "local", "local-hard"):
                assert (owner, category) == before[thing]
            elif category in ("cross", "cross-hard"):
                assert owner == named_last(read, thing)
                changed += owner != before[thing][0]
            unasked += category == UNASKED
    assert changed > 100
    assert unasked > 20


def named_last(scene: Scene, thing: str) -> str:
    """Owner of a thing stated with a pronoun, by searching backwards."""
    sentences_of = [sentence.words for passage in scene.passages for sentence in passage]
    at = next(i for i, words in enumerate(sentences_of) if thing in words and PRONOUNS & set(words))
    kind = next(kind for kind in KINDS if pronouns(kind) & set(sentences_of[at]))
    return next(word for words in reversed(sentences_of[:at]) for word in words if lexicon.KIND_OF.get(word) == kind)


def pronouns(kind: lexicon.Kind) -> set[str]:
    return {lexicon.SUBJECT_CASE[kind][-1], lexicon.OBJECT_CASE[kind][-1]}


PRONOUNS = {word for kind in KINDS for word in pronouns(kind)}


def test_an_order_decides_who_is_meant() -> None:
    named = lexicon.NAMES["man"]
    one = sentences_of(f"Later {named[0]} sat down.")
    two = sentences_of(f"Then {named[1]} came in.", "The mill was cold.")
    three = sentences_of("The boot belongs to him.", "He took the harp again.", "The axe lies with the boot.")
    four = sentences_of("The bell stays with the boot.", "The cup goes with the flag.")
    assert owners(read_scene([one, two, three, four])) == {
        "boot": (named[1], "cross"),
        "harp": (named[1], "cross-hard"),
        "axe": (named[1], "chain2"),
        "bell": (named[1], "chain2"),
        "cup": ("unknown", "unanswerable"),
    }
    assert owners(read_scene([two, one, three]))["boot"] == (named[0], "cross")
    ahead = read_scene([four, three, one])
    assert owners(ahead)["boot"] == ("unknown", "unanswerable")
    assert owners(ahead)["bell"] == ("unknown", UNASKED)  # mentioned, but not asked for
    assert owners(ahead)["axe"] == ("unknown", UNASKED)
    asked = questions_of(ahead, random.Random(1))
    assert asked["chain"] == asked["chain2"] == []
    assert "bell" not in ahead.unmentioned
    assert "flag" in ahead.unmentioned


OTHERS = """
The boot.
The boot belongs to.
The boot belongs to Nobody.
The boot belongs to him anyway.
The boot lies with.
The boot lies with harp.
The boot was cold.
He took.
He took the sea.
Later sat down.
"""


@pytest.mark.parametrize("text", ["", *OTHERS.strip().splitlines()])
def test_a_sentence_that_is_never_drawn_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is no sentence"):
        read_scene([sentences_of(text)])


# ---- the page's examples --------------------------------------------------------------------------------------------


TEXTS = notes()


def cut(text: str) -> list[Sentence]:
    """The same text, cut in another way than `answer_of` cuts it."""
    return [Sentence([*part.split(), "."]) for part in text.removesuffix(".").split(". ")]


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_it_is_right_what_the_generators_own_reading_says(seed: int) -> None:
    rng = random.Random(seed)
    texts = [TEXTS[number] for number in rng.sample(range(len(TEXTS)), rng.randint(1, len(TEXTS)))]
    scene = read_scene([cut(text) for text in texts])
    asked = 0
    for category, found in questions_of(scene, rng).items():
        for question in found:
            answer = answer_of(spell(question.words), texts)
            assert answer is not None and answer.text == spell(question.answer), category
            asked += 1
            quoted = [texts[place.passage][place.start : place.stop] for place in answer.places]
            assert all(quote.endswith(".") and quote.count(".") == 1 for quote in quoted)
            for owner in question.answer:
                named = owner in (":", "and", "yes", "no", "unknown") or any(f" {owner}" in quote for quote in quoted)
                assert named, f"{spell(question.words)}: {quoted} do not name {owner}"
    assert asked > 5


@pytest.mark.parametrize(
    ("category", "hops"), [("direct", 1), ("local", 2), ("cross", 2), ("chain2", 3), ("chain3", 4)]
)
def test_the_sentences_that_an_answer_needs_are_as_many_as_its_hops(category: str, hops: int) -> None:
    scene = read_scene([cut(text) for text in TEXTS])
    for question in questions_of(scene, random.Random(0), (category,))[category]:
        answer = answer_of(spell(question.words), TEXTS)
        assert answer is not None and len(answer.places) == hops
        assert list(answer.places) == sorted(answer.places)


def test_examples_of_the_page() -> None:
    # Who is meant depends on the order
    one, other = EXAMPLES[0], EXAMPLES[1]
    assert one.question == other.question and sorted(one.order) == sorted(other.order)
    found = [answer_of(each.question, [TEXTS[number] for number in each.order]) for each in (one, other)]
    assert [answer and answer.text for answer in found] == ["Pagon", "Moaln"]
    # Own notes in the models language are read too
    texts = ["Later Pagon sat down", " The boot  belongs to him. \n"]
    found = answer_of("Who has the boot?", texts)
    assert found == ExampleAnswer("Pagon", ((0, 0, 20), (1, 1, 26)))
    # A long text takes no longer than it is
    assert answer_of("Who has the boot?", ["a" * 1_000_000, ". " * 500_000]) is None


@pytest.mark.parametrize(
    ("question", "texts"),
    [
        ("Who has the bowl?", ["The bowl was on the table in front of him."]),
        ("Who has the bowl?", ["", "..", "\n"]),
        ("Who has the bowl", []),
        ("Who has the bowl?", ["Later Pagon sat down"]),
        ("Who has the bowl and the bell?", ["The bowl belongs to Pagon."]),  # the bell's owner is not stated
        ("Where is the bowl?", ["The bowl belongs to Pagon."]),
        ("the bowl", ["The bowl belongs to Pagon."]),
        ("Who has the bowl and the bell and the harp?", ["The bowl belongs to Pagon."]),
        ("", ["The bowl belongs to Pagon."]),
        ("Who has the bell?", ["The bell lies with the bowl.", "The bowl belongs to Pagon."]),  # never drawn
    ],
)
def test_what_the_rules_leave_open_has_no_answer(question: str, texts: list[str]) -> None:
    found = answer_of(question, texts)
    assert found is None or (found.text == "unknown" and not found.places)


# ---- training -------------------------------------------------------------------------------------------------------


STAGE = Stage(
    "first",
    steps=4,
    tokens=300,
    passages=(2, 2),
    length=(24, 32),
    dense=(1.0, 0.5),
    weights={"direct": 1.0, "cross": 1.0},
    goal={},
    questions=3,
    warm_up=1,
)
TINY = Recipe(
    stages=(STAGE, replace(STAGE, name="second", steps=3, decay=1.0)),
    shape=Shape(layers=10, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32),
)


def run(out: Path, recipe: Recipe = TINY, seed: int = 1) -> Trainer:
    trainer = Trainer(recipe, seed, out, "cpu")
    trainer.run()
    return trainer


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CHECKED_SCENES", 2)
    monkeypatch.setattr(train, "EVERY", 2)


def test_attention_in_blocks_has_the_loss_and_gradients_of_plain_attention(tmp_path: Path) -> None:
    trainer = Trainer(TINY, 1, tmp_path, "cpu")
    trained = trainer.trained
    for name, parameter in trained.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # zeros at first, which would hide attention
            torch.nn.init.normal_(parameter, std=0.1)
    scene = replace(STAGE, passages=(3, 3), length=(BLOCK, BLOCK), tokens=800)
    batch = draw_batch(trainer.encoder, random.Random(3), scene, 1.0)
    assert batch.ids.shape[1] > 2 * BLOCK and batch.ids.shape[1] % BLOCK

    def learn(attention: str) -> tuple[float, torch.Tensor]:
        trained.model.set_attn_implementation(attention)
        trained.zero_grad()
        loss = trained.loss(batch, Tally(), STAGE.probes)
        torch.autograd.backward(loss)
        return loss.item(), torch.cat([each.grad.flatten() for each in trained.parameters() if each.grad is not None])

    (loss, gradient), (plain_loss, plain_gradient) = learn("in_blocks"), learn("eager")
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert (gradient - plain_gradient).norm() < 1e-5 * plain_gradient.norm()


def test_it_trains_and_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It trains and writes a model that transformers opens.
    trainer = run(tmp_path / "whole")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert found.dtype == torch.bfloat16 and found.config.num_hidden_layers == 10
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 1000
    history = json.loads((tmp_path / "whole" / "history.json").read_text())
    assert [line["step"] for line in history if "step" in line] == [2, 4, 2, 3]
    assert trainer.seconds > 0
    # An interrupted training resumes to the same weights.
    learn, left = Trainer._learn, [5]

    def interrupted(trainer: Trainer, stage: Stage, tally: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        learn(trainer, stage, tally)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "SAVE_EVERY_S", -1)
    monkeypatch.setattr(Trainer, "_learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    monkeypatch.setattr(Trainer, "_learn", learn)
    run(tmp_path / "parts")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # A folder of another seed or recipe is refused.
    with pytest.raises(TrainingFailedError, match="another seed"):
        run(tmp_path / "whole", seed=2)
    with pytest.raises(TrainingFailedError, match="another recipe"):
        run(tmp_path / "whole", replace(TINY, rate=0.1))


def test_a_stage_that_misses_its_goal_runs_once_more_and_then_fails(tmp_path: Path) -> None:
    hopeless = replace(TINY, stages=(replace(STAGE, goal={"direct": 1.1}),))
    with pytest.raises(TrainingFailedError, match="missed its goal twice"):
        run(tmp_path, hopeless)
    history = json.loads((tmp_path / "history.json").read_text())
    assert sum("missed" in line for line in history) == 2


def test_a_stage_that_misses_its_goal_is_extended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ADDED_AT_ONCE", 2)
    hopeless = replace(TINY, stages=(replace(STAGE, goal={"direct": 1.1}, more=3),))
    with pytest.raises(TrainingFailedError, match="missed its goal twice"):
        run(tmp_path, hopeless)
    history = json.loads((tmp_path / "history.json").read_text())
    steps = [line["step"] for line in history if "step" in line]
    assert steps == 2 * [2, STAGE.steps, STAGE.steps + 2, STAGE.steps + 3]  # a line every other step
    assert sum("missed" in line for line in history) == 6


@pytest.mark.parametrize("stage", RECIPE.stages, ids=lambda stage: stage.name)
@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_batches_stay_within_the_positions(stage: Stage, progress: float) -> None:
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    for _ in range(5):
        batch = draw_batch(encoder, rng, stage, progress)
        assert int(batch.positions.max()) < MAX_POSITIONS
        assert batch.ids.shape == batch.labels.shape == batch.positions.shape
        for where in batch.probes.values():
            assert bool((where[:, 1] < batch.ids.shape[1]).all())


def test_padding_is_on_the_right_and_not_trained_on() -> None:
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    examples = [draw_example(encoder, rng, STAGE, Style(n, 32), 2) for n in (1, 3)]
    batch = collate(examples)
    short = len(examples[0].ids)
    assert bool((batch.labels[0, short:] == 0).all())
    assert batch.ids[1].tolist()[: len(examples[1].ids)] == examples[1].ids


def test_exact_match_of_an_untrained_model_is_nothing(tmp_path: Path) -> None:
    trainer = Trainer(TINY, 1, tmp_path, "cpu")
    model = build_model(TINY, train.save_tokenizer(tmp_path / "t"))
    found = exact_match(model, trainer.encoder, 1, Style(2, 32), 5)
    assert set(found) >= {"direct", "unanswerable"} and max(found.values()) < 0.5
