"""One training step and its parts: batches, the loss, the optimizers, the check on fresh prompts.

The loss is the answers' (and, with a small weight, the text's) next-token loss, and that of *lessons*: at the token
that makes something known (a pronoun: whom it means), a linear head reads it off the hidden state behind a given
layer. The heads are thrown away afterwards. They make a training of hours one of minutes: the model need not find
out from a question, hundreds of tokens later, that a pronoun was worth resolving.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cacheblend.nano.encoding import LABELS, Encoder, Example, Lesson, draw_questions
from cacheblend.nano.recipe import Recipe, Stage
from cacheblend.nano.scenes import Style, draw_scene
from cacheblend.nano.tokenizer import MAX_POSITIONS

ANSWER = LABELS.index("text") + 1  # labels from here on are answers
_LARGEST_GAP = 40


BLOCK = 128  # query rows attended from at a time


@dataclass
class Batch:
    """Examples side by side, the shorter ones padded behind their end.

    Attributes:
        ids, labels, positions: [examples, length] int64.
        lessons: for each lesson [n, 3] int64: example, index, token id.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    lessons: dict[Lesson, torch.Tensor]

    def to(self, device: torch.device) -> "Batch":
        """On another device."""
        lessons = {lesson: where.to(device) for lesson, where in self.lessons.items()}
        return Batch(self.ids.to(device), self.labels.to(device), self.positions.to(device), lessons)


class Student(nn.Module):
    """The model with the heads that read its lessons."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        vocabulary, width = model.config.vocab_size, model.config.hidden_size
        self.heads = nn.ModuleDict({name: nn.Linear(width, vocabulary, bias=False) for name in ("thing", "owner")})
        for parameter in self.heads.parameters():
            nn.init.normal_(parameter, std=0.02)

    def loss(self, batch: Batch, tally: "Tally", lessons: Collection[Lesson]) -> torch.Tensor:
        """Scalar; what was right is counted in `tally`. Of the batch's lessons, `lessons` are taught."""
        out = self.model.model(
            input_ids=batch.ids,
            attention_mask=torch.ones_like(batch.ids),  # keeps gaps in the positions from being read as borders
            position_ids=batch.positions,
            use_cache=False,
            output_hidden_states=True,
        )
        hidden, wanted, labels = out.last_hidden_state[:, :-1], batch.ids[:, 1:], batch.labels[:, 1:]
        answers, text = labels >= ANSWER, labels == LABELS.index("text")
        logits = self.model.lm_head(hidden[answers]).float()
        answer_loss = _cross_entropy(logits, wanted[answers])
        tally.add_answers(logits.argmax(-1) == wanted[answers], labels[answers])
        text_loss = _cross_entropy(self.model.lm_head(hidden[text]).float(), wanted[text])
        lesson_loss = sum(
            (
                self._lesson(lesson, where, out.hidden_states, tally)
                for lesson, where in batch.lessons.items()
                if lesson in lessons
            ),
            start=answer_loss.new_zeros(()),
        )
        tally.add_loss(answer_loss, text_loss)
        return answer_loss + self.recipe.text * text_loss + self.recipe.lessons * lesson_loss

    def _lesson(
        self, lesson: Lesson, where: torch.Tensor, hidden: Sequence[torch.Tensor], tally: "Tally"
    ) -> torch.Tensor:
        states = hidden[self.recipe.lesson_layers[lesson]][where[:, 0], where[:, 1]]
        head = self.heads["thing" if lesson is Lesson.THING else "owner"]
        logits = head(F.rms_norm(states.float(), states.shape[-1:])).float()
        tally.add(f"lesson {lesson.name.lower()}", logits.argmax(-1) == where[:, 2])
        return F.cross_entropy(logits, where[:, 2])


def _cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean over tokens; 0 where there are none (the mean of nothing is no number)."""
    return F.cross_entropy(logits, wanted) if len(wanted) else logits.sum()


class Tally:
    """Right answers by category, and mean losses, since the last look."""

    def __init__(self) -> None:
        self.right: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, name: str, right: torch.Tensor) -> None:
        """Counts [n] booleans under a name."""
        self.right[name][0] += int(right.sum())
        self.right[name][1] += len(right)

    def add_answers(self, right: torch.Tensor, labels: torch.Tensor) -> None:
        """Counts answer tokens by the label they have."""
        for label in sorted(set(labels.tolist())):
            self.add(LABELS[label], right[labels == label])

    def add_loss(self, answers: torch.Tensor, text: torch.Tensor) -> None:
        """Keeps a step's losses."""
        self.losses.append((answers.detach(), text.detach()))

    def summary(self) -> dict[str, float]:
        """Shares and means."""
        shares = {name: right / count for name, (right, count) in self.right.items() if count}
        answers, text = (float(torch.stack(losses).mean()) for losses in zip(*self.losses, strict=True))
        return {"loss": answers, "text loss": text, **shares}


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A fresh model: embeddings of unit size, every layer begins as the identity."""
    from transformers import Qwen3ForCausalLM

    config = recipe.shape.config(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.dim() > 1:
                parameter.normal_(std=1.0 if "embed" in name else 0.02 if "lm_head" in name else 0.04)
    return model


def attend_in_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention that never computes what it would mask but a block's corner; for transformers' interface.

    On a CPU this is backpropagated twice as fast as plain attention, and many times faster than the fused kernel.

    Args:
        module, attention_mask: not looked at: the batches are padded on the right.
        query: [examples, heads, length, head_dim].
        key, value: [examples, kv_heads, length, head_dim].
        scaling: of the scores.

    Returns:
        [examples, length, heads, head_dim], and no weights.
    """
    examples, heads, length, width = query.shape
    groups, kind = examples * key.shape[1], value.dtype
    query = (query * scaling).to(kind).reshape(groups, -1, length, width)
    key, value = (each.to(kind).reshape(groups, length, width) for each in (key, value))
    corner = torch.full((BLOCK, BLOCK), -math.inf, dtype=kind, device=query.device).triu(1)
    parts = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        rows = query[:, :, start:end]
        scores = rows.flatten(1, 2) @ key[:, :end].mT
        seen = scores.detach().view(*rows.shape[:3], end)  # the mask is a constant: no gradient passes through it
        seen[..., start:] += corner[: end - start, : end - start]
        parts.append((scores.softmax(-1) @ value[:, :end]).view(rows.shape))
    return torch.cat(parts, dim=2).reshape(examples, heads, length, width).transpose(1, 2), None


