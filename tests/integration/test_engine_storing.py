"""What an engine stores of a tiny llama: chunks that are warmed, and chunks that requests missed."""

import threading
import time
from typing import Any

import pytest
import torch

from cacheblend.core.errors import InvalidInputError, StoreReadOnlyError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block
from cacheblend.core.plan.prompt import chunk
from cacheblend.engines.hf import BlendEngine, Passage, SamplingParams
from cacheblend.store import MemoryStore
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
    engine.store.delete_manifest(listed["fox"].chunk_id)  # a chunk that is not listed is warmed again
    engine.warm(PASSAGES)
    assert len(engine.store.manifests()) == 4


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
    silent = open_engine(capture=False)
    silent.generate(PARTS, GREEDY)
    assert silent.flush(SOON) and silent.store.stats().blocks == 0


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


@pytest.mark.may_fail("store write")
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


# ---- when it is captured ----------------------------------------------------------------------------------


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
    other = open_engine()  # also after the first delta, where the caller stops reading
    stream = other.stream(PARTS, GREEDY)
    next(stream)
    stream.close()
    assert other.flush(SOON) and all(other.store.find(missed))


def test_a_refused_request_lets_background_work_run(open_engine: Open) -> None:
    engine = open_engine()
    with pytest.raises(InvalidInputError):
        engine.generate([])
    ran = threading.Event()
    engine.background.submit("job", ran.set)
    assert ran.wait(SOON)


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


# ---- passages in a chat whose template changes them ---------------------------------------------------------------

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


def test_passages_that_were_warmed_are_found_in_a_chat_whose_template_trims_them(
    loaded: BlendEngine, monkeypatch: pytest.MonkeyPatch, open_engine: Open
) -> None:
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATES["trims"])
    engine = open_engine()
    engine.warm(SPACED)
    for passages in (SPACED, SPACED[::-1], SPACED[1:]):
        report = engine.chat([{"role": "user", "content": "Who?"}], passages, max_new_tokens=1).report
        assert report.missed_tokens == 0
        assert report.loaded_tokens >= sum(len(engine.builder.encode(p.text)) - 4 for p in passages)
