"""Prefills and answers at the same time: interleaved steppers, threads, several models, tensor-parallel ranks, batches;
and what a pass took is released when its result is."""

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from cacheblend.core.fuse.batching import TogetherPass
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions, PrefillResult
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention import AttentionSpec
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selectors import AllRows, Hkvd, Selector
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.decode import GROW_ROWS, Decoding, Sampler, compute_logits
from cacheblend.engines.hf.layers import HfLayerRunner, JoinedRows
from cacheblend.engines.hf.view import ModelView
from cacheblend.store import MemoryStore
from campaign import rotating
from families import tiny_model
from parity.scenes import (
    DIVERSE,
    EVERY,
    FAMILIES,
    QUESTION,
    RAG,
    SYSTEM,
    UNSEEN,
    A,
    B,
    C,
    Outcome,
    Recorded,
    assert_as_reference,
    assert_close,
    assert_same,
    finish,
    greedy,
    open_engine,
    run,
    stepper,
    warm_engine,
)
from rank_threads import Meeting
from reference import blend

TOLERANCE = 3e-5
SELECTOR = Hkvd((1, 2), (0.4, 0.2))
ASKING = Hybrid((1, 2), (0.4, 0.2), early=0.6)
PROMPTS = [RAG, Prompt.of([A, C, QUESTION]), Prompt.of([SYSTEM, C, B]), Prompt.of([QUESTION, A, A, SYSTEM])]


@pytest.mark.parametrize(
    ("family", "selector"),
    [
        *product(("llama", "gemma3_text", "gpt_oss", "deepseek_v3"), [SELECTOR]),
        *product(["llama"], [Query(0.2), ASKING, Query(0.2, words=1.0, hops=1)]),
    ],
)
@torch.no_grad()
def test_two_interleaved_requests_on_one_view(family: str, selector: Selector) -> None:
    """Nor do the question's passes keep a state outside of their own request."""
    engine = warm_engine(family)
    one, other = (stepper(engine, prompt, selector) for prompt in PROMPTS[:2])
    other.advance(2)  # the two need not be at the same layer
    while not (one.done and other.done):
        one.advance()
        other.advance()
    for pass_, prompt in ((one, PROMPTS[0]), (other, PROMPTS[1])):
        reference = blend(tiny_model(family), prompt, selector)
        assert_same(pass_.result(), reference.logits, reference.kv, TOLERANCE)


@pytest.mark.parametrize("layers", [1, 2, 3, 100])
@torch.no_grad()
def test_steps_of_any_length_give_the_same_result(layers: int) -> None:
    engine = warm_engine("llama")
    whole, stepped = stepper(engine, RAG, SELECTOR), stepper(engine, RAG, SELECTOR)
    seen = []
    while not stepped.done:
        seen.append(stepped.layer)
        stepped.advance(layers)
    assert seen == list(range(0, 4, layers))
    assert torch.equal(stepped.result().logits, finish(whole).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_threads_can_share_an_engine(family: str) -> None:
    engine = warm_engine(family)
    alone = [run(engine, prompt, SELECTOR) for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: run(engine, prompt, SELECTOR), PROMPTS * 4))
    for expected, outcome in zip(alone * 4, together, strict=True):
        assert outcome.recomputed == expected.recomputed
        assert_same(outcome.result, expected.result.logits, expected.result.kv, 1e-6)


def test_threads_that_capture_and_hit_concurrently() -> None:
    """At r = 1 the answer is that of full prefill for any state of the store; in the end it holds all chunks."""
    model, params = tiny_model("llama"), SamplingParams(max_new_tokens=4, ignore_eos=True)
    with open_engine(model, [], capture=True) as engine:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: engine.generate(prompt, params, ratio=1.0), PROMPTS * 4))
        assert engine.flush(timeout=60)
        for prompt, answer in zip(PROMPTS * 4, answers, strict=True):
            assert answer.token_ids == greedy(model, prompt, 4)
        assert all(engine.prefill(prompt).report.missed_tokens == 0 for prompt in PROMPTS)


def test_several_models_share_a_process_and_a_store() -> None:
    families = ["llama", "llama-yarn", "gemma3_text"]
    with MemoryStore() as store:
        engines = [open_engine(tiny_model(family), store=store) for family in families]
        outcomes: list[Outcome] = [run(engine, RAG, SELECTOR) for engine in engines]
        for engine in engines:
            engine.close()
        assert len(store.manifests()) == 3 * len(families)
    for family, outcome in zip(families, outcomes, strict=True):
        assert_as_reference(outcome, blend(tiny_model(family), RAG, SELECTOR), TOLERANCE)


