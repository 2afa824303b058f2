"""Families of decoders in vLLM, end to end: its own answers at r = 1, the dense oracle's at r = 0.2, plain beside them.

What came of each is noted, and printed at the end of the run.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_table
from campaign import rotating
from families import VOCAB
from vllm_families import ENGINES, REACH, write_model
from vllm_running import FORGET, Texts, Vllm, ask, check_blended, check_oracle, close

RATIO = 0.2

NOT_RUN = {"minimax_m2": ("AssertionError", "has no sigmoid routing; it blends in the embedded engine")}
"""Families that vLLM's CPU build does not run: its error, which has no words, and what is missing."""

WITHOUT_ORACLE = {
    "apertus": "vLLM's activation differs from transformers' by 0.003 in log-probabilities",
    "cohere2": "vLLM's own answers are not those of transformers beyond a window",
}
"""Families that vLLM alone computes otherwise than transformers, which the oracle runs: only r = 1 is checked."""

KINDS = ("llama", "mistral-window", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v2", "phi", "minimax_m2")
"""Those that every run draws: full attention, a window, experts, a soft-cap, windows in every other layer with sinks,
latent attention, layers in parallel, and one that vLLM does not run."""


ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
}


@pytest.mark.parametrize("name", rotating(REACH, KINDS))
def test_a_family_answers_as_vllm_at_one_and_as_the_oracle_below(
    vllm: Vllm, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    note = partial(record_property, "reach")
    texts = Texts(REACH.index(name), VOCAB)
    passages = texts.passages(3, 70, 90)
    asked = [texts.prompt(passages, front=9), texts.prompt(passages[::-1], front=9)]
    model, engine = write_model(name, tmp_path), ENGINE | ENGINES.get(name, {})
    told: dict[str, Any] = {"sampling": {"max_tokens": 4, "logprobs": 4}}
    alone = vllm.start(model, [ask(asked, chunks=None, **told)], None, **engine)
    if name in NOT_RUN:
        error, reason = NOT_RUN[name]
        assert error in alone["words"]
        note([name, vllm_table.NOT_RUN, f"vLLM's CPU build {reason} ({error})"])
        return
    steps: list[dict[str, Any]] = []
    for ratio in (1.0, RATIO):
        told["options"] = {"recompute_ratio": ratio}
        beside = ask([*asked, *asked], **told)  # the same as plain requests
        beside["chunks"][2:] = [[], []]
        steps += [FORGET, ask(asked, alone=True, **told)] * 2 + [beside]
    try:
        result = vllm.run(model, steps, {"store": "memory", "check_layers": [1]}, **engine)
        answers = result["answers"]
        for given in (answers[1], answers[3], answers[4][2:], answers[9][2:]):
            close(given, alone["answers"][0])
        check_blended(result, 3 * len(asked))
        if name not in WITHOUT_ORACLE:
            oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            if getattr(oracle.config, "attn_logit_softcapping", None):
                oracle.set_attn_implementation("eager")  # SDPA drops the soft-cap
            assert check_oracle(oracle, asked, answers[8]) < len(asked)
    except BaseException:
        note([name, vllm_table.FAILS, "answers"])
        raise
    note([name, "blends", WITHOUT_ORACLE.get(name, "")])
