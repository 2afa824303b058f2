"""Histories that are edited in the middle: at r = 1 every answer is full prefill's, no history of edits stores another
KV than a plain prefill's, and no other conversation's KV is found.

Situations: pieces of a history stripped, replaced, inserted, inside of a run too; the older half replaced by a summary;
a first line that changes each turn; several edits at once, and none; a turn asked twice; conversations of several
tenants at once, some of which copy each other's text behind text of their own; blocks of one and many sizes; a store
that is small, and one in a folder; discovery on and off; an engine that is asked before its blocks are written.
"""

import copy
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreFullError
from cacheblend.core.failures import failed_since, failures
from cacheblend.core.load.budget import LOOK_UP
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import EmptySource
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines import histories
from cacheblend.engines.hf import BlendEngine, SamplingParams, background, warmup
from cacheblend.store import DiskStore, KVStore, MemoryStore
from campaign import seeds, share
from fake_adapters import add_adapter, set_adapter
from families import VOCAB, tiny_model
from parity.scenes import greedy
from poison import Tally, Witness, WitnessMemory, Written, compare, name_of, names_in
from reference import plain_kv

BOS, ANSWER = 1, SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
FAMILIES = ["llama", "gemma3_text", "qwen3", "cohere2", "smollm3", "gpt_oss", "deepseek_v3"]


def open_engine(family: str = "llama", store: KVStore | None = None, **config: Any) -> BlendEngine:
    settings = {"anchor": "bos", "block_size": 32, "edits": True, "discover": False, "load_timeout_s": 60.0} | config
    return BlendEngine(
        tiny_model(family),  # type: ignore[arg-type]
        store=store or MemoryStore(1 << 28),
        config=BlendConfig.of(settings),
        bos_id=BOS,
        fingerprint=f"weights of {family}",
    )


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


@torch.no_grad()
def full_logits(model: Any, prompt: Prompt) -> torch.Tensor:
    found: torch.Tensor = model(torch.from_numpy(prompt.token_ids.astype("i8"))[None]).logits[0, -1]
    return found


def ask(engine: BlendEngine, *pieces: list[int], conversation: str = "", ratio: float | None = None) -> Any:
    prompt = Prompt.of([text([BOS, *(token for piece in pieces for token in piece)])])
    answer = engine.generate(prompt, ANSWER, ratio=ratio, conversation=conversation)
    assert engine.flush(60)
    return answer.report


SYSTEM, U1, THOUGHT, A1, U2, NEXT = (ids(n, count) for n, count in enumerate((70, 90, 70, 100, 80, 20)))


def test_a_stripped_thought_is_an_exact_prefix_and_a_moved_run() -> None:
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT)
        assert report.hit_tokens["prefix"] == 1 + len(SYSTEM + U1)
        assert report.hit_tokens["moved"] == len(A1 + U2)
        assert (report.selector, report.recompute_ratio) == ("head", 0.05)
        assert report.recomputed_tokens == round(0.05 * len(A1 + U2))
        assert report.text_tokens == len(NEXT) and report.missed_tokens == 0


@pytest.mark.parametrize("config", [{"recompute_ratio": 1.0}, {"selector": "all"}])
def test_where_everything_is_recomputed_moved_runs_are(config: dict[str, Any]) -> None:
    with open_engine(**config) as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT)
        assert report.recomputed_tokens == report.hit_tokens["moved"] == len(A1 + U2)


def test_what_is_computed_in_front_of_a_moved_run_is_an_exact_prefix_of_the_next_prompt() -> None:
    other = ids(20, 90)
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT, U2, A1)
        assert ask(engine, SYSTEM, U1, other, U2, A1, NEXT).hit_tokens["moved"] == len(U2 + A1)
        report = ask(engine, SYSTEM, U1, other, ids(22, 9), U2, A1, NEXT)  # edited again before the next turn
        assert report.hit_tokens["prefix"] >= 1 + len(SYSTEM + U1 + other)


