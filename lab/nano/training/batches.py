"""Batches of fresh scenes, drawn at random for each optimizer step."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lab.nano.scenes import Style, draw_scene
from lab.nano.tokenizer import MAX_POSITIONS
from lab.nano.training.encoding import Encoder, Example, Probe, draw_questions
from lab.nano.training.recipe import Stage

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
        """A copy on another device."""
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
    """Draws one scene with its questions."""
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
