"""From scenes to token ids, as `tokenizer` and its chat template give them, with what training teaches at each token.

    <s> <|user|> passage \\n\\n passage \\n\\n question <|assistant|> answer <|end|> <|user|> question ...

Words are looked up instead of encoded: the same ids (a test holds that), and many times faster.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tokenizers import Tokenizer

from cacheblend.nano import lexicon
from cacheblend.nano import tokenizer as tok
from cacheblend.nano.scenes import CATEGORIES, Question, Scene, Sentence

LABELS = ("nothing", "text", *CATEGORIES, "end")
"""What a token is, for the loss: answers carry their category."""


class Lesson(IntEnum):
    """What is taught inside the layers, at a token that makes it known; see `training`."""

    THING = 0  # at the end of "The boot belongs to": the boot
    PRONOUN = 1  # whom a pronoun means
    CHAIN = 2  # who has the other thing, and so this one
    ASKED = 3  # who has the thing that is asked for
    COMPARED = 4  # at the second owner of a comparison's answer: the first one
    VERDICT = 5  # there, too: whether the two are the same


@dataclass
class Example:
    """One sequence.

    Attributes:
        ids: token ids.
        labels: indices of `LABELS`, for each token.
        positions: for RoPE; passages may stand apart.
        lessons: (lesson, index into ids, token id that is to be known there).
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lessons: list[tuple[Lesson, int, int]] = field(default_factory=list)


class Encoder:
    """Scenes to examples, for the tokenizer of `build_tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.bos, self.end, self.user, self.assistant = (
            self.vocabulary[token] for token in (tok.BOS, tok.END, tok.USER, tok.ASSISTANT)
        )
        self.system = tokenizer.encode(f"{tok.SYSTEM}{tok.SYSTEM_PROMPT}").ids
        self.separator = tokenizer.encode(tok.SEPARATOR).ids[0]

    def word(self, word: str, first: bool = False) -> int:
        """Id of a word; `first` in its text, where no space stands before it."""
        return self.vocabulary[word if first or word in ".?:" else f"\u0120{word}"]

    def example(
        self, scene: Scene, questions: Sequence[Question], gaps: Sequence[int] | None = None, *, system: bool = False
    ) -> Example:
        """Passages, then the questions with their answers, a turn each.

        Args:
            scene: the passages.
            questions: of that scene.
            gaps: positions left free in front of each passage; None for none.
            system: with `tokenizer.SYSTEM_PROMPT`.
        """
        example = Example()
        for token in [self.bos, *(self.system if system else ()), self.user]:
            self._add(example, token, "nothing")
        for index, passage in enumerate(scene.passages):
            self._passage(example, passage, 0 if gaps is None else gaps[index])
            self._add(example, self.separator, "nothing")
        for index, question in enumerate(questions):
            if index:
                self._add(example, self.user, "nothing")
            self._turn(example, question)
        return example

    def _passage(self, example: Example, passage: Sequence[Sentence], gap: int) -> None:
        first = True
        for sentence in passage:
            knows = sentence.knows | _known_at_its_end(sentence)
            for at, word in enumerate(sentence.words):
                if at in knows:
                    self._teach(example, word, *knows[at])
                self._add(example, self.word(word, first), "text", gap if first else 0)
                first = False

    def _teach(self, example: Example, word: str, thing: str, owner: str) -> None:
        here = len(example.ids)
        if thing and thing != word:
            example.lessons.append((Lesson.THING, here, self.word(thing)))
        if owner and owner != word:
            chain = thing != word and word in lexicon.OBJECTS
            example.lessons.append((Lesson.CHAIN if chain else Lesson.PRONOUN, here, self.word(owner)))

    def _turn(self, example: Example, question: Question) -> None:
        for at, word in enumerate(question.words):
            if word in question.owners:
                owner = self.word(question.owners[word])
                example.lessons.append((Lesson.ASKED, len(example.ids), owner))
            self._add(example, self.word(word, at == 0), "nothing")
        self._add(example, self.assistant, "nothing")
        for at, word in enumerate(question.answer):
            if at and word in lexicon.KIND_OF:
                example.lessons.append((Lesson.COMPARED, len(example.ids), self.word(question.answer[0])))
                example.lessons.append((Lesson.VERDICT, len(example.ids), self.word(question.answer[-1])))
            self._add(example, self.word(word, at == 0), question.category)
        self._add(example, self.end, "end")

    def _add(self, example: Example, token: int, label: str, gap: int = 0) -> None:
        position = example.positions[-1] + 1 + gap if example.positions else 0
        example.ids.append(token)
        example.labels.append(LABELS.index(label))
        example.positions.append(position)


def _known_at_its_end(sentence: Sentence) -> dict[int, tuple[str, str]]:
    """What a sentence says is taught once more at its full stop, where its pronoun does not end it.

    Else the model keeps it in the next sentence, or in the next passage: wherever it stands as far behind the thing
    as the pronoun does elsewhere.
    """
    words = sentence.words
    told = [(at, thing, owner) for at, (thing, owner) in sentence.knows.items() if thing and owner != words[at]]
    return {len(words) - 1: (thing, owner) for at, thing, owner in told if at < len(words) - 2 or words[at] == thing}


def draw_questions(scene: Scene, rng: random.Random, count: int, weights: Mapping[str, float]) -> list[Question]:
    """Up to `count` questions, categories drawn by weight."""
    pool = {category: found for category, found in scene.questions(rng).items() if found and weights.get(category)}
    drawn: list[Question] = []
    while pool and len(drawn) < count:
        category = rng.choices(list(pool), [weights[each] for each in pool])[0]
        drawn.append(pool[category].pop())
        if not pool[category]:
            del pool[category]
    return drawn
