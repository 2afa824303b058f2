"""Families of decoders in vLLM, end to end: its own answers at r = 1, the dense oracle's at r = 0.2, plain beside them.

What came of each is noted, and printed at the end of the run.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_table
from cacheblend.core.select.selectors import Hkvd
from campaign import rotating
from families import VOCAB
from reference import blend
from vllm_families import ENGINES, REACH, write_model
from vllm_running import Asked, Texts, Vllm, needs_vllm

pytestmark = needs_vllm

RATIO = 0.2
CLOSE = 2e-3  # of log-probabilities

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


def asked_of(name: str) -> list[Asked]:
    """Two prompts of the same passages in different order."""
    texts = Texts(REACH.index(name), VOCAB)
    passages = texts.passages(3, 70, 90)
    return [texts.prompt(passages, front=9), texts.prompt(passages[::-1], front=9)]


def reached(name: str, folder: Path, vllm: Vllm) -> dict[str, Any]:
    """What the child says of a family; where vLLM ended the process, vLLM's words."""
    asked, model = asked_of(name), write_model(name, folder)
    prompts, chunks = [one.ids for one in asked], [one.spans for one in asked]
    job, engine = folder / "job.json", ENGINES.get(name, {})
    what = {"model": str(model), "engine": engine, "prompts": prompts, "chunks": chunks, "ratio": RATIO}
    job.write_text(json.dumps({**what, "extra": {"check_layers": [1]}}))
    code, out = vllm.run_program("reach_child", job), Path(f"{job}.out")
    if not out.is_file():
        return {"error": f"vLLM ended with {code}: {Path(f'{job}.words').read_text()[-1000:]}"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found | {"model": str(model)}


@pytest.mark.parametrize("name", rotating(REACH, KINDS))
def test_a_family_answers_as_vllm_at_one_and_as_the_oracle_below(
    vllm: Vllm, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    note = partial(record_property, "reach")
    found = reached(name, tmp_path, vllm)
    if name in NOT_RUN:
        error, reason = NOT_RUN[name]
        assert error in found["error"]
        note([name, vllm_table.NOT_RUN, f"vLLM's CPU build {reason} ({error})"])
        return
    try:
        check(name, found)
    except BaseException:
        note([name, vllm_table.FAILS, found.get("error", "answers").splitlines()[0]])
        raise
    reason = WITHOUT_ORACLE.get(name, "")
    note([name, "blends", reason])


def check(name: str, found: dict[str, Any]) -> None:
    """Of one family: all answers, and that they were blended."""
    assert "error" not in found, found["error"]
    for exact in ("first at 1.0", "again at 1.0", "plain at 1.0", f"plain at {RATIO}"):
        check_equal(found[exact], found["alone"])
    assert found["metrics"]["vllm:cacheblend_requests"] >= 3 * len(found["alone"])
    assert "vllm:cacheblend_fallbacks" not in " ".join(found["metrics"])
    if name not in WITHOUT_ORACLE:
        check_oracle(Path(found["model"]), asked_of(name), found[f"again at {RATIO}"])


def check_equal(answers: list[Any], right: list[Any]) -> None:
    """The same tokens, and close log-probabilities."""
    for answer, other in zip(answers, right, strict=True):
        assert answer["tokens"] == other["tokens"]
        for mine, theirs in zip(answer["logprobs"][0], other["logprobs"][0], strict=True):
            assert mine == pytest.approx(theirs, abs=CLOSE)


def check_oracle(folder: Path, asked: list[Asked], answers: list[Any]) -> None:
    """The first token and its log-probabilities are those of the dense oracle, which differ from full prefill's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA drops the soft-cap
    selector, differ = Hkvd(check_layers=(1,), ratios=(RATIO,)), 0
    for one, answer in zip(asked, answers, strict=True):
        right = torch.log_softmax(blend(model, one.prompt, selector).logits.double(), -1)
        given = {int(token): value for token, value in answer["logprobs"][0][0].items()}
        assert given == pytest.approx({token: float(right[token]) for token in given}, abs=CLOSE)
        assert answer["tokens"][0][0] == int(right.argmax())
        with torch.no_grad():
            plain = torch.log_softmax(model(torch.tensor([one.ids])).logits[0, -1].double(), -1)
        differ += bool((plain - right).abs().max() > 2 * CLOSE)
    assert differ
