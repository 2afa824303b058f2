"""`cacheblend evaluate` on a tiny model: what each method does and costs, its prompts, runs that go on, the command."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.cli.options import LayoutOptions
from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import CacheBlendError, InvalidInputError, ModelOverflowError
from cacheblend.data import QuestionRow
from cacheblend.data.questions import split_text
from cacheblend.engines import provenance
from cacheblend.engines.folders import name_of
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf.baselines import follow, full_recompute
from cacheblend.engines.hf.recurrent import fill_cache
from cacheblend.engines.shadow import agreement
from cacheblend.evaluation import Evaluation, Settings, evaluate, make_cases, make_methods, summarise
from cacheblend.evaluation import methods as methods_of_evaluation
from cacheblend.evaluation.candidates import Candidate
from cacheblend.evaluation.compute import ComputeScale
from cacheblend.evaluation.gate import GateRow, run_gate
from cacheblend.evaluation.records import Cell
from cacheblend.evaluation.templates import PromptLayout, Template
from cacheblend.store import MemoryStore
from command_line import Run, runner
from families import tiny_model
from tiny_folder import TinyShape, build_tiny
from tokenizers_for_tests import CHATML, byte_level

LAYERS = 3
SHAPE = TinyShape(layers=LAYERS, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=256)
PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather. None of them ever saw a whale.",
    "Mussels grow on ropes, and the harvest stops when algae are found. The ropes are then left in the water.",
    "A clock that shows the tide needs a wheel for the moon. Most of them were built by two brothers.",
    "Nobody knows who built the bridge, but the toll was paid until 1902. It was two pence for a horse.",
]
KINDS = ["full", "prefix", "reuse", "blend", "map-reduce", "map-rerank"]


def make_row(number: int, passages: int = 3, **fields: Any) -> QuestionRow:
    """The passages in an order of the row's own."""
    order = [PASSAGES[(number + i) % len(PASSAGES)] for i in range(passages)]
    return replace(QuestionRow("When was it lit?", tuple(Passage(text) for text in order), ("1871",)), **fields)


ROWS = [make_row(number, category=("a", "b")[number % 2]) for number in range(4)]


def cells_of(found: Evaluation, method: str) -> list[Cell]:
    return [cell for row in found.rows for cell in row.cells if cell.method == method]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "tiny-llama"
    build_tiny(folder, PASSAGES, SHAPE)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def found(engine: BlendEngine) -> Evaluation:
    methods = make_methods(KINDS, selectors=["hkvd", "all"], ratios=[0.3], check_layers=[(1,)])
    return evaluate(engine, ROWS, methods, settings=Settings(max_tokens=5))


def test_every_method_does_what_it_says(engine: BlendEngine, found: Evaluation) -> None:
    # Full is what transformers generates
    for row, cell in zip(ROWS, cells_of(found, "full"), strict=True):
        prompt = PromptLayout().prompt(engine, row.passages, row.question)
        ids = engine.runtime.ids_of(prompt)[None]
        out = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert cell.token_ids == out[0, ids.shape[1] :].tolist()
        assert cell.answer == engine.tokenizer.decode(cell.token_ids, skip_special_tokens=True)
        assert (cell.row_layers, cell.prompt_tokens) == (len(prompt) * LAYERS, len(prompt))
        assert cell.total_compute == 1
    # Everything recomputed by the fused path agrees with full
    for full, blend in zip(cells_of(found, "full"), cells_of(found, "blend all"), strict=True):
        assert blend.token_ids == full.token_ids
        assert blend.top_1 is True
        assert blend.kl == pytest.approx(0, abs=1e-4)
    # Prefix loads the first passage only and answers as full
    assert engine.runtime.builder is not None
    for row, full, prefix in zip(ROWS, cells_of(found, "full"), cells_of(found, "prefix"), strict=True):
        first = 1 + len(engine.runtime.builder.encode(row.passages[0].text))  # behind BOS, as it was stored
        assert prefix.loaded_tokens == first
        assert prefix.row_layers == (full.prompt_tokens - first) * LAYERS
        assert prefix.token_ids == full.token_ids
    # Reuse and blend load all passages
    assert engine.runtime.builder is not None
    for row, reuse, blend in zip(ROWS, cells_of(found, "reuse"), cells_of(found, "blend hkvd @1 r=0.3"), strict=True):
        lengths = [len(engine.runtime.builder.encode(text.text)) for text in row.passages]
        assert reuse.loaded_tokens == blend.loaded_tokens == 1 + sum(lengths)
        assert reuse.recomputed_tokens == 0
        assert blend.recomputed_tokens == round(0.3 * sum(lengths[1:]))  # the first one is an exact prefix
        assert reuse.missed_tokens == blend.missed_tokens == 0


