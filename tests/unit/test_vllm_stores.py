"""The worker's side in vLLM without vLLM: the tiers of a store by process (a CPU stands in for the ranks' devices),
ranks that fail together, and layers whose hidden state exists once.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.batching import TogetherPass
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions
from cacheblend.core.kernels.attention import AttentionSpec, attend_rows
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines.vllm.stores import check_device, device_bytes, shared_store
from cacheblend.engines.vllm.worker.layers import VllmLayerRunner, join
from cacheblend.engines.vllm.worker.ranks import FINE, LOST, RankFailedError, Ranks
from cacheblend.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend.store.open import DevicePlace
from cacheblend.store.residence import OnDevice
from campaign import share
from paged_scenes import ModelOfLayers
from rank_threads import Meeting, ThreadGroup, on_all
from store_blocks import make_block, same_bits

SHAPES = (LayerShape(4, 4),) * 3
EVERY = range(len(SHAPES))


class Device(OnDevice):
    """A CPU, with room for as many records as are left."""

    room = 1 << 30

    def keep(self, records: Any) -> Any:
        Device.room -= len(records)
        return None if Device.room < 0 else super().keep(records)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def open_there(place: DevicePlace, read_only: bool = False) -> MemoryStore:
        return MemoryStore(place.max_bytes, residence=Device(torch.device("cpu")))

    monkeypatch.setattr(DevicePlace, "open", open_there)
    monkeypatch.setattr(Device, "room", 1 << 30)
    yield


def opened(url: str, process: str, *, looks_up: bool = False, is_one: bool = False) -> KVStore:
    """The store of a process; processes of one engine stand here side by side, so each has a name."""
    return shared_store(url, process, is_one_process=is_one, looks_up=looks_up)


def test_copies_in_front_are_read_once_and_may_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"cuda://?max_bytes=1MiB, memory://?max_bytes=2MiB, file://{tmp_path}"
    with opened(url, "engine", looks_up=True, is_one=True) as store:
        assert opened(url, "engine", is_one=True) is store
        assert opened(url, "another engine", is_one=True) is not store
        assert store.tier_names == ("cuda", "memory", "disk")
        block = make_block(1)
        assert store.write(block)
        (entry,) = store.find([block.name])
        assert entry is not None and entry.tier == "cuda"
    # what a rank has read is not read again, and after a reset it is
    url, block, heads = f"cuda://?max_bytes=1MiB, file://{tmp_path / 'b'}", make_block(3, 9, SHAPES), slice(2, 4)
    with opened(url, "rank") as store:
        store.write(block)
        reads, real = [], DiskStore.read_layers

        def read_layers(self: DiskStore, *arguments: Any) -> Any:
            reads.append(arguments)
            return real(self, *arguments)

        monkeypatch.setattr(DiskStore, "read_layers", read_layers)
        for times in (1, 1, 1):
            store.read_layers([block.name], EVERY, heads)
            assert len(reads) == times
        store.drop_copies()
        assert store.held([block.name]) == [True]
        (read,) = store.read_layers([block.name], EVERY, heads)
        assert len(reads) == 2 and isinstance(read, list) and same_bits(read[1], block.records[1][heads])
    block = make_block(4)  # memory alone is no copy; in front of a folder it is, wherever in the order of tiers
    for number, url in enumerate(
        ["memory", "memory://, file://{}", "file://{}", "memory://, file://{}/a, file://{}/b"]
    ):
        with opened(url.replace("{}", str(tmp_path / "c" / str(number))), "e", is_one=True) as store:
            store.write(block)
            store.drop_copies()
            assert store.held([block.name]) == [True]
            if isinstance(store, TieredStore):
                assert store.front.stats().bytes == 0


@pytest.mark.parametrize("seed", range(8))
def test_ranks_keep_their_heads_on_their_devices(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    memory = draw.choice(["", "memory://?max_bytes=2KiB, "])
    max_bytes = draw.choice([0, 500, 3000, 1 << 20])
    monkeypatch.setattr(Device, "room", draw.choice([1 << 30, draw.randrange(20)]))
    url = f"cuda://?max_bytes={max_bytes}, {memory}file://{tmp_path}"
    scheduler, ranks = opened(url, "s", looks_up=True), [opened(url, f"r{rank}") for rank in range(2)]
    assert "cuda" not in scheduler.tier_names
    fronts = []
    for store in ranks:
        assert isinstance(store, TieredStore) and store.tier_names[0] == "cuda"
        fronts.append(store.front)
    blocks = [make_block(number, draw.choice([5, 20]), SHAPES) for number in range(6)]
    for block in blocks:
        ranks[0].write(block)
    assert all(front.stats().bytes == 0 for front in fronts), (
        "whole records would take the room of several ranks' heads"
    )
    for _ in range(10):
        if draw.random() < 0.2:
            ranks[1].drop_copies()
            assert fronts[1].stats().bytes == 0
        asked = draw.sample(blocks, draw.randrange(1, 6))
        names = [block.name for block in asked]
        assert all(entry is not None and entry.tier in ("memory", "disk") for entry in scheduler.find(names))
        for rank, heads in enumerate((slice(0, 2), slice(2, 4))):
            for block, read in zip(asked, ranks[rank].read_layers(names, EVERY, heads), strict=True):
                assert isinstance(read, list)
                assert all(same_bits(near, far[heads]) for near, far in zip(read, block.records, strict=True))
        assert all(front.stats().bytes <= max_bytes for front in fronts)
    for store in (*ranks, scheduler):
        store.close()


def test_memory_alone_is_of_one_process_and_a_device_tier_what_each_rank_sets_aside(tmp_path: Path) -> None:
    with opened(f"memory://?max_bytes=1MiB, file://{tmp_path}", "rank") as store:
        assert store.tier_names == ("memory", "disk"), "in front of a folder it is of each process, as ram_bytes is"
    alone = ("memory", "memory://?max_bytes=1MiB")
    for url in (*alone, "cuda://?max_bytes=1MiB, memory://", "cuda://?max_bytes=1MiB, memory://?max_bytes=1MiB"):
        with pytest.raises(InvalidInputError, match=r"memory of one process.*use a folder"):
            opened(url, "rank")
        with opened(url, "engine", is_one=True) as store:
            assert store.tier_names[-1] == "memory"
    # a device tier is what each rank sets aside, and a CPU has none
    assert device_bytes("cuda://?max_bytes=3GiB, memory://?max_bytes=9GiB, file:///a?max_bytes=20GiB") == 3 << 30
    assert device_bytes("cuda://?max_bytes=0, file:///a") == device_bytes("memory") == device_bytes("file:///a") == 0
    url = "cuda://?max_bytes=1GiB, file:///a"
    check_device(url, "cuda")
    check_device("file:///a?ram_bytes=1GiB", "cpu")
    with pytest.raises(InvalidInputError, match=r"cuda://\?max_bytes=1GiB.*on a CPU: leave cuda:// out; ram_bytes"):
        check_device(url, "cpu")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("cuda://1?max_bytes=1GiB, file:///a", "names the GPU 1.*each rank keeps records on its own.*without a number"),
        ("cuda://0?max_bytes=1GiB, file:///a", "names the GPU 0"),
        ("cuda://?max_bytes=1GiB", "nothing behind.*add a store"),
        ("cuda://, file:///a", "needs a bound"),
    ],
)
def test_a_url_that_cannot_be_served_is_refused_on_every_side_with_a_way_out(url: str, message: str) -> None:
    asked = [lambda: device_bytes(url), lambda: check_device(url, "cuda")]
    asked += [lambda one=one, up=up: opened(url, "e", is_one=one, looks_up=up) for one in (0, 1) for up in (0, 1)]  # type: ignore[misc]
    for ask in asked:
        with pytest.raises(InvalidInputError, match=message):
            ask()


STEPS: list[Callable[[ThreadGroup, Ranks], Any]] = [
    lambda group, ranks: group.collective(1.0),
    lambda group, ranks: ranks.combine(torch.tensor([1.0, group.rank]), "max").tolist(),
    lambda group, ranks: ranks.gather_heads(torch.tensor([group.rank])).tolist(),
    lambda group, ranks: ranks.agree(LOST if group.rank == 1 else FINE, "layer"),
]


@settings(max_examples=share(50))
@given(
    st.integers(2, 3),
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6),
    st.dictionaries(st.integers(0, 2), st.integers(0, 6), max_size=3),
)
def test_all_ranks_fail_or_none_wherever_errors_are(size: int, steps: list[int], fails_at: dict[int, int]) -> None:
    """`fails_at`: by rank, the step in front of which it fails."""

    def work(group: ThreadGroup, ranks: Ranks) -> tuple[Any, Any]:
        outcome: Any = None
        try:
            with ranks.section():
                outcome = []
                for number, step in enumerate([*steps, None]):
                    if fails_at.get(group.rank) == number:
                        raise ValueError(group.rank)
                    if step is not None:
                        outcome.append(STEPS[step](group, ranks))
        except Exception as error:
            outcome = type(error)
        with ranks.section():
            return outcome, group.collective(2.0)  # the next section is whole

    found, meeting = on_all(size, work)
    first = min((at for rank, at in fails_at.items() if rank < size and at <= len(steps)), default=None)
    assert meeting.barrier.n_waiting == 0
    assert [after for _, after in found] == [2.0 * size] * size
    outcomes = [outcome for outcome, _ in found]
    if first is None:
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert len(outcomes[0]) == len(steps)
    else:
        failed = [fails_at.get(rank) == first for rank in range(size)]
        assert outcomes == [ValueError if own else RankFailedError for own in failed]


def test_one_rank_exchanges_nothing_and_an_error_that_somebody_swallows_still_ends_the_section() -> None:
    def work(group: ThreadGroup, ranks: Ranks) -> Any:
        with ranks.section():
            if group.rank == 0:
                raise ValueError
            for _ in range(3):
                with suppress(RankFailedError):
                    group.collective(1.0)
        return "went on"

    found, _ = on_all(2, work)
    assert [type(one) for one in found] == [ValueError, RankFailedError]

    class Alone(ThreadGroup):  # one rank alone
        def maximum(self, values: list[int]) -> list[int]:
            raise AssertionError

    ranks = Ranks(Alone(Meeting(1), 0))
    with ranks.section():
        value = torch.ones(2)
        assert ranks.combine(value, "sum") is value
        assert ranks.gather_heads(value) is value
        assert ranks.agree(LOST, "layer") == LOST
    assert ranks.agree_each([3, 1]) == [3, 1]
    with pytest.raises(ValueError, match="own"), ranks.section():
        raise ValueError("own")


@pytest.mark.parametrize("leaves", [False, True])
def test_ranks_that_do_different_things_fail_and_do_not_hang(leaves: bool) -> None:
    def work(group: ThreadGroup, ranks: Ranks) -> Any:
        try:
            with ranks.section():
                if not (leaves and group.rank):
                    group.collective(1.0, f"{100 + group.rank} rows")
        except RankFailedError:
            return ranks.agree_each([group.rank, 7, -group.rank])
        return "went on"

    found, _ = on_all(2, work)
    assert found == [[1, 7, 0]] * 2


HEADS, HEAD_DIM, LAYERS, ROWS, TILE = 2, 8, 3, 61, 16
INNER, WIDTH = HEADS * HEAD_DIM, 8 * HEADS * HEAD_DIM  # no tensor of keys or values is as large as a hidden state


class Model(ModelOfLayers):
    """Layers as `BlendModel` calls vLLM's, whose hidden state is a sum."""

    def __init__(self, *, in_place: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(3, WIDTH, INNER, generator=generator) for _ in range(LAYERS)]
        self.table = torch.randn(100, WIDTH, generator=generator)
        self.layers = [self._layer(weight, in_place=in_place) for weight in self.weights]
        self.specs = [AttentionSpec(HEAD_DIM**-0.5)] * LAYERS

    def _layer(self, weight: torch.Tensor, *, in_place: bool) -> Callable[..., torch.Tensor]:
        def layer(positions: torch.Tensor, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
            residual, normed = hidden, _norm(hidden)
            q, k, v = ((normed @ part + positions[:, None] / 100).view(-1, HEADS, HEAD_DIM) for part in weight.unbind())
            attended = self._answer(q, k, v).reshape(-1, INNER) @ weight[2].T
            residual = residual.add_(attended) if in_place else residual + attended
            return residual.add_(_norm(residual) @ weight[0] @ weight[1].T)

        return layer


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return hidden / hidden.norm(dim=1, keepdim=True)


class _Allocations(TorchDispatchMode):
    """The tensors that operations return and that have a storage of their own, of at least so many numbers."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.names = least, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [each for each in (out if isinstance(out, tuple | list) else (out,)) if isinstance(each, torch.Tensor)]
        for each in made:
            is_new = each.untyped_storage().data_ptr() not in given
            if is_new and each.is_floating_point() and each.numel() >= self.least:
                self.names.append(str(func))
        return out


def _prefill(model: Model, ids: list[int], tile_rows: int, kv: list[Any]) -> BlendedPrefill:
    plan = Planner(b"root").plan(Prompt.of([text(ids)]), EmptySource())
    layout = KVLayout((LayerShape(HEADS, HEAD_DIM),) * LAYERS, torch.float32)

    def open_runner(plan: BlendPlan) -> VllmLayerRunner:
        return VllmLayerRunner(model, torch.tensor(ids), torch.arange(len(ids)))

    def open_loader(plan: BlendPlan, first: int) -> LayerLoader:
        return LayerLoader(plan, EmptySource(), layout, [None] * LAYERS, read_ahead=0)

    options = PrefillOptions(tile_rows=tile_rows, on_layer=lambda layer, found: kv.append(found))
    return BlendedPrefill(plan, open_runner, open_loader, NoRows(), options)


def _keys_at_once(model: Model, ids: list[int]) -> list[torch.Tensor]:
    """Each layer's keys by vLLM's own order: hidden and residual passed on from layer to layer."""
    hidden, residual, positions, found = model.table[torch.tensor(ids)], None, torch.arange(len(ids)), []
    for weight, spec in zip(model.weights, model.specs, strict=True):
        residual = hidden if residual is None else hidden + residual
        q, k, v = (
            (_norm(residual) @ part + positions[:, None] / 100).view(-1, HEADS, HEAD_DIM).transpose(0, 1)
            for part in weight.unbind()
        )
        found.append(k)
        residual = residual + attend_rows(q, k, v, positions, spec).reshape(-1, INNER) @ weight[2].T
        hidden = _norm(residual) @ weight[0] @ weight[1].T
    return found


@pytest.mark.parametrize("in_place", [True, False])
def test_prompts_that_share_a_tile_keep_their_own_states(in_place: bool) -> None:
    model = Model(in_place=in_place)
    prompts = [[(i * 7 + at) % 100 for i in range(11 + at)] for at in range(3)]
    found = [list[Any]() for _ in prompts]
    prefills = [_prefill(model, ids, 64, kv) for ids, kv in zip(prompts, found, strict=True)]
    for _ in range(LAYERS):
        TogetherPass([each.next_layer() for each in prefills], join, 64, isolate=False).advance()
    for ids, kv in zip(prompts, found, strict=True):
        for layer, wanted in zip(kv, _keys_at_once(model, ids), strict=True):
            torch.testing.assert_close(layer.keys, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_hidden_state_exists_once(in_place: bool) -> None:
    model, ids = Model(in_place=in_place), [i % 100 for i in range(ROWS)]
    prefill = _prefill(model, ids, TILE, [])
    place = prefill._rows.hidden.data_ptr()
    with _Allocations(ROWS * WIDTH) as seen:
        prefill.advance(LAYERS - 1)
    assert prefill._rows.hidden.data_ptr() == place
    assert seen.names == []
    runner = VllmLayerRunner(model, torch.arange(9), torch.arange(9))
    hidden = runner.embed()
    before = hidden.clone()
    runner.project(1, hidden, torch.arange(9))
    assert torch.equal(hidden, before)
    out = runner.run(1, hidden, torch.arange(9), lambda q, k, v, spec: attend_rows(q, k, v, torch.arange(9), spec))
    assert not in_place or out.data_ptr() == hidden.data_ptr()
