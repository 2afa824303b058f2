"""A program of `nursery.py`: runs vLLM in a process of its own, since one process holds one engine.

The job is `{"model", "engine", "extra", "steps", "beside"}`; `extra` null leaves the connector out, `beside` null
leaves it alone, else it lists the connectors of a `MultiConnector`, null for ours; see `step`. What comes out is
written beside the job, as `JOB.json.out`.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np

import vision

DEFAULTS = {"controller": False, "allow_untested_version": True, "lookup_timeout_s": 30.0, "read_timeout_s": 60.0}
"""The controller decides by times; these tests decide which versions are claimed; the machine may be busy."""

LABELS = ("source", "reason", "direction", "tenant", "selector", "settings", "agreed", "of")


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    sees = "image" in job["engine"].get("limit_mm_per_prompt", {})
    if sees:
        vision.make_importable()
    import torch
    from vllm import LLM, ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

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
    options |= job["engine"]
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    if has_amx and options["dtype"] == "float32" and hasattr(AttentionBackendEnum, "AMX_MLA"):
        options.setdefault("attention_backend", "CPU_MLA")  # vLLM prefers one for latents that takes no float32
    if sees:  # vLLM looks at classes that are not imported yet in another process
        for name in json.loads(Path(job["model"], "config.json").read_text())["architectures"]:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    if job["extra"] is not None:
        mine = {
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": "cacheblend.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**DEFAULTS, **job["extra"]},
        }
        options["kv_transfer_config"] = mine
        if job["beside"] is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [each or mine for each in job["beside"]]},
            }
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
    """Asks prompts, or does one of the other things."""
    engine = llm.llm_engine
    match what:
        case {"ask": _}:
            return ask(llm, what)
        case {"count": _}:
            return counters(llm)
        case {"cache": _}:
            return kv_cache(llm)
        case {"embed": prompts}:
            return [one.outputs.embedding for one in llm.embed([{"prompt_token_ids": ids} for ids in prompts])]
        case {"forget": how}:
            llm.reset_prefix_cache(reset_connector=how == "connector")
        case {"rpc": [method, *arguments]}:
            return llm.collective_rpc(method, args=tuple(arguments))
        case {"begin": name}:
            given, params = {"prompt_token_ids": what["ids"]}, sampling(what, what.get("chunks", []))
            engine.add_request(name, given, params, lora_request=adapter(what.get("adapter")))
        case {"abort": name}:
            engine.abort_request([name])
        case {"until": name}:
            return until(engine, name, what.get("steps", 1_000_000), what.get("tokens", 1_000_000))
        case {"load": named}:
            return engine.add_lora(adapter(named))
        case {"copy": [source, target]}:
            shutil.copytree(source, target, dirs_exist_ok=True)
        case {"remove": folder}:
            shutil.rmtree(folder)
    return None


def until(engine: Any, name: str, steps: int, most: int) -> dict[str, Any]:
    """Makes steps until a request has its answer or so many tokens of it.

    Returns:
        The answer, None if it is not there yet, and how many steps it took.
    """
    for number in range(steps):
        for output in engine.step():
            if output.request_id == name and (output.finished or len(output.outputs[0].token_ids) >= most):
                return {"tokens": [list(one.token_ids) for one in output.outputs], "steps": number + 1}
    return {"tokens": None, "steps": steps}


def ask(llm: Any, what: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of these prompts, which are asked at once, or one by one if they are to be `alone`.

    Beside each prompt there may be the spans of its `chunks`, an adapter, and seeds of its sounds or images; for all of
    them settings of the sampling, a salt, and `options` of the plug-in.
    """
    asked = list[tuple[Any, ...]]()
    for number, ids in enumerate(what["ask"]):
        given: dict[str, Any] = {"prompt_token_ids": ids}
        if "salt" in what:
            given["cache_salt"] = what["salt"]
        items = {kind: [draw(seed) for seed in what[kind][number]] for kind, draw in ITEMS.items() if kind in what}
        if any(items.values()):
            given["multi_modal_data"] = items
        spans, adapters = what.get("chunks"), what.get("adapters")
        params = sampling(what, spans[number] if spans else None)
        asked.append((given, params, adapter(adapters[number]) if adapters else None))
    found = []
    for batch in [[one] for one in asked] if what.get("alone") else [asked]:
        prompts, params, adapters = map(list, zip(*batch, strict=True))
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        began = time.monotonic()
        finish_captures(llm)
        found += [
            {
                "tokens": [list(one.token_ids) for one in output.outputs],
                "cached": output.num_cached_tokens,
                "logprobs": [
                    [{str(token): given.logprob for token, given in each.items()} for each in one.logprobs or []]
                    for one in output.outputs
                ],
                "captured_in_s": time.monotonic() - began,
            }
            for output in outputs
        ]
    return found


def sampling(what: dict[str, Any], spans: Any) -> Any:
    """vLLM's `SamplingParams`: greedy, if nothing else is said."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False} | what.get("sampling", {})
    if structured := settings.pop("structured", None):
        settings["structured_outputs"] = StructuredOutputsParams(**structured)
    mine = ({} if spans is None else {"chunks": spans}) | what.get("options", {})
    return SamplingParams(**settings, extra_args={"kv_transfer_params": {"cacheblend": mine}} if mine else None)


def adapter(named: dict[str, Any] | None) -> Any:
    """vLLM's `LoRARequest` of {"name", "number", "path"}; None: none."""
    if named is None:
        return None
    from vllm.lora.request import LoRARequest

    fields = {"load_inplace": named["inplace"]} if "inplace" in named else {}
    return LoRARequest(named["name"], named["number"], named["path"], **fields)


def _sound(seed: int) -> Any:
    """A fifth of a second of noise."""
    return np.random.default_rng(seed).standard_normal(3200).astype("float32"), 16000


def _image(seed: int) -> Any:
    """56 x 56 pixels of noise."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype="uint8"))


ITEMS = {"audio": _sound, "image": _image}


def finish_captures(llm: Any) -> None:
    """Until the store has what was missed; the engine's own process does so by itself, this one has to be told."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    while connector is not None and connector.has_pending_push_work():
        llm.llm_engine.step()
