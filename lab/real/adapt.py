"""What a small LoRA on the query projections takes back of what reuse loses, at no recompute: it is trained to make the
question, and the answer, expect from stored KV what they expect after a full prefill (distillation, as ATTUNER does).

Stored KV, its names and what else is computed of the documents stay as they are: the adapter is in effect for rows of
the question and of the answer alone. It is trained on the passages and questions of the tune rows, drawn together anew
at each step; passages that hold the answer of a test row, of whichever file, are never among them. On a CPU, for models
all of whose layers attend to all tokens by keys and values.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import join_ids
from cacheblend.core.plan.prompt import Prompt
from cacheblend.data import QuestionRow, read_questions
from cacheblend.engines.folders import model_folder
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.recurrent import fill_cache
from cacheblend.engines.provenance import stamp
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.runner import Case, Settings, make_cases, store_passages
from lab.bench import Advance, silent
from lab.real.pretrained import made_folder
from lab.real.quality import BASE, OURS, TEMPLATE, Way, holding, holding_any, rows_of, summarise
from lab.settings import Adapt

REUSE = "text none"
MEASURED = (REUSE, OURS["05"], OURS["15"])
TOGETHER = ", adapted"
ALPHA = 2.0  # weight of the LoRA's product, its alpha by its rank
RATE, WARM_STEPS = 2e-3, 10
TRIES = 20  # draws of passages for a step, some of which may be too long


class QueryLora(nn.Module):
    """A projection with a LoRA beside it, in float32, which does nothing until it is trained, or while `on` is false.

    Args:
        inner: the projection, frozen.
        rank: of the two matrices [rank, in] and [out, rank].
    """

    on = True

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(rank, inner.in_features) / math.sqrt(inner.in_features))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(rows)
        return found + (ALPHA * rows.float() @ self.a.T @ self.b.T).to(found.dtype) if QueryLora.on else found


@contextmanager
def without_adapters() -> Iterator[None]:
    """The model without its adapters."""
    QueryLora.on = False
    try:
        yield
    finally:
        QueryLora.on = True


class Group(NamedTuple):
    """Prompts of the same documents. Questions are padded on the left, so that answers begin together."""

    documents: torch.Tensor  # [n] int64, what stands in front of the questions
    questions: torch.Tensor  # [k, m] int64
    mask: torch.Tensor  # [k, m] int64, 1: not padding

    @staticmethod
    def of(prompts: Sequence[Prompt]) -> "Group":
        segments = prompts[0].segments
        start = sum(map(len, segments[: 1 + max(n for n, each in enumerate(segments) if each.is_chunk)]))
        ids = [torch.from_numpy(join_ids(s.token_ids for s in prompt.segments).astype("i8")) for prompt in prompts]
        longest = max(map(len, ids)) - start
        questions, mask = torch.zeros(2, len(ids), longest, dtype=torch.int64)
        for row, own in enumerate(ids):
            assert torch.equal(own[:start], ids[0][:start])  # prompts of the same passages
            questions[row, longest - len(own) + start :] = own[start:]
            mask[row, longest - len(own) + start :] = 1
        return Group(ids[0][:start], questions, mask)

    def follow(self, model: Any, documents: DynamicCache, answers: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
        """What is expected of each token of the answers [k, n] and of the one behind them, log-probabilities [k, n + 1,
        vocabulary], and the cache. `documents`: their KV, for all questions."""
        cache, (k, given) = DynamicCache(), answers.shape
        for layer, each in enumerate(documents.layers):
            assert each.keys is not None and each.values is not None
            cache.update(each.keys.expand(k, -1, -1, -1), each.values.expand(k, -1, -1, -1), layer)
        return self._go_on(model, cache, torch.cat([self.questions, answers], 1), keep=given + 1)

    def _go_on(
        self, model: Any, cache: DynamicCache, ids: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, DynamicCache]:
        known, (k, new) = int(cache.get_seq_length()), ids.shape
        answers = torch.ones(k, known + new - len(self.documents) - self.mask.shape[1], dtype=torch.int64)
        mask = torch.cat([torch.ones(k, len(self.documents), dtype=torch.int64), self.mask, answers], 1)
        places = (mask.cumsum(1) - 1)[:, -new:]
        out = model(
            ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=keep
        )
        return torch.log_softmax(out.logits.float(), -1), cache

    @torch.no_grad()
    def teach(self, model: Any, tokens: int, ends: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The model's own greedy answers after a full prefill: what it expects of each token, log-probabilities [k, n,
        vocabulary], the tokens [k, n], and which of them belong to an answer, [k, n] bool."""
        with without_adapters():
            documents = model(self.documents[None], use_cache=True, logits_to_keep=1).past_key_values
            found, cache = self.follow(model, documents, self.questions[:, :0])
            steps, told, counts = [found[:, -1]], [found[:, -1].argmax(-1)], [torch.ones(len(found), dtype=torch.bool)]
            while len(told) < tokens:
                alive = counts[-1] & ~torch.isin(told[-1], torch.tensor(ends))
                if not alive.any():
                    break
                found, cache = self._go_on(model, cache, told[-1][:, None], keep=1)
                steps.append(found[:, -1])
                told.append(found[:, -1].argmax(-1))
                counts.append(alive)
        return torch.stack(steps, 1), torch.stack(told, 1), torch.stack(counts, 1)


