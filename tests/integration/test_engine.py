"""An engine on a tiny llama: answers as of transformers, whatever its store and its folder; what it stores.

What an answer says is what the tokenizer makes of all its tokens, up to a stop text, and it ends for that reason."""

import math
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreError, StoreReadOnlyError
from cacheblend.core.fuse.question import rows_to_ask
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines.hf import Answer, BlendEngine, Passage, SamplingParams
from cacheblend.engines.hf import prompts as prompts_module
from cacheblend.engines.hf.sampling import Sampler
from cacheblend.store import MemoryStore
from parity.scenes import Recorded, assert_close
from reference import blend
from small_llama import (
    BLOCK,
    CONTEXT,
    GREEDY,
    LAYERS,
    PARTS,
    PASSAGES,
    QUESTION,
    SOON,
    Open,
    check_chain,
    check_sums,
    names_of,
    plain,
    wait_until,
)
from tiny_folder import TinyShape, build_tiny
from tokenizers_for_tests import byte_level, sentencepiece


@pytest.mark.parametrize("warmed", [False, True])
def test_full_recompute_gives_the_answer_of_transformers(open_engine: Open, warmed: bool) -> None:
    engine = open_engine()
    if warmed:
        engine.warm(PASSAGES)
    prompt = engine.prompt(PARTS)
    answer = engine.generate(prompt, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, prompt)
    assert answer.finish_reason == "length"
    assert (answer.report.missed_tokens == 0) == warmed
    check_sums(answer)
    if warmed:  # an exact prefix gives it at any ratio
        parts = [PASSAGES[0], QUESTION]
        answer = engine.generate(parts, GREEDY, ratio=0.0)
        assert answer.token_ids == plain(engine, engine.prompt(parts))
        assert answer.report.hit_tokens["prefix"] == answer.report.loaded_tokens > 1
        check_sums(answer)


def test_the_ratio_sets_the_number_of_recomputed_rows(open_engine: Open) -> None:
    engine = open_engine(check_layers=(1,))
    engine.warm(PASSAGES)
    prompt = engine.prompt(PARTS)
    chunks = sum(len(s) for s in prompt.chunks)
    for ratio in (0.0, 0.15, 0.5, 1.0):
        answer = engine.generate(PARTS, GREEDY, ratio=ratio)
        assert answer.report.recomputed_tokens == round(ratio * chunks)
        check_sums(answer)
    result = engine.prefill(prompt, selector=NoRows())
    assert (result.report.recomputed_tokens, len(result.kv)) == (0, LAYERS)
    assert result.kv[0].keys.shape[1] == len(prompt)