@torch.no_grad()
def test_methods_are_compared_over_the_models_own_answer(engine: BlendEngine, tmp_path: Path) -> None:
    """Of each method the model's expectations of full recompute's answer are what a plain pass over its KV gives."""
    names, given = ["full", "reuse", "blend", "map-rerank"], Settings(max_tokens=5, answers="model")
    methods = make_methods(names, selectors=["all", "head"], ratios=[0.3])
    found = evaluate(engine, ROWS, methods, settings=given, out=tmp_path)
    for row, full, reuse in zip(ROWS, cells_of(found, "full"), cells_of(found, "reuse"), strict=True):
        prompt = PromptLayout().prompt(engine, row.passages, row.question)
        own, asked = torch.tensor(full.token_ids), len(prompt)
        expected = engine.model(torch.cat([engine.runtime.ids_of(prompt), own])[None]).logits[0, asked - 1 : -1]
        result = engine.prefill(prompt, mode="reuse")
        got = [result.logits]
        cache = fill_cache(engine.model, list(result.kv))
        for at, token in enumerate(own[:-1]):
            place = torch.tensor([[asked + at]])
            got.append(engine.model(token[None, None], past_key_values=cache, position_ids=place).logits[0, -1])
        full_logs, logs = expected.log_softmax(-1), torch.stack(got).log_softmax(-1)
        assert reuse.own_kl == pytest.approx(float((full_logs.exp() * (full_logs - logs)).sum(-1).mean()), rel=1e-3)
        assert reuse.own_top_1 == pytest.approx(float((logs.argmax(-1) == own).float().mean()))
    for name in ("full", "blend all"):
        assert all(c.own_kl == pytest.approx(0, abs=1e-4) and c.own_top_1 == 1 for c in cells_of(found, name))
    assert [cell.own_kl for cell in cells_of(found, "map-rerank")] == [None] * len(ROWS)
    assert [cell.token_ids for cell in cells_of(found, "reuse")] == [
        cell.token_ids for cell in cells_of(evaluate(engine, ROWS, methods, settings=Settings(max_tokens=5)), "reuse")
    ]
    assert evaluate(engine, ROWS, methods, settings=given, out=tmp_path).resumed == len(ROWS)
    by_method = {method["method"]: method["agreement"] for method in summarise(found)["methods"]}
    assert by_method["blend all"]["own_top_1"]["all"]["mean"] == 1 and by_method["map-rerank"]["own_kl"]["all"] is None
    assert 0 <= by_method["reuse"]["own_kl"]["all"]["low"] <= by_method["reuse"]["own_kl"]["all"]["high"]


def test_a_method_alone_is_compared_over_an_answer_of_one_token_and_over_impossible_tokens(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = evaluate(engine, ROWS, make_methods(["reuse"]), settings=Settings(max_tokens=1, answers="model"))
    for row, cell in zip(ROWS, cells_of(found, "reuse"), strict=True):
        prompt = PromptLayout().prompt(engine, row.passages, row.question)
        close = agreement(engine.prefill(prompt, mode="reuse").logits, full_recompute(engine, prompt).logits)
        assert (cell.own_kl, cell.own_top_1) == (pytest.approx(close.kl, abs=1e-4), float(close.first))
        assert (cell.kl, cell.top_1) == (None, None), "full recompute is not among the methods"
    # A method may rule out what full recompute does not: that counts much, and is still a number
    for ruled_out in (slice(5, None), slice(0, None, 2)):

        def masked(*asked: Any, ruled_out: slice = ruled_out) -> torch.Tensor:
            logits = follow(*asked)
            logits[:, ruled_out] = -torch.inf
            return logits

        monkeypatch.setattr(methods_of_evaluation, "follow", masked)
        found = evaluate(engine, ROWS[:1], make_methods(["full"]), settings=Settings(max_tokens=2, answers="model"))
        (cell,) = cells_of(found, "full")
        assert cell.own_kl is not None and 1e-3 < cell.own_kl < float("inf")


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
            prompt = engine.runtime.ids_of(engine.prompt([text.text, "\n\n", row.question]))[None]
            out = engine.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False
            )
            drawn = out[0, prompt.shape[1] :]
            logits = engine.model(out).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1)
            scored.append((float(logits.gather(1, drawn[:, None]).mean()), drawn.tolist()))
        assert cell.token_ids == max(scored)[1]
        assert cell.ttft_s == cell.total_s  # it is known when all are there


