"""Documents in step with their source: what is computed, kept and dropped, whoever else is there and whatever fails;
and `cacheblend sync`, as a user runs it: reports, refusals, a process that is killed."""

import contextlib
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreFullError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.documents import Document, referring
from cacheblend.engines.hf import BlendEngine, DocumentSync, SyncReport
from cacheblend.engines.hf.document_sync import Cutter
from cacheblend.engines.tokens.chunker import Cutting
from cacheblend.store import DiskStore, KVStore, MemoryStore
from cacheblend.store.documents import DocumentRecord
from campaign import share
from command_line import Run, runner
from lab.speed.sync import cut_whole
from random_words import text_of
from serving import shallow

NO_CAPTURE = BlendConfig(capture=False, discover=False)
CUTTING = Cutting(48, 12)


def opened(store: KVStore | str | Path, config: BlendConfig = NO_CAPTURE) -> BlendEngine:
    return BlendEngine.from_pretrained(shallow(), store=store, config=config)


@pytest.fixture(scope="module")
def shared() -> Iterator[BlendEngine]:
    """One engine; each test takes it with a store, or a tenant, of its own."""
    with opened(MemoryStore(1 << 28)) as engine:
        yield engine


def sync(engine: BlendEngine, documents: dict[str, str], most: float = 1.0, **options: Any) -> SyncReport:
    work = DocumentSync(engine, **{"cutting": CUTTING, **options})
    gone = work.vanished((name for name in documents), most)
    work.put(Document(name, body) for name, body in documents.items())
    return work.finish(gone)


def records(engine: BlendEngine, tenant: str = "") -> list[DocumentRecord]:
    found = engine.store.documents.all(engine.runtime.planner_of(tenant).root)
    assert all(isinstance(each, DocumentRecord) for each in found)
    return [each for each in found if isinstance(each, DocumentRecord)]


def check(engine: BlendEngine, documents: dict[str, str], tenant: str = "") -> None:
    """The store has the chunks of these documents, complete, and no other of the tenant."""
    root = engine.runtime.planner_of(tenant).root
    listed = {manifest.chunk_id: manifest for manifest in engine.store.manifests() if manifest.root == root}
    found = records(engine, tenant)
    assert {each.id for each in found} == documents.keys()
    assert {blocks[-1] for each in found for blocks in each.chunks} == listed.keys()
    assert engine.runtime.builder is not None
    for each in found:
        assert each.stale == ()
        ids = [int(i) for blocks in each.chunks for i in listed[blocks[-1]].token_ids]
        body = documents[each.id]
        assert ids == (engine.runtime.builder.encode(body) if body.strip() else [])
        assert all(engine.store.held([name for blocks in each.chunks for name in blocks]))


@pytest.mark.parametrize("seed", range(6))
def test_any_history_ends_with_the_chunks_of_what_is_there(shared: BlendEngine, seed: int) -> None:
    """Documents that are added, edited, copied, renamed, emptied and dropped; a dry run says what the run then does."""
    rng, tenant = random.Random(seed), f"history {seed}"
    pool = [text_of(rng.random(), 1) for _ in range(40)]
    documents: dict[str, str] = {}
    for _ in range(7):
        for _ in range(rng.randint(1, 4)):
            name, others = f"d{rng.randrange(6)}", sorted(documents)
            what = rng.choice(["new", "edit", "copy", "drop", "empty", "insert"])
            if what == "new" or not others:
                documents[name] = " ".join(rng.choices(pool, k=rng.randint(1, 40)))
            elif what == "copy":
                documents[name] = documents[rng.choice(others)]
            elif what == "drop":
                documents.pop(rng.choice(others))
            elif what == "empty":
                documents[rng.choice(others)] = rng.choice(["", " \n"])
            else:
                edited = rng.choice(others)
                parts = documents[edited].split(". ")
                at = rng.randrange(len(parts))
                parts[at : at + (what == "edit")] = [rng.choice(pool)]
                documents[edited] = ". ".join(parts)
        expected = sync(shared, documents, tenant=tenant, dry_run=True)
        done = sync(shared, documents, tenant=tenant)
        for field in ("kept", "added", "changed", "dropped", "computed_tokens", "computed_chunks", "empty"):
            assert getattr(done, field) == getattr(expected, field), field
        check(shared, documents, tenant)
        again = sync(shared, documents, tenant=tenant)
        assert (again.kept, again.computed_tokens, again.dropped_chunks) == (len(documents), 0, 0)
    sync(shared, {}, tenant=tenant)
    check(shared, {}, tenant)


