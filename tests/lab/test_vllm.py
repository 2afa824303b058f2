"""`lab vllm` without vLLM: figures of known servers, a trace, what a campaign of faults draws and compares."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import provenance
from lab.bench import alternating, figure_lines, median_interval
from lab.faults import children, engine, injection, trials
from lab.faults.engine import Engine, found_in, is_same
from lab.faults.pollution import draw, plain_twins
from lab.faults.run import Settings
from lab.faults.timeline import ATTENTION, PRODUCTS, Timeline, plot, summary
from lab.servers.replay import LENGTHS, REQUESTS, Sample, TraceText, prompt, read_trace, row_layer_ceiling
from lab.servers.vllm_replay import FILLING_TOKENS, filling_prompts
from lab.servers.vllm_server import Pair, dtype_of, multiplies_bf16

# ---- benchmarks and replays -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_nineteen_of_twenty_intervals_hold_the_median(seed: int) -> None:
    draw = random.Random(seed)
    held = 0
    for number in range(200):
        low, high = median_interval([draw.gauss(1, 0.1) for _ in range(20)], number, 400)
        held += low <= 1 <= high
    assert 175 <= held <= 200
    assert median_interval([0.25] * 7) == (0.25, 0.25)


def test_arms_are_asked_the_same_in_turn_behind_a_round_that_warms_up() -> None:
    asked, rounds, done = list[tuple[str, int]](), iter(range(9)), list[tuple[int, int]]()
    arms = {name: lambda number, name=name: asked.append((name, number)) or number for name in ("a", "b")}  # type: ignore[func-returns-value, misc]
    found = alternating(arms, lambda: next(rounds), 3, lambda *at: done.append(at))
    assert asked == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]} and done == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_figures_are_printed_and_servers_opened_apart() -> None:
    # A figure is printed with its interval beside it
    result = {"figures": {"ttft_speedup": 4, "plain_overhead": 0.01}, "intervals": {"plain_overhead": [-0.02, 0.03]}}
    assert figure_lines(result) == "ttft_speedup: 4.000\nplain_overhead: 0.010 (95 %: -0.020 to 0.030)"
    # Prompts longer than the model takes are refused before a server starts
    longer = Pair(shape="qwen2.5-0.5b").serving(32769)
    with pytest.raises(InvalidInputError, match=r"32769 tokens.*qwen2\.5-0\.5b takes 32768.*fewer"), longer:
        pass
    # Two servers have the plug in and stores of their own
    with ExitStack() as stack:
        first, second = Pair(shape="tiny", ratio=0.3, discover=True)._extras(stack)
        assert first is not None and second is not None
        assert "discover" not in first and second.pop("discover") is True
        stores = [each.pop("store") for each in (first, second)]
        assert first == second and first["recompute_ratio"] == 0.3
        folders = [Path(store.removeprefix("file://").split("?")[0]) for store in stores]
        assert folders[0] != folders[1] and all(folder.is_dir() for folder in folders)
        without, with_it = Pair(shape="tiny")._extras(stack)
        assert without is None and with_it is not None and "discover" not in with_it
    assert not any(folder.exists() for folder in folders)


def test_each_part_of_a_timeline_has_its_own_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at = [0.0]

    class Engine:
        def step(self, seconds: float) -> None:
            at[0] += seconds
            self.layers()
            with suppress(ValueError):
                self.layers(fails=True)
            at[0] += seconds

        def layers(self, *, fails: bool = False) -> None:
            at[0] += 10
            self.attend()
            if fails:
                raise ValueError

        def attend(self) -> None:
            at[0] += 4

    monkeypatch.setattr("lab.faults.timeline.time.perf_counter", lambda: at[0])
    monkeypatch.setitem(globals(), "TimedEngine", Engine)
    timeline = Timeline()
    parts = {"steps": "step", PRODUCTS: "layers", ATTENTION: "attend"}
    for part, name in parts.items():
        timeline.watch(part, f"{__name__}:TimedEngine.{name}")
    timeline.begin()
    at[0] += 0.5
    Engine().step(1.0)
    other = threading.Thread(target=Engine().attend)  # of which nobody waits
    other.start()
    other.join()
    found = timeline.end()
    assert found == {"vLLM's other work": 4.5, "steps": 2, PRODUCTS: 20, ATTENTION: 8} and timeline.calls[PRODUCTS] == 2
    told = summary([found, found | {"steps": 36.5}])
    assert list(told["figures"]) == ["row-layers", "steps", "vLLM's other work"]
    assert told["figures"]["row-layers"] == pytest.approx((28 / 34.5 + 28 / 69) / 2)
    assert told["ttft_s"] == [34.5, 69]
    plot(told, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("asked", "multiplies", "cuda", "found"),
    [
        ("auto", True, False, "bfloat16"),
        ("auto", False, False, "float32"),
        ("auto", False, True, "bfloat16"),
        ("bfloat16", False, False, "bfloat16"),
        ("float16", True, False, "float16"),
    ],
)
def test_nobody_is_measured_in_a_dtype_that_the_processor_emulates_unless_asked_for(
    asked: str, multiplies: bool, cuda: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.servers.vllm_server.multiplies_bf16", lambda: multiplies)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert dtype_of(asked) == found


@pytest.mark.parametrize(
    ("machine", "extensions", "onednn", "found"),
    [
        ("x86_64", {"BF16"}, True, True),
        ("x86_64", {"BF16", "AMX"}, True, True),
        ("x86_64", set(), True, False),  # AVX-512 without bf16: oneDNN takes it, four times as slow as float32
        ("AMD64", set(), False, False),
        ("aarch64", set(), True, True),
        ("aarch64", set(), False, False),
    ],
)
def test_products_that_are_converted_to_float32_and_back_are_not_taken_for_fast_ones(
    machine: str, extensions: set[str], onednn: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(provenance, "extensions", lambda: extensions)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
    assert multiplies_bf16() is found


def test_a_result_names_the_instructions_that_decide_how_fast_a_processor_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True, raising=False)
    assert provenance.machine()["instructions"] == "AVX512 BF16 AMX"
    monkeypatch.delattr("torch.cpu._is_amx_tile_supported")
    assert provenance.instructions() == "AVX512 BF16"


def write_trace(folder: Path, passages: list[list[int]]) -> Path:
    """Requests with these passages; passage i has 10 + i tokens, other texts 3."""
    ids = {"sys_prompt": 900, "history": 901, "user_input": 902, "web_search": 903}
    for name, file in LENGTHS.items():
        key = f"{name.removesuffix('s_ids')}_id"
        rows = (
            [{key: number, "token_length": 10 + number} for number in range(50)]
            if name == "passages_ids"
            else [{key: ids[name], "token_length": 3}]
        )
        (folder / file).write_text("\n".join(map(json.dumps, rows)) + "\n")
    requests = [
        {"hash_ids": {"passages_ids": each, **{name: [number] for name, number in ids.items()}}} for each in passages
    ]
    (folder / REQUESTS).write_text("\n".join(map(json.dumps, requests)) + "\n\n")
    return folder


@pytest.mark.parametrize("seed", range(20))
def test_the_store_is_filled_by_prompts_that_fit(seed: int) -> None:
    """What discovery learns may be as long as a request: longer than two passages together."""
    draw = random.Random(seed)
    chunks = [[draw.randrange(1000) for _ in range(draw.choice([1, 64, 700, 1484, 1500, 2100]))] for _ in range(12)]
    prompts = list(filling_prompts(chunks))
    found = [ids[start:stop] for ids, spans in prompts for start, stop in spans]
    assert sorted(found) == sorted(chunks)
    for ids, spans in prompts:
        assert len(ids) <= FILLING_TOKENS or len(spans) == 1
        assert len(ids) <= max(FILLING_TOKENS, *map(len, chunks)) + 17  # a server takes 64 more than its longest prompt
    for (ids, _), (_, (following, *_)) in pairwise(prompts):
        assert len(ids) + following[1] - following[0] > FILLING_TOKENS  # it had no place
    assert list(filling_prompts([])) == []


def test_a_trace_and_its_sample(tmp_path: Path) -> None:
    # A trace has its requests in order with lengths
    first, second = read_trace(write_trace(tmp_path, [[4, 2], []]))
    assert first.passages == (TraceText(4, 14), TraceText(2, 12))
    assert second.passages == ()
    assert first.system == (TraceText(900, 3),)
    assert len(TraceText(4, 14).token_ids()) == 14
    assert TraceText(4, 14).token_ids() == TraceText(4, 14).token_ids() != TraceText(5, 14).token_ids()
    # A request is its own tokens passages and question
    (request,) = read_trace(write_trace(tmp_path, [[1, 0]]))
    parts = [text.token_ids() for text in (*request.passages, *request.question)]
    assert prompt(request, [7, 8], whole=False) == [7, 8, *parts[0], *parts[1], *parts[2]]
    assert len(prompt(request, [7, 8], whole=True)) == 2 + 11 + 10 + 4 * 3
    # The sample comes from the last third and its store from the rest
    trace = read_trace(write_trace(tmp_path, [[1], [2], [], [3], [1, 9], [2, 1]]))
    sample = Sample.of(trace, 2, seed=0)
    assert {request.passages[0].id for request in sample.requests} == {1, 2}
    assert {passage.id for passage in sample.stored} == {1, 2}  # 9 is new, 3 is not asked for
    assert sorted(sample.held_tokens(request) for request in sample.requests) == [11, 23]
    with pytest.raises(InvalidInputError, match="2 requests with passages, not 3"):
        Sample.of(trace, 3, seed=0)
    # The ceiling counts rows times layers
    # 100 tokens, 80 stored, 5 layers: 100 + 4 * (20 + 0.25 * 80) = 260 of 500
    assert row_layer_ceiling([(100, 80)], layers=5, ratio=0.25) == pytest.approx(500 / 260)
    assert row_layer_ceiling([(100, 0)], layers=5, ratio=0.25) == pytest.approx(1)
    # A missing file is named
    with pytest.raises(InvalidInputError, match="RAGPulse folder"):
        read_trace(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (REQUESTS, "{", "line 1"),
        (REQUESTS, '{"hash_ids": {"passages_ids": [1]}}', "hash_ids.sys_prompt"),
        (REQUESTS, '{"hash_ids": {"sys_prompt": [5000], "passages_ids": []}}', "1_sys_prompt.jsonl"),
        (LENGTHS["history"], '{"history_id": 1}', "3_history.jsonl, line 1"),
        (LENGTHS["history"], "[1]", "an object, got list"),
    ],
)
def test_a_broken_trace_is_named_by_file_and_line(tmp_path: Path, file: str, content: str, words: str) -> None:
    write_trace(tmp_path, [[1]])
    (tmp_path / file).write_text(content + "\n")
    with pytest.raises(InvalidInputError, match=words):
        read_trace(tmp_path)


# ---- faults ---------------------------------------------------------------------------------------------------------


SEED = 5


def test_scenes_hold_the_situations_that_they_are_for() -> None:
    # Or the test above shows nothing.
    scenes = draw(SEED, 60, 32)
    orders, aborted, fronts = set(), 0, set()
    for scene in scenes:
        first = [each for each in scene.arrivals if each.step == 0]
        orders.add(tuple(each.is_plain for each in first))
        aborted += sum(each.aborted is not None for each in scene.arrivals)
        fronts |= {each.request.spans[0][0] % 32 for each in first if each.request.spans}
    assert {(True, False), (False, True), (True, False, False), (False, True, False)} <= orders
    assert len(orders) >= 15
    assert aborted >= 10
    assert {0, 1, 31} <= fronts  # on a block's border, and beside it
    assert scenes == draw(SEED, 80, 32)[:60]
    # Every blended prompt is asked later as a plain one
    for scene in draw(SEED, 20, 64):
        later = {request.ids for request in scene.later}
        assert {each.request.ids for each in scene.arrivals if not each.is_plain} <= later
        assert all(request.spans == () for request in [*scene.later, *plain_twins([scene])])


def answer(*steps: dict[str, float]) -> dict[str, Any]:
    return {"tokens": [int(max(step, key=lambda token: step[token])) for step in steps], "logprobs": list(steps)}


def test_answers_are_compared_by_tokens_and_probabilities_up_to_a_tie() -> None:
    right = answer({"5": -0.1, "6": -3.0}, {"7": -0.5, "8": -0.5001})
    assert is_same(right, right)
    assert is_same(answer({"5": -0.1001, "6": -3.0}, {"7": -0.5002, "8": -0.5}), right)  # the two tie
    assert not is_same(answer({"5": -0.2, "6": -3.0}, {"7": -0.5, "8": -0.5001}), right)
    assert not is_same(answer({"6": -0.1, "5": -3.0}, {"7": -0.5, "8": -0.5001}), right)
    assert not is_same(answer({"5": -0.1, "6": -3.0}), right)


def test_names_left_behind_are_found_through_objects_and_containers() -> None:
    held = type("Held", (), {"__module__": "cacheblend.anything"})()
    held.jobs = [{"t-7": ("x", {"t-8"})}]
    held.foreign = SimpleNamespace(name="t-9")  # not this package's
    held.itself = held
    assert len(found_in([held], ("t-",))) == 2
    assert found_in([held], ("other",)) == []


class SlowDisk(Engine):
    """Stores so many tokens each time that it is asked."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.stored, self.asked = tokens, 0.0, 0

    def ask(self, requests: Any) -> dict[str, Any]:
        self.asked += len(requests)
        return {}

    def settle(self) -> None:
        self.stored += self.tokens

    def counters(self) -> dict[str, float]:
        return {"captured_tokens": self.stored} if self.stored else {}

    def forget(self) -> None: ...

    @contextmanager
    def patient(self) -> Iterator[None]:
        yield


