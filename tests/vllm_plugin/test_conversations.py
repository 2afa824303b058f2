"""Edited histories in vLLM: what a conversation had computed is computed once more as it is, and loaded where a later
prompt has it at another place.

Situations: thoughts stripped, results replaced, a clock in the first line, several edits at once, none; answers as part
of the next prompt; named conversations and none; other tenants and conversations that ask the same; a history longer
than a section; a store that drops what it was given; weights that change in between; an engine that is never idle.
"""

import random
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from cacheblend.core.errors import StoreError
from cacheblend.core.load.capture import ChunkJob, blocks_of, publish
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.core.plan.plan import Source
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.engines import histories
from cacheblend.engines.vllm.jobs import Adapter, CaptureJob, StepReport
from cacheblend.engines.vllm.scheduler import conversations
from cacheblend.engines.vllm.scheduler.options import RequestOptions
from cacheblend.store import MemoryStore
from campaign import share
from families import VOCAB as TINY_VOCAB
from paged_scenes import KV_HEADS, LAYERS, LAYOUTS, OWN, VOCAB, WIDTH, Scene
from poison import names_in
from vllm_models import PLAIN_OPERATIONS, make_adapter, make_family, make_hybrid
from vllm_prompts import FORGET, Asked, Texts, ask
from vllm_requests import SIZE, Request, give, manager_of, reported, scheduling, start, why, with_options
from vllm_running import TWO_RANKS, Serve, Served, tokens

EXTRA = {"edits": True, "anchor": "none", "refresh_s": 0, "block_size": 48}