def test_a_chunk_stays_until_all_its_documents_are_gone_while_it_is_pinned_and_until_cuts_change(
    shared: BlendEngine,
) -> None:
    body, tenant = text_of(1, 3), "two"
    first = sync(shared, {"a": body, "b": body}, tenant=tenant)
    assert first.chunks == 2 * first.computed_chunks and first.tokens == 2 * first.computed_tokens
    has = referring(shared.store, shared.runtime.planner_of(tenant).root).values()
    assert {tuple(sorted(record.id for record in each)) for each in has} == {("a", "b")}
    assert sync(shared, {"b": body}, tenant=tenant).dropped_chunks == 0
    check(shared, {"b": body}, tenant)
    assert sync(shared, {}, tenant=tenant).dropped_chunks == first.computed_chunks
    check(shared, {}, tenant)

    bells = {"a": "The bell rings. The rope holds."}
    sync(shared, bells, tenant=tenant)
    (record,) = records(shared, tenant)
    shared.store.pin(record.chunks[0])
    done = sync(shared, {}, tenant=tenant)
    assert (done.dropped, done.dropped_chunks, done.pinned_chunks) == (1, 0, 1)
    assert all(shared.store.held(record.chunks[0]))
    shared.store.unpin(record.chunks[0])
    sync(shared, bells, tenant=tenant)
    assert sync(shared, {}, tenant=tenant).dropped_chunks == 1

    long = {"a": text_of(1, 20)}
    sync(shared, long, tenant=tenant)
    done = sync(shared, long, tenant=tenant, cutting=Cutting(100, 20))
    assert done.changed == 1 and done.dropped_chunks > 0
    check(shared, long, tenant)


def test_documents_in_any_form_and_what_is_refused_before_anything_is_dropped(shared: BlendEngine) -> None:
    bodies = {name: text_of(name, 12) for name in "abcd"}
    given: list[Any] = [
        {"id": "a", "text": bodies["a"]},
        SimpleNamespace(id="b", page_content=bodies["b"], metadata={}),
        SimpleNamespace(node_id="c", get_content=lambda metadata_mode: bodies["c"], metadata={}),
        Document("d", bodies["d"]),
    ]
    work = DocumentSync(shared, tenant="forms", cutting=CUTTING)
    work.put(given)
    assert work.finish().added == 4
    check(shared, bodies, "forms")
    assert sync(shared, bodies, tenant="forms").kept == 4
    work = DocumentSync(shared, tenant="forms", cutting=CUTTING)
    work.put(Document(name, body, "another title") for name, body in bodies.items())  # which is in no chunk
    assert work.finish().kept == 4
    for left in ({}, {"a": bodies["a"]}):  # a source that is empty by mistake
        with pytest.raises(InvalidInputError, match=r"of the 4 documents .* --max-drop 1"):
            sync(shared, left, 0.5, tenant="forms")
    with pytest.raises(InvalidInputError, match="two documents have the id 'a'"):
        work.put([given[0], given[1], Document("a", "Three.")])
    for wrong in ("", "x" * 1025, "\ud800"):
        with pytest.raises(InvalidInputError, match="a document's id"):
            Document(wrong, "text")
    check(shared, bodies, "forms")
    assert sync(shared, {n: bodies[n] for n in "ab"}, 0.5, tenant="forms").dropped == 2


