"""Stand-ins for vLLM's requests, and a scheduler side over a store in memory."""

import hashlib
import time
from types import SimpleNamespace
from typing import Any

import torch

SIZE = 16
CHUNK = list(range(100, 200))


class Request(SimpleNamespace):
    """A request with vLLM's way of hashing blocks: each with the hash in front of it, the first with the salt."""

    def __init__(self, ids: list[int], spans: Any = None, name: str = "r", **fields: Any) -> None:
        params = None if spans is None else {"cacheblend": {"chunks": spans}}
        super().__init__(
            request_id=name,
            prompt_token_ids=ids,
            num_tokens=len(ids),
            kv_transfer_params=params,
            sampling_params=SimpleNamespace(prompt_logprobs=None),
            lora_request=None,
            num_preemptions=0,
            num_output_tokens=0,
            cache_salt=None,
            block_hashes=[],
        )
        self.__dict__.update(fields)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        for at in range(len(self.block_hashes) * SIZE, self.num_tokens - SIZE + 1, SIZE):
            front = self.block_hashes[-1] if self.block_hashes else b""
            salt = (self.cache_salt or "") if at == 0 else ""
            ids = self.prompt_token_ids[at : at + SIZE]
            self.block_hashes.append(
                hashlib.sha256(front + salt.encode(errors="surrogatepass") + repr(ids).encode()).digest()
            )


def scheduling(held: list[list[int]], store: Any = None, salt: str = "", **config: Any) -> Any:
    """A scheduler side over a store that holds these chunks of one tenant."""
    from cacheblend.core.load.capture import ChunkJob, manifest_of
    from cacheblend.core.naming import as_token_ids
    from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
    from cacheblend.engines.identity import ModelIdentity
    from cacheblend.engines.settings import Settings
    from cacheblend.engines.vllm.config import ConnectorConfig
    from cacheblend.engines.vllm.scheduler.finding import ChunkFinder
    from cacheblend.engines.vllm.scheduler.scheduling import Scheduling
    from cacheblend.engines.vllm.scheduler.tenants import TenantPlanners
    from cacheblend.store import MemoryStore

    settings = ConnectorConfig(**{"lookup_timeout_s": 30.0, **config})  # the machine may be busy
    planners = TenantPlanners(ModelIdentity(None, "model", "float32", None, "a model"), settings.blend)
    planner = planners.of(salt)
    store = MemoryStore(1 << 20) if store is None else store
    for ids in held:
        job = ChunkJob((), as_token_ids(ids))
        manifest = manifest_of(job, planner, "")
        records, layout = [torch.zeros(1, 2, len(ids), 4)], KVLayout((LayerShape(1, 4),), torch.float32)
        store.write(Block(manifest.chunk_id, planner.root, job.token_ids, records, layout))
        store.put_manifest(manifest)
    blend = Settings(settings.blend)
    return Scheduling(settings, blend, ChunkFinder(settings, blend, planners, store), SIZE)


def claim(side: Any, request: Request, computed: int) -> Any:
    """What is claimed once the look-up is over."""
    end = time.monotonic() + 30
    while (tracked := side._requests.get(request.request_id)) and tracked.lookup and not tracked.lookup.is_over:
        assert time.monotonic() < end
        time.sleep(0.001)
    found = side.claim(request, computed)
    return side.claim(request, computed) if found is None else found


def captured(count: int) -> Any:
    from cacheblend.engines.vllm.jobs import StepReport

    return StepReport(count)


def failed(request: Request) -> Any:
    from cacheblend.engines.vllm.jobs import BlendOutcome, StepReport

    return StepReport(0, {request.request_id: BlendOutcome(failure="RuntimeError")})


def start(side: Any, request: Request) -> Any:
    """The request comes, and is claimed without anything that vLLM holds."""
    side.on_new(request)
    return claim(side, request, 0)
