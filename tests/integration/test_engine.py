"""The engine on a tiny llama in a folder: warm, generate, capture, share a store, and errors on the way."""

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError, StoreReadOnlyError
from cacheblend.core.naming import BlockName, chain_names, split_blocks
from cacheblend.core.plan.blocks import Block, RecordMemory
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines.hf import Answer, BlendEngine, Passage, SamplingParams
from cacheblend.store import KVStore, MemoryStore
from tokenizers_for_tests import sentencepiece

CONTEXT, LAYERS, BLOCK = 256, 4, 8
PASSAGES = [
    Passage("The quick brown fox jumps over the lazy dog, and the dog sleeps on.", "fox"),
    Passage("A passage is stored once and reused at any position of a prompt.", "stored"),
    Passage("Who wrote it? The answer is in the second passage: nobody knows.", "who"),
]
QUESTION = " Who wrote the second passage?"
PARTS = ["Answer from the passages. ", *PASSAGES, QUESTION]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SOON = 60.0  # seconds: only a failing test waits that long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model and a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tokenizer = sentencepiece()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    """An engine loaded once; the tests' engines use its model and tokenizer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small is not faster with more threads, and slower on a busy machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with BlendEngine.from_pretrained(folder) as engine:
            yield engine
    torch.set_num_threads(threads)


Open = Callable[..., BlendEngine]


@pytest.fixture
def open_engine(loaded: BlendEngine) -> Iterator[Open]:
    """`open_engine(store, **settings)` opens an engine that is closed after the test."""
    opened: list[BlendEngine] = []

    def open_one(store: KVStore | str | Path | None = None, **settings: Any) -> BlendEngine:
        config = BlendConfig(**{"block_size": BLOCK, **settings})
        known = {"fingerprint": "tiny", "name": loaded.name}
        opened.append(BlendEngine(loaded.model, loaded.tokenizer, store=store, config=config, **known))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def plain(engine: BlendEngine, prompt: Prompt, tokens: int = GREEDY.max_new_tokens) -> list[int]:
    """transformers' own greedy answer."""
    ids = torch.from_numpy(prompt.token_ids.astype("i8"))[None]
    out = engine.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :].tolist()


@torch.no_grad()
def check_chain(engine: BlendEngine, segments: list[Any]) -> int:
    """Checks that each stored block of the chain equals a plain prefill (third exactness invariant); counts them."""
    ids = torch.tensor([i for segment in segments for i in segment.tolist()])
    cache = DynamicCache()
    engine.model(input_ids=ids[None], past_key_values=cache, use_cache=True)
    parent, position, held = engine.planner.root, 0, 0
    for segment in segments:
        for tokens, name in zip(
            split_blocks(segment, BLOCK), chain_names(parent, split_blocks(segment, BLOCK)), strict=True
        ):
            rows = slice(position, position + len(tokens))
            if engine.store.find([name])[0] is not None:
                held += 1
                for layer, kv in enumerate(cache.layers):
                    expected = torch.stack([kv.keys[0, :, rows], kv.values[0, :, rows]], dim=1)
                    torch.testing.assert_close(engine.store.read(name, layer), expected, rtol=1e-3, atol=1e-4)
            parent, position = name, rows.stop
    return held


def names_of(engine: BlendEngine, passage: Passage) -> list[BlockName]:
    """Names of a passage's blocks after BOS."""
    assert engine.builder is not None
    segments = engine.prompt([passage]).segments
    anchor = engine.planner.chain_of([segments[0].token_ids])
    return chain_names(anchor, split_blocks(segments[1].token_ids, BLOCK))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def check_sums(answer: Answer) -> None:
    report = answer.report
    assert report.loaded_tokens + report.missed_tokens + report.text_tokens == report.prompt_tokens
    assert 0 <= report.recomputed_tokens <= report.loaded_tokens
    passes = 1 + len(report.fallbacks)
    assert passes * report.prompt_tokens * LAYERS >= report.row_layers > 0
    assert report.generated_tokens == len(answer.token_ids)
    assert 0 < report.ttft_s <= report.total_s
    assert report.ttft_s >= report.plan_s + report.compute_s
    assert min(asdict(report)[name] for name in ("plan_s", "load_s", "wait_s", "compute_s")) >= 0


