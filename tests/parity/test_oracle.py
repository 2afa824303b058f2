"""The fused prefill equals the reference: the same rows, logits and KV, for every selector."""

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import AllRows, Gradual, Head, Hkvd, Measure, NoRows, RandomRows, Threshold
from cacheblend.engines.hf import SamplingParams
from campaign import rotating
from families import tiny_model
from parity.scenes import (
    BOS,
    DIVERSE,
    FAMILIES,
    LATENT,
    QUESTION,
    RAG,
    A,
    B,
    C,
    assert_as_reference,
    run,
    warm_engine,
)
from reference import blend

TOLERANCE = 3e-5
SELECTORS = {
    "hkvd 0": Hkvd((1,), (0.0,)),
    "hkvd 0.1": Hkvd((1,), (0.1,)),
    "hkvd 0.3": Hkvd((1,), (0.3,)),
    "hkvd late": Hkvd((2,), (0.3,)),
    "hkvd last": Hkvd((3,), (0.1,)),
    "gradual": Hkvd((1, 2), (0.3, 0.1)),
    "gradual 3": Hkvd((1, 2, 3), (0.5, 0.3, 0.1)),
    "keys": Hkvd((1,), (0.3,), measure="k"),
    "values": Hkvd((1,), (0.1,), measure="v"),
    "head 0": Head(0.0),
    "head 0.1": Head(0.1),
    "head 0.3": Head(0.3),
    "random 0.1": RandomRows(0.1),
    "random 0.3": RandomRows(0.3, seed=7),
    "none": NoRows(),
    "all": AllRows(),
}


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("family", DIVERSE)
def test_every_selector_equals_the_reference(family: str, selector: str) -> None:
    if family in LATENT and SELECTORS[selector].measure != "kv":
        with pytest.raises(InvalidInputError, match="keeps one latent for both; use measure 'kv'"):
            run(warm_engine(family), RAG, SELECTORS[selector])
        return
    outcome = run(warm_engine(family), RAG, SELECTORS[selector])
    assert_as_reference(outcome, blend(tiny_model(family), RAG, SELECTORS[selector]), TOLERANCE)


@pytest.mark.parametrize("selector", ["gradual", "none"])
@pytest.mark.parametrize("family", rotating(name for name in FAMILIES if name not in DIVERSE))
def test_every_family_equals_the_reference(family: str, selector: str) -> None:
    outcome = run(warm_engine(family), RAG, SELECTORS[selector])
    assert_as_reference(outcome, blend(tiny_model(family), RAG, SELECTORS[selector]), TOLERANCE)


@pytest.mark.parametrize("share", [0.1, 0.3])
@pytest.mark.parametrize(
    ("family", "measure"),
    [(name, measure) for name in DIVERSE for measure in ("kv", "k", "v") if measure == "kv" or name not in LATENT],
)
def test_the_threshold_selector_equals_the_reference(family: str, measure: Measure, share: float) -> None:
    """The bound is halfway between two deviations of the reference."""
    model = tiny_model(family)
    found = sorted(blend(model, RAG, Hkvd((1,), (1.0,), measure)).deviations[1].values())
    cut = round((1 - share) * len(found))
    selector = Threshold((found[cut - 1] + found[cut]) / 2, (1,), measure)
    reference = blend(model, RAG, selector)
    assert len(reference.recomputed) == len(found) - cut
    assert_as_reference(run(warm_engine(family), RAG, selector), reference, TOLERANCE)


@pytest.mark.parametrize("selector", ["gradual", "head 0.1", "none"])
@pytest.mark.parametrize("family", DIVERSE)
def test_chunks_with_the_bos_anchor_equal_the_reference(family: str, selector: str) -> None:
    """Chunks were computed after BOS; in the prompts one follows BOS directly, others follow later or without BOS."""
    model, prompt = tiny_model(family), Prompt.of([text([BOS]), A, B, C, QUESTION])
    engine = warm_engine(family, anchor="bos")
    outcome = run(engine, prompt, SELECTORS[selector])
    without_bos = run(engine, Prompt.of([B, A, QUESTION]), SELECTORS[selector])
    assert outcome.report.hit_tokens["prefix"] == 1 + len(A)
    assert_as_reference(outcome, blend(model, prompt, SELECTORS[selector], anchor=[BOS]), TOLERANCE)
    assert without_bos.report.hit_tokens["prefix"] == 0  # B's keys move from position 1 to 0
    reference = blend(model, Prompt.of([B, A, QUESTION]), SELECTORS[selector], anchor=[BOS])
    assert_as_reference(without_bos, reference, TOLERANCE)


@pytest.mark.parametrize("family", DIVERSE)
def test_decoding_continues_from_the_blended_cache(family: str) -> None:
    """Each token equals the first token of a blended prefill of the prompt with the answer so far appended."""
    model = tiny_model(family)
    selector = Gradual(0.1).of_model(model.config.get_text_config().num_hidden_layers)
    answer = warm_engine(family).generate(RAG, SamplingParams(max_new_tokens=4, ignore_eos=True), ratio=0.1)
    tokens: list[int] = []
    for _ in range(4):
        longer = Prompt.of([*RAG.segments, text(tokens)])
        tokens.append(int(blend(model, longer, selector).logits.argmax()))
    assert answer.token_ids == tokens