def build_optimizers(student: Student, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for everything else."""
    inside = [p for name, p in student.model.named_parameters() if p.dim() == 2 and ".layers." in name]
    chosen = {id(parameter) for parameter in inside}
    others = [parameter for parameter in student.parameters() if id(parameter) not in chosen]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(inside, lr=recipe.matrix_rate, weight_decay=0.01),
        torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), eps=1e-9),
    ]


def draw_batch(encoder: Encoder, rng: random.Random, stage: Stage, progress: float) -> Batch:
    """Fresh examples of about the stage's tokens; `progress` 0..1 through the stage."""
    fewest, most = stage.passages
    most = fewest + round((most - fewest) * min(1.0, 2 * progress))
    count = rng.randint(max(fewest, most - 2), most)
    room = (MAX_POSITIONS - 16 * stage.questions) // count
    shortest, longest = stage.length
    length = min(round(shortest * (longest / shortest) ** rng.random()), room)  # as many short as long ones
    dense = stage.dense[0] + (stage.dense[1] - stage.dense[0]) * progress
    style = Style(count, length, dense, stage.hard, stage.chains, stage.direct_only)
    questions = min(stage.questions, max(4, count * length // 10))
    examples = max(2, stage.tokens // (count * (length + 1) + 9 * questions))
    return collate([draw_example(encoder, rng, stage, style, questions) for _ in range(examples)])


def draw_example(encoder: Encoder, rng: random.Random, stage: Stage, style: Style, questions: int) -> Example:
    """One scene with its questions."""
    scene = draw_scene(rng, style)
    asked = draw_questions(scene, rng, questions, stage.weights)
    system = rng.random() < stage.system
    if rng.random() >= stage.gap:
        return encoder.example(scene, asked, system=system)
    free = MAX_POSITIONS - style.passages * (style.tokens + 1) - 16 * questions
    largest = min(_LARGEST_GAP, free // style.passages) if rng.random() < 0.5 else free // style.passages
    gaps = [rng.randint(0, max(0, largest)) for _ in scene.passages]
    return encoder.example(scene, asked, gaps, system=system)


def collate(examples: Sequence[Example]) -> Batch:
    """Pads on the right, where causal attention never looks from in front."""
    length = max(len(example.ids) for example in examples)

    def stack(rows: Sequence[list[int]], fill: int | None = 0) -> torch.Tensor:
        return torch.tensor([row + [row[-1] if fill is None else fill] * (length - len(row)) for row in rows])

    lessons: dict[Lesson, list[tuple[int, int, int]]] = defaultdict(list)
    for number, example in enumerate(examples):
        for lesson, index, token in example.lessons:
            lessons[lesson].append((number, index, token))
    return Batch(
        ids=stack([example.ids for example in examples]),
        labels=stack([example.labels for example in examples]),
        positions=stack([example.positions for example in examples], fill=None),
        lessons={lesson: torch.tensor(where) for lesson, where in lessons.items()},
    )


@torch.no_grad()
def exact_match(model: Any, encoder: Encoder, seed: int, style: Style, questions: int) -> dict[str, float]:
    """Share of questions, by category, of which the model finds every answer token and the end, one question a prompt.

    Teacher forcing: the same as greedy decoding, since an answer counts only if all of it is right.
    """
    rng = random.Random(seed)
    right: dict[str, list[bool]] = defaultdict(list)
    device = next(model.parameters()).device
    for _ in range(questions):
        scene = draw_scene(rng, style)
        asked = [found[0] for found in scene.questions(rng).values() if found]
        batch = collate([encoder.example(scene, [question]) for question in asked]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
        wrong = (logits.argmax(-1) != batch.ids[:, 1:]) & (batch.labels[:, 1:] >= ANSWER)
        for question, missed in zip(asked, wrong.any(-1).tolist(), strict=True):
            right[question.category].append(not missed)
    return {category: sum(hits) / len(hits) for category, hits in right.items()}
