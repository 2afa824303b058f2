"""A program of `nursery.py`: runs vLLM in a process of its own, since one process holds one engine.

The job is `{"model", "engine", "extra", "steps", "beside"}`; `extra` null leaves the connector out, `beside` null
leaves it alone, else it lists the connectors of a `MultiConnector`, null for ours. A step asks prompts, or does one of
the other things below. What comes out is written beside the job, as `JOB.json.out`.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import vision

MODULE = "cacheblend.engines.vllm"
DEFAULTS = {"controller": False, "allow_untested_version": True, "lookup_timeout_s": 30.0, "read_timeout_s": 60.0}
"""The controller decides by times; these tests decide which versions are claimed; the machine may be busy."""

LABELS = ("source", "reason", "direction", "tenant", "selector", "settings", "agreed", "of")


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    if "image" in job["engine"].get("limit_mm_per_prompt", {}):
        see(job["model"])
    from vllm import LLM

    from cacheblend.engines.vllm.scheduler import capture_queue

    capture_queue.STUCK_S = 300.0  # the machine may be busy, and the next step relies on what was captured
    options: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": 128 << 20,
    }
    options = {**options, **latents_in(options | job["engine"]), **job["engine"]}
    if job["extra"] is not None:
        options["kv_transfer_config"] = connectors({**DEFAULTS, **job["extra"]}, job["beside"])
    for each in job["steps"]:
        if "replace" in each:
            replace_late(*each["replace"])
    llm = LLM(model=job["model"], **options)
    answers = [step(llm, each) for each in job["steps"]]
    Path(f"{path}.out").write_text(json.dumps({"answers": answers, "metrics": counters(llm)}))


def replace_late(model: str, by: str) -> None:
    """A model's files are replaced by another one's when the workers are ready, and the scheduler's side is not.

    Sizes and times of writing stay.
    """
    from cacheblend.engines.vllm.connector import CacheBlendConnector
    from cacheblend.engines.vllm.internals import interface

    real = CacheBlendConnector.__init__

    def init(self: CacheBlendConnector, vllm_config: Any, role: Any, *rest: Any, **named: Any) -> None:
        if role == interface.KVConnectorRole.SCHEDULER:
            for file in Path(by).glob("*.safetensors"):
                target = Path(model, file.name)
                before = target.stat()
                assert file.stat().st_size == before.st_size
                shutil.copyfile(file, target)
                os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        real(self, vllm_config, role, *rest, **named)

    CacheBlendConnector.__init__ = init  # type: ignore[method-assign]


def latents_in(options: dict[str, Any]) -> dict[str, Any]:
    """Options for latent attention: where there is AMX, vLLM prefers a backend for it that takes no float32."""
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    is_needed = has_amx and options["dtype"] == "float32" and hasattr(AttentionBackendEnum, "AMX_MLA")
    return {"attention_backend": "CPU_MLA"} if is_needed else {}


def see(model: str) -> None:
    """Lets this process run a vision model; vLLM looks at classes that are not imported yet in another process."""
    vision.make_importable()
    from vllm import ModelRegistry

    for name in json.loads(Path(model, "config.json").read_text())["architectures"]:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def connectors(extra: dict[str, Any], beside: list[Any] | None) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`."""
    mine = {
        "kv_connector": "CacheBlendConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    if beside is None:
        return mine
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [mine if other is None else other for other in beside]},
    }


def counters(llm: Any) -> dict[str, float]:
    """The plug-in's counters and gauges, sums and counts of its histograms, and vLLM's preemptions and drafts."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not any(name in metric.name for name in ("cacheblend", "preemptions", "spec_decode")):
            continue
        if hasattr(metric, "values"):  # one for each place of a draft
            continue
        labels = " ".join(metric.labels[name] for name in LABELS if name in metric.labels)
        named = {"": metric.value} if hasattr(metric, "value") else {"_sum": metric.sum, "_count": metric.count}
        found |= {f"{metric.name}{end} {labels}".strip(): value for end, value in named.items()}
    return found


def kv_cache(llm: Any) -> dict[str, Any]:
    """Groups of vLLM's KV cache, and what requests hold of it now; the engine runs in this process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config, manager = scheduler.kv_cache_config, scheduler.kv_cache_manager
    used = config.num_blocks - 1 - manager.block_pool.get_num_free_blocks()  # the null block is nobody's
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    parts = [layer.kv_cache.untyped_storage() for layer in layers if hasattr(layer, "kv_cache")]  # groups share them
    block_bytes = sum({part.data_ptr(): part.nbytes() for part in parts}.values()) // config.num_blocks
    return {"groups": len(config.kv_cache_groups), "blocks": used, "bytes": used * block_bytes}


