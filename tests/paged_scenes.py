"""A worker's prefills without an engine: a small model with vLLM's interfaces, a paged cache, a store."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cacheblend.core.kernels.attention import AttentionSpec, HeadShape
from cacheblend.core.kernels.operations import (
    ATTEND_ASKING,
    ATTEND_FLOAT8,
    ATTEND_ROWS,
    KV_DEVIATION,
    PLACE,
    PLACE_FLOAT8,
    Served,
)
from cacheblend.core.kernels.rope import KeyRotation, Turn, reposition_keys
from cacheblend.core.load.capture import ChunkJob, blocks_of
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.selectors import AllRows, Selector
from cacheblend.store import MemoryStore

LAYERS, HEADS, KV_HEADS, WIDTH, SIZE, BLOCKS = 4, 4, 2, 16, 16, 40
HIDDEN, VOCAB = 48, 200
OWN = [5, 9, 2, 17, 3, 11, 8, 1, 14, 6, 19, 12, 4, 10, 15]
"""Blocks of the prompt."""

OTHERS = range(21, 40)
"""Blocks of other requests."""

NOTHING: Any = SimpleNamespace(find=lambda names: [None] * len(names))
"""A source without blocks."""

SPECS = {
    "plain": AttentionSpec(WIDTH**-0.5),
    "window": AttentionSpec(WIDTH**-0.5, window=40),
    "cap": AttentionSpec(WIDTH**-0.5, softcap=5.0),
    "sinks": AttentionSpec(WIDTH**-0.5, sinks=torch.linspace(-1, 1, HEADS)),
}


def flash(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    cache[0, block, place], cache[1, block, place] = key, value


def keys_transposed(cache: torch.Tensor, block: int, place: int, key: torch.Tensor, value: torch.Tensor) -> None:
    part = cache[block].view(KV_HEADS, 2, SIZE * WIDTH)
    part[:, 0].view(KV_HEADS, WIDTH, SIZE)[:, :, place] = key
    part[:, 1].view(KV_HEADS, SIZE, WIDTH)[:, place] = value


LAYOUTS: dict[str, Any] = {
    "flash": (flash, (2, BLOCKS, SIZE, KV_HEADS, WIDTH)),
    "keys transposed": (keys_transposed, (BLOCKS, KV_HEADS, SIZE, 2 * WIDTH)),
}
"""As on GPUs; as on CPUs."""


class Fp8(NamedTuple):
    """A cache in eight bits.

    Attributes:
        kind: of torch's types.
        name: what vLLM calls it, which need not say the kind.
        scales: of keys, of values.
        is_cut: numbers are rounded towards 0, as vLLM's CPU backend does; else to the nearest.
    """

    kind: torch.dtype = torch.float8_e4m3fn
    name: str = "fp8"
    scales: tuple[float, float] = (1.0, 1.0)
    is_cut: bool = False

    def stored(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        """Bytes of keys (part 0) or values, by the definition."""
        highest = torch.finfo(self.kind).max
        wanted = (rows.float() / torch.tensor(self.scales[part])).clamp(-highest, highest)
        found = wanted.to(self.kind).view(torch.uint8)
        beyond = found.view(self.kind).float().abs() > wanted.abs()
        return torch.where(beyond, found - 1, found) if self.is_cut else found

    def numbers(self, part: int, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The opposite, as a model reads it."""
        return (stored.view(self.kind).float() * self.scales[part]).to(dtype)

    def kept(self, part: int, rows: torch.Tensor) -> torch.Tensor:
        """What is read after it was written."""
        return self.numbers(part, self.stored(part, rows), rows.dtype)


