"""Reads passages in the order in which they stand: who is meant, and so who has what, from their words alone.

`scenes` knows both since it makes them up; the same passages in another order mean something else.
"""

from collections.abc import Sequence
from dataclasses import replace

from cacheblend.core.errors import InvalidInputError
from cacheblend.nano import lexicon
from cacheblend.nano.lexicon import Kind
from cacheblend.nano.scenes import Fact, Scene, Sentence, spell

UNASKED = "unasked"
"""Category of a thing beside another whose owner is told later, or is unknown: `draw_scene` tells none. It counts as
told, but its owner is not worked out, and nothing is asked of it."""

_FILLERS = frozenset(map(tuple, lexicon.FILLERS))
_STATED = ("direct", "local", "local-hard", "cross", "cross-hard")  # what another thing's owner may be told by
Known = dict[int, tuple[str, str]]
"""As `Sentence.knows`."""


def read_scene(passages: Sequence[Sequence[Sentence]]) -> Scene:
    """The scene that these passages make in this order.

    In the order of `draw_scene` it is the scene that was drawn, but that `unmentioned` has every thing that no sentence
    gives an owner, not four of them.

    Args:
        passages: their sentences; only the words are looked at.

    Raises:
        InvalidInputError: a sentence that is none of the small world's.
    """
    return _Reader().read(passages)


class _Reader:
    """Goes through the sentences in order, and keeps who was named last and which facts are out."""

    def __init__(self) -> None:
        self.facts: dict[str, Fact] = {}  # by thing
        self.last: dict[Kind, tuple[str, int]] = {}  # who was named last, and in which passage
        self.hanging: dict[str, str] = {}  # things beside others that were not told of before
        self.passage = 0

    def read(self, passages: Sequence[Sequence[Sentence]]) -> Scene:
        told = []
        for number, passage in enumerate(passages):
            self.passage = number
            told.append([Sentence(list(sentence.words), self._sentence(sentence.words)) for sentence in passage])
        for thing, other in self.hanging.items():
            if other in self.facts:
                self.facts[thing] = replace(self.facts[thing], category=UNASKED)
        unmentioned = tuple(thing for thing in lexicon.OBJECTS if thing not in self.facts)
        return Scene(told, list(self.facts.values()), unmentioned)

    def _sentence(self, words: Sequence[str]) -> Known:
        known: Known | None
        if tuple(words[:-1]) in _FILLERS:
            known = {}
        elif len(words) > 2 and words[0] in lexicon.ADVERBS:
            known = self._deed(words)
        elif len(words) > 2 and words[0] == "The" and words[1] in lexicon.OBJECTS:
            known = self._given(words) or self._beside(words)
        else:
            known = self._taken(words)
        if known is None:
            raise InvalidInputError(f"{spell(words)!r} is no sentence that draw_scene tells")
        return known

    def _deed(self, words: Sequence[str]) -> Known | None:
        """ "Later Vaden sat down." """
        if words[1] not in lexicon.KIND_OF:
            return None
        self._name(words[1])
        return {}

    def _given(self, words: Sequence[str]) -> Known | None:
        """ "The boot belongs to Vaden." or "The boot belongs to him again." """
        at = 2 + _phrase_length(lexicon.GIVEN, words[2:])
        thing, who = words[1], tuple(words[at:-1])
        if at > 2 and len(who) == 1 and who[0] in lexicon.KIND_OF:
            self._name(who[0])
            return {at: self._tell(thing, who[0], "direct")}
        for kind, case in lexicon.OBJECT_CASE.items():
            tail = who[len(case) :]
            if at > 2 and who[: len(case)] == case and (not tail or list(tail) in lexicon.TAILS):
                return {at + len(case) - 1: self._tell(thing, *self._meant(kind, hard=bool(tail)))}
        return None

    def _taken(self, words: Sequence[str]) -> Known | None:
        """ "He took the boot." """
        for kind, case in lexicon.SUBJECT_CASE.items():
            at = len(case)  # of the verb
            verb, thing = tuple(words[at : at + 2]), "".join(words[at + 2 : at + 3])
            if tuple(words[:at]) == case and verb in _TAKEN and thing in lexicon.OBJECTS:
                known = self._tell(thing, *self._meant(kind, hard=True))
                return {at - 1: ("", known[1]), at + 2: known}
        return None

    def _beside(self, words: Sequence[str]) -> Known | None:
        """ "The boot lies with the harp." """
        at, thing, other = 2 + _phrase_length(lexicon.BESIDE, words[2:]), words[1], words[-2]
        if at == 2 or tuple(words[at:-1]) != ("the", other) or other not in lexicon.OBJECTS:
            return None
        fact = self.facts.get(other)
        if fact is None:
            self.hanging[thing] = other
            known = self._tell(thing, lexicon.UNKNOWN, "unanswerable")
        elif fact.category not in _STATED:
            known = self._tell(thing, lexicon.UNKNOWN, UNASKED)
        else:
            known = self._tell(thing, fact.owner, "chain2" if fact.category.startswith("cross") else "chain")
        return {len(words) - 2: known}

    def _name(self, name: str) -> None:
        self.last[lexicon.KIND_OF[name]] = (name, self.passage)

    def _meant(self, kind: Kind, *, hard: bool) -> tuple[str, str]:
        """Whom a pronoun of that kind means here, and the category of a question for what it has."""
        if kind not in self.last:
            return lexicon.UNKNOWN, "unanswerable"
        owner, passage = self.last[kind]
        return owner, ("local" if passage == self.passage else "cross") + ("-hard" if hard else "")

    def _tell(self, thing: str, owner: str, category: str) -> tuple[str, str]:
        self.facts[thing] = Fact(thing, owner, category, self.passage)
        return thing, owner


_TAKEN = frozenset((verb, "the") for verb in lexicon.TAKING)


def _phrase_length(phrases: Sequence[Sequence[str]], words: Sequence[str]) -> int:
    """Words of the phrase that these begin with; 0 where they begin with none."""
    return next((len(phrase) for phrase in phrases if list(words[: len(phrase)]) == list(phrase)), 0)
