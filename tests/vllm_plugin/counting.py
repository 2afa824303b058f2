"""A program of `nursery.py`: plays histories of requests in one vLLM engine, and compares the plug-in's counters with
what each request was told and with what the store was asked to hold.

The job is `{"model", "store", "setting", "seed", "requests"}`; how often what was met is written beside it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from poisoning import BLOCK_SIZE, SALTS, SETTINGS, Campaign, Setting

from cacheblend.engines import keeper
from cacheblend.engines.vllm.connector import CacheBlendConnector
from cacheblend.engines.vllm.scheduler import capture_queue
from cacheblend.store import DiskStore
from lab.faults.engine import Request
from poison import Hostile, name_of, names_in

EXTRA = {"anchor": "none", "capture_queue": 5, "match_content": False}
ENGINES = {
    "pieces": replace(SETTINGS["pieces"], extra=SETTINGS["pieces"].extra | EXTRA),
    "preemption": replace(SETTINGS["preemption"], extra=SETTINGS["preemption"].extra | EXTRA),
}
SUMMED = ("recomputed_tokens", "row_layers")
WRONG = ({"mode": "best"}, {"recompute_ratio": 2}, {"chunks": [[5, 3]]})


class Counting(Campaign):
    """Histories whose counts are compared; nothing that is stored is."""

    def __init__(self, model: Path, store: Path, setting: Setting, seed: int) -> None:
        super().__init__(model, store, setting, seed)
        self.told: dict[str, Any] = {}  # by vLLM's own name of each request that ended
        self.answered: dict[str, Any] = {}
        self.expected, self.wrong, self.count = Counter[str](), 0, 0
        finished, put, step = CacheBlendConnector.request_finished, DiskStore.put_manifest, self.engine._engine.step

        def request_finished(side: Any, request: Any, blocks: Any) -> Any:
            held, told = finished(side, request, blocks)
            assert request.request_id not in self.told and told is not None
            self.told[request.request_id] = told["cacheblend"]
            self._expect(told["cacheblend"], len(request.prompt_token_ids) - 1)
            return held, told

        def put_manifest(store: Any, manifest: Any) -> None:
            put(store, manifest)
            self.expected["captured_tokens"] += len(manifest.token_ids)

        def stepped() -> Any:
            outputs = step()
            self.answered |= {out.request_id: out.kv_transfer_params for out in outputs if out.finished}
            return outputs

        CacheBlendConnector.request_finished = request_finished  # type: ignore[method-assign]
        DiskStore.put_manifest = put_manifest  # type: ignore[method-assign]
        self.engine._engine.step = stepped

    def _expect(self, told: dict[str, Any], tokens: int) -> None:
        reason = told["reason"].split(":")[0]
        assert told["blended"] == (reason in ("", "prefix cache has it, blended")), told
        if reason:
            self.expected[f"not_blended {reason}"] += 1
        else:
            self.expected.update(requests=1, prompt_tokens=tokens)
            self.expected.update({f"hit_tokens {source}": count for source, count in told["hit_tokens"].items()})
        self.expected["fallbacks bad spans"] += reason == "bad parameters"
        self.expected.update({name: told[name] for name in SUMMED})
        assert sum(told["hit_tokens"].values()) <= tokens

    def play(self, number: int) -> None:
        """Groups of requests about the same chunks, and the comparison."""
        rng, hostile = self.rng, Hostile(self.rng, range(20, 1000), BLOCK_SIZE, most=350)
        self.asked = list[Request]()
        for group in range(20):
            if alone := rng.random() < 0.5:
                self._alone(self._request(hostile, f"{number}-{group}"))
            else:
                self.fails = rng.random() < 0.15
                many = range(rng.randint(2, self.setting.most_requests))
                self._ask([self._request(hostile, f"{number}-{group}-{i}") for i in many])
                self.fails = False
            self.tally.meet("alone" if alone else "together")
            self.engine.settle()
            if rng.random() < 0.3:
                self.engine.forget()
            if rng.random() < 0.2:  # somebody deletes blocks
                names = sorted(names_in(self.store))
                for name in rng.sample(names, min(3, len(names))):
                    self.store.delete(name)  # type: ignore[arg-type]
        self._compare()

    def _request(self, hostile: Hostile, name: str) -> Request:
        self.count += 1
        if self.asked and self.rng.random() < 0.3:
            return replace(self.rng.choice(self.asked), name=name)
        one = super()._request(hostile, name)
        if self.rng.random() < 0.05:
            one = replace(one, spans=None, params=self.rng.choice(WRONG))
        self.asked.append(one)
        return one

    def _alone(self, request: Request) -> None:
        """What it loads is what the store holds of its chunks, and what it misses is stored behind it, or counted."""
        chunks = [(start, [*request.ids[start:stop]]) for start, stop in request.spans or ()]
        held = names_in(self.store)
        root = self.roots[SALTS.index(request.salt)]
        blocks = [(start, self._blocks(root, ids)) for start, ids in chunks]
        before = Counter({name: int(value) for name, value in self.engine.counters().items()})
        self.engine.ask([request])
        self.engine.settle()
        more = Counter({name: int(value) for name, value in self.engine.counters().items()})
        more.subtract(before)
        told = self.answered[request.name]["cacheblend"]
        is_clear = all(len({name in held for name, _ in each}) == 1 for _, each in blocks)
        if request.params in WRONG or request.params.get("mode") == "full" or not is_clear:
            return
        there = {row for start, each in blocks if each[0][0] in held for row in range(start, start + _tokens(each))}
        # A prompt's beginning may be stored as the text of another one, also where this one marks chunks in it.
        exact = sum(tokens for _, tokens in takewhile(lambda block: block[0] in held, self._chain(root, request)))
        there = {*range(exact)} if request.params.get("mode") == "prefix" else there | {*range(exact)}
        local = told["hit_tokens"].get("vllm", 0)
        if not told["reason"]:
            self.tally.meet("blended alone")
            loaded = told["hit_tokens"].get("disk", 0)
            behind = sum(row >= local for row in there)
            assert loaded + told["hit_tokens"].get("prefix", 0) == behind, (told, there)
            assert told["recomputed_tokens"] <= loaded, told
            ratio = request.params.get("recompute_ratio", self.setting.extra["recompute_ratio"])
            last = bool(blocks) and request.spans[-1][1] == len(request.ids) - 1  # computed whatever is chosen
            assert ratio not in (0.0, 1.0) or told["recomputed_tokens"] in (ratio * loaded, ratio * (loaded - last))
        elif told["reason"] == "nothing stored":
            assert not there, (told, there)
        missed = [each for start, each in blocks if each[0][0] not in held and start + _tokens(each) > exact]
        missing = {each[-1][0]: _tokens(each) for each in missed}
        dropped = more["fallbacks capture queue full"]
        now = names_in(self.store)
        stored = {name: tokens for name, tokens in missing.items() if name in now}
        self.tally.meet("captured alone", len(stored))
        self.tally.meet("dropped alone", dropped)
        assert more["captured_tokens"] == sum(stored.values()), (told, missing, more)
        assert len(missing) - len(stored) <= dropped <= len(blocks), (told, missing, more)

    def _chain(self, root: bytes, request: Request) -> Iterator[tuple[bytes, int]]:
        """Names and tokens of the prompt's own chain, whose blocks end where a chunk begins or ends."""
        cuts = sorted({0, len(request.ids), *(at for span in request.spans or () for at in span)})
        for start, stop in pairwise(cuts if request.spans else ()):
            part = self._blocks(root, [*request.ids[start:stop]])
            root = part[-1][0]
            yield from part

    @staticmethod
    def _blocks(root: bytes, ids: list[int]) -> list[tuple[bytes, int]]:
        """Names and tokens of a chunk's blocks."""
        found, parent = list[tuple[bytes, int]](), root
        for at in range(0, len(ids), BLOCK_SIZE):
            part = ids[at : at + BLOCK_SIZE]
            parent = name_of(parent, part)
            found.append((parent, len(part)))
        return found

    def _compare(self) -> None:
        counted = self.engine.counters()
        for name in ("num_preemptions", "fallbacks capture queue full"):
            self.tally.met[name] = int(counted.get(name, 0))
        names = {each for each in counted if each.split()[0] in ("not_blended", "hit_tokens")}
        names |= {"requests", "prompt_tokens", "captured_tokens", "fallbacks bad spans", *SUMMED, *self.expected}
        found = {name: int(counted.get(name, 0)) for name in names}
        right = {name: self.expected[name] for name in names}
        off = {name: (found[name], right[name]) for name in names if found[name] != right[name]}
        assert not off, f"counted, told: {off}"
        for name, told in self.answered.items():
            (own,) = [each for key, each in self.told.items() if key == name or key.rpartition("-")[0] == name]
            assert told == {"cacheblend": own}
        self.answered.clear()
        self.tally.met |= {name: value for name, value in found.items() if value}


def _tokens(blocks: Iterable[tuple[bytes, int]]) -> int:
    return sum(tokens for _, tokens in blocks)


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    keeper.PAUSE_S = 0  # after a store error the next chunk is captured at once
    capture_queue.STUCK_S = 300.0  # the machine may be busy
    counting = Counting(Path(job["model"]), Path(job["store"]), ENGINES[job["setting"]], job["seed"])
    number = 0
    while counting.count < job["requests"] or (counting.tally.met.get("blended alone", 0) <= 2 and number < 100):
        counting.play(number)
        number += 1
    counting.tally.met["asked"] = counting.count
    Path(f"{path}.out").write_text(json.dumps(counting.tally.met))