def test_an_answer_ends_at_eos_of_the_model_or_the_tokenizer(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuned models ship with a generation config that names another token than the tokenizer, or none."""
    engine = open_engine(capture=False)
    whole, end = engine.generate(PARTS, GREEDY), engine.tokenizer.eos_token_id
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [whole.token_ids[2], 0])
    ended = engine.generate(PARTS, SamplingParams(max_new_tokens=8))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]
    drawn = SamplingParams(max_new_tokens=8, temperature=0.0, logit_bias=((end, 90.0),))
    for configured, ids in (([3, 4], [3, 4, end]), (5, [5, end]), (None, [end]), (end, [end])):
        monkeypatch.setattr(engine.model.generation_config, "eos_token_id", configured)
        assert engine.runtime.eos_ids == ids
        answer = engine.generate(PARTS, drawn)
        assert (answer.token_ids, answer.finish_reason) == ([end], "stop")


def test_a_chat_finds_warmed_passages_in_messages_and_as_documents(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    parts = [{"type": "chunk", "text": p.text, "title": p.title} for p in PASSAGES[:2]]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    answer = engine.generate(messages, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, engine.prompt(messages))
    assert answer.report.missed_tokens == 0
    assert answer.report.hit_tokens["memory"] == sum(len(s) for s in engine.prompt(messages).chunks)
    check_sums(answer)
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}], documents=PASSAGES)
    assert [segment.label for segment in prompt.chunks] == ["fox", "stored", "who"]
    assert engine.generate(prompt, GREEDY).report.missed_tokens == 0


def test_invalid_prompts_are_refused(open_engine: Open) -> None:
    engine, mixed = open_engine(), [{"role": "user", "content": "a"}, "b"]
    for parts, message in (([""], "prompt is empty"), (mixed, "part 1 of the prompt: .* not a message")):
        with pytest.raises(InvalidInputError, match=message):
            engine.generate(parts)  # type: ignore[arg-type]
    ran = threading.Event()  # background work is not held up by them
    engine.runtime.background.submit("job", ran.set)
    assert ran.wait(SOON)
    with pytest.raises(InvalidInputError, match=rf"check layer {LAYERS} does not exist: .*0\.\.{LAYERS - 1}"):
        open_engine(check_layers=(1, LAYERS))


def test_the_context_limits_prompt_and_answer(open_engine: Open) -> None:
    engine = open_engine(capture=False)
    ids = [5 + i % 200 for i in range(CONTEXT + 1)]
    with pytest.raises(InvalidInputError, match=f"{CONTEXT + 1} tokens, the model's context {CONTEXT}"):
        engine.generate(Prompt.of([text(ids)]), GREEDY)
    with pytest.raises(InvalidInputError, match="token id 512 at index 1"):
        engine.generate(Prompt.of([text([1, 512])]), GREEDY)
    for left, tokens in ((0, 1), (3, 4), (7, 8), (50, 8)):
        answer = engine.generate(Prompt.of([text(ids[: CONTEXT - left])]), GREEDY)
        assert (len(answer.token_ids), answer.finish_reason) == (tokens, "length")
        assert answer.token_ids == plain(engine, Prompt.of([text(ids[: CONTEXT - left])]), tokens)


def test_a_second_engine_hits_the_chunks_of_the_first_on_disk(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = shutil.copytree(built, tmp_path / "copy")
    with BlendEngine.from_pretrained(built, store=tmp_path / "store") as first:
        cold = first.generate(PARTS, GREEDY, ratio=1.0)
        assert first.flush(SOON)
    with BlendEngine.from_pretrained(copy, store=f"file://{tmp_path}/store?ram_bytes=1MiB") as second:
        warm = second.generate(PARTS, GREEDY, ratio=1.0)
    assert warm.token_ids == cold.token_ids
    assert warm.report.missed_tokens == 0
    assert warm.report.hit_tokens["disk"] == sum(len(s) for s in second.prompt(PARTS).chunks)
    check_sums(warm)


def test_a_store_of_the_caller_is_shared_by_equal_salts_and_stays_open(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, closed = MemoryStore(), list[bool]()
    monkeypatch.setattr(store, "close", lambda: closed.append(True))
    first, other, same = (open_engine(store, salt=salt) for salt in ("a", "b", "a"))
    with first:
        first.warm(PASSAGES)
    assert not closed and len(store.manifests()) == 3
    assert other.generate(PARTS, GREEDY).report.loaded_tokens == 0
    assert same.generate(PARTS, GREEDY).report.loaded_tokens > 0


@pytest.mark.may_fail("store write")
@pytest.mark.parametrize("error", [StoreError("no space left on device"), StoreReadOnlyError("read-only")], ids=str)
def test_requests_succeed_where_the_store_cannot_be_written_and_capture_stops_after_one_chunk(
    error: StoreError, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tried = MemoryStore(), list[BlockName]()

    def refuse(block: Block) -> bool:
        tried.append(block.name)
        raise error

    monkeypatch.setattr(store, "write", refuse)
    engine = open_engine(store)
    for _ in range(3):
        answer = engine.generate(PARTS, GREEDY)
        assert answer.token_ids == plain(engine, engine.prompt(PARTS))
        assert answer.report.loaded_tokens == 0
        assert engine.flush(SOON)
    computed = [name for name in tried if name != tried[0]]
    assert len(computed) <= 2  # the text before the chunks, and the first block of one chunk
    with pytest.raises(StoreError, match=str(error)):
        engine.warm(PASSAGES)


def test_an_engine_without_a_tokenizer_takes_ids(built: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(built).eval()
    passage = chunk(range(20, 45), "ids")
    with BlendEngine(model, config=BlendConfig(block_size=BLOCK)) as engine:
        assert engine.warm([passage]).tokens == 25
        prompt = Prompt.of([text([1, 7, 8]), passage, text([9, 10])])
        answer = engine.generate(prompt, GREEDY, ratio=1.0)
        assert answer.token_ids == plain(engine, prompt)
        assert (answer.text, answer.report.hit_tokens["memory"]) == ("", 25)
        for refused in (lambda: engine.generate(["a"]), lambda: engine.warm(["a"])):
            with pytest.raises(InvalidInputError, match=r"no tokenizer: .*token ids"):
                refused()
        with pytest.raises(InvalidInputError, match="use stop_token_ids"):
            engine.generate(prompt, stop="x")
    with pytest.raises(InvalidInputError, match="'bos' needs a tokenizer"):
        BlendEngine(model, config=BlendConfig(anchor="bos"))


def test_folders_that_lack_something(built: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(built, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    bare = shutil.copytree(built, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    for folder, message in (
        (tmp_path, "no model folder"),
        (broken, "is not JSON"),
        (bare, r"no tokenizer .*; add or repair its files"),
    ):
        with pytest.raises(InvalidInputError, match=message) as caught:
            BlendEngine.from_pretrained(folder)
    assert "with_tokenizer=False" in caught.value.__notes__[0] and "with_tokenizer" not in str(caught.value)
    with BlendEngine.from_pretrained(bare, with_tokenizer=False) as engine:
        assert engine.generate(Prompt.of([text([5, 6, 7])]), GREEDY).token_ids


@pytest.mark.parametrize("together", [1, 4096], ids=["one by one", "in a batch"])
def test_warm_stores_the_kv_of_a_plain_prefill(open_engine: Open, together: int) -> None:
    engine = open_engine(capture_batch_tokens=together)
    calls: list[tuple[int, int]] = []
    report = engine.warm([*PASSAGES, PASSAGES[0], "The dog."], progress=lambda *at: calls.append(at))
    assert (report.stored, report.held) == (4, 0)
    assert calls[-1] == (4, 4)
    listed = {m.label: m for m in engine.store.manifests()}
    assert set(listed) == {"fox", "stored", "who", ""}
    assert report.tokens == sum(len(m.token_ids) for m in listed.values())
    for manifest in listed.values():
        assert manifest.anchor_ids.tolist() == [engine.tokenizer.bos_token_id]
        assert manifest.model == "tiny-llama"
        assert check_chain(engine, [manifest.anchor_ids, manifest.token_ids]) == 1 + len(manifest.block_names)
    again = engine.warm(PASSAGES)
    assert (again.stored, again.held, again.tokens) == (0, 3, 0)
    engine.store.delete_manifest(listed["fox"].chunk_id)  # a chunk that is not listed is warmed again
    engine.warm(PASSAGES)
    assert len(engine.store.manifests()) == 4


@pytest.mark.parametrize("anchor", ["auto", "none", "bos", "text"])
def test_warmed_chunks_are_hits(open_engine: Open, anchor: str) -> None:
    engine = open_engine(anchor=anchor, **({"anchor_text": "The cat sat. "} if anchor == "text" else {}))
    engine.warm(PASSAGES)
    report = engine.generate(PARTS, GREEDY).report
    assert report.missed_tokens == 0
    assert report.loaded_tokens == sum(len(s) for s in engine.prompt(PARTS).chunks) + (anchor != "none")


def test_chunks_behind_an_anchor_of_text_have_its_kv_and_go_on_in_a_prompt_that_begins_so(open_engine: Open) -> None:
    engine = open_engine(anchor="text", anchor_text="The cat sat.\n")
    engine.warm(PASSAGES)
    assert engine.runtime.builder is not None
    front = [each for segment in engine.runtime.builder.in_front("The cat sat.\n") for each in segment]
    prompt = engine.prompt(PARTS)
    wanted = blend(engine.model, prompt, NoRows(), anchor=front)
    assert_close(engine.prefill(prompt, selector=NoRows()).logits, wanted.logits, 1e-5, "logits")
    report = engine.generate(["The cat sat.\n", PASSAGES[0], "Who?"], GREEDY).report
    assert report.hit_tokens["prefix"] == len(front) + len(engine.prompt(PASSAGES[:1]).chunks[0])


def test_by_default_a_model_with_room_reuses_chunks_behind_the_text_that_ships(tmp_path: Path) -> None:
    build_tiny(tmp_path / "model", [passage.text for passage in PASSAGES], TinyShape(context_length=8192))
    open_one = partial(BlendEngine.from_pretrained, tmp_path / "model", store=tmp_path / "kv")
    with open_one(config={"anchor": "bos"}) as before:
        before.warm(PASSAGES)
    with open_one() as engine:
        assert (engine.config.anchor, engine.config.selector) == ("text", "head")
        assert (
            engine.runtime.settings.selector()
            == engine.runtime.settings.selector(name="auto")
            == engine.config.make_selector()
        )
        first = engine.generate(PARTS, GREEDY).report
        assert first.missed_tokens == sum(map(len, engine.prompt(PARTS).chunks))  # of another anchor: another KV
        engine.flush()
        report = engine.generate(PARTS, GREEDY).report
        assert report.missed_tokens == 0 < report.recomputed_tokens < report.loaded_tokens
        assert engine.generate(PARTS, GREEDY, ratio=1.0).token_ids == plain(engine, engine.prompt(PARTS))
    with open_one(config={"anchor": "bos"}) as after:  # what was stored before stays readable
        assert after.generate(PARTS, GREEDY).report.missed_tokens == 0
        assert after.config.selector == "hkvd"


def test_missed_chunks_are_counted_while_the_store_takes_none(open_engine: Open) -> None:
    engine = open_engine(capture=True)
    engine.runtime.warmer.keeper._resume_at = math.inf
    engine.generate(PARTS, GREEDY)
    assert engine.flush(60)
    assert engine.runtime.background.given_up == {
        "queue full": 0,
        "failed": 0,
        "histories": 0,
        "quota": 0,
        "too long": 0,
        "store": len(PASSAGES),
    }


def test_chunks_warmed_after_a_system_prompt_are_hits_after_it(open_engine: Open) -> None:
    engine = open_engine(anchor="system")
    engine.warm(PASSAGES, system=PARTS[:1])
    prompt = engine.prompt(PARTS)
    report = engine.generate(PARTS, GREEDY).report
    assert report.missed_tokens == 0
    first_chunk = next(i for i, s in enumerate(prompt.segments) if s.is_chunk)
    assert report.hit_tokens["prefix"] == sum(len(s) for s in prompt.segments[: first_chunk + 1])
    assert engine.generate(["Another. ", *PARTS[1:]], GREEDY).report.loaded_tokens == 1  # BOS
    with pytest.raises(InvalidInputError, match=r"'system' needs the text .*system="):
        engine.warm(PASSAGES)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([""], "chunk has no tokens"),
        (["The dog sleeps on. " * 60], rf"chunk 1 has \d+ tokens with its anchor, .*context {CONTEXT}; split it"),
        ([Passage("dog " * 300, "dogs")], "chunk dogs has"),
        ([chunk([5, 600])], r"token id 600 at index 1, outside the vocabulary 0\.\.511"),
    ],
)
def test_invalid_chunks_are_refused_by_warm(open_engine: Open, chunks: list[Any], message: str) -> None:
    engine = open_engine()
    with pytest.raises(InvalidInputError, match=message):
        engine.warm(chunks)
    assert engine.store.stats().blocks == 0


def test_a_miss_is_captured_and_then_hit(open_engine: Open) -> None:
    engine = open_engine()
    chunks = sum(len(s) for s in engine.prompt(PARTS).chunks)
    cold = engine.generate(PARTS, GREEDY)
    assert (cold.report.missed_tokens, cold.report.loaded_tokens) == (chunks, 0)
    assert cold.token_ids == plain(engine, engine.prompt(PARTS))
    assert engine.flush(SOON)
    warm = engine.generate(PARTS, GREEDY)
    assert (warm.report.missed_tokens, warm.report.hit_tokens["memory"]) == (0, chunks)
    assert warm.report.hit_tokens["prefix"] > 1  # BOS and the system prompt
    assert warm.report.row_layers < cold.report.row_layers / 2
    assert {m.label for m in engine.store.manifests()} == {"fox", "stored", "who"}
    for answer in (cold, warm):
        check_sums(answer)
    silent = open_engine(capture=False)
    silent.generate(PARTS, GREEDY)
    assert silent.flush(SOON) and silent.store.stats().blocks == 0
    # A chunk that fits into the model's context, but not behind a text that the prompt does not have, is not stored.
    ahead = open_engine(anchor="text", anchor_text="The cat sat.\n" * 20)
    nearly = Passage("Who are you? " * 30, "long")
    assert ahead.generate([nearly, QUESTION], GREEDY).report.missed_tokens > 0
    assert ahead.flush(SOON) and ahead.store.manifests() == []
    # A chunk directly after its anchor is stored by the request; without a manifest it could not be listed or deleted.
    behind = open_engine()
    behind.generate([PASSAGES[0], QUESTION], GREEDY)
    assert behind.flush(SOON)
    assert all(entry is not None for entry in behind.store.find(names_of(behind, PASSAGES[0])))
    assert [m.label for m in behind.store.manifests()] == ["fox"]


def test_a_chunk_missed_after_two_system_prompts_is_captured_after_both(open_engine: Open) -> None:
    engine = open_engine(anchor="system")
    prompts = [engine.prompt([system, *PASSAGES[:2], QUESTION]) for system in ("One. ", "Two. ")]
    requests = [engine.start(prompt, GREEDY) for prompt in prompts]  # neither is finished: both captures wait
    for request in requests:
        request.step()
        request.step()
    assert engine.flush(SOON)
    for prompt in prompts:
        assert engine.runtime.planner.plan(prompt, engine.store).tokens_by_source()["miss"] == 0


def test_an_answer_that_cannot_start_has_ended(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that lacks behind the prefill: the caller is told, and later passages are captured all the same."""
    engine = open_engine()
    with monkeypatch.context() as patch:
        patch.setattr("cacheblend.engines.hf.runtime.Sampler", Mock(side_effect=MemoryError("out of memory")))
        with pytest.raises(MemoryError):
            engine.generate(PARTS, GREEDY)
    answer = engine.generate(PARTS, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, engine.prompt(PARTS)) and answer.report.missed_tokens > 0
    wait_until(lambda: all(engine.store.find(names_of(engine, PASSAGES[2]))))  # unasked: no request is under way


def test_background_work_waits_for_the_end_of_a_request(open_engine: Open) -> None:
    """Whose generator is closed early, or that is finished by hand."""
    engine = open_engine()
    stream = engine.stream(PARTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
    next(stream)
    next(stream)
    missed = names_of(engine, PASSAGES[2])
    time.sleep(0.05)
    assert engine.store.find(missed) == [None] * len(missed)  # the request is still running
    stream.close()
    wait_until(lambda: all(engine.store.find(missed)))
    other = open_engine()  # also after the first delta, where the caller stops reading
    stream = other.stream(PARTS, GREEDY)
    next(stream)
    stream.close()
    assert other.flush(SOON) and all(other.store.find(missed))
    stepped = open_engine()
    request = stepped.start(PARTS, SamplingParams(max_new_tokens=1, ignore_eos=True))
    request.step()
    assert request.done and request.to_store is not None
    assert not stepped.store.manifests()
    request.finish()
    request.finish()
    assert request.to_store is None
    assert stepped.flush(SOON)
    assert {manifest.label for manifest in stepped.store.manifests()} == {"fox", "stored", "who"}


TEMPLATES = {
    "trims": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}",
    "documents": "{{ bos_token }}{% for d in documents %}{{ loop.index }}: {{ d.title }} {{ d.text }}; {% endfor %}"
    "{% for m in messages %}{{ m.content | trim }} {% endfor %}",
    "json": "{{ bos_token }}{% for d in documents %}{{ d | tojson }}{% endfor %}{{ messages[-1].content }}",
    "escapes": "{{ bos_token }}{% for d in documents %}{{ d.text | e }} {% endfor %}{{ messages[-1].content }}",
}
SPACED = [
    Passage("  The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n", "fox"),
    Passage('A passage is "stored" once,\nand reused <b>at</b> any position of a prompt.', "stored"),
    Passage("Who wrote it? The answer is in the second passage: nobody knows. ", "who"),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_passages_that_a_template_changes_are_stored_once_and_found_in_every_prompt(
    name: str, loaded: BlendEngine, monkeypatch: pytest.MonkeyPatch, open_engine: Open
) -> None:
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATES[name])
    engine = open_engine(recompute_ratio=0.1)
    ask = [{"role": "user", "content": "Who wrote it?"}]
    first = engine.chat(ask, SPACED, max_new_tokens=1, ignore_eos=True).report
    assert sum(first.hit_tokens.values()) == 0 and first.missed_tokens > 60
    assert engine.flush(SOON)
    stored = len(list(engine.store.manifests()))
    assert stored == len(SPACED)
    for order in ([2, 1, 0], [1, 2], [0], [2, 0, 1]):
        report = engine.chat(ask, [SPACED[at] for at in order], max_new_tokens=1, ignore_eos=True).report
        assert report.missed_tokens == 0 and report.loaded_tokens > 15 * len(order)
        changed = {
            "json": order.count(0) + order.count(1),  # a line break, and quotes
            "escapes": order.count(1),
            "trims": int(order[0] == 0),  # spaces in front of the first one
        }
        assert report.changed_contents == changed.get(name, 0)
    assert engine.flush(SOON) and len(list(engine.store.manifests())) == stored
    if name == "trims":  # and passages that were warmed are found
        warmed = open_engine()
        warmed.warm(SPACED)
        for passages in (SPACED, SPACED[::-1], SPACED[1:]):
            report = warmed.chat([{"role": "user", "content": "Who?"}], passages, max_new_tokens=1).report
            assert report.missed_tokens == 0
            assert report.loaded_tokens >= sum(len(warmed.runtime.builder.encode(p.text)) - 4 for p in passages)


SNIPPETS = ["The dog", "\n\n", "ÿ" * 15, "你好世界", "😀", "\ue000\U000f0000\U0010fffd", "\ufffd", "déjà </s> vu"]
TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "sentencepiece": sentencepiece,
    "metaspace": lambda: sentencepiece(dummy_prefix="metaspace"),
    "byte_level": byte_level,
}


