"""Stand-ins for vLLM's requests, and a scheduler side over a store in memory."""

import hashlib
import threading
import time
from collections.abc import Callable, Container
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch

from cacheblend.core.load.capture import ChunkJob, manifest_of
from cacheblend.core.names import as_token_ids
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.engines.fingerprint import ModelIdentity
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.shadow import ShadowWatch
from cacheblend.engines.vllm.config import ConnectorConfig
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.jobs import BlendOutcome, StepReport
from cacheblend.engines.vllm.scheduler.chunk_finder import ChunkFinder, TenantPlanners
from cacheblend.engines.vllm.scheduler.scheduler import Scheduling
from cacheblend.store import MemoryStore
from store_blocks import before

SIZE = 16
CHUNK = list(range(100, 200))
OTHER = list(range(200, 300))
PROMPT = [*range(40), *CHUNK, 7, 8]


def scored(**fields: Any) -> Any:
    """Sampling parameters that ask for scores of the prompt, or for none."""
    return SimpleNamespace(**{"prompt_logprobs": None, "prompt_logprob_token_ids": None} | fields)


class Request(SimpleNamespace):
    """A request with vLLM's way of hashing blocks: each with the hash in front of it, the first with the salt."""

    def __init__(self, ids: list[int], spans: Any = None, name: str = "r", **fields: Any) -> None:
        params = None if spans is None else {"cacheblend": {"chunks": spans}}
        super().__init__(
            request_id=name,
            prompt_token_ids=[*ids],
            num_tokens=len(ids),
            kv_transfer_params=params,
            sampling_params=scored(),
            resumable=False,
            status=None,
            lora_request=None,
            num_preemptions=0,
            num_output_tokens=0,
            output_token_ids=[],
            cache_salt=None,
            block_hashes=[],
        )
        self.__dict__.update(fields)
        self.update_block_hashes()

    @property
    def all_token_ids(self) -> list[int]:
        return [*self.prompt_token_ids, *self.output_token_ids]

    def answer(self, ids: list[int]) -> None:
        self.output_token_ids, self.num_output_tokens = ids, len(ids)
        self.num_tokens = len(self.all_token_ids)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for at in range(len(self.block_hashes) * SIZE, self.num_tokens - SIZE + 1, SIZE):
            front = self.block_hashes[-1] if self.block_hashes else b""
            salt = (self.cache_salt or "") if at == 0 else ""
            ids = self.all_token_ids[at : at + SIZE]
            self.block_hashes.append(
                hashlib.sha256(front + salt.encode(errors="surrogatepass") + repr(ids).encode()).digest()
            )