def test_nothing_is_moved_whose_context_is_gone_and_no_text_that_is_repeated() -> None:
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, A1, U2, THOUGHT)
        assert "moved" not in ask(engine, SYSTEM, ids(24, 90), THOUGHT, NEXT).hit_tokens
        ask(engine, SYSTEM, U1, A1, NEXT)
        assert "moved" not in ask(engine, SYSTEM, U1, A1, NEXT, A1).hit_tokens
        assert ask(engine, SYSTEM, U1, A1, NEXT, A1[:5], A1, U2).hit_tokens["moved"] == len(U2)


def test_a_newest_prompt_whose_blocks_are_gone_hides_no_older_one() -> None:
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        older = set(names_in(engine.store))
        ask(engine, SYSTEM, U1, ids(20, 40), A1, U2, NEXT)
        for name in set(names_in(engine.store)) - older:
            assert engine.store.delete(name)
        assert ask(engine, SYSTEM, U1, A1, U2, NEXT, ids(23, 9)).hit_tokens["moved"] == len(A1 + U2)


@pytest.mark.parametrize("conversation", ["", "named"])
def test_a_document_that_is_found_by_its_content_ends_no_history(conversation: str) -> None:
    document = ids(30, 100)
    with open_engine(discover=True) as engine:
        engine.warm([chunk(document)])
        engine.runtime.discovery.listing.prepare(engine.runtime.planner.root).result()  # type: ignore[union-attr]
        chunks, asked = names_in(engine.store), partial(ask, engine, conversation=conversation)
        assert asked(SYSTEM, document, U1, THOUGHT, A1).hit_tokens["memory"] == len(document)  # nothing is known yet
        asked(SYSTEM, document, U1, THOUGHT, A1, U2)
        report = asked(SYSTEM, document, U1, A1, U2, NEXT)
        assert report.hit_tokens["prefix"] == 1 + len(SYSTEM + document + U1)
        assert report.hit_tokens["moved"] == len(A1 + U2) and not report.hit_tokens["memory"]
        for name in names_in(engine.store) - chunks:  # the store has evicted the conversation, and not the document
            assert engine.store.delete(name)
        assert asked(SYSTEM, document, U1, A1, U2, NEXT, ids(31, 9)).hit_tokens["memory"] == len(document)
        report = asked(SYSTEM, document, U1, A1, U2, NEXT, ids(31, 9), ids(32, 9))
        assert report.hit_tokens["prefix"] > len(SYSTEM + document + U1 + A1 + U2)


def test_a_history_larger_than_what_may_wait_for_the_store_is_stored_in_sections() -> None:
    with open_engine() as engine:
        writer = engine.runtime.warmer._writer
        writer._max_bytes = 3 * 32 * engine.runtime.stored_layout.block_bytes(1)
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT)
        assert report.hit_tokens["prefix"] == 1 + len(SYSTEM + U1) and report.hit_tokens["moved"] == len(A1 + U2)


def test_what_a_conversation_has_begun_with_ends_at_a_marked_chunk() -> None:
    """Behind one no text is an exact prefix: looking for it would match the prompt a second time."""
    with open_engine() as engine:
        planner, known = engine.runtime.planner, histories.Histories(64, 10_000)
        plain = planner.plan(Prompt.of([text([*SYSTEM, *U1, *A1])]), EmptySource())
        known.note(planner.root, "a", plain)
        asked = replace(Prompt.of([text(SYSTEM), chunk(U1), text([*A1, *NEXT])]), conversation="a")
        assert known.match(planner.root, asked).begun == len(SYSTEM)
        assert known.match(planner.root, replace(plain.prompt, conversation="a")).begun == len(SYSTEM + U1 + A1)


def test_prompts_that_begin_otherwise_get_nothing_of_an_unnamed_conversation() -> None:
    other, secret = ids(33, 90), ids(34, 120)
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT)
        ask(engine, other, U2, secret)  # another program's, by the same key
        assert "moved" not in ask(engine, SYSTEM, U1, secret, NEXT).hit_tokens