def drawn(draw: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of texts, cut anywhere; ids of any kind."""
    ids: list[int] = []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.8:
            ids += tokenizer(draw.choice(SNIPPETS), add_special_tokens=False)["input_ids"]
            ids = ids[: len(ids) - draw.choice([0, 0, 0, 1, 2])]
        else:
            ids += draw.choices(range(len(tokenizer)), k=draw.randint(1, 6))
    return ids or [5]


def check(tokenizer: PreTrainedTokenizerFast, answer: Answer, ids: list[int], stops: tuple[str, ...]) -> None:
    text = tokenizer.decode(answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = [text.index(stop) for stop in stops if stop in text]
    assert answer.finish_reason == ("stop" if found else "length")
    assert answer.text == text[: min(found, default=len(text))]
    assert answer.token_ids == ids[: len(answer.token_ids)]
    assert found or answer.token_ids == ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answers_text_is_that_of_its_tokens(name: str, loaded: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, tokenizer = random.Random(name), TOKENIZERS[name]()
    ids: list[int] = []
    sample = Sampler.sample

    def forced(self: Sampler) -> int:
        self.logits = torch.full_like(self.logits, -1e9)
        self.logits[ids[self.count]] = 0.0
        return sample(self)

    monkeypatch.setattr(Sampler, "sample", forced)
    with BlendEngine(loaded.model, tokenizer, store=MemoryStore(), fingerprint="tiny") as engine:
        for number in range(12):
            ids[:] = drawn(draw, tokenizer) if number else tokenizer("ÿ" * 15, add_special_tokens=False)["input_ids"]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            at = draw.randrange(len(text) + 1)
            cases = [(), (text[at : at + 3],), ("ÿ" * 9,), (text[-1:], "never"), (text[-20:],)]
            stops = tuple(stop for stop in (draw.choice(cases) if number else ("ÿ" * 9,)) if stop)
            params = SamplingParams(max_new_tokens=len(ids), ignore_eos=True, stop=stops)
            check(tokenizer, engine.generate("Who?", params), ids, stops)
            check(tokenizer, engine.generate_batch(["Who?"], params)[0], ids, stops)
            *deltas, last = engine.stream("Who?", params)
            assert last.answer is not None and all(delta.answer is None for delta in deltas)
            assert "".join(delta.text for delta in (*deltas, last)) == last.answer.text
            check(tokenizer, last.answer, ids, stops)


TEXTS = ["The lighthouse was lit in 1871. Its keepers wrote. Nobody read it!", "Mussels grow on ropes. Do they?\nYes"]
SENTENCES = [["The lighthouse was lit in 1871.", " Its keepers wrote.", " Nobody read it!"]]
SENTENCES += [["Mussels grow on ropes.", " Do they?\n", "Yes"]]
ASKED = ["Answer. ", *(Passage(text) for text in TEXTS), " When was it lit?"]
SHAPE = TinyShape(layers=3, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selectors") / "tiny-llama"
    build_tiny(path, TEXTS, SHAPE)
    return path


def open_tiny(folder: Path, **settings: object) -> BlendEngine:
    config = BlendConfig(capture=False, **settings)  # type: ignore[arg-type]
    engine = BlendEngine.from_pretrained(folder, store="memory", config=config)
    engine.warm(TEXTS)
    return engine


def test_sentences_are_those_of_the_text(folder: Path) -> None:
    recorded = Recorded(Query(0.3))
    with open_tiny(folder) as engine:
        prompt = engine.prompt(ASKED)
        engine.prefill(prompt, selector=recorded)
        (asked,) = recorded.asked
        assert asked.sentences is not None
        texts: dict[int, list[int]] = {}
        for position, sentence in zip(asked.positions.tolist(), asked.sentences.tolist(), strict=True):
            texts.setdefault(sentence, []).append(int(prompt.token_ids[position]))
        assert [engine.runtime.builder.decode(ids) for ids in texts.values()] == [s for part in SENTENCES for s in part]


@pytest.mark.parametrize("selector", ["query", "hybrid"])
def test_the_report_names_what_the_question_cost(folder: Path, selector: str) -> None:
    with open_tiny(folder, selector=selector, recompute_ratio=0.2) as engine:
        answer = engine.generate(ASKED, SamplingParams(max_new_tokens=2, ignore_eos=True))
        question = len(engine.prompt(ASKED).segments[-1])
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
    with open_tiny(folder, selector="hkvd") as engine:
        engine.prefill(engine.prompt(ASKED))
        assert calls == []  # nobody asks
        engine.prefill(engine.prompt(ASKED), selector=Query(0.2))
        engine.prefill(engine.prompt(ASKED), selector=Query(0.2))
        assert len(calls) == 1
    with open_tiny(folder, selector="query") as engine:
        assert len(calls) == 2
        engine.prefill(engine.prompt(ASKED))
        assert len(calls) == 2