def serve_triton(put: Callable[[Any, str, Any], None]) -> None:
    """Has our kernels serve CPUs, under the interpreter; `put`: `setattr`, or that of a `MonkeyPatch`."""
    from cacheblend.core.kernels import attention_triton, deviation_triton, kv_placement_triton

    calls: dict[Any, Any] = dict.fromkeys((ATTEND_ROWS, ATTEND_FLOAT8), attention_triton.attend_rows)
    calls |= dict.fromkeys((PLACE, PLACE_FLOAT8), kv_placement_triton.place)
    calls |= {KV_DEVIATION: deviation_triton.kv_deviation, ATTEND_ASKING: attention_triton.attend_asking}
    for operation, call in calls.items():
        served = Served(call, "Triton")
        put(operation, "_served", {(torch.device("cpu"), dtype): served for dtype in (torch.float32, torch.bfloat16)})


class ModelOfLayers:
    """What a stand-in for `BlendModel` has of every model: a table of embeddings, and attention that is answered."""

    table: torch.Tensor
    layers: list[Callable[..., Any]]
    _answer: Any = None

    def embed(self, token_ids: torch.Tensor, adapter: int = 0) -> torch.Tensor:
        return self.table[token_ids]

    def row_inputs(self, *_: Any) -> list[tuple[torch.Tensor, ...]]:
        return [()] * len(self.layers)

    @contextmanager
    def answering(self, layer: int, answer: Any, *_: Any) -> Iterator[None]:
        self._answer = answer
        yield


