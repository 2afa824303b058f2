"""An example for the demo: a pronoun, and its antecedent in an earlier passage."""

from dataclasses import dataclass

from cacheblend.evaluation.demo import Demo, DemoQuestion
from cacheblend.nano import lexicon
from cacheblend.nano.scenes import Scene, Sentence, spell


@dataclass(frozen=True)
class Example:
    """A pronoun that refers to the owner of a thing, named in an earlier passage.

    Attributes:
        asked: a question that depends on it.
        thing, owner, pronoun: words.
        antecedent, stated: (title of the passage, excerpt) of the sentence that names the owner last, and of the
            pronoun's sentence; the excerpt has the neighbouring sentences, and the word in brackets.
        elsewhere: the owner that the pronoun refers to in another order; empty if it is the same in all.
    """

    asked: DemoQuestion
    thing: str
    owner: str
    pronoun: str
    antecedent: tuple[str, str]
    stated: tuple[str, str]
    elsewhere: str


def find_example(demo: Demo) -> Example:
    """The first question of category cross whose pronoun refers to someone else in another order, if there is one."""
    examples = [_example(demo, each) for each in demo.questions if each.question.category == "cross"]
    return next((example for example in examples if example.elsewhere), examples[0])


def _example(demo: Demo, asked: DemoQuestion) -> Example:
    (thing, owner), *_ = asked.question.owners.items()
    sentences = [(index, each) for index, passage in enumerate(asked.scene.passages) for each in passage]
    sentences = [(-1, Sentence([])), *sentences, (-1, Sentence([]))]  # so that each has two neighbours
    stated = next(i for i, (_, each) in enumerate(sentences) if each.knows and each.words[1] == thing)
    named = max(i for i in range(stated) if owner in sentences[i][1].words)

    def excerpt(at: int, word: str) -> tuple[str, str]:
        passage = sentences[at][0]
        texts = [spell(each.words) if index == passage else "" for index, each in sentences[at - 1 : at + 2]]
        texts[1] = f"[{word}]".join(texts[1].rsplit(word, 1))
        return f"passage {asked.order[passage] + 1}", " ".join(filter(None, texts))

    pronoun = " ".join(lexicon.OBJECT_CASE[lexicon.KIND_OF[owner]])
    owners = (_owner(other.scene, thing) for other in demo.questions)
    elsewhere = next((other for other in owners if other not in (owner, lexicon.UNKNOWN)), "")
    return Example(asked, thing, owner, pronoun, excerpt(named, owner), excerpt(stated, pronoun), elsewhere)


def _owner(scene: Scene, thing: str) -> str:
    return next(fact.owner for fact in scene.facts if fact.thing == thing)
