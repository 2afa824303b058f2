"""A campaign of one engine: trials with faults, after which every request must have ended with a right answer.

A fault is put in place, some requests arrive, and the trial tells which of them were answered. A right answer is the
plain one, or the one of a blend that met no fault, computed or found; at recompute ratio 1 all are equal.
"""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.faults import injection
from lab.faults.engine import Answer, Asked, Engine, Request, Texts, is_same, joined

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
    """One engine of this campaign: recompute ratio, kinds of trials with weights, its share of all trials.

    Attributes:
        engine: options of vLLM's `LLM`.
        answer_tokens: of each answer; many keep blocks busy, so that a small cache preempts.
        most_requests: that arrive in a trial.
        refresh_s: the connector's setting.
        edits: prompts are of conversations whose histories are edited, in place of passages that recur.
    """

    ratio: float
    kinds: dict[str, int]
    share: float
    engine: dict[str, Any] = field(default_factory=dict)
    answer_tokens: int = 4
    most_requests: int = 3
    refresh_s: float = 3600
    edits: bool = False

    @property
    def ranks(self) -> int:
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

    def draw_requests(self, pool: list[tuple[Asked, list[Answer]]], number: int) -> None:
        """Requests for some of the prompts, the same one several times now and then; some of them are plain."""
        rng, most = self.rng, self.setting.most_requests
        chosen = rng.choices(pool, k=rng.randint(max(1, most // 3), most))
        for place, (asked, right) in enumerate(chosen):
            name, spans = f"{MARK}{number}-{place}", rng.choice([None, asked.spans, asked.spans])
            if place and rng.random() < 0.25:
                spans, right = (), right[:1]
            self.requests.append(Request(name, asked.ids, spans, self.setting.answer_tokens))
            self.right[name] = right
        self.engine.scramble(number)
        if rng.random() < 0.5:  # vLLM holds what stands in front of the first passage
            first = chosen[0][0]
            self.engine.ask([Request(f"{MARK}{number}-front", (*first.ids[: first.spans[0][0]], 7), (), 1)])

    def draw_turns(self, conversations: list[list[tuple[int, ...]]], number: int) -> None:
        """Next turns of some conversations, of which pieces in the middle were left out, put in or replaced since."""
        for place in range(self.rng.randint(1, self.setting.most_requests)):
            which = self.rng.randrange(len(conversations))
            conversations[which] = pieces = self._edited(conversations[which])
            name, ids = f"{MARK}{number}-{place}", tuple(token for piece in pieces for token in piece)
            request = Request(name, ids, (), self.setting.answer_tokens, params={"conversation": f"talk {which}"})
            # Of a salt of its own nothing is stored: vLLM computes all of it.
            plain = replace(request, name=f"{name}-plain", salt=f"plain-{number}-{place}", params={})
            self.right[name] = list(self.engine.ask([plain]).values())
            pieces.append(tuple(self.right[name][0]["tokens"]))
            self.requests.append(request)
        self.engine.scramble(number)

    def _edited(self, pieces: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        rng, found = self.rng, [*pieces, self.texts.ids(self.rng.randint(60, 160))]
        for _ in range(rng.choice([1, 1, 1, 2])):
            at = rng.randrange(len(found) + 1)
            found[at : at + rng.randint(0, 1)] = rng.choice([[], [self.texts.ids(rng.randint(1, 40))]])
        while len(found) < 3 or sum(map(len, found)) < 64:
            found.append(self.texts.ids(60))
        while sum(map(len, found)) > 800:
            del found[rng.randrange(len(found))]
        return found

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
    if not trial.setting.edits:
        places.difference_update(injection.OF_HISTORIES)
    place = rng.choice(sorted(places))
    after = rng.randrange(2) if place in injection.AT_ENDS else rng.randrange(8)
    fault = {"place": place, "after": after, "error": rng.choice(_ERRORS), "times": rng.choice([1, 1, 1, 4])}
    ranks = trial.setting.ranks
    if ranks > 1:
        fault["ranks"] = rng.choice([[rank] for rank in range(ranks)] + [list(range(ranks))])
    if place in injection.OF_CAPTURES or rng.random() < 0.15:
        _ask_for_new_passage(trial)
    return _armed(trial, fault, settles=True)


def _armed(trial: Trial, fault: dict[str, Any], *, settles: bool = False) -> dict[str, Answer]:
    trial.what = str(fault)
    trial.engine.arm(fault)
    answers = trial.play()
    if settles:
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
    return _armed(trial, {"place": place, "times": trial.rng.randint(1, 8), "sleep_s": trial.rng.uniform(0.02, 0.3)})


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


def _damage(trial: Trial, *, every: bool) -> dict[str, Answer]:
    """A damaged block; or all of them, and once the requests have ended, chunks are captured again."""
    trial.met = min(1, damage(trial.store, trial.rng, every=every))
    trial.what = "all blocks are damaged" if every else "a block is damaged"
    answers = trial.play()
    if every:
        trial.engine.settle()
    return answers


def _removed(trial: Trial) -> dict[str, Answer]:
    """The store's folder is gone, in front of a random step."""
    trial.what, trial.met = "the store is removed", 1
    with removed(trial.store):
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


def _reset(trial: Trial) -> dict[str, Answer]:
    """vLLM's prefix cache is emptied, while requests run or their histories are stored; its connector's state, too."""
    in_play, at, weights_changed = trial.rng.random() < 0.5, trial.rng.randrange(12), trial.rng.random() < 0.5

    def on_step(step: int) -> None:
        if step == at:
            trial.engine.reset(weights_changed=weights_changed)
            trial.met = 1

    answers = trial.play(on_step=on_step if in_play else None)
    if not in_play:
        trial.engine.settle(on_step)
    trial.what = f"reset in front of step {at} of {'requests' if in_play else 'histories'}, {weights_changed=}"
    return answers


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
    "damage": partial(_damage, every=False),
    "damage all": partial(_damage, every=True),
    "removed": _removed,
    "abort": _abort,
    "crowd": _crowd,
    "reset": _reset,
}


# ---- damage to a store's folder: what disks, crashes and people do ---------------------------------------------

WAYS = ("flip a bit", "truncate", "empty", "zeros", "delete")


def damage(store: Path, rng: random.Random, *, every: bool) -> int:
    """Damages one file of blocks or all of them, each in a random way; returns how many."""
    files = sorted(path for path in (store / "blocks").rglob("*") if path.is_file())
    chosen = files if every else rng.sample(files, min(1, len(files)))
    for path in chosen:
        way, held = rng.choice(WAYS), path.read_bytes()
        if way == "delete":
            path.unlink()
            continue
        at = rng.randrange(len(held)) if held else 0
        changed = {
            "flip a bit": held[:at] + bytes([held[at] ^ (1 << rng.randrange(8))]) + held[at + 1 :] if held else b"",
            "truncate": held[:at],
            "empty": b"",
            "zeros": bytes(len(held)),
        }[way]
        fresh = path.with_name(f".{path.name}.damaged")  # not in place: a reader may have mapped the old file
        fresh.write_bytes(changed)
        fresh.rename(path)
    return len(chosen)


@contextmanager
def removed(store: Path) -> Iterator[None]:
    """Inside, the folder is gone; what was written to its place meanwhile is lost afterwards."""
    away = store.with_name(f"{store.name}-away")
    store.rename(away)
    try:
        yield
    finally:
        shutil.rmtree(store, ignore_errors=True)
        away.rename(store)


def restore(kept: Path, store: Path) -> None:
    """Puts back what a copy of the folder has, whatever became of it: later trials find the same blocks."""
    for path in (path for folder in ("blocks", "chunks", "manifests") for path in (kept / folder).rglob("*")):
        if path.is_file():
            to = store / path.relative_to(kept)
            to.parent.mkdir(parents=True, exist_ok=True)
            fresh = to.with_name(f".{to.name}.restored")
            shutil.copyfile(path, fresh)
            fresh.rename(to)


# ---- the campaign -------------------------------------------------------------------------------------------

_CHECK_LEFT_EVERY = 10
"""Trials after which it is looked what ended requests left behind: blocks of the KV cache, names in the connector."""
_FEW_BLOCKS = {"num_gpu_blocks_override": 44, "max_model_len": 1024}
_TWO_RANKS = {"tensor_parallel_size": 2}
_OF_EDITS = {"error": 10, "reset": 6, "damage": 3, "damage all": 1, "removed": 1, "slow": 1, "abort": 3}
SETTINGS = {
    "one rank": Setting(1.0, {"error": 20, "slow": 3, "hang": 2, "damage": 5, "removed": 2, "abort": 5}, 0.35),
    "few blocks": Setting(1.0, {"error": 4, "abort": 4, "crowd": 4}, 0.2, _FEW_BLOCKS, 40, 8, refresh_s=0.05),
    "two ranks": Setting(0.15, {"error": 20, "slow": 2, "abort": 4}, 0.3, _TWO_RANKS),
    "two ranks, ratio 1": Setting(1.0, {"error": 4, "hang": 1, "damage all": 8, "damage": 3}, 0.15, _TWO_RANKS),
    "edits": Setting(1.0, _OF_EDITS, 0.15, _FEW_BLOCKS, 8, 4, edits=True),
    "edits, two ranks": Setting(1.0, _OF_EDITS, 0.15, {**_FEW_BLOCKS, **_TWO_RANKS}, 8, 4, edits=True),
}
"""What is varied over engines. At a smaller ratio an answer shows whether ranks chose the same rows; where blocks are
lost it has to be 1, since a blend of the blocks that are left has an answer of its own."""


def run(model: Path, store: Path, name: str, seed: int, count: int, first: int) -> Iterator[dict[str, Any]]:
    """Trials of an engine of a setting, from the first one's number on, until `count` faults were met.

    Yields:
        `met`: 1, or 0 if the fault lay where nothing passed; `wrong`, `hung`, `left`: counts; `moved`: tokens that were
        loaded of edited histories; `what`, `longest_step_s`.
    """
    setting = SETTINGS[name]
    extra = {"store": f"file://{store}", "recompute_ratio": setting.ratio, "refresh_s": setting.refresh_s}
    if setting.edits:
        extra |= {"edits": True, "block_size": 32, "min_reused_share": 0.0, "anchor": "none"}
    options = {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": 200, **setting.engine}
    injection.shorten_pauses()
    engine, texts, talks = Engine(model, extra, **options), Texts(seed), [list[tuple[int, ...]]() for _ in range(2)]
    pool = [] if setting.edits else _pool(engine, texts, setting)
    kept = store.with_name(f"{store.name}-kept")
    shutil.copytree(store, kept)
    number, met = first, 0
    while met < count and number < first + 3 * count:
        rng = random.Random(f"{seed} {number}")
        kind = rng.choices(list(setting.kinds), list(setting.kinds.values()))[0]
        yield {"begin": number, "kind": kind}
        trial = Trial(engine, store, setting, texts, rng, [], {})
        if setting.edits:
            trial.draw_turns(talks, number)
        else:
            trial.draw_requests(pool, number)
        result = {"trial": number, "kind": kind, **_tried(trial, kind)}
        restore(kept, store)
        if number % _CHECK_LEFT_EVERY == 0:
            for _ in range(3):
                engine.step()
            used, held = engine.used_blocks(), engine.leftovers([MARK])
            if used or held:
                result |= {"left": used + len(held), "leftovers": [f"{used} blocks", *held[:5]]}
        met += result["met"]
        number += 1
        yield result


def _pool(engine: Engine, texts: Texts, setting: Setting) -> list[tuple[Asked, list[Answer]]]:
    """Prompts, and of each: the plain answer, the blended one, and that of a request which finds the blended blocks.

    The last one computes the tokens behind the last full block itself, passages included, as vLLM does.
    """
    fill, found = texts.all_passages(), []
    pool = [texts.asked(texts.ids(texts.rng.randint(3, 110)), texts.rng.randint(2, 4)) for _ in range(10)]
    engine.fill(fill.ids, fill.spans)
    for number, one in enumerate(pool):
        answers = list[Answer]()
        for way, spans in (("plain", ()), ("blend", one.spans), ("again", one.spans)):
            if way != "again":
                engine.forget()
            name, before = f"{way}-{number}", _loaded_tokens(engine)
            with engine.patient():
                answers.append(engine.ask([Request(name, one.ids, spans, setting.answer_tokens)])[name])
            loaded, held = _loaded_tokens(engine) - before, sum(stop - start for start, stop in one.spans)
            if way == "blend" and loaded != held:  # a right answer would be missing
                raise RuntimeError(f"of prompt {number} {loaded:.0f} tokens were loaded, the store holds {held}")
        found.append((one, answers))
    return found


def _loaded_tokens(engine: Engine, source: str = "") -> float:
    return sum(value for name, value in engine.counters().items() if name.startswith(f"hit_tokens {source}".strip()))


def _tried(trial: Trial, kind: str) -> dict[str, Any]:
    before = _loaded_tokens(trial.engine, "moved")
    answers = KINDS[kind](trial)
    trial.engine.settle()
    stayed = [each.name for each in trial.requests if each.name not in trial.aborted]
    wrong = {
        name: {key: [answer[key] for answer in (answers[name], *trial.right[name])] for key in ("tokens", "cached")}
        for name in stayed
        if name in answers and not any(is_same(answers[name], right) for right in trial.right[name])
    }
    return {
        "what": trial.what,
        "met": trial.met,
        "moved": int(_loaded_tokens(trial.engine, "moved") - before),
        "wrong": len(wrong),
        **({"answers": wrong} if wrong else {}),
        "hung": int(trial.is_hung or any(name not in answers for name in stayed)),
        "longest_step_s": round(trial.longest_step_s, 3),
    }