def test_a_store_that_holds_no_whole_history_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "HOLD_UP_TOKENS", 64)
    a_token = open_engine().runtime.stored_layout.block_bytes(1)
    with open_engine(store=MemoryStore(200 * a_token)) as engine:
        for number in range(3):
            for thought in (THOUGHT, []):
                ask(engine, SYSTEM, U1, thought, A1, U2, conversation=str(number))
        assert engine.flush(60)


def test_a_conversation_has_one_job_waiting_and_nothing_is_stored_twice() -> None:
    with open_engine(capture_queue=16) as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        engine.runtime.background.begin_request()  # no background work from here on
        engine.runtime.background.submit("other", lambda: None, patient=True)
        for number in range(10):
            prompt = Prompt.of([text([BOS, *SYSTEM, *U1, *A1, *U2, number + 3])])
            engine.generate(prompt, ANSWER)
        assert engine.runtime.background.given_up["queue full"] == 0
        engine.runtime.background.end_request()
        assert engine.flush(60)
        written = engine.store.stats().blocks
        with engine.runtime.open_prefill(Prompt.of([text([BOS, *SYSTEM, *U1, *A1])]), mode="full") as prefill:
            engine.runtime.store_missed(prefill.run())
        assert engine.flush(60) and engine.store.stats().blocks <= written + 1  # the last block of it is another


def test_an_edited_prompt_is_computed_once_more_when_there_is_time() -> None:
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        assert ask(engine, SYSTEM, U1, A1, U2, NEXT).hit_tokens["moved"]
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT, ids(23, 40))
        whole_blocks = 1 + len(SYSTEM + U1 + A1 + U2 + NEXT) // 32 * 32
        assert report.hit_tokens["prefix"] == whole_blocks and "moved" not in report.hit_tokens


def test_an_edited_prompt_waits_while_the_store_takes_nothing() -> None:
    other = ids(31, 90)
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2, conversation="a")
        engine.runtime.background.begin_request()  # no background work from here on
        engine.generate(Prompt.of([text([BOS, *SYSTEM, *U1, *A1, *U2])]), ANSWER, conversation="a")
        keeper = engine.runtime.warmer.keeper
        keeper._resume_at = math.inf
        engine.runtime.background.end_request()
        assert engine.flush(60)
        keeper._resume_at = 0.0
        ask(engine, other, THOUGHT, A1, conversation="b")
        assert ask(engine, other, A1, conversation="b").hit_tokens["moved"]
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT, conversation="a")
        assert report.hit_tokens["prefix"] == 1 + len(SYSTEM + U1 + A1 + U2) // 32 * 32


WHOLE = 1 + len(SYSTEM + U1 + A1 + U2) // 32 * 32  # of an edited prompt, in whole blocks


class Unsteady(MemoryStore):
    """A store that refuses as many writes, and is away for as many look-ups, as a test says, and cannot read some
    blocks."""

    refuses = away = reads = 0
    damaged: frozenset[BlockName] = frozenset()

    def write_all(self, blocks: Any) -> list[bool]:
        if self.refuses:
            self.refuses -= 1
            raise StoreFullError("full")
        return super().write_all(blocks)

    def find(self, names: Any) -> Any:
        self.away -= self.away > 0
        return [None for _ in names] if self.away else super().find(names)

    def read_layers(self, names: Any, layers: range, *more: Any) -> Any:
        self.reads += not self.damaged.isdisjoint(names)
        found = super().read_layers(names, layers, *more)
        return [
            BlockLostError([name], "damaged") if name in self.damaged else each
            for name, each in zip(names, found, strict=True)
        ]

    @property
    def is_reachable(self) -> bool:
        return not self.away


def edited_in_a_busy_time(engine: BlendEngine, conversation: str = "a") -> None:
    """A prompt whose history was edited waits to be computed as it is."""
    ask(engine, SYSTEM, U1, THOUGHT, A1, U2, conversation=conversation)
    engine.runtime.background.begin_request()  # no background work from here on
    engine.generate(Prompt.of([text([BOS, *SYSTEM, *U1, *A1, *U2])]), ANSWER, conversation=conversation)


