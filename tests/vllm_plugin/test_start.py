"""What happens while vLLM starts with the plug-in: names of weights, memory, and what ends the start with one line.

With `on_unblendable: plain` all prompts are left to vLLM instead, and another connector beside ours goes on. Weights
may be replaced after workers have loaded them, before the scheduler's side reads them: path, size and time of writing
stay, and nothing computed with the old ones is stored under the names of the new ones, nor loaded beside them.
"""

import gc
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.worker.gpu import kv_connector

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.engines.fingerprint import fingerprint_folder
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.vllm.connector import CacheBlendConnector, identify
from cacheblend.engines.vllm.internals import decoder, weight_loader
from cacheblend.engines.vllm.internals.attention_shim import AttentionShim, latent_spec
from cacheblend.engines.vllm.internals.decoder import computed_by
from cacheblend.engines.vllm.internals.interface import (
    calling_scheduler,
    metadata_builders,
    names_computed,
    pause_of,
    refused_speculation,
)
from cacheblend.engines.vllm.internals.kv_cache import check_caches, fp8_scales, is_fp8, plain_queries
from cacheblend.engines.vllm.jobs import BlendOutcome, StepJobs, StepReport
from cacheblend.engines.vllm.metrics import Counts
from cacheblend.engines.vllm.worker.model import BlendModel
from cacheblend.engines.vllm.worker.worker import IdleWorker, Worker
from cacheblend.engines.vllm.workspace import ModelSizes, workspace_of
from deployment import DEPLOY, containers, needs_kubectl, rendered
from tiny_folder import TinyShape, build_tiny
from vllm_models import OPT, copy_model, make_family, make_model
from vllm_prompts import FORGET, Texts, ask, prompts
from vllm_requests import (
    CHUNK,
    OTHER,
    PROMPT,
    Request,
    SlowStore,
    claim,
    give,
    refusals,
    reported,
    scheduling,
    start,
    why,
)
from vllm_running import TWO_RANKS, Serve, tokens

# ---- what is refused of a configuration ----------------------------------------------------------------------------

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
HEADS = {**SCHEME, "strategy": "attn_head"}
OPTIMISED = {"quant_method": "modelopt"}
SPARSE = {"use_mla": True, "hf": {"model_type": "deepseek_v32", "index_topk": 2048}}
BFLOAT16 = "--kv-cache-dtype bfloat16"


def drafted(method: str) -> Any:
    return SimpleNamespace(method=method)


def stored(**quantization: Any) -> dict[str, Any]:
    """Fields of a configuration whose checkpoint is quantised so."""
    return {"hf": {"quantization_config": quantization}}


@pytest.mark.parametrize(
    "fields",
    [
        *({"cache": name} for name in ("auto", "float16", "fp8", "fp8_e5m2")),
        {"cache": "bfloat16", **stored(kv_cache_scheme={**SCHEME, "num_bits": 4})},  # the command wins
        {"cache": "fp8_e4m3", **stored(kv_cache_scheme=SCHEME)},
        *(stored(quant_method="compressed-tensors", kv_cache_scheme=scheme) for scheme in (None, SCHEME)),
        stored(**OPTIMISED, kv_cache_quant_algo="FP8"),
        {"is_multimodal_model": True, "is_encoder_decoder": False},
        {"use_mla": True},
        {"speculative": drafted("eagle")},
    ],
    ids=str,
)
def test_what_is_not_refused_of_a_configuration(fields: dict[str, Any]) -> None:
    assert refusals(**fields) == []


@pytest.mark.feature("speculative decoding, other ways", "refused by name")
@pytest.mark.feature("pipeline parallel 2, TP 2 x PP 2", "refused by name")
@pytest.mark.feature("sleep mode", "refused by name")
@pytest.mark.feature("routed experts in answers", "refused by name")
@pytest.mark.parametrize(
    ("words", "way_out", "fields"),
    [
        *(
            (f"a KV cache of type {name}", BFLOAT16, {"cache": name})
            for name in ("nvfp4", "fp8_per_token_head", "int8_per_token_head", "fp8_inc", "octave_k3v4", "a platform's")
        ),
        ("another type than FP8 with static scales", BFLOAT16, stored(kv_cache_scheme={**SCHEME, "num_bits": 4})),
        ("another type than FP8 with static scales", BFLOAT16, stored(kv_cache_scheme={**SCHEME, "dynamic": True})),
        ("strategy 'attn_head': blending knows one", BFLOAT16, stored(kv_cache_scheme=HEADS)),
        ("kv_cache_scheme of the checkpoint", BFLOAT16, {"cache": "fp8", **stored(kv_cache_scheme=HEADS)}),
        ("type NVFP4 (kv_cache_quant_algo of", BFLOAT16, stored(**OPTIMISED, kv_cache_quant_algo="NVFP4")),
        ("type INT8 (kv_cache", BFLOAT16, stored(**OPTIMISED, quantization={"kv_cache_quant_algo": "INT8"})),
        # vLLM would start four processes before it asks the connector: this asks what the connector asks.
        *(
            ("pipeline parallelism", "--tensor-parallel-size", {"parallel": {"pipeline_parallel_size": 2, **more}})
            for more in ({}, {"tensor_parallel_size": 2})
        ),
        ("encoder", "", {"is_multimodal_model": True, "is_encoder_decoder": True}),
        # vLLM's CPU build ends with its own words at a model with an indexer, before it asks the connector.
        ("deepseek_v32 with sparse attention to the 2048 tokens that an indexer selects", "", SPARSE),
        ("MLA attention beside LoRA", "", {"use_mla": True, "lora": SimpleNamespace()}),
        ("MLA attention beside an FP8 cache", "", {"use_mla": True, "cache": "fp8"}),
        ("MLA attention beside speculative decoding", "", {"use_mla": True, "speculative": drafted("ngram")}),
        ("'mtp'", "ngram", {"speculative": drafted("mtp")}),
        ("'mtp'", "leave it out", {"speculative": drafted("mtp")}),
        ("sleep mode", "leave --enable-sleep-mode out", {"enable_sleep_mode": True}),  # no CPU can sleep
        ("--enable-return-routed-experts", "leave it out", {"experts": True}),  # vLLM's new runner only
        ("--prefix-match-unit", "leave it out", {"prefix_match_unit": 8}),
        ("weights that are fetched before each layer", "leave --offload-group-size out", {"offload_group_size": 4}),
    ],
)
def test_what_is_refused_of_a_configuration(words: str, way_out: str, fields: dict[str, Any]) -> None:
    (refused,) = refusals(**fields)
    assert words in refused and way_out in refused


