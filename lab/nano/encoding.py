"""From scenes to token ids as the tokenizer and its chat template make them, with labels and probes per token; batches.

    <s> <|user|> passage \\n\\n passage \\n\\n question <|assistant|> answer <|end|> <|user|> question ...

Words are looked up instead of encoded: the same ids (held by a test), many times faster.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from cacheblend.nano import lexicon
from cacheblend.nano.language import Scene, Sentence
from lab.nano import tokenizer as tok
from lab.nano.recipe import Probe, Stage
from lab.nano.scenes import CATEGORIES, Question, Style, draw_scene, questions_of
from lab.nano.tokenizer import MAX_POSITIONS

LABELS = ("nothing", "text", *CATEGORIES, "end")
"""Labels of tokens, which say how the loss weighs them: an answer token carries its question's category."""


@dataclass
class Example:
    """One training sequence.

    Attributes:
        ids: token ids.
        labels: index into `LABELS` of each token.
        positions: for RoPE, ascending; there may be gaps in front of passages.
        probes: (probe, index into `ids`, token id that its head should predict there).
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    probes: list[tuple[Probe, int, int]] = field(default_factory=list)


class Encoder:
    """Encodes scenes with the tokenizer of `build_tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.bos, self.end, self.user, self.assistant = (
            self.vocabulary[token] for token in (tok.BOS, tok.END, tok.USER, tok.ASSISTANT)
        )
        self.system = tokenizer.encode(f"{tok.SYSTEM}{tok.SYSTEM_PROMPT}").ids
        self.separator = tokenizer.encode(tok.SEPARATOR).ids[0]

    def word(self, word: str, first: bool = False) -> int:
        """Id of a word; `first`: it begins a text, so no space precedes it."""
        return self.vocabulary[word if first or word in ".?:" else f"\u0120{word}"]

    def example(
        self, scene: Scene, questions: Sequence[Question], gaps: Sequence[int] | None = None, *, system: bool = False
    ) -> Example:
        """The passages of a scene, then one chat turn for each question of it and its answer.

        `gaps`: positions to leave free in front of each passage. `system`: begin with `tokenizer.SYSTEM_PROMPT`.
        """
        example = Example()
        for token in [self.bos, *(self.system if system else ()), self.user]:
            self._add(example, token, "nothing")
        far = frozenset(fact.thing for fact in scene.facts if fact.category == "chain3")
        for index, passage in enumerate(scene.passages):
            self._passage(example, passage, far, 0 if gaps is None else gaps[index])
            self._add(example, self.separator, "nothing")
        for index, question in enumerate(questions):
            if index:
                self._add(example, self.user, "nothing")
            self._turn(example, question)
        return example

    def _passage(self, example: Example, passage: Sequence[Sentence], far: frozenset[str], gap: int) -> None:
        first = True
        for sentence in passage:
            knows = sentence.knows | _repeated_at_full_stop(sentence)
            for at, word in enumerate(sentence.words):
                thing, owner = knows.get(at, ("", ""))
                if thing and thing != word:
                    example.probes.append((Probe.THING, len(example.ids), self.word(thing)))
                if owner and owner != word:
                    chain = Probe.LONG_CHAIN if thing in far else Probe.CHAIN
                    probe = chain if thing != word and word in lexicon.OBJECTS else Probe.PRONOUN
                    example.probes.append((probe, len(example.ids), self.word(owner)))
                self._add(example, self.word(word, first), "text", gap if first else 0)
                first = False

    def _turn(self, example: Example, question: Question) -> None:
        for at, word in enumerate(question.words):
            if word in question.owners:
                owner = self.word(question.owners[word])
                example.probes.append((Probe.ASKED, len(example.ids), owner))
            self._add(example, self.word(word, at == 0), "nothing")
        self._add(example, self.assistant, "nothing")
        for at, word in enumerate(question.answer):
            if at and word in lexicon.KIND_OF and question.category == "comparison":
                example.probes.append((Probe.COMPARED, len(example.ids), self.word(question.answer[0])))
                example.probes.append((Probe.VERDICT, len(example.ids), self.word(question.answer[-1])))
            self._add(example, self.word(word, at == 0), question.category)
        self._add(example, self.end, "end")

    def _add(self, example: Example, token: int, label: str, gap: int = 0) -> None:
        position = example.positions[-1] + 1 + gap if example.positions else 0
        example.ids.append(token)
        example.labels.append(LABELS.index(label))
        example.positions.append(position)


def _repeated_at_full_stop(sentence: Sentence) -> dict[int, tuple[str, str]]:
    """The sentence's fact, to be probed again at its full stop, if the pronoun is not the last word.

    Without this the model stores the fact at whatever token comes the usual distance after the thing, which may
    belong to the next sentence or the next passage.
    """
    words = sentence.words
    stated = [(at, thing, owner) for at, (thing, owner) in sentence.knows.items() if thing and owner != words[at]]
    return {len(words) - 1: (thing, owner) for at, thing, owner in stated if at < len(words) - 2 or words[at] == thing}


def draw_questions(scene: Scene, rng: random.Random, count: int, weights: Mapping[str, float]) -> list[Question]:
    """Draws up to `count` questions; each category has a probability proportional to its weight."""
    pool = {category: found for category, found in questions_of(scene, rng).items() if found and weights.get(category)}
    drawn: list[Question] = []
    while pool and len(drawn) < count:
        category = rng.choices(list(pool), [weights[each] for each in pool])[0]
        drawn.append(pool[category].pop())
        if not pool[category]:
            del pool[category]
    return drawn


LARGEST_GAP = 40  # free positions in front of a passage, in the half of the gapped examples with small gaps


@dataclass
class Batch:
    """Several examples, the shorter ones padded on the right.

    Attributes:
        ids, labels, positions: [examples, length] int64.
        probes: for each probe [n, 3] int64: example, index of the token, expected token id.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    probes: dict[Probe, torch.Tensor]

    def to(self, device: torch.device) -> "Batch":
        probes = {probe: where.to(device) for probe, where in self.probes.items()}
        return Batch(self.ids.to(device), self.labels.to(device), self.positions.to(device), probes)


def draw_batch(encoder: Encoder, rng: random.Random, stage: Stage, progress: float) -> Batch:
    """Draws examples of about `stage.tokens` tokens in total; `progress` is 0..1 through the stage."""
    fewest, most = stage.passages
    most = fewest + round((most - fewest) * min(1.0, 2 * progress))
    count = rng.randint(max(fewest, most - 2), most)
    longest_passage = (MAX_POSITIONS - 16 * stage.questions) // count
    shortest, longest = stage.length
    length = min(round(shortest * (longest / shortest) ** rng.random()), longest_passage)  # log-uniform
    dense = stage.dense[0] + (stage.dense[1] - stage.dense[0]) * progress
    style = Style(count, length, dense, stage.hard, stage.chains, stage.direct_only)
    questions = min(stage.questions, max(4, count * length // 10))
    examples = max(2, stage.tokens // (count * (length + 1) + 9 * questions))
    return collate([draw_example(encoder, rng, stage, style, questions) for _ in range(examples)])


def draw_example(encoder: Encoder, rng: random.Random, stage: Stage, style: Style, questions: int) -> Example:
    scene = draw_scene(rng, style)
    asked = draw_questions(scene, rng, questions, stage.weights)
    system = rng.random() < stage.system
    if rng.random() >= stage.gap:
        return encoder.example(scene, asked, system=system)
    free = MAX_POSITIONS - style.passages * (style.tokens + 1) - 16 * questions
    largest = min(LARGEST_GAP, free // style.passages) if rng.random() < 0.5 else free // style.passages
    gaps = [rng.randint(0, max(0, largest)) for _ in scene.passages]
    return encoder.example(scene, asked, gaps, system=system)


def collate(examples: Sequence[Example]) -> Batch:
    """Pads on the right: with causal attention no real token sees the padding."""
    length = max(len(example.ids) for example in examples)

    def stack(rows: Sequence[list[int]], fill: int | None = 0) -> torch.Tensor:
        return torch.tensor([row + [row[-1] if fill is None else fill] * (length - len(row)) for row in rows])

    probes: dict[Probe, list[tuple[int, int, int]]] = defaultdict(list)
    for number, example in enumerate(examples):
        for probe, index, token in example.probes:
            probes[probe].append((number, index, token))
    return Batch(
        ids=stack([example.ids for example in examples]),
        labels=stack([example.labels for example in examples]),
        positions=stack([example.positions for example in examples], fill=None),
        probes={probe: torch.tensor(where) for probe, where in probes.items()},
    )