def test_passages_and_methods_in_order(engine: BlendEngine) -> None:
    # Top k takes the first passages for every method
    methods = make_methods(["full", "reuse"])
    found = evaluate(engine, ROWS[:1], methods, settings=Settings(top_k=(1, 3, 9), max_tokens=1))
    cells = found.rows[0].cells
    assert [(cell.method, cell.top_k, cell.chunks) for cell in cells] == [
        (method, k, min(k, 3)) for k in (1, 3, 9) for method in ("full", "reuse")
    ]
    assert cells[0].prompt_tokens < cells[2].prompt_tokens == cells[4].prompt_tokens
    # Methods take turns in going first
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


def test_an_answer_ends_and_is_skipped_alone(engine: BlendEngine, found: Evaluation) -> None:
    # A stop text ends an answer
    full = next(cell for cell in cells_of(found, "full") if len(cell.answer.strip()) > 1)
    number = cells_of(found, "full").index(full)
    stop = full.answer.strip()[1]
    template = Template(stop=(stop,))
    again = evaluate(engine, [ROWS[number]], make_methods(["full"]), settings=Settings(template, max_tokens=5))
    assert again.rows[0].cells[0].answer == full.answer[: full.answer.index(stop)]
    # Joined answers over the context skip that method only
    template = Template(reduce_answer="{answer}" + "and so on and on, " * 40, chat=False)
    found = evaluate(engine, ROWS[:1], make_methods(["full", "map-reduce"]), settings=Settings(template, max_tokens=2))
    full, reduce = found.rows[0].cells
    assert full.token_ids and not full.skipped
    assert "the model's context 256" in reduce.skipped and not reduce.token_ids


# ---- prompts, the room that they need in the store, what cannot be asked --------------------------------------------


def test_text_in_front_of_passages_is_exact_and_they_are_stored_behind_it(model: Path) -> None:
    # A system prompt is an exact prefix of every row
    template = Template(system="You answer questions from passages, and you do so in very few words.")
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        assert engine.runtime.builder is not None
        found = evaluate(
            engine, ROWS, make_methods(["full", "prefix", "reuse"]), settings=Settings(template, max_tokens=1)
        )
        system = 1 + len(engine.runtime.builder.encode(template.system + "\n\n"))
    assert {cell.loaded_tokens for cell in cells_of(found, "prefix")} == {system}
    assert {cell.missed_tokens for cell in cells_of(found, "reuse")} == {0}
    # The anchor system stores passages behind it
    template = Template(system="You answer questions from passages.", chat=False)
    with BlendEngine.from_pretrained(model, device="cpu", config=BlendConfig(anchor="system")) as engine:
        found = evaluate(engine, ROWS, make_methods(["full", "reuse"]), settings=Settings(template, max_tokens=1))
    assert {cell.missed_tokens for cell in cells_of(found, "reuse")} == {0}


def test_a_small_store_is_filled_again_and_again(model: Path) -> None:
    texts = [f"Passage {number} tells of the year {1800 + 7 * number}, and of nothing else." for number in range(12)]
    rows = [QuestionRow("When?", tuple(Passage(text) for text in texts[i : i + 2])) for i in range(0, 12, 2)]
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        needed = max(len(PromptLayout().prompt(engine, r.passages, "When?")) for r in rows)
        bytes_per_token = engine.runtime.survey.layout.block_bytes(1)
    with (
        MemoryStore(5 * needed * bytes_per_token) as store,
        BlendEngine.from_pretrained(model, device="cpu", store=store) as engine,
    ):
        found = evaluate(engine, rows, make_methods(["full", "reuse"]), settings=Settings(max_tokens=1))
        assert store.stats().evictions > 0
    assert {cell.missed_tokens for cell in cells_of(found, "reuse")} == {0}


