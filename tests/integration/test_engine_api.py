"""The Python API as the README shows it: sampling options by keyword, chat, `with`, `close`; and wrong uses of it.

Each of those is refused in one sentence that says what was given and what to do, and none fails inside."""

import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.core.plan.prompt import Prompt, Segment, chunk, text
from cacheblend.engines.documents import Document
from cacheblend.engines.hf import Answer, BlendEngine, DocumentSync, Grammar, Passage, SamplingParams
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.hf.live_check import LiveCheck
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.shadow import ShadowSettings
from cacheblend.engines.tokens.chunker import Cutting
from cacheblend.nano import model_path
from cacheblend.retrievers import DocumentServer
from cacheblend.store import DiskStore, MemoryStore, open_store, parse_bytes

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


def test_nothing_of_transformers_warns_a_user() -> None:
    """Of names that it will drop, as of a cache's argument from 5.24 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
            engine.warm(PASSAGES)
            engine.generate(PROMPT, max_new_tokens=2)
            full_recompute(engine, engine.prompt(PROMPT))
            assert all(ok for _, ok, _ in LiveCheck(engine.model, engine.runtime.survey).run()) and engine.flush(60)


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

    engine.runtime.background.submit("a job before them", job)
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
    monkeypatch.setattr(engine.runtime.background, "close", lambda: closed.append("background"))

    def interrupted(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runtime.warmer, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert closed == ["background", "store"]
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        monkeypatch.setattr(engine.runtime.warmer, "flush", lambda timeout: pytest.fail("it waits"))
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


def test_an_engine_has_few_public_names(engine: BlendEngine) -> None:
    public = [name for name in dir(engine) if not name.startswith("_")]
    assert len(public) <= 20, public


ONE = Passage("The bell was sold to Motan.")
ASKED = ["Read.\n\n", ONE, "\n\nWho has the bell?"]
CHAT = [{"role": "user", "content": "Who has the bell?"}]

BAD = "bad \ud800 x"  # a lone surrogate, as JSON brings it in
LONE = r"has a lone surrogate at character 4 \(U\+D800\)"

WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    # ---- opening ----------------------------------------------------------------------------------------
    ("model is None", lambda w: BlendEngine(None), "a model of transformers.*None"),
    ("model is a path", lambda w: BlendEngine("path/to/model"), "from_pretrained"),
    ("model is a module", lambda w: BlendEngine(torch.nn.Linear(2, 2)), "a model of transformers.*Linear"),
    ("tokenizer is a text", lambda w: BlendEngine(w.engine.model, "gpt2"), "tokenizer.*'gpt2'"),
    ("store is a number", lambda w: BlendEngine(w.engine.model, store=5), "a store must be .* got 5"),
    ("store is True", lambda w: BlendEngine(w.engine.model, store=True), "a store must be .* got True"),
    ("store is empty", lambda w: BlendEngine(w.engine.model, store=""), "an empty store name"),
    ("config is a number", lambda w: BlendEngine(w.engine.model, config=5), "config must be .* got 5"),
    ("config is a text", lambda w: BlendEngine(w.engine.model, config="hkvd"), "config must be .* got 'hkvd'"),
    ("config's unknown field", lambda w: BlendEngine(w.engine.model, config={"ratio": 0.1}), "no field 'ratio'"),
    ("config's keys are numbers", lambda w: BlendEngine(w.engine.model, config={5: 1, "a": 2}), "no field 5"),
    ("fingerprint is a number", lambda w: BlendEngine(w.engine.model, fingerprint=5), "fingerprint .*5"),
    ("bos_id is a text", lambda w: BlendEngine(w.engine.model, bos_id="<s>"), "bos_id .*'<s>'"),
    ("bos_id outside the vocabulary", lambda w: BlendEngine(w.engine.model, bos_id=10**9), "bos_id .*1000000000"),
    ("sentence_end_ids is a text", lambda w: BlendEngine(w.engine.model, sentence_end_ids="."), "sentence_end_ids"),
    ("name is a number", lambda w: BlendEngine(w.engine.model, name=5), "name .*5"),
    ("path is None", lambda w: BlendEngine.from_pretrained(None), "path .*None"),
    ("path is a model", lambda w: BlendEngine.from_pretrained(w.engine.model), r"path .*BlendEngine\(model"),
    ("path is nowhere", lambda w: BlendEngine.from_pretrained(w.tmp / "nowhere"), "nowhere"),
    ("path is an empty folder", lambda w: BlendEngine.from_pretrained(w.tmp), "config.json"),
    ("opened with store=5", lambda w: BlendEngine.from_pretrained(model_path(), store=5), "a store must be .* got 5"),
    ("opened with config=5", lambda w: BlendEngine.from_pretrained(model_path(), config=5), "config must .* got 5"),
    ("opened with profile=5", lambda w: BlendEngine.from_pretrained(model_path(), profile=5), "profile .*5"),
    ("opened with a lost profile", lambda w: BlendEngine.from_pretrained(model_path(), profile="none"), "none"),
    ("opened with dtype=5", lambda w: BlendEngine.from_pretrained(model_path(), dtype=5), "dtype .*5"),
    ("opened with a wrong dtype", lambda w: BlendEngine.from_pretrained(model_path(), dtype="fp17"), "'fp17'"),
    ("opened with device=-7", lambda w: BlendEngine.from_pretrained(model_path(), device=-7), "device -7"),
    ("opened with an option of nobody", lambda w: BlendEngine.from_pretrained(model_path(), stor="x"), "stor"),
    ("with_tokenizer is a text", lambda w: BlendEngine.from_pretrained(model_path(), with_tokenizer="no"), "'no'"),
    # ---- prompts ----------------------------------------------------------------------------------------
    ("prompt is None", lambda w: w.engine.generate(None), "prompt is .*None"),
    ("prompt is a number", lambda w: w.engine.generate(5), "prompt is .*5"),
    ("prompt is empty", lambda w: w.engine.generate([]), "the prompt is empty"),
    ("prompt is an empty text", lambda w: w.engine.generate(""), "the prompt is empty"),
    ("prompt is bytes", lambda w: w.engine.generate(b"Who?"), "prompt is a text.*b'Who"),
    ("prompt is token ids", lambda w: w.engine.generate([3, 4, 5]), r"Prompt\.of"),
    ("prompt is an array", lambda w: w.engine.generate(np.array([3, 4])), r"Prompt\.of"),
    ("prompt is a tensor", lambda w: w.engine.generate(torch.tensor([3, 4])), r"Prompt\.of"),
    ("prompt is a tokenizer's", lambda w: w.engine.generate({"input_ids": [3, 4]}), "input_ids"),
    ("prompt is one message", lambda w: w.engine.generate(CHAT[0]), r"\[message\]"),
    ("prompt is two texts", lambda w: w.engine.generate(["Who?", "When?"]), "2 texts.*generate_batch.*engine.prompt"),
    ("prompt is a generator of texts", lambda w: w.engine.generate(t for t in "ab"), "2 texts.*generate_batch"),
    ("streamed prompt is two texts", lambda w: list(w.engine.stream(["Who?", "When?"])), "2 texts.*generate_batch"),
    ("started prompt is two texts", lambda w: w.engine.start(["Who?", "When?"]), "2 texts.*generate_batch"),
    ("prompt has None", lambda w: w.engine.generate(["a", None]), "part 2 of the prompt.*None"),
    ("prompt has a list", lambda w: w.engine.generate([ONE, ["b"]]), r"part 2 of the prompt.*\['b'\]"),
    ("prompt has a segment", lambda w: w.engine.generate(["a", chunk([3])]), r"part 2 of the prompt.*Prompt\.of"),
    ("prompt has a message", lambda w: w.engine.generate(["a", CHAT[0]]), "part 2 of the prompt.*message"),
    ("prompt has an empty passage", lambda w: w.engine.generate(["a", Passage("")]), "no tokens"),
    ("prompt is too long", lambda w: w.engine.generate("word " * 5000), "tokens.*use fewer"),
    ("prompt of no segments", lambda w: w.engine.generate(Prompt.of([])), "the prompt is empty"),
    ("prompt of texts", lambda w: Prompt.of(["Who?"]), "segment.*'Who\\?'"),
    ("prompt of ids", lambda w: Prompt.of([3, 4]), "segment.*3"),
    ("text of a text", lambda w: text("Who?"), "token ids"),
    ("text of fractions", lambda w: text([1.5]), "token ids"),
    ("chunk of negative ids", lambda w: chunk([-1]), "token ids"),
    ("chunk of nothing", lambda w: chunk([]), "no tokens"),
    ("chunk's label is a number", lambda w: chunk([3], 5), "label.*5"),
    ("ids outside the vocabulary", lambda w: w.engine.generate(Prompt.of([text([10**6])])), "1000000 .*vocabulary"),
    ("engine.prompt of a number", lambda w: w.engine.prompt(5), "prompt is .*5"),
    # ---- sampling ---------------------------------------------------------------------------------------
    ("params is a dict", lambda w: w.engine.generate(ASKED, {"max_new_tokens": 3}), r"params .*SamplingParams\(\*\*"),
    ("params is a number", lambda w: w.engine.generate(ASKED, 64), "params .*64.*max_new_tokens"),
    ("params and an option", lambda w: w.engine.generate(ASKED, SamplingParams(), seed=1), "not both"),
    ("params of a started one", lambda w: w.engine.start(ASKED, {"seed": 1}), r"params .*SamplingParams\(\*\*"),
    ("an option of vLLM", lambda w: w.engine.generate(ASKED, max_tokens=3), "'max_tokens'.*max_new_tokens"),
    ("an option of transformers", lambda w: w.engine.generate(ASKED, do_sample=True), "'do_sample'.*temperature"),
    ("max_new_tokens=0", lambda w: w.engine.generate(ASKED, max_new_tokens=0), "at least 1, got 0"),
    ("chat with an option of vLLM", lambda w: w.engine.chat(CHAT, max_tokens=3), "'max_tokens'.*max_new_tokens"),
    ("streamed with an option of vLLM", lambda w: w.engine.stream(ASKED, max_tokens=3), "'max_tokens'"),
    ("max_new_tokens=1.5", lambda w: w.engine.generate(ASKED, max_new_tokens=1.5), "whole number, got 1.5"),
    ("max_new_tokens=True", lambda w: w.engine.generate(ASKED, max_new_tokens=True), "whole number, got True"),
    ("top_k=1.5", lambda w: w.engine.generate(ASKED, top_k=1.5), "top_k must be a whole number"),
    ("seed is a text", lambda w: w.engine.generate(ASKED, seed="a"), "seed must be a whole number or None, got 'a'"),
    ("seed=2**70", lambda w: w.engine.generate(ASKED, seed=2**70), "seed must fit 64 bits"),
    ("stop has a number", lambda w: w.engine.generate(ASKED, stop=[5]), "stop must be a tuple of texts"),
    ("stop_token_ids has a text", lambda w: w.engine.generate(ASKED, stop_token_ids=["a"]), "tuple of whole numbers"),
    ("ignore_eos is a text", lambda w: w.engine.generate(ASKED, ignore_eos="no"), "true or false, got 'no'"),
    ("temperature=-1", lambda w: w.engine.generate(ASKED, temperature=-1), "got -1"),
    ("temperature is a text", lambda w: w.engine.generate(ASKED, temperature="hot"), "number, got 'hot'"),
    ("temperature is NaN", lambda w: w.engine.generate(ASKED, temperature=float("nan")), "finite.*got nan"),
    ("top_p=2", lambda w: w.engine.generate(ASKED, top_p=2), "top_p .*got 2"),
    ("top_k=-1", lambda w: w.engine.generate(ASKED, top_k=-1), r"top_k .*0 \(off\), got -1"),
    ("stop is empty", lambda w: w.engine.generate(ASKED, stop=""), "stop text must not be empty"),
    ("grammar is a dict", lambda w: w.engine.generate(ASKED, grammar={"type": "object"}), "Grammar.*'object'"),
    ("logit_bias is a dict of texts", lambda w: w.engine.generate(ASKED, logit_bias={"a": 1}), "logit_bias .*'a'"),
    ("bad_words are texts", lambda w: w.engine.generate(ASKED, bad_words=["no"]), "bad_words .*'no'"),
    ("logit_bias beyond", lambda w: w.engine.generate(ASKED, logit_bias=[(10**6, 1)]), r"logit_bias .*1000000.* 0\.\."),
    ("bad_words of -1", lambda w: w.engine.generate(ASKED, bad_words=[[3, -1]]), r"bad_words .*-1; ids are in 0\.\."),
    ("ratio=2", lambda w: w.engine.generate(ASKED, ratio=2), "ratio .*0..1, got 2"),
    ("ratio is a text", lambda w: w.engine.generate(ASKED, ratio="0.3"), "ratio .*got '0.3'"),
    ("ratio is True", lambda w: w.engine.generate(ASKED, ratio=True), "ratio .*got True"),
    ("Grammar of an unknown kind", lambda w: Grammar("xml"), "kind .*'xml'"),
    ("Grammar of no JSON", lambda w: Grammar.of_schema({1, 2}), "schema cannot be written as JSON"),
    ("Grammar of choices=5", lambda w: Grammar.of_choices(5), "choices .*5"),
    # ---- chat -------------------------------------------------------------------------------------------
    ("chat with a text", lambda w: w.engine.chat("Who?"), "messages are a list"),
    ("chat with None", lambda w: w.engine.chat(None), "messages are a list"),
    ("chat with nothing", lambda w: w.engine.chat([]), "message list is empty"),
    ("chat with one message", lambda w: w.engine.chat(CHAT[0]), "messages are a list"),
    ("chat with two conversations", lambda w: w.engine.chat([CHAT, CHAT]), "generate_batch"),
    ("chat without a role", lambda w: w.engine.chat([{"content": "a"}]), "message 1 .*role"),
    ("chat without contents", lambda w: w.engine.chat([{"role": "user"}]), "message 1 .*content"),
    ("chat's content is a number", lambda w: w.engine.chat([{"role": "user", "content": 5}]), "message 1 .*5"),
    ("chat's part is a number", lambda w: w.engine.chat([{"role": "user", "content": [5]}]), "content part .*5"),
    ("chat's documents are a number", lambda w: w.engine.chat(CHAT, 5), "passage is .*5"),
    ("chat's documents have a number", lambda w: w.engine.chat(CHAT, [ONE, 5]), "document 2.*5"),
    ("chat's documents are messages", lambda w: w.engine.chat(CHAT, CHAT), "document 1.*message"),
    ("chat's template options", lambda w: w.engine.chat(CHAT, template_options=5), "template_options .*5"),
    ("chat's params are a dict", lambda w: w.engine.chat(CHAT, params={"seed": 1}), r"params .*SamplingParams\(\*\*"),
    # ---- many prompts -----------------------------------------------------------------------------------
    ("batch of one text", lambda w: w.engine.generate_batch("Who?"), "prompts .*one text.*generate"),
    ("batch of None", lambda w: w.engine.generate_batch(None), "prompts .*None"),
    ("batch of one Prompt", lambda w: w.engine.generate_batch(w.engine.prompt("a")), "prompts .*generate"),
    ("batch of one conversation", lambda w: w.engine.generate_batch(CHAT), "one conversation"),
    ("batch with params for others", lambda w: w.engine.generate_batch(["a"], [SamplingParams()] * 2), "2 .*1 prompt"),
    ("batch with a dict as params", lambda w: w.engine.generate_batch(["a"], {"seed": 1}), r"SamplingParams\(\*\*"),
    ("batch with both", lambda w: w.engine.generate_batch(["a"], SamplingParams(), seed=1), "not both"),
    ("batch with an unknown option", lambda w: w.engine.generate_batch(["a"], max_tokens=1), "max_new_tokens"),
    ("batch with ratio=2", lambda w: w.engine.generate_batch(["a"], ratio=2), "ratio .*got 2"),
    ("batch of none at once", lambda w: w.engine.generate_batch(["a"], concurrency=0), "concurrency .*got 0"),
    ("batch of a text at once", lambda w: w.engine.generate_batch(["a"], concurrency="8"), "concurrency .*'8'"),
    ("batch with a wrong prompt", lambda w: w.engine.generate_batch(["a", 5]), r"prompts\[1\].*5"),
    ("batch with two texts", lambda w: w.engine.generate_batch([["a", "b"]]), r"prompts\[0\].*2 texts"),
    # ---- passages and documents -------------------------------------------------------------------------
    ("Passage of None", lambda w: Passage(None), "text must be a text, got None"),
    ("Passage's title is a number", lambda w: Passage("a", 5), "title must be a text, got 5"),
    ("Passage.of a number", lambda w: Passage.of(5), "passage is .*5"),
    ("warm of a number", lambda w: w.engine.warm(5), "passage is .*5"),
    ("warm of None", lambda w: w.engine.warm([ONE, None]), "chunk 2.*None"),
    ("warm of a dict without text", lambda w: w.engine.warm([{"title": "a"}]), "chunk 1.*'title'"),
    ("warm of a dict with two texts", lambda w: w.engine.warm([{"text": "a", "content": "b"}]), "text.*content"),
    ("warm of a message", lambda w: w.engine.warm(CHAT), "chunk 1.*message"),
    ("warm of an empty text", lambda w: w.engine.warm([""]), "no tokens"),
    ("warm of a prompt", lambda w: w.engine.warm(Prompt.of([text([3])])), "passage is .*Prompt"),
    ("warm with system=5", lambda w: w.engine.warm([ONE], system=5), "prompt is .*5"),
    ("warm with tenant=5", lambda w: w.engine.warm([ONE], tenant=5), "tenant .*5"),
    ("warm with progress=True", lambda w: w.engine.warm([ONE], progress=True), "progress .*True"),
    ("flush(timeout='1')", lambda w: w.engine.flush("1"), "timeout .*'1'"),
    ("prefill of a text", lambda w: w.engine.prefill("Who?"), r"engine\.prompt"),
    ("prefill of a list", lambda w: w.engine.prefill(ASKED), r"engine\.prompt"),
    ("prefill with a selector's name", lambda w: w.engine.prefill(w.engine.prompt("a"), selector="hkvd"), "selector"),
    ("prefill with a wrong mode", lambda w: w.engine.prefill(w.engine.prompt("a"), mode="fast"), "mode .*'fast'"),
    ("Document's id is empty", lambda w: Document("", "a"), "id is empty"),
    ("Document's text is None", lambda w: Document("a", None), "text .*None"),
    ("sync without an engine", lambda w: DocumentSync(None), "engine .*None"),
    ("sync into collection=5", lambda w: DocumentSync(w.engine, collection=5), "collection.*5"),
    ("sync with cutting=512", lambda w: DocumentSync(w.engine, cutting=512), "cutting .*512"),
    ("sync of a text", lambda w: DocumentSync(w.engine).put("a"), "document.*'a'"),
    ("sync of texts", lambda w: DocumentSync(w.engine).put(["a"]), "document 1.*'a'.*id"),
    ("sync of dicts without ids", lambda w: DocumentSync(w.engine).put([{"text": "a"}]), "document 1.*id"),
    ("sync of passages", lambda w: DocumentSync(w.engine).put([ONE]), "document 1.*id"),
    ("sync drops a text", lambda w: DocumentSync(w.engine).drop("abc"), r"ids .*\['abc'\]"),
    ("sync drops numbers", lambda w: DocumentSync(w.engine).drop([5]), "id .*5"),
    ("vanished from a text", lambda w: DocumentSync(w.engine).vanished("abc"), r"ids .*\['abc'\]"),
    ("Cutting(most='9')", lambda w: Cutting(most="9"), "most .*'9'"),
    ("Cutting(least=0)", lambda w: Cutting(least=0), "0 to 512"),
    # ---- lone surrogates, which are refused with their place -------------------------------------------------------
    ("surrogate in a chunk", lambda w: w.engine.warm(["fine", BAD]), rf"^chunk 2: the text {LONE}"),
    ("surrogate in a title", lambda w: w.engine.warm([Passage("fine", BAD)]), rf"^chunk 1: the title {LONE}"),
    (
        "surrogate in a segment",
        lambda w: w.engine.warm([Segment(chunk([3, 4]).token_ids, True, BAD)]),
        rf"^chunk 1: the label {LONE}",
    ),
    (
        "surrogate in system=",
        lambda w: w.engine.warm(PASSAGES, system=[BAD]),
        rf"^part 1 of the prompt: the text {LONE}",
    ),
    ("surrogate in tenant=", lambda w: w.engine.warm(PASSAGES, tenant=BAD), rf"^the tenant 'bad \\ud800 x' {LONE}"),
    ("surrogate in a prompt", lambda w: w.engine.generate(BAD), rf"^part 1 of the prompt: the text {LONE}"),
    (
        "surrogate in a passage",
        lambda w: w.engine.generate(["fine", Passage(BAD)]),
        rf"^part 2 of the prompt: the text {LONE}",
    ),
    (
        "surrogate in a title asked",
        lambda w: w.engine.generate(["fine", Passage("fine", BAD)]),
        rf"^part 2 of the prompt: the title {LONE}",
    ),
    ("surrogate in stop=", lambda w: w.engine.generate(PROMPT, stop=BAD), rf"^a stop text {LONE}"),
    ("surrogate in a stream", lambda w: list(w.engine.stream([BAD])), rf"^part 1 of the prompt: the text {LONE}"),
    (
        "surrogate in a message",
        lambda w: w.engine.chat([{"role": "user", "content": BAD}]),
        rf"^content 1 of the messages: the text {LONE}",
    ),
    (
        "surrogate in a document",
        lambda w: w.engine.chat(MESSAGES, [Passage("fine", BAD)]),
        rf"^content 2 of the messages: the title {LONE}",
    ),
    ("surrogate in a label", lambda w: Prompt.of([chunk([3, 4], BAD)]), rf"^a chunk's label {LONE}"),
    # ---- settings ---------------------------------------------------------------------------------------
    ("recompute_ratio=2", lambda w: BlendConfig(recompute_ratio=2), "0..1, got 2"),
    ("recompute_ratio='a'", lambda w: BlendConfig(recompute_ratio="a"), "0..1, got 'a'"),
    ("selector is unknown", lambda w: BlendConfig(selector="best"), "'best'; there are auto, hkvd"),
    ("check_layers=2", lambda w: BlendConfig(check_layers=2), "check_layers .*got 2"),
    ("check_layers is a text", lambda w: BlendConfig(check_layers="1"), "check_layers .*got '1'"),
    ("check_layers has a text", lambda w: BlendConfig(check_layers=("1",)), "whole numbers.*'1'"),
    ("ratios has a text", lambda w: BlendConfig(ratios=("a",)), "ratios .*'a'"),
    ("ratios are too many", lambda w: BlendConfig(ratios=(0.2, 0.1)), "1 check layers"),
    ("measure is unknown", lambda w: BlendConfig(measure="q"), "measure .*'q'"),
    ("threshold is missing", lambda w: BlendConfig(selector="threshold"), "set `threshold`"),
    ("hops=9", lambda w: BlendConfig(selector="query", hops=9), "hops .*9"),
    ("lead='a'", lambda w: BlendConfig(selector="query", lead="a"), "lead .*'a'"),
    ("pool=0", lambda w: BlendConfig(selector="query", pool=0), "pool|span"),
    ("question_words='a'", lambda w: BlendConfig(selector="query", question_words="a"), "words .*'a'"),
    ("block_size=0", lambda w: BlendConfig(block_size=0), "block_size .*at least 1, got 0"),
    ("block_size='64'", lambda w: BlendConfig(block_size="64"), "block_size .*got '64'"),
    ("capture=1", lambda w: BlendConfig(capture=1), "capture .*got 1"),
    ("anchor is unknown", lambda w: BlendConfig(anchor="eos"), "anchor .*'eos'"),
    ("codec is unknown", lambda w: BlendConfig(codec="zip"), "'zip'"),
    ("salt is a number", lambda w: BlendConfig(salt=5), "salt .*got 5"),
    ("cost_model is a number", lambda w: BlendConfig(cost_model=5), "cost_model .*5"),
    ("min_run_tokens=1", lambda w: BlendConfig(min_run_tokens=1), "min_run_tokens .*got 1"),
    ("BlendConfig.of a number", lambda w: BlendConfig.of(5), "config must .*5"),
    ("Limits(waiting='a')", lambda w: Limits(waiting="a"), "waiting .*'a'"),
    ("Scheduler without an engine", lambda w: Scheduler(None), "runtime .*None"),
    ("watch with a number", lambda w: w.engine.runtime.watch(0.5), "ShadowSettings.*0.5"),
    ("ShadowSettings('a')", lambda w: ShadowSettings("a"), "'a'"),
    # ---- stores -----------------------------------------------------------------------------------------
    ("open_store(5)", lambda w: open_store(5), "a store must be .* got 5"),
    ("open_store of an unknown scheme", lambda w: open_store("gs://bucket"), "unknown scheme 'gs'"),
    ("open_store with an unknown option", lambda w: open_store("memory://?size=1GiB"), "no option 'size'"),
    ("open_store with no size", lambda w: open_store("memory://?max_bytes=much"), "'much' is not a size"),
    ("open_store(max_bytes=-1)", lambda w: open_store("memory", max_bytes=-1), "'?-1'? is not a size"),
    ("parse_bytes(None)", lambda w: parse_bytes(None), "not a size"),
    ("DiskStore(5)", lambda w: DiskStore(5), "folder .*5"),
    ("DiskStore of a file", lambda w: DiskStore(Path(__file__)), "test_engine_api"),
    ("MemoryStore('much')", lambda w: MemoryStore("much"), "max_bytes .*'much'"),
    ("MemoryStore(-1)", lambda w: MemoryStore(-1), "max_bytes .*-1"),
    # ---- retrievers -------------------------------------------------------------------------------------
    ("server's url is None", lambda w: DocumentServer(None), "url .*None"),
    ("server's url has no scheme", lambda w: DocumentServer("localhost").ids(), "localhost"),
    ("server's key is a number", lambda w: DocumentServer(key=5), "key .*5"),
    ("server's collection is None", lambda w: DocumentServer(collection=None), "collection.*None"),
    ("server gets a text", lambda w: DocumentServer().put("a"), "document.*'a'"),
    ("server gets texts", lambda w: DocumentServer().put(["a"]), "document 1.*'a'.*id"),
    ("server drops a text", lambda w: DocumentServer().drop("abc"), r"ids .*\['abc'\]"),
]


@pytest.fixture
def world(engine: BlendEngine, tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(engine=engine, tmp=tmp_path)


@pytest.mark.parametrize(("use", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_use_is_refused_in_one_sentence(
    world: SimpleNamespace, use: Callable[[Any], Any], message: str
) -> None:
    held = {manifest.chunk_id for manifest in world.engine.store.manifests()}
    with pytest.raises(CacheBlendError, match=message) as refused:
        use(world)
    sentence = str(refused.value)
    assert "\n" not in sentence and 20 <= len(sentence) <= 600
    assert {manifest.chunk_id for manifest in world.engine.store.manifests()} == held


def test_the_table_names_each_use_once() -> None:
    names = [case[0] for case in WRONG]
    assert len(set(names)) == len(names) >= 120