def edited(rng: random.Random, texts: Texts, pieces: list[list[int]]) -> list[list[int]]:
    """The next turn's history: pieces gone, replaced or inserted, or nothing."""
    kept = [piece for piece in pieces if rng.random() > 0.15] if rng.random() < 0.7 else pieces
    if rng.random() < 0.3:
        kept = [texts.ids(9), *kept[1:]]
    if rng.random() < 0.3 and kept:
        at = rng.randrange(len(kept))
        kept = [
            *kept[:at],
            kept[at][: len(kept[at]) // 2],
            texts.ids(5),
            kept[at][len(kept[at]) // 2 :],
            *kept[at + 1 :],
        ]
    return [*kept, texts.ids(rng.choice([30, 90, 140]))]


ENGINES: dict[str, dict[str, Any]] = {
    "blocks of 32, int8": {"block_size": 32},
    "two ranks": {"block_size": 64, **TWO_RANKS},
    "adapters": {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8},
    "discovery": {},
    "sliding windows": {"block_size": 32},
    "latents": PLAIN_OPERATIONS,
}


def model_of(kind: str, folder: Path) -> str | Path:
    if kind == "sliding windows":
        return make_hybrid(folder / "model", "gemma3", 100)
    return make_family("deepseek_v3", folder) if kind == "latents" else "llama"


@pytest.mark.parametrize("kind", ENGINES)
def test_at_ratio_one_answers_of_edited_histories_are_vllms(serve: Serve, tmp_path: Path, kind: str) -> None:
    model, texts, adapters = serve(model_of(kind, tmp_path)), Texts(len(kind), TINY_VOCAB), dict[str, Any]()
    if kind == "adapters":
        for number, name in enumerate("ab", 1):
            make_adapter(tmp_path / name, number)
            adapters[name] = {"name": name, "number": number, "path": str(tmp_path / name)}
    steps, histories = list[dict[str, Any]](), dict[str, list[list[int]]]()
    for _ in range(24):
        name = texts.rng.choice(["", "a", "b"])
        pieces = histories[name] = edited(texts.rng, texts, histories.get(name) or [texts.ids(70), texts.ids(110)])
        prompt = Asked([token for piece in pieces for token in piece][:1800], [])
        step = ask([], [prompt], options={"conversation": name} if name else {}, adapters=[adapters.get(name)])
        steps.append({key: value for key, value in step.items() if key != "chunks"})
        if texts.rng.random() < 0.1:
            steps.append(FORGET)
    more = {"codec": "int8" if kind.endswith("int8") else "raw", "discover": kind == "discovery"}
    found = model.run(steps, EXTRA | {"recompute_ratio": 1.0} | more, **ENGINES[kind])
    plain = [{**step, "options": {}} if "ask" in step else step for step in steps]
    for step, mine, right in zip(
        steps, found["answers"], model.run(plain, None, **ENGINES[kind])["answers"], strict=True
    ):
        assert step == FORGET or tokens(mine) == tokens(right)
    counted = found["metrics"]
    assert counted["vllm:cacheblend_hit_tokens moved"] > 300 and counted["vllm:cacheblend_hit_tokens prefix"] > 300
    assert "vllm:cacheblend_fallbacks" not in " ".join(counted)


def test_a_cache_that_rounds_has_no_exact_history(llama: Served) -> None:
    words = llama.refusal(EXTRA, kv_cache_dtype="fp8_e4m3", dtype="bfloat16")
    assert "edits" in words and "kv_cache_dtype" in words


# ---- the scheduler's side alone ------------------------------------------------------------------------------------

SYSTEM, THOUGHT, ANSWER, NEXT = (list(range(n, n + count)) for n, count in ((0, 80), (100, 50), (200, 130), (400, 30)))


def keep(side: Any, store: Any = None) -> list[int]:
    """vLLM has nothing to compute until the conversations have no more work; of each job the tokens it is of. `store`:
    gets what the workers compute; None: they store nothing."""
    asked, found = side._finder._conversations, list[int]()
    assert not side._requests
    while asked.has_work:
        for job in side.take_jobs(is_idle=True).capture:
            found.append(len(job.exact))
            new = [span for span in job.exact.spans if span.source is Source.TEXT]
            assert [span.source for span in job.exact.spans[-len(new) :]] == [Source.TEXT] * len(new)
            if store is not None:
                write(store, job, new)
            side.reported(StepReport(side._captures._finished + 1))
    return found


def write(store: Any, job: Any, spans: Any) -> None:
    ids, layout = job.exact.prompt.token_ids, KVLayout((LayerShape(1, 4),), torch.float32)
    for span in spans:
        own = ids[span.start : span.stop]
        store.write(Block(span.name, span.parent, own, [torch.zeros(1, 2, len(own), 4)], layout))


def end(side: Any, ids: list[int], name: str, **fields: Any) -> str:
    """A request that vLLM computes; what its client is told."""
    options = {"conversation": fields.pop("conversation")} if "conversation" in fields else {}
    request = Request(ids, name=name, kv_transfer_params={"cacheblend": options}, num_output_tokens=1, **fields)
    claimed = start(side, request)
    side.allocated(request, [[1] * 40], claimed)
    if claimed:
        side.provided([name])
        side.reported(reported(name))
    return why(side, request)


def moved(side: Any, ids: list[int], name: str, **fields: Any) -> int:
    """Tokens that are moved for a request."""
    options = {"conversation": fields.pop("conversation")} if "conversation" in fields else {}
    request = Request(ids, name=name, kv_transfer_params={"cacheblend": options}, **fields)
    start(side, request)
    found = side._requests[request.request_id].found
    side.finished(request)
    return 0 if found is None else found.plan.tokens_by_source().get("moved", 0)


def test_no_other_tenants_or_conversations_history_is_moved() -> None:
    """Conversations that copy each other's text behind text of their own, at random."""
    store, texts = MemoryStore(1 << 24), Texts(5, below=900)
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    pieces, said, found = texts.passages(6, 64, 110), dict[Any, list[list[int]]](), 0
    for number in range(30 + share(300)):
        whose = texts.rng.choice(["", "t"]), texts.rng.choice(["", "a", "b"])
        ids = [token for piece in texts.rng.sample(pieces, 4) for token in piece]
        request = Request(ids, name=str(number), cache_salt=whose[0] or None, num_output_tokens=1)
        request.kv_transfer_params = {"cacheblend": {"conversation": whose[1]}}
        claimed = start(side, request)
        plan = (
            None if side._requests[request.request_id].found is None else side._requests[request.request_id].found.plan
        )
        for segment in () if plan is None else plan.prompt.segments:
            if segment.found_in is not None:
                source = [*segment.found_in.anchor_ids, *segment.found_in.token_ids]
                assert any(each[: len(source)] == source for each in said[whose])
                found += 1
        if claimed:
            side.allocated(request, [[1] * 40], claimed)
            side.provided([request.request_id])
            side.reported(reported(request.request_id))
        side.finished(request)
        keep(side, store)
        said.setdefault(whose, []).append(ids)
    assert found > 10


FIRST, STRIPPED = [*SYSTEM, *THOUGHT, *ANSWER], [*SYSTEM, *ANSWER, *NEXT]


def test_what_a_conversation_computed_is_moved_in_it_alone() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True})
    assert end(side, FIRST, "one", conversation="a", cache_salt="t") == "nothing stored"
    assert keep(side, store) == [len(FIRST)]
    for number, other in enumerate(
        ({"conversation": "b", "cache_salt": "t"}, {"conversation": "a"}, {"cache_salt": "t"})
    ):
        assert moved(side, STRIPPED, f"other{number}", **other) == 0
    side._finder._conversations._computed.clear()
    assert moved(side, STRIPPED, "own", conversation="a", cache_salt="t") == len(ANSWER)