@pytest.mark.parametrize("system", [None, "Be brief. {question}"])
@pytest.mark.parametrize("template", [None, CHATML])
def test_the_default_layout_is_that_of_ask(model: Path, template: str | None, system: str | None) -> None:
    with BlendEngine.from_pretrained(model, device="cpu") as opened:
        weights = opened.model
    weights.resize_token_embeddings(800)
    with BlendEngine(weights, byte_level(template), fingerprint="x") as engine:
        texts = [("The fox jumps.", ""), ("The dog sleeps.", "Dogs")]
        prompt = LayoutOptions(system).build(engine, texts, "Who {question}?")
        parts: list[Any] = ["The fox jumps.", "\n\n", "The dog sleeps.", "\n\n", "Who {question}?"]
        if template is None:
            expected = engine.prompt([f"{system}\n\n", *_with_passages(parts)] if system else _with_passages(parts))
        else:
            content = [{"type": ("chunk", "text")[i % 2 if i < 4 else 1], "text": text} for i, text in enumerate(parts)]
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            expected = engine.prompt([*messages, {"role": "user", "content": content}])
        assert [(s.token_ids.tolist(), s.is_chunk) for s in prompt.segments] == [
            (s.token_ids.tolist(), s.is_chunk) for s in expected.segments
        ]


def _with_passages(parts: list[str]) -> list[Any]:
    return [Passage(text) if i in (0, 2) else text for i, text in enumerate(parts)]


def test_headings_and_a_text_in_front_are_plain_text_around_the_chunks(engine: BlendEngine) -> None:
    assert engine.runtime.builder is not None
    layout = PromptLayout(before="Read:\n", heading="{number}) {title}: ", separator="\n", question="Q: {question}")
    prompt = layout.prompt(engine, [Passage("The fox.", "Fox"), Passage("The dog.", "Dog")], "Who?")
    texts = [engine.runtime.builder.decode(segment.token_ids.tolist()) for segment in prompt.segments]
    assert texts[1:] == ["Read:\n", "1) Fox: ", "The fox.", "\n", "2) Dog: ", "The dog.", "\n", "Q: Who?"]
    assert [segment.label for segment in prompt.chunks] == ["Fox", "Dog"]


