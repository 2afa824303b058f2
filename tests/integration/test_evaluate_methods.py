"""What each method of an evaluation does and costs, on a tiny model."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.layout import PromptLayout
from cacheblend.evaluation import Cell, Evaluation, Settings, Template, evaluate, make_methods
from cacheblend.evaluation.compute import ComputeScale
from evaluation_rows import KINDS, LAYERS, ROWS, cells_of, engine, model
from families import tiny_model

__all__ = ["engine", "model"]  # fixtures


@pytest.fixture(scope="module")
def found(engine: BlendEngine) -> Evaluation:
    methods = make_methods(KINDS, selectors=["hkvd", "all"], ratios=[0.3], check_layers=[(1,)])
    return evaluate(engine, ROWS, methods, settings=Settings(max_tokens=5))


def test_full_is_what_transformers_generates(engine: BlendEngine, found: Evaluation) -> None:
    for row, cell in zip(ROWS, cells_of(found, "full"), strict=True):
        prompt = PromptLayout().prompt(engine, [Passage(text.text) for text in row.passages], row.question)
        ids = engine.ids_of(prompt)[None]
        out = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert cell.token_ids == out[0, ids.shape[1] :].tolist()
        assert cell.answer == engine.tokenizer.decode(cell.token_ids, skip_special_tokens=True)
        assert (cell.row_layers, cell.prompt_tokens) == (len(prompt) * LAYERS, len(prompt))
        assert cell.total_compute == 1


def test_everything_recomputed_by_the_fused_path_agrees_with_full(found: Evaluation) -> None:
    for full, blend in zip(cells_of(found, "full"), cells_of(found, "blend all"), strict=True):
        assert blend.token_ids == full.token_ids
        assert blend.top_1 is True
        assert blend.kl == pytest.approx(0, abs=1e-4)


def test_prefix_loads_the_first_passage_only_and_answers_as_full(engine: BlendEngine, found: Evaluation) -> None:
    assert engine.builder is not None
    for row, full, prefix in zip(ROWS, cells_of(found, "full"), cells_of(found, "prefix"), strict=True):
        first = 1 + len(engine.builder.encode(row.passages[0].text))  # behind BOS, as it was stored
        assert prefix.loaded_tokens == first
        assert prefix.row_layers == (full.prompt_tokens - first) * LAYERS
        assert prefix.token_ids == full.token_ids


def test_reuse_and_blend_load_all_passages(engine: BlendEngine, found: Evaluation) -> None:
    assert engine.builder is not None
    for row, reuse, blend in zip(ROWS, cells_of(found, "reuse"), cells_of(found, "blend hkvd @1 r=0.3"), strict=True):
        lengths = [len(engine.builder.encode(text.text)) for text in row.passages]
        assert reuse.loaded_tokens == blend.loaded_tokens == 1 + sum(lengths)
        assert reuse.recomputed_tokens == 0
        assert blend.recomputed_tokens == round(0.3 * sum(lengths[1:]))  # the first one is an exact prefix
        assert reuse.missed_tokens == blend.missed_tokens == 0


def test_total_compute_counts_rows_layers_and_projections(engine: BlendEngine, found: Evaluation) -> None:
    layer = engine.model.model.layers[0]
    attention = layer.self_attn
    projections = sum(part.weight.numel() for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    share = projections / sum(parameter.numel() for parameter in layer.parameters())
    for full, blend in zip(cells_of(found, "full"), cells_of(found, "blend hkvd @1 r=0.3"), strict=True):
        rows = full.prompt_tokens - blend.loaded_tokens  # never loaded
        candidates = full.prompt_tokens - rows - _prefix(found, full)
        kept = rows + blend.recomputed_tokens
        # Layer 0: all rows behind the prefix; layer 1: those kept; layer 2: the last row, the others projected.
        assert blend.row_layers == (rows + candidates) + kept + 1
        assert blend.projected_rows == (rows + candidates) + kept
        whole = (blend.row_layers + share * blend.projected_rows) / (full.prompt_tokens * LAYERS)
        assert blend.total_compute == pytest.approx(whole)
    assert ComputeScale.of(engine).projection == pytest.approx(share)


@pytest.mark.parametrize(("family", "names"), [("phi3", ("qkv_proj",)), ("qwen2", ("q_proj", "k_proj", "v_proj"))])
def test_a_projected_row_costs_its_queries_too_fused_or_not(family: str, names: tuple[str, ...]) -> None:
    model: Any = tiny_model(family)
    layer = model.model.layers[0]
    projections = sum(getattr(layer.self_attn, name).weight.numel() for name in names)
    with BlendEngine(model, None, fingerprint="x") as engine:
        share = ComputeScale.of(engine).projection
    assert share == pytest.approx(projections / sum(parameter.numel() for parameter in layer.parameters()))


def _prefix(found: Evaluation, full: Cell) -> int:
    index = cells_of(found, "full").index(full)
    return cells_of(found, "prefix")[index].loaded_tokens


def test_map_reduce_asks_each_passage_and_then_the_answers(engine: BlendEngine) -> None:
    template = Template(map_question="Alone: {question}", reduce_answer="<{number}:{answer}>", chat=False)
    (method,) = make_methods(["map-reduce"])
    found = evaluate(engine, ROWS[:1], [method], settings=Settings(template, max_tokens=4))
    (cell,) = found.rows[0].cells
    params = SamplingParams(max_new_tokens=4)
    answers, tokens, rows = [], 0, 0
    for text in ROWS[0].passages:
        prompt = engine.prompt([text.text, "\n\n", "Alone: When was it lit?"])
        answer = engine.generate(prompt, params, ratio=1.0)
        answers.append(f"<{len(answers) + 1}:{answer.text.strip()}>")
        tokens += len(prompt)
        rows += len(prompt) + len(answer.token_ids) - 1
    last = engine.prompt(["".join(answers) + "\nWhen was it lit?"])
    assert cell.answer == engine.generate(last, params).text
    assert cell.prompt_tokens == tokens + len(last)
    assert cell.row_layers == (rows + len(last)) * LAYERS
    assert cell.loaded_tokens == 0 and cell.kl is None and cell.top_1 is None


@torch.no_grad()
def test_map_rerank_takes_the_answer_of_the_highest_mean_log_probability(
    engine: BlendEngine, found: Evaluation
) -> None:
    for row, cell in zip(ROWS, cells_of(found, "map-rerank"), strict=True):
        scored = []
        for text in row.passages:
            prompt = engine.ids_of(engine.prompt([text.text, "\n\n", row.question]))[None]
            out = engine.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
            )
            drawn = out[0, prompt.shape[1] :]
            logits = engine.model(out).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
            scored.append((float(logits.gather(1, drawn[:, None]).mean()), drawn.tolist()))
        assert cell.token_ids == max(scored)[1]
        assert cell.ttft_s == cell.total_s  # it is known when all are there


def test_top_k_takes_the_first_passages_for_every_method(engine: BlendEngine) -> None:
    methods = make_methods(["full", "reuse"])
    found = evaluate(engine, ROWS[:1], methods, settings=Settings(top_k=(1, 3, 9), max_tokens=1))
    cells = found.rows[0].cells
    assert [(cell.method, cell.top_k, cell.chunks) for cell in cells] == [
        (method, k, min(k, 3)) for k in (1, 3, 9) for method in ("full", "reuse")
    ]
    assert cells[0].prompt_tokens < cells[2].prompt_tokens == cells[4].prompt_tokens


def test_methods_take_turns_in_going_first(engine: BlendEngine) -> None:
    order: list[str] = []
    plain = make_methods(["full", "reuse"])

    @dataclass(frozen=True)
    class Watched:
        method: Any

        @property
        def label(self) -> Any:
            return self.method.label

        def check(self, layers: int) -> None:
            pass

        def answer(self, asked: Any) -> Any:
            order.append(self.label.name)
            return self.method.answer(asked)

    found = evaluate(engine, ROWS[:2], [Watched(method) for method in plain], settings=Settings(max_tokens=1))
    assert order == ["full", "reuse", "reuse", "full"]
    assert [cell.method for cell in found.rows[1].cells] == ["full", "reuse"]


def test_a_stop_text_ends_an_answer(engine: BlendEngine, found: Evaluation) -> None:
    full = next(cell for cell in cells_of(found, "full") if len(cell.answer.strip()) > 1)
    number = cells_of(found, "full").index(full)
    stop = full.answer.strip()[1]
    template = Template(stop=(stop,))
    again = evaluate(engine, [ROWS[number]], make_methods(["full"]), settings=Settings(template, max_tokens=5))
    assert again.rows[0].cells[0].answer == full.answer[: full.answer.index(stop)]


def test_joined_answers_over_the_context_skip_that_method_only(engine: BlendEngine) -> None:
    template = Template(reduce_answer="{answer}" + "and so on and on, " * 40, chat=False)
    found = evaluate(engine, ROWS[:1], make_methods(["full", "map-reduce"]), settings=Settings(template, max_tokens=2))
    full, reduce = found.rows[0].cells
    assert full.token_ids and not full.skipped
    assert "the model's context 256" in reduce.skipped and not reduce.token_ids
