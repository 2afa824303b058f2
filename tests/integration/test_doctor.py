"""`doctor` is right about every family of the matrix, about folders that are none, and about models that lie.

Its gate on tiny models with random weights: what passes, on which rows; and its profile's way to the answers."""

import hashlib
import json
import logging
import random
import re
import shutil
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, StoreUnreachableError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.profile import Profile
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows
from cacheblend.engines.hf import BlendEngine, Passage
from cacheblend.engines.hf.doctor import Diagnosis, diagnose
from cacheblend.engines.settings import PROFILE_NAME, read_profile
from cacheblend.evaluation import gate
from cacheblend.evaluation.candidates import Candidate, grid
from cacheblend.evaluation.gate import Bar, GateRow, GateRun, profile_of, run_gate
from cacheblend.evaluation.scorers import WordF1
from cacheblend.store import MemoryStore
from campaign import rotating
from command_line import Run
from families import BLENDABLE, HYBRID, REFUSED, Family, tiny_model
from lab.suite.suite import check
from parity.scenes import DIVERSE, B, C, open_engine
from tiny_folder import TinyShape, build_tiny
from tokenizers_for_tests import byte_level, sentencepiece

CORE = [family for family in [*BLENDABLE, *HYBRID] if family.name in {*DIVERSE, "lfm2", "jamba", "lfm2-tail"}]
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
LIVE = ["re-positioned keys", "r = 1 is full prefill", "lone chunk, r = 0"]


def found(diagnosis: Diagnosis, name: str) -> tuple[bool | None, str]:
    return next((check.ok, check.detail) for check in diagnosis.checks if check.name == name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    tokenizer = sentencepiece()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SMALL)).save_pretrained(path)
    return path


@pytest.mark.parametrize("family", rotating([*BLENDABLE, *HYBRID], core=CORE), ids=str)
def test_says_yes(family: Family) -> None:
    diagnosis = diagnose(tiny_model(family.name))
    assert diagnosis.blendable, diagnosis.reason
    assert diagnosis.reason == ""
    assert [check.name for check in diagnosis.checks][-3:] == LIVE


@pytest.mark.parametrize("family", REFUSED, ids=str)
def test_says_no_and_why(family: Family) -> None:
    diagnosis = diagnose(tiny_model(family.name))
    assert not diagnosis.blendable
    assert re.search(family.reason, diagnosis.reason)
    facts = diagnosis.to_dict()
    assert json.loads(json.dumps(facts)) == facts and facts["blendable"] is False


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "qwen3_moe", "glm", "gpt_oss", "deepseek_v3"])
def test_half_precision_is_held_against_the_models_own_noise(name: str) -> None:
    diagnosis = diagnose(tiny_model(name, torch.bfloat16))
    assert diagnosis.blendable, diagnosis.reason


def test_describes_what_it_found() -> None:
    diagnosis = diagnose(tiny_model("gemma2"))
    assert found(diagnosis, "windows") == (True, "layers: 2 sliding by 24; 2 full")
    assert "half pairing, 16 of 16 dims" in found(diagnosis, "re-positioning")[1]
    assert "interleaved pairing" in found(diagnose(tiny_model("cohere")), "re-positioning")[1]
    assert "16 dims" in found(diagnose(tiny_model("phi")), "re-positioning")[1]
    assert "(NoPE)" in found(diagnose(tiny_model("smollm3")), "re-positioning")[1]
    assert found(diagnose(tiny_model("phi3-longrope")), "length")[0] is None


