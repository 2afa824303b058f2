"""Starts `vllm serve` on a free port, with the plug-in or without; a client that times the tokens it streams.

Imports no vLLM.
"""

import gc
import json
import os
import platform
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines import provenance
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.provenance import stamp
from lab.servers.processes import DEFAULT, SELECTOR, START_S, answers, count_failed, free_port, running
from lab.settings import ModelSettings, VllmOptions

NAME = "served"
FILL_S = 600
IDLE_SHARE = 0.25  # of a processor, at most, for what an idle server does
REFRESH_S = 1.0  # how often the plug-in lists the store: short, so that new chunks are found soon
GPU_SHARE = 0.42
"""Of a GPU's memory for each of two servers: vLLM's default is nearly all of it, and a second would not start."""
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class ServerSettings:
    """How a server is started; `extra`: settings of the connector; None: without the plug-in, prefix caching on."""

    model: Path
    extra: dict[str, Any] | None
    max_model_len: int
    max_num_batched_tokens: int
    dtype: str
    options: tuple[str, ...] = ()


@dataclass
class Streamed:
    """One streamed answer: its text, and the seconds from the request to each event."""

    times: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times[0]


class Server:
    """A running server; see `serving`."""

    process_id: int | None = None  # None: this process

    def __init__(self, url: str) -> None:
        from openai import OpenAI

        self.url = url
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=START_S)

    def ask(
        self, ids: Sequence[int], tokens: int, chunks: Sequence[Sequence[int]] | None = None, conversation: str = ""
    ) -> Streamed:
        """Greedy, streamed. `chunks`: spans of the prompt; None: the server finds them; empty: there are none."""
        extra: dict[str, Any] = {"ignore_eos": True}
        mine: dict[str, Any] = {} if chunks is None else {"chunks": [list(span) for span in chunks]}
        if mine := mine | ({"conversation": conversation} if conversation else {}):
            extra["kv_transfer_params"] = {"cacheblend": mine}
        found, started = Streamed(), time.perf_counter()
        events = self._client.completions.create(
            model=NAME, prompt=list(ids), max_tokens=tokens, temperature=0, stream=True, extra_body=extra
        )
        for event in events:
            if event.choices:
                found.times.append(time.perf_counter() - started)
                found.text += event.choices[0].text or ""
        return found

    def is_up(self) -> bool:
        return answers(f"{self.url}/health")

    def metric_lines(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            lines: list[str] = response.read().decode().splitlines()
        return lines

    def metrics(self) -> dict[str, float]:
        """The server's own counters, by name and labels."""
        pairs = [line.rsplit(" ", 1) for line in self.metric_lines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def counted(self, name: str) -> float:
        """The sum of one of the plug-in's counters over its labels."""
        return self.shown(f"{name}_total")

    def shown(self, name: str) -> float:
        """The sum of one of the plug-in's metrics over its labels; 0: it has none of this name."""
        named = f"vllm:cacheblend_{name}"
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == named)

    def counters(self) -> dict[str, float]:
        """Those of the plug-in, by name and labels."""
        return {key: value for key, value in self.metrics().items() if "cacheblend" in key and "created" not in key}

    def wait_until_idle(self) -> None:
        """Returns when its processes have hardly computed for two seconds: nothing is left to be stored."""
        import psutil  # type: ignore[import-untyped]  # which vLLM needs

        processes, end, quiet, before = psutil.Process(self.process_id), time.monotonic() + FILL_S, 0, 0.0
        while quiet < 2:
            time.sleep(1)
            if time.monotonic() > end:
                raise InvalidInputError(f"the server still computes after {FILL_S} s without a request; see its log")
            taken = (each.cpu_times() for each in (processes, *processes.children(recursive=True)))
            now = sum(each.user + each.system for each in taken)
            quiet, before = quiet + 1 if now - before < IDLE_SHARE else 0, now

    def wait_for_captures(self, tokens: int, pause: float = 2 * REFRESH_S) -> None:
        """Returns when so many tokens were stored since the server started, and after a pause in which the server
        lists the store again.
        """
        end = time.monotonic() + FILL_S
        while (stored := self.counted("captured_tokens")) < tokens:
            if time.monotonic() > end:
                raise InvalidInputError(
                    f"the server stored {stored:.0f} of {tokens} tokens within {FILL_S} s; see its log"
                )
            self.ask([7] * 16, 2, [])  # counters are updated by engine steps
            time.sleep(0.2)
        time.sleep(pause)


@dataclass(frozen=True)
class Pair(VllmOptions):
    """vLLM with prefix caching, and vLLM with the plug-in besides, on one model.

    Attributes:
        discover: both servers have the plug-in, and the second learns what nobody marked.
    """

    discover: bool = False

    @contextmanager
    def serving(self, max_model_len: int) -> Iterator[tuple[Server, Server]]:
        """(vLLM, vLLM with the plug-in and an empty store), see `discover`; stopped at the end."""
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit is not None and max_model_len > limit:
            raise InvalidInputError(
                f"prompt and answer are {max_model_len} tokens long, and {self.called} takes {limit}: "
                "ask for fewer or shorter chunks"
            )
        with ExitStack() as stack:
            folder = stack.enter_context(folder_of(self))
            limits = max_model_len, self.batched_tokens
            options = ("--gpu-memory-utilization", f"{GPU_SHARE:g}") if torch.cuda.is_available() else ()
            settings = [
                ServerSettings(folder, extra, *limits, dtype_of(self.dtype), options) for extra in self._extras(stack)
            ]
            # One after the other: a server measures how much memory is free while it starts.
            first, second = (stack.enter_context(serving(each)) for each in settings)
            yield first, second

    def _extras(self, stack: ExitStack) -> list[dict[str, Any] | None]:
        """The plug-in's settings in both servers; each has a store of its own. None: without the plug-in."""

        def blend(**more: Any) -> dict[str, Any]:
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-bench-"))
            return {
                "store": f"file://{store}?ram_bytes=4GiB",
                "recompute_ratio": self.ratio,
                "selector": DEFAULT.selector,
                "recency": DEFAULT.recency,
                "correction": DEFAULT.correction,
                "refresh_s": REFRESH_S,
                **more,
            }

        if self.discover:
            return [blend(), blend(discover=True)]
        return [None, blend()]

    def facts(self) -> dict[str, Any]:
        """What the figures depend on: model, ratio, machine, versions, commit."""
        facts = stamp()
        return {
            "model": self.called,
            "ratio": self.ratio,
            "selector": SELECTOR,
            "dtype": dtype_of(self.dtype),
            "max_num_batched_tokens": self.batched_tokens,
            **facts,
            "versions": facts["versions"] | {"vllm": version_of_vllm()},
        }


def version_of_vllm() -> str:
    """As in "0.32.0"; the build for CPUs has a name of its own."""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(package)
    return "not installed"


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products. oneDNN answers yes for every x86 with AVX-512, where it
    converts to float32 and back; its answer counts elsewhere."""
    if platform.machine() in ("x86_64", "AMD64"):
        return bool(provenance.extensions())
    has_kernels = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_kernels and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def dtype_of(name: str) -> str:
    """The dtype by that name; of auto: bfloat16, or float32 on a processor that only emulates its products.

    Emulated, they are seven times slower than in float32 (AMD EPYC of Zen 3), which nobody would serve on.
    """
    if name != "auto":
        return name
    return "bfloat16" if torch.cuda.is_available() or multiplies_bf16() else "float32"


def check_installed() -> None:
    """Raises `InvalidInputError` where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise InvalidInputError("vLLM cannot be imported here: install it beside cacheblend (make vllm)")


@contextmanager
def serving(settings: ServerSettings) -> Iterator[Server]:
    """A running server; stopped at the end, and asked before what failed in it."""
    check_installed()
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}")
    with running(command_of(settings, port), environment(), server.is_up) as process:
        server.process_id = process.pid
        yield server
        count_failed(server.metric_lines())