class TinyModel(ModelOfLayers):
    """`between`: called twice in each layer, where ranks exchange tensors."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, between: Callable[[], Any] = lambda: None) -> None:
        draw = torch.Generator().manual_seed(3)
        self.device, self.dtype, self.heads = torch.device("cpu"), dtype, None
        self.layout = KVLayout((LayerShape(KV_HEADS, WIDTH),) * LAYERS, dtype)
        self.head_shapes = [HeadShape(HEADS, KV_HEADS, WIDTH, spec.window)] * LAYERS
        self.specs = [spec] * LAYERS
        self.rotations = [KeyRotation(1e3 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)), "half")] * LAYERS
        self.total_kv_heads = KV_HEADS
        self.adapters = None
        self.table = torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype)
        sizes = (HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH)
        self._between = between
        self.attention = list[Any]()
        self.layers = [
            self._layer(
                [torch.randn(HIDDEN, size, generator=draw).to(dtype) * HIDDEN**-0.5 for size in sizes],
                torch.randn(sizes[0], HIDDEN, generator=draw).to(dtype) * 2 * sizes[0] ** -0.5,
            )
            for _ in range(LAYERS)
        ]

    def _layer(self, inward: list[torch.Tensor], outward: torch.Tensor) -> Callable[..., Any]:
        def layer(positions: torch.Tensor, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
            normed = hidden / hidden.float().norm(dim=1, keepdim=True).to(hidden.dtype) * HIDDEN**0.5
            q, k, v = ((normed @ weight).view(len(hidden), -1, WIDTH).transpose(0, 1) for weight in inward)
            angles = positions[:, None] * self.rotations[0].inv_freq
            turn = Turn(angles.cos(), angles.sin(), "half")
            q, k = reposition_keys(q, turn), reposition_keys(k, turn)
            assert self._answer is not None
            attended = self._answer(*(each.transpose(0, 1) for each in (q, k, v)))
            self._between()
            self._between()
            return hidden + attended.reshape(len(hidden), -1) @ outward

        return layer


def caches_of(put: Any, shape: tuple[int, ...], dtype: torch.dtype, fp8: Fp8 | None = None) -> list[Any]:
    """vLLM's attention modules with caches of this layout, full of other requests' numbers."""
    draw = torch.Generator().manual_seed(5)

    def update(layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
        if fp8 is not None:
            keys, values = fp8.stored(0, keys), fp8.stored(1, values)
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            if slot >= 0:
                put(cache, slot // SIZE, slot % SIZE, key, value)

    impl = SimpleNamespace(do_kv_cache_update=update)
    made = []
    for number in range(LAYERS):
        cache = torch.randn(shape, generator=draw).to(dtype)
        layer = SimpleNamespace(impl=impl, layer_name=f"layers.{number}")
        if fp8 is not None:
            cache, layer.kv_cache_dtype = fp8.stored(0, cache), fp8.name
            layer._k_scale, layer._v_scale = map(torch.tensor, fp8.scales)
            layer._k_scale_float, layer._v_scale_float = fp8.scales
        made.append(SimpleNamespace(kv_cache=cache, **vars(layer)))
    return made


class Scene:
    """One rank's opener over a paged cache, and a store with three chunks.

    Args:
        layout: of the cache, one of `LAYOUTS`.
        in_pages: see `ConnectorConfig.in_pages`.
        fp8: of the cache; None: it keeps numbers unchanged.
        groups: of KV cache; None: there is one.
    """

    def __init__(
        self,
        layout: str = "flash",
        *,
        in_pages: bool | None,
        spec: str = "plain",
        dtype: torch.dtype = torch.float32,
        codec: str = "raw",
        tile_rows: int = 48,
        ranks: Any = None,
        between: Callable[[], Any] = lambda: None,
        fp8: Fp8 | None = None,
        groups: Any = None,
    ) -> None:
        from cacheblend.engines.vllm.worker.paged_cache import LayerGroups
        from cacheblend.engines.vllm.worker.prefill_factory import Opener
        from cacheblend.engines.vllm.worker.ranks import Ranks

        self.model = TinyModel(SPECS[spec], dtype, between)
        self.model.attention = caches_of(*LAYOUTS[layout], dtype, fp8)
        self.store = MemoryStore(max_bytes=1 << 30)
        self.planner = Planner(b"root", block_size=32, codec=codec)
        self.opener = Opener(
            self.model,  # type: ignore[arg-type]
            self.store,
            self.planner,
            ranks or Ranks(SimpleNamespace(size=1, rank=0)),  # type: ignore[arg-type]
            groups or LayerGroups([0] * LAYERS),
            block_size=SIZE,
            tile_rows=tile_rows,
            in_pages=in_pages,
        )
        draw = torch.Generator().manual_seed(7)
        self.front, *self.chunks, self.question = (
            torch.randint(VOCAB, (tokens,), generator=draw).tolist() for tokens in (37, 45, 70, 33, 29)
        )
        for ids in self.chunks:
            self._keep(ids)

    @property
    def prompt(self) -> Prompt:
        """The chunks in another order, with a chunk that is not stored in between."""
        one, two, three = self.chunks
        missed = chunk([(7 * i) % VOCAB for i in range(21)])
        return Prompt.of([text(self.front), chunk(two), chunk(three), missed, chunk(one), text(self.question)])

    def job(self, blocks: Sequence[int], held: int = 0, selector: Selector | None = None, source: Any = None) -> Any:
        from cacheblend.engines.vllm.jobs import BlendJob

        plan = self.planner.plan(self.prompt, source or self.store).without_last_row()
        return BlendJob("one", plan, selector or AllRows(), held, [list(blocks)])

    def blend(self, job: Any) -> Any:
        """Runs a job to its end."""
        with self.opener.blend(job) as prefill:
            prefill.advance(10 * LAYERS)
            assert prefill.done
            return prefill.result()

    def rows(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """The prompt's rows in each layer of the cache, [kv_heads, 2, rows, head_dim]."""
        table, rows = torch.tensor(blocks), len(self.prompt.token_ids) - 1
        return [layer.read(table, rows) for layer in self.opener._paged]

    def bytes_of(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """What lies in these blocks, in each layer."""
        return [layer.read(torch.tensor(blocks), len(blocks) * SIZE).clone() for layer in self.opener._paged]

    def compute(self, job: Any, kv: list[Any]) -> None:
        """Runs a capture to its end; `kv` gets its layers."""
        with self.opener.capture(job, kv) as prefill:
            prefill.advance(10 * LAYERS)
            assert prefill.done

    def _keep(self, ids: list[int]) -> None:
        from cacheblend.core.names import as_token_ids
        from cacheblend.engines.vllm.jobs import CaptureJob

        kv: list[Any] = []
        chunk_job = ChunkJob((), as_token_ids(ids))
        self.compute(CaptureJob(chunk_job, self.planner), kv)
        for block in blocks_of(chunk_job, self.planner, kv):
            assert self.store.write(block)
