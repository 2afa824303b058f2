"""The Python API as the README shows it: sampling options by keyword, chat, `with`, `close`, and early refusals."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk
from cacheblend.engines.hf import Answer, BlendEngine, Passage, SamplingParams
from cacheblend.nano import model_path
from cacheblend.store import MemoryStore

PASSAGES = [Passage("The lighthouse was lit in 1871.", "lighthouse"), Passage("Mussels grow on ropes.", "mussels")]
PROMPT = ["Answer from the passages.\n\n", *reversed(PASSAGES), "\n\nWhen was it lit?"]
MESSAGES = [{"role": "user", "content": "When was it lit?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        engine.warm(PASSAGES)
        yield engine


def test_sampling_options_by_keyword(engine: BlendEngine) -> None:
    """One that is None is not given; a stop text may be a text or a list."""
    params = SamplingParams(max_new_tokens=5, temperature=0.7, seed=3, ignore_eos=True)
    whole = engine.generate(PROMPT, params)
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.7, "seed": 3, "ignore_eos": True, "stop": None}
    assert engine.generate(PROMPT, **options).token_ids == whole.token_ids
    assert len(whole.token_ids) == 5
    *_, last = engine.stream(PROMPT, **options)
    assert last.answer is not None and last.answer.token_ids == whole.token_ids
    stop = engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True).text.strip()[-3:]
    for given in (stop, [stop], (stop,)):
        answer = engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True, stop=given)
        assert answer.finish_reason == "stop" and stop not in answer.text


@torch.no_grad()
def test_a_request_stepped_by_hand_ends_with_its_block(engine: BlendEngine) -> None:
    with engine.start(PROMPT, SamplingParams(max_new_tokens=3, ignore_eos=True)) as request:
        tokens = [request.step() for _ in range(3)]
        assert request.done
    assert tokens == engine.generate(PROMPT, max_new_tokens=3, ignore_eos=True).token_ids
    assert request.to_store is None


def test_chat_answers(engine: BlendEngine) -> None:
    answer = engine.chat(MESSAGES, documents=PASSAGES, max_new_tokens=4, ignore_eos=True)
    assert isinstance(answer, Answer)
    same = engine.generate(engine.chat_prompt(MESSAGES, PASSAGES), max_new_tokens=4, ignore_eos=True)
    assert answer.token_ids == same.token_ids
    assert isinstance(answer.report.prompt_tokens, int)


def forms(passage: Passage) -> list[Any]:
    """A passage as dicts and as other libraries' documents."""
    return [
        {"text": passage.text, "title": passage.title},
        {"page_content": passage.text, "metadata": {"source": passage.title}, "type": "Document"},
        SimpleNamespace(page_content=passage.text, metadata={"title": passage.title}),
        SimpleNamespace(get_content=lambda metadata_mode: passage.text, metadata={"title": passage.title}),
        SimpleNamespace(content=passage.text, meta={"title": passage.title}),
    ]


def seen(prompt: Prompt) -> tuple[list[int], list[str]]:
    return prompt.token_ids.tolist(), [segment.label for segment in prompt.chunks]


@pytest.mark.parametrize("form", range(5))
def test_passages_in_whatever_form_callers_have_them(engine: BlendEngine, form: int) -> None:
    given = [forms(passage)[form] for passage in PASSAGES]
    assert seen(engine.chat_prompt(MESSAGES, given)) == seen(engine.chat_prompt(MESSAGES, PASSAGES))
    one = engine.chat_prompt(MESSAGES, [PASSAGES[0]])
    assert seen(engine.chat_prompt(MESSAGES, given[0])) == seen(one)  # type: ignore[arg-type]
    assert seen(engine.prompt(["Read.", *given, "When?"])) == seen(engine.prompt(["Read.", *PASSAGES, "When?"]))
    assert seen(engine.prompt(given)) == seen(engine.prompt(PASSAGES))
    assert seen(engine.prompt(given[0])) == seen(engine.prompt([PASSAGES[0]]))
    in_message = [[{"role": "user", "content": ["Read.", *each, "When?"]}] for each in (given, PASSAGES)]
    assert seen(engine.prompt(in_message[0])) == seen(engine.prompt(in_message[1]))
    assert (engine.warm(given).held, engine.warm(given[0]).held) == (2, 1)
    assert engine.generate(["Read.", *given, "When?"], max_new_tokens=1).report.missed_tokens == 0


def test_texts_are_passages_where_no_plain_text_can_be_meant(engine: BlendEngine) -> None:
    texts = [each.text for each in PASSAGES]
    prompt = engine.chat_prompt(MESSAGES, texts)
    assert prompt.token_ids.tolist() == engine.chat_prompt(MESSAGES, PASSAGES).token_ids.tolist()
    assert engine.chat_prompt(MESSAGES, texts[0]).chunks and not engine.chat_prompt(MESSAGES, None).chunks  # type: ignore[arg-type]
    assert (engine.warm(texts).held, engine.warm(PASSAGES[0]).held) == (2, 1)  # type: ignore[arg-type]
    assert not engine.prompt(texts[0]).chunks
    parts = ["Answer from the passages.\n\n", "\n\nWhen was it lit?"]  # a retriever that found nothing
    for said in (engine.prompt(parts), ["".join(parts)], [PASSAGES[0], PASSAGES[1]]):  # texts that are one prompt
        assert engine.generate(said, max_new_tokens=2).token_ids
    with pytest.raises(InvalidInputError, match="a list of 2 texts without a passage"):
        engine.generate(parts)