def test_stored_chunks_are_exact_and_found_in_plain_text(tmp_path: Path) -> None:
    """In another order in a prompt at r = 1: no miss, and the logits of full prefill. Unmarked: found all the same."""
    body = text_of(7, 60)
    config = BlendConfig(capture=False)
    with BlendEngine.from_pretrained(shallow(), store=tmp_path / "s", config=config, dtype="float32") as engine:
        sync(engine, {"a": body}, cutting=Cutting(140, 64))
        (record,) = records(engine)
        listed = {manifest.chunk_id: manifest for manifest in engine.store.manifests()}
        parts = [chunk(listed[blocks[-1]].token_ids) for blocks in reversed(record.chunks)]
        assert len(parts) > 3
        prompt = Prompt.of([text([5]), *parts, text([7])])
        blended = engine.prefill(prompt, ratio=1.0)
        assert blended.plan.missed_chunks() == []
        full = engine.prefill(prompt, mode="full")
        assert torch.allclose(blended.logits, full.logits, atol=1e-4)
        plain = engine.prompt([f"Read this. {body} What rings?"])
        for _ in range(500):  # until the list is read
            if (found := engine.runtime.known_in(plain, engine.runtime.follow())).chunks:
                break
            time.sleep(0.01)
        assert sum(map(len, found.chunks)) > 0.9 * record.tokens


def test_chunks_that_vanished_are_restored_and_damaged_records_replaced_by_what_is_given(tmp_path: Path) -> None:
    documents = {name: text_of(name, 20) for name in "abc"}
    without_b = {name: documents[name] for name in "ac"}
    with opened(DiskStore(tmp_path / "s", durable=False)) as engine:
        sync(engine, documents)
        (record,) = [each for each in records(engine) if each.id == "b"]
        engine.store.delete(record.chunks[1][0])
        engine.store.delete_manifest(record.chunks[2][-1])
        done = sync(engine, documents)
        assert (done.kept, done.restored, done.computed_chunks) == (2, 1, 2)
        check(engine, documents)
        for each in records(engine):
            if each.id in "ab":
                (file,) = (tmp_path / "s").rglob(f"{each.name.hex()}.json")
                file.write_bytes(b"{}")
        done = sync(engine, without_b)
        assert len(done.damaged) == 2 and all(".json" in reason for reason in done.damaged)
        assert (done.added, done.kept, done.computed_tokens) == (1, 1, 0)  # its chunks were there
        again = sync(engine, without_b)
        assert len(again.damaged) == 1 and again.kept == 2  # what `b` had is unknown until it is given again
        assert sync(engine, documents).added == 1
        check(engine, documents)
        old = engine.runtime.planner.root
    # Another model, or setting, has documents of its own.
    with opened(tmp_path / "s", BlendConfig(capture=False, discover=False, codec="fp8")) as engine:
        assert sync(engine, documents).added == 3
        assert set(engine.store.documents.roots()) == {old, engine.runtime.planner.root}
        assert sync(engine, {}).dropped == 3
        assert {each.id for each in engine.store.documents.all(old)} == set("abc")  # type: ignore[union-attr]


def test_a_sync_that_is_cut_short_anywhere_goes_on(tmp_path: Path) -> None:
    """The store fails at each of its writes in turn; what was computed before is not computed again."""
    before = {name: text_of(name, 12) for name in "abcd"}
    after = {"a": before["a"], "b": before["b"] + " The end is new.", "c": "All else.", "e": "A letter came."}

    class Failing(DiskStore):
        left = 10**9

        def _step(self) -> None:
            type(self).left -= 1
            if type(self).left < 0:
                raise StoreFullError("no more writes")

        def write_all(self, blocks: Any) -> list[bool]:
            self._step()
            return super().write_all(blocks)

        def put_manifest(self, manifest: Any) -> None:
            self._step()
            super().put_manifest(manifest)

        def delete(self, name: Any) -> bool:
            self._step()
            return super().delete(name)

        def delete_manifest(self, name: Any) -> bool:
            self._step()
            return super().delete_manifest(name)

    for fails_at in range(0, 40, 3):
        Failing.left = 10**9
        with opened(Failing(tmp_path / f"s{fails_at}", durable=False)) as engine:
            whole = sync(engine, before)
            Failing.left = fails_at
            with contextlib.suppress(StoreFullError):
                sync(engine, after)
            Failing.left = 10**9
            done = sync(engine, after)
            assert done.missing_documents == 0
            check(engine, after)
            assert done.computed_tokens < whole.tokens