def test_an_answer_is_part_of_the_history_and_a_newer_prompt_takes_an_older_ones_place() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True})
    for count in (60, 90, len(ANSWER)):
        end(side, [*SYSTEM, *THOUGHT], f"{count}", output_token_ids=ANSWER[:count])
    assert keep(side, store) == [len(FIRST)]
    assert moved(side, STRIPPED, "next") == len(ANSWER)


def test_a_newest_history_whose_blocks_are_gone_hides_no_older_one() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one")
    keep(side, store)
    older = set(names_in(store))
    end(side, [*SYSTEM, *range(600, 630), *ANSWER, *NEXT], "two")
    keep(side, store)
    for name in set(names_in(store)) - older:
        assert store.delete(name)
    assert moved(side, STRIPPED, "next") == len(ANSWER)


def test_a_long_history_is_computed_in_sections_each_behind_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SECTION", 64)
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one")
    assert keep(side, store) == [64, 128, 192, 256, len(FIRST)]
    end(side, [*FIRST, *NEXT], "two")
    assert keep(side, store) == [len(FIRST + NEXT)]
    end(side, [*FIRST, *NEXT], "again")
    assert keep(side, store) == []


def test_one_history_is_completed_before_the_next_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SECTION", 128)
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    for number, name in enumerate("abc"):
        end(side, [*range(number, number + len(FIRST))], name, conversation=name)
    assert keep(side, store) == [128, 256, len(FIRST)] * 3


def test_a_store_that_does_not_keep_a_section_is_given_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "SECTION", 64)
    side = scheduling([], blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one")
    assert keep(side) == [64]
    assert moved(side, STRIPPED, "next") == 0


def test_an_engine_with_requests_is_given_no_history_and_keeps_no_step_for_one() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True})
    end(side, FIRST, "one")
    assert side.is_busy
    held_back = Request(NEXT, name="held back")  # as while vLLM is paused
    side.on_new(held_back)
    assert not side.is_busy and not side.take_jobs(is_idle=True).capture
    side.finished(held_back)
    assert keep(side, store) == [len(FIRST)]


