"""Models of text and sounds or images in unmodified vLLM: what stands in front of the first of them is blended.

Situations: prompts of text alone, with an item behind and in front of passages, with two items in either order, equal
texts with other items, one at a time, at once, and again from vLLM's prefix cache; approximate blends, whose blocks
no request with another item may find.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import vision
from vision_models import SHOWN, SOUND, make_qwen2_audio
from vllm_requests import refusals
from vllm_running import SETTINGS, Asked, Texts, Vllm, tokens

SOUND_LINE = pytest.mark.feature("models of text and sound", "blends what stands before the first sound")
CORE = ("sound", "qwen2.5-vl")
IMAGE_LINE = pytest.mark.feature("vision-language models", "blends what stands before the first image")


@dataclass(frozen=True)
class Scene:
    """A model, the kind of its items, and the ids that stand for one in a prompt."""

    model: Path
    kind: str
    shown: tuple[int, ...]

    @property
    def engine(self) -> dict[str, Any]:
        return {"skip_tokenizer_init": False, "limit_mm_per_prompt": {self.kind: 2}, "block_size": 32}

    def steps(self, texts: Texts, count: int) -> dict[str, Any]:
        """What is asked: texts alone, then each with an item, another one, and two in both orders behind its
        passages, and one in front of them."""
        passages = texts.passages(5)
        # The question fills a block: vLLM computes the last block, which is not full, itself the second time.
        asked = [texts.prompt(texts.rng.sample(passages, 3), front, question=40) for front in (17, 64, 30)[:count]]
        ids, spans, items = [one.ids for one in asked], [one.spans for one in asked], [list[int]() for _ in asked]
        for one in asked:
            behind = texts.prompt(texts.rng.sample(passages, 2))
            for seeds in ([1], [2], [1, 2], [2, 1]):
                more = [*self.shown, *texts.ids(5)] if len(seeds) > 1 else []
                ids.append([*one.ids, *self.shown, *behind.ids, *more])
                spans.append([*one.spans, *moved(behind, len(one.ids) + len(self.shown))])
                items.append(seeds)
            ids.append([5, *self.shown, *one.ids])
            spans.append(moved(one, 1 + len(self.shown)))
            items.append([1])
        return {"ask": ids, "chunks": spans, self.kind: items}


@pytest.fixture(scope="module")
def seeing_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the models of `vision_models`."""
    if not vision.is_there():
        pytest.skip(f"{vision.FOLDER} is not there, which processors of images need: make vllm")
    folder = tmp_path_factory.mktemp("seeing")
    program, env = Path(vision.__file__).with_name("vision_models.py"), {**os.environ, **SETTINGS}
    subprocess.run([sys.executable, str(program), str(folder)], check=True, env=env)
    return folder


def among(*names: str) -> pytest.MarkDecorator:
    """Runs a test in these families; those outside of the core take turns."""
    params = []
    for name in names:
        turn = [] if name in CORE else [pytest.mark.slow(list(SHOWN).index(name))]
        params.append(pytest.param(name, marks=[SOUND_LINE if name == "sound" else IMAGE_LINE, *turn]))
    return pytest.mark.parametrize("scene", params, indirect=True)


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    if request.param == "sound":
        return Scene(make_qwen2_audio(tmp_path_factory.mktemp("sound") / "model"), "audio", (SOUND,))
    return Scene(request.getfixturevalue("seeing_models") / request.param, "image", SHOWN[request.param])


def moved(one: Asked, by: int) -> list[list[int]]:
    return [[start + by, stop + by] for start, stop in one.spans]


@among("sound", *SHOWN)
def test_at_ratio_one_answers_are_those_of_vllm(vllm: Vllm, scene: Scene, tmp_path: Path) -> None:
    ask = scene.steps(Texts(61), 3)
    right = tokens(vllm.run(scene.model, [{**ask, "chunks": None}], None, **scene.engine)["answers"][0])
    assert len({str(answer) for answer in right}) > len(right) * 2 // 3  # an item that was ignored would be seen
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 1.0}
    by_content = {**ask, "chunks": None}
    steps = [{**ask, "alone": True}, {"forget": True}, ask, ask, {"forget": True}, {"count": True}, by_content]
    result = vllm.run(scene.model, steps, extra, **scene.engine)
    for at in (0, 2, 3, 6):
        assert tokens(result["answers"][at]) == right, at
    blended = result["metrics"]["vllm:cacheblend_requests"] - result["answers"][5]["vllm:cacheblend_requests"]
    assert blended >= 3  # equal fronts share what was blended for one of them
    assert "vllm:cacheblend_fallbacks" not in " ".join(result["metrics"])


@among("sound", "qwen2.5-vl", "gemma3")
def test_approximate_blocks_are_not_found_with_another_item_nor_without_blending(
    vllm: Vllm, scene: Scene, tmp_path: Path
) -> None:
    """At ratio 0 every answer is that of the same request in an empty cache; plain ones are vLLM's own."""
    ask = scene.steps(Texts(62), 2)
    count = len(ask["ask"])
    plain = {**ask, "chunks": [[]] * count}
    extra = {"store": f"file://{tmp_path}/store", "recompute_ratio": 0.0, "match_content": False, "shadow": 1.0}
    steps: list[dict[str, Any]] = [plain, {"forget": True}, {**ask, "alone": True}]
    for number in range(2, count, 3):  # in an empty cache
        one = {name: [values[number]] for name, values in ask.items()}
        steps += [{"forget": True}, one]
    steps += [{"forget": True}, {**ask, "alone": True}, {**ask, "alone": True}, plain]
    result = vllm.run(scene.model, steps, extra, **scene.engine)["answers"]
    right, again, after = tokens(result[0]), tokens(result[-2]), tokens(result[-1])
    assert after == right
    assert tokens(result[-3]) == again
    assert sum(mine != its for mine, its in zip(again, right, strict=True)) >= count // 3  # full reuse errs here
    for place, number in enumerate(range(2, count, 3)):
        assert tokens(result[4 + 2 * place])[0] == again[number], number


def test_models_of_an_encoder_and_a_decoder_are_refused_by_name() -> None:
    assert refusals(is_multimodal_model=True, is_encoder_decoder=False) == []
    (refused,) = refusals(is_multimodal_model=True, is_encoder_decoder=True)
    assert "encoder" in refused
