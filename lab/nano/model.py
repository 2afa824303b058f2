"""The model under training: its loss, its optimizers, and exact match on fresh prompts.

The loss has three parts: the next-token loss of the answers; that of the passages' text, with a small weight; and that
of the *probes*. A probe is a linear head that reads one fact off the hidden state after a given layer, at the token
from which that fact is known (at a pronoun: the person it refers to). The heads are discarded after training. They
shorten training from hours to minutes: without them, the only signal that a pronoun must be resolved comes from a
question hundreds of tokens later.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lab.nano.encoding import LABELS, Batch, Encoder, collate
from lab.nano.recipe import Probe, Recipe
from lab.nano.scenes import Style, draw_scene, questions_of

ANSWER = LABELS.index("text") + 1  # labels from here on mark answers
BLOCK = 128  # query rows per matrix product of `attend_in_blocks`


class ProbedModel(nn.Module):
    """The model, with the linear heads of the probes."""

    def __init__(self, model: Any, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        vocabulary, width = model.config.vocab_size, model.config.hidden_size
        self.heads = nn.ModuleDict({name: nn.Linear(width, vocabulary, bias=False) for name in ("thing", "owner")})
        for parameter in self.heads.parameters():
            nn.init.normal_(parameter, std=0.02)

    def loss(self, batch: Batch, tally: "Tally", probes: Collection[Probe]) -> torch.Tensor:
        """The scalar loss; correct predictions are counted in `tally`. Only the probes named in `probes` contribute."""
        out = self.model.model(
            input_ids=batch.ids,
            attention_mask=torch.ones_like(batch.ids),  # else transformers takes position gaps for sequence borders
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
        probe_loss = answer_loss.new_zeros(())
        for probe, where in batch.probes.items():
            if probe in probes:
                probe_loss = probe_loss + self._probe(probe, where, out.hidden_states, tally)
        tally.add_loss(answer_loss, text_loss)
        return answer_loss + self.recipe.text * text_loss + self.recipe.probes * probe_loss

    def _probe(self, probe: Probe, where: torch.Tensor, hidden: Sequence[torch.Tensor], tally: "Tally") -> torch.Tensor:
        states = hidden[self.recipe.probe_layers[probe]][where[:, 0], where[:, 1]]
        head = self.heads["thing" if probe is Probe.THING else "owner"]
        logits = head(F.rms_norm(states.float(), states.shape[-1:])).float()
        tally.add(f"probe {probe.name.lower()}", logits.argmax(-1) == where[:, 2])
        return F.cross_entropy(logits, where[:, 2])


def _cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean over tokens; 0 if there are none, where the mean would be NaN."""
    return F.cross_entropy(logits, wanted) if len(wanted) else logits.sum()


class Tally:
    """Counts of correct predictions and mean losses since the last report."""

    def __init__(self) -> None:
        self.right: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, name: str, right: torch.Tensor) -> None:
        """Counts [n] booleans under `name`."""
        self.right[name][0] += int(right.sum())
        self.right[name][1] += len(right)

    def add_answers(self, right: torch.Tensor, labels: torch.Tensor) -> None:
        for label in sorted(set(labels.tolist())):
            self.add(LABELS[label], right[labels == label])

    def add_loss(self, answers: torch.Tensor, text: torch.Tensor) -> None:
        self.losses.append((answers.detach(), text.detach()))

    def summary(self) -> dict[str, float]:
        """Share of correct predictions by name, and mean losses."""
        shares = {name: right / count for name, (right, count) in self.right.items() if count}
        answers, text = (float(torch.stack(losses).mean()) for losses in zip(*self.losses, strict=True))
        return {"loss": answers, "text loss": text, **shares}


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A new model: embeddings of unit scale, and every layer initialised to the identity."""
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
    """Causal attention by blocks of query rows, for transformers' attention interface.

    Each block only computes scores up to its last row, so little is masked. On a CPU its backward pass is twice as
    fast as that of plain attention, and many times faster than that of the fused kernel. Batches are padded on the
    right, so there is no mask.

    Args:
        module, attention_mask: ignored.
        query: [examples, heads, length, head_dim].
        key, value: [examples, kv_heads, length, head_dim].
        scaling: factor of the scores.

    Returns:
        [examples, length, heads, head_dim], and None in place of the weights.
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


def build_optimizers(trained: ProbedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for all other parameters."""
    inside = [p for name, p in trained.model.named_parameters() if p.dim() == 2 and ".layers." in name]
    chosen = {id(parameter) for parameter in inside}
    others = [parameter for parameter in trained.parameters() if id(parameter) not in chosen]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(inside, lr=recipe.matrix_rate, weight_decay=0.01),
        torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98), eps=1e-9),
    ]


@torch.no_grad()
def exact_match(model: Any, encoder: Encoder, seed: int, style: Style, questions: int) -> dict[str, float]:
    """Exact match by category, on fresh scenes with one question per prompt.

    Uses teacher forcing, which equals greedy decoding here: an answer counts only if every token, the end included,
    is predicted correctly.
    """
    rng = random.Random(seed)
    right: dict[str, list[bool]] = defaultdict(list)
    device = next(model.parameters()).device
    for _ in range(questions):
        scene = draw_scene(rng, style)
        asked = [found[0] for found in questions_of(scene, rng).values() if found]
        batch = collate([encoder.example(scene, [question]) for question in asked]).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
        wrong = (logits.argmax(-1) != batch.ids[:, 1:]) & (batch.labels[:, 1:] >= ANSWER)
        for question, missed in zip(asked, wrong.any(-1).tolist(), strict=True):
            right[question.category].append(not missed)
    return {category: sum(hits) / len(hits) for category, hits in right.items()}