def test_a_pause_waits_for_the_section_that_is_computed_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other conversations wait, too, for as long as it lasts; requests that come meanwhile are held back by vLLM."""
    monkeypatch.setattr(histories, "SECTION", 64)
    store, is_paused = MemoryStore(1 << 22), False
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32}, is_paused=lambda: is_paused)
    end(side, FIRST, "one", conversation="a")
    end(side, [*NEXT, *FIRST], "two", conversation="b")
    while not (jobs := side.take_jobs(is_idle=True).capture):
        pass
    is_paused = True
    assert side.is_busy, "it is with the workers: half of it may be of other weights once vLLM is paused"
    write(store, jobs[0], jobs[0].exact.spans)
    side.reported(StepReport(1))
    assert not side.is_busy and not side.take_jobs(is_idle=True).capture
    is_paused = False
    assert side.is_busy and len(jobs) == 1
    assert keep(side, store), "they go on"


def test_a_look_up_that_ended_during_a_long_pause_is_taken_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, go_on, is_paused, began = conversations.next_section, threading.Event(), False, time.monotonic()
    monkeypatch.setattr(conversations, "next_section", lambda *given: (go_on.wait(60), real(*given))[1])
    monkeypatch.setattr(conversations, "LOOK_UP_WAIT_S", 0)
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True}, is_paused=lambda: is_paused)
    end(side, FIRST, "one")
    assert not side.take_jobs(is_idle=True).capture and side.is_busy, "its look-up has begun"
    is_paused = True
    assert not side.is_busy
    with monkeypatch.context() as later:
        later.setattr(conversations.time, "monotonic", lambda: began + 60 + conversations.STUCK_S)
        is_paused = False
        assert not side.is_busy, "the store hangs"
        go_on.set()
        for _ in range(6000):
            if side.is_busy:
                break
            threading.Event().wait(0.01)
        assert side.is_busy and keep(side, store) == [len(FIRST)]


def test_after_a_reset_nothing_is_computed_until_vllm_computes() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True})
    end(side, FIRST, "one")
    assert keep(side, store) == [len(FIRST)]
    late = Request(FIRST, name="late", num_output_tokens=1)
    side.on_new(late)
    side.reset()
    side.finished(late)  # while weights are being replaced
    assert not side.is_busy and keep(side, store) == [] and moved(side, STRIPPED, "next") == 0
    side.take_jobs()
    assert side.is_busy and keep(side, store) == [len(FIRST)]


@pytest.mark.may_fail("bad spans")
def test_requests_that_nobody_computed_or_whose_options_are_wrong_leave_no_history() -> None:
    side = scheduling([], blend_fields={"edits": True})
    side.on_new(Request(FIRST, name="aborted"))
    side.finished(Request(FIRST, name="aborted"))
    wrong = with_options(FIRST, "wrong", conversation="a", typo=1)
    wrong.num_output_tokens = 1
    start(side, wrong)
    side.finished(wrong)
    assert not side.is_busy


def test_the_store_is_asked_for_the_history_of_a_named_conversation_that_is_not_remembered() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one", conversation="a")
    keep(side, store)
    again = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    assert start(again, with_options([*FIRST, *NEXT], "two", conversation="a")) > len(FIRST)
    assert again._requests["two"].found.held == len(FIRST) // 32 * 32


def test_a_section_is_no_larger_than_what_may_be_captured_at_once() -> None:
    store = MemoryStore(1 << 22)
    fields = {"edits": True, "block_size": 32}
    side = scheduling([], store, capture_bytes=800, bytes_per_token=10, blend_fields=fields)
    end(side, FIRST, "one")
    assert keep(side, store) == [64, 128, 192, len(FIRST)]


def test_blended_blocks_of_moved_runs_are_named_by_their_conversation() -> None:
    store, names = MemoryStore(1 << 22), list[Any]()
    side = scheduling([], store, blend_fields={"edits": True})
    for name in ("a", "b"):
        end(side, FIRST, name, conversation=name)
        keep(side, store)
        request = give(side, with_options(STRIPPED, f"{name}2", conversation=name))
        names.append(request.block_hashes)
        side.provided([request.request_id])
        side.finished(request)
    assert names[0][: 80 // SIZE] == names[1][: 80 // SIZE] == Request(STRIPPED).block_hashes[: 80 // SIZE]
    assert not {*names[0][80 // SIZE :]} & {*names[1]}


# ---- what vLLM's own cache holds is copied -------------------------------------------------------------------------


class Pages:
    """vLLM's pool of blocks, and which rows each holds: by its name, the ids of all tokens up to its last one."""

    def __init__(self, side: Any) -> None:
        self.named, self.ids = dict[bytes, int](), dict[int, list[int]]()
        side.cache.bind(manager_of(self))

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        at = self.named.get(name)
        return None if at is None else [SimpleNamespace(block_id=at) for _ in groups]

    @property
    def blocks(self) -> list[Any]:
        return [SimpleNamespace(block_hash=name) for name in self.named]

    def add(self, request: Request) -> None:
        """vLLM has computed it; the block of its last token is not full."""
        for number, name in enumerate(request.block_hashes[: (request.num_tokens - 1) // SIZE]):
            self.ids.setdefault(at := self.named.setdefault(name, len(self.ids) + 1), [])
            self.ids[at] = request.all_token_ids[: (number + 1) * SIZE]


def copied(side: Any, pages: Pages, store: Any, *, steps: int = 60) -> list[int]:
    """Steps of an engine that has requests all the time; of each job the tokens it is of. Checks that they are copied
    from blocks of just these rows."""
    found = list[int]()
    for _ in range(steps):
        for job in side.take_jobs().capture:
            (table,), first, ids = job.pages, job.exact.prefix_length, job.chunk.token_ids.tolist()
            assert len(table) == -(-len(ids) // SIZE) - first // SIZE
            for number, at in enumerate(table, first // SIZE):
                rows = pages.ids[at]
                assert len(rows) == (number + 1) * SIZE and rows[: len(ids)] == ids[: len(rows)]
            found.append(len(ids))
            if store is not None:
                write(store, job, [span for span in job.exact.spans if span.source is Source.TEXT])
            side.reported(StepReport(side._captures._finished + 1))
        if side._finder._conversations._look_up is not None:
            wait([side._finder._conversations._look_up.call])
    return found


def answered(side: Any, pages: Pages, ids: list[int], name: str, answer: list[int], **options: Any) -> Request:
    """A request that is plain, or blended, until it ends."""
    request = with_options(ids, name, **options)
    claimed = start(side, request)
    side.allocated(request, [[1] * 40], claimed)
    if claimed:
        side.provided([name])
        side.reported(reported(name))
    request.answer(answer)
    pages.add(request)
    side.finished(request)
    return request


def busy(store: Any, most: int = 1024, **options: Any) -> tuple[Any, Pages]:
    """A scheduler side with a request that does not end; `most`: tokens that are copied in a step."""
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32}, may_copy=True, **options)
    side._most_copied = most
    give(side, Request([*range(3000, 3040)], name="does not end"))
    return side, Pages(side)


def test_an_engine_that_is_never_idle_copies_what_it_has_computed() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store, 96)
    answered(side, pages, [*SYSTEM, *THOUGHT], "one", ANSWER)
    whole = len(FIRST) // 32 * 32
    assert copied(side, pages, store) == [96, 192, whole] and len(FIRST) - whole > 0
    assert moved(side, STRIPPED, "next") == whole - len(SYSTEM + THOUGHT)
    answered(side, pages, [*FIRST, *NEXT], "two", NEXT)
    assert len(FIRST + NEXT + NEXT) == 320
    assert copied(side, pages, store) == [288], "the rest is stored, or is behind what vLLM has computed"
    answered(side, pages, [*FIRST, *NEXT], "again", NEXT)
    assert copied(side, pages, store) == []
    side.finished(SimpleNamespace(request_id="does not end"))
    assert keep(side, store) == [320]


def test_blended_blocks_are_not_copied_but_those_in_front_of_them() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store)
    answered(side, pages, FIRST, "one", [1], conversation="a")
    copied(side, pages, store)
    held = names_in(store)
    two = answered(side, pages, [*STRIPPED, *range(700, 800)], "two", [1], conversation="a")
    assert two.block_hashes[6] != Request(two.all_token_ids).block_hashes[6], "it is blended"
    assert copied(side, pages, store) == [] and names_in(store) == held
    assert side._finder._conversations._computed, "it is computed once there is time"


