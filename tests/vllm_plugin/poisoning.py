"""A program of `nursery.py`: plays histories of hostile requests in one vLLM engine, and compares what they stored.

The job is `{"model", "store", "setting", "seed", "count", "mistake"}`; the counts are written beside it.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cacheblend.core.errors import StoreFullError
from cacheblend.engines import keeper
from cacheblend.engines.vllm.worker.prefill_factory import Opener
from cacheblend.store import DiskStore
from lab.faults.engine import Engine, Request
from poison import KV, Hostile, Tally, Written, compare, names_in

SALTS = [None, "t", "u"]
BLOCK_SIZE = 32
"""Of the store; vLLM's own blocks hold 32 or 64."""


@dataclass(frozen=True)
class Setting:
    """One engine.

    Attributes:
        extra: settings of the connector.
        engine: options of vLLM's `LLM`.
        most_tokens: of answers; many keep blocks of a small cache busy, so that requests are preempted.
        most_requests: that arrive together.
        store_bytes: bound of the store; None: none.
    """

    extra: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    most_tokens: int = 3
    most_requests: int = 4
    store_bytes: int | None = None


SETTINGS = {
    "pieces": Setting({"recompute_ratio": 0.15, "budget_row_layers": 300}, {"max_num_batched_tokens": 64}),
    "preemption": Setting(
        {"recompute_ratio": 0.5, "anchor": "none"}, {"num_gpu_blocks_override": 26}, most_tokens=80, most_requests=7
    ),
    "edits": Setting(
        {"recompute_ratio": 0.15, "anchor": "none", "edits": True},
        {"num_gpu_blocks_override": 34},  # so that blocks are soon another's
        most_tokens=40,
        most_requests=6,
    ),
    "eviction": Setting(
        {"recompute_ratio": 1.0, "selector": "random", "anchor": "bos"},
        {"block_size": 64, "skip_tokenizer_init": False},
        store_bytes=12 * BLOCK_SIZE * 6 * 2 * 2 * 32 * 4,
    ),
}


