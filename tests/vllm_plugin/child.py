"""Runs vLLM in a process of its own, since one process holds one engine: `python child.py JOB.json`.

The job is `{"model", "engine", "extra", "steps"}`; `extra` null leaves the connector out. A step asks prompts, or does
one of the other things below. What comes out is written beside the job, as `JOB.json.out`.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

MODULE = "cacheblend.engines.vllm"
DEFAULTS = {"controller": False, "allow_untested_version": True, "lookup_timeout_s": 30.0}
"""The controller decides by times; these tests decide which versions are claimed; the machine may be busy."""

LABELS = ("source", "reason", "direction", "tenant", "selector", "settings", "agreed", "of")


def main(path: Path) -> None:
    job = json.loads(path.read_text())
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
    }
    options |= job["engine"]
    if job["extra"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": DEFAULTS | job["extra"],
        }
    llm = LLM(model=job["model"], **options)
    answers = [step(llm, each) for each in job["steps"]]
    Path(f"{path}.out").write_text(json.dumps({"answers": answers, "metrics": counters(llm)}))


def counters(llm: Any) -> dict[str, float]:
    """The plug-in's counters and gauges, sums and counts of its histograms, and vLLM's preemptions, since the start."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if "cacheblend" not in metric.name and "preemptions" not in metric.name:
            continue
        labels = " ".join(metric.labels[name] for name in LABELS if name in metric.labels)
        named = {"": metric.value} if hasattr(metric, "value") else {"_sum": metric.sum, "_count": metric.count}
        found |= {f"{metric.name}{end} {labels}".strip(): value for end, value in named.items()}
    return found


def step(llm: Any, what: dict[str, Any]) -> Any:
    """Asks (all prompts at once, or one by one), counts, calls the workers, removes a folder, empties a cache."""
    if "count" in what:
        return counters(llm)
    if "forget" in what:
        llm.reset_prefix_cache(reset_connector=what["forget"] == "connector")
        return None
    if "rpc" in what:
        method, *arguments = what["rpc"]
        return llm.collective_rpc(method, args=tuple(arguments))
    if {"begin", "abort", "until"} & set(what):
        return one_request(llm.llm_engine, what)
    if "remove" in what:
        shutil.rmtree(what["remove"])
        return None
    prompts = what["ask"]
    chunks = what.get("chunks") or [None] * len(prompts)
    batches = [[i] for i in range(len(prompts))] if what.get("alone") else [list(range(len(prompts)))]
    found: list[Any] = []
    sampling, salt = what.get("sampling", {}), what.get("salt")
    for batch in batches:
        answers = ask(llm, [prompts[i] for i in batch], [chunks[i] for i in batch], sampling, salt, what.get("options"))
        began = time.monotonic()
        finish_captures(llm)
        found += [{**answer, "captured_in_s": time.monotonic() - began} for answer in answers]
    return found


def one_request(engine: Any, what: dict[str, Any]) -> Any:
    """Begins or aborts a request; or makes steps until it has its answer, or as many as `steps` says.

    Returns:
        Of the steps: the answer, None if it is not there yet, and how many steps it took.
    """
    from vllm import SamplingParams

    if "begin" in what:
        settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | what.get("sampling", {})
        extra = {"kv_transfer_params": {"cacheblend": {"chunks": what.get("chunks", [])}}}
        engine.add_request(
            what["begin"], {"prompt_token_ids": what["ids"]}, SamplingParams(**settings, extra_args=extra)
        )
        return None
    if "abort" in what:
        engine.abort_request([what["abort"]])
        return None
    for number in range(what.get("steps", 1_000_000)):
        for output in engine.step():
            if output.request_id == what["until"] and output.finished:
                return {"tokens": [list(one.token_ids) for one in output.outputs], "steps": number + 1}
    return {"tokens": None, "steps": what["steps"]}


def ask(
    llm: Any,
    prompts: list[list[int]],
    chunks: list[Any],
    sampling: dict[str, Any],
    salt: str | None,
    options: dict[str, Any] | None = None,
) -> list[Any]:
    """Answers of these prompts; `options` are of the requests, beside their chunks."""
    from vllm import SamplingParams

    settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False} | sampling
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
    outputs = llm.generate([{"prompt_token_ids": ids, **salted} for ids in prompts], params, use_tqdm=False)
    return [
        {
            "tokens": [list(one.token_ids) for one in output.outputs],
            "cached": output.num_cached_tokens,
            "logprobs": [_logprobs(one) for one in output.outputs],
        }
        for output in outputs
    ]


def _logprobs(answer: Any) -> list[dict[str, float]]:
    """Of each of its tokens, by token id; none were asked for: none."""
    return [{str(token): found.logprob for token, found in each.items()} for each in answer.logprobs or []]


def finish_captures(llm: Any) -> None:
    """Until the store has what was missed; the engine's own process does so by itself, this one has to be told."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    while connector is not None and connector.has_pending_push_work():
        llm.llm_engine.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