def test_blocks_that_vllm_has_lost_are_computed_when_there_is_time() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store)
    request = answered(side, pages, FIRST, "one", [1])
    for name in request.block_hashes[8:]:
        pages.named.pop(name, None)
    assert copied(side, pages, store) == [128]
    side.finished(SimpleNamespace(request_id="does not end"))
    assert keep(side, store) == [len(FIRST) + 1]


def test_nothing_is_copied_beside_another_connector_nor_of_an_adapter() -> None:
    """What another connector gave may be rounded; an adapter's weights may be others by now. Of a session all pieces
    are copied."""
    store = MemoryStore(1 << 22)
    beside = scheduling([], store, blend_fields={"edits": True})
    answered(beside, Pages(beside), FIRST, "one", [1])
    assert not beside.take_jobs().capture and not beside._finder._conversations._look_up
    side, pages = busy(store)
    session = with_options(FIRST, "session")
    side.allocated(session, [[1] * 40], start(side, session))
    session.prompt_token_ids += range(900, 960)  # the next piece
    session.answer([1])
    pages.add(session)
    side.finished(session)
    assert copied(side, pages, store) == [320]
    adapted = answered(side, pages, [*range(600, 800)], "adapted", [])
    tracked = SimpleNamespace(request=adapted, token_ids=as_token_ids(adapted.prompt_token_ids), cache_salt=None)
    adapter = Adapter(1, "digest", SimpleNamespace(lora_name="one"))
    tracked.adapter, tracked.options, tracked.plain_tokens = adapter, RequestOptions(), None
    adapted.num_output_tokens, tracked.found = 1, None
    side._finder.watch(tracked, side.cache)
    assert [each.names for each in side._finder._conversations._computed.values() if each.adapter] == [()]


def test_behind_a_first_token_of_its_own_block_copies_are_of_whole_blocks_and_the_rest_is_computed() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store, bos_id=FIRST[0])
    answered(side, pages, FIRST, "one", [1])
    assert copied(side, pages, store) == [1 + 7 * 32], "the first token's KV serves all prompts"
    side.finished(SimpleNamespace(request_id="does not end"))
    assert keep(side, store) == [len(FIRST) + 1]


def test_of_a_section_that_vllm_has_lost_in_part_the_front_is_copied() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store)
    request = answered(side, pages, FIRST, "one", [1])
    del pages.named[request.block_hashes[9]]
    assert copied(side, pages, store) == [128]