def test_what_else_is_known_of_a_configuration() -> None:
    # Both sides know whether a cache is FP8, whether or not vLLM has said so to this process.
    for cache, quantization, is_eight_bits in (
        ("auto", {}, False),
        ("bfloat16", {"kv_cache_scheme": SCHEME}, False),
        ("fp8_e5m2", {}, True),
        ("auto", {"kv_cache_scheme": SCHEME}, True),
        ("auto", {"quantization": {"kv_cache_quant_algo": "FP8"}}, True),
    ):
        hf = SimpleNamespace(**({"quantization_config": quantization} if quantization else {}))
        assert is_fp8(SimpleNamespace(cache_dtype=cache), hf) is is_eight_bits
    assert refused_speculation(None) == ""
    with pytest.raises(Exception, match="attends sparsely, to tokens that an indexer selects"):
        latent_spec(SimpleNamespace(layer_name="layers.0", use_sparse=True))


def layers_of(cache_dtype: str, scale: Any = 1.0) -> list[Any]:
    scales = {"_k_scale": torch.tensor(scale), "_v_scale": torch.tensor(scale)}
    layers = [SimpleNamespace(layer_name=f"layers.{n}", kv_cache_dtype="auto", **scales) for n in range(3)]
    layers[2].kv_cache_dtype = cache_dtype
    return layers


def test_caches_are_refused_by_the_layers_that_were_made() -> None:
    """Which is the last word: a layer may have taken another type than the configuration names."""
    fitting = [*layers_of("fp8", 0.25), SimpleNamespace(layer_name="old")]
    check_caches(fitting)
    fitting[2]._k_scale_float, fitting[2]._v_scale_float = 0.25, 0.5
    assert [fp8_scales(layer) for layer in fitting] == [None, None, (0.25, 0.5), None]
    for layers, message in (
        (layers_of("nvfp4"), r"layers\.2 has a KV cache of type nvfp4, .* --kv-cache-dtype bfloat16"),
        (layers_of("fp8", [1.0, 1.0]), r"layers\.2 .* a scale for each head, .* --kv-cache-dtype bfloat16"),
    ):
        with pytest.raises(ModelNotBlendableError, match=message):
            check_caches(layers)


def test_queries_are_not_quantised_while_layers_run_for_a_blend() -> None:
    """As FlashAttention has them beside FP8 caches; afterwards vLLM's own passes have them quantised again."""
    quantiser = nn.Identity()
    with_one, without = nn.Module(), SimpleNamespace()
    with_one.query_quant = quantiser
    with pytest.raises(KeyError), plain_queries([with_one, without]):
        assert with_one.query_quant is None
        raise KeyError
    assert with_one.query_quant is quantiser

    shim = AttentionShim(SimpleNamespace(kv_cache=None, layer_name="layers.3"))
    shim.answer = lambda query, keys, values: query
    query = torch.ones(2, 8)
    with pytest.raises(ModelNotBlendableError, match=r"layers\.3 quantises its queries to torch\.float8_e4m3fn; .*16"):
        shim.forward(None, query.to(torch.float8_e4m3fn), query, query, output=torch.empty(2, 8))


@pytest.mark.parametrize(
    ("model", "extra", "engine", "words"),
    [
        pytest.param("llama", {"recompute_ration": 0.1}, {}, "did you mean recompute_ratio", id="unknown key"),
        pytest.param(
            "llama",
            {"store": "memory"},
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
            "pipeline",
            id="pipeline parallel",
        ),
        pytest.param(
            "llama",
            {"store": "cuda://?max_bytes=64MiB, file:///nowhere"},
            {},
            "this vLLM computes on a CPU: leave cuda:// out",
            id="a GPU's tier",
        ),
        *(
            # A layer keeps one vector for both.
            pytest.param("deepseek_v3", {"measure": part}, {}, f"measure '{part}' compares keys or values alone")
            for part in "kv"
        ),
    ],
)
def test_a_start_that_cannot_be_ends_with_one_line(
    serve: Serve, tmp_path: Path, model: str, extra: dict[str, Any], engine: dict[str, Any], words: str
) -> None:
    made: Any = make_family(model, tmp_path) if model == "deepseek_v3" else model
    assert words in serve(made, **engine).refusal(extra)