def test_nothing_is_compared_before_every_passage_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blend without one of them would be taken for the right answer, and every later one would be wrong."""
    slow, full = SlowDisk(40), SlowDisk(100)
    slow.fill(range(130), [(10, 60), (60, 110)])
    full.fill(range(130), [(10, 60), (60, 110)])
    assert (slow.asked, full.asked) == (3, 1)
    monkeypatch.setattr(engine, "PATIENT_S", 0.0)
    with pytest.raises(RuntimeError, match="0 of 100 tokens were stored in 0 s"):
        SlowDisk(0).fill(range(130), [(10, 110)])


def test_files_are_damaged_and_put_back(tmp_path: Path) -> None:
    store, kept = tmp_path / "store", tmp_path / "kept"
    for folder in (store, kept):
        (folder / "blocks").mkdir(parents=True)
        for number in range(40):
            (folder / "blocks" / f"{number}").write_bytes(bytes([number]) * 50)
    assert trials.damage(store, random.Random(1), every=False) == 1
    assert trials.damage(store, random.Random(2), every=True) in (39, 40)

    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "blocks").iterdir()}

    differing = [name for name, held in contents(kept).items() if contents(store).get(name) != held]
    assert len(differing) >= 38  # a bit may have been flipped back, and zeros stay zeros
    with trials.removed(store):
        assert not store.exists()
    trials.restore(kept, store)
    assert contents(store) == contents(kept)


def test_a_fault_is_met_once_at_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = SimpleNamespace(read=lambda: "real")
    holder.read = injection._faulty("store read", holder.read)
    injection._armed.append({"place": "store read", "after": 1, "times": 1, "error": "OutOfMemoryError"})
    assert holder.read() == "real"
    with pytest.raises(Exception, match="injected at store read"):
        holder.read()
    assert holder.read() == "real"
    assert injection.disarm() == 1
    assert injection.disarm() == 0


@pytest.mark.parametrize("wrong", [{"only": ("fautls",)}, {"engines": ("three ranks",)}, {"tried": 0}])
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        Settings(**wrong)


CHILD = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
with open(job["out"], "a", buffering=1) as out:
    for number in range(job["first"], 5):
        print(json.dumps({"begin": number}), file=out)
        if number == 1:
            os._exit(3)
        if number == 3:
            time.sleep(600)
        print(json.dumps({"trial": number, "met": 1}), file=out)
    print(json.dumps({"done": True}), file=out)
"""


def test_children_go_on_and_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A child that ends or hangs is counted and the next goes on
    (tmp_path / "standin.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "CHILD", "standin")
    monkeypatch.setattr(children, "PATIENCE_S", 1.0)
    found = children.watch(tmp_path, {"campaign": "faults", "folder": str(tmp_path), "count": 9}, "one")
    assert found.is_complete
    assert [line["trial"] for line in found.lines] == [0, 2, 4]
    assert (found.ended, found.hung) == (1, 1)
    assert [lost["lost"] for lost in found.lost] == ["ended", "hung"]
    assert found.total("met") == 3
    json.dumps(found.described())
    # Engines of one name in two campaigns are told apart
    (tmp_path / "standin.py").write_text(CHILD.replace("number == 1", "False").replace("number == 3", "False"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "CHILD", "standin")
    for _ in range(2):  # nor does what an earlier run left count
        for campaign in ("pollution", "faults"):
            found = children.watch(tmp_path, {"campaign": campaign, "folder": str(tmp_path), "count": 9}, "few blocks")
            assert [line["trial"] for line in found.lines] == [0, 1, 2, 3, 4]