def test_prompts_over_the_context_are_skipped_and_counted(engine: BlendEngine, model: Path) -> None:
    long = make_row(0, passages=30)
    found = evaluate(
        engine, [long, ROWS[1]], make_methods(["full", "reuse"]), settings=Settings(top_k=(2, None), max_tokens=2)
    )
    assert [cell.top_k for cell in found.rows[0].cells] == [2, 2]
    ((k, reason),) = found.rows[0].too_long
    assert k is None and "tokens, the model's context 256" in reason
    assert found.rows[1].too_long == []
    with pytest.raises(InvalidInputError, match=r"none of the 1 prompts fits the model's context 256"):
        evaluate(engine, [long], make_methods(["full"]))
    # Nor does a passage that fits, but not behind its anchor
    row = QuestionRow("?", (Passage("keep " * 80),))
    anchored = BlendConfig(anchor="text", anchor_text="A text of more than six tokens, which stands in front.")
    with BlendEngine.from_pretrained(model, device="cpu", config=anchored) as behind_text:
        found = evaluate(behind_text, [row, ROWS[0]], make_methods(["full"]), settings=Settings(max_tokens=1))
        assert (
            "tokens with its anchor, more than the model's context 256; split it" in found.rows[0].too_long[0][1]
            and found.rows[1].cells
        )


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], Settings(), "there are no rows"),
        ([ROWS[0], make_row(1, passages=0)], Settings(), "row 1: it has no passage"),
        ([make_row(0, question="", id="q7")], Settings(), r"row 0 \(id q7\): the question is empty"),
        ([make_row(0, passages=1)], Settings(Template(chat=True)), "row 0: the tokenizer has no chat template"),
    ],
)
def test_rows_that_cannot_be_asked(
    engine: BlendEngine, rows: list[QuestionRow], settings: Settings, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        evaluate(engine, rows, make_methods(["full"]), settings=settings)


def test_cases_that_were_made_are_not_made_again(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: list[str] = []
    settings, rows, methods = Settings(max_tokens=1), [ROWS[0], replace(ROWS[1], passages=())], make_methods(["full"])
    cases = make_cases(engine, settings, rows, bad)
    assert len(cases) == 1 and "row 1: it has no passages" in bad[0]
    asked = evaluate(engine, rows[:1], methods, settings=settings)
    monkeypatch.setattr(type(engine), "prompt", None)
    found = evaluate(engine, cases, methods, settings=settings)
    assert (found.config, found.rows[0].cells[0].answer) == (asked.config, asked.rows[0].cells[0].answer)


def test_values_that_overflow_skip_a_cell_and_name_the_gates_row(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*_: Any, **__: Any) -> Any:
        raise ModelOverflowError("the logits", torch.float16)

    monkeypatch.setattr(methods_of_evaluation, "fused", overflow)
    found = evaluate(engine, ROWS[:1], make_methods(["full", "reuse"]), settings=Settings(max_tokens=1))
    assert [bool(cell.skipped) for cell in found.rows[0].cells] == [False, True]
    assert "exceed the range of float16" in found.rows[0].cells[1].skipped
    rows = [GateRow(["A. ", *row.passages, " Who?"]) for row in ROWS]
    with pytest.raises(CacheBlendError, match=r"row \d: the logits"):
        run_gate(engine, rows, [Candidate("none", {"selector": "none"})])
    # Where full recompute overflows, methods are compared with no answer of its own
    monkeypatch.setattr(methods_of_evaluation, "full_recompute", overflow)
    settings = Settings(max_tokens=1, answers="model")
    found = evaluate(engine, ROWS[:1], make_methods(["full", "prefix"]), settings=settings)
    assert [bool(cell.skipped) for cell in found.rows[0].cells] == [True, False]


def test_settings_and_methods_that_cannot_be(engine: BlendEngine) -> None:
    with pytest.raises(InvalidInputError, match="top_k must be at least 1, got 0"):
        Settings(top_k=(0,))
    with pytest.raises(InvalidInputError, match="max_tokens must be at least 1, got 0"):
        Settings(max_tokens=0)
    with pytest.raises(InvalidInputError, match="answers 'Gold': choose from gold, model"):
        Settings(answers="Gold")
    with pytest.raises(InvalidInputError, match=r"check layer 3 does not exist: the model has layers 0..2"):
        evaluate(engine, ROWS, make_methods(["blend"], check_layers=[(3,)]))
    with pytest.raises(InvalidInputError, match="two methods have the same name: full"):
        evaluate(engine, ROWS, make_methods(["full"]) * 2)


KILLED = """
import os, signal, sys
from pathlib import Path
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Settings, evaluate, make_methods
from cacheblend.evaluation.records import ROWS as FILE
sys.path.insert(0, sys.argv[3])
from test_evaluate import ROWS

def kill(stage, done, total):
    if stage == "answering" and done == 2:
        (file,) = Path(sys.argv[2]).glob(f"*/{FILE}")
        with file.open("ab") as stream:  # the beginning of a third line
            stream.write(file.read_bytes()[:40])
        os.kill(os.getpid(), signal.SIGKILL)

with BlendEngine.from_pretrained(sys.argv[1], device="cpu") as engine:
    evaluate(engine, ROWS, make_methods(), settings=Settings(max_tokens=3), out=Path(sys.argv[2]), progress=kill)
"""


@pytest.mark.slow(4)
def test_a_killed_run_goes_on_where_it_stopped(model: Path, engine: BlendEngine, tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r})\n{KILLED}"
    done = subprocess.run([sys.executable, "-c", code, str(model), str(tmp_path), str(here)], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    answered: list[tuple[int, int]] = []

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "answering":
            answered.append((done, total))

    settings = Settings(max_tokens=3)
    resumed = evaluate(engine, ROWS, make_methods(), settings=settings, out=tmp_path, progress=watch)
    assert (resumed.resumed, resumed.torn) == (2, True)
    assert answered == [(2, 4), (3, 4), (4, 4)]
    assert len(list(tmp_path.iterdir())) == 1
    fresh = evaluate(engine, ROWS, make_methods(), settings=settings)
    assert [_untimed(row) for row in resumed.rows] == [_untimed(row) for row in fresh.rows]
    again = evaluate(engine, ROWS, make_methods(), settings=settings, out=tmp_path)
    assert (again.resumed, again.torn, again.rows) == (4, False, resumed.rows)


def test_rows_that_were_left_out_change_no_numbers_of_a_run_that_goes_on(engine: BlendEngine, tmp_path: Path) -> None:
    """The same rows make the same run, with a bad one in front of them and after it was taken out of the file."""
    settings, methods, bad = Settings(max_tokens=2), make_methods(["full"]), list[str]()
    cases = make_cases(engine, settings, [replace(ROWS[0], passages=()), *ROWS], bad)
    first = evaluate(engine, cases, methods, settings=settings, out=tmp_path, enough=lambda done: done == 2)
    found = evaluate(engine, ROWS, methods, settings=settings, out=tmp_path)
    assert (len(bad), len(first.rows), found.resumed) == (1, 2, 2)
    fresh = evaluate(engine, ROWS, methods, settings=settings)
    assert [_untimed(row) for row in found.rows] == [_untimed(row) for row in fresh.rows]


def _untimed(row: Any) -> Any:
    return replace(row, machine="", cells=[replace(cell, ttft_s=0, total_s=0, kl=None) for cell in row.cells])


def test_anything_else_is_another_run(
    model: Path, engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other data settings or weights are another run
    build_tiny(tmp_path / "other" / "tiny-llama", PASSAGES, SHAPE, seed=1)
    out = tmp_path / "out"
    methods, settings = make_methods(["full"]), Settings(max_tokens=1)
    evaluate(engine, ROWS[:1], methods, settings=settings, out=out)
    evaluate(engine, [replace(ROWS[0], answers=("1872",))], methods, settings=settings, out=out)
    evaluate(engine, [replace(ROWS[0], question="Why?")], methods, settings=settings, out=out)
    evaluate(engine, ROWS[:1], methods, settings=Settings(max_tokens=2), out=out)
    evaluate(engine, ROWS[:1], make_methods(["full", "reuse"]), settings=settings, out=out)
    with BlendEngine.from_pretrained(tmp_path / "other" / "tiny-llama", device="cpu") as other:
        evaluate(other, ROWS[:1], methods, settings=settings, out=out)
    assert len(list(out.iterdir())) == 6
    assert evaluate(engine, ROWS[:1], methods, settings=settings, out=out).resumed == 1
    # Other code or libraries are another run
    changed = tmp_path / "changed"
    first = evaluate(engine, ROWS[:1], methods, settings=settings, out=changed)
    assert set(first.config["libraries"]) >= {"torch", "transformers"}
    assert f"{torch.get_num_threads()} thread" in first.rows[0].machine
    monkeypatch.setattr(provenance, "code_digest", lambda parts: "changed")
    evaluate(engine, ROWS[:1], methods, settings=settings, out=changed)
    versions = provenance.versions()
    monkeypatch.setattr(provenance, "versions", lambda: versions | {"transformers": "4.0"})
    evaluate(engine, ROWS[:1], methods, settings=settings, out=changed)
    assert len(list(changed.iterdir())) == 3


def test_the_digest_is_of_source_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "engines").mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "engines" / "provenance.py"))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)  # somebody's own, with the package in it
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, "-C", tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.delenv("CACHEBLEND_COMMIT", raising=False)
    assert provenance.commit() is None
    # A GPU that was not used is not named
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU of {device}")
    lines = [provenance.machine_line(None if name is None else torch.device(name)) for name in (None, "cpu", "cuda")]
    assert [re.findall("GPU of [^,]*", line) for line in lines] == [["GPU of None"], [], ["GPU of cuda"]]
    found = set()
    for name, text in (("a", "1"), ("a", "2"), ("b", "2")):
        file = package / "engines" / f"{name}.py"
        file.write_text(text)
        (package / "engines" / "notes.txt").write_text(f"{name}{text}")
        provenance.code_digest.cache_clear()
        digest = provenance.code_digest(("engines",))
        assert digest == provenance.code_digest(("engines",))
        found.add(digest)
        file.unlink()
    provenance.code_digest.cache_clear()
    assert len(found) == 3


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `evaluate` in this process, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return runner(capsys, "evaluate")