def kl(full: torch.Tensor, got: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """KL(full || got) a token, mean of each answer and then of all."""
    each = (full.exp() * (full - got)).sum(-1) * counts
    return (each.sum(1) / counts.sum(1)).mean()


@dataclass
class Trained:
    """Engines, a model of the same weights with adapters, and these."""

    engines: dict[str, BlendEngine]  # by anchor
    model: Any
    loras: dict[str, QueryLora]  # by the name of the projection
    begun: set[str] = field(default_factory=set)  # engines whose store has what stands in front of the passages

    def stored(self, case: Case, way: Way, documents: int) -> tuple[DynamicCache, float]:
        """The KV of so many tokens of documents that a way makes, and its share of a full prefill's compute."""
        engine, prompt = self.engines[way.anchor], case.longest
        store_passages(engine, [case], silent, first=way.anchor not in self.begun)
        self.begun.add(way.anchor)
        result = engine.prefill(prompt, selector=way.make())
        report = result.report
        if report.missed_tokens:
            raise RuntimeError(f"{way.name}: {report.missed_tokens} tokens that were stored are not found")
        cache = fill_cache(self.model, list(result.kv), None)
        cache.crop(documents - len(prompt))
        return cache, ComputeScale.of(engine).share(report.row_layers, report.projected_rows, report.prompt_tokens)


def run(asked: Adapt, advance: Advance = silent) -> dict[str, Any]:
    """Trains the adapter, then measures it on test rows; `figures.adapt_removed`: of the KL of reuse behind BOS."""
    model = asked.model or made_folder()
    files = {file.stem: list(read_questions(file)) for file in asked.data}
    torch.manual_seed(0)
    total = asked.steps + sum(len(rows_of(own, "test")[: asked.rows]) for own in files.values())
    configs = {anchor: Way.config(anchor) for anchor in ("bos", "text")}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in files}
    done = asked.steps
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(BlendEngine.from_pretrained(model, store="memory", config=config, device="cpu"))
            for name, config in configs.items()
        }
        cases = {
            name: make_cases(engines["bos"], Settings(TEMPLATE), rows_of(own, "test")[: asked.rows])
            for name, own in files.items()
        }
        if not any(case.prompts for own in cases.values() for case in own):
            raise InvalidInputError("there are no test rows that fit the model's context")
        survey = engines["bos"].runtime.survey
        if not survey.room or any(survey.windows):
            raise InvalidInputError(f"{model} has layers that do not attend to all tokens by keys and values")
        trained = Trained(engines, *with_loras(model, asked.rank))
        losses = train(trained, files, asked, lambda step: advance(step, total))
        if asked.out is not None:
            save(trained, asked.out, model)
        for name, own in cases.items():
            for case in own:
                rows[name] += [_measure(trained, case, asked.answer_tokens)] if case.prompts else []
                advance(done := done + 1, total)
    found = summarise(rows)
    removed = {way: found["ways"][way]["kl_removed"]["value"] for way in found["ways"]}
    found["figures"] |= {"adapt_removed": removed[REUSE + TOGETHER], "reuse_removed": removed[REUSE]}
    found["figures"] |= {f"adapt_removed_{share}": removed[OURS[share] + TOGETHER] for share in ("05", "15")}
    parameters = sum(each.numel() for lora in trained.loras.values() for each in (lora.a, lora.b))
    return found | {"losses": losses, "steps": asked.steps, "parameters": parameters} | stamp()


def with_loras(model: Path, rank: int) -> tuple[Any, dict[str, QueryLora]]:
    """The folder's model with an untrained adapter on each query projection, and these by the projection's name. Raises
    `InvalidInputError`: it has none of that name."""
    opened = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype="auto").eval().requires_grad_(False)
    names = [name for name, each in opened.named_modules() if name.endswith(".q_proj") and isinstance(each, nn.Linear)]
    if not names:
        raise InvalidInputError(f"{model} has no q_proj to adapt")
    loras = {name: QueryLora(opened.get_submodule(name), rank) for name in names}
    for name, lora in loras.items():
        opened.set_submodule(name, lora)
    return opened, loras