def test_histories_of_which_the_rest_waits_for_an_idle_engine_keep_no_other_from_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations, "MOST_WAITING", 3)
    store = MemoryStore(1 << 24)
    side, pages = busy(store)
    for number in range(8):
        answered(side, pages, [*range(50 * number, 50 * number + 250)], f"{number}", [1], conversation=f"{number}")
        assert copied(side, pages, store) == [224]
    assert "fallbacks" not in side.counts.take().data, "nothing of worth is forgotten"
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    for number in range(8):
        end(side, [*range(60 * number, 60 * number + 250)], f"plain {number}", conversation=f"plain {number}")
    side.take_jobs()
    assert side.counts.take().data["fallbacks"]["capture queue full"] == 5


def test_beside_chunks_that_are_captured_copies_go_on_as_long_as_they_fit() -> None:
    store = MemoryStore(1 << 24)
    side, pages = busy(store, 96, capture_bytes=600)
    slow = CaptureJob(ChunkJob((), as_token_ids(range(900, 1000))), side._finder._planners.of())
    assert side._captures.add(slow, time.monotonic()) and len(side.take_jobs().capture) == 1
    answered(side, pages, FIRST, "one", [1])
    found = list[int]()
    for _ in range(60):
        for job in side.take_jobs().capture:
            assert job.pages is not None and side._captures._sent_tokens <= 600
            found.append(len(job.chunk))
            write(store, job, [span for span in job.exact.spans if span.source is Source.TEXT])
        if len(found) == 1:
            break
        wait([each.call for each in [side._finder._conversations._look_up] if each is not None])
    assert found == [96]
    side.reported(StepReport(2))
    assert copied(side, pages, store) == [192, len(FIRST) // 32 * 32]


def test_a_section_that_is_computed_while_it_could_be_copied_ends_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has lost it when there was time to compute it; before that is done a plain request has computed it again."""
    monkeypatch.setattr(histories, "SECTION", 128)
    store = MemoryStore(1 << 22)
    side, pages = busy(store)
    side.finished(SimpleNamespace(request_id="does not end"))
    answered(side, pages, FIRST, "one", [1])
    pages.named.clear()
    while not (slow := side.take_jobs(is_idle=True).capture):
        pass
    assert slow[0].pages is None and len(slow[0].exact) == 128
    give(side, Request([*range(3000, 3040)], name="does not end either"))
    answered(side, pages, FIRST, "same", [1])
    assert copied(side, pages, store) == [], "the workers have a job of this name"
    write(store, slow[0], slow[0].exact.spans)
    side.reported(StepReport(side._captures._finished + 1))
    assert copied(side, pages, store) == [256] and not side._finder._conversations._sent


@pytest.mark.may_fail("store write")
def test_what_one_worker_could_not_compute_holds_up_no_other_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that keeps nothing of two histories in a row is left alone."""
    monkeypatch.setattr(histories, "SECTION", 128)
    for is_refusing in (False, True):
        store = MemoryStore(1 << 24)
        side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
        for number, name in enumerate("abc"):
            end(side, [*range(number, number + len(FIRST))], name, conversation=name)
        conversations_of, found = side._finder._conversations, list[str]()
        while conversations_of.has_work:
            for job in side.take_jobs(is_idle=True).capture:
                found.append(name := "abc"[job.exact.prompt.token_ids[0]])
                if not is_refusing and name != "a":
                    write(store, job, [span for span in job.exact.spans if span.source is Source.TEXT])
                side.reported(StepReport(side._captures._finished + 1))
        assert "".join(found) == ("ab" if is_refusing else "abbbccca")
        side.take_jobs(is_idle=True)
        assert side.counts.take().data.get("fallbacks", {}).get("store write", 0) == (not is_refusing)


def test_a_remote_store_that_does_not_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "PAUSE_S", 0.05)
    monkeypatch.setattr(histories, "SECTION", 128)
    store = MemoryStore(1 << 24)
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one")
    while not (jobs := side.take_jobs(is_idle=True).capture):
        pass
    write(store, jobs[0], jobs[0].exact.spans)
    side.reported(StepReport(1))
    with monkeypatch.context() as away:
        away.setattr(type(store), "is_reachable", property(lambda store: False))
        away.setattr(store, "find", lambda names: [None for _ in names])
        for _ in range(3):
            assert keep(side) == [] and not side.is_busy
            time.sleep(0.06)
    assert keep(side, store) == [256, len(FIRST)], "nothing is computed again"


