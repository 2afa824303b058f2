"""The words of all passages and questions. A name's ending gives its kind; every word is one token."""

import random
from typing import Literal

Kind = Literal["man", "woman", "firm"]

_SYLLABLES = "al bo ca de fi go hu ir ka lu mo ne or pa ri so ta ul va wi".split()  # noqa: SIM905


def _names(ending: str, seed: int, count: int = 32) -> tuple[str, ...]:
    draw, found = random.Random(seed), set[str]()
    while len(found) < count:
        found.add((draw.choice(_SYLLABLES) + draw.choice(_SYLLABLES) + ending).capitalize())
    return tuple(sorted(found))


NAMES: dict[Kind, tuple[str, ...]] = {"man": _names("n", 1), "woman": _names("a", 2), "firm": _names("co", 3)}
KIND_OF: dict[str, Kind] = {name: kind for kind, names in NAMES.items() for name in names}

_OBJECTS = """
anvil axe barrel basket bed bell boat book boot bottle bowl box brush carpet cart cat chain chair chest clock coat
coin cow crown cup dog drum flag flute gem glove goat hammer harp hat helmet hen horse jug kettle key knife ladder
lamp lantern letter map medal mirror needle oar painting pan parcel pen piano pipe plate pot ring rope saddle saw
scarf shield spade spoon statue stool stove sword table tent ticket tray trophy trunk vase violin wagon wheel
whistle
"""
OBJECTS = tuple(_OBJECTS.split())

# "The boot belongs to Vaden.": phrases with the owner last.
GIVEN = tuple(
    words.split()
    for words in ("belongs to", "went to", "came to", "passed to", "was given to", "was sold to", "now belongs to")
)
# "He took the boot.": verbs with the owner first.
TAKING = ("took", "bought", "found", "kept", "won")
# "The boot lies with the harp.": both things have the same owner.
BESIDE = tuple(words.split() for words in ("lies with", "stays with", "is kept with", "goes with"))

OBJECT_CASE: dict[Kind, tuple[str, ...]] = {"man": ("him",), "woman": ("her",), "firm": ("the", "firm")}
SUBJECT_CASE: dict[Kind, tuple[str, ...]] = {"man": ("He",), "woman": ("She",), "firm": ("The", "firm")}
# May follow a pronoun, so that it is not the last word of its sentence.
TAILS = tuple(words.split() for words in ("again", "that day", "in the morning", "for a while", "as before"))

ADVERBS = ("Later", "Then", "Today", "Meanwhile", "Once")

_PLACES = "weather road harbour school library garden bridge station market river square church theatre mill".split()  # noqa: SIM905
_STATES = ("was cold", "was quiet", "was crowded", "looked grey", "seemed calm", "was closed", "smelled of rain")
_TIMES = (
    "", "again", "that day", "in the morning", "for a while", "during the long winter", "as the old papers said",
    "and nobody knew why",
)  # fmt: skip
FILLERS = tuple(f"The {place} {state} {time}".split() for place in _PLACES for state in _STATES for time in _TIMES)

UNKNOWN = "unknown"