class Campaign:
    """Histories of one engine and one store."""

    def __init__(self, model: Path, store: Path, setting: Setting, seed: int) -> None:
        self.rng = random.Random(seed)
        self.setting, self.tally = setting, Tally()
        self.written: dict[bytes, Written] = {}
        self.fails = False
        real, draw = DiskStore.write_all, random.Random(self.rng.random())

        def write_all(store: DiskStore, blocks: Sequence[Any]) -> list[bool]:
            """Notes what is written under which name; half of the writes fail while `fails`."""
            for block in blocks:
                self.written[bytes(block.name)] = Written(bytes(block.parent), block.token_ids.tolist())
            fits = [not (self.fails and draw.random() < 0.5) for _ in blocks]
            if all(fits):
                return real(store, blocks)
            self.tally.meet("store errors")
            real(store, blocks[: fits.index(False)])
            raise StoreFullError("no space, for a test")

        DiskStore.write_all = write_all  # type: ignore[method-assign]
        read_pages = Opener.read_pages

        def counted(opener: Opener, job: Any) -> Any:
            self.tally.meet("copies of vLLM's blocks")
            return read_pages(opener, job)

        Opener.read_pages = counted  # type: ignore[method-assign]
        bound = "" if setting.store_bytes is None else f"?max_bytes={setting.store_bytes}"
        extra = {"store": f"file://{store}{bound}", "block_size": BLOCK_SIZE, "refresh_s": 0}
        extra |= {"min_reused_share": 0.0, "lookup_timeout_s": 30.0, "check_layers": [1], **setting.extra}
        if extra.get("selector") == "random":
            del extra["check_layers"]
        options = {"enable_prefix_caching": True, "num_gpu_blocks_override": 60, "block_size": 32}
        options |= {"max_model_len": 768, **setting.engine}
        self.engine = Engine(model, extra, None, **options)
        self.store = DiskStore(store)
        planners = self.engine.mine._scheduling._finder._planners
        self.roots = [bytes(planners.of(salt).root) for salt in SALTS]
        self.known: set[bytes] = set()
        self.said: list[int] = []
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    # ---- a history --------------------------------------------------------------------------------------

    def play(self, number: int) -> None:
        """Requests in a few groups, other events between them, and the comparison."""
        rng, self.tally.histories = self.rng, self.tally.histories + 1
        hostile = Hostile(rng, range(20, 1000), BLOCK_SIZE, most=350)
        self.engine.scramble(number)  # rows that nobody has computed hold random numbers
        for group in range(rng.randint(2, 4)):
            self.fails = rng.random() < 0.15
            count = rng.randint(1, self.setting.most_requests)
            self._ask([self._request(hostile, f"{number}-{group}-{i}") for i in range(count)])
            if rng.random() < 0.8:
                self.engine.settle()
            if rng.random() < 0.2:
                self.engine.forget()
                self.tally.meet("vLLM's cache emptied")
            if rng.random() < 0.15:  # somebody deletes blocks
                names = sorted(names_in(self.store))
                for name in rng.sample(names, min(3, len(names))):
                    self.tally.meet("deleted", self.store.delete(name))  # type: ignore[arg-type]
                    self.known.discard(name)
        self.fails = False
        self.engine.settle()
        new = names_in(self.store) - self.known
        self.known |= new
        self.tally.add(compare(self.store, new, self.written, self.roots, self._prefill))

    def _request(self, hostile: Hostile, name: str) -> Request:
        """Blended by spans or by content, or plain: then of the same tokens as blended ones."""
        rng, ids, spans = self.rng, list[int](), list[tuple[int, int]]()
        for part, is_chunk in hostile.prompt():
            if is_chunk:
                spans.append((len(ids), len(ids) + len(part)))
            ids += part
        way = rng.choices(["spans", "content", "plain"], weights=[6, 2, 2])[0]
        chosen: Sequence[tuple[int, int]] | None = {"spans": spans, "content": None, "plain": ()}[way]
        params: dict[str, Any] = {}
        if way != "plain" and rng.random() < 0.3:
            params["mode"] = rng.choice(["prefix", "full"])
        elif way != "plain" and rng.random() < 0.3:
            params["recompute_ratio"] = rng.choice([0.0, 0.4, 1.0])
        if self.setting.extra.get("edits") and rng.random() < 0.6:
            ids, way, chosen, params = self._edited(hostile), "content", None, {"conversation": "a"}
        self.tally.meet("requests")
        return Request(
            name,
            ids,
            chosen,
            rng.randint(1, self.setting.most_tokens),
            rng.choices(SALTS, weights=[6, 2, 2])[0],
            params=params,
        )

    def _edited(self, hostile: Hostile) -> list[int]:
        """The conversation's last prompt with a piece replaced by hostile parts, or gone, and a few tokens more."""
        rng, parts = self.rng, [token for part, _ in hostile.prompt() for token in part]
        before = self.said if 150 < len(self.said) < 400 else [*hostile.ids(90), *parts, *hostile.ids(120)]
        at = rng.randint(70, len(before) - 75)
        self.said = [*before[:at], *parts[: rng.choice([0, 9, 70])], *before[at + rng.randint(1, 40) :]]
        self.said += hostile.ids(rng.randint(1, 9))
        return self.said

    def _ask(self, requests: list[Request]) -> None:
        """They arrive in the same step or in following ones; some are aborted."""
        rng, step = self.rng, 0
        arrivals = {request.name: 0 if rng.random() < 0.7 else rng.randint(1, 3) for request in requests}
        aborted = {name: at + rng.randint(0, 3) for name, at in arrivals.items() if rng.random() < 0.15}
        left = list(requests)
        while left or self.engine.is_busy:
            for request in [each for each in left if arrivals[each.name] <= step]:
                self.engine.add(request)
                left.remove(request)
            for name in [name for name, at in aborted.items() if at == step]:
                self.engine.abort(name)
                self.tally.meet("cancelled")
            if rng.random() < 0.5:
                self.engine.wait_for_lookups()
            self.engine.step()
            step += 1

    def again(self) -> None:
        """What is left in the end: nothing has changed a record since it was written."""
        left = compare(self.store, names_in(self.store), self.written, self.roots, self._prefill)
        self.tally.poisoned += left.poisoned
        self.tally.what += left.what
        counted = self.engine.counters()
        for what in ("num_preemptions", "captured_tokens", "requests", "hit_tokens moved"):
            self.tally.meet(f"{what} (vLLM)", int(counted.get(what, 0)))
        self.tally.meet("evicted, deleted or refused", len(self.written) - self.store.stats().blocks)

    @torch.no_grad()
    def _prefill(self, root: bytes, ids: Sequence[int]) -> list[KV]:
        cache = self.model(input_ids=torch.tensor([list(ids)]), use_cache=True).past_key_values
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    from cacheblend.engines.vllm.scheduler import capture_queue

    keeper.PAUSE_S = 0  # after a store error the next chunk is captured at once
    capture_queue.STUCK_S = 300.0  # the machine may be busy
    if job["mistake"]:
        make_mistake()
    campaign = Campaign(Path(job["model"]), Path(job["store"]), SETTINGS[job["setting"]], job["seed"])
    for number in range(job["count"]):
        campaign.play(number)
    campaign.again()
    Path(f"{path}.out").write_text(json.dumps(asdict(campaign.tally)))


def make_mistake() -> None:
    """A chunk's first row is that of another token, as if the rows in front of it had been seen."""
    from cacheblend.engines.vllm.worker.capture_writer import CaptureWriter

    real = CaptureWriter.gather

    def gather(writer: CaptureWriter, kv: Any) -> Any:
        found = real(writer, kv)
        for layer in found[2:]:
            layer.values[:, 0] = layer.values[:, 0].roll(1, -1)
        return found

    CaptureWriter.gather = gather  # type: ignore[method-assign]