def step(llm: Any, what: dict[str, Any]) -> Any:
    """Asks (all prompts at once, or one by one), counts, calls the workers, removes a folder, empties a cache."""
    if "count" in what:
        return counters(llm)
    if "embed" in what:
        return [one.outputs.embedding for one in llm.embed([{"prompt_token_ids": ids} for ids in what["embed"]])]
    if "cache" in what:
        return kv_cache(llm)
    if "replace" in what:
        return None  # it was done at the start
    if "forget" in what:
        llm.reset_prefix_cache(reset_connector=what["forget"] == "connector")
        return None
    if "rpc" in what:
        method, *arguments = what["rpc"]
        return llm.collective_rpc(method, args=tuple(arguments))
    if {"begin", "abort", "until"} & set(what):
        return one_request(llm.llm_engine, what)
    if "copy" in what:
        source, target = what["copy"]
        shutil.copytree(source, target, dirs_exist_ok=True)
        return None
    if "load" in what:
        return llm.llm_engine.add_lora(adapter(what["load"]))
    if "remove" in what:
        shutil.rmtree(what["remove"])
        return None
    prompts = what["ask"]
    chunks = what.get("chunks") or [None] * len(prompts)
    batches = [[i] for i in range(len(prompts))] if what.get("alone") else [list(range(len(prompts)))]
    found: list[Any] = []
    sampling, salt = what.get("sampling", {}), what.get("salt")
    adapters = [adapter(named) for named in what.get("adapters") or [None] * len(prompts)]
    for batch in batches:
        shown = [{kind: what[kind][i] for kind in ITEMS if kind in what} for i in batch]
        mine, own = ([prompts[i] for i in batch], [chunks[i] for i in batch]), [adapters[i] for i in batch]
        answers = ask(llm, *mine, sampling, salt, what.get("options"), own, shown)
        began = time.monotonic()
        finish_captures(llm)
        found += [{**answer, "captured_in_s": time.monotonic() - began} for answer in answers]
    return found


def one_request(engine: Any, what: dict[str, Any]) -> Any:
    """Begins or aborts a request; or makes steps until it has its answer or `tokens` of it, or as many as `steps`.

    Returns:
        Of the steps: the answer, None if it is not there yet, and how many steps it took.
    """
    from vllm import SamplingParams

    if "begin" in what:
        settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | what.get("sampling", {})
        extra = {"kv_transfer_params": {"cacheblend": {"chunks": what.get("chunks", [])}}}
        given, params = {"prompt_token_ids": what["ids"]}, SamplingParams(**settings, extra_args=extra)
        engine.add_request(what["begin"], given, params, lora_request=adapter(what.get("adapter")))
        return None
    if "abort" in what:
        engine.abort_request([what["abort"]])
        return None
    for number in range(what.get("steps", 1_000_000)):
        for output in engine.step():
            if output.request_id != what["until"]:
                continue
            if output.finished or len(output.outputs[0].token_ids) >= what.get("tokens", 1_000_000):
                return {"tokens": [list(one.token_ids) for one in output.outputs], "steps": number + 1}
    return {"tokens": None, "steps": what["steps"]}


def ask(
    llm: Any,
    prompts: list[list[int]],
    chunks: list[Any],
    sampling: dict[str, Any],
    salt: str | None,
    options: dict[str, Any] | None = None,
    adapters: list[Any] | None = None,
    shown: list[dict[str, list[int]]] | None = None,
) -> list[Any]:
    """Answers of these prompts; `options` are of the requests, beside their chunks; `shown`: seeds of
    each one's sounds or images."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
    if structured := settings.pop("structured", None):
        settings["structured_outputs"] = StructuredOutputsParams(**structured)
    params = [
        SamplingParams(
            **settings,
            extra_args=None
            if spans is None and not options
            else {"kv_transfer_params": {"cacheblend": ({} if spans is None else {"chunks": spans}) | (options or {})}},
        )
        for spans in chunks
    ]
    salted = {} if salt is None else {"cache_salt": salt}
    asked: list[Any] = [{"prompt_token_ids": ids, **salted} for ids in prompts]
    for one, items in zip(asked, shown or [], strict=False):
        if any(items.values()):
            one["multi_modal_data"] = {kind: [ITEMS[kind](seed) for seed in seeds] for kind, seeds in items.items()}
    outputs = llm.generate(asked, params, use_tqdm=False, lora_request=adapters)
    return [
        {
            "tokens": [list(one.token_ids) for one in output.outputs],
            "cached": output.num_cached_tokens,
            "logprobs": [_logprobs(one) for one in output.outputs],
        }
        for output in outputs
    ]


def adapter(named: dict[str, Any] | None) -> Any:
    """vLLM's `LoRARequest` of {"name", "number", "path"}; None: none."""
    if named is None:
        return None
    from vllm.lora.request import LoRARequest

    fields = {"load_inplace": named["inplace"]} if "inplace" in named else {}
    return LoRARequest(named["name"], named["number"], named["path"], **fields)


def _sound(seed: int) -> Any:
    """A fifth of a second of noise."""
    import numpy as np

    return np.random.default_rng(seed).standard_normal(3200).astype("float32"), 16000


def _image(seed: int) -> Any:
    """56 x 56 pixels of noise."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype="uint8"))


ITEMS = {"audio": _sound, "image": _image}


def _logprobs(answer: Any) -> list[dict[str, float]]:
    """Of each of its tokens, by token id; none were asked for: none."""
    return [{str(token): found.logprob for token, found in each.items()} for each in answer.logprobs or []]


def finish_captures(llm: Any) -> None:
    """Until the store has what was missed; the engine's own process does so by itself, this one has to be told."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    while connector is not None and connector.has_pending_push_work():
        llm.llm_engine.step()