def test_a_cascade_of_which_one_member_is_away_is_given_new_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(1 << 24)
    monkeypatch.setattr(type(store), "is_reachable", property(lambda store: False))
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one")
    assert keep(side, store) == [len(FIRST)]


@pytest.mark.may_fail("ZeroDivisionError")
def test_an_error_in_a_look_up_of_histories_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(1 << 24)
    side = scheduling([], store, blend_fields={"edits": True})
    end(side, FIRST, "one")
    monkeypatch.setattr(side._finder._conversations, "queue_next", lambda *given, **more: 1 / 0)
    assert side.take_jobs(is_idle=True).capture == []
    monkeypatch.undo()
    assert not side.is_busy, "it is forgotten"
    side.take_jobs()
    end(side, FIRST, "again")
    assert keep(side, store) == [len(FIRST)]


def test_an_open_session_keeps_no_history_from_being_computed() -> None:
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True})
    end(side, FIRST, "one")
    session = Request(NEXT, name="session", resumable=True)
    side.on_new(session)
    assert not side.is_busy
    session.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    assert side.is_busy
    assert [len(job.exact) for _ in range(50) for job in side.take_jobs(is_idle=True).capture] == [len(FIRST)]


def test_a_store_that_has_given_a_historys_place_to_others_gets_the_others_and_that_one_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(histories, "SECTION", 128)
    store, found = MemoryStore(1 << 24), list[int]()
    side = scheduling([], store, blend_fields={"edits": True, "block_size": 32})
    end(side, FIRST, "one", conversation="a")
    end(side, [*range(500, 530), *FIRST], "two", conversation="b")
    while side._finder._conversations.has_work:
        for job in side.take_jobs(is_idle=True).capture:
            found.append(len(job.exact))
            write(store, job, [span for span in job.exact.spans if span.source is Source.TEXT])
            for name in names_in(store) if len(found) == 2 else ():
                store.delete(name)
            side.reported(StepReport(side._captures._finished + 1))
    assert found == [128, 256, 128, 256, 290, 128, 256, 260]


