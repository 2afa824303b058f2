"""One vLLM engine in this process, stepped by hand: its tiny model, prompts, and what it answers, counts and keeps.

Knows vLLM's public classes and the few attributes that lead from them to the connector.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import checkout
from lab.faults import injection
from lab.servers.vllm_server import connector

LAYERS = 6
_IDS = range(20, 1000)


def make_model(folder: Path, layers: int = LAYERS) -> Path:
    """Saves a model with random weights, whose tokens depend on far context; `folder` again."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(77)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    for label, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 0.6 if "embed" in label or "lm_head" in label else weight.shape[1] ** -0.5
            torch.nn.init.normal_(weight, 0, 2 * scale if "q_proj" in label or "k_proj" in label else scale)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Asked:
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Texts:
    """Random token ids, and prompts of passages that recur."""

    def __init__(self, seed: int, passages: int = 6, fewest: int = 64, most: int = 140) -> None:
        self.rng = random.Random(seed)
        self.passages = [self.ids(self.rng.randint(fewest, most)) for _ in range(passages)]

    def ids(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(_IDS, k=tokens))

    def asked(self, front: Sequence[int], passages: int, question: int = 12) -> Asked:
        """Plain text, some of the passages in random order, a question."""
        return joined(front, self.rng.sample(self.passages, passages), self.ids(question))

    def all_passages(self) -> Asked:
        """A prompt of every passage, which fills a store."""
        return joined(self.ids(9), self.passages, self.ids(9))


def joined(front: Sequence[int], passages: Sequence[Sequence[int]], question: Sequence[int]) -> Asked:
    ids, spans = list(front), []
    for passage in passages:
        spans.append((len(ids), len(ids) + len(passage)))
        ids += passage
    return Asked((*ids, *question), tuple(spans))


Answer = dict[str, Any]
"""`tokens` of the answer, and `logprobs` of the likeliest tokens, a mapping for each token."""

TOLERANCE = 3e-3
"""Of log-probabilities in fp32: sums run in another order when prompts are cut or batched in another way."""

LOOKUP_S = 5.0
"""Seconds that a look-up in a folder is waited for."""

PATIENT_S = 60.0
"""Seconds that a look-up may take where every request has to be blended."""

_EXTENSION = f"{injection.__name__}.{injection.Faults.__name__}"


def environment(ranks: int = 1) -> dict[str, str]:
    """Variables that a child process with an engine is started with."""
    cpu = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if ranks > 1:
        cpu |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    return {**checkout.environment(), **cpu}


@dataclass(frozen=True)
class Request:
    """A request that arrives. `params`: further entries of its `kv_transfer_params.cacheblend`.

    `spans`: of its chunks; None: the connector finds them by content; (): there are none.
    """

    name: str
    ids: Sequence[int]
    spans: Sequence[tuple[int, int]] | None = ()
    tokens: int = 3
    salt: str | None = None
    choices: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)


