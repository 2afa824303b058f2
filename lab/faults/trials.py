"""Kinds of trials: a fault is put in place, some requests arrive, and the trial tells which of them were answered.

Knows one engine and its store. Does not know which answers are right.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.faults import damage, injection
from lab.faults.engine import Answer, Engine, Request
from lab.faults.prompts import Texts, joined

LONGEST_STEP_S = 15.0
"""An engine step that takes longer hangs; so does a request that has not ended after `LONGEST_REQUEST_S`."""
LONGEST_REQUEST_S = 60.0

HANGS_S = 30.0
"""How long a read hangs, unless the trial lets it go on: an engine step that waits for it is seen to hang."""

_ERRORS = ("RuntimeError", "OutOfMemoryError", "ValueError", "KeyError", "StoreError", "OSError")
MARK = "t-"
"""With which the names of all requests begin, so that leftovers of ended ones are found."""


@dataclass(frozen=True)
class Setting:
    """One engine of this campaign.

    Attributes:
        ratio: recompute ratio.
        kinds: of trials, with weights.
        share: of all trials.
        engine: options of vLLM's `LLM`.
        answer_tokens: of each answer; many keep blocks busy, so that a small cache preempts.
        most_requests: that arrive in a trial.
        refresh_s: the connector's setting.
    """

    ratio: float
    kinds: dict[str, int]
    share: float
    engine: dict[str, Any] = field(default_factory=dict)
    answer_tokens: int = 4
    most_requests: int = 3
    refresh_s: float = 3600

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks."""
        return int(self.engine.get("tensor_parallel_size", 1))


@dataclass
class Trial:
    """What a trial needs, and what comes out of it."""

    engine: Engine
    store: Path
    setting: Setting
    texts: Texts
    rng: random.Random
    requests: list[Request]
    right: dict[str, list[Answer]]
    aborted: set[str] = field(default_factory=set)
    met: int = 0
    what: str = ""
    longest_step_s: float = 0.0
    is_hung: bool = False

    def play(self, *, on_step: Callable[[int], None] | None = None) -> dict[str, Answer]:
        """Steps until all requests have ended; `on_step` is called in front of each step with its number."""
        started, step = time.monotonic(), 0
        for request in self.requests:
            self.engine.add(request)
        self.longest_step_s = time.monotonic() - started  # of the engine's thread, to vLLM's other requests
        answers: dict[str, Answer] = {}
        while self.engine.is_busy:
            if on_step is not None:
                on_step(step)
            before = time.monotonic()
            answers |= self.engine.step()
            now = time.monotonic()
            self.longest_step_s = max(self.longest_step_s, now - before)
            step += 1
            if now - started > LONGEST_REQUEST_S:
                self.is_hung = True
                for request in self.requests:
                    self.engine.abort(request.name)
        self.is_hung |= self.longest_step_s > LONGEST_STEP_S
        return answers


# ---- kinds of trials ----------------------------------------------------------------------------------------


def _error(trial: Trial) -> dict[str, Answer]:
    """An exception at a place of the plug-in, on one rank or on all."""
    rng = trial.rng
    # A read that fails costs the blocks it was to bring, and the blend goes on with the others: right at ratio 1 only.
    places = set(injection.PLACES)
    if trial.setting.ratio < 1:
        places.difference_update(injection.IN_STORE)
    if trial.setting.ranks == 1:
        places.difference_update(injection.OF_RANKS)
    if trial.setting.refresh_s > 60:
        places.discard("store list")
    place = rng.choice(sorted(places))
    after = rng.randrange(2) if place in injection.AT_ENDS else rng.randrange(8)
    fault = {"place": place, "after": after, "error": rng.choice(_ERRORS), "times": rng.choice([1, 1, 1, 4])}
    ranks = trial.setting.ranks
    if ranks > 1:
        fault["ranks"] = rng.choice([[rank] for rank in range(ranks)] + [list(range(ranks))])
    if place in injection.OF_CAPTURES or rng.random() < 0.15:
        _ask_for_new_passage(trial)
    trial.what = str(fault)
    trial.engine.arm(fault)
    answers = trial.play()
    trial.engine.settle()
    trial.met = min(1, trial.engine.disarm())
    return answers