# ---- warm -------------------------------------------------------------------------------------------------


def test_warm_stores_the_kv_of_a_plain_prefill(open_engine: Open) -> None:
    engine = open_engine()
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


def test_chunks_warmed_in_a_batch_equal_chunks_warmed_alone(open_engine: Open) -> None:
    together, alone = open_engine(), open_engine(capture_batch_tokens=1)
    for engine in (together, alone):
        engine.warm([*PASSAGES, "The dog."])
    names = [name for m in together.store.manifests() for name in m.block_names]
    assert names == [name for m in alone.store.manifests() for name in m.block_names]
    for name in names:
        for layer in range(LAYERS):
            torch.testing.assert_close(
                together.store.read(name, layer), alone.store.read(name, layer), rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("anchor", ["auto", "none", "bos"])
def test_warmed_chunks_are_hits(open_engine: Open, anchor: str) -> None:
    engine = open_engine(anchor=anchor)
    engine.warm(PASSAGES)
    report = engine.generate(PARTS, GREEDY).report
    assert report.missed_tokens == 0
    assert report.loaded_tokens == sum(len(s) for s in engine.prompt(PARTS).chunks) + (anchor != "none")


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


# ---- answers ----------------------------------------------------------------------------------------------


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


def test_an_exact_prefix_gives_the_answer_of_transformers_at_any_ratio(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    parts = [PASSAGES[0], QUESTION]
    answer = engine.generate(parts, GREEDY, ratio=0.0)
    assert answer.token_ids == plain(engine, engine.prompt(parts))
    assert answer.report.hit_tokens["prefix"] == answer.report.loaded_tokens > 1
    check_sums(answer)


def test_the_ratio_sets_the_number_of_recomputed_rows(open_engine: Open) -> None:
    engine = open_engine(check_layers=(1,))
    engine.warm(PASSAGES)
    chunks = sum(len(s) for s in engine.prompt(PARTS).chunks)
    for ratio in (0.0, 0.15, 0.5, 1.0):
        answer = engine.generate(PARTS, GREEDY, ratio=ratio)
        assert answer.report.recomputed_tokens == round(ratio * chunks)
        check_sums(answer)
    with pytest.raises(InvalidInputError, match=r"0\.\.1, got 2"):
        engine.generate(PARTS, ratio=2)


def test_a_stream_gives_the_text_of_its_answer(open_engine: Open) -> None:
    engine = open_engine()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=2.0, seed=4)
    deltas = list(engine.stream(PARTS, params))
    engine.flush()
    assert [d.answer is None for d in deltas] == [True] * (len(deltas) - 1) + [False]
    answer = deltas[-1].answer
    assert answer is not None
    assert "".join(d.text for d in deltas) == answer.text
    assert len(answer.token_ids) == 40
    assert len(answer.text) > 20
    if "\ufffd" not in answer.text:
        assert answer.text == engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True)


def test_a_stop_text_ends_the_answer_and_is_removed(open_engine: Open) -> None:
    engine = open_engine(capture=False)
    hot = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 2.0, "seed": 4}
    whole = engine.generate(PARTS, SamplingParams(**hot))
    word = re.search("[a-z]{3}", whole.text[10:])
    assert word is not None
    stop = word[0]
    deltas = list(engine.stream(PARTS, SamplingParams(**hot, stop=("never said", stop))))
    answer = deltas[-1].answer
    assert answer is not None
    assert answer.text == whole.text[: whole.text.find(stop)] == "".join(d.text for d in deltas)
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) < len(whole.token_ids)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


def test_an_answer_ends_at_eos(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(capture=False)
    whole = engine.generate(PARTS, GREEDY)
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", [whole.token_ids[2], 0])
    ended = engine.generate(PARTS, SamplingParams(max_new_tokens=8))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]