def train(trained: Trained, files: dict[str, list[QuestionRow]], asked: Adapt, advance: Any) -> list[dict[str, float]]:
    """Trains the adapters, each step on some questions of the same passages; the losses of each step, by way."""
    draw, losses = random.Random(0), []
    parameters = [each for lora in trained.loras.values() for each in (lora.a, lora.b)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    tested = {text for own in files.values() for row in rows_of(own, "test") for text in holding_any(row)}
    sources = {name: Questions(own, tested, draw) for name, own in files.items()}
    engine = trained.engines["text"]
    for step in range(1, asked.steps + 1):
        for _ in range(TRIES):
            drawn = sources[[*sources][step % len(sources)]].draw(asked.questions)
            if cases := [case for case in make_cases(engine, Settings(TEMPLATE), drawn) if case.prompts]:
                break
        else:
            raise InvalidInputError(f"of {TRIES} draws of tune rows no prompt fits the model's context")
        group = Group.of([case.longest for case in cases])
        full, answers, counts = group.teach(trained.model, asked.answer_tokens, [*engine.runtime.eos_ids])
        ways, lost = [REUSE, draw.choice(MEASURED[1:])], {}
        for way in ways:
            documents, _ = trained.stored(cases[0], Way.of(way), len(group.documents))
            loss = kl(full, group.follow(trained.model, documents, answers[:, :-1])[0], counts)
            (loss / len(ways)).backward()  # type: ignore[no-untyped-call]
            lost[way] = float(loss.detach())
        for settings in optimizer.param_groups:
            settings["lr"] = RATE * min(1, step / WARM_STEPS) * (0.525 + 0.475 * math.cos(math.pi * step / asked.steps))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(lost)
        advance(step)
    return losses


class Questions:
    """Draws questions on the same passages from the tune rows of a file; without the passages in `tested`. Raises
    `InvalidInputError`: none is left."""

    def __init__(self, rows: Sequence[QuestionRow], tested: set[str], draw: random.Random) -> None:
        self._draw, tune = draw, rows_of(rows, "tune")
        self._rows: dict[str, list[QuestionRow]] = {}
        for row in tune:
            if holding(row) not in tested:
                self._rows.setdefault(holding(row), []).append(row)
        if not self._rows:
            raise InvalidInputError("each passage with an answer of a tune row holds one of a test row, too")
        passages = {each.text: each for row in tune for each in row.passages}
        self._passages = {text: each for text, each in passages.items() if text not in tested}
        self._size = min(len(rows[0].passages), len(self._passages))

    def draw(self, most: int) -> list[QuestionRow]:
        """At most so many questions, each on the same passages in the same order."""
        texts = self._draw.sample([*self._rows], min(self._size, len(self._rows)))
        others = [text for text in self._passages if text not in texts]
        texts += self._draw.sample(others, self._size - len(texts))
        passages = tuple(self._passages[text] for text in self._draw.sample(texts, len(texts)))
        rows = [row for text in texts for row in self._rows.get(text, ())]
        return [replace(row, passages=passages) for row in self._draw.sample(rows, min(most, len(rows)))]


@torch.no_grad()
def _measure(trained: Trained, case: Case, tokens: int) -> dict[str, Any]:
    """A row of `summarise`: full prefill and each way, with the adapters and without."""
    group = Group.of([case.longest])
    full, answers, counts = group.teach(trained.model, tokens, [*trained.engines["bos"].runtime.eos_ids])

    def figures(got: torch.Tensor, compute: float) -> dict[str, float]:
        return {
            "kl": float(kl(full, got, counts)),
            "log_likelihood": float(got[0].gather(1, answers[0, :, None]).mean()),
            "same": float((got.argmax(-1) == answers).float().mean()),
            "compute": compute,
        }

    found: dict[str, Any] = {"passage": holding(case.row), "full": figures(full, 1.0)}
    for name in (BASE, *MEASURED):
        documents, compute = trained.stored(case, Way.of(name), len(group.documents))
        if name != BASE:
            got, _ = group.follow(trained.model, documents, answers[:, :-1])
            found[name + TOGETHER] = figures(got, compute)
        with without_adapters():
            got, _ = group.follow(trained.model, documents, answers[:, :-1])
        found[name] = figures(got, compute)
    return found


def save(trained: Trained, folder: Path, model: Path) -> None:
    """Writes the adapter as PEFT reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, lora in trained.loras.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = lora.a.detach().contiguous()
        weights[f"base_model.model.{name}.lora_B.weight"] = lora.b.detach().contiguous()
    save_file(weights, folder / "adapter_model.safetensors")
    rank = len(next(iter(trained.loras.values())).a)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA * rank}
    config |= {"target_modules": ["q_proj"], "base_model_name_or_path": str(model.name), "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