def _ask_for_new_passage(trial: Trial) -> None:
    """One more request, with a passage that is to be captured after it."""
    texts, name = trial.texts, f"{MARK}new-{trial.requests[0].name}"
    one = joined(texts.ids(7), [texts.ids(80)], texts.ids(9))
    trial.right[name] = list(trial.engine.ask([Request(f"{name}-plain", one.ids, (), 1)]).values())
    trial.engine.forget()
    trial.requests.append(Request(name, one.ids, one.spans, 1))


def _slow(trial: Trial) -> dict[str, Answer]:
    """Reads or look-ups that take a while."""
    place = trial.rng.choice(["store read", "store read", "store find"])
    fault = {"place": place, "times": trial.rng.randint(1, 8), "sleep_s": trial.rng.uniform(0.02, 0.3)}
    trial.what = str(fault)
    trial.engine.arm(fault)
    answers = trial.play()
    trial.met = min(1, trial.engine.disarm())
    return answers


def _hang(trial: Trial) -> dict[str, Answer]:
    """Reads or look-ups that do not come back until the requests have been aborted, or for a while."""
    place = trial.rng.choice(["store read", "store find"])
    fault = {"place": place, "times": 64, "sleep_s": HANGS_S, "until_disarmed": True}
    leaves, started = trial.rng.random() < 0.5, time.monotonic()
    trial.what = f"{fault}, {'aborted' if leaves else 'released'}"
    trial.engine.arm(fault)
    state = {"is_over": False}

    def on_step(step: int) -> None:
        if not state["is_over"] and time.monotonic() - started > 1.0:
            state["is_over"] = True
            if leaves:
                for request in trial.requests:
                    trial.engine.abort(request.name)
                    trial.aborted.add(request.name)
            else:
                trial.met += trial.engine.disarm()

    answers = trial.play(on_step=on_step)
    trial.met = min(1, trial.met + trial.engine.disarm())
    return answers


def _damage_one(trial: Trial) -> dict[str, Answer]:
    """A damaged block."""
    trial.met = min(1, damage.damage(trial.store, trial.rng, every=False))
    trial.what = "a block is damaged"
    return trial.play()


def _damage_all(trial: Trial) -> dict[str, Answer]:
    """Every block is damaged; once the requests have ended, chunks are captured again."""
    trial.met = min(1, damage.damage(trial.store, trial.rng, every=True))
    trial.what = "all blocks are damaged"
    answers = trial.play()
    trial.engine.settle()
    return answers


def _removed(trial: Trial) -> dict[str, Answer]:
    """The store's folder is gone, in front of a random step."""
    trial.what, trial.met = "the store is removed", 1
    with damage.removed(trial.store):
        return trial.play()


def _abort(trial: Trial) -> dict[str, Answer]:
    """Clients that go away at random steps."""
    leaving = trial.rng.sample(trial.requests, trial.rng.randint(1, len(trial.requests)))
    at = {request.name: trial.rng.randrange(12) for request in leaving}
    trial.what, trial.met = f"aborted in front of steps {sorted(at.values())}", 1

    def on_step(step: int) -> None:
        for name, when in at.items():
            if when == step:
                trial.engine.abort(name)
                trial.aborted.add(name)

    return trial.play(on_step=on_step)


def _crowd(trial: Trial) -> dict[str, Answer]:
    """More requests than blocks: some are preempted."""
    before = trial.engine.counters().get("num_preemptions", 0.0)
    answers = trial.play()
    preempted = trial.engine.counters().get("num_preemptions", 0.0) - before
    trial.what, trial.met = f"{preempted:.0f} preemptions", min(1, int(preempted))
    return answers


KINDS: dict[str, Callable[[Trial], dict[str, Answer]]] = {
    "error": _error,
    "slow": _slow,
    "hang": _hang,
    "damage": _damage_one,
    "damage all": _damage_all,
    "removed": _removed,
    "abort": _abort,
    "crowd": _crowd,
}
