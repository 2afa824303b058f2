"""The model's sizes, the stages of its training, and the goal of each stage.

The model is a small Qwen3 (Llama's layers with normalised queries and keys). There are five stages: looking up stated
facts, which all else builds on and which is not learnt from the mixture alone; then the mixture of all categories in
growing prompts; then comparisons, which stay at chance with the mixture alone; then chains of three hops, which are
rare there and of which the mixture teaches less than half; then long prompts. `model` describes the losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from lab.nano.tokenizer import MAX_POSITIONS


class Probe(IntEnum):
    """The facts that linear heads read off hidden states, each at the token from which it is known; see `model`."""

    THING = 0  # after "The boot belongs to": the boot
    PRONOUN = 1  # the person or firm that a pronoun refers to
    CHAIN = 2  # the owner of the other thing, who therefore owns this one
    LONG_CHAIN = 3  # the same where the other thing's owner is known by a chain too
    ASKED = 4  # the owner of the thing that the question names
    COMPARED = 5  # at the second owner in the answer to a comparison: the first owner
    VERDICT = 6  # at the same token: whether both owners are the same


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
        """transformers' configuration; the vocabulary size is rounded up to a multiple of 64."""
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
    """One stage of the training.

    Attributes:
        name: in logs and the history.
        steps: optimizer steps.
        tokens: tokens per step, approximately.
        passages: fewest and most per prompt; over the first half of the stage the maximum grows from the minimum.
        length: fewest and most tokens per passage.
        dense: share of passages crowded with facts, at the start and at the end of the stage.
        direct_only: share of passages that hold stated facts only.
        hard, chains: as in `scenes.Style`.
        weights: relative frequency of each category of question.
        questions: most per prompt.
        system: share of examples with a system prompt.
        gap: share of examples with free positions between passages, so that short prompts train large positions.
        warm_up: steps over which the learning rate rises.
        decay: final share of the stage over which the learning rate falls to 3 %.
        probes: the probes whose losses are added.
        more: steps that may be added if the goal is missed, before the stage is restarted.
        enough: end the stage early once this share of its training answers is correct.
        goal: exact match by category that the stage must reach on fresh prompts.
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
    probes: tuple[Probe, ...] = tuple(Probe)
    more: int = 0
    enough: float | None = None


MIXTURE = {
    "direct": 1.0,
    "local": 1.0,
    "cross": 3.0,
    "cross-hard": 2.0,
    "chain": 2.0,
    "chain2": 1.0,
    "chain3": 2.0,
    "list": 1.0,
    "comparison": 2.0,
    "unanswerable": 1.0,
}


@dataclass(frozen=True)
class Recipe:
    """A whole training.

    Attributes:
        stages: in order.
        shape: sizes of the model.
        matrix_rate: learning rate of Muon, for the matrices of the layers.
        rate: learning rate of AdamW, for embeddings, norms and heads.
        text: weight of the loss on the text of the passages.
        probes: weight of the losses of the probes.
        probe_layers: for each probe, the number of layers after which it is read.
    """

    stages: tuple[Stage, ...]
    shape: Shape = field(default_factory=Shape)
    matrix_rate: float = 0.01
    rate: float = 1.5e-3
    text: float = 0.1
    probes: float = 0.3
    probe_layers: Mapping[Probe, int] = field(
        default_factory=lambda: {
            Probe.THING: 2,
            Probe.PRONOUN: 5,
            Probe.CHAIN: 7,
            Probe.LONG_CHAIN: 9,
            Probe.ASKED: 10,
            Probe.COMPARED: 4,
            Probe.VERDICT: 7,
        }
    )


_FIRST_PROBES = (Probe.THING, Probe.PRONOUN, Probe.CHAIN, Probe.LONG_CHAIN, Probe.ASKED)

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
            probes=_FIRST_PROBES,
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
            probes=_FIRST_PROBES,
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
            "chains",
            steps=500,
            tokens=3072,
            passages=(4, 6),
            length=(32, 56),
            dense=(1.0, 0.7),
            chains=1.0,
            weights=dict.fromkeys(MIXTURE, 1.0) | {"chain2": 2.0, "chain3": 8.0},
            questions=12,
            more=300,
            enough=0.95,
            goal={"chain2": 0.85, "chain3": 0.8},
        ),
        Stage(
            "long",
            steps=900,
            tokens=4096,
            passages=(4, 8),
            length=(64, 256),
            dense=(0.6, 0.3),
            direct_only=0.05,
            chains=0.8,
            weights=MIXTURE | {"chain3": 5.0},
            decay=0.9,
            more=300,
            goal={"direct": 0.95, "local": 0.95, "cross": 0.95, "comparison": 0.8}
            | dict.fromkeys(("cross-hard", "chain", "chain2", "chain3", "list"), 0.9),
        ),
    )
)
"""The recipe of the shipped weights."""