def test_chat_messages_as_a_prompt(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    parts = [{"type": "chunk", "text": p.text, "title": p.title} for p in PASSAGES[:2]]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    answer = engine.generate(messages, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, engine.prompt(messages))
    assert answer.report.missed_tokens == 0
    assert answer.report.hit_tokens["memory"] == sum(len(s) for s in engine.prompt(messages).chunks)
    check_sums(answer)


@pytest.mark.parametrize("parts", [[], [""], "", [{"role": "user", "content": "a"}, "b"]])
def test_invalid_prompts_are_refused(open_engine: Open, parts: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"prompt is empty|made of str and Passage, not dict"):
        open_engine().generate(parts)


def test_a_check_layer_outside_the_model_is_refused(open_engine: Open) -> None:
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


# ---- capture ----------------------------------------------------------------------------------------------


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


def test_a_chunk_directly_after_its_anchor_has_a_manifest(open_engine: Open) -> None:
    """Its KV is stored directly from the request; without a manifest it could not be listed, pinned or deleted."""
    engine = open_engine()
    engine.generate([PASSAGES[0], QUESTION], GREEDY)
    assert engine.flush(SOON)
    assert all(entry is not None for entry in engine.store.find(names_of(engine, PASSAGES[0])))
    assert [m.label for m in engine.store.manifests()] == ["fox"]


def test_blended_kv_is_never_stored(open_engine: Open) -> None:
    """Third exactness invariant, for all blocks that requests of several kinds leave in the store."""
    engine = open_engine()
    system, (fox, stored, who) = PARTS[0], PASSAGES
    scenes = [[fox, QUESTION], [system, stored, fox, QUESTION], [fox, who, stored, "a"], [who, fox, fox, "b"], PARTS]
    for turn in range(2):
        for parts in scenes:
            check_sums(engine.generate(parts, GREEDY, ratio=0.15 * turn))
            engine.flush(SOON)
    held = 0
    for parts in scenes:
        prompt = engine.prompt(parts)
        bos, *rest = [s.token_ids for s in prompt.segments]
        held += check_chain(engine, [bos, *rest])
        held += sum(check_chain(engine, [bos, segment.token_ids]) for segment in prompt.chunks)
    assert held > 50
    assert engine.store.stats().blocks == len({n for p in PASSAGES for n in names_of(engine, p)}) + 1 + -(
        -len(engine.prompt([system]).segments[1]) // BLOCK
    )


def test_a_chunk_missed_after_two_system_prompts_is_captured_after_both(open_engine: Open) -> None:
    engine = open_engine(anchor="system")
    prompts = [engine.prompt([system, *PASSAGES[:2], QUESTION]) for system in ("One. ", "Two. ")]
    requests = [engine.start(prompt, GREEDY) for prompt in prompts]  # neither is finished: both captures wait
    for request in requests:
        request.step()
        request.step()
    assert engine.flush(SOON)
    for prompt in prompts:
        assert engine.planner.plan(prompt, engine.store).tokens_by_source()["miss"] == 0


def test_without_capture_nothing_is_stored(open_engine: Open) -> None:
    engine = open_engine(capture=False)
    engine.generate(PARTS, GREEDY)
    assert engine.flush(SOON)
    assert engine.store.stats().blocks == 0


def test_closing_a_generator_early_lets_background_work_run(open_engine: Open) -> None:
    engine = open_engine()
    stream = engine.stream(PARTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
    next(stream)
    next(stream)
    missed = names_of(engine, PASSAGES[2])
    time.sleep(0.05)
    assert engine.store.find(missed) == [None] * len(missed)  # the request is still running
    stream.close()
    wait_until(lambda: all(engine.store.find(missed)))


def test_a_generator_closed_after_its_first_delta_is_captured(open_engine: Open) -> None:
    """After the first token, missed chunks are captured even if the caller stops reading."""
    engine = open_engine()
    stream = engine.stream(PARTS, GREEDY)
    next(stream)
    stream.close()
    assert engine.flush(SOON)
    assert all(engine.store.find(names_of(engine, PASSAGES[2])))


def test_a_refused_request_lets_background_work_run(open_engine: Open) -> None:
    engine = open_engine()
    with pytest.raises(InvalidInputError):
        engine.generate([])
    ran = threading.Event()
    engine.background.submit("job", ran.set)
    assert ran.wait(SOON)


# ---- stores -----------------------------------------------------------------------------------------------


def test_a_second_engine_hits_the_chunks_of_the_first_on_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = shutil.copytree(folder, tmp_path / "copy")
    with BlendEngine.from_pretrained(folder, store=tmp_path / "store") as first:
        cold = first.generate(PARTS, GREEDY, ratio=1.0)
        assert first.flush(SOON)
    with BlendEngine.from_pretrained(copy, store=f"file://{tmp_path}/store?ram_bytes=1MiB") as second:
        warm = second.generate(PARTS, GREEDY, ratio=1.0)
    assert warm.token_ids == cold.token_ids
    assert warm.report.missed_tokens == 0
    assert warm.report.hit_tokens["disk"] == sum(len(s) for s in second.prompt(PARTS).chunks)
    check_sums(warm)


def test_engines_with_different_salts_share_nothing(open_engine: Open) -> None:
    store = MemoryStore()
    engines = [open_engine(store, salt=salt) for salt in ("a", "b", "a")]
    engines[0].warm(PASSAGES)
    loaded = [engine.generate(PARTS, GREEDY).report.loaded_tokens for engine in engines[1:]]
    assert loaded[0] == 0
    assert loaded[1] > 0


def test_a_store_passed_by_the_caller_stays_open(open_engine: Open, tmp_path: Path) -> None:
    class Closed(MemoryStore):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    store = Closed()
    with open_engine(store) as engine:
        engine.warm(PASSAGES)
    assert not store.closed
    assert len(store.manifests()) == 3


class FullStore(MemoryStore):
    def write(self, block: Block) -> bool:
        raise StoreError("no space left on device")


def test_requests_succeed_when_the_store_cannot_be_written(open_engine: Open) -> None:
    engine = open_engine(FullStore())
    for _ in range(2):
        answer = engine.generate(PARTS, GREEDY)
        assert answer.token_ids == plain(engine, engine.prompt(PARTS))
        assert answer.report.loaded_tokens == 0
        assert engine.flush(SOON)
    with pytest.raises(StoreError, match="no space left"):
        engine.warm(PASSAGES)


class LosingStore(MemoryStore):
    """Finds all blocks, but cannot read those in `lost`."""

    lost: frozenset[BlockName] = frozenset()

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        lost = self.lost if layers[-1] > 1 else frozenset()
        read = super().read_layers(names, layers, heads, memory)
        return [
            BlockLostError([name], "checksum") if name in lost else records
            for name, records in zip(names, read, strict=True)
        ]


def test_a_lost_block_is_recomputed_and_reported(open_engine: Open) -> None:
    store = LosingStore()
    engine = open_engine(store)
    engine.warm(PASSAGES)
    store.lost = frozenset(names_of(engine, PASSAGES[1])[1:2])
    answer = engine.generate(PARTS, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, engine.prompt(PARTS))
    assert answer.report.missed_tokens == BLOCK
    assert len(answer.report.fallbacks) == 1
    # how many layers one read takes depends on how fast the reads before were
    assert re.search(r"1 block\(s\) lost: (layer 2|layers \d to \d): checksum", answer.report.fallbacks[0])
    check_sums(answer)


# ---- threads, ids -----------------------------------------------------------------------------------------


def test_four_threads_give_the_answers_of_one(open_engine: Open) -> None:
    engine = open_engine(capture=False)
    engine.warm(PASSAGES)
    prompts = [[f"Prompt {i}. ", *PASSAGES[i % 3 :], *PASSAGES[: i % 3], QUESTION] for i in range(8)]
    in_turn = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda prompt: engine.generate(prompt, GREEDY).token_ids, prompts))
    assert at_once == in_turn


