"""Trains the model that ships: `python -m lab train --out FOLDER`, from the root of a checkout.

A stage that misses its goal is extended if the recipe allows more steps, then restarted once with other random draws;
if it misses the goal again, training fails. A checkpoint is saved every few minutes, and the same command resumes
from it.
"""

import json
import math
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from cacheblend.cli.output import can_draw
from cacheblend.core.errors import CacheBlendError
from lab.bench import draw_curves, picture
from lab.nano.encoding import Encoder, draw_batch
from lab.nano.model import ProbedModel, Tally, attend_in_blocks, build_model, build_optimizers, exact_match
from lab.nano.recipe import RECIPE, Recipe, Stage
from lab.nano.scenes import CATEGORIES, Style
from lab.nano.tokenizer import build_tokenizer, save_tokenizer

EVERY = 50  # steps between two reports
ADDED_AT_ONCE = 100  # steps by which a stage is extended at a time
SAVE_EVERY_S = 120
CHECKED_SCENES = 200
CHECK_SEED = 10_000  # of the fresh prompts that check a stage


class TrainingFailedError(CacheBlendError):
    """A stage missed its goal twice, the loss is not finite, or a checkpoint is of another training."""


class Trainer:
    """One training run and its state, in a folder for checkpoint, history, and finally the model."""

    def __init__(self, recipe: Recipe, seed: int, out: Path, device: str | None = None) -> None:
        self.recipe, self.seed, self.out = recipe, seed, out
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        tokenizer = save_tokenizer(out / "model")
        self.encoder = Encoder(build_tokenizer())
        model = build_model(recipe, tokenizer)
        AttentionInterface.register("in_blocks", attend_in_blocks)
        self.trained = ProbedModel(model, recipe).to(self.device)
        self.optimizers = build_optimizers(self.trained, recipe)
        self.rng = random.Random(seed)
        self.stage = self.step = self.added = self.restarts = 0
        self.seconds, self._since = 0.0, time.perf_counter()
        self.history: list[dict[str, Any]] = []
        self._attend_for(learning=True)

    def run(self) -> None:
        """Runs the remaining stages, then writes the model in bf16 and the plot; raises `TrainingFailedError`."""
        if (self.out / "checkpoint.pt").exists():
            self._load("checkpoint")
            print(f"resuming at stage {self.stage + 1} of {len(self.recipe.stages)}, step {self.step}", flush=True)
        self._since = time.perf_counter()
        while self.stage < len(self.recipe.stages):
            stage = self.recipe.stages[self.stage]
            if self.step == 0 and self.restarts == 0:
                self._save("stage")  # for `_restart`
            self._run_stage(stage)
            if self._check(stage):
                self.stage, self.step, self.added, self.restarts = self.stage + 1, 0, 0, 0
            elif self.added < stage.more:
                self.added += min(ADDED_AT_ONCE, stage.more - self.added)
            else:
                self._restart(stage)
            self._save("checkpoint")
        model = self.trained.model.to(torch.bfloat16)
        model.generation_config.max_new_tokens = None
        model.save_pretrained(self.out / "model")
        if not can_draw():
            print("no plot: pip install matplotlib", file=sys.stderr)
        else:
            plot_losses(self.history, self.out / "loss.png")
        print(f"{self.seconds / 60:.1f} minutes; the model is in {self.out / 'model'}", flush=True)

    def _run_stage(self, stage: Stage) -> None:
        tally, saved = Tally(), time.perf_counter()
        steps = stage.steps + self.added
        while self.step < steps:
            self._learn(stage, tally)
            self.step += 1
            if self.step % EVERY and self.step < steps:
                continue
            facts = tally.summary()
            self._report(stage, facts)
            tally = Tally()
            if stage.enough is not None and all(facts.get(each, 0.0) >= stage.enough for each in stage.goal):
                break
            if time.perf_counter() - saved > SAVE_EVERY_S:
                self._save("checkpoint")
                saved = time.perf_counter()

    def _learn(self, stage: Stage, tally: Tally) -> None:
        """One optimizer step on a fresh batch."""
        progress = min(1.0, self.step / stage.steps)
        for optimizer, rate in zip(self.optimizers, (self.recipe.matrix_rate, self.recipe.rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * _rate(stage, self.step)
        batch = draw_batch(self.encoder, self.rng, stage, progress).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.trained.loss(batch, tally, stage.probes)
        if not math.isfinite(loss.item()):
            raise TrainingFailedError(f"the loss is {loss.item()} at step {self.step} of stage {stage.name}")
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def _check(self, stage: Stage) -> bool:
        """Whether exact match on fresh prompts, drawn as at the end of the stage, reaches its goal."""
        length = sum(stage.length) // 2
        style = Style(stage.passages[1], length, stage.dense[1], stage.hard, stage.chains, stage.direct_only)
        self._attend_for(learning=False)
        found = exact_match(self.trained.model, self.encoder, CHECK_SEED + self.seed, style, CHECKED_SCENES)
        self._attend_for(learning=True)
        missed = {category: goal for category, goal in stage.goal.items() if found.get(category, 0.0) < goal}
        self._note({"stage": stage.name, "checked": found, "missed": missed})
        print(f"stage {stage.name}: {_shares(found)}", "reached" if not missed else f"missed {missed}", flush=True)
        return not missed

    def _attend_for(self, *, learning: bool) -> None:
        """Chooses the fused attention kernel, except for training on a CPU, where its backward pass is slow."""
        in_blocks = learning and self.device.type == "cpu"
        self.trained.model.set_attn_implementation("in_blocks" if in_blocks else "sdpa")

    def _restart(self, stage: Stage) -> None:
        """Returns to the start of the stage, once, with other random draws."""
        if self.restarts:
            raise TrainingFailedError(f"stage {stage.name} missed its goal twice; try another --seed")
        seconds, history = self.seconds, self.history
        self._load("stage")  # which also resets `added`
        self.seconds, self.history, self.restarts = seconds, history, 1
        self.rng.seed(f"{self.seed}, once more")

    def _count_time(self) -> None:
        """Adds the time since the last call to `seconds`; includes checks and saving, excludes interruptions."""
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def _report(self, stage: Stage, facts: Mapping[str, float]) -> None:
        self._count_time()
        self._note({"stage": stage.name, "step": self.step, "minutes": self.seconds / 60, **facts})
        print(f"{stage.name} {self.step}/{stage.steps}  {self.seconds / 60:.1f} min  {_shares(facts)}", flush=True)

    def _note(self, facts: dict[str, Any]) -> None:
        self.history.append(facts)
        (self.out / "history.json").write_text(json.dumps(self.history, indent=1))

    # ---- files ------------------------------------------------------------------------------------------

    def _save(self, name: str) -> None:
        self._count_time()
        state = {
            "seed": self.seed,
            "recipe": repr(self.recipe),
            "trained": self.trained.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.getstate(),
            "at": (self.stage, self.step, self.added, self.restarts, self.seconds),
            "history": self.history,
        }
        torch.save(state, self.out / f"{name}.tmp")
        (self.out / f"{name}.tmp").replace(self.out / f"{name}.pt")

    def _load(self, name: str) -> None:
        path = self.out / f"{name}.pt"
        state = torch.load(path, map_location=self.device, weights_only=False)
        for what, mine in (("seed", self.seed), ("recipe", repr(self.recipe))):
            if state[what] != mine:
                raise TrainingFailedError(f"{path} is of another {what}; give another --out, or remove the file")
        self.trained.load_state_dict(state["trained"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.setstate(state["rng"])
        self.stage, self.step, self.added, self.restarts, self.seconds = state["at"]
        self.history = state["history"]


def plot_losses(history: list[dict[str, Any]], path: Path) -> None:
    """Plots losses and shares of correct answer tokens over minutes."""
    lines = [line for line in history if "loss" in line]
    minutes = [line["minutes"] for line in lines]

    def curve(name: str, factor: float = 1.0) -> tuple[list[float], list[float]]:
        return minutes, [factor * line.get(name, math.nan) for line in lines]

    losses = {"answers": curve("loss"), "text": curve("text loss")}
    shares = {name: curve(name, 100) for name in CATEGORIES}
    with picture(path, lines=2, width=8, height=3.5) as (above, below):
        title = "Training: loss and share of correct answer tokens"
        draw_curves(above, losses, title, marker="", ylabel="next-token loss, nats", yscale="log")
        draw_curves(below, shares, "", marker="", ylabel="correct answer tokens, %", ylim=(0, 101), xlabel="minutes")


def _rate(stage: Stage, step: int) -> float:
    """Share of the full learning rate: linear warm-up, constant, linear decay."""
    fall = 1.0
    if stage.decay:
        fall = min(1.0, max(0.03, (1 - step / stage.steps) / stage.decay))
    return min(1.0, (step + 1) / stage.warm_up) * fall


def _shares(facts: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in facts.items())


def train(out: Path, seed: int, threads: int = 0, device: str | None = None) -> None:
    """Trains the model, or goes on from the checkpoint in the folder; raises `TrainingFailedError`.

    `threads`: 0: one per core.
    """
    if threads:
        torch.set_num_threads(threads)
    Trainer(RECIPE, seed, out, device).run()
