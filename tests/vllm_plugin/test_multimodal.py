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
from vllm_prompts import COUNT, FORGET, Asked, Texts, ask
from vllm_running import SETTINGS, Serve, check_blended, tokens

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

    def step(self, texts: Texts, count: int) -> dict[str, Any]:
        """What is asked: texts alone, then each with an item, another one, and two in both orders behind its
        passages, and one in front of them."""
        passages, item = texts.passages(5), Asked([*self.shown], [])
        # The question fills a block: vLLM computes the last block, which is not full, itself the second time.
        fronts = [texts.prompt(texts.rng.sample(passages, 3), front, question=40) for front in (17, 64, 30)[:count]]
        asked = [(one, list[int]()) for one in fronts]
        for one in fronts:
            behind = texts.prompt(texts.rng.sample(passages, 2))
            for seeds in ([1], [2], [1, 2], [2, 1]):
                more = item + Asked(texts.ids(5), []) if len(seeds) > 1 else Asked([], [])
                asked.append((one + item + behind + more, seeds))
            asked.append((one.behind([5, *self.shown]), [1]))
        return ask([one for one, _ in asked], **{self.kind: [seeds for _, seeds in asked]})


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


@among("sound", *SHOWN)
def test_at_ratio_one_answers_are_those_of_vllm(serve: Serve, scene: Scene) -> None:
    step, model = scene.step(Texts(61), 3), serve(scene.model, **scene.engine)
    right = tokens(model.plain(step))
    assert len({str(answer) for answer in right}) > len(right) * 2 // 3  # an item that was ignored would be seen
    steps = [{**step, "alone": True}, FORGET, step, step, FORGET, COUNT, {**step, "chunks": None}]
    result = model.run(steps, {"recompute_ratio": 1.0})
    for at in (0, 2, 3, 6):
        assert tokens(result["answers"][at]) == right, at
    blended = result["metrics"]["vllm:cacheblend_requests"] - result["answers"][5]["vllm:cacheblend_requests"]
    assert blended >= 3  # equal fronts share what was blended for one of them
    check_blended(result)


@among("sound", "qwen2.5-vl", "gemma3")
def test_approximate_blocks_are_not_found_with_another_item_nor_without_blending(serve: Serve, scene: Scene) -> None:
    """At ratio 0 every answer is that of the same request in an empty cache; plain ones are vLLM's own."""
    step = scene.step(Texts(62), 2)
    count = len(step["ask"])
    plain, alone = {**step, "chunks": [[]] * count}, {**step, "alone": True}
    in_empty_caches = [{name: [values[number]] for name, values in step.items()} for number in range(2, count, 3)]
    steps = [plain, FORGET, alone]
    for one in in_empty_caches:
        steps += [FORGET, one]
    steps += [FORGET, alone, alone, plain]
    extra = {"recompute_ratio": 0.0, "match_content": False, "shadow": 1.0}
    result = serve(scene.model, **scene.engine).run(steps, extra)["answers"]
    right, first, again, after = (tokens(result[at]) for at in (0, -3, -2, -1))
    assert after == right and first == again
    assert sum(mine != its for mine, its in zip(again, right, strict=True)) >= count // 3  # full reuse errs here
    for place, answer in enumerate(again[2::3]):
        assert tokens(result[4 + 2 * place]) == [answer], place