def write_rows(file: Path, **fields: Any) -> Path:
    rows = [
        {
            "question": row.question,
            "passages": [{"text": text.text} for text in row.passages],
            "answers": list(row.answers),
            "category": row.category,
            **fields,
        }
        for row in ROWS
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_the_command_reports_tables_json_and_plots(run: Run, model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    arguments = ["-m", model, "-d", data, "-n", 3, "--ratio", 0.1, "--ratio", 0.5, "--selector", "hkvd"]
    arguments += ["--selector", "profile", "--scorer", "em", "--scorer", "rouge-l", "--device", "cpu"]
    result = run(*arguments, "--json-file", tmp_path / "all.json")
    assert result.code == 0, result.err
    for part in ("Exact match", "ROUGE-L", "blend hkvd gradual r=0.5", "\nblend r=0.1", "minus full", "1st token"):
        assert part in result.out
    assert "tiny-llama has no chat template: plain prompts" in result.err
    written = json.loads((tmp_path / "all.json").read_text())
    assert written["rows"] == len(written["cells"]) == 4
    assert {"machine", "versions", "commit"} < written.keys()
    assert [method["method"] for method in written["methods"]][:3] == ["full", "prefix", "reuse"]
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith("tiny-llama-rows-")
    assert {file.name for file in folder.iterdir()} >= {"config.json", "rows.jsonl", "summary.json", "em-ttft.png"}
    again = run(*arguments, "--json")
    assert "4 of 4 rows were there already" in again.err
    assert json.loads(again.out)["cells"] == written["cells"]


def test_a_context_is_split_and_rows_without_answers_are_compared(
    run: Run, model: Path, engine: BlendEngine, tmp_path: Path
) -> None:
    # Longbench contexts are split
    context = " ".join(PASSAGES)
    (tmp_path / "lb.jsonl").write_text(json.dumps({"input": "When?", "context": context, "answers": ["1871"]}))
    result = run(
        *("-m", model, "-d", "lb.jsonl", "--chunk-tokens", 24, "-n", 1, "--methods", "full,reuse"),
        *("--json", "--device", "cpu"),
    )
    cells = json.loads(result.out)["cells"][0]["cells"]
    builder = engine.runtime.builder
    assert builder is not None
    assert cells[0]["chunks"] == len(split_text(context, lambda text: len(builder.encode(text)), 24)) > 4
    assert cells[1]["missed_tokens"] == 0
    # Rows without gold answers are still compared
    data = write_rows(tmp_path / "rows.jsonl", answers=[])
    result = run("-m", model, "-d", data, "-n", 1, "--limit", 2, "--device", "cpu")
    assert result.code == 0
    assert "no row has gold answers, so there are no scores" in " ".join(result.err.split())
    assert "Agreement with full recompute" in result.out and "Exact match" not in result.out
    assert "own answers" not in result.out
    result = run("-m", model, "-d", data, "-n", 3, "--limit", 2, "--device", "cpu", "--answers", "model")
    assert result.code == 0 and "Over the model's own answers, 2 rows" in result.out and "KL a token" in result.out


@pytest.mark.parametrize("option", [("--check-layers", "3"), ("--out", "rows.jsonl")])
def test_what_the_config_tells_is_said_before_the_model_is_opened(
    run: Run, model: Path, tmp_path: Path, option: tuple[str, str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")  # without weights it cannot be opened
    result = run("-m", tmp_path / "bare", "-d", data, *option)
    assert result.code == 2
    assert "check layer 3 does not exist" in result.err or "is a file" in result.err


def test_the_model_that_ships_is_called_nano(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shutil.copytree(model, tmp_path / "package" / "model")
    monkeypatch.setattr("cacheblend.engines.folders.shipped_folder", shipped.resolve)
    data = write_rows(tmp_path / "rows.jsonl")
    result = run(
        "-m", "nano", "-d", data, "-n", 1, "--limit", 1, "--methods", "full", "--device", "cpu", "--scorer", "em"
    )
    assert result.code == 0, result.err
    assert "Exact match, %, nano" in result.out
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert folder.name.startswith("nano-rows-")
    assert name_of(shipped) == "nano"
    assert name_of(model) == "tiny-llama"


def test_a_wrong_file_is_said_before_the_model_is_opened(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "Who?", "passages": []}')
    result = run("-m", tmp_path / "no-model", "-d", tmp_path / "rows.jsonl")
    assert result.code == 2
    assert "rows.jsonl, line 1, field 'passages': it is empty" in result.err