@pytest.mark.parametrize("seed", range(4))
def test_syncs_at_the_same_time_leave_what_they_refer_to(tmp_path: Path, seed: int) -> None:
    """Four syncs of their own collections with the same texts, through two store objects; all ids share chunks."""
    rng = random.Random(seed)
    texts = [text_of(rng.random(), 8) for _ in range(4)]
    last: dict[int, dict[str, str]] = {}
    with (
        opened(DiskStore(tmp_path / "s", durable=False)) as one,
        opened(DiskStore(tmp_path / "s", durable=False)) as two,
    ):

        def work(number: int) -> None:
            mine = random.Random(100 * seed + number)
            for _ in range(6):
                documents = {f"d{n}": mine.choice(texts) for n in range(mine.randint(0, 4))}
                sync((one, two)[number % 2], documents, collection=f"c{number}")
                last[number] = documents

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        for number, documents in last.items():
            done = sync(one, documents, collection=f"c{number}")
            assert (done.kept, done.restored, done.computed_tokens) == (len(documents), 0, 0)
        used = {blocks[-1] for each in records(one) for blocks in each.chunks}
        assert {manifest.chunk_id for manifest in one.store.manifests()} == used


def test_documents_of_another_tokenizer_are_cut_again(tmp_path: Path) -> None:
    """The weights, and so the names, are the same ones: what is stored would be found by no request any more."""
    documents = {name: text_of(name, 20) for name in "ab"}
    with opened(DiskStore(tmp_path / "s", durable=False)) as engine:
        sync(engine, documents)
        builder = engine.runtime.builder
        assert builder is not None
        builder.digest = "of another one"
        done = sync(engine, documents)
        assert (done.kept, done.changed, done.computed_chunks) == (0, 2, 0)
        assert sync(engine, documents).kept == 2


