"""Structured output, async scheduling and embeddings beside blending in unmodified vLLM.

Situations: constrained answers of blended prompts at ratio 1 and below, several at once beside free ones, a grammar
that is compiled while the chunks are loaded, schedulers that run ahead of the model and that do not, a model that
embeds.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import vllm_running
from cacheblend.nano import model_path
from vllm_running import NANO_VOCAB, Asked, Texts, Vllm, check_blended

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "year": {"enum": [7, 9]}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[0-9]{3}-[0-9]{3}"},
    "json": {"json": SCHEMA},
    "choice": {"choice": ["Bern", "Oslo", "Lima"]},
}
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}  # the model would write spaces for ever


def obeys(kind: str, text: str) -> bool:
    if kind == "json":
        return bool(json.loads(text)["city"] in {"Bern", "Oslo"})
    if kind == "regex":
        return re.fullmatch(KINDS[kind]["regex"], text) is not None
    return text in KINDS[kind]["choice"]


def ask(asked: list[Asked], kind: str | None, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 40, "ignore_eos": False, "logprobs": 2}
    sampling |= {"structured": KINDS[kind]} if kind else {"max_tokens": 8}
    return vllm_running.ask(asked, **{"sampling": sampling, **more})


@pytest.mark.feature("structured output", "blends")
@pytest.mark.feature("async scheduling, on and off", "blends")
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_constrained_answers(vllm: Vllm, tmp_path: Path, runs_ahead: bool) -> None:
    texts = Texts(71, NANO_VOCAB)
    passages = texts.passages(4)
    asked = [texts.prompt(texts.rng.sample(passages, 3)) for _ in range(3)]
    engine = {"skip_tokenizer_init": False, "async_scheduling": runs_ahead, "structured_outputs_config": GRAMMARS}
    plain = vllm.run(model_path(), [ask(asked, kind, chunks=None) for kind in (*KINDS, None)], None, **engine)
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    steps = [ask(asked, None, alone=True)]
    for kind in (*KINDS, None):
        steps += [{"forget": True}, ask(asked, kind)]
    steps += [{"forget": True}, ask(asked, "json", options={"recompute_ratio": 0.0}), {"count": True}]
    found = vllm.run(model_path(), steps, extra, **engine)
    for kind, mine, its in zip((*KINDS, None), found["answers"][2::2], plain["answers"][0:], strict=False):
        assert [one["tokens"] for one in mine] == [one["tokens"] for one in its], kind
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    for kind, answers in zip((*KINDS, None, "json"), found["answers"][2::2], strict=False):
        for one in answers:
            text = tokenizer.decode(one["tokens"][0], skip_special_tokens=True)
            assert kind is None or obeys(kind, text), text
    check_blended(found, 5 * len(asked))


@pytest.mark.feature("pooling, embeddings", "plain: on_unblendable, or refused by name")
def test_a_model_that_embeds_is_refused_or_served_as_vllm_does(vllm: Vllm, tmp_path: Path) -> None:
    texts, engine = Texts(72, NANO_VOCAB), {"runner": "pooling", "skip_tokenizer_init": False}
    steps = [{"embed": [texts.prompt(texts.passages(2)).ids for _ in range(3)]}]
    plain = vllm.run(model_path(), steps, None, **engine)
    extra = {"store": f"file://{tmp_path}/store"}
    refused = vllm.start(model_path(), steps, extra, **engine)
    assert "pooling models" in refused["words"]
    found = vllm.run(model_path(), steps, extra | {"on_unblendable": "plain"}, **engine)
    assert found["answers"] == plain["answers"]
