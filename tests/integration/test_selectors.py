"""Selectors that ask the question, through the engine: sentences of real text, and what a report says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.fuse.question import rows_to_ask
from cacheblend.core.select.question_selectors import Query
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf import prompts as prompts_module
from parity.scenes import Recorded
from tiny_folder import TinyShape, build_tiny

TEXTS = ["The lighthouse was lit in 1871. Its keepers wrote. Nobody read it!", "Mussels grow on ropes. Do they?\nYes"]
SENTENCES = [["The lighthouse was lit in 1871.", " Its keepers wrote.", " Nobody read it!"]]
SENTENCES += [["Mussels grow on ropes.", " Do they?\n", "Yes"]]
PARTS = ["Answer. ", *(Passage(text) for text in TEXTS), " When was it lit?"]
SHAPE = TinyShape(layers=3, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("selectors") / "tiny-llama"
    build_tiny(path, TEXTS, SHAPE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield path
    torch.set_num_threads(threads)


def open_engine(folder: Path, **settings: object) -> BlendEngine:
    config = BlendConfig(capture=False, **settings)  # type: ignore[arg-type]
    engine = BlendEngine.from_pretrained(folder, store="memory", config=config)
    engine.warm(TEXTS)
    return engine


def test_sentences_are_those_of_the_text(folder: Path) -> None:
    recorded = Recorded(Query(0.3))
    with open_engine(folder) as engine:
        prompt = engine.prompt(PARTS)
        engine.prefill(prompt, selector=recorded)
        (asked,) = recorded.asked
        assert asked.sentences is not None
        texts: dict[int, list[int]] = {}
        for position, sentence in zip(asked.positions.tolist(), asked.sentences.tolist(), strict=True):
            texts.setdefault(sentence, []).append(int(prompt.token_ids[position]))
        assert [engine.builder.decode(ids) for ids in texts.values()] == [s for part in SENTENCES for s in part]


@pytest.mark.parametrize("selector", ["query", "hybrid"])
def test_the_report_names_what_the_question_cost(folder: Path, selector: str) -> None:
    with open_engine(folder, selector=selector, recompute_ratio=0.2) as engine:
        answer = engine.generate(PARTS, SamplingParams(max_new_tokens=2, ignore_eos=True))
        question = len(engine.prompt(PARTS).segments[-1])
        report = answer.report
    assert len(answer.token_ids) == 2
    assert report.question_row_layers == SHAPE.layers * min(question, rows_to_ask(report.prompt_tokens))
    assert report.recomputed_tokens == round(0.2 * report.hit_tokens["memory"])
    assert report.question_row_layers < report.row_layers < SHAPE.layers * report.prompt_tokens
    assert report.to_dict()["question_row_layers"] == report.question_row_layers


def test_the_vocabulary_is_read_at_opening_and_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    find = prompts_module.find_sentence_end_ids
    monkeypatch.setattr(prompts_module, "find_sentence_end_ids", lambda t: calls.append(t) or find(t))
    with open_engine(folder, selector="hkvd") as engine:
        engine.prefill(engine.prompt(PARTS))
        assert calls == []  # nobody asks
        engine.prefill(engine.prompt(PARTS), selector=Query(0.2))
        engine.prefill(engine.prompt(PARTS), selector=Query(0.2))
        assert len(calls) == 1
    with open_engine(folder, selector="query") as engine:
        assert len(calls) == 2
        engine.prefill(engine.prompt(PARTS))
        assert len(calls) == 2