def test_a_store_that_is_too_small_says_so(tmp_path: Path) -> None:
    documents = {str(n): text_of(n, 20) for n in range(6)}
    with opened(DiskStore(tmp_path / "s", durable=False)) as engine:
        sync(engine, documents)
        nbytes = engine.store.stats().bytes
    with opened(DiskStore(tmp_path / "t", durable=False, max_bytes=nbytes // 2)) as engine:
        done = sync(engine, documents)
        assert done.missing_documents > 0
        assert engine.store.stats().bytes <= nbytes // 2


def test_an_anchor_that_leaves_no_room_for_a_chunk_is_refused(tmp_path: Path) -> None:
    config = replace(NO_CAPTURE, anchor="text", anchor_text="The cat sat. " * 2000)
    with (
        opened(tmp_path / "s", config) as engine,
        pytest.raises(InvalidInputError, match=r"an anchor of \d+ tokens is too long for a context of \d+"),
    ):
        sync(engine, {"a": "Ben has the lamp."})


def test_a_long_document_is_tokenised_in_parts_between_which_others_have_their_turn(
    shared: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that meanwhile stored another text of the same document included: its chunks are stale then, and go."""
    monkeypatch.setattr("cacheblend.engines.hf.document_sync.ENCODED_AT_ONCE", 100)
    assert shared.runtime.builder is not None
    for between in (" ", ""):
        body = between.join(["Lamp", "ferry"] * 60)
        pieces = cut_whole(Cutter.of(shared, CUTTING, 0), Document("a", body))
        assert shared.runtime.builder.decode([int(i) for piece in pieces for i in piece]).strip() == body
    text, other = (text_of(seed, 20) for seed in (5, 6))
    long = DocumentSync(shared, tenant="turns", cutting=CUTTING, reads_all=False)
    steps = long.steps([Document("a", text)], 1 << 16)
    assert [next(steps) for _ in range(len(text) // 100)] == [None] * (len(text) // 100)
    sync(shared, {"a": other}, tenant="turns")
    assert [each for each in steps if each is not None] == [1]
    assert long.finish().changed == 1 and long.dropped_chunks
    check(shared, {"a": text}, "turns")


# ---- syncs of the same documents at the same time ------------------------------------------------------------------
#
# They leave no chunk that nobody has: it would stay until the store is full. Two syncs read the same records and then
# put other texts of one document, in any order of their ends; documents are dropped, or edited, while another sync
# computes them; a third document has one of their chunks.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BlendEngine, BlendEngine]]:
    folder: Path = tmp_path_factory.mktemp("together") / "s"
    with opened(DiskStore(folder, durable=False)) as one, opened(DiskStore(folder, durable=False)) as two:
        yield one, two


@pytest.mark.parametrize("is_first_last", [False, True])
def test_two_texts_of_one_document_at_once(pair: tuple[BlendEngine, BlendEngine], is_first_last: bool) -> None:
    one, two = pair
    tenant = f"two {is_first_last}"
    sync(one, {"a": text_of(1, 20)}, tenant=tenant)
    syncs = [DocumentSync(engine, cutting=CUTTING, tenant=tenant) for engine in pair]
    for each, seed in zip(syncs, (2, 3), strict=True):
        each.put([Document("a", text_of(seed, 20))])
    for each in syncs[::-1] if is_first_last else syncs:
        each.finish()
    check(two, {"a": text_of(3, 20)}, tenant)


@pytest.mark.parametrize("then", ["dropped", "edited"])
def test_documents_that_change_while_they_are_computed(pair: tuple[BlendEngine, BlendEngine], then: str) -> None:
    one, two = pair
    sync(two, {"c": text_of(6, 20)}, tenant=then)  # its chunks are those of "b", too
    first = DocumentSync(one, cutting=CUTTING, tenant=then, reads_all=False)
    steps = first.steps([Document("a", text_of(5, 20)), Document("b", text_of(6, 20))], 48)
    for _ in range(4):
        next(steps)
    second = DocumentSync(two, cutting=CUTTING, tenant=then, reads_all=False)
    if then == "dropped":
        second.drop(["a", "b"])
    else:
        second.put([Document("a", text_of(7, 20)), Document("b", "")])
    second.finish()
    assert all(step is None for step in steps)
    report = first.finish()
    assert report.missing_documents == 0 and report.dropped_chunks > 0
    check(two, {"c": text_of(6, 20)} | ({"a": text_of(7, 20), "b": ""} if then == "edited" else {}), then)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "sync", "--model", str(shallow()))


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_folder_from_its_first_sync_to_its_end(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_relative: bool
) -> None:
    source, store = tmp_path / "docs", tmp_path / "s"
    if is_relative:
        monkeypatch.chdir(tmp_path)
        store = Path("kv2")
    source.mkdir()
    for name in "abc":
        (source / f"{name}.txt").write_text(text_of(ord(name), 80))
    (source / "picture.png").write_bytes(b"")
    monkeypatch.setattr("sys.stdin", None)  # closed
    common = ("--store", store, "--source", source, "--chunk-tokens", 128)
    planned = run(*common, "--dry-run", "--json").json
    assert not store.exists() and planned["store"].endswith(store.name)
    urls = f"file://{tmp_path}/near, file://{tmp_path}/far?ram_bytes=1MiB"
    assert (
        run("--store", urls, *common[2:], "--dry-run", "--json").json["computed_tokens"] == planned["computed_tokens"]
    )
    assert not (tmp_path / "near").exists() and not (tmp_path / "far").exists()
    done = run(*common, "--json").json
    assert planned["computed_tokens"] == done["computed_tokens"] > 0 and done["added"] == 3
    assert done["skipped"] == ["1 files *.png"]
    (source / "b.txt").write_text(text_of(ord("b"), 80) + " One more.")
    (source / "c.txt").unlink()
    changed = run(*common)
    assert "1 documents kept, 0 added, 1 changed, 0 restored, 1 dropped\n" in changed.out
    (source / "a.txt").write_bytes(b"\xff")
    failed = run(*common, "--json")
    assert failed.code == 1 and failed.json["kept"] == 1 and "not UTF-8" in failed.json["failed"]["a.txt"]
    for file in source.iterdir():
        file.unlink()
    refused = run(*common)
    assert refused.code == 2 and "--max-drop 1" in refused.err
    assert run(*common, "--max-drop", 1, "--json").json["dropped"] == 2
    with DiskStore(store, read_only=True) as left:
        assert left.manifests() == [] and left.documents.roots() == []


def test_standard_input_and_what_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    common = ("--store", tmp_path / "s", "--source", "-", "--json")
    piped(b'{"id": "a", "text": "One bell."}\n')
    assert run(*common).json["added"] == 1
    piped(b'{"id": "a", "text": "One bell."}\n{"id": "a", "text": "Two."}\n')
    assert "standard input, line 2: an earlier line has the id 'a'" in run(*common).json["error"]
    piped(b'{"id": "a", "text": "One bell."}\n')
    assert run(*common).json["kept"] == 1
    piped(b"")
    assert run(*common, "--salt", "another").json["other_models"] == 1
    store = runner(capsys, "store")
    assert "the rest is records of documents" in store("prune", tmp_path / "s", "--max-bytes", 0).err
    assert store("rm", tmp_path / "s", "--all").code == 0
    piped(b"")
    assert run(*common, "--salt", "another").json["other_models"] == 0
    assert "the store 'memory' ends" in run("--store", "memory", "--source", tmp_path, "--json").json["error"]
    assert "does not exist" in run("--store", tmp_path / "s", "--source", tmp_path / "no", "--json").json["error"]


@pytest.mark.slow(2)
def test_a_killed_sync_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    count = max(20, share(60))
    rows = [{"id": str(number), "text": text_of(number, 120)} for number in range(count)]
    source, store = tmp_path / "d.jsonl", tmp_path / "s"
    source.write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "cacheblend", "sync", "--model", str(shallow()), "--store", str(store)]
    process = subprocess.Popen(
        [*command, "--source", str(source)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not len(list((store / "manifests").glob("*.json"))) > count * 2 // 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait(30)
    with DiskStore(store) as left:
        held = len(left.manifests())
        assert left.verify() == []
    done = run("--store", store, "--source", source, "--json").json
    assert done["documents"] == count and done["missing_documents"] == 0
    assert 0 < done["computed_chunks"] <= done["chunks"] - held
    assert run("--store", store, "--source", source, "--json").json["kept"] == count


@pytest.mark.may_fail("store write")
@pytest.mark.parametrize("command", ["sync", "warm"])
def test_what_a_farther_store_could_not_take_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """The nearer one took all, so nothing was refused while it was computed."""
    (tmp_path / "a.txt").write_text(text_of(1, 80))
    stores = f"file://{tmp_path}/near, file://{tmp_path}/far?max_bytes=8KiB"
    run = runner(capsys, command, "--model", str(shallow()))
    given = ("--source", tmp_path) if command == "sync" else ("--data", tmp_path / "a.txt")
    done = run(*given, "--store", stores)
    assert done.code == 1 and f"store write): {command} again" in " ".join(done.err.split())
    assert run(*given, "--store", tmp_path / "near").code == 0


@pytest.mark.parametrize("command", ["sync", "warm"])
def test_a_store_that_is_too_small_for_all_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """Each chunk was written, and the first ones were evicted for the last ones."""
    source = tmp_path / "d.jsonl"
    source.write_text("\n".join(json.dumps({"id": str(n), "text": text_of(n, 20)}) for n in range(12)))
    run = runner(capsys, command, "--model", str(shallow()), "--source" if command == "sync" else "--data", str(source))
    assert run("--store", tmp_path / "all").code == 0
    with DiskStore(tmp_path / "all", read_only=True) as store:
        url = f"file://{tmp_path}/few?max_bytes={store.stats().bytes // 2}"
    done = run("--store", url)
    assert done.code == 1 and "the store is too small" in " ".join((done.out + done.err).split())
    again = run("--store", url, "--json")
    assert again.code == 1 and again.json["missing" if command == "warm" else "missing_documents"] > 0
