"""Models that an engine opens, or refuses with the reason, as `doctor` does; latent attention; the one that ships."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.core.plan.prompt import chunk
from cacheblend.core.select.selectors import AllRows, NoRows, Selector
from cacheblend.data import QuestionRow
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.baselines import finish, fused
from cacheblend.engines.hf.doctor import diagnose
from cacheblend.evaluation.templates import Template
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from campaign import rotating
from command_line import Run
from families import ALTERNATING, GROUPED_MOE, LATENT, SMALL, VOCAB
from lab.nano.questions import Prompts, draw_questions
from lab.nano.tokenizer import MAX_POSITIONS, build_tokenizer
from parity.scenes import QUESTION, RAG, A, B, C, assert_close, assert_same, greedy, open_engine, random_ids
from reference import plain_kv
from tokenizers_for_tests import CORPUS, sentencepiece

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14, "num_hidden_layers": 4, "depth": 4}  # as many as the language model has
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": ({}, {}),
    "gemma3": ({"head_dim": 16, "query_pre_attn_scalar": 16}, {}),
    "mistral3": ({"head_dim": 16}, {}),
    "qwen2_5_vl": (MROPE, {"out_hidden_size": 64, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ({**MROPE, "head_dim": 16}, {"out_hidden_size": 64}),
}
MODELS = {name: parts for name, parts in MODELS.items() if name in CONFIG_MAPPING}


def saved(name: str, folder: Path) -> Path:
    """A folder with a tiny random model."""
    kind, (text, vision) = CONFIG_MAPPING[name], MODELS[name]
    defaults = kind()
    config = kind(
        text_config={**SMALL, **text, "model_type": defaults.text_config.model_type},
        vision_config={**VISION, **vision, "model_type": defaults.vision_config.model_type},
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_a_model_that_reads_images_is_opened_for_text(name: str, tmp_path: Path) -> None:
    settings = BlendConfig(anchor="none", block_size=16, tile_rows=32, recompute_ratio=1.0)
    folder = saved(name, tmp_path / "model")
    with BlendEngine.from_pretrained(folder, config=settings, with_tokenizer=False, dtype="float32") as engine:
        model: Any = engine.model
        assert len(engine.runtime.view.layers) == SMALL["num_hidden_layers"]
        assert engine.warm([A, B, C]).stored == 3
        logits, kv = plain_kv(model, RAG.token_ids.tolist())
        assert_same(engine.prefill(RAG, mode="full"), logits, kv, 1e-5)
        blended = engine.prefill(RAG)
        assert blended.report.hit_tokens["memory"] == len(A) + len(B) + len(C)
        assert_same(blended, logits, kv, 1e-5)
        answer = engine.generate(RAG, SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True))
        assert answer.token_ids == greedy(model, RAG, 4)
        (block, *_) = engine.runtime.planner.plan(RAG, engine.store).spans[1:]
        _, alone = plain_kv(model, B.token_ids.tolist())
        for layer, (keys, values) in enumerate(alone):
            expected = torch.stack([keys[:, :16], values[:, :16]], dim=1)
            assert_close(engine.store.read(block.name, layer), expected, 1e-5, f"layer {layer}")
    checks = {check.name: check.ok for check in diagnose(folder, dtype="float32").checks}
    assert checks["architecture"] and checks["r = 1 is full prefill"] and checks["re-positioned keys"]


def test_what_is_no_language_model_is_told_in_a_line(tmp_path: Path) -> None:
    part = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes: dict[str, Any] = {"image_size": 28, "patch_size": 14}
    model = CLIPModel(CLIPConfig(text_config={**part, "vocab_size": 64}, vision_config={**part, **sizes}))
    model.save_pretrained(tmp_path)
    message = r"^clip is no language model to transformers; only decoders that answer with text are blended, also those"
    with pytest.raises(ModelNotBlendableError, match=message) as raised:
        BlendEngine.from_pretrained(tmp_path, with_tokenizer=False)
    assert len(str(raised.value)) < 200
    assert diagnose(tmp_path).reason == f"config: {raised.value}"


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="newer than this transformers")
def test_the_default_config_of_gemma4_is_refused_with_the_field_that_decides(tmp_path: Path) -> None:
    """From the config alone: before weights are read. Of a loaded model, too."""
    sizes = {**SMALL, **ALTERNATING, "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB}
    (tmp_path / "model.safetensors").write_bytes(b"weights that are never read")
    for field, value in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 2)):
        fields = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, field: value}
        AutoConfig.for_model("gemma4_text", **sizes, **fields).save_pretrained(tmp_path)
        message = f"gemma4_text .*{field} = {value}.*not support; models of gemma4_text whose config.json has 0"
        with pytest.raises(ModelNotBlendableError, match=message):
            BlendEngine.from_pretrained(tmp_path, with_tokenizer=False)
        assert f"{field} = {value}" in diagnose(tmp_path).reason
    config = AutoConfig.for_model("gemma4_text", **sizes)  # as transformers makes it
    assert config.hidden_size_per_layer_input == 256
    with pytest.raises(ModelNotBlendableError, match="hidden_size_per_layer_input = 256"):
        BlendEngine(AutoModelForCausalLM.from_config(config).eval())


def tiny(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_hidden_layers": layers, "attention_dropout": 0.3})).eval()


def test_a_model_in_training_mode_is_refused_and_not_switched() -> None:
    """A part of it is named, unless it drops nothing."""
    model = tiny().train()
    with pytest.raises(InvalidInputError, match=r"LlamaForCausalLM is in training mode.*call model\.eval\(\) first"):
        BlendEngine(model)
    assert model.training
    diagnosis = diagnose(model)
    assert not diagnosis.blendable and "training mode" in diagnosis.reason
    model.eval()
    model.model.layers[1].mlp.train()
    assert diagnose(model).blendable
    model.model.layers[1].self_attn.train()
    with pytest.raises(InvalidInputError, match=r"^model\.layers\.1\.self_attn of LlamaForCausalLM is in training"):
        BlendEngine(model)


@pytest.mark.may_fail("background work")
def test_nothing_is_stored_once_the_model_is_switched_to_training() -> None:
    model = tiny()
    unseen = chunk(random_ids(21, 4))
    with open_engine(model, capture=True) as engine:
        prompt = replace(RAG, segments=(*RAG.segments[:-1], unseen, QUESTION))
        before = engine.prefill(prompt)
        model.train()
        with pytest.raises(InvalidInputError, match="training mode"):
            engine.warm([unseen])
        again = engine.prefill(prompt)  # the engine's own view of the model keeps the mode in which it was opened
        engine.runtime.store_missed(again, text=False)
        engine.flush()
        assert torch.equal(again.logits, before.logits)
        assert {len(manifest.token_ids) for manifest in engine.store.manifests()} == {len(A), len(B), len(C)}
        assert engine.runtime.background.given_up["failed"] == 1
        model.eval()
        assert engine.warm([unseen]).stored == 1


def test_a_model_of_one_layer_works_with_selectors_that_check_no_layer() -> None:
    model = tiny(layers=1)
    diagnosis = diagnose(model)
    assert not diagnosis.blendable
    assert diagnosis.reason.startswith("layers: one decoder layer")
    assert diagnose(tiny(layers=2)).blendable
    for selector in ("hkvd", "hybrid"):
        with pytest.raises(InvalidInputError, match=r"the model has one layer only, .*use a selector without check"):
            open_engine(model, selector=selector)
    for selector in ("head", "query"):
        engine = open_engine(model, selector=selector, recompute_ratio=0.25)
        result = engine.prefill(RAG)
        assert result.report.loaded_tokens == len(A) + len(B) + len(C)
        assert 0 < result.report.recomputed_tokens < result.report.loaded_tokens
        full = engine.prefill(RAG, mode="full")
        everything = engine.prefill(RAG, selector=engine.runtime.settings.selector(1.0))
        torch.testing.assert_close(everything.logits, full.logits, atol=1e-5, rtol=1e-4)


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SMALL, **LATENT, **GROUPED_MOE, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("models") / "latent", sentencepiece()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3", vocab_size=len(tokenizer)))
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    model.save_pretrained(path)
    return path


def messages(*passages: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text} for text in (*passages, "Who wrote it?")]
    return [{"role": "user", "content": parts}]


PASSAGES = [f"{number}. {' '.join(CORPUS[number:] + CORPUS[:number])}" for number in range(3)]


def test_doctor_says_what_is_kept_and_refuses_sparse_attention_by_name(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("doctor", "--model", folder)
    words = " ".join(result.out.split())
    assert result.code == 0, result.out + result.err
    assert "4 layers: a latent of 16 and a rotated key part of 8, float32: 384 bytes a token" in words
    assert "4 layers keep latents, 18.8% of their keys and values expanded" in words
    assert "half pairing, 8 of 24 dims" in words
    # the weights of the other one are not read
    config_of("deepseek_v32").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    result = run("doctor", "--model", tmp_path)
    words = " ".join((result.out + result.err).split())
    assert result.code != 0
    assert "deepseek_v32 attends sparsely: an indexer selects the 2048 tokens" in words
    assert "serve it without blending" in words


def test_plan_counts_the_bytes_of_latents(run: Run, tmp_path: Path) -> None:
    """DeepSeek-V3's shape, from its config.json alone."""
    AutoConfig.for_model("deepseek_v3", dtype="bfloat16").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    result = run("plan", "--model", tmp_path, "--prefill-s", "3", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["bytes_per_token"] == 61 * (512 + 64) * 2
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": "two"}')
    assert "config.json does not say" in run("plan", "--model", tmp_path, "--prefill-s", "3").err


def ask(web: TestClient, *passages: str, **extra: Any) -> dict[str, Any]:
    body = {"model": "latent", "messages": messages(*passages), "max_tokens": 6, "temperature": 0, "cacheblend": extra}
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_a_server_blends_what_an_earlier_one_stored(folder: Path, tmp_path: Path, codec: str) -> None:
    """Several requests at once; then, in another process's place, the same store in another order of passages."""
    config = BlendConfig(codec=codec, block_size=16)
    for round_ in range(2):
        with BlendEngine.from_pretrained(folder, store=tmp_path / "store", config=config) as engine:
            engine.name = "latent"
            with TestClient(create_app(engine, ServeSettings(chunk_tokens=16))) as web:
                order = PASSAGES if round_ == 0 else PASSAGES[::-1]
                with ThreadPoolExecutor(3) as pool:
                    answers = list(
                        pool.map(lambda _, order=order, web=web: ask(web, *order, recompute_ratio=1.0), range(3))
                    )
                full = ask(web, *order, mode="full")["choices"][0]["message"]["content"]
                assert {each["choices"][0]["message"]["content"] for each in answers} == {full}
                if round_:
                    assert all(each["cacheblend"]["missed_tokens"] == 0 for each in answers)
                    blended = ask(web, *order, recompute_ratio=0.2)["cacheblend"]
                    assert 0 < blended["recomputed_tokens"] < sum(blended["hit_tokens"].values())
                    body = {"model": "latent", "messages": messages(*order), "max_tokens": 2}
                    wrong = web.post("/v1/chat/completions", json={**body, "cacheblend": {"recompute_ratio": 2}})
                    assert wrong.status_code == 400
                assert engine.flush(timeout=60)


SHORT = Prompts(passages=(4, 6), tokens=(64, 96))
ROWS = 12
SEED = 70


@pytest.fixture(scope="module")
def engine() -> BlendEngine:
    return BlendEngine.from_pretrained(model_path(), store="memory", device="cpu")


def right(engine: BlendEngine, row: QuestionRow, selector: Selector) -> bool:
    prompt = Template().prompt(engine, row.passages, row.question)
    engine.warm(prompt.chunks)
    answer, _ = finish(engine, prompt, fused(engine, prompt, selector), SamplingParams(max_new_tokens=8))
    return answer == row.answers[0]


def test_transformers_opens_it_without_this_package() -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers >= 12 and model.config.max_position_embeddings == MAX_POSITIONS
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "The boot belongs to Alban.\n\nWho has the boot?"}],
        add_generation_prompt=True,
        return_dict=False,
        return_tensors="pt",
    )
    found = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert found[-1] == tokenizer.eos_token_id
    assert tokenizer.backend_tokenizer.get_vocab() == build_tokenizer().get_vocab(), "the one that training uses"
    files = {file.name: file.stat().st_size for file in model_path().iterdir()}
    assert {"README.md", "blend-profile.json", "model.safetensors"} <= set(files) and sum(files.values()) < 16_000_000


CARD = [
    *(("full recompute", each, 0.75, 1) for each in ("cross", "direct", "local", "chain", "unanswerable")),
    *(("full reuse", each, 0, 0.25) for each in ("cross", "cross-hard", "chain")),  # they need two passages
    *(("full reuse", each, 0.75, 1) for each in ("direct", "local")),
    *(("its profile", each, 0.7, 1) for each in ("cross", "chain")),
]


@pytest.mark.parametrize(
    ("how", "category", "least", "most"), rotating(CARD, core=[each for each in CARD if each[1] == "cross"])
)
def test_it_answers_as_its_card_says(engine: BlendEngine, how: str, category: str, least: float, most: float) -> None:
    assert engine.runtime.settings.profile is not None
    selectors = {"full recompute": AllRows(), "full reuse": NoRows(), "its profile": engine.runtime.settings.selector()}
    rows = draw_questions(SEED, ROWS, [category], SHORT)
    assert least <= sum(right(engine, row, selectors[how]) for row in rows) / len(rows) <= most