def test_four_threads_capture_and_hit_concurrently(open_engine: Open) -> None:
    """At r = 1 the answer does not depend on what the store holds."""
    engine = open_engine()
    prompts = [[f"Prompt {i}. ", *PASSAGES[i % 3 :], *PASSAGES[: i % 3], QUESTION] for i in range(6)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: engine.generate(prompt, GREEDY, ratio=1.0), prompts * 2))
    expected = [plain(engine, engine.prompt(prompt)) for prompt in prompts]
    assert [a.token_ids for a in answers] == expected * 2
    for answer in answers:
        check_sums(answer)


def test_an_engine_without_a_tokenizer_takes_ids(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
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
    with pytest.raises(InvalidInputError, match="'bos' needs a tokenizer"):
        BlendEngine(model, config=BlendConfig(anchor="bos"))


def test_a_prefill_with_an_explicit_selector(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    result = engine.prefill(engine.prompt(PARTS), selector=NoRows())
    report = result.report
    assert report.recomputed_tokens == 0
    assert len(result.kv) == LAYERS
    assert result.kv[0].keys.shape[1] == report.prompt_tokens


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no model folder"):
        BlendEngine.from_pretrained(tmp_path)


def test_options_that_change_the_kv_change_the_block_names(folder: Path, loaded: BlendEngine) -> None:
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    with BlendEngine.from_pretrained(folder, rope_parameters=linear) as other:
        assert other.planner.root != loaded.planner.root


def test_a_folder_without_a_tokenizer_takes_ids(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    with pytest.raises(InvalidInputError, match=r"no tokenizer .*; add or repair its files") as caught:
        BlendEngine.from_pretrained(bare)
    assert "with_tokenizer=False" in caught.value.__notes__[0] and "with_tokenizer" not in str(caught.value)
    with BlendEngine.from_pretrained(bare, with_tokenizer=False) as engine:
        assert engine.generate(Prompt.of([text([5, 6, 7])]), GREEDY).token_ids


def test_a_config_that_is_not_json_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(InvalidInputError, match="is not JSON"):
        BlendEngine.from_pretrained(broken)


def test_background_work_waits_until_a_stepped_request_is_finished(open_engine: Open) -> None:
    engine = open_engine()
    request = engine.start(PARTS, SamplingParams(max_new_tokens=1, ignore_eos=True))
    request.step()
    assert request.done and request.to_store is not None
    assert not engine.store.manifests()
    request.finish()
    request.finish()
    assert request.to_store is None
    assert engine.flush(SOON)
    assert {manifest.label for manifest in engine.store.manifests()} == {"fox", "stored", "who"}


def test_capture_stops_after_one_chunk_when_the_store_cannot_be_written(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    tried: list[BlockName] = []

    def refuse(block: Block) -> bool:
        tried.append(block.name)
        raise StoreReadOnlyError("read-only")

    monkeypatch.setattr(store, "write", refuse)
    engine = open_engine(store)
    for _ in range(3):
        engine.generate(PARTS, GREEDY)
        assert engine.flush(SOON)
    computed = [name for name in tried if name != tried[0]]
    assert len(computed) <= 2  # the text before the chunks, and the first block of one chunk


def test_warming_again_restores_a_deleted_manifest(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    [engine.store.delete_manifest(manifest.chunk_id) for manifest in engine.store.manifests()[:1]]
    engine.warm(PASSAGES)
    assert len(engine.store.manifests()) == len(PASSAGES)


def test_documents_are_placed_by_the_template_or_in_the_last_message(open_engine: Open) -> None:
    engine = open_engine()
    engine.warm(PASSAGES)
    if not engine.tokenizer.chat_template:
        pytest.skip("this tokenizer has no chat template")
    prompt = engine.chat_prompt([{"role": "user", "content": QUESTION}], documents=PASSAGES)
    assert [segment.label for segment in prompt.chunks] == ["fox", "stored", "who"]
    assert engine.generate(prompt, GREEDY).report.missed_tokens == 0
