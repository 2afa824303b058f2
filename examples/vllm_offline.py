"""LongBench's rows through vLLM in one process, plain and blended: answers, times to first token, and how they compare.

python examples/vllm_offline.py --model FOLDER --data longbench.jsonl --store /tmp/store [--rows 20] [--ratio 0.15]
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams

from cacheblend.data import read_questions
from cacheblend.engines.tokens import PromptBuilder


def main() -> None:
    """Answers each row plain and blended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="any format that `cacheblend evaluate` reads")
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()

    llm = LLM(
        model=arguments.model,
        kv_transfer_config={
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": "cacheblend.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": f"file://{arguments.store.resolve()}",
                "recompute_ratio": arguments.ratio,
            },
        },
    )
    builder = PromptBuilder(llm.get_tokenizer())
    limit = llm.llm_engine.model_config.max_model_len - arguments.max_tokens
    times: dict[str, list[float]] = {"plain": [], "blended": []}
    same = asked = 0
    for row in read_questions(arguments.data)[: arguments.rows]:
        ids, spans = prompt_of(builder, row)
        if len(ids) > limit:
            print(f"skipped: {len(ids)} tokens are over the model's {limit}")
            continue
        ask(llm, ids, spans, 1)
        finish_storing(llm)
        answers = {}
        for method, chunks in (("plain", []), ("blended", spans)):
            llm.reset_prefix_cache()
            started = time.perf_counter()
            ask(llm, ids, chunks, 1)
            times[method].append(time.perf_counter() - started)
            answers[method] = ask(llm, ids, chunks, arguments.max_tokens)
        asked += 1
        same += answers["plain"] == answers["blended"]
        print(f"plain   {times['plain'][-1]:.3f} s  {answers['plain']!r}")
        print(f"blended {times['blended'][-1]:.3f} s  {answers['blended']!r}\n")
    if asked:
        plain, blended = (statistics.median(times[method]) for method in ("plain", "blended"))
        print(
            f"{asked} rows, {same} with the same answer; time to first token {plain:.3f} s plain, {blended:.3f} blended"
        )


def finish_storing(llm: LLM) -> None:
    """Until the passages are stored: a server goes on by itself, an engine in this process while it is asked to."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    while connector.has_pending_push_work():
        llm.llm_engine.step()


def prompt_of(builder: PromptBuilder, row: Any) -> tuple[list[int], list[list[int]]]:
    """Token ids of passages and question, and the passages' spans."""
    ids: list[int] = [] if builder.bos_id is None else [builder.bos_id]
    spans = []
    for passage in row.passages:
        inside = builder.encode(passage.text)
        spans.append([len(ids), len(ids) + len(inside)])
        ids += inside + builder.encode("\n\n")
    return ids + builder.encode(row.question), spans


def ask(llm: LLM, ids: list[int], chunks: list[list[int]], tokens: int) -> str:
    """A greedy answer; a request without chunks is a plain one."""
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        extra_args={"kv_transfer_params": {"cacheblend": {"chunks": chunks}}},
    )
    return llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0].text


if __name__ == "__main__":
    main()
