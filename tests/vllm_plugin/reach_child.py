"""A program of `nursery.py`: runs a family of models in vLLM, alone and with the connector.

The job is `{"model", "engine", "prompts", "chunks", "ratio", "extra"}`; what came out is written beside it, as
`JOB.json.out`.
"""

import gc
import json
import traceback
from pathlib import Path
from typing import Any

from child import DEFAULTS, MODULE, ask, counters

ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "distributed_executor_backend": "uni",
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 128 << 20,
}
SAMPLING = {"max_tokens": 4, "logprobs": 4}


def main(path: Path) -> None:
    family = json.loads(path.read_text())
    try:
        found = run(family)
    except Exception as error:
        found = {"error": _innermost(error), "trace": traceback.format_exc()[-3000:]}
    Path(f"{path}.out").write_text(json.dumps(found))


def run(family: dict[str, Any]) -> dict[str, Any]:
    """Answers of vLLM alone; then with the connector: the first time, blended, and of plain requests beside them."""
    ids, chunks = family["prompts"], family["chunks"]
    nothing = [None] * len(ids)
    alone = _answered(family, None, lambda llm: ask(llm, ids, nothing, SAMPLING, None))

    def blended(llm: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for ratio in (1.0, family["ratio"]):
            options = {"recompute_ratio": ratio}
            for time_ in ("first", "again"):
                llm.reset_prefix_cache()
                found[f"{time_} at {ratio}"] = [
                    ask(llm, [one], [spans], SAMPLING, None, options)[0] for one, spans in zip(ids, chunks, strict=True)
                ]
                finish(llm)
            mixed = ask(llm, [*ids, *ids], [*chunks, *([[]] * len(ids))], SAMPLING, None, options)
            found[f"plain at {ratio}"] = mixed[len(ids) :]
        return found | {"metrics": counters(llm)}

    return {"alone": alone, **_answered(family, {"store": "memory", **family["extra"]}, blended)}


def finish(llm: Any) -> None:
    from child import finish_captures

    finish_captures(llm)


def _answered(family: dict[str, Any], extra: dict[str, Any] | None, use: Any) -> Any:
    from child import latents_in
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    options = {**ENGINE, **latents_in(ENGINE), **family.get("engine", {})}
    if extra is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": DEFAULTS | extra,
        }
    llm = None
    try:
        llm = LLM(model=family["model"], **options)
        return use(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()  # of one that did not start
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