def found_tokens(request: Request, held: Container[bytes]) -> int:
    """Leading tokens of a request that vLLM would find in a cache that holds blocks of these names."""
    names = request.block_hashes[: (request.num_tokens - 1) // SIZE]
    return SIZE * next((count for count, name in enumerate(names) if name not in held), len(names))


def manager_of(pool: Any) -> Any:
    """vLLM's cache manager over a pool: one group, with prefix caching."""

    def longest(names: list[bytes], most: int) -> tuple[None, int]:
        held = takewhile(lambda name: pool.get_cached_block(name, [0]), names[: most // SIZE])
        return None, SIZE * len(list(held))

    coordinator = SimpleNamespace(find_longest_cache_hit=longest)
    return SimpleNamespace(block_pool=pool, enable_caching=True, coordinator=coordinator)


class Pool:
    """vLLM's block pool: the names of the blocks that it holds."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.num_gpu_blocks = 1 << 20

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        return name in self.held

    def computed(self, request: Request) -> int:
        """Leading tokens that vLLM would find."""
        return found_tokens(request, self.held)


class SlowStore(MemoryStore):
    """Answers when it is let go; counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.let_go, self.asked = threading.Event(), list[str]()
        self.let_go.set()
        for call in ("find", "has_manifest"):
            before(self, call, lambda _, call=call: (self.asked.append(call), self.let_go.wait(30)))


def scheduling(
    held: list[list[int]],
    store: Any = None,
    salt: str = "",
    *,
    keeps_events: bool = False,
    window: Any = None,
    bytes_per_token: int = 1,
    is_paused: Callable[[], bool] = lambda: False,
    may_copy: bool = False,
    bos_id: int | None = None,
    **config: Any,
) -> Any:
    """A scheduler side over a store that holds these chunks of one tenant."""
    settings = ConnectorConfig(**{"lookup_timeout_s": 30.0, **config})  # the machine may be busy
    planners = TenantPlanners(ModelIdentity(None, "model", "float32", bos_id, "a model"), settings.blend)
    planner = planners.of(salt)
    store = MemoryStore(1 << 20) if store is None else store
    for ids in held:
        job = ChunkJob((), as_token_ids(ids))
        manifest = manifest_of(job, planner, "")
        records, layout = [torch.zeros(1, 2, len(ids), 4)], KVLayout((LayerShape(1, 4),), torch.float32)
        store.write(Block(manifest.chunk_id, planner.root, job.token_ids, records, layout))
        store.put_manifest(manifest)
    blend = BlendSettings(settings.blend)
    finder = ChunkFinder(settings, blend, planners, store, keeps_events=keeps_events)
    checked = settings.shadow_settings
    watch = None if checked is None else ShadowWatch(checked, "m", blend.selector().share, finder.raise_by, seed=1)
    options: Any = {"bytes_per_token": bytes_per_token, "watch": watch, "window": window, "is_paused": is_paused}
    options["copied_bytes"] = 1024 * bytes_per_token if may_copy else 0
    return Scheduling(settings, blend, finder, SIZE, **options)


def claim(side: Any, request: Request, computed: int) -> Any:
    """What is claimed once the look-up is over, which may begin only now; None: the request still waits."""
    end, found = time.monotonic() + 30, None
    for _ in range(2):
        while (tracked := side._requests.get(request.request_id)) and tracked.lookup and not tracked.lookup.is_over:
            assert time.monotonic() < end
            time.sleep(0.001)
        found = side.claim(request, computed)
        if found is not None:
            break
    return found


def refusals(
    cache: str = "auto",
    lora: Any = None,
    speculative: Any = None,
    parallel: Any = None,
    hf: Any = None,
    experts: bool = False,
    offload_group_size: int = 0,
    prefix_match_unit: int | None = None,
    **model: Any,
) -> list[str]:
    """What is refused of a configuration of vLLM with these fields of its model and of that one's `hf_config`."""
    sizes = ("pipeline_parallel", "data_parallel", "decode_context_parallel", "prefill_context_parallel", "world")
    one = {f"{name}_size": 1 for name in sizes} | {"distributed_executor_backend": "uni"}
    config = SimpleNamespace(**(hf or {}))
    flags = ("use_mla", "is_multimodal_model", "is_encoder_decoder", "is_hybrid", "enable_sleep_mode")
    known = {**dict.fromkeys(flags, False), "runner_type": "generate"}
    return interface.refusals(
        SimpleNamespace(  # type: ignore[arg-type]
            parallel_config=SimpleNamespace(**one | (parallel or {})),
            model_config=SimpleNamespace(hf_config=config, hf_text_config=config, **known | model),
            cache_config=SimpleNamespace(cache_dtype=cache, block_size=16, prefix_match_unit=prefix_match_unit),
            lora_config=lora,
            speculative_config=speculative,
            aux_output_config=SimpleNamespace(enabled=experts),
            offload_config=SimpleNamespace(
                offload_backend="auto", prefetch=SimpleNamespace(offload_group_size=offload_group_size)
            ),
        )
    )


def reported(name: str, failure: str = "", **outcome: Any) -> Any:
    """The workers' report of a request's prompt."""
    return StepReport(0, {name: BlendOutcome(failure, **outcome)})


def start(side: Any, request: Request, held: int = 0) -> Any:
    """The request comes, and is claimed behind so many tokens that vLLM holds."""
    side.on_new(request)
    return claim(side, request, held)


def give(side: Any, request: Request, blocks: int = 9) -> Request:
    """The request comes, and what is claimed of it goes to the workers."""
    side.allocated(request, [[1] * blocks], start(side, request))
    return request


def miss(side: Any, ids: list[int], spans: list[list[int]], name: str) -> Request:
    """The request comes, and is left to vLLM; what it misses waits for its first token."""
    request = Request(ids, spans, name)
    assert start(side, request) == 0
    side.allocated(request, [[1]], 0)
    return request


def why(side: Any, request: Request) -> str:
    """The request ends; what its client is told."""
    return str(side.finished(request)["cacheblend"]["reason"])


def with_options(ids: list[int], name: str, **options: Any) -> Request:
    return Request(ids, name=name, kv_transfer_params={"cacheblend": options})


def turn(side: Any, pool: Pool, ids: list[int], spans: list[list[int]], name: str) -> tuple[int, Request]:
    """Asks; returns what vLLM's cache held of it, and leaves the request's blocks there."""
    request = Request(ids, spans, name)
    side.on_new(request)
    claimed = claim(side, request, pool.computed(request))
    held = pool.computed(request)
    if claimed is None:
        claimed = side.claim(request, held)
    if claimed:
        side.allocated(request, [[1] * 40], claimed)
        side.provided([name])
    side.allocated(request, [[1] * 40], 0)
    pool.held |= set(request.block_hashes)
    side.finished(request)
    return held, request
