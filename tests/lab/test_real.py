"""`lab real`: what it measures of the model that ships, where known cases have known figures."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.data import QuestionRow
from cacheblend.engines.tokens import Passage
from lab.real import adapt, orders, pretrained, quality
from lab.real.quality import BASE, Way, rows_of, summarise
from lab.servers.vllm_server import Streamed
from lab.settings import Adapt, Edits, Real
from lab.speed import edits
from parity.scenes import assert_close


@pytest.fixture
def data(tmp_path: Path) -> Path:
    texts = [f"{name} has the {thing} in the {place}." for name, thing, place in zip(*NAMES, strict=True)]
    rows = [
        {"question": f"Where is the {thing}?", "answers": [place], "passages": [{"text": each} for each in texts]}
        for thing, place in zip(*NAMES[1:], strict=True)
    ]
    file = tmp_path / "things.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


SAME = {"same": 1.0, "compute": 0.1, "contains": 0.5}
NAMES = (["Ann", "Ben", "Cay", "Dan"], ["lamp", "coat", "ring", "book"], ["barn", "hall", "shed", "room"])


def test_every_way_is_between_full_reuse_and_full_prefill(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "FIRST_TUNE", expected := 3)
    ways = [
        "text none",
        "bos all",
        "bos random 0.5",
        "bos hkvd@1 0.3",
        "text head:recency=1,correction=0.5 0.055",
    ]
    asked = Real(data=[data], model=Path("nano"), part="tune", way=ways, answer_tokens=4)
    steps: list[tuple[int, int]] = []
    found = quality.run(asked, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (expected, expected) and found["figures"]["rows_things"] == expected
    assert set(found["ways"]) == {BASE, *ways}
    exact, reuse = found["ways"]["bos all"], found["ways"][BASE]
    assert exact["kl"] < 1e-3  # its weights have eight bits
    assert exact["kl_removed"]["value"] > 0.98 and exact["taken_back"]["value"] == pytest.approx(1, abs=0.05)
    assert 0.9 < exact["compute"] <= 1 and exact["same"] > 0.9  # what is in front is loaded; eight bits may tie
    assert found["files"]["things"] == found["ways"]
    assert reuse["contains_loss"]["value"] == 0 and exact["contains"] == found["figures"]["contains_full"]
    assert reuse["kl"] > 1e-2 and reuse["kl_removed"]["value"] == 0
    assert reuse["compute"] < found["ways"]["bos random 0.5"]["compute"] < 1
    assert found["figures"]["compute_05"] == found["ways"][ways[-1]]["compute"]
    assert quality.table(found).row_count == len(ways) + 1


def test_means_are_pooled_and_leads_are_paired() -> None:
    ours, coin = quality.OURS["15"], "text random 0.165"
    cells = {BASE: (1.0, -2.0), ours: (0.25, -1.25), coin: (0.5, -1.5), "full": (0.0, -1.0)}
    names = "kl", "log_likelihood"
    row: dict[str, Any] = {way: dict(zip(names, of, strict=True)) | SAME for way, of in cells.items()}
    row["full"]["contains"] = 1.0
    found = summarise({"a": [row | {"passage": each} for each in "ppq"], "b": [row | {"passage": "q"}]})
    figures = {
        "rows_a": 3,
        "rows_b": 1,
        "kl_removed_15": 0.75,
        "taken_back_15": 0.75,
        "compute_15": 0.1,
        "contains_full": 1,
        "contains_loss_15": 50,
        "over_coin_15": 0.25,
    }
    assert found["figures"] == pytest.approx(figures)
    assert found["intervals"] == {"over_coin_15": (0.25, 0.25)}
    assert found["ways"][ours]["contains_loss"] == {"value": 50, "low": 50, "high": 50}


def test_an_interval_draws_passages_with_all_their_rows() -> None:
    """Two passages, whose rows are alike: of two draws both are of one in half of all samples."""
    rows = [
        {BASE: SAME | {"kl": kl, "log_likelihood": -2.0}, "full": SAME | {"log_likelihood": -1.0}, "passage": passage}
        | {"text none": SAME | {"kl": kl / 2 if passage == "p" else 0.0, "log_likelihood": -1.5}}
        for passage, kl in [*[("p", 1.0)] * 20, *[("q", 1.0)] * 20]
    ]
    removed = summarise({"a": rows})["ways"]["text none"]["kl_removed"]
    assert removed == {"value": 0.75, "low": 0.5, "high": 1.0}


def test_rows_with_the_answer_s_passage_of_a_tune_row_are_tune_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "FIRST_TUNE", 2)
    made = [("", "Ann sees a lamp.", "lamp"), ("", "Ben.", "x"), ("", "Ann sees a lamp.", "Ann"), ("", "Cay.", "Cay")]
    rows = [QuestionRow(asked, (Passage(text), Passage("other")), (gold,)) for asked, text, gold in made]
    assert rows_of(rows, "tune") == rows[:3] and rows_of(rows, "test") == rows[3:]


def test_what_cannot_be_measured(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"no pretrained model here: make pretrained, or "):
        quality.run(Real(data=[data]))
    with pytest.raises(InvalidInputError, match="--part is tune or test, got 'all'"):
        Real(data=[data], part="all")
    with pytest.raises(InvalidInputError, match="expected an anchor, a selector and a ratio"):
        Way.of("bos head 0.1 0.2")
    with pytest.raises(InvalidInputError, match="the anchor is none, bos or text"):
        Way.of("system head 0.1")
    with pytest.raises(InvalidInputError, match="there are no rows of this part"):
        summarise({"things": []})


def test_no_answer_depends_on_what_was_asked_before(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "FIRST_TUNE", 2)
    steps: list[tuple[int, int]] = []
    asked = Real(data=[data], model=Path("nano"), part="tune", answer_tokens=4, way=["text head 0.1"])
    found = orders.run(asked, lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)] and found["way"] == "text head 0.1"
    assert found["figures"] | {"order_variation": 0, "order_variation_full": 0} == {
        "answers": 10,
        "history_variation": 0,
        "order_variation": 0,
        "order_variation_full": 0,
    }


def test_answers_that_change_are_counted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's answers: blended by two engines, then in full, five times."""
    monkeypatch.setattr(quality, "FIRST_TUNE", 1)
    told = iter([[1], [1], [1], [1], [2], [3], [2], [2], [3], [1], [1], [1], [1], [1], [1]])
    monkeypatch.setattr(orders, "_answer", lambda *given: next(told))
    monkeypatch.setattr(orders, "_same", lambda one, other: False)
    figures = orders.run(Real(data=[data], model=Path("nano"), part="tune"))["figures"]
    assert figures == {
        "answers": 5,
        "history_variation": 1,
        "order_variation": 0.25,
        "order_variation_full": 0.5,
    }