def test_catches_a_model_that_breaks_the_laws() -> None:
    """Rows that meet outside attention only in long prompts pass the survey's few rows, but not the live check."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SMALL)).eval()

    class Shifted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(hidden)
            return out + out.roll(1, dims=1) if hidden.shape[1] > 16 else out

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    diagnosis = diagnose(model)
    assert not diagnosis.blendable
    assert "lone chunk" in diagnosis.reason


def test_a_folder_with_tokenizers(folder: Path) -> None:
    diagnosis = diagnose(folder)
    assert diagnosis.blendable, diagnosis.reason
    assert diagnosis.model == "tiny"
    names = [check.name for check in diagnosis.checks]
    assert names[0] == "files"
    assert {"tokenizer", "anchor", "chat template"} <= set(names)
    assert found(diagnosis, "anchor") == (True, "BOS, id 1")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(text) | {"max_position_embeddings": 8192}))
    assert re.fullmatch(r"a text that ships, \d{3} tokens", found(diagnose(folder), "anchor")[1])
    (folder / "config.json").write_text(text)
    for file in folder.glob("*token*"):
        file.unlink()
    diagnosis = diagnose(folder)
    assert not diagnosis.blendable
    assert diagnosis.reason.startswith("tokenizer:")
    byte_level().save_pretrained(folder)
    assert found(diagnose(folder), "anchor")[0] is None  # it sets no BOS


@pytest.mark.parametrize(
    ("file", "content", "check"),
    [
        ("config.json", "", "files"),
        ("model.safetensors", "", "files"),
        ("config.json", "{", "config"),
        ("config.json", '{"model_type": "no_such_model"}', "config"),
        ("config.json", '{"model_type": "t5"}', "config"),
        ("model.safetensors", "not weights", "weights"),
    ],
)
def test_a_folder_that_lacks_a_file_or_has_one_that_cannot_be_read(
    folder: Path, file: str, content: str, check: str
) -> None:
    (folder / file).unlink()
    if content:
        (folder / file).write_text(content)
    diagnosis = diagnose(folder)
    assert diagnosis.reason.startswith(f"{check}:") and not diagnosis.blendable
    assert found(diagnosis, check)[0] is False
    assert content or [check.name for check in diagnosis.checks] == ["files"]


WORDS = ["lamp", "harbour", "clock", "mussel", "rope", "tide", "keeper", "moon"]
WORDS += ["wheel", "bread", "storm", "letter", "orchard", "bridge", "winter", "salt"]
EXACT = Candidate("all", {"selector": "all"})
LOW = Bar(threshold=0.6, answer_tokens=3)  # 6 rows without an error are enough


def passages(seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(2)]


def rows(count: int, seed: int = 0, answers: tuple[str, ...] = ()) -> list[GateRow]:
    return [
        GateRow(["Town. ", *map(Passage, passages(1000 * seed + i)), f" Which {WORDS[i % 16]}?"], answers)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, which blending changes, so that little passes."""
    shape = TinyShape(layers=3, width=32, mlp_width=48, heads=4, kv_heads=2, vocab_size=300, gain=3, context_length=160)
    folder = tmp_path_factory.mktemp("gate") / "tiny-llama"
    build_tiny(folder, [" ".join(WORDS), *passages(0)], shape)
    return folder