@pytest.mark.may_fail("store write")
@pytest.mark.parametrize("what", ["refuses", "is away", "is late"])
def test_an_edited_prompt_waits_for_a_store_that_fails_for_a_while(what: str) -> None:
    store = Unsteady(1 << 28)
    with open_engine(store=store) as engine:
        edited_in_a_busy_time(engine)
        warmer, late = engine.runtime.warmer, engine.runtime.prefiller.late_tiers
        if what == "refuses":
            store.refuses = 1
        elif what == "is away":
            store.away = 10**6
        else:
            late.give_up(LOOK_UP, 5.0)
        engine.runtime.background.end_request()
        assert engine.flush(60) and len(warmer._edited) == 1
        store.away, warmer.keeper._resume_at = 0, 0.0
        late._resume_at.clear()
        ask(engine, ids(31, 90), conversation="b")  # any request wakes it
        assert not warmer._edited
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT, conversation="a")
        assert report.hit_tokens["prefix"] == WHOLE and "moved" not in report.hit_tokens


@pytest.mark.may_fail("block lost")
def test_a_history_behind_a_block_that_cannot_be_read_is_given_up_the_second_time() -> None:
    """A damaged one that the store may not remove: its next blocks would be computed in vain after each request."""
    store = Unsteady(1 << 28)
    with open_engine(store=store) as engine:
        edited_in_a_busy_time(engine)
        first = Prompt.of([text([BOS, *SYSTEM, *U1])])
        store.damaged = frozenset([engine.runtime.planner.plan(first, EmptySource()).spans[1].name])
        engine.runtime.background.end_request()
        assert engine.flush(60) and not engine.runtime.warmer._edited
        assert engine.runtime.background.given_up["histories"] == 1
        reads = store.reads
        ask(engine, ids(31, 90), conversation="b")
        assert store.reads == reads


def test_an_edited_prompt_of_other_adapters_is_given_up_and_counted() -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    for seed, name in enumerate("ab", 1):
        add_adapter(model, name, seed=seed)
    set_adapter(model, "a")
    config = BlendConfig.of({"anchor": "bos", "block_size": 32, "edits": True, "discover": False})
    with BlendEngine(model, store=MemoryStore(1 << 28), config=config, bos_id=BOS, fingerprint="adapted") as engine:
        edited_in_a_busy_time(engine)
        set_adapter(model, "b")
        engine.runtime.background.end_request()
        assert engine.flush(60) and not engine.runtime.warmer._edited
        assert engine.runtime.background.given_up["histories"] == 1


def test_a_prompt_that_is_asked_while_the_store_takes_nothing_is_stored_later() -> None:
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2, conversation="a")
        engine.runtime.warmer.keeper._resume_at = math.inf
        ask(engine, SYSTEM, U1, A1, U2, conversation="a")
        engine.runtime.warmer.keeper._resume_at = 0.0
        ask(engine, ids(31, 90), conversation="b")
        assert ask(engine, SYSTEM, U1, A1, U2, NEXT, conversation="a").hit_tokens["prefix"] == WHOLE


def test_a_run_whose_blocks_are_gone_is_text_so_that_what_is_computed_is_stored() -> None:
    """Also on a server that is never idle."""
    with open_engine() as engine:
        ask(engine, SYSTEM, U1, conversation="a")
        kept = set(names_in(engine.store))
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2, conversation="a")
        for name in set(names_in(engine.store)) - kept:
            assert engine.store.delete(name)
        engine.runtime.background.begin_request()
        found = [
            engine.generate(Prompt.of([text([BOS, *SYSTEM, *U1, *A1, *U2, *more])]), ANSWER, conversation="a")
            for more in ([], NEXT)
            if engine.runtime.warmer._writer.flush(60)
        ]
        assert "moved" not in found[0].report.hit_tokens
        assert found[1].report.hit_tokens["prefix"] >= WHOLE - 32
        engine.runtime.background.end_request()