def test_an_adapter_is_measured_as_the_bench_measures_and_written_for_peft(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "FIRST_TUNE", 3)
    asked = Adapt(data=[data], model=Path("nano"), rows=1, answer_tokens=3, steps=3, questions=3, out=tmp_path / "lora")
    steps: list[tuple[int, int]] = []
    found = adapt.run(asked, lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)] and found["figures"]["rows_things"] == 1
    assert [len(step) for step in found["losses"]] == [2] * 3 and all(step[adapt.REUSE] > 0 for step in found["losses"])
    ways = found["ways"]
    bench = quality.run(Real(data=[data], model=Path("nano"), rows=1, answer_tokens=3, way=[*adapt.MEASURED]))["ways"]
    for way in (BASE, *adapt.MEASURED):  # the questions' rows are computed again here, by transformers
        assert ways[way]["kl"] == pytest.approx(bench[way]["kl"], rel=0.2), way
        assert ways[way]["compute"] == bench[way]["compute"]
    assert ways[adapt.REUSE + adapt.TOGETHER]["kl"] != ways[adapt.REUSE]["kl"]
    assert found["figures"]["adapt_removed"] == ways[adapt.REUSE + adapt.TOGETHER]["kl_removed"]["value"]
    weights = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert sum(map(torch.numel, weights.values())) == found["parameters"] and len(weights) == 2 * 12
    # as PEFT adds it: lora_alpha / r times B A
    merged, loras = adapt.with_loras(Path("nano"), 8)
    ids = torch.arange(20, 40)[None]
    for layer, lora in enumerate(loras.values()):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        lora.a.data, lora.b.data = weights[f"{name}A.weight"], weights[f"{name}B.weight"]
    adapted = merged(ids).logits
    for lora in loras.values():
        lora.inner.weight.data += (config["lora_alpha"] / config["r"] * lora.b @ lora.a).to(lora.inner.weight.dtype)
    with adapt.without_adapters():
        assert_close(merged(ids).logits, adapted, 0.05, "logits")