@pytest.fixture(scope="module")
def engine(built: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(built, config=BlendConfig(capture=False)) as opened:
        yield opened


def test_on_random_weights_nothing_but_full_recompute_passes(engine: BlendEngine) -> None:
    candidates = [*grid(3, ["hkvd", "none"], [0.05, 0.3]), EXACT]
    found = run_gate(engine, rows(24), candidates, LOW)
    assert found.verdict == "passed"
    assert found.chosen is not None and found.chosen.candidate == EXACT
    assert found.chosen.found is not None and found.chosen.found.kl < 1e-6
    assert found.chosen.found.equal_answers == 1
    assert (found.search_rows, found.confirm_rows, found.attempts) == (12, 12, 3)
    measured = {tried.candidate.name: tried.found for tried in found.searched}
    reuse, hkvd = measured["none"], measured["hkvd@1 r=0.3"]
    assert reuse is not None and hkvd is not None
    assert reuse.kl > hkvd.kl > 1e-3
    assert [t.found.compute for t in found.searched if t.found] == sorted(m.compute for m in measured.values() if m)


def test_no_candidate_passes(engine: BlendEngine) -> None:
    found = run_gate(engine, rows(80), grid(3, ["none", "hkvd"], [0.1]), Bar(threshold=0.9, answer_tokens=3))
    assert (found.verdict, found.chosen, found.confirmed) == ("none passes", None, [])
    for tried in found.searched:
        assert tried.stopped
        assert tried.found is not None and tried.found.rows == gate.STOP_AFTER
    profile = profile_of(engine, found)
    assert not profile.blend
    assert profile.config().make_selector() == AllRows()
    assert profile.measured.agreement is None


def test_too_few_rows(engine: BlendEngine, built: Path) -> None:
    # Too few rows are all searched and nothing is confirmed
    found = run_gate(engine, rows(7), [EXACT], Bar(answer_tokens=3))
    assert (found.verdict, found.search_rows, found.confirm_rows, found.confirmed) == ("too few rows", 7, 0, [])
    assert found.searched[0].found is not None and found.searched[0].found.agreement == 1
    assert not found.searched[0].passes
    with pytest.raises(InvalidInputError, match="598 are needed"):
        profile_of(engine, found)
    # Rows that say nothing are left out and counted
    long = GateRow([Passage(" ".join(WORDS * 12)), "?"])
    only_prefix = GateRow([Passage(passages(1)[0]), " Which?"])
    plain = GateRow(["Which lamp?"])
    found = run_gate(engine, [*rows(6), *rows(3), long, only_prefix, plain], [EXACT], LOW)
    assert vars(found.skipped) == {"too_long": 1, "repeated": 3, "nothing_to_blend": 2, "same_passages": 0}
    assert found.search_rows + found.confirm_rows == 6
    with pytest.raises(InvalidInputError, match="1 exceed the model's context"):
        run_gate(engine, [long], [EXACT], LOW)
    # A lone chunk behind its anchor is no exact prefix where its record is compressed
    with BlendEngine.from_pretrained(built, config=BlendConfig(capture=False, codec="int8")) as lossy:
        found = run_gate(lossy, [only_prefix], [Candidate("none", {"selector": "none"})], LOW)
    assert found.skipped.nothing_to_blend == 0 and found.searched[0].found is not None
    with pytest.raises(InvalidInputError, match="no candidate"):
        run_gate(engine, rows(2), [], LOW)
    # A store without room is no proof of agreement
    with (
        BlendEngine.from_pretrained(built, store="memory://?max_bytes=4KiB", config=BlendConfig(block_size=4)) as small,
        pytest.raises(InvalidInputError, match="give a larger store"),
    ):
        run_gate(small, rows(4), [EXACT], LOW)


def test_what_confirms_was_not_searched(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def spy(asked: Any, *arguments: Any) -> Any:
        seen.append(asked.prompt.token_ids.tobytes())
        return original(asked, *arguments)

    original = gate.compare
    monkeypatch.setattr(gate, "compare", spy)
    progress: list[tuple[int, int]] = []
    run_gate(engine, rows(16), [EXACT], LOW, progress=lambda done, total: progress.append((done, total)))
    assert len(set(seen)) == len(seen) == 16
    assert progress == [(i, 16) for i in range(17)]
    split = seen[:8]
    seen.clear()
    run_gate(engine, rows(16), [EXACT], LOW, seed=1)
    assert set(seen[:8]) != set(split)


def test_a_failed_attempt_is_followed_by_the_next_dearer(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that was lucky in the search fails on fresh rows, and the next one is tried at the split level."""
    calls = 0

    def lucky(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        sample, report = original(*arguments, **options)
        calls += 1
        is_first = arguments[1] == NoRows()
        return (gate.Sample(**{**vars(sample), "top_1": calls <= 16}) if is_first else sample), report

    original = gate.compare
    monkeypatch.setattr(gate, "compare", lucky)
    found = run_gate(engine, rows(16), [Candidate("none", {"selector": "none"}), EXACT], LOW)
    assert [tried.candidate.name for tried in found.confirmed] == ["none", "all"]
    failed, chosen = found.confirmed
    assert (failed.passes, failed.stopped, chosen.passes) == (False, True, True)
    assert found.attempts == 2
    assert chosen.found is not None and chosen.found.bound == pytest.approx(0.025 ** (1 / 8))


def test_what_was_computed_after_all_is_no_proof_of_agreement(
    engine: BlendEngine, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowStore(MemoryStore):
        def read_layers(self, *arguments: Any, **options: Any) -> Any:
            time.sleep(0.2)
            return super().read_layers(*arguments, **options)

    none = [Candidate("none", {"selector": "none"})]
    config = BlendConfig(capture=False, load_timeout_s=0.02)
    with (
        BlendEngine.from_pretrained(built, store=SlowStore(), config=config) as slow,
        pytest.raises(StoreUnreachableError, match="the store was too slow"),
    ):
        run_gate(slow, rows(16), none, LOW)
    # Of a model with recurrent layers the chunk behind BOS is an exact prefix, and nothing else is loaded
    prompts = [GateRow(Prompt.of([B, chunk(C.token_ids[:n]), text([n, 9, 8])])) for n in range(9, 21)]
    with (
        open_engine(tiny_model("qwen3_next"), []) as hybrid,
        pytest.raises(InvalidInputError, match="have nothing to blend"),
    ):
        run_gate(hybrid, prompts, none, LOW)
    # Too few rows are left of those that were to confirm
    original = GateRun.measure
    monkeypatch.setattr(
        GateRun, "measure", lambda *of, with_answers: [] if with_answers else original(*of, with_answers=False)
    )
    found = run_gate(engine, rows(16), [EXACT], LOW)
    assert (found.verdict, len(found.confirmed)) == ("too few rows", 1)
    # Or already of those that were to search
    left = iter(range(3))
    monkeypatch.setattr(
        GateRun,
        "measure",
        lambda *of, with_answers: [] if next(left, None) is None else original(*of, with_answers=False),
    )
    assert run_gate(engine, rows(16), none, LOW).verdict == "too few rows"


def test_agreement_alone_does_not_pass_where_f1_falls(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = cycle([0.0, 1.0])  # the blend's answer is scored first
    monkeypatch.setattr(gate, "best", lambda scorer, answer, golds: next(scores))
    bar = Bar(threshold=0.6, answer_tokens=3, scorer=WordF1())
    found = run_gate(engine, rows(16, answers=("lamp",)), [EXACT], bar)
    assert found.verdict == "none passes"
    assert found.searched[0].found is not None and found.searched[0].found.f1_difference == -1
    assert run_gate(engine, rows(16), [EXACT], bar).verdict == "passed", "without gold answers F1 is not asked for"


def test_rows_of_the_same_passages_stay_on_one_side_and_count_once(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three questions to each of 12 pairs of passages, one of them with the pair the other way round."""
    asked = [
        GateRow(["Town. ", *map(Passage, passages(i)[:: (1, 1, -1)[n]]), f" Which {WORDS[n]}?"])
        for n in range(3)
        for i in range(12)
    ]
    seen: list[frozenset[bytes]] = []

    def spy(asked: Any, *arguments: Any) -> Any:
        seen.append(frozenset(chunk.token_ids.tobytes() for chunk in asked.prompt.chunks))
        return original(asked, *arguments)

    original = gate.compare
    monkeypatch.setattr(gate, "compare", spy)
    found = run_gate(engine, asked, [EXACT], LOW)
    assert (found.search_rows, found.confirm_rows, found.passage_sets, found.skipped.same_passages) == (18, 6, 12, 12)
    searched, confirmed = seen[:18], seen[18:]
    assert {searched.count(one) for one in searched} == {3}
    assert len(set(confirmed)) == 6
    assert not set(searched) & set(confirmed)
    assert found.attempts == 1, "36 rows, but 6 independent ones to confirm on"
    assert found.chosen is not None and found.chosen.found is not None
    assert found.chosen.found.bound == pytest.approx(0.05 ** (1 / 6))
    assert check(engine, asked, AllRows(), LOW)[1].rows == 12


def test_what_computes_as_much_as_full_recompute_never_passes(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dear(*arguments: Any, **options: Any) -> Any:
        sample, report = original(*arguments, **options)
        return gate.Sample(**{**vars(sample), "compute": 1.0}), report

    original = gate.compare
    monkeypatch.setattr(gate, "compare", dear)
    found = run_gate(engine, rows(24), [EXACT], LOW)
    assert (found.verdict, found.confirmed) == ("none passes", [])
    assert found.searched[0].found is not None and found.searched[0].found.agreement == 1


def test_a_chosen_setting_is_checked_on_fresh_data(engine: BlendEngine) -> None:
    holds, found = check(engine, rows(8, seed=1), AllRows(), LOW)
    assert holds
    assert (found.rows, found.agreed) == (8, 8)
    holds, found = check(engine, rows(8, seed=1), Hkvd(ratios=(0.0,)), LOW)
    assert not holds
    assert found.rows == 8


GATE = ("--threshold", 0.6, "--max-tokens", 3)


@pytest.fixture
def model(built: Path, tmp_path: Path) -> Path:
    """A copy that may get a profile."""
    return shutil.copytree(built, tmp_path / "tiny-llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    lines = [
        {"question": f"Which {WORDS[i]}?", "passages": [{"text": t} for t in passages(i)], "answers": [WORDS[i]]}
        for i in range(14)
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_the_gate_tries_what_the_model_can_have() -> None:
    """Of latents no keys are corrected, and a state cannot be asked; who names such a selector is told."""
    for family, kinds, named in (
        ("llama", {"head", "hkvd", "query", "hybrid"}, ""),
        ("deepseek_v3", {"hkvd", "query", "hybrid"}, "head:correction=1"),
        ("jamba", {"hkvd"}, "query"),
    ):
        with BlendEngine(tiny_model(family), store="memory", fingerprint=family) as engine:
            survey = engine.runtime.survey
        found = grid(survey.num_layers, fit=survey.fit_selector)
        assert {candidate.settings["selector"] for candidate in found} == kinds
        if named:
            with pytest.raises(InvalidInputError):
                grid(survey.num_layers, [named], fit=survey.fit_selector)


def test_from_the_gate_to_an_answer(run: Run, model: Path, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    for given in (("--threshold", 0.5), ("--store", "redis://nowhere"), ("--codec", "int8"), ("--format", "ctxs")):
        assert f"{given[0]}: no effect without --quality" in run("doctor", "-m", model, *given).err
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "--ratio", 1, "--json")
    result = run(*command)
    found = result.json
    assert (result.code, result.err, found["verdict"]) == (0, "", "passed")
    assert found["profile"] == str(model / PROFILE_NAME)
    assert found["chosen"]["settings"] == {"selector": "hkvd", "recompute_ratio": 1.0, "check_layers": [1]}
    assert (found["rows"].pop("search"), found["rows"].pop("confirmation"), found["passage_sets"]) == (7, 7, 14)
    assert set(found["rows"].values()) == {0}
    assert found["chosen"]["measured"]["f1_rows"] == 7

    profile = read_profile(model / PROFILE_NAME)
    assert (profile.measured.data, profile.measured.codec, profile.measured.f1_rows) == (data.name, "raw", 7)
    assert profile.measured.data_sha256 == hashlib.sha256(data.read_bytes()).hexdigest()
    assert (profile.measured.rows, profile.measured.threshold, profile.measured.agreement) == (7, 0.6, 1.0)
    ask = ("ask", "-m", model, "-s", "memory", "-p", WORDS[0], "-p", WORDS[1], "-q", "Which?", "-n", 2, "--json")
    assert run(*ask).json["settings"]["recompute_ratio"] == 1.0
    assert str(model / PROFILE_NAME) in run(*ask).json["settings"]["source"]
    by_hand = run(*ask, "--ratio", 0.2).json["settings"]
    assert by_hand == {"source": "given by the caller", "selector": "hkvd", "recompute_ratio": 0.2}
    with BlendEngine.from_pretrained(model) as opened:
        measured = BlendConfig(anchor="bos", selector="hkvd", recompute_ratio=1.0, check_layers=(1,))
        assert opened.config == measured.on("cpu")
        assert opened.runtime.settings.profile == profile
    with BlendEngine.from_pretrained(model, config=BlendConfig(selector="none")) as opened:
        assert opened.config.selector == "none"
    run(*ask, "--codec", "int4")
    assert "was measured with the codec raw, not int4" in caplog.text
    assert "the model that ships stays as it is" in run("doctor", "--quality", "-m", "nano", "-d", data).err
    data.write_text(json.dumps({"input": "", "context": "A lamp.", "answers": []}))
    assert "row 0: the question is empty" in run(*command).json["error"]
    shown = "".join(run("doctor", "-m", model).out.split())
    assert "yes,thismodelcanbeblended" in shown and "halfpairing" in shown
    assert f"profile{model / PROFILE_NAME}" in shown and "profiletheprofile" not in shown


def test_a_model_that_no_setting_passes_on_is_not_blended(
    run: Run, model: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "none", "--selector", "hkvd")
    found = run(*command, "-r", 0.05)
    assert found.code == 1
    assert "no setting was shown to hold 60 %" in found.out
    assert "profile written" in found.out
    assert read_profile(model / PROFILE_NAME).blend is False

    store = tmp_path / "store"
    ask = ("ask", "-m", model, "-s", store, "-p", "A lamp and a rope.", "-p", "Salt.", "-q", "Which?", "-n", 2)
    run(*ask)
    caplog.clear()
    answered = run(*ask, "--json").json
    report = answered["report"]
    loaded = report["hit_tokens"]["memory"] + report["hit_tokens"]["disk"]
    assert report["recomputed_tokens"] == loaded > 0, "everything but the exact prefix"
    assert answered["settings"]["selector"] == "all"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "nothing is blended" in run(*ask).err
    assert "nothing is blended" in " ".join(run("doctor", "-m", model).out.split())
    told = run(*ask, "--ratio", 0, "--json").json
    assert told["report"]["recomputed_tokens"] == 0
    with BlendEngine.from_pretrained(model, store=store) as opened:
        prompt = opened.prompt(["Look. ", Passage("A lamp and a rope."), Passage("Salt."), " Which?"])
        assert opened.prefill(prompt).report.recomputed_tokens > 0
        assert opened.prefill(prompt, ratio=0.0).report.recomputed_tokens == 0


def test_a_dry_run_and_too_few_rows_leave_the_profile_alone(run: Run, model: Path, data: Path) -> None:
    # A dry run writes nothing
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "-r", 1, "--dry-run")
    shown = run(*command)
    assert shown.code == 0
    assert f"no profile written; {model.name} stays as it is" in shown.out.replace("\n", " ")
    assert run(*command, "--json").json["profile"] is None
    assert not (model / PROFILE_NAME).exists()
    # Too few rows leave the profile alone
    (model / PROFILE_NAME).write_text("{")
    shown = run("doctor", "--quality", "-m", model, "-d", data, "--selector", "none", "--max-tokens", 1)
    assert shown.code == 1
    assert "too few rows to decide: 14 rows" in shown.out
    assert "598" in shown.out
    assert "14 rows cannot decide" in shown.err  # before they are asked
    assert (model / PROFILE_NAME).read_text() == "{"


def test_a_folder_that_cannot_be_written_to(
    run: Run, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> int:
        if self.parent == model:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *arguments, **options)

    original = Path.write_text
    monkeypatch.setattr(Path, "write_text", refuse)  # whoever runs the tests may write anywhere
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "--ratio", 1)
    refused = run(*command)
    assert refused.code == 2
    assert "--profile FILE" in refused.err
    elsewhere = tmp_path / "mine.json"
    assert run(*command, "--profile", elsewhere).code == 0
    assert isinstance(read_profile(elsewhere), Profile)
    asked = ("-p", "A lamp.", "-q", "Which?", "-n", 1, "--json")
    ask = ("ask", "-m", model, "-s", "memory", "--profile", elsewhere, *asked)
    assert str(elsewhere) in run(*ask).json["settings"]["source"]
    assert "would not be used" in run(*ask, "--ratio", 0.5).json["error"]

    # The data may be gone by the end; the place for the profile, too: what was measured is shown
    def end(*arguments: Any, **options: Any) -> Any:
        data.unlink()
        (tmp_path / "gone").rmdir()
        return gated(*arguments, **options)

    gated = gate.run_gate
    monkeypatch.setattr(gate, "run_gate", end)
    (tmp_path / "gone").mkdir()
    late = run(*command, "--profile", tmp_path / "gone" / "mine.json")
    assert (late.code, "compute holds 60 %" in late.out, "cannot be written" in late.err) == (2, True, True)
    assert "no profile written" in late.out


def test_a_profile_of_other_weights_and_a_damaged_one(
    run: Run, model: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "--ratio", 1)
    assert run(*gate).code == 0
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    caplog.clear()
    with BlendEngine.from_pretrained(model) as opened:
        assert opened.config == BlendConfig(anchor="bos", selector="hkvd").on("cpu")
    assert "other weights" in caplog.text
    assert "other weights" in " ".join(run("doctor", "-m", model).out.split())

    (model / PROFILE_NAME).write_text('{"format": 1}')
    with pytest.raises(InvalidInputError, match=r"blend-profile\.json, field 'blend': it is missing"):
        BlendEngine.from_pretrained(model)
    refused = run("doctor", "-m", model, "--json")
    assert (refused.code, refused.json["blendable"]) == (1, False)
    assert run(*gate).code == 0, "measuring anew is the way out"
    assert BlendEngine.from_pretrained(model).config.recompute_ratio == 1.0


def test_the_model_that_ships_is_examined_by_name(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.engines.folders.shipped_folder", model.resolve)
    found = run("doctor", "-m", "nano", "--json").json
    assert (found["model"], found["blendable"]) == ("nano", True)


def test_a_setting_that_is_no_faster_is_said_to_be_that(
    run: Run, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any, **options: Any) -> Any:
        sample, report = original(*arguments, **options)
        return gate.Sample(**{**vars(sample), "ttft_s": 2.0, "full_ttft_s": 1.0}), report

    original = gate.compare
    monkeypatch.setattr(gate, "compare", slow)
    command = ("doctor", "--quality", "-m", model, "-d", data, *GATE, "--selector", "hkvd", "-r", 1, "--dry-run")
    shown = run(*command, "--anchor", "none", "--no-chat")
    assert shown.code == 0
    assert "not faster than full recompute (0.50 x its speed" in shown.out
    assert "7 confirmed rows have gold answers: the F1 bound decides with them" in shown.out
