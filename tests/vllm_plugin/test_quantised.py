"""The plug-in in unmodified vLLM over quantised weights: layers are vLLM's own, so whatever it quantises is used.

Activations that are quantised (INT8), and bf16, round: a sum in another order puts a number on the other side of a
step, and later layers answer to it. So models have few layers, and log-probabilities are compared; those of full reuse
say how far a wrong answer is.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from quantised import quantised
from vllm_running import Texts, Vllm, ask, check_blended

pytestmark = [
    pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's quantised weights on CPUs need AVX-512"),
]


def apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of the first tokens' log-probabilities that both name; infinite if they name no token."""
    mine, its = found["logprobs"][0][0], expected["logprobs"][0][0]
    both = mine.keys() & its.keys()
    return max((abs(mine[token] - its[token]) for token in both), default=math.inf)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param("int8", marks=pytest.mark.feature("quantised weights, INT8 W8A8 (compressed-tensors)", "blends")),
        pytest.param("gptq", marks=pytest.mark.feature("quantised weights, GPTQ", "blends")),
        pytest.param("awq", marks=pytest.mark.feature("quantised weights, AWQ", "blends")),
    ],
)
def test_at_ratio_one_answers_are_those_of_vllm_with_these_weights(
    vllm: Vllm, models: dict[str, Path], tmp_path: Path, scheme: str
) -> None:
    """Alone, side by side with a plain prompt, and found by content."""
    texts = Texts(51)
    passages = texts.passages(5)
    asked = [texts.prompt(texts.rng.sample(passages, 3), front) for front in (0, 17, 64, 21, 30, 16)]
    beside = texts.ids(150)
    model = quantised(models["llama"], tmp_path / "model", scheme, layers=3)
    takes_float32 = scheme == "int8" and not torch.cpu._is_amx_tile_supported()  # with AMX other kernels serve INT8
    engine = {"dtype": "float32" if takes_float32 else "bfloat16"}
    told: dict[str, Any] = {"sampling": {"max_tokens": 4, "logprobs": 20}}
    ids, spans = [one.ids for one in asked], [one.spans for one in asked]
    both: dict[str, Any] = {"ask": [*ids, beside], **told}
    plain = vllm.run(model, [both], None, **engine)["answers"][0]
    steps = [ask(asked, alone=True, **told), {"forget": True}, {**both, "chunks": [*spans, []]}, {"forget": True}, both]
    steps += [{"forget": True}, ask(asked, options={"recompute_ratio": 0.0}, **told)]
    result = vllm.run(model, steps, {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}, **engine)
    reused = [apart(mine, its) for mine, its in zip(result["answers"][6], plain, strict=False)]
    for at in (0, 2, 4):
        distances = [apart(mine, its) for mine, its in zip(result["answers"][at], plain, strict=False)]
        assert statistics.median(distances) < 0.2 * statistics.median(reused), (distances, reused)
    assert result["answers"][2][-1]["tokens"] == plain[-1]["tokens"]  # the plain one
    check_blended(result, 15)