# ---- models that cannot be blended: found in the worker ------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "words"),
    [
        # Positions in the embeddings are found by calling the model.
        ("opt", "adds positions to its embeddings"),
        # vLLM's own CPU operation turns rotated parts otherwise than by their positions: it takes slices for whole
        # rows. It shows while layers are run, not in the configuration.
        ("deepseek_v2", "the keys of layer 0 follow none of the model's 1 rotations"),
    ],
)
def test_a_model_that_cannot_be_blended_is_named_or_left_to_vllm(
    serve: Serve, tmp_path: Path, model: str, words: str
) -> None:
    """By the worker, which tells the scheduler's side."""
    made = serve(make_model(OPT, tmp_path / "opt") if model == "opt" else make_family(model, tmp_path))
    step = ask(prompts(15, 2, 3, below=512), alone=True)  # what that operation gives depends on a step's others
    assert words in made.refusal({}, step)
    left = made.run([step, FORGET, step], {"recompute_ratio": 0.0, "on_unblendable": "plain"})
    assert tokens(left["answers"][0]) == tokens(left["answers"][2]) == tokens(made.plain(step))
    counted = {name: value for name, value in left["metrics"].items() if "cacheblend" in name and value}
    assert counted == {"vllm:cacheblend_not_blended not blendable": 4}, "it is told, and does nothing"


def test_another_connector_goes_on_beside_a_model_that_is_left_to_vllm(
    serve: Serve, tmp_path: Path, beside: list[Any]
) -> None:
    texts = Texts(16)
    asked = [texts.prompt(texts.passages(3)) for _ in range(6)]
    naming = [one.spans if number % 2 else [] for number, one in enumerate(asked)]
    steps = [ask(asked, chunks=naming, alone=True), *[FORGET, ask(asked, chunks=naming)] * 2]
    engine = {"block_size": 32, "num_gpu_blocks_override": 47, "max_model_len": 1472}  # some of the requests wait
    model = serve(make_model(OPT, tmp_path / "opt"), **engine)
    given = model.run(steps, {"on_unblendable": "plain", "shadow": 1.0}, beside=beside)["answers"][::2]
    assert list(map(tokens, given)) == list(map(tokens, model.run(steps, None)["answers"][::2]))
    for answers in given[1:]:
        cached = [one["cached"] for one in answers]
        assert all(cached[::2]) and not any(cached[1::2])  # the other loads what it has saved: prompts without chunks


def connector_of(on_unblendable: str) -> Any:
    made: Any = object.__new__(CacheBlendConnector)
    made._config = SimpleNamespace(
        store="memory", on_unblendable=on_unblendable, budget_row_layers=1, in_pages=None, read_timeout_s=1.0
    )
    made._vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))
    made._kv_transfer_config = SimpleNamespace(kv_connector_extra_config={})
    made._unblendable, made._worker, made._scheduling, made._block_size, made._left = "", None, None, 16, Counts()
    made._store = made._planner = made._kv_caches = None
    made._selector, made.identity = SimpleNamespace(of_model=lambda layers: None), SimpleNamespace(name="m")
    return made


def test_a_connector_knows_of_its_schedulers_pause_and_does_not_keep_it() -> None:
    """Also one in a `MultiConnector`, and one that no scheduler makes."""

    def making(self: Any) -> None:
        self.tells = (lambda: pause_of(calling_scheduler()))()  # through another frame

    made = type("Scheduler", (SchedulerInterface,), {"__init__": making, "pause_state": PauseState.UNPAUSED})
    made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    scheduler: Any = made()
    tells = scheduler.tells
    with ThreadPoolExecutor(1) as nobody:  # among whose callers there is none
        assert not tells() and not nobody.submit(lambda: pause_of(calling_scheduler())).result()()
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        scheduler.pause_state = state
        assert tells()
    del scheduler
    gc.collect()
    assert not tells()


def test_an_engine_that_drains_its_last_requests_begins_nothing_for_later_ones() -> None:
    def making(self: Any) -> None:
        self.tells = pause_of(calling_scheduler())

    made = type("Scheduler", (SchedulerInterface,), {"__init__": making, "pause_state": PauseState.UNPAUSED})
    made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]

    class EngineCoreProc:
        def __init__(self) -> None:
            self.scheduler: Any = made()
            self.shutdown_state = EngineShutdownState.RUNNING

    assert EngineCoreProc.__name__ == core.EngineCoreProc.__name__
    engine = type("DPEngineCoreProc", (EngineCoreProc,), {})()
    assert not engine.scheduler.tells()
    for state in (EngineShutdownState.REQUESTED, EngineShutdownState.SHUTTING_DOWN):
        engine.shutdown_state = state
        assert engine.scheduler.tells()


@pytest.mark.parametrize(
    ("connector", "policy", "module", "may"),
    [
        ("CacheBlendConnector", "fcfs", "vllm.v1.core.sched.async_scheduler", True),
        ("CacheBlendConnector", "priority", "vllm.v1.core.sched.scheduler", False),
        ("MultiConnector", "fcfs", "vllm.v1.core.sched.scheduler", False),
        ("CacheBlendConnector", "fcfs", "somebody.scheduler", False),
    ],
)
def test_what_vllm_names_is_trusted_where_only_it_and_this_connector_write(
    connector: str, policy: str, module: str, may: bool
) -> None:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector), scheduler_config=SimpleNamespace(policy=policy)
    )
    scheduler: Any = type("Scheduler", (), {"vllm_config": config, "__module__": module})()
    assert names_computed(scheduler, CacheBlendConnector) is may
    assert not names_computed(None, CacheBlendConnector)


