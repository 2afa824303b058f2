"""`lab inspect`: against transformers' own cache and attention, against slow definitions, by hand, and as a command."""

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import AllRows, Hkvd, NoRows, Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.shadow import Compared
from cacheblend.store import MemoryStore
from command_line import Run, runner
from families import BLENDABLE, VOCAB, tiny_model
from lab.cli import main
from lab.inspection.deviation import (
    attention_deviation_by_layer,
    kv_deviation_by_layer,
    ranks,
    spearman,
)
from lab.inspection.inspection import Inspection, MethodView, inspect_prompt, ratio_curves, summary
from lab.inspection.observation import (
    LAST_ROWS,
    Part,
    alone_mass,
    context_length,
    observe_full,
    observe_fused,
    part_of_row,
    parts_of,
)
from reference import plain_kv
from tiny_folder import TinyShape, build_tiny

FAMILIES = [
    name
    for name in ("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "glm", "gemma4_text", "deepseek_v3")
    if name in [family.name for family in BLENDABLE]
]
"""Plain; windows and two thetas; sinks; experts; partial RoPE; layers of several shapes; latents."""
SINKS = ("gpt_oss",)
BOS, TOLERANCE = 1, 1e-4


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


A, B, C = chunk(ids(30, 1), "first"), chunk(ids(18, 2), "second"), chunk(ids(26, 3))
SYSTEM, SEPARATOR, QUESTION = text(ids(7, 4)), text(ids(2, 5)), text(ids(9, 6))
RAG = Prompt.of([SYSTEM, A, SEPARATOR, B, SEPARATOR, C, SEPARATOR, QUESTION])
LONG_QUESTION = Prompt.of([SYSTEM, B, A, text(ids(LAST_ROWS + 9, 7))])


def engine_of(family: str = "llama", prompt: Prompt = RAG, **settings: object) -> BlendEngine:
    """An engine that holds the prompt's chunks."""
    anchor = settings.get("anchor", "none")
    config = BlendConfig(**{"block_size": 16, "tile_rows": 24, "capture": False, "anchor": "none", **settings})  # type: ignore[arg-type]
    bos = BOS if anchor == "bos" else None
    engine = BlendEngine(tiny_model(family), store=MemoryStore(), config=config, bos_id=bos)
    engine.warm(prompt.chunks, system=prompt)
    return engine


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((actual - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


# ---- what is observed is the model's own ------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_is_the_models_own(family: str) -> None:
    # Fresh kv is transformers own
    engine = engine_of(family)
    full = observe_full(engine, RAG)
    logits, kv = plain_kv(engine.model, RAG.token_ids)
    assert close(full.logits, logits)
    assert len(full.kv) == len(kv)
    for mine, theirs in zip(full.kv, kv, strict=True):
        assert close(mine.keys, theirs[0])
        assert close(mine.values, theirs[1])
    # Attention of a row sums to one
    blend = observe_fused(engine, RAG, Hkvd())
    alone = alone_mass(engine, blend.plan)
    for mass in (full.mass, blend.mass[blend.computed], alone[:, blend.plan.candidate_rows]):
        sums = mass.sum(axis=-1)
        assert (sums <= 1 + 1e-5).all()
        if family in SINKS:
            assert sums.min() < 0.99
        else:
            assert sums.min() > 1 - 1e-5
    assert np.isnan(blend.mass[~blend.computed]).all()
    # Layer 0 depends on the token alone; recomputing everything is full recompute.
    reuse, everything = (observe_fused(engine, RAG, selector) for selector in (NoRows(), AllRows()))
    scale = float(kv_deviation_by_layer(full.kv, [LayerKV(k * 0, v * 0) for k, v in full.kv]).mean())
    deviation = kv_deviation_by_layer(full.kv, reuse.kv)
    assert deviation.shape == (len(full.kv), len(RAG))
    assert deviation[0].max() < 1e-6 * scale
    assert deviation[1:, reuse.plan.candidate_rows].mean() > 1e-3 * scale
    assert kv_deviation_by_layer(full.kv, everything.kv).max() < 1e-6 * scale
    assert np.nanmax(attention_deviation_by_layer(full.forward, everything.forward)) < TOLERANCE
    assert np.nanmax(attention_deviation_by_layer(full.forward, reuse.forward)) > 0.01


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_attention_is_transformers_own(family: str) -> None:
    """Soft-cap, windows and sinks included."""
    engine = engine_of(family, LONG_QUESTION)
    seen = observe_full(engine, LONG_QUESTION)
    model = copy.deepcopy(engine.model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(input_ids=engine.runtime.ids_of(LONG_QUESTION)[None], output_attentions=True, use_cache=False)
    context = context_length(LONG_QUESTION)
    part = part_of_row(parts_of(LONG_QUESTION), len(LONG_QUESTION))
    for layer, theirs in enumerate(out.attentions):
        assert close(seen.forward[layer], theirs[0, :, -LAST_ROWS:, :context])
        mean = theirs[0].mean(0)
        pooled = torch.stack([mean[:, part == i].sum(1) for i in range(part.max() + 1)], dim=1)
        assert close(torch.from_numpy(seen.mass[layer]), pooled)


@pytest.mark.parametrize("selector", [NoRows(), Hkvd(), Hkvd((1, 2), (0.4, 0.2)), Query(0.2)], ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
def test_watching_a_pass_changes_nothing(family: str, selector: Selector) -> None:
    """The second runner over the KV that the pass left gives the pass's own logits: its attention is the pass's."""
    engine = engine_of(family)
    result = engine.prefill(RAG, selector=selector)
    report = result.report
    seen = observe_fused(engine, RAG, selector)
    assert close(seen.logits, result.logits)
    assert all(close(mine.keys, theirs.keys) for mine, theirs in zip(seen.kv, result.kv, strict=True))
    assert report.row_layers <= seen.compute * len(RAG) * len(seen.kv) < 1.1 * (report.row_layers + len(RAG))
    assert int(seen.computed[-1, seen.plan.candidate_rows].sum()) == report.recomputed_tokens


def test_rows_are_computed_until_the_check_that_drops_them() -> None:
    engine = engine_of()
    seen = observe_fused(engine, RAG, Hkvd((1, 3), (0.5, 0.1)))
    candidates = seen.plan.candidate_rows
    counts = seen.computed[:, candidates].sum(axis=1).tolist()
    half, tenth = round(0.5 * len(candidates)), round(0.1 * len(candidates))
    assert counts == [len(candidates), half, half, tenth]
    others = np.setdiff1d(np.arange(len(RAG)), candidates)
    assert seen.computed[:, others].all()


def test_the_anchor_takes_the_first_tokens_place() -> None:
    """Computed alone behind BOS, a chunk attends to it; in a prompt that begins with BOS that is its first token."""
    with_bos = Prompt.of([text([BOS]), SYSTEM, B, A, QUESTION])
    engine = engine_of(anchor="bos", prompt=with_bos)
    mass = alone_mass(engine, engine.runtime.planner.plan(with_bos, engine.store))
    rows = slice(8, 8 + len(B))
    assert np.allclose(mass[:, rows, 0] + mass[:, rows, 2], 1, atol=1e-5)
    assert mass[:, rows, 0].min() > 0
    engine = engine_of(anchor="bos", prompt=RAG)
    mass = alone_mass(engine, engine.runtime.planner.plan(RAG, engine.store))
    assert np.allclose(mass[:, 7:37].sum(axis=-1), mass[:, 7:37, 1], atol=1e-6)
    assert mass[:, 7:37, 1].max() < 1  # what BOS got is nobody's here


# ---- deviations -------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    # Deviations by hand
    fresh = LayerKV(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    other = LayerKV(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    other.keys[1, 2, 0], other.values[0, 2, 1], other.values[0, 0, 0] = 3, 4, -2
    assert kv_deviation_by_layer([fresh], [other]).tolist() == [[4, 0, 25]]
    full, reuse = torch.tensor([[[0.6, 0.8]]]), torch.tensor([[[0.6, 0.3]]])
    assert attention_deviation_by_layer([full, full * 0], [reuse, reuse])[0] == pytest.approx(0.5)
    assert np.isnan(attention_deviation_by_layer([full * 0], [reuse])[0])
    # Spearman by hand
    assert spearman(np.array([1.0, 5, 9]), np.array([-3.0, 0, 1e9])) == 1
    assert spearman(np.array([1.0, 5, 9]), np.array([2.0, 1, 0])) == -1
    assert np.isnan(spearman(np.ones(3), np.arange(3.0)))
    # Parts
    parts = parts_of(Prompt.of([text([BOS]), SYSTEM, A, SEPARATOR, B, SEPARATOR, C, QUESTION]))
    assert [(part.label, part.is_chunk, part.runs) for part in parts] == [
        ("first token", False, ((0, 1),)),
        ("front", False, ((1, 8),)),
        ("chunk 1: first", True, ((8, 38),)),
        ("chunk 2: second", True, ((40, 58),)),
        ("chunk 3", True, ((60, 86),)),
        ("between", False, ((38, 40), (58, 60))),
        ("question", False, ((86, 95),)),
    ]
    assert part_of_row(parts, 95).tolist()[36:42] == [2, 2, 5, 5, 3, 3]
    assert [part.label for part in parts_of(Prompt.of([A, B]))] == ["chunk 1: first", "chunk 2: second"]
    # Measures by hand
    found = by_hand()
    assert found.relative(found.reuse).tolist() == [[0, 0, 0], [2, 1, 0]]
    assert found.mean_deviation(found.blend).tolist() == [0, 0.75]
    assert found.top_share()[1] == pytest.approx(2 / 3)
    assert np.isnan(found.top_share()[0])
    assert found.recomputed.tolist() == [0]
    assert found.cross_chunk(found.full).tolist() == [0.25, 0.25]
    assert summary(found)["layers"][1:] == [
        {
            "layer": 1,
            "mean_deviation": {"reuse": 1.5, "blend": 0.75},
            "top_share": 0.66667,
            "correlation_with_next": None,
            "attention_deviation": {"reuse": 0.5, "blend": 0.5},
            "cross_chunk_attention": {"full": 0.25, "reuse": 0.25, "blend": 0.25},
        }
    ]


# ---- the whole inspection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_inspection(family: str) -> None:
    engine = engine_of(family, selector="hkvd", check_layers=(1,), ratios=(0.15,))
    done: list[tuple[int, int]] = []
    found = inspect_prompt(
        engine,
        RAG,
        curves=ratio_curves(BlendConfig(selector="hkvd"), (0.0, 0.3, 1.0)),
        advance=lambda *at: done.append(at),
    )
    assert done == [(n, 10) for n in range(1, 11)]
    layers = len(engine.runtime.survey.layout.layers)
    assert found.kv_norm.shape == found.next_correlation().shape == (layers,)
    assert np.isnan(found.next_correlation()).tolist() == [True, *[False] * (layers - 2), True]
    assert found.full.attention.shape == (layers, len(found.parts), len(found.parts))
    assert [part.label for part in found.parts] == [
        "front", "chunk 1: first", "chunk 2: second", "chunk 3", "between", "question"
    ]  # fmt: skip
    assert len(found.recomputed) == round(0.15 * len(found.candidates))
    assert np.abs(found.full.kv_deviation).max() == 0
    assert (found.cross_chunk(found.reuse) == 0).all()
    blend = found.cross_chunk(found.blend)
    assert np.allclose(blend[0], found.cross_chunk(found.full)[0], atol=1e-5)  # in front of the check
    assert (blend[1:] > 0).all() and (blend[1:] < found.cross_chunk(found.full)[1:]).all()
    assert found.mean_deviation(found.blend)[-1] < found.mean_deviation(found.reuse)[-1]
    none, _, everything = found.curves["hkvd"]
    assert np.allclose(none.attention_deviation, found.reuse.attention_deviation, atol=1e-3, equal_nan=True)
    assert np.nanmax(everything.attention_deviation) < TOLERANCE
    assert none.compute < everything.compute <= 1
    json.dumps(summary(found), allow_nan=False)


def test_an_exact_prefix_counts_as_full_recompute() -> None:
    prompt = Prompt.of([A, B, QUESTION])
    found = inspect_prompt(engine_of(prompt=prompt), prompt)
    assert found.sources[: len(A)] == ["prefix"] * len(A)
    assert found.candidates.tolist() == list(range(len(A), len(A) + len(B)))
    assert np.allclose(found.reuse.attention[:, 0], found.full.attention[:, 0])
    assert found.relative(found.reuse)[:, : len(A)].max() < 1e-3


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        (Prompt.of([SYSTEM, QUESTION]), 4096, "no chunk"),
        (Prompt.of([A, QUESTION]), 4096, "directly follows its anchor"),
        (RAG, len(RAG) - 1, f"{len(RAG)} tokens, inspection takes {len(RAG) - 1}.*--max-prompt-tokens"),
    ],
)
def test_what_cannot_be_inspected(prompt: Prompt, limit: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        inspect_prompt(engine_of(), prompt, max_tokens=limit)


@pytest.mark.parametrize(
    ("selector", "names"),
    [("hkvd", ["hkvd", "random"]), ("none", ["hkvd", "random"]), ("random", ["hkvd", "random"])]
    + [(name, [name, "random"]) for name in ("head", "query", "hybrid")],
)
def test_curves_of_every_selector(selector: str, names: list[str]) -> None:
    curves = ratio_curves(BlendConfig(selector=selector, check_layers=(1, 2), ratios=(0.3, 0.1)), (0.0, 0.5, 1.0))
    assert list(curves) == names
    assert list(curves[names[0]]) == [0.0, 0.5, 1.0]


# ---- parts, ranks, texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "length"), [(RAG, 85), (Prompt.of([A, B]), 47), (Prompt.of([QUESTION]), 0)])
def test_context_is_what_stands_in_front_of_the_question(prompt: Prompt, length: int) -> None:
    assert context_length(prompt) == length


def slow_ranks(values: Sequence[float]) -> list[float]:
    return [sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values]


def slow_spearman(first: Sequence[float], second: Sequence[float]) -> float:
    a, b = slow_ranks(first), slow_ranks(second)
    mean = (len(a) + 1) / 2
    above = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    below = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return above / below if below else float("nan")


PAIRS = st.lists(st.tuples(st.integers(-4, 4), st.floats(-1e6, 1e6)), min_size=1, max_size=30)


@given(PAIRS)
def test_spearman_as_defined(pairs: list[tuple[int, float]]) -> None:
    first, second = np.array([a for a, _ in pairs], dtype=float), np.array([b for _, b in pairs])
    assert ranks(first).tolist() == slow_ranks(first)
    assert spearman(first, second) == pytest.approx(slow_spearman(first, second), nan_ok=True)


# ---- numbers ----------------------------------------------------------------------------------------------


def method(kv: list[list[float]], computed: list[list[bool]]) -> MethodView:
    attention = np.zeros((2, 3, 3))
    attention[:, 1] = [0.25, 0.5, 0]
    return MethodView(np.array(kv), attention, np.array([0, 0.5]), Compared(0.1, (True,)), np.array(computed), 0.5)


def by_hand() -> Inspection:
    """Two layers; the chunks' tokens are 0 and 1; token 2 is the question."""
    return Inspection(
        model="<b>model</b>",
        selector="Hkvd()",
        sources=["loaded", "loaded", "text"],
        parts=[
            Part("chunk 1: <i>", True, ((0, 1),)),
            Part("chunk 2", True, ((1, 2),)),
            Part("question", False, ((2, 3),)),
        ],
        candidates=np.array([0, 1]),
        kv_norm=np.array([1.0, 2.0]),
        full=method([[0, 0, 0]] * 2, [[True] * 3] * 2),
        reuse=method([[0, 0, 0], [16, 4, 0]], [[False, False, True]] * 2),
        blend=method([[0, 0, 0], [1, 4, 0]], [[True] * 3, [True, False, True]]),
    )


# ---- the command ----------------------------------------------------------------------------------------------------


PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather.",
    "Mussels grow on ropes, and the harvest stops when <b>algae</b> & worms are found.",
    "A clock that shows the tide needs a wheel for the moon.",
]
SHAPE = TinyShape(layers=4, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)
FIGURES = ["attention-by-chunk.png", "attention-deviation-by-ratio.png", "kv-deviation.png"]
ASK = ("--question", "When was it lit?", "--system", "Answer from the passages.")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "tiny-llama"
    build_tiny(folder, PASSAGES, SHAPE)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "120")
    return runner(capsys, "inspect", main=main)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"ctxs": [{"title": "", "text": text} for text in PASSAGES], "question": "When was it lit?"}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    return file


def is_picture(file: Path) -> bool:
    return file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 10_000


def test_inspect_shows_every_layer(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    # Inspect shows every layer
    result = run("-m", model, "-d", data, "--no-curve", "--system", "Answer.", "--check-layers", 1)
    assert result.code == 0
    layers = re.findall(r"^ +(\d) +[\d.e-]+ +[\d.e-]+ ", result.out, re.MULTILINE)
    assert layers == ["0", "1", "2", "3"] and "None" in result.out
    # Inspect stores the passages
    store = tmp_path / "store"
    assert run("-m", model, "-d", data, "-s", store, "--no-curve").code == 0
    assert list(store.rglob("*.safetensors"))


def test_inspect_draws_figures(run: Run, model: Path, data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    out, asked = (
        tmp_path / "a" / "figures",
        ("-m", model, "-d", data, "--system", "Answer.", "-r", 0.3, "--check-layers", 1),
    )
    result = run(*asked, "--check-layers", 1, "--out", out, "--json")
    assert result.code == 0
    assert sorted(file.name for file in out.iterdir()) == FIGURES
    assert all(is_picture(out / name) for name in FIGURES)
    assert sorted(result.json["files"]) == sorted(str(file) for file in out.iterdir())
    assert result.json["recomputed_tokens"] == round(0.3 * result.json["loaded_tokens"])
    assert list(result.json["attention_deviation_by_ratio"]) == ["hkvd", "random"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'cacheblend[plot]'" in run(*asked, "--out", out).err


@pytest.mark.parametrize("selector", ["query", "hybrid", "head", "all", "none"])
def test_inspect_takes_every_selector(run: Run, model: Path, data: Path, tmp_path: Path, selector: str) -> None:
    result = run("-m", model, "-d", data, "--selector", selector, "--no-curve", "--json")
    assert result.code == 0
    last = result.json["layers"][-1]
    assert last["attention_deviation"]["blend"] <= last["attention_deviation"]["reuse"] * 1.5
    if selector == "all":
        assert last["attention_deviation"]["blend"] < 1e-4
        assert result.json["recomputed_tokens"] == result.json["loaded_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-q", "When?"), "no passage to inspect"),
        (("-p", PASSAGES[0]), "no question"),
        (("-q", "When?", "-p", PASSAGES[0]), "nothing of this prompt is reused at a new position"),
        ((*ASK, "-p", PASSAGES[0], "--max-prompt-tokens", 9), "inspection takes 9"),
        ((*ASK, "-p", PASSAGES[0], "--out", "{file}"), "is a file"),
        ((*ASK, "-p", PASSAGES[0], "--check-layers", 4), "check layer 4 does not exist"),
        ((*ASK, "-p", PASSAGES[0], "-r", 2), "0..1"),
        ((*ASK, "-p", PASSAGES[0] * 50), "context 512"),
    ],
)
def test_bad_input(run: Run, model: Path, data: Path, options: tuple[object, ...], message: str) -> None:
    result = run("-m", model, *(str(data) if option == "{file}" else option for option in options))
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") <= 2


def test_a_model_that_cannot_be_blended(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = run("-m", tmp_path, *ASK, "-p", PASSAGES[0], "--json")
    assert result.code == 2
    assert "error" in result.json
