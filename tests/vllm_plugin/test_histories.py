"""Random histories and faults in vLLM: no engine ends, no answer is wrong, no stored block is another's.

Histories are of requests that share fronts at any length, whose parts vLLM's own prefix cache and the store hold in
turns. A hit of vLLM's prefix cache ends inside a stored block nearly always. On a CPU its blocks have 32 rows at least;
those of 16 are drawn without an engine.
"""

import importlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from campaign import SEED, share
from lab.faults import timeline
from lab.faults.engine import make_model
from lab.faults.injection import PLACES
from lab.faults.run import Settings, run
from poison import HISTORIES, TOLERANCE, Tally
from tiny_folder import train_tokenizer
from vllm_prompts import COUNT, FORGET, Asked, Texts, ask
from vllm_running import Served, run_job, tokens

REQUESTS = 40


class History:
    """Prompts in steps of one to three, each plain, with the spans of its chunks, or left to be found by content."""

    def __init__(self, seed: int) -> None:
        self.texts = Texts(seed)
        self.rng = self.texts.rng
        self.system = self.texts.ids(90)
        self.passages = self.texts.passages(5, 60, 230)
        self.asked: list[Asked] = []

    def steps(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(self.asked) < REQUESTS:
            drawn = [self._request() for _ in range(self.rng.randint(1, 3))]
            found.append(ask([one for one, _ in drawn], chunks=[spans for _, spans in drawn]))
            if self.rng.random() < 0.05:
                found.append(FORGET)
        return found

    def _request(self) -> tuple[Asked, Any]:
        rng, one = self.rng, self._front()
        for passage in rng.sample(self.passages, rng.randint(0, 2)):
            one += Asked([*passage, *self.texts.ids(rng.choice([0, 0, 2]))], [[0, len(passage)]])
        one += Asked(self.texts.ids(rng.randint(1, 40)), [])
        self.asked.append(one)
        return one, rng.choice([one.spans, one.spans, one.spans, [], None])

    def _front(self) -> Asked:
        """Nothing, the system prompt, a passage, or an earlier prompt up to any of its rows."""
        kind = self.rng.choice(["nothing", "system", "passage", "earlier", "earlier", "earlier"])
        if kind == "earlier" and self.asked:
            one = self.rng.choice(self.asked[-8:])
            cut = self.rng.randint(1, min(len(one.ids), 900))
            return Asked(one.ids[:cut], [span for span in one.spans if span[1] <= cut])
        if kind == "passage":
            passage = self.rng.choice(self.passages)
            return Asked(passage, [[0, len(passage)]])
        return Asked(self.system if kind == "system" else [], [])


@pytest.mark.parametrize(
    ("block_size", "settings"),
    [
        (32, {"anchor": "none"}),
        (64, {"anchor": "none", "block_size": 48, "codec": "int8"}),
        (32, {"anchor": "none", "recompute_ratio": 0.15, "codec": "int4"}),
        (32, {"anchor": "none", "recompute_ratio": 0.15, "selector": "head", "recency": 1.0, "correction": 0.5}),
    ],
    ids=["blocks of 32", "blocks of 64 beside 48, int8", "ratio .15, int4", "ratio .15, corrected keys"],
)
def test_every_job_of_a_history_blends(llama: Served, block_size: int, settings: dict[str, Any]) -> None:
    """No job fails (`failing`), and at ratio 1 every answer is that of vLLM without the plug-in."""
    steps = History(block_size).steps()
    extra = {"recompute_ratio": 1.0, "refresh_s": 0, **settings}
    found = llama.run(steps, extra, block_size=block_size)
    counted = found["metrics"]
    assert counted["vllm:cacheblend_requests"] >= REQUESTS / 4
    assert counted["vllm:cacheblend_hit_tokens vllm"] > 500 and counted["vllm:cacheblend_hit_tokens disk"] > 500
    if extra["recompute_ratio"] == 1:
        plain = llama.run([{**step, "chunks": None} for step in steps], None, block_size=block_size)
        for step, mine, right in zip(steps, found["answers"], plain["answers"], strict=True):
            assert step == FORGET or tokens(mine) == tokens(right)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_front_of_which_vllm_holds_a_part_is_loaded_from_there_on(llama: Served, codec: str) -> None:
    """The prompt begins with a stored chunk of 204 tokens, of which a plain request has left 192 in vLLM's cache."""
    texts = Texts(7)
    front, other = Asked(texts.ids(204), [[0, 204]]), Asked(texts.ids(150), [[0, 150]])
    stored = (other + front + Asked(texts.ids(5), [])).behind(texts.ids(33))
    asked = front + other + Asked(texts.ids(20), [])
    steps = [ask([stored]), ask([], [front + Asked(texts.ids(9), [])]), COUNT, ask([asked]), COUNT]
    extra = {"recompute_ratio": 1.0, "refresh_s": 0, "codec": codec}
    *_, before, answers, after = llama.run(steps, extra, block_size=32)["answers"]
    more = {name.removeprefix("vllm:cacheblend_"): after[name] - before.get(name, 0) for name in after}
    assert (more["requests"], more["hit_tokens vllm"], more["hit_tokens disk"]) == (1, 192, 150 + 12 * (codec != "raw"))
    assert codec != "raw" or more["hit_tokens prefix"] == 12
    assert tokens(answers) == tokens(llama.plain(ask([asked]), block_size=32))


# ---- faults: the benchmark's campaigns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tried", "seed", "engines"),
    [
        (20 + share(40), 3, ("one rank", "two ranks")),
        (4 + share(6), 4, ("two ranks, ratio 1",)),  # blocks damaged on both ranks hold nobody up
        (12 + share(40), 5, ("edits", "edits, two ranks")),
    ],
)
def test_a_fault_costs_its_request_the_blend_and_nothing_else(tried: int, seed: int, engines: Any) -> None:
    found = run(Settings(tried=tried, seed=seed, only=("faults",), engines=engines))
    bad = {name: found["figures"][name] for name in ("wrong", "ended", "hung", "left")}
    assert found["figures"]["tried"] >= tried
    assert found["campaigns"]["faults"]["moved"] > 0 or "edits" not in engines
    assert not any(bad.values()), (bad, json.dumps(found["campaigns"]["faults"], indent=1))