@pytest.mark.parametrize("on_unblendable", ["error", "plain"])
def test_a_cache_that_cannot_be_read_is_named_or_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, on_unblendable: str
) -> None:
    """It is found when prefills are prepared."""
    from cacheblend.engines.vllm import connector as module

    def refuse(*args: Any, **options: Any) -> None:
        raise ModelNotBlendableError("keeps eight bits of no known type")

    shape = SimpleNamespace(is_latent=True)
    model = SimpleNamespace(layers=[0, 1], attention=[], head_shapes=[shape], device=torch.device("cpu"))
    monkeypatch.setattr(module, "BlendModel", lambda config: model)
    monkeypatch.setattr(module, "Opener", refuse)
    monkeypatch.setattr(module, "TensorParallel", lambda: SimpleNamespace(size=1, rank=0))
    monkeypatch.setattr(module, "workspace_of", lambda sizes: "nothing")
    monkeypatch.setattr(module.decoder, "model_sizes", lambda *args: None)
    monkeypatch.setattr(module.prefix_cache, "groups_of", lambda *args: [])
    monkeypatch.setattr(module.prefix_cache, "windows_of", lambda *args: [None])
    connector = connector_of(on_unblendable)
    if on_unblendable == "error":
        with pytest.raises(ModelNotBlendableError, match="no known type"):
            connector.register_kv_caches({})
        return
    connector.register_kv_caches({})
    assert connector.get_handshake_metadata() is None, "another connector's is passed on alone"
    # The scheduler's side is told in the first step: what it sent before comes back at once.
    blends: Any = [
        SimpleNamespace(request_id="a", block_ids=[[3, 4, 5]], local_tokens=16),
        SimpleNamespace(request_id="b", block_ids=[[6, 7], [0, 8]], local_tokens=0),
    ]
    connector._connector_metadata = StepJobs(blend=blends, capture=[SimpleNamespace()])
    connector.start_load_kv(None)
    assert connector.get_finished(set()) == (None, {"a", "b"})
    told = connector.request_finished(SimpleNamespace(request_id="a"), [])[1]["cacheblend"]
    assert (told["blended"], told["reason"]) == (False, "not blendable: keeps eight bits of no known type")
    assert connector.get_block_ids_with_load_errors() == {4, 5}
    assert connector._worker.take_failed_requests() == {"b"}
    report = connector.build_connector_worker_meta()
    assert [report.outcomes[name].failure for name in "ab"] == ["not blendable"] * 2
    assert report.captured == 1 and report.unblendable == "keeps eight bits of no known type"
    assert StepReport().aggregate(report).unblendable == report.aggregate(StepReport()).unblendable
    other, closed = connector_of("plain"), list[int]()
    counts = Counts()
    counts.add("requests", 1)
    other._scheduling = SimpleNamespace(
        provided=lambda ids: None, reported=lambda report: None, counts=counts, close=lambda: closed.append(1)
    )
    other.update_connector_output(SimpleNamespace(finished_recving=(), kv_connector_worker_meta=report))
    assert closed and not other.has_pending_push_work()
    assert other.request_finished(SimpleNamespace(request_id="a"), [])[1]["cacheblend"]["reason"] == told["reason"]
    found = other.get_kv_connector_stats()
    assert found is not None and found.data == {"requests": {"": 1}, "not_blended": {"not blendable": 1}}
    connector.shutdown()
    # An encoder has no group of KV cache.
    assert connector_of("plain").request_finished_all_groups(SimpleNamespace(request_id="a"), ()) == (False, None)


