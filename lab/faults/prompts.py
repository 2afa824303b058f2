"""The tiny random model that faults are tried on, and prompts for it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAYERS = 6
_IDS = range(20, 1000)


def make_model(folder: Path) -> Path:
    """Saves a model with random weights, whose tokens depend on far context; `folder` again."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(77)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 0.6 if "embed" in label or "lm_head" in label else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, 0, 2 * scale if "q_proj" in label or "k_proj" in label else scale)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Asked:
    """A prompt and the spans of its passages."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Texts:
    """Random token ids, and prompts of passages that recur."""

    def __init__(self, seed: int, passages: int = 6, fewest: int = 64, most: int = 140) -> None:
        self.rng = random.Random(seed)
        self.passages = [self.ids(self.rng.randint(fewest, most)) for _ in range(passages)]

    def ids(self, tokens: int) -> tuple[int, ...]:
        """Random tokens."""
        return tuple(self.rng.choices(_IDS, k=tokens))

    def asked(self, front: Sequence[int], passages: int, question: int = 12) -> Asked:
        """Plain text, some of the passages in random order, a question."""
        return joined(front, self.rng.sample(self.passages, passages), self.ids(question))

    def all_passages(self) -> Asked:
        """A prompt of every passage, which fills a store."""
        return joined(self.ids(9), self.passages, self.ids(9))


def joined(front: Sequence[int], passages: Sequence[Sequence[int]], question: Sequence[int]) -> Asked:
    """The prompt of these parts."""
    ids, spans = list(front), []
    for passage in passages:
        spans.append((len(ids), len(ids) + len(passage)))
        ids += passage
    return Asked((*ids, *question), tuple(spans))