def test_one_lookup_a_request_and_one_blend_of_equal_prompts() -> None:
    found: dict[str, Any] = run(Settings(only=("lookups", "equal")))
    assert found["figures"]["lookups_per_request"] == 1, found["campaigns"]["lookups"]
    assert found["figures"]["equal_prompts"] <= 1.1, found["campaigns"]["equal"]


def test_no_plain_request_is_answered_otherwise_than_without_the_plugin() -> None:
    """Prompts in pieces; and beside a connector that loads within the step, where vLLM delivers jobs before the forward
    that computes the shared front."""
    found = run(Settings(tried=80, seed=5, only=("pollution",), engines=("pieces", "two connectors")))
    figures, words = found["figures"], json.dumps(found["campaigns"], indent=1)
    assert figures["pollution_tried"] >= 160
    for engine in found["campaigns"]["pollution"]["engines"].values():
        assert engine["blended"] >= 15 and engine["beside"] >= 5, words  # or nothing was shown
    assert (figures["polluted"], figures["wrong"], figures["ended"], figures["hung"]) == (0, 0, 0, 0), words


def test_every_place_of_a_fault_and_of_the_timeline_is_there() -> None:
    """A place that was renamed would never be met."""
    for target in (*PLACES.values(), *chain(*timeline.PLACES.values())):
        module, path = target.split(":")
        owner, name = path.split(".")
        assert callable(getattr(getattr(importlib.import_module(module), owner), name)), target


# ---- hostile requests: no stored block differs from a plain prefill of its chain -----------------------------------

COMMAND = "CACHEBLEND_HISTORIES=400 pytest tests/vllm_plugin/test_histories.py"
SETTINGS = {"pieces": 0.3, "edits": 0.2, "preemption": 0.2, "eviction": 0.3}
"""Of `poisoning.SETTINGS`, and the share of the histories that each plays."""

SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""GiB: vLLM otherwise asks for most of the machine's memory."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, whose BOS token is the anchor of one of the engines."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    train_tokenizer(["a text"], 300).save_pretrained(folder)
    return folder


def play(model: Path, folder: Path, setting: str, count: int, *, mistake: bool = False) -> Tally:
    """The histories of one engine, in a process of its own."""
    path, store = folder / f"{setting}.json", str(folder / f"{setting} store")
    job = {"model": str(model), "store": store, "setting": setting, "seed": 11, "count": count, "mistake": mistake}
    limit_s = 600 + 120 * count  # the machine may be busy
    found = run_job("poisoning", path, json.dumps(job), limit_s, **SMALL)
    assert "code" not in found, f"vLLM ended with {found['code']}:\n{found['words']}"
    return Tally(**found)


@pytest.mark.may_fail("block lost", "store write")
def test_no_history_poisons_a_block(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tally = Tally()
    with ThreadPoolExecutor() as side_by_side:
        shares = [(name, math.ceil(share * HISTORIES)) for name, share in SETTINGS.items()]
        for found in [side_by_side.submit(play, model, tmp_path, *each) for each in shares]:
            tally.add(found.result())
    tally.report("vllm", record_property, COMMAND)
    assert tally.poisoned == 0, tally.what[:5]
    assert tally.histories >= HISTORIES and tally.blocks >= 3 * HISTORIES, tally  # or nothing was shown
    assert tally.met["requests (vLLM)"] > HISTORIES // 2, tally.met  # blended ones
    assert tally.met["hit_tokens moved (vLLM)"] > 2 * HISTORIES, tally.met
    assert tally.met["copies of vLLM's blocks"] > HISTORIES // 2, tally.met
    assert tally.met["num_preemptions (vLLM)"] or HISTORIES < 100, tally.met


@pytest.mark.may_fail("block lost", "store write")
def test_what_would_be_poisoned_is_found(model: Path, tmp_path: Path) -> None:
    tally = play(model, tmp_path, "pieces", 3, mistake=True)
    assert tally.poisoned > 3 and tally.smallest_poison > 100 * TOLERANCE


# ---- counts --------------------------------------------------------------------------------------------------------


@pytest.mark.may_fail("block lost", "store write", "lost block")
@pytest.mark.parametrize(("setting", "part"), [("pieces", 400), ("preemption", 600)])
def test_metrics_answers_and_store_agree(model: Path, tmp_path: Path, setting: str, part: int) -> None:
    job = {"model": str(model), "store": str(tmp_path / "store"), "setting": setting, "seed": SEED}
    found = run_job("counting", tmp_path / "job.json", json.dumps(job | {"requests": share(part)}), 1800, **SMALL)
    assert "code" not in found, f"vLLM ended with {found['code']}:\n{found['words']}"
    assert found["asked"] >= share(part) and found["requests"] > share(part) // 8, found  # or nothing was shown
    assert found["captured_tokens"] and found["hit_tokens disk"] and found["blended alone"] > 2, found