@pytest.mark.parametrize("others", [0, 1])
def test_where_one_rank_cannot_blend_none_does(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    from cacheblend.engines.vllm import connector as module

    ranks = SimpleNamespace(size=2, rank=0, maximum=lambda own: [max(*own, others)])
    monkeypatch.setattr(module, "TensorParallel", lambda: ranks)
    connector, closed = connector_of("plain"), list[int]()
    worker = SimpleNamespace(close=lambda: closed.append(1))
    connector._open_worker = lambda reserved: worker
    connector.register_kv_caches({})
    if not others:
        assert connector._worker is worker and not closed
        return
    assert closed and "another tensor-parallel rank" in connector._worker.report().unblendable


def test_a_step_that_ends_after_drafting_tells_what_it_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's new model runner takes what a step provided, drafts, and ends the step then (since 0.33)."""
    monkeypatch.setattr(kv_connector, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(kv_connector, "get_forward_context", lambda: None)
    connector, runner = connector_of("plain"), object.__new__(kv_connector.ActiveKVConnector)
    connector._worker = IdleWorker(16, "no layers")
    runner.kv_connector, runner._disabled = connector, False
    late = {"defer_finalize": True} if "defer_finalize" in signature(runner.post_forward).parameters else {}
    prompt: Any = SimpleNamespace(request_id="a", block_ids=[[3, 4]], local_tokens=0)
    told = []
    for jobs in (StepJobs(blend=[prompt]), StepJobs()):
        runner.pre_forward(SimpleNamespace(kv_connector_metadata=jobs, has_sync_kv_loads=False))
        output = runner.post_forward(set(), **late)
        told.append((output.finished_recving, output.invalid_block_ids, [*output.kv_connector_worker_meta.outcomes]))
        if late:
            runner.finalize_step()
        assert not connector.has_connector_metadata()
    assert told == [({"a"}, {3, 4}, ["a"]), (None, set(), [])]


@pytest.mark.parametrize("error", [KeyError("lengths"), RuntimeError("a\nb"), AssertionError(), TypeError("forward()")])
def test_whatever_a_models_own_code_raises_is_named_in_one_line(error: Exception) -> None:
    def raises(error: Exception) -> Any:
        raise error

    model: Any = object.__new__(BlendModel)
    model._model, model._learn_layers = nn.Linear(1, 1), lambda: raises(error)
    with pytest.raises(ModelNotBlendableError, match=f"layers of Linear .* {type(error).__name__}: ") as told:
        model._learn()
    assert "\n" not in str(told.value)
    model._learn_layers = lambda: raises(torch.OutOfMemoryError())
    with pytest.raises(torch.OutOfMemoryError):  # memory that ran out says nothing of the model
        model._learn()


def test_a_group_of_a_drafters_layers_alone_has_no_builder() -> None:
    backend = SimpleNamespace(get_builder_cls=lambda: lambda spec, names, config, device: names)
    cache = torch.zeros(1)
    layers = [SimpleNamespace(layer_name=f"l{n}", get_attn_backend=lambda: backend, kv_cache=cache) for n in range(2)]
    names = [["draft.0"], ["l0", "draft.1"], ["draft.2", "l1"]]
    groups = [SimpleNamespace(layer_names=each, kv_cache_spec=SimpleNamespace()) for each in names]
    config: Any = SimpleNamespace()
    assert metadata_builders(config, layers, SimpleNamespace(kv_cache_groups=groups)) == [None, *names[1:]]


def test_a_forward_that_vllm_has_set_is_put_back() -> None:
    """As of weights that are kept on the host."""
    own, replaced = nn.Linear(1, 1), nn.Linear(1, 1)

    def bringing(rows: torch.Tensor) -> torch.Tensor:
        return rows

    replaced.__dict__["forward"] = bringing
    with computed_by([own, replaced], [lambda rows: rows + 1] * 2):
        assert float(own(torch.zeros(1))) == float(replaced(torch.zeros(1))) == 1
    assert replaced.__dict__["forward"] is bringing
    assert "forward" not in own.__dict__


# ---- names of weights: of the folder, or none ----------------------------------------------------------------------


def config_of(model: str = "m", connector: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Of vLLM, as far as it is read; `fields`: of the loading, the cache or the model."""
    text = SimpleNamespace(intermediate_size=512)
    of_model = {
        "model": model,
        "hf_text_config": text,
        "hf_config": text,
        "dtype": torch.float32,
        "revision": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "trust_remote_code": False,
        "code_revision": None,
        "config_format": "auto",
        "quantization": None,
        "quantization_config": None,
        "use_mla": False,
        "max_model_len": 1000,
        "get_num_layers": lambda parallel: 6,
        "get_hidden_size": lambda: 256,
        "get_num_kv_heads": lambda parallel: 4,
        "get_num_attention_heads": lambda parallel: 8,
        "get_head_size": lambda: 32,
        "get_vocab_size": lambda: 2048,
    }
    of_loading = {"load_format": "auto", "download_dir": None, "model_loader_extra_config": {}}
    return SimpleNamespace(
        kv_transfer_config=None if connector is None else SimpleNamespace(**connector),
        model_config=SimpleNamespace(**{name: fields.get(name, value) for name, value in of_model.items()}),
        load_config=SimpleNamespace(**{name: fields.get(name, value) for name, value in of_loading.items()}),
        cache_config=SimpleNamespace(cache_dtype=fields.get("cache_dtype", "auto")),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128),
        speculative_config=None,
    )


def named(model: Path, **fields: Any) -> str:
    return identify(config_of(str(model), **fields), None).fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.arange(50)}, made / "model.safetensors")
    return made


@pytest.mark.parametrize(("context", "anchor"), [(8192, "text"), (512, "bos")])
def test_both_engines_choose_the_same_anchor_and_rows_for_a_model(tmp_path: Path, context: int, anchor: str) -> None:
    """Or none would find what the other stored; `max_model_len` (1,000) is no part of it."""
    build_tiny(tmp_path / "model", ["a text"], TinyShape(context_length=context))
    read = SimpleNamespace(intermediate_size=512, max_position_embeddings=context)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = identify(config_of(str(tmp_path / "model"), hf_text_config=read, hf_config=read), tokenizer)
    with BlendEngine.from_pretrained(tmp_path / "model", store="memory", dtype="float32", device="cpu") as engine:
        assert engine.config.anchor == anchor and engine.runtime.planner == ours.planner(BlendConfig())
        assert engine.config.selection == ours.resolved(BlendConfig()).selection


def test_formats_precisions_and_latents_that_have_names_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fingerprint_folder(folder)
    for of_folder in ("auto", "safetensors", "runai_streamer"):
        assert named(folder, load_format=of_folder) == plain
    for cache in ("fp8", "fp8_e5m2"):  # which does not change what is stored, see `test_pages`
        assert named(folder, cache_dtype=cache) == plain
    others: list[dict[str, Any]] = [{"load_format": "dummy"}, {"load_format": "tensorizer"}]
    others += [{"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a"}}]
    assert len({plain, *(named(folder, **each) for each in others)}) == 4

    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    assert named(folder) != plain == named(folder, dtype=torch.bfloat16)
    monkeypatch.undo()

    # transformers orders DeepSeek-V3's rotated numbers otherwise: its records are not vLLM's.
    latents = make_family("deepseek_v3", tmp_path)
    assert named(latents, use_mla=False) == fingerprint_folder(latents, {}) != named(latents, use_mla=True)


def test_what_vllm_reads_of_a_folder_names_its_kv(folder: Path) -> None:
    """By format, as its readers choose; a folder that holds one model has one name in both engines."""
    plain = fingerprint_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(b"one")
    (folder / "weights.pt").write_bytes(b"one")
    assert named(folder) == plain == named(folder, load_format="safetensors")
    for read, file in (("npcache", "pytorch_model.bin"), ("pt", "weights.pt")):
        before = named(folder, load_format=read)
        (folder / file).write_bytes(b"another")
        assert len({plain, before, named(folder, load_format=read)}) == 3
    (folder / "training_args.bin").write_bytes(b"of no model")
    assert named(folder, load_format="npcache") == fingerprint_folder(folder, files=[folder / "pytorch_model.bin"])
    # Mistral's own files are read in place of those for transformers, if there are any
    save_file({"w": torch.arange(50) + 1}, folder / "consolidated.safetensors")
    consolidated = named(folder)
    assert consolidated == named(folder, load_format="mistral") != plain == fingerprint_folder(folder)
    save_file({"w": torch.arange(50) + 2}, folder / "consolidated.safetensors")
    assert named(folder) not in (plain, consolidated)
    # of shards, those that an index names
    index = folder / "model.safetensors.index.json"
    for i in range(3):
        save_file({f"w{i}": torch.arange(50) + i}, folder / f"model-{i}.safetensors")
    index.write_text(json.dumps({"weight_map": {f"w{i}": f"model-{i}.safetensors" for i in range(2)}}))
    shards = named(folder, load_format="hf")
    save_file({"w2": torch.arange(50)}, folder / "model-2.safetensors")
    assert named(folder, load_format="hf") == shards
    save_file({"w1": torch.arange(50)}, folder / "model-1.safetensors")
    assert named(folder, load_format="hf") != shards
    ranks = set()  # whose shards have no index, whatever is beside them
    for number in range(2):
        save_file({"w": torch.arange(50) + number}, folder / "model-rank-0-part-0.safetensors")
        ranks.add(named(folder, load_format="sharded_state"))
    assert len(ranks) == 2
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"names 2 files, of which model-1\.safetensors cannot be found"):
        named(folder, load_format="hf")


MISTRAL = {
    "dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 300, "rope_theta": 10000.0, "max_position_embeddings": 2048,
}  # fmt: skip


def widened(config: Any) -> Any:
    config.update({"rope_theta": 20000.0})
    return config


def test_the_config_that_vllm_runs_names_its_kv(folder: Path, tmp_path: Path) -> None:
    """Wherever it comes from; as it is parsed, since loading a model changes what vLLM holds in that process."""
    model, other = shutil.copytree(make_family("llama", tmp_path), tmp_path / "m"), tmp_path / "config"
    plain, seen = fingerprint_folder(model), set[str]()
    other.mkdir()
    fields = json.loads((model / "config.json").read_text())
    for theta in (1e4, 2e4):
        text = json.dumps(fields | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}})
        (other / "config.json").write_text(text)
        seen.add(named(model, hf_config_path=str(other)))
    seen |= {named(model, hf_overrides=widened), named(model, hf_overrides=lambda config: config)}
    assert len(seen | {plain}) == 4  # what changes nothing is the first of these
    loaded = SimpleNamespace(intermediate_size=512, to_dict=lambda: {"rope_type": "deepseek_yarn"})
    assert named(model, hf_overrides=lambda config: config, hf_config=loaded) in seen  # an address is no name
    assert named(model, hf_config_path=str(model)) == plain == named(model, config_format="hf", hf_config=loaded)
    # Mistral's own files, beside which there need be no others
    (model / "params.json").write_text(json.dumps(MISTRAL))
    assert named(model) == plain  # only beside Mistral's weights
    (own := tmp_path / "own").mkdir()
    save_file({"w": torch.arange(50)}, own / "consolidated.safetensors")
    for theta in (1e4, 2e4):
        (own / "params.json").write_text(json.dumps(MISTRAL | {"rope_theta": theta}))
        seen |= {named(own), named(own, config_format="mistral", load_format="mistral")}
    assert len(seen) == 5


def test_how_vllm_quantises_names_its_kv_and_the_order_of_settings_does_not(folder: Path, tmp_path: Path) -> None:
    seen = {named(folder)} | {named(folder, quantization_config={"linear": bits}) for bits in ("int8", "fp8")}
    assert len(seen) == 3
    one = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "sliding_window": 8}
    other = {"sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert named(folder, hf_overrides=one) == named(folder, hf_overrides=other) not in seen
    file = tmp_path / "quantize.json"
    for content in ("{}", '{"bits": 4}'):
        file.write_text(content)
        seen.add(named(folder, hf_overrides={"quantization_config_file": str(file)}))
    assert named(folder, hf_overrides={"quantization_config_file": None}) not in seen  # vLLM reads none then
    for content in ("{}", '{"bits": 4}'):
        (folder / "hf_quant_config.json").write_text(content)  # which vLLM reads beside config.json
        seen.add(named(folder))
    assert len(seen) == 7


def test_a_name_of_the_hub_is_looked_for_where_vllm_downloads_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "hub" / "models--org--m"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    (kept / "snapshots").mkdir()
    folder.rename(kept / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    found = identify(config_of("org/m", download_dir=str(tmp_path / "hub")), None)
    assert found.name == "m" and found.folder is not None
    with pytest.raises(InvalidInputError, match="`hf download org/m"):
        identify(config_of("org/m", download_dir=str(tmp_path / "other")), None)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(InvalidInputError, match=r"ModelScope .* give vLLM the folder"):
        identify(config_of("org/m", download_dir=str(tmp_path / "hub")), None)


def test_files_that_are_written_to_while_vllm_loads_them_end_the_start(folder: Path) -> None:
    config = config_of(str(folder))
    weight_loader.check_files(config, folder)  # nothing was loaded in this process
    weight_loader._note_files(config)
    weight_loader.check_files(config, folder)
    weight_loader._note_files(config)
    save_file({"w": torch.arange(50)}, folder / "fetched.safetensors")  # by vLLM itself
    weight_loader.check_files(config, folder)
    weight_loader._note_files(config)
    save_file({"w": torch.arange(50) + 1}, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(InvalidInputError, match=r"model\.safetensors in .* was changed while vLLM loaded .*; restart"):
        weight_loader.check_files(config, folder)
    weight_loader._note_files(config)
    with pytest.raises(InvalidInputError, match=r"is .*later now, and was .*model when .*; .*--revision set"):
        weight_loader.check_files(config, folder.with_name("later"))  # as `main` of the hub moves on


# ---- weights that are replaced -------------------------------------------------------------------------------------


@pytest.mark.may_fail("other weights")
@pytest.mark.parametrize(
    ("is_copy", "engine", "beside"),
    [(False, {}, None), (False, TWO_RANKS, None), (False, {}, [None]), (True, {}, None)],
    ids=["one rank", "two ranks", "MultiConnector", "files that were copied over themselves"],
)
def test_weights_that_are_replaced_before_the_scheduler_reads_them_name_nothing(
    serve: Serve, models: dict[str, Path], tmp_path: Path, is_copy: bool, engine: dict[str, Any], beside: Any
) -> None:
    """Answers are those of what was loaded; the same weights are the same."""
    shutil.copytree(models["llama"], tmp_path / "model")
    weights = {
        name: each.flip(0).contiguous() for name, each in load_file(models["llama"] / "model.safetensors").items()
    }
    by = models["llama"] if is_copy else copy_model(models["llama"], tmp_path / "others", weights)
    model, both = serve(tmp_path / "model"), ask(prompts(33, 2, 3, held=3), alone=True)
    steps = [{"replace": [str(model.model), str(by)]}, both, both]
    extra = {"recompute_ratio": 1.0, "min_reused_share": 0.0}
    found = model.run(steps, extra, beside=beside, **engine)
    right = tokens(serve("llama").plain(both))
    assert tokens(found["answers"][1]) == tokens(found["answers"][2]) == right
    kept = [file for part in ("blocks", "manifests") for file in (model.store / part).rglob("*") if file.is_file()]
    captured, requests, fallbacks = (
        found["metrics"].get(f"vllm:cacheblend_{name}", 0)
        for name in ("captured_tokens", "requests", "fallbacks other weights")
    )
    assert bool(kept) == bool(captured) == bool(requests) == is_copy
    assert fallbacks == 0 if is_copy else fallbacks >= 3


@pytest.mark.parametrize("elsewhere", [True, False])
def test_ranks_and_scheduler_name_a_config_from_elsewhere_alike(
    serve: Serve, models: dict[str, Path], tmp_path: Path, elsewhere: bool
) -> None:
    """Each is a process of its own, and a rank's has loaded the model: were names to differ, none would be blended."""
    model = serve(shutil.copytree(models["llama"], tmp_path / "model"))
    (config := tmp_path / "config").mkdir()
    shutil.copy(model.model / "config.json", config)
    options = {"hf_config_path": str(config)} if elsewhere else {"hf_overrides": {"rope_theta": 10000.0}}
    both = ask(prompts(33, 2, 3, held=3), alone=True)
    found = model.run([both, both], {"recompute_ratio": 1.0, "min_reused_share": 0.0}, **TWO_RANKS, **options)
    assert found["metrics"]["vllm:cacheblend_requests"] > 0
    assert not found["metrics"].get("vllm:cacheblend_fallbacks other weights", 0)


@pytest.mark.parametrize(("named", "elsewhere"), [("a", 0), ("b", 0), ("a", 1), ("", 0)])
def test_every_rank_refuses_where_one_does(named: str, elsewhere: int, caplog: pytest.LogCaptureFixture) -> None:
    worker: Any = object.__new__(Worker)
    taken: list[Any] = []
    worker._ranks = SimpleNamespace(agree_each=lambda states: [max(each, elsewhere) for each in states])
    worker.step, worker.close = taken.append, lambda: None
    connector: Any = object.__new__(CacheBlendConnector)
    connector.identity, connector._block_size = SimpleNamespace(weights="a", folder=Path("/m")), 16
    connector._worker, connector._is_compared = worker, False
    prompt = SimpleNamespace(request_id="a", block_ids=[[3, 4]], local_tokens=0)
    jobs: Any = StepJobs(blend=[prompt], capture=[SimpleNamespace()], weights=named)  # type: ignore[list-item]
    connector._connector_metadata = jobs
    with caplog.at_level(logging.ERROR):
        connector.start_load_kv(None)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    if named in ("a", "") and not elsewhere:
        assert taken == [jobs] and connector._worker is worker and not errors
        return
    report = connector.build_connector_worker_meta()
    assert not taken and report.has_other_weights and report.captured == 1
    assert report.outcomes["a"].failure == "other weights"
    assert connector.get_finished(set()) == (None, {"a"}) and connector.get_block_ids_with_load_errors() == {3, 4}
    (record,) = errors
    assert "files in /m were changed" in record.getMessage() and "restart vLLM" in record.getMessage()
    fine = StepReport(3)
    assert fine.aggregate(report).has_other_weights and report.aggregate(fine).has_other_weights  # type: ignore[attr-defined]
    assert not fine.aggregate(fine).has_other_weights  # type: ignore[attr-defined]


@pytest.mark.may_fail("other weights")
def test_the_scheduler_side_leaves_everything_to_vllm_once_it_is_told() -> None:
    store = SlowStore()
    side = scheduling([CHUNK], store, keeps_events=True)
    first = give(side, Request(PROMPT, name="first"))
    assert len(side.take_jobs().blend) == 1
    looked_up = Request([3, *PROMPT], name="looked up")
    side.on_new(looked_up)
    side.take_events()
    told = StepReport(0, {"first": BlendOutcome("other weights")}, has_other_weights=True)
    side.provided(["first"])
    side.reported(told)
    side.reported(told)
    assert [event.__class__.__name__ for event in side.take_events()] == ["BlockRemoved"]
    assert claim(side, looked_up, 0) == 0
    store.asked.clear()
    missing = Request([4, *OTHER, 7, 8], [[1, 101]], name="missing")
    for request in (Request([5, *PROMPT], name="late"), missing):
        assert start(side, request) == 0
        side.allocated(request, [[1] * 9], 0)
        request.num_output_tokens = 1
        assert why(side, request) == "other weights"
    assert why(side, first) == "other weights"
    assert not side.take_jobs().capture and not store.asked and not side.is_busy
    assert side.counts.take().data["fallbacks"] == {"other weights": 3}
    side.reported(reported("first", "slow store"))
    assert side._why_paused == "other weights"  # for ever


# ---- memory that is taken of a GPU while vLLM loads and profiles; PyTorch's device `meta` stands in for it ---------

OTHERS: dict[str, Any] = {"kv_connector": "OtherConnector", "kv_connector_extra_config": {"a": 1}}
TIER = "cuda://?max_bytes=5MiB, file:///kv"


def ours(store: str = "/kv", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "CacheBlendConnector", "kv_connector_extra_config": {"store": store, **extra}}


def several(*connectors: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}


def reserve(connector: dict[str, Any] | None, device: str = "meta") -> nn.Module:
    """What was taken belongs to what is returned."""
    attention = nn.Module()
    weight_loader._reserve(attention, config_of(connector=connector, dtype=torch.bfloat16), torch.device(device))
    return attention


def reserved(connector: dict[str, Any] | None, device: str = "meta") -> int:
    weight_loader.release_reserved()
    _ = reserve(connector, device)
    taken = weight_loader.release_reserved()
    assert weight_loader.release_reserved() == 0
    return taken


def test_all_that_blending_needs_is_taken_until_the_connector_starts() -> None:
    sizes = decoder.model_sizes(config_of(connector=ours(), dtype=torch.bfloat16), torch.device("meta"), {})
    assert sizes == ModelSizes(6, 256, 256, 256, 128, 32, 2, 1000, 128)
    assert reserved(ours()) == workspace_of(sizes).total > 0
    assert reserved(ours(shadow=0.1)) == workspace_of(replace(sizes, checked_vocab=2048)).total > reserved(ours())
    for nbytes in (0, 12345):  # the setting decides
        assert reserved(ours(workspace_bytes=nbytes)) == nbytes
    # Nothing on a CPU or for other connectors; ours is found among several.
    assert reserved(ours(), device="cpu") == reserved(OTHERS) == reserved(None) == reserved(several(OTHERS)) == 0
    assert reserved(several(OTHERS, ours())) == reserved(ours())
    # Records that the device keeps are taken as well, whatever is set for blending: they lie there all the time.
    for extra in ({}, {"workspace_bytes": 0}, {"workspace_bytes": 12345}):
        assert reserved(ours(TIER, **extra)) == reserved(ours(**extra)) + (5 << 20)


def test_nothing_is_taken_where_everything_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_loader.interface, "refusals", lambda config: ["sleep mode"])
    assert reserved(ours(TIER, on_unblendable="plain")) == 0 < reserved(ours(TIER))


def test_what_was_taken_for_records_goes_back_to_the_device_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    for to_device, times in ((False, 0), (True, 1)):
        _ = reserve(ours())
        assert weight_loader.release_reserved(to_device=to_device) > 0 and len(emptied) == times
    assert weight_loader.release_reserved(to_device=True) == 0 and len(emptied) == 1  # on a CPU nothing was taken


@pytest.mark.parametrize(
    ("store", "device", "message"),
    [
        (TIER, "cpu", "on a CPU: leave cuda:// out"),
        ("cuda://1?max_bytes=5MiB, file:///kv", "meta", "names the GPU 1"),
        ("cuda://, file:///kv", "meta", "needs a bound"),
        ("cuda://?max_bytes=5MiB", "meta", "nothing behind"),
        ("/kv", "full", "set workspace_bytes, max_model_len or"),
        ("cuda://?max_bytes=500GiB, file:///kv", "full", r"500.00 GiB of it for stored records.*max_bytes of cuda://"),
    ],
)
def test_a_tier_that_cannot_be_and_a_gpu_that_is_full_are_refused_with_a_way_out(
    store: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if device == "full":
        device = "meta"
        monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(InvalidInputError, match=message):
        reserved(ours(store), device)


# ---- vLLM's own parser reads the command lines of deploy/, and makes of them what they say -------------------------


def check_command(arguments: list[str]) -> None:
    cli = pytest.importorskip("vllm.entrypoints.launchers.cli_args", reason="vLLM 0.32 has its parser there")
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")
    parsed = cli.make_arg_parser(argparse_utils.FlexibleArgumentParser()).parse_args(arguments)
    transfer = parsed.kv_transfer_config
    assert transfer.kv_connector == "CacheBlendConnector" and transfer.kv_role == "kv_both"
    assert transfer.kv_connector_extra_config["store"].startswith(("file://", "memory://"))
    assert parsed.served_model_name == ["served"] and parsed.enable_prefix_caching


@needs_kubectl
def test_the_overlay() -> None:
    check_command(containers(rendered("overlays/vllm"))["server"].args)


def test_the_charts_values() -> None:
    values = yaml.safe_load((DEPLOY / "kubernetes/production-stack.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    arguments = [each.replace("$(POD_IP)", "10.0.0.1") for each in model["vllmConfig"]["extraArgs"]]
    check_command(["--model", model["modelURL"], "--enable-prefix-caching", *arguments])