def test_of_a_prompt_that_was_edited_before_all_was_copied_the_rest_is_copied() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store, 192)
    answered(side, pages, FIRST, "one", [1], conversation="a")
    while not copied(side, pages, store, steps=1):
        pass
    copied(side, pages, store, steps=1)  # the look-up for the second section has begun, and notes the first
    edited = answered(side, pages, [*SYSTEM[:64], *THOUGHT, *ANSWER, *range(600, 700)], "two", [1], conversation="a")
    assert edited.block_hashes[6] != Request(edited.all_token_ids).block_hashes[6], "it is blended"
    assert copied(side, pages, store)[-1] == len(FIRST) // 32 * 32


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.may_fail("store write"))])
def test_a_store_that_fails_once_loses_no_history(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    monkeypatch.setattr(conversations, "PAUSE_S", 0.05)
    real, failing = conversations.next_section, [times]

    def fail(*given: Any) -> Any:
        failing[0] -= 1
        if failing[0] >= 0:
            raise StoreError("injected")
        return real(*given)

    monkeypatch.setattr(conversations, "next_section", fail)
    store = MemoryStore(1 << 22)
    side = scheduling([], store, blend_fields={"edits": True})
    end(side, FIRST, "one")
    for _ in range(times):
        assert keep(side, store) == [] and not side.is_busy, "an idle engine does not wait for it"
        time.sleep(0.06)
    assert keep(side, store) == ([len(FIRST)] if times == 1 else [])


def test_an_engine_that_may_capture_less_than_a_token_does_not_step_for_ever() -> None:
    side = scheduling([], MemoryStore(1 << 22), capture_bytes=1, bytes_per_token=10, blend_fields={"edits": True})
    end(side, FIRST, "one")
    for _ in range(20):
        side.take_jobs(is_idle=True)
    assert not side.is_busy


def test_what_was_computed_before_a_reset_is_not_copied() -> None:
    store = MemoryStore(1 << 22)
    side, pages = busy(store)
    before = with_options(FIRST, "before")
    side.allocated(before, [[1] * 40], start(side, before))
    pages.add(before)
    side.reset()
    before.answer([1])
    side.finished(before)
    side.take_jobs()
    assert copied(side, pages, store) == [], "and what vLLM could not forget"
    answered(side, pages, FIRST, "after", [1])
    assert copied(side, pages, store) == []
    pages.named.clear()
    side.reset()
    side.take_jobs()
    answered(side, pages, FIRST, "anew", [1])
    assert copied(side, pages, store) == [len(FIRST) // 32 * 32]


@pytest.mark.parametrize("seed", range(1 + share(40)))
@pytest.mark.may_fail("store write")
def test_of_random_histories_only_exact_rows_are_copied(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits, blends, a cache that loses blocks, a store that does, an engine that is busy or idle; `copied` checks each
    job."""
    store, texts = MemoryStore(1 << 24), Texts(seed, below=900)
    rng, total, pieces = texts.rng, 0, dict[str, list[list[int]]]()
    monkeypatch.setattr(conversations, "MOST_WAITING", rng.choice([1, 2, 64]))
    monkeypatch.setattr(conversations, "PAUSE_S", 0)
    side, pages = busy(store, 64, bos_id=rng.choice([None, 7]))
    for number in range(20):
        name = rng.choice(["", "a", "b"])
        pieces[name] = edited(rng, texts, pieces.get(name) or [texts.ids(70), texts.ids(110)])
        ids = [token for piece in pieces[name] for token in piece][:1500] or [7]
        answered(side, pages, [7, *ids, 1], f"{number}", texts.ids(rng.randint(1, 70)), conversation=name)
        for lost in [name for name in pages.named if rng.random() < 0.02]:
            del pages.named[lost]
        for gone in [name for name in names_in(store) if rng.random() < 0.02]:
            store.delete(gone)
        total += len(copied(side, pages, store if rng.random() < 0.9 else None, steps=rng.choice([0, 3, 40])))
        if rng.random() < 0.1:
            pages.named.clear()
            side.reset()
            side.take_jobs()
    assert total > 10


@pytest.mark.may_fail("bad spans")
@pytest.mark.parametrize("name", [7, None, "\ud800", "x" * 300])
def test_a_wrong_conversation_is_refused(name: Any) -> None:
    side = scheduling([], blend_fields={"edits": True})
    request = with_options(FIRST, "one", conversation=name)
    assert start(side, request) == 0 and "conversation" in why(side, request)


# ---- the workers' side alone ---------------------------------------------------------------------------------------


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize(("in_pages", "lost"), [(None, 0), (False, 0), (None, 1)])
def test_a_section_is_computed_behind_what_is_stored_and_lost_blocks_are_computed_again(
    in_pages: bool | None, lost: int
) -> None:
    scene = Scene(in_pages=in_pages)
    ids = as_token_ids([(11 * n) % VOCAB for n in range(150)])
    whole, kept = list[Any](), list[Any]()
    scene.compute(CaptureJob(ChunkJob((), ids), scene.planner), whole)
    blocks = blocks_of(ChunkJob((), ids), scene.planner, whole)
    scene.store.write_all(blocks[:2])
    plan = scene.planner.plan(Prompt.of([text(ids)]), scene.store)
    assert plan.prefix_length == 64
    if lost:
        scene.store.delete(blocks[0].name)
    scene.compute(CaptureJob(ChunkJob((), ids), scene.planner, exact=plan), kept)
    assert [layer.keys.shape[1] for layer in kept] == [150 - 64] * LAYERS
    found = publish(plan, kept, [span for span in plan.spans if span.source is Source.TEXT], first=64)
    for mine, right in zip(found, blocks[2:], strict=True):
        assert (mine.name, mine.parent) == (right.name, right.parent)
        for one, other in zip(mine.records, right.records, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "first"), [(32, 64), (24, 72)])
def test_rows_that_are_copied_are_those_of_the_cache(layout: str, size: int, first: int) -> None:
    """Also where a stored block ends within one of vLLM's."""
    scene = Scene(layout, in_pages=None)
    planner, ids, rows = replace(scene.planner, block_size=size), as_token_ids(range(150)), list[Any]()
    whole = planner.plan(Prompt.of([text(ids)]), scene.store)
    kinds = [Source.PREFIX if span.stop <= first else Source.TEXT for span in whole.spans]
    plan = replace(whole, spans=tuple(map(lambda span, kind: replace(span, source=kind), whole.spans, kinds)))
    slots = torch.tensor([OWN[at // SIZE] * SIZE + at % SIZE for at in range(150)])
    for paged in scene.opener._paged:
        rows.append(torch.randn(2, KV_HEADS, 150, WIDTH))
        paged.write(*rows[-1], slots)
    pages = [OWN[first // SIZE : -(-150 // SIZE)]]
    found = scene.opener.read_pages(CaptureJob(ChunkJob((), ids), planner, exact=plan, pages=pages))
    for kv, right in zip(found, rows, strict=True):
        assert torch.equal(torch.stack([*kv]), right[:, :, first:])
