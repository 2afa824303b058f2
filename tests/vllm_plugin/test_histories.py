"""Random histories in vLLM: requests that share fronts at any length, whose parts vLLM's own prefix cache and the store
hold in turns. No job fails (`failing`), and at ratio 1 every answer is that of vLLM without the plug-in.

A hit of vLLM's prefix cache ends inside a stored block nearly always. On a CPU its blocks have 32 rows at least; those
of 16 are in `test_scheduling_sharing`.
"""

from typing import Any

import pytest

from vllm_running import Served, Texts, tokens

REQUESTS = 40


class History:
    """Prompts in steps of one to three, each plain, with the spans of its chunks, or left to be found by content."""

    def __init__(self, seed: int) -> None:
        self.texts = Texts(seed)
        self.rng = self.texts.rng
        self.system = self.texts.ids(90)
        self.passages = self.texts.passages(5, 60, 230)
        self.asked: list[tuple[list[int], list[list[int]]]] = []

    def steps(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(self.asked) < REQUESTS:
            drawn = [self._request() for _ in range(self.rng.randint(1, 3))]
            found.append({"ask": [ids for ids, _ in drawn], "chunks": [spans for _, spans in drawn]})
            if self.rng.random() < 0.05:
                found.append({"forget": True})
        return found

    def _request(self) -> tuple[list[int], Any]:
        rng = self.rng
        ids, spans = self._front()
        for passage in rng.sample(self.passages, rng.randint(0, 2)):
            spans.append([len(ids), len(ids) + len(passage)])
            ids += [*passage, *self.texts.ids(rng.choice([0, 0, 2]))]
        ids += self.texts.ids(rng.randint(1, 40))
        self.asked.append((ids, spans))
        return ids, rng.choice([spans, spans, spans, [], None])

    def _front(self) -> tuple[list[int], list[list[int]]]:
        """Nothing, the system prompt, a passage, or an earlier prompt up to any of its rows."""
        kind = self.rng.choice(["nothing", "system", "passage", "earlier", "earlier", "earlier"])
        if kind == "earlier" and self.asked:
            ids, spans = self.rng.choice(self.asked[-8:])
            cut = self.rng.randint(1, min(len(ids), 900))
            return ids[:cut], [span for span in spans if span[1] <= cut]
        if kind == "passage":
            passage = self.rng.choice(self.passages)
            return [*passage], [[0, len(passage)]]
        return ([*self.system], []) if kind == "system" else ([], [])


@pytest.mark.parametrize(
    ("block_size", "settings"),
    [
        (32, {"anchor": "none"}),
        (64, {"anchor": "none", "block_size": 48, "codec": "int8"}),
        (32, {"anchor": "none", "recompute_ratio": 0.15, "codec": "int4"}),
    ],
    ids=["blocks of 32", "blocks of 64 beside 48, int8", "ratio .15, int4"],
)
def test_every_job_of_a_history_blends(llama: Served, block_size: int, settings: dict[str, Any]) -> None:
    steps = History(block_size).steps()
    engine: dict[str, Any] = {"enable_prefix_caching": True, "block_size": block_size}
    extra = {"recompute_ratio": 1.0, "refresh_s": 0, **settings}
    found = llama.run(steps, extra, **engine)
    counted = found["metrics"]
    assert counted["vllm:cacheblend_requests"] >= REQUESTS / 4
    assert counted["vllm:cacheblend_hit_tokens vllm"] > 500 and counted["vllm:cacheblend_hit_tokens disk"] > 500
    if extra["recompute_ratio"] == 1:
        plain = llama.run([{**step, "chunks": None} for step in steps], None, **engine)
        for step, mine, right in zip(steps, found["answers"], plain["answers"], strict=True):
            if "ask" in step:
                assert tokens(mine) == tokens(right)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_front_of_which_vllm_holds_a_part_is_loaded_from_there_on(llama: Served, codec: str) -> None:
    """The prompt begins with a stored chunk of 204 tokens, of which a plain request has left 192 in vLLM's cache."""
    texts = Texts(7)
    front, other = texts.ids(204), texts.ids(150)
    stored = [*texts.ids(33), *other, *front, *texts.ids(5)]
    asked = [*front, *other, *texts.ids(20)]
    steps: list[dict[str, Any]] = [
        {"ask": [stored], "chunks": [[[33, 183], [183, 387]]]},
        {"ask": [[*front, *texts.ids(9)]], "chunks": [[]]},
        {"count": True},
        {"ask": [asked], "chunks": [[[0, 204], [204, 354]]]},
        {"count": True},
    ]
    engine: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 32}
    extra = {"recompute_ratio": 1.0, "refresh_s": 0, "codec": codec}
    *_, before, answers, after = llama.run(steps, extra, **engine)["answers"]
    more = {name.removeprefix("vllm:cacheblend_"): after[name] - before.get(name, 0) for name in after}
    assert (more["requests"], more["hit_tokens vllm"], more["hit_tokens disk"]) == (1, 192, 150 + 12 * (codec != "raw"))
    assert codec != "raw" or more["hit_tokens prefix"] == 12
    plain = llama.run([{"ask": [asked]}], None, **engine)["answers"][0]
    assert answers[0]["tokens"] == plain[0]["tokens"]