def test_the_chain_that_is_moved_from_outlives_short_ones_that_end_elsewhere() -> None:
    """Each turn has other text behind the first message."""
    with open_engine() as engine:
        ask(engine, SYSTEM, ids(50, 80), U1, A1, U2, conversation="a")
        engine.runtime.background.begin_request()
        for turn in range(6):
            prompt = Prompt.of([text([BOS, *SYSTEM, *ids(51 + turn, 80), *U1, *A1, *U2])])
            found = engine.generate(prompt, ANSWER, conversation="a")
            assert found.report.hit_tokens["moved"] == len(U1 + A1 + U2), f"turn {turn}"
            assert engine.runtime.warmer._writer.flush(60)
        engine.runtime.background.end_request()


@pytest.mark.may_fail("RuntimeError")
def test_what_goes_wrong_when_a_prompt_is_stored_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(warmup, "publish", full)
    with open_engine() as engine:
        already = failures()
        assert ask(engine, SYSTEM, U1).prompt_tokens == 1 + len(SYSTEM + U1)
        assert failed_since(already) == {"RuntimeError": 1}


def test_a_newer_prompt_that_comes_while_an_older_one_ends_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine() as engine:
        edited_in_a_busy_time(engine)
        warmer, came = engine.runtime.warmer, list[object]()
        edited = next(iter(warmer._edited.values()))
        newer = replace(Prompt.of([text([BOS, *SYSTEM, *U1, *A1, *U2, *ids(60, 64)])]), conversation="a")

        def end() -> None:
            if not warmer._edited and not came and background_thread() is threading.current_thread():
                came.append(1)
                warmer._queue_edited(edited.state, edited.planner, newer)

        def background_thread() -> object:
            return engine.runtime.background._thread

        monkeypatch.setattr(background, "end_team", end)
        engine.runtime.background.end_request()
        assert engine.flush(60) and came and not warmer._edited
        report = ask(engine, SYSTEM, U1, A1, U2, ids(60, 64), NEXT, conversation="a")
        assert report.hit_tokens["prefix"] >= WHOLE + 64 - 32


def test_closing_waits_for_no_more_than_the_section_under_way() -> None:
    with open_engine() as engine:
        edited_in_a_busy_time(engine)
        given_up = engine.runtime.background.given_up["histories"]
    assert engine.runtime.background.given_up["histories"] == given_up + 1
    assert not engine.runtime.warmer._edited


def test_nobodys_many_conversations_push_out_anothers() -> None:
    with open_engine() as engine:
        edited_in_a_busy_time(engine)
        warmer, state = engine.runtime.warmer, engine.runtime.follow()
        mine = next(iter(warmer._edited.values())).prompt
        for number in range(warmup.MOST_EDITED + 5):
            prompt = replace(mine, conversation=str(number))
            warmer._queue_edited(state, state.planner_of("another"), prompt)
        kept = [conversation for _, conversation in warmer._edited]
        assert kept[0] == "a" and kept[1:] == [str(number) for number in range(6, warmup.MOST_EDITED + 5)]
        assert engine.runtime.background.given_up["histories"] == 6
        warmer._edited.clear()
        engine.runtime.background.end_request()


def test_nothing_is_moved_that_another_conversation_computed() -> None:
    with open_engine() as engine:
        for planter in ("", "b"):
            ask(engine, SYSTEM, ids(30, 70), U1, A1, U2, conversation=planter)
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT, conversation="a")
        assert "moved" not in report.hit_tokens
        with engine.runtime.open_prefill(Prompt.of([text([BOS, *SYSTEM, *U1, *A1])]), tenant="t") as prefill:
            engine.runtime.store_missed(prefill.run(), "t")
        assert engine.flush(60)
        assert "moved" not in ask(engine, SYSTEM, A1, NEXT, conversation="c").hit_tokens


def test_a_history_whose_first_line_changes_needs_a_named_conversation() -> None:
    with open_engine() as engine:
        for conversation in ("", "a"):
            ask(engine, ids(40, 9), SYSTEM, U1, A1, conversation=conversation)
            report = ask(engine, ids(41, 9), SYSTEM, U1, A1, NEXT, conversation=conversation)
            assert report.hit_tokens.get("moved", 0) == (len(SYSTEM + U1 + A1) if conversation else 0)