def environment() -> dict[str, str]:
    """Of a server: this process's variables, and on a machine without a GPU what vLLM needs there."""
    return {**os.environ} if torch.cuda.is_available() else {**_CPU, **os.environ}


def command_of(settings: ServerSettings, port: int) -> list[str]:
    # As `vllm serve` does, which asks for the package's version by a name that the CPU build does not have.
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model)]
    arguments += ["--served-model-name", NAME, "--port", str(port)]
    arguments += ["--host", "127.0.0.1", "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    arguments += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens), "--enable-prefix-caching"]
    arguments += settings.options
    if settings.extra is not None:
        arguments += ["--kv-transfer-config", json.dumps(connector(settings.extra))]
    return arguments


def connector(extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for the plug-in with these settings."""
    where = {"kv_connector": "CacheBlendConnector", "kv_connector_module_path": "cacheblend.engines.vllm"}
    return {**where, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def folder_of(what: ModelSettings, seed: int = 0) -> Iterator[Path]:
    """The model's folder, or one of its shape."""
    if what.model:
        yield what.model
    else:
        with shape_folder(what.shape or "", seed) as folder:
            yield folder


@contextmanager
def shape_folder(shape: str, seed: int = 0) -> Iterator[Path]:
    """A model folder with random weights of a known shape and the tokenizer that ships: prompts are ids anyway.

    The weights are drawn on a GPU where there is one (8B numbers take minutes on a CPU), which is free again after.
    """
    from transformers import AutoTokenizer

    from cacheblend.nano import model_path

    with tempfile.TemporaryDirectory(prefix="cacheblend-shape-") as folder:
        model = build_shape(shape, seed=seed)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        AutoTokenizer.from_pretrained(model_path()).save_pretrained(folder)
        yield Path(folder)