class Engine:
    """vLLM with the plug-in, or without.

    Args:
        model: folder.
        extra: `kv_connector_extra_config`; None: without the plug-in.
        beside: a connector that a `MultiConnector` holds in front of the plug-in; None: the plug-in alone.
        options: of vLLM's `LLM`.

    Attributes:
        beside: blends over a front that vLLM says it holds, delivered in a step that computes other tokens.
    """

    def __init__(
        self, model: Path, extra: dict[str, Any] | None, beside: dict[str, Any] | None = None, **options: Any
    ) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "distributed_executor_backend": "uni",
            "worker_extension_cls": _EXTENSION,
        }
        ranks = options.get("tensor_parallel_size", 1)
        if ranks > 1:
            settings["distributed_executor_backend"] = "mp"
        if extra is not None:
            # What is measured may be a version that is to be claimed after this; and a tiny model computes faster than
            # anything is loaded, so that the controller would have nothing blended.
            mine = connector({"allow_untested_version": True, "controller": False, **extra})
            if beside is not None:
                both = {"connectors": [beside, mine]}
                mine = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
            settings["kv_transfer_config"] = {**mine, "kv_load_failure_policy": "recompute"}
        self._llm = LLM(model=str(model), **(settings | options))
        self._engine: Any = self._llm.llm_engine
        self.beside = 0

    # ---- requests ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrives; it is scheduled in the next step."""
        from vllm import SamplingParams

        mine = dict(request.params)
        if request.spans is not None:
            mine["chunks"] = [list(span) for span in request.spans]
        params = SamplingParams(
            max_tokens=request.tokens,
            temperature=0.0 if request.choices == 1 else 0.9,
            n=request.choices,
            ignore_eos=True,
            detokenize=False,
            logprobs=5,
            extra_args={"kv_transfer_params": {"cacheblend": mine}} if mine else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.ids)}
        if request.salt is not None:
            prompt["cache_salt"] = request.salt
        self._engine.add_request(request.name, prompt, params)

    def wait_for_lookups(self) -> None:
        """Returns when the look-ups of the requests that came are over: they are delivered in the next step."""
        for tracked in [*self.mine._scheduling._requests.values()]:
            if tracked.lookup is not None:
                tracked.lookup.wait(LOOKUP_S)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, requests wait for look-ups however long a busy machine takes for them."""
        with patch.object(self.mine._scheduling._finder, "_timeout_s", PATIENT_S):
            yield

    def count_blends_beside(self) -> None:
        scheduling = self.mine._scheduling
        real = scheduling.take_jobs

        def counted(*, is_idle: bool = False) -> Any:
            jobs = real(is_idle=is_idle)
            self.beside += 0 if is_idle else sum(job.local_tokens > 0 for job in jobs.blend)
            return jobs

        scheduling.take_jobs = counted

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def step(self) -> dict[str, Answer]:
        """One engine step; the answers that it ended, by request."""
        return {out.request_id: _answer(out) for out in self._engine.step() if out.finished}

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def ask(self, requests: Iterable[Request]) -> dict[str, Answer]:
        """Adds requests at once, and steps until all have ended."""
        for request in requests:
            self.add(request)
        answers: dict[str, Answer] = {}
        while self.is_busy:
            answers |= self.step()
        return answers

    def settle(self, on_step: Callable[[int], None] = lambda step: None) -> None:
        """Steps until nothing is captured any more; `on_step` is called in front of each step with its number."""
        connector, step = self.connector, 0
        while connector is not None and connector.has_pending_push_work():
            on_step(step)
            self._engine.step()
            step += 1

    def fill(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
        """Has every chunk of a prompt stored. While a chunk is missing a blend is right, and has another answer."""
        wanted, began = sum(stop - start for start, stop in spans), time.monotonic()
        captured = before = self.counters().get("captured_tokens", 0.0)
        while captured - before < wanted:
            if time.monotonic() - began > PATIENT_S:
                raise RuntimeError(f"{captured - before:.0f} of {wanted} tokens were stored in {PATIENT_S:.0f} s")
            self.forget()
            with self.patient():
                self.ask([Request("fill", ids, spans, 1)])
            self.settle()  # ends early where a write takes long
            captured = self.counters().get("captured_tokens", 0.0)

    # ---- state ------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler side's connector; None without the plug-in."""
        return self.scheduler.connector

    @property
    def mine(self) -> Any:
        """This package's connector, also inside a `MultiConnector`."""
        return _mine(self.connector)

    def forget(self) -> None:
        """Empties vLLM's prefix cache."""
        self._llm.reset_prefix_cache()

    def reset(self, *, weights_changed: bool) -> None:
        """Empties vLLM's prefix cache while requests run, which begin again; with its connector as for new weights.
        While a request's blocks are being filled vLLM does not, and says so, when it has preempted the others."""
        with suppress(RuntimeError):
            self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=weights_changed)

    def read_list(self) -> None:
        """Begins to read the store's list again, as if it had changed."""
        listing = self.mine._scheduling._finder._listing
        listing._stamp = None
        listing._start_reading()

    def scramble(self, seed: int) -> None:
        """Empties vLLM's prefix cache and fills the KV cache with random numbers; no request may be under way."""
        self.forget()
        self._llm.collective_rpc("cacheblend_scramble", args=(seed,))

    def arm(self, fault: dict[str, Any]) -> None:
        """See `injection`; the scheduler's side of a place is in this process."""
        self._llm.collective_rpc("cacheblend_arm", args=(fault,))
        if self.has_worker_processes and "ranks" not in fault and fault["place"].startswith("store"):
            injection.arm(fault)

    def disarm(self) -> int:
        """Ends all faults; how often one was met."""
        met: int = sum(self._llm.collective_rpc("cacheblend_disarm"))
        return met + (injection.disarm() if self.has_worker_processes else 0)

    @property
    def has_worker_processes(self) -> bool:
        config = self._engine.vllm_config.parallel_config
        return bool(config.distributed_executor_backend != "uni")

    def counters(self) -> dict[str, float]:
        """The plug-in's counters and vLLM's preemptions, by name and label."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value") and ("cacheblend" in metric.name or "preempt" in metric.name):
                label = metric.labels.get("source") or metric.labels.get("reason") or ""
                name = metric.name.removeprefix("vllm:").removeprefix("cacheblend_")
                found[f"{name} {label}".strip()] = float(metric.value)
        return found

    def used_blocks(self) -> int:
        """Blocks of the KV cache that some request holds."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def leftovers(self, marks: Sequence[str]) -> list[str]:
        """Where objects of this package in this process still hold a name with one of these beginnings."""
        roots = [self.mine]
        if not self.has_worker_processes:
            from cacheblend.engines.vllm.internals.interface import connector_of_worker

            roots.append(_mine(connector_of_worker()))
        return found_in(roots, tuple(marks))