def test_passages_of_test_rows_are_not_trained_on_and_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "FIRST_TUNE", 3)
    texts = {name: Passage(f"{name} is here.") for name in "abcdef"}
    rows = [
        QuestionRow(f"Where is {gold}?", tuple(texts[name] for name in names), (f"{gold} is",))
        for gold, names in (("a", "abcd"), ("b", "bcde"), ("a", "aecf"), ("f", "fdab"), ("a", "acef"))
    ]
    tested = {text for row in rows_of(rows, "test") for text in quality.holding_any(row)}
    source = adapt.Questions(rows, tested, random.Random(0))
    for most in (1, 2, 3, 4):
        drawn = source.draw(most)
        assert 0 < len(drawn) <= most and len({row.passages for row in drawn}) == 1 and len(drawn[0].passages) == 4
        assert texts["f"] not in drawn[0].passages and {row.question for row in drawn} <= {
            row.question for row in rows if quality.holding(row) in {each.text for each in row.passages}
        } - {"Where is f?"}
    model, _ = adapt.with_loras(Path("nano"), 2)
    segments = [text([5, 6]), chunk([7, 8, 9])]
    prompts = [Prompt.of([*segments, text([10, 11])]), Prompt.of([*segments, text([12, 13, 14, 15])])]
    together = adapt.Group.of(prompts).teach(model, 3, [])
    for row, prompt in enumerate(prompts):
        alone = adapt.Group.of([prompt]).teach(model, 3, [])
        assert_close(together[0][row], alone[0][0], 0.05, "log-probabilities")
    with pytest.raises(InvalidInputError, match="holds one of a test row, too"):
        adapt.Questions(rows, {each.text for each in texts.values()}, random.Random(0))
    with pytest.raises(InvalidInputError, match="has no q_proj to adapt"):
        monkeypatch.setattr(adapt, "AutoModelForCausalLM", Mock(**{"from_pretrained.return_value": nn.Linear(1, 1)}))
        adapt.with_loras(Path("nano"), 2)


class Told:
    """A stand-in for a server of vLLM, which moves half of each prompt of a conversation."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.moved, self.asked = seconds, 0.0, list[str]()

    def ask(self, ids: list[int], tokens: int, *, conversation: str) -> Streamed:
        assert tokens == 1
        self.asked.append(conversation)
        self.moved += len(ids) // 2
        return Streamed([self.seconds])

    def counters(self) -> dict[str, float]:
        return {'vllm:cacheblend_hit_tokens_total{source="moved"}': self.moved, "vllm:cacheblend_requests_total": 3.0}

    def wait_until_idle(self) -> None:
        self.asked.append("idle")


def test_edited_histories_are_timed_in_two_servers_of_vllm(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, mine = Told(8.0), Told(2.0)
    monkeypatch.setattr(edits, "_servers", lambda folder, asked: nullcontext((plain, mine)))
    asked = Edits(
        data=[data], model=Path("nano"), scene=["clearing"], conversations=2, turns=6, steps=1, passages=4,
        tokens=2000, vllm=True,
    )  # fmt: skip
    found = edits.run(asked)
    assert plain.asked == [""] * 24 and mine.asked == [*["clearing 0", "idle"] * 12, *["clearing 1", "idle"] * 12]
    assert (
        found["figures"]["clearing_gain"] == 4
        and found["figures"]["clearing_turns"] == 4 == found["figures"]["clearing_moved_turns"]
    )
    assert 0.49 < found["figures"]["clearing_moved_share"] <= 0.5
    pytest.importorskip("matplotlib")
    edits.plot(found, tmp_path / "edits.png")
    assert (tmp_path / "edits.png").read_bytes()[:4] == b"\x89PNG"


def test_edited_histories_are_measured_by_scene(data: Path) -> None:
    steps: list[tuple[int, int]] = []
    asked = Edits(
        data=[data], model=Path("nano"), scene=["thinking", "clock"], conversations=1, turns=6, steps=2, passages=4,
        tokens=2000, answer_tokens=3, runs=1, way=["head 0.05", "all 1"],
    )  # fmt: skip
    found = edits.run(asked, lambda done, total: steps.append((done, total)))
    figures = found["figures"]
    assert steps == [(1, 2), (2, 2)] and figures["thinking_turns"] == figures["clock_turns"] == 2
    for scene in asked.scene or ():
        assert figures[f"{scene}_kl_moved all 1"] < 1e-3 and figures[f"{scene}_moved_compute"] < 1
        assert figures[f"{scene}_moved_compute"] < figures[f"{scene}_prefix_compute"]
        assert 0 < figures[f"{scene}_moved_share"] < 1
    assert all(turn["turn"] >= 5 for turn in found["turns"])
    with pytest.raises(InvalidInputError, match="4 questions, 99 are needed"):
        edits.run(replace(asked, data=[data], steps=99))
    with pytest.raises(InvalidInputError, match="no prompt of turn 5"):
        edits.run(replace(asked, tokens=256))