BAD = "bad \ud800 x"  # a lone surrogate, as JSON brings it in


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (lambda engine: engine.warm(["fine", BAD]), "chunk 2: the text"),
        (lambda engine: engine.warm([Passage("fine", BAD)]), "chunk 1: the title"),
        (lambda engine: engine.warm([Segment(chunk([3, 4]).token_ids, True, BAD)]), "chunk 1: the label"),
        (lambda engine: engine.warm(PASSAGES, system=[BAD]), "part 1 of the prompt: the text"),
        (lambda engine: engine.warm(PASSAGES, tenant=BAD), r"the tenant 'bad \\ud800 x'"),
        (lambda engine: engine.generate(BAD), "part 1 of the prompt: the text"),
        (lambda engine: engine.generate(["fine", Passage(BAD)]), "part 2 of the prompt: the text"),
        (lambda engine: engine.generate(["fine", Passage("fine", BAD)]), "part 2 of the prompt: the title"),
        (lambda engine: engine.generate(PROMPT, stop=BAD), "a stop text"),
        (lambda engine: list(engine.stream([BAD])), "part 1 of the prompt: the text"),
        (lambda engine: engine.chat([{"role": "user", "content": BAD}]), "content 1 of the messages: the text"),
        (lambda engine: engine.chat(MESSAGES, [Passage("fine", BAD)]), "content 2 of the messages: the title"),
        (lambda engine: Prompt.of([chunk([3, 4], BAD)]), "a chunk's label"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_place(engine: BlendEngine, call: Any, place: str) -> None:
    held = {manifest.chunk_id for manifest in engine.store.manifests()}
    with pytest.raises(InvalidInputError, match=rf"^{place} has a lone surrogate at character 4 \(U\+D800\)"):
        call(engine)
    assert {manifest.chunk_id for manifest in engine.store.manifests()} == held


def labels(store: MemoryStore) -> set[str]:
    return {manifest.label for manifest in store.manifests()}


def test_leaving_a_with_block_waits_for_missed_passages_and_closes_the_engine() -> None:
    store = MemoryStore()
    with BlendEngine.from_pretrained(model_path(), store=store) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
    assert labels(store) == {"lighthouse", "mussels"}
    engine.close()  # again
    assert store.stats().chunks == 2  # the caller's store stays open
    for call in (lambda: engine.generate(PROMPT), lambda: engine.warm(PASSAGES), lambda: engine.start(PROMPT)):
        with pytest.raises(InvalidInputError, match="the engine is closed"):
            call()


@pytest.mark.parametrize("raised", [False, True], ids=["close(wait=False)", "an exception in the block"])
def test_missed_passages_are_given_up_where_nobody_waits(raised: bool) -> None:
    store, begun, held = MemoryStore(), threading.Event(), threading.Event()
    engine = BlendEngine.from_pretrained(model_path(), store=store)

    def job() -> None:
        begun.set()
        held.wait()

    engine.background.submit("a job before them", job)
    assert begun.wait(60)
    engine.generate(PROMPT, max_new_tokens=2)
    threading.Timer(0.2, held.set).start()  # the job under way is waited for, those after it are not done
    if raised:
        with pytest.raises(KeyError), engine:
            raise KeyError
    else:
        engine.close(wait=False)
    assert held.is_set() and labels(store) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "gs://bucket"}, "gs"),
        ({"store": "file:///tmp/x?max_byte=1GiB"}, "has no option 'max_byte'"),
        ({"store": "redis://host:port"}, "port"),
        ({"config": {"recompute_ratio": 2}}, "got 2"),
        ({"config": {"recompute_rato": 0.1}}, "recompute_rato"),
        ({"config": {"check_layers": (99,)}}, "check layer 99 does not exist"),
        ({"config": BlendConfig(check_layers=(99,))}, "check layer 99 does not exist"),
        ({"config": {"cost_model": "none.json"}}, "none.json cannot be read"),
        ({"profile": "none.json"}, "none.json cannot be read"),
    ],
)
def test_what_is_wrong_is_said_before_weights_are_read(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (
        "transformers.AutoModelForCausalLM.from_pretrained",
        "cacheblend.engines.hf.model_loader.fingerprint_folder",
    ):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("weights were read"))
    folder = shutil.copytree(model_path(), tmp_path / "model")
    with pytest.raises(InvalidInputError, match=message):
        BlendEngine.from_pretrained(folder, **options)


def test_closing_again_after_an_interrupted_wait_closes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a close gave up is not waited for in the end: `serve` closes its engine in a `with`."""
    engine = BlendEngine.from_pretrained(model_path(), store="memory")
    closed: list[str] = []
    monkeypatch.setattr(engine.store, "close", lambda: closed.append("store"))
    monkeypatch.setattr(engine.background, "close", lambda: closed.append("background"))

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._warmer, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert closed == ["background", "store"]
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        monkeypatch.setattr(engine._warmer, "flush", lambda timeout: pytest.fail("it waits"))
        engine.close(wait=False)


def test_requests_in_progress_end_whole_where_another_thread_closes_the_engine(tmp_path: Path) -> None:
    engine = BlendEngine.from_pretrained(model_path(), store=str(tmp_path / "store"))
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    engine.generate(PROMPT, params)
    assert engine.flush(60)  # from here on every request finds the same in the store
    wanted = engine.generate(PROMPT, params).token_ids
    stream, request = engine.stream(PROMPT, params), engine.start(PROMPT, params)
    next(stream)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    *_, last = stream
    assert last.answer is not None and last.answer.token_ids == wanted
    assert [request.step() for _ in wanted] == wanted
    request.finish()
