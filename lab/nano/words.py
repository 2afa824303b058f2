"""What persons and firms do besides owning things; and every word that the model's tokenizer has whole."""

from cacheblend.nano.lexicon import (
    ADVERBS,
    BESIDE,
    FILLERS,
    GIVEN,
    NAMES,
    OBJECT_CASE,
    OBJECTS,
    SUBJECT_CASE,
    TAILS,
    TAKING,
    UNKNOWN,
    Kind,
)

KINDS: tuple[Kind, ...] = ("man", "woman", "firm")
_PERSON = ("came in", "spoke up", "sat down", "woke up early", "walked home", "waited outside")
_FIRM = ("opened a shop", "hired people", "moved its office", "grew very quickly", "held a meeting")
DEEDS: dict[Kind, tuple[list[str], ...]] = {
    "man": tuple(words.split() for words in _PERSON),
    "woman": tuple(words.split() for words in _PERSON),
    "firm": tuple(words.split() for words in _FIRM),
}


def every_word() -> set[str]:
    """Every word of passages, questions and answers, without spaces."""
    found = {".", "?", ":", UNKNOWN, "yes", "no", "and", "Who", "has", "the", "The", "Do", "have", "same", "owner"}
    found |= {name for names in NAMES.values() for name in names} | set(OBJECTS) | set(TAKING) | set(ADVERBS)
    for phrases in (GIVEN, BESIDE, TAILS, FILLERS, *DEEDS.values(), OBJECT_CASE.values(), SUBJECT_CASE.values()):
        found |= {word for phrase in phrases for word in phrase}
    return found