@pytest.mark.parametrize("edits", [True, False])
def test_histories_are_kept_only_where_they_are_asked_for(edits: bool) -> None:
    with open_engine(edits=edits) as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        assert ("moved" in ask(engine, SYSTEM, U1, A1, U2, NEXT).hit_tokens) is edits


def test_what_edits_cannot_go_with_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="anchor 'system'"):
        open_engine(anchor="system")
    with pytest.raises(InvalidInputError, match="set capture"):
        open_engine(capture=False)
    with pytest.raises(InvalidInputError, match="edits does not take into account that layer 0"):
        open_engine("qwen3_next")
    with pytest.raises(InvalidInputError, match=r"edit_ratio must be .*1\.5"):
        open_engine(edit_ratio=1.5)
    with open_engine() as engine, pytest.raises(InvalidInputError, match="conversation"):
        engine.generate(Prompt.of([text([BOS, 5])]), conversation="\ud800")


class WitnessDisk(Witness, DiskStore):
    """In a folder."""


class Conversation:
    """Pieces of a history that grows and is edited."""

    def __init__(self, rng: random.Random, name: str, tenant: str) -> None:
        self.rng, self.name, self.tenant = rng, name, tenant
        self.pieces, self.asked = [self.draw(5, 60)], list[list[int]]()

    def draw(self, least: int, most: int) -> list[int]:
        return self.rng.choices(range(3, VOCAB), k=self.rng.randint(least, most))

    def turn(self, others: "list[Conversation]") -> Prompt:
        rng, pieces = self.rng, self.pieces
        pieces += [self.draw(1, 110) for _ in range(rng.randint(1, 2))]
        for _ in range(rng.choice([0, 1, 1, 2])):
            at = rng.randrange(len(pieces))
            match rng.choice(["strip", "replace", "insert", "inside", "first", "summary", "copy"]):
                case "strip" if len(pieces) > 2:
                    del pieces[at]
                case "replace":
                    pieces[at] = self.draw(1, 30)
                case "insert":
                    pieces.insert(at, self.draw(1, 40))
                case "inside":
                    pieces[at] = [*pieces[at]]
                    pieces[at][rng.randrange(len(pieces[at]))] = rng.randrange(3, VOCAB)
                case "first":
                    pieces[0] = self.draw(1, 60)
                case "summary" if len(pieces) > 4:
                    pieces[1 : len(pieces) // 2] = [self.draw(5, 40)]
                case "copy":
                    pieces += rng.choice(others).pieces[-2:]
        while sum(map(len, pieces)) > 700:
            del pieces[1]
        return Prompt.of([text([BOS, *(token for piece in pieces for token in piece)])])


class Histories:
    """Random conversations on one engine, and the comparison afterwards."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        family = FAMILIES[seed % len(FAMILIES)]
        size = rng.choice([1 << 28, 1 << 28, 1 << 19])
        self.store: Any = WitnessDisk(folder, durable=False) if rng.random() < 0.2 else WitnessMemory(size)
        config = {
            "anchor": rng.choice(["bos", "none"]),
            "block_size": rng.choice([8, 32, 256]),
            "discover": rng.random() < 0.3,
            "codec": rng.choice(["raw", "raw", "int8"]),
            "selector": rng.choice(["auto", "hkvd", "head"]),
            "recompute_ratio": rng.choice([0.0, 0.2, 1.0]),
        }
        self.engine = open_engine(family, self.store, **config)
        self.conversations = [
            Conversation(rng, name, tenant) for name, tenant in (("", ""), ("a", ""), ("b", ""), ("a", "t"))
        ]
        self.tally, self.planted = Tally(histories=1), 0

    def play(self) -> Tally:
        rng, engine = self.rng, self.engine
        with engine:
            for _ in range(8):
                one = rng.choice(self.conversations)
                prompt = replace(one.turn(self.conversations), conversation=one.name)
                self.tally.meet("requests")
                known = engine.runtime.known_in(prompt, engine.runtime.follow(), one.tenant)
                moved = [segment for segment in known.segments if segment.is_moved]
                self.tally.meet("moved tokens", sum(map(len, moved)))
                for run in moved:  # its KV has this conversation's context, and no other's
                    assert run.found_in is not None
                    chain = [*run.found_in.anchor_ids.tolist(), *run.found_in.token_ids.tolist()]
                    self.planted += not any(ids[: len(chain)] == chain for ids in one.asked)
                one.asked.append(prompt.token_ids.tolist())
                ratio = rng.choice([None, 0.0, 1.0])
                if rng.random() < 0.3:  # again before anything is written
                    engine.runtime.open_prefill(known, tenant=one.tenant).close()
                with engine.runtime.open_prefill(known, ratio=ratio, tenant=one.tenant) as prefill:
                    result = prefill.run()
                if ratio == 1.0:
                    self.tally.meet("compared")
                    ours, full = result.logits.flatten(), full_logits(engine.model, prompt)
                    assert torch.allclose(ours, full, atol=2e-4), float((ours - full).abs().max())
                engine.runtime.store_missed(result, one.tenant)
                if rng.random() < 0.7:
                    assert engine.flush(60)
            assert engine.flush(60) and engine.runtime.background.given_up["failed"] == 0
            roots = {}
            for tenant in ("", "t"):
                planner = engine.runtime.planner_of(tenant)
                roots |= {bytes(planner.root): tenant, bytes(planner.exact_root or planner.root): tenant}
            # The anchor's block is not written in front of compressed chunks.
            anchors = {name_of(root, [BOS]): Written(root, [BOS]) for root in roots}
            written: dict[bytes, Written] = anchors | getattr(self.store, "written", {})
            names = names_in(self.store)
            self.tally.add(
                compare(self.store, names, written, roots, lambda root, seen: plain_kv(engine.model, seen)[1])
            )
        return self.tally


def test_no_history_of_edits_gives_another_answer_or_stores_another_kv(tmp_path: Path) -> None:
    tally, planted = Tally(), 0
    for seed in seeds(share(36), known=36):
        histories = Histories(seed, tmp_path / str(seed))
        tally.add(histories.play())
        planted += histories.planted
    assert tally.poisoned == 0, tally.what[:5]
    assert planted == 0
    # by those that are always drawn
    assert tally.met["moved tokens"] > 300 and tally.met["compared"] >= 4 and tally.blocks > 40


def test_what_other_adapters_had_computed_is_not_moved() -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    for seed, name in enumerate("ab", 1):
        add_adapter(model, name, seed=seed)
    config = BlendConfig.of({"anchor": "bos", "block_size": 32, "edits": True, "discover": False})
    with BlendEngine(model, store=MemoryStore(1 << 28), config=config, bos_id=BOS, fingerprint="adapted") as engine:
        set_adapter(model, "a")
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2)
        request = engine.start(Prompt.of([text([BOS, *SYSTEM, *U1, *A1, *U2])]), ANSWER)  # its edit is yet to be kept
        request.step()
        set_adapter(model, "b")
        request.finish()
        assert engine.flush(60)
        report = ask(engine, SYSTEM, U1, A1, U2, NEXT)
        assert sum(report.hit_tokens.values()) == 0
        set_adapter(model, "a")
        assert ask(engine, SYSTEM, U1, A1, U2, NEXT).hit_tokens["moved"] == len(A1 + U2)


def test_turns_of_a_conversation_at_once_are_each_full_prefills() -> None:
    with open_engine(recompute_ratio=1.0) as engine:
        ask(engine, SYSTEM, U1, THOUGHT, A1, U2, conversation="a")
        prompts = [
            replace(Prompt.of([text([BOS, *SYSTEM, *U1, *ids(50 + n, 9), *A1, *U2, *NEXT])]), conversation="a")
            for n in range(4)
        ]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda prompt: engine.generate(prompt, ANSWER, conversation="a"), prompts))
        assert engine.flush(60) and engine.runtime.background.given_up["failed"] == 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == greedy(engine.model, prompt, 3) and answer.report.hit_tokens["moved"] > 100
