"""Parallel engines behind one API server (`--data-parallel-size`), and what is refused of parallelism, by name."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cacheblend.nano import model_path
from lab.servers.vllm_server import ServerSettings, serving
from vllm_requests import refusals
from vllm_running import Served, Texts


@pytest.mark.feature("data parallel 2", "blends")
def test_two_engines_behind_one_server_blend_and_answer_as_without_the_plugin(llama: Served, tmp_path: Path) -> None:
    """Each has a scheduler, workers and a cache of its own, and both the store: what one captures the other blends."""
    texts = Texts(71)
    passages = texts.passages(4)
    first = texts.prompt(passages)
    asked = [texts.prompt(texts.rng.sample(passages, 3), front) for front in range(12, 24)]
    prompts = [first.ids, *(one.ids for one in asked), texts.ids(100)]
    plain = llama.run([{"ask": prompts}], None)["answers"][0]
    right = [answer["tokens"][0] for answer in plain]
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(llama.model)
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0, "refresh_s": 0, "controller": False}
    extra |= {"allow_untested_version": True, "lookup_timeout_s": 30.0}
    options = ("--enforce-eager", "--data-parallel-size", "2")
    with serving(ServerSettings(llama.model, extra, 2048, 512, "float32", options)) as server:

        def ask(at: int) -> list[int]:
            spans = None if at else first.spans
            fields: dict[str, Any] = {} if spans is None else {"kv_transfer_params": {"cacheblend": {"chunks": spans}}}
            answer = server._client.completions.create(
                model="served",
                prompt=prompts[at],
                max_tokens=8,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True, **fields},
            )
            found: list[int] = json.loads(answer.model_dump_json())["choices"][0]["token_ids"]
            return found

        assert ask(0) == right[0]
        server.wait_for_captures(sum(map(len, passages)))
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(1, len(prompts)))) == right[1:]
        counted = {name: n for name, n in server.counters().items() if name.startswith("vllm:cacheblend_requests")}
    engines = [value for name, value in counted.items() if "_total" in name and value]
    assert len(engines) == 2 and sum(engines) >= len(asked), counted


@pytest.mark.feature("pipeline parallel 2, TP 2 x PP 2", "refused by name")
@pytest.mark.parametrize(
    "engine",
    [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}],
    ids=["pipeline", "tensor and pipeline"],
)
def test_pipelines_are_refused_with_the_way_out(engine: dict[str, int]) -> None:
    """vLLM would start four processes before it asks the connector: this asks what the connector asks."""
    (refused,) = refusals(parallel=engine)
    assert "pipeline parallelism" in refused and "--tensor-parallel-size" in refused
