"""The training script on a recipe of few steps: it trains, resumes, and enforces the goals of its stages."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.nano import train
from lab.nano.encoding import Encoder, collate, draw_batch, draw_example
from lab.nano.model import BLOCK, Tally, build_model, exact_match
from lab.nano.recipe import RECIPE, Recipe, Shape, Stage
from lab.nano.scenes import Style
from lab.nano.tokenizer import MAX_POSITIONS, build_tokenizer
from lab.nano.train import Trainer, TrainingFailedError

STAGE = Stage(
    "first",
    steps=4,
    tokens=300,
    passages=(2, 2),
    length=(24, 32),
    dense=(1.0, 0.5),
    weights={"direct": 1.0, "cross": 1.0},
    goal={},
    questions=3,
    warm_up=1,
)
TINY = Recipe(
    stages=(STAGE, replace(STAGE, name="second", steps=3, decay=1.0)),
    shape=Shape(layers=10, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=32),
)


def run(out: Path, recipe: Recipe = TINY, seed: int = 1) -> Trainer:
    trainer = Trainer(recipe, seed, out, "cpu")
    trainer.run()
    return trainer


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CHECKED_SCENES", 2)
    monkeypatch.setattr(train, "EVERY", 2)


def test_attention_in_blocks_has_the_loss_and_gradients_of_plain_attention(tmp_path: Path) -> None:
    trainer = Trainer(TINY, 1, tmp_path, "cpu")
    trained = trainer.trained
    for name, parameter in trained.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # zeros at first, which would hide attention
            torch.nn.init.normal_(parameter, std=0.1)
    scene = replace(STAGE, passages=(3, 3), length=(BLOCK, BLOCK), tokens=800)
    batch = draw_batch(trainer.encoder, random.Random(3), scene, 1.0)
    assert batch.ids.shape[1] > 2 * BLOCK and batch.ids.shape[1] % BLOCK

    def learn(attention: str) -> tuple[float, torch.Tensor]:
        trained.model.set_attn_implementation(attention)
        trained.zero_grad()
        loss = trained.loss(batch, Tally(), STAGE.probes)
        torch.autograd.backward(loss)
        return loss.item(), torch.cat([each.grad.flatten() for each in trained.parameters() if each.grad is not None])

    (loss, gradient), (plain_loss, plain_gradient) = learn("in_blocks"), learn("eager")
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert (gradient - plain_gradient).norm() < 1e-5 * plain_gradient.norm()


def test_it_trains_and_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It trains and writes a model that transformers opens.
    trainer = run(tmp_path / "whole")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert found.dtype == torch.bfloat16 and found.config.num_hidden_layers == 10
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 1000
    history = json.loads((tmp_path / "whole" / "history.json").read_text())
    assert [line["step"] for line in history if "step" in line] == [2, 4, 2, 3]
    assert trainer.seconds > 0
    # An interrupted training resumes to the same weights.
    learn, left = Trainer._learn, [5]

    def interrupted(trainer: Trainer, stage: Stage, tally: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        learn(trainer, stage, tally)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "SAVE_EVERY_S", -1)
    monkeypatch.setattr(Trainer, "_learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts")
    monkeypatch.setattr(Trainer, "_learn", learn)
    run(tmp_path / "parts")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    # A folder of another seed or recipe is refused.
    with pytest.raises(TrainingFailedError, match="another seed"):
        run(tmp_path / "whole", seed=2)
    with pytest.raises(TrainingFailedError, match="another recipe"):
        run(tmp_path / "whole", replace(TINY, rate=0.1))


def test_a_stage_that_misses_its_goal_runs_once_more_and_then_fails(tmp_path: Path) -> None:
    hopeless = replace(TINY, stages=(replace(STAGE, goal={"direct": 1.1}),))
    with pytest.raises(TrainingFailedError, match="missed its goal twice"):
        run(tmp_path, hopeless)
    history = json.loads((tmp_path / "history.json").read_text())
    assert sum("missed" in line for line in history) == 2


def test_a_stage_that_misses_its_goal_is_extended_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ADDED_AT_ONCE", 2)
    hopeless = replace(TINY, stages=(replace(STAGE, goal={"direct": 1.1}, more=3),))
    with pytest.raises(TrainingFailedError, match="missed its goal twice"):
        run(tmp_path, hopeless)
    history = json.loads((tmp_path / "history.json").read_text())
    steps = [line["step"] for line in history if "step" in line]
    assert steps == 2 * [2, STAGE.steps, STAGE.steps + 2, STAGE.steps + 3]  # a line every other step
    assert sum("missed" in line for line in history) == 6


@pytest.mark.parametrize("stage", RECIPE.stages, ids=lambda stage: stage.name)
@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_batches_stay_within_the_positions(stage: Stage, progress: float) -> None:
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    for _ in range(5):
        batch = draw_batch(encoder, rng, stage, progress)
        assert int(batch.positions.max()) < MAX_POSITIONS
        assert batch.ids.shape == batch.labels.shape == batch.positions.shape
        for where in batch.probes.values():
            assert bool((where[:, 1] < batch.ids.shape[1]).all())


def test_padding_is_on_the_right_and_not_trained_on() -> None:
    encoder, rng = Encoder(build_tokenizer()), random.Random(0)
    examples = [draw_example(encoder, rng, STAGE, Style(n, 32), 2) for n in (1, 3)]
    batch = collate(examples)
    short = len(examples[0].ids)
    assert bool((batch.labels[0, short:] == 0).all())
    assert batch.ids[1].tolist()[: len(examples[1].ids)] == examples[1].ids


def test_exact_match_of_an_untrained_model_is_nothing(tmp_path: Path) -> None:
    trainer = Trainer(TINY, 1, tmp_path, "cpu")
    model = build_model(TINY, train.save_tokenizer(tmp_path / "t"))
    found = exact_match(model, trainer.encoder, 1, Style(2, 32), 5)
    assert set(found) >= {"direct", "unanswerable"} and max(found.values()) < 0.5