def _mine(connector: Any) -> Any:
    held = getattr(connector, "_connectors", None) or [connector]
    return next(each for each in held if type(each).__name__ == "CacheBlendConnector")


def found_in(roots: Sequence[object], marks: tuple[str, ...]) -> list[str]:
    """Paths to strings that begin with one of `marks`, through containers and objects of this package."""
    found: list[str] = []
    seen: set[int] = set()
    queue: deque[tuple[str, object]] = deque((type(root).__name__, root) for root in roots)
    while queue:
        path, at = queue.popleft()
        if isinstance(at, str):
            if at.startswith(marks):
                found.append(f"{path} = {at!r}")
            continue
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, Mapping):
            queue.extend((f"{path}[{key!r}]", part) for key, value in at.items() for part in (key, value))
        elif isinstance(at, list | tuple | set | frozenset | deque):
            queue.extend((f"{path}[]", part) for part in at)
        elif type(at).__module__.startswith("cacheblend") and hasattr(at, "__dict__"):
            queue.extend((f"{path}.{name}", value) for name, value in vars(at).items())
    return found


def _answer(output: Any) -> Answer:
    choices = [
        {
            "tokens": list(one.token_ids),
            "logprobs": [{str(t): round(p.logprob, 5) for t, p in step.items()} for step in one.logprobs or []],
        }
        for one in output.outputs
    ]
    return {**choices[0], "choices": [each["tokens"] for each in choices], "cached": output.num_cached_tokens}


def is_same(answer: Answer, right: Answer) -> bool:
    """Whether tokens are equal and log-probabilities close; a tie of two tokens ends the comparison."""
    if len(answer["tokens"]) != len(right["tokens"]):
        return False
    steps = zip(answer["tokens"], right["tokens"], answer["logprobs"], right["logprobs"], strict=True)
    for token, expected, given, wanted in steps:
        common = given.keys() & wanted.keys()
        if len(common) < len(wanted) - 1 or any(abs(given[t] - wanted[t]) > TOLERANCE for t in common):
            return False
        if token != expected:
            return bool(abs(wanted[str(expected)] - wanted.get(str(token), float("-inf"))) < TOLERANCE)
    return True
