"""What is trained, in which stages, and what each stage must reach.

The model is a small Qwen3 (Llama's layers with normalised queries and keys). It learns in four steps: to look a stated
fact up, which the rest stands on and which does not come by itself from the mixture; then everything, in prompts that
grow; then whether two names are the same, which the mixture alone leaves at chance; then long prompts. `training` says
how the layers are taught.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheblend.nano.encoding import Lesson
from cacheblend.nano.tokenizer import MAX_POSITIONS


@dataclass(frozen=True)
class Shape:
    """The model's sizes."""

    layers: int = 12
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp_width: int = 384
    rope_theta: float = 10_000.0

    def config(self, vocabulary: int, bos: int, end: int, pad: int) -> Any:
        """transformers' configuration; the vocabulary is rounded up to whole rows of 64."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=-(-vocabulary // 64) * 64,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=False,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            bos_token_id=bos,
            eos_token_id=end,
            pad_token_id=pad,
        )


@dataclass(frozen=True)
class Stage:
    """One part of the training.

    Attributes:
        name: for people and files.
        steps: optimizer steps.
        tokens: of a step, about.
        passages: fewest and most in a prompt; most grows from fewest over the first half of the stage.
        length: fewest and most tokens of a passage.
        dense: share of crowded passages at the start, and at the end.
        direct_only: share of passages of stated facts alone.
        hard, chains: as in `scenes.Style`.
        weights: of the questions' categories.
        questions: most in a prompt.
        system: share of examples with a system prompt.
        gap: share of examples whose passages stand apart, so that far positions are learnt on short prompts.
        warm_up: steps over which the learning rate rises.
        decay: share of the stage, at its end, over which the learning rate falls to 3 %.
        lessons: that are taught.
        more: steps that may be added where the goal is missed, before the stage is run anew.
        enough: stop as soon as this share of the stage's training answers is right.
        goal: exact match on fresh prompts that the stage must reach, by category.
    """

    name: str
    steps: int
    tokens: int
    passages: tuple[int, int]
    length: tuple[int, int]
    dense: tuple[float, float]
    weights: Mapping[str, float]
    goal: Mapping[str, float]
    direct_only: float = 0.0
    hard: float = 0.3
    chains: float = 0.6
    questions: int = 16
    system: float = 0.2
    gap: float = 0.5
    warm_up: int = 100
    decay: float = 0.0
    lessons: tuple[Lesson, ...] = tuple(Lesson)
    more: int = 0
    enough: float | None = None


MIXTURE = {
    "direct": 1.0,
    "local": 1.0,
    "cross": 3.0,
    "cross-hard": 2.0,
    "chain": 2.0,
    "chain2": 1.0,
    "comparison": 2.0,
    "unanswerable": 1.0,
}


@dataclass(frozen=True)
class Recipe:
    """All of a training.

    Attributes:
        stages: in order.
        shape: of the model.
        matrix_rate: Muon's learning rate, for the layers' matrices.
        rate: AdamW's, for embeddings, norms and heads.
        text: weight of the loss on the passages' own text.
        lessons: weight of the loss inside the layers.
        lesson_layers: behind how many layers each lesson is read.
    """

    stages: tuple[Stage, ...]
    shape: Shape = field(default_factory=Shape)
    matrix_rate: float = 0.01
    rate: float = 1.5e-3
    text: float = 0.1
    lessons: float = 0.3
    lesson_layers: Mapping[Lesson, int] = field(
        default_factory=lambda: {
            Lesson.THING: 2,
            Lesson.PRONOUN: 5,
            Lesson.CHAIN: 8,
            Lesson.ASKED: 10,
            Lesson.COMPARED: 4,
            Lesson.VERDICT: 7,
        }
    )


_FIRST_LESSONS = (Lesson.THING, Lesson.PRONOUN, Lesson.CHAIN, Lesson.ASKED)

RECIPE = Recipe(
    stages=(
        Stage(
            "stated",
            steps=1200,
            tokens=3072,
            passages=(2, 2),
            length=(24, 36),
            dense=(1.0, 1.0),
            direct_only=1.0,
            weights={"direct": 1.0},
            questions=10,
            lessons=_FIRST_LESSONS,
            enough=0.97,
            goal={"direct": 0.9},
        ),
        Stage(
            "mixture",
            steps=1200,
            tokens=3072,
            passages=(2, 6),
            length=(32, 64),
            dense=(0.9, 0.6),
            direct_only=0.1,
            weights=MIXTURE,
            lessons=_FIRST_LESSONS,
            goal={"direct": 0.9, "local": 0.7, "cross": 0.7},
        ),
        Stage(
            "compare",
            steps=900,
            tokens=3072,
            passages=(2, 4),
            length=(24, 48),
            dense=(1.0, 1.0),
            direct_only=0.5,
            weights=dict.fromkeys(MIXTURE, 1.0) | {"comparison": 6.0},
            questions=12,
            more=300,
            enough=0.975,
            goal={"comparison": 0.75},
        ),
        Stage(
            "long",
            steps=900,
            tokens=4096,
            passages=(4, 8),
            length=(64, 256),
            dense=(0.6, 0.3),
            direct_only=0.05,
            weights=MIXTURE,
            decay=0.9,
            goal={"direct": 0.95, "local": 0.95, "cross": 0.95, "cross-hard": 0.9, "chain": 0.9, "comparison": 0.8},
        ),
    )
)
"""The one behind the shipped weights."""