class RankRunner(HfLayerRunner):
    """One tensor-parallel rank: half of the heads, with attention outputs gathered from both ranks."""

    rank: int
    ranks: Meeting

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().project(layer, hidden, rows)
        return self._mine(keys), self._mine(values)

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        def attend_both(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
        ) -> torch.Tensor:
            sinks = None if spec.sinks is None else self._mine(spec.sinks)
            mine = AttentionSpec(spec.scaling, spec.window, spec.softcap, sinks)
            part = attend(self._mine(query), self._mine(keys), self._mine(values), mine)
            return torch.cat(self.ranks.exchange(self.rank, part), dim=1)

        return super().run(layer, hidden, rows, attend_both)

    def _mine(self, by_head: torch.Tensor) -> torch.Tensor:
        return by_head.chunk(2)[self.rank]


@torch.no_grad()
def prefill_of_rank(engine: BlendEngine, rank: int, ranks: Meeting, seen: list[Recorded], alone: bool) -> PrefillResult:
    """Runs one rank's prefill; `alone`: without combining deviations and attention over the ranks."""
    plan = engine.runtime.planner.plan(RAG, engine.store)
    shapes = engine.runtime.survey.layout.layers
    layout = KVLayout(
        tuple(LayerShape(s.kv_heads // 2, s.head_dim) for s in shapes), engine.runtime.survey.layout.dtype
    )
    half = layout.layers[0].kv_heads
    heads = slice(rank * half, (rank + 1) * half)
    ids = torch.tensor(plan.prompt.token_ids.tolist())

    def open_loader(plan: BlendPlan, first: int) -> LayerLoader:
        rotations = engine.runtime.survey.rotations
        return LayerLoader(plan, engine.store, layout, rotations, first_reused_layer=first, heads=heads)

    def open_runner(plan: BlendPlan) -> RankRunner:
        runner = RankRunner(engine.runtime.view, ids, torch.arange(len(ids)))
        runner.rank, runner.ranks = rank, ranks
        return runner

    def join(by_row: torch.Tensor, how: str) -> torch.Tensor:
        parts = torch.stack(ranks.exchange(rank, by_row))
        return parts.sum(0) if how == "sum" else parts.amax(0)

    options = PrefillOptions(over_ranks=None if alone else join, tile_rows=32)
    with BlendedPrefill(plan, open_runner, open_loader, seen[rank], options) as prefill:
        return finish(prefill)


def on_two_ranks(
    engine: BlendEngine, selector: Selector, alone: bool = False
) -> tuple[list[PrefillResult], list[Recorded]]:
    ranks, seen = Meeting(2), [Recorded(selector), Recorded(selector)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(prefill_of_rank, engine, rank, ranks, seen, alone) for rank in (0, 1)]
        return [future.result() for future in futures], seen


@pytest.mark.parametrize("selector", [SELECTOR, ASKING], ids=["hkvd", "hybrid"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_tensor_parallel_ranks_select_the_same_rows_as_one_device(family: str, selector: Selector) -> None:
    engine = warm_engine(family)
    single, expected = Recorded(selector), run(engine, RAG, selector)
    engine.prefill(RAG, selector=single)
    results, seen = on_two_ranks(engine, selector)
    for rank in (0, 1):
        assert seen[rank].kept == expected.recomputed
        for mine, whole in zip(seen[rank].asked, single.asked, strict=True):
            for name in ("deviation", "attention"):
                if getattr(whole, name) is not None:
                    assert_close(getattr(mine, name), getattr(whole, name), 1e-5, f"{name} at layer {whole.layer}")
        assert_close(results[rank].logits, expected.result.logits, 1e-5, "logits")
    for layer, whole in enumerate(expected.result.kv):
        for part in (0, 1):
            halves = torch.cat([result.kv[layer][part] for result in results])
            assert_close(halves, whole[part], 1e-5, f"KV of layer {layer}")


@pytest.mark.parametrize("selector", [SELECTOR, ASKING], ids=["hkvd", "hybrid"])
def test_ranks_that_do_not_combine_deviations_select_different_rows(selector: Selector) -> None:
    """Shows why `over_ranks` is needed: the heads of each rank alone rank the rows differently."""
    _, seen = on_two_ranks(warm_engine("llama"), selector, alone=True)
    assert seen[0].kept != seen[1].kept


# ---- batches ----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "tile_rows"),
    [
        *rotating(((f, 1000) for f in FAMILIES), core=[(f, 1000) for f in DIVERSE]),
        *rotating(((f, 40) for f in DIVERSE), core=[("llama", 40), ("deepseek_v3", 40)]),
    ],
)
def test_batched_prefills_equal_single_prefills(family: str, tile_rows: int) -> None:
    engine, selector = warm_engine(family), Hkvd(ratios=(0.3,))
    prompts = (RAG, Prompt.of([SYSTEM, C, UNSEEN, A, QUESTION]), Prompt.of([B, QUESTION, A, QUESTION]))
    alone = [finish(stepper(engine, prompt, selector)) for prompt in prompts]
    together = [stepper(engine, prompt, selector) for prompt in prompts]
    while not together[0].done:
        steps = TogetherPass([each.next_layer() for each in together], JoinedRows, tile_rows, isolate=False)
        steps.advance()
    for one, other in zip(together, alone, strict=True):
        result = one.result()
        assert result.report.recomputed_tokens == other.report.recomputed_tokens
        assert result.report.row_layers == other.report.row_layers
        assert_same(result, other.logits, other.kv, 1e-5)


ASKED = (RAG, Prompt.of([SYSTEM, C, QUESTION]), Prompt.of([B, QUESTION, A, QUESTION]))


def answering(family: str, prompt: Prompt, params: SamplingParams) -> Decoding:
    engine = warm_engine(family)
    result = engine.prefill(prompt, selector=AllRows())
    return Decoding(Sampler(engine.runtime.ids_of(prompt), result.logits, params, []), list(result.kv))


def step(view: ModelView, answers: Sequence[Decoding]) -> None:
    compute_logits(view, answers)
    for answer in answers:
        answer.sampler.sample()


@pytest.mark.parametrize("family", EVERY)
def test_each_answer_equals_generate(family: str) -> None:
    params = SamplingParams(max_new_tokens=6)
    answers = [answering(family, prompt, params) for prompt in ASKED]
    for round_ in range(8):  # each answer starts one step after the previous one
        going = [a for number, a in enumerate(answers) if number <= round_ and a.sampler.finish_reason is None]
        step(warm_engine(family).runtime.view, going)
    for answer, prompt in zip(answers, ASKED, strict=True):
        assert answer.sampler.token_ids == greedy(tiny_model(family), prompt, 6)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_kv_cache_grows_when_it_is_full(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.engines.hf.decode.GROW_ROWS", 3)
    answer = answering(family, RAG, SamplingParams(max_new_tokens=14))
    while answer.sampler.finish_reason is None:
        step(warm_engine(family).runtime.view, [answer])
    assert GROW_ROWS > 3 and answer.sampler.token_ids == greedy(tiny_model(family), RAG, 14)


def test_answers_of_one_prompt_share_only_the_prompts_kv() -> None:
    engine = warm_engine("llama")
    result = engine.prefill(RAG, selector=AllRows())
    params = [SamplingParams(max_new_tokens=8, temperature=2.0, seed=seed) for seed in (1, 2, 1)]
    answers = [
        Decoding(Sampler(engine.runtime.ids_of(RAG), result.logits, each, []), list(result.kv)) for each in params
    ]
    while answers[0].sampler.finish_reason is None:
        step(engine.runtime.view, answers)
    first, second, third = (answer.sampler.token_ids for answer in answers)
    assert first == third != second
    torch.manual_seed(0)
    single = Sampler(engine.runtime.ids_of(RAG), result.logits, params[1], [])
    alone = Decoding(single, list(result.kv))
    while single.finish_reason is None:
        step(engine.runtime.view, [alone])
    assert single.token_ids == second


# ---- memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile_rows", [32, 1024], ids=["tiles", "one tile"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_kv_cache_lives_as_long_as_its_result(family: str, tile_rows: int) -> None:
    with open_engine(tiny_model(family), sentence_end_ids=[5, 9], tile_rows=tile_rows) as engine:
        engine.prefill(RAG, selector=Query(0.2))
        gc.collect()
        gc.disable()
        try:
            for selector in (Hkvd((1,), (0.2,)), Query(0.2)):
                result = engine.prefill(RAG, selector=selector)
                alive = [weakref.ref(part) for layer in result.kv for part in layer]
                del result
                assert [ref for ref in alive if ref() is not None] == []
        finally:
            gc.enable()
