"""Scenes of plain and blended requests that share a front; every plain answer is compared with a vLLM without plug-in.

    plain     front | own text                                  arrives in the same step as
    blended   front | more | passage passage | question         the plain ones, in any order
    later     plain requests over front, more, passages, question: every text that could have been polluted

The front ends on a block's border, or inside a block, or is shorter than one, or longer than an engine step computes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.faults.engine import PATIENT_S, Answer, Engine, Request, Texts, is_same, joined

BLOCKS = 160
"""Of the KV cache: enough for the largest scene, and few enough to be filled with random numbers quickly."""


@dataclass(frozen=True)
class Setting:
    """One engine of this campaign.

    Attributes:
        ratio: recompute ratio; at 1 blended answers are compared too.
        engine: options of vLLM's `LLM`; `block_size` among them.
        plain_tokens: of the plain answers of a scene.
        is_beside_another: a `MultiConnector` holds a connector that loads within the step, which also answers requests.
        budget_row_layers: the connector's setting.
    """

    ratio: float
    engine: dict[str, Any]
    plain_tokens: int = 3
    is_beside_another: bool = False
    budget_row_layers: int | None = None

    def scenes(self, seed: int, count: int) -> "list[Scene]":
        return draw(seed, count, self.engine["block_size"], plain_tokens=self.plain_tokens)


SETTINGS = {
    "full reuse": Setting(0.0, {"block_size": 32}),
    "pieces": Setting(0.15, {"block_size": 32, "max_num_batched_tokens": 96}, budget_row_layers=400),
    "few blocks": Setting(0.15, {"block_size": 32, "num_gpu_blocks_override": 56, "max_model_len": 1024}, 60),
    "ratio 1": Setting(1.0, {"block_size": 64}),
    "two connectors": Setting(1.0, {"block_size": 64}, is_beside_another=True),
}
"""What is varied over engines; the rest is drawn for each scene."""


# ---- scenes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request of a scene: in front of which engine step it arrives, and after which its client goes away, if it does.

    `is_plain`: it must be answered as without the plug-in, at any recompute ratio.
    """

    request: Request
    step: int
    aborted: int | None
    is_plain: bool


@dataclass(frozen=True)
class Scene:
    """Requests that meet, and plain ones that are asked alone once all of those have ended."""

    arrivals: tuple[Arrival, ...]
    later: tuple[Request, ...]

    @property
    def requests(self) -> list[Request]:
        return [*(each.request for each in self.arrivals), *self.later]

    @property
    def compared(self) -> int:
        """Plain requests that stay to their end."""
        return sum(each.is_plain and each.aborted is None for each in self.arrivals) + len(self.later)


def draw(seed: int, count: int, block_size: int, *, plain_tokens: int = 3) -> list[Scene]:
    """Scenes, of which a longer list begins with the same ones; `Texts(seed)` has their passages.

    Many `plain_tokens`, those of plain answers, keep blocks busy, so that a small cache preempts.
    """
    texts = Texts(seed)
    return [_scene(texts, number, block_size, plain_tokens) for number in range(count)]


def _scene(texts: Texts, number: int, block_size: int, plain_tokens: int) -> Scene:
    rng = texts.rng
    blocks = rng.choice([0, 1, 1, 2, 4, 8, 12])
    # Shorter than a block, one block, some blocks, one token around them, or longer than a small engine step.
    front = texts.ids(max(1, blocks * block_size + rng.choice([-1, 0, 0, 0, 1, rng.randrange(block_size)])))
    more = texts.ids(rng.choice([0, 1, block_size - 1, block_size, 2 * block_size, 2 * block_size + 3, 4 * block_size]))
    blended = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        own = more if rng.random() < 0.7 else texts.ids(rng.randint(0, 3 * block_size))
        passages = rng.sample(texts.passages, rng.randint(2, 4))
        blended.append(joined((*front, *own), passages, texts.ids(rng.randint(2, 20))))
    plain = [
        (*front, *more[: rng.choice([0, 0, len(more) // 2, len(more)])], *texts.ids(rng.randint(1, 40)))
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]
    arrivals = [
        *(
            _arrival(texts, f"blend-{number}-{i}", one.ids, one.spans if rng.random() < 0.6 else None, 3)
            for i, one in enumerate(blended)
        ),
        *(_arrival(texts, f"plain-{number}-{i}", ids, (), plain_tokens) for i, ids in enumerate(plain)),
    ]
    rng.shuffle(arrivals)
    # Plain requests over the texts of the scene, which could be polluted: their front, and prompts cut anywhere.
    later = [(*front, *more, *texts.ids(8)), (*front, *texts.ids(5))]
    for one in blended:
        cut = rng.randint(len(front), len(one.ids))
        later += [one.ids, (*one.ids[:cut], *texts.ids(3))]
    return Scene(tuple(arrivals), tuple(Request(f"later-{number}-{i}", ids) for i, ids in enumerate(later)))


def _arrival(
    texts: Texts, name: str, ids: Sequence[int], spans: tuple[tuple[int, int], ...] | None, tokens: int
) -> Arrival:
    rng = texts.rng
    step = 0 if rng.random() < 0.8 else rng.randint(1, 3)
    aborted = step + rng.randint(0, 2) if rng.random() < 0.12 else None
    return Arrival(Request(name, tuple(ids), spans, tokens), step, aborted, is_plain=spans == ())


def plain_twins(scenes: Sequence[Scene]) -> list[Request]:
    """All requests of the scenes as plain ones: what a vLLM without the plug-in is asked."""
    return [replace(request, spans=()) for scene in scenes for request in scene.requests]


# ---- the campaign -------------------------------------------------------------------------------------------


def right_answers(model: Path, settings: Sequence[Setting], seed: int, count: int) -> dict[str, Answer]:
    """What vLLM without the plug-in answers, by request; `key_of` names requests of several settings."""
    engine = Engine(model, None, enable_prefix_caching=False)
    twins = {key_of(r): r for s in settings for r in plain_twins(s.scenes(seed, count))}
    asked = [replace(request, name=str(number)) for number, request in enumerate(twins.values())]
    answers = engine.ask(asked)
    return {key: answers[str(number)] for number, key in enumerate(twins)}


def key_of(request: Request) -> str:
    """Equal for requests that a vLLM without the plug-in must answer equally."""
    return ",".join(map(str, (request.tokens, *request.ids)))


def play(
    model: Path, store: Path, name: str, right: dict[str, Answer], seed: int, count: int, first: int
) -> Iterator[dict[str, Any]]:
    """Plays the scenes of a setting from `first` on; a result for each.

    Yields:
        `tried` and `polluted`: plain requests compared, and those answered otherwise; `wrong`: blended ones at ratio 1
        answered otherwise; `what`: the names of both; `blended`: requests whose prompts were blended; `beside`: see
        `Engine`.
    """
    setting = SETTINGS[name]
    extra: dict[str, Any] = {
        "store": f"file://{store}",
        "recompute_ratio": setting.ratio,
        "refresh_s": 3600,
        "lookup_timeout_s": PATIENT_S,
        "check_layers": [1],
    }
    if setting.budget_row_layers is not None:
        extra["budget_row_layers"] = setting.budget_row_layers
    beside = None
    if setting.is_beside_another:
        folder = {"shared_storage_path": f"{store}-other"}
        beside = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": folder}
    options = {"enable_prefix_caching": True, "num_gpu_blocks_override": BLOCKS, **setting.engine}
    engine = Engine(model, extra, beside, **options)
    fill = Texts(seed).all_passages()
    engine.fill(fill.ids, fill.spans)
    engine.count_blends_beside()
    for number, scene in enumerate(setting.scenes(seed, count)):
        if number < first:
            continue
        yield {"begin": number}
        known: list[Request] = []  # the other connector loads it in the step that schedules it: it was asked before
        if setting.is_beside_another:
            known = [Request(f"known-{number}", Texts(number).ids(100), (), 1)]
            engine.ask(known)
            known = [replace(known[0], name=f"{known[0].name}-again")]
        engine.scramble(number)
        before, engine.beside = engine.counters().get("requests", 0.0), 0
        judged = _judged(scene, setting, _played(engine, scene, known, waits=number % 2 == 0), right)
        blended = int(engine.counters().get("requests", 0.0) - before)
        yield judged | {"blended": blended, "beside": engine.beside}


def _played(engine: Engine, scene: Scene, beside: Sequence[Request], *, waits: bool) -> dict[str, Answer]:
    """The answers of a scene's requests; those that were aborted have none.

    `waits`: look-ups end before the step, so that blends are delivered in the one that computes the front they share.
    """
    answers: dict[str, Answer] = {}
    step, left = 0, list(scene.arrivals)
    for request in beside:
        engine.add(request)
    while left or engine.is_busy:
        for arrival in [each for each in left if each.step <= step]:
            engine.add(arrival.request)
            left.remove(arrival)
        for arrival in scene.arrivals:
            if arrival.aborted == step and arrival.step <= step:
                engine.abort(arrival.request.name)
        if waits:
            engine.wait_for_lookups()
        answers |= engine.step()
        step += 1
    for request in scene.later:
        answers |= engine.ask([request])
    return answers


def _judged(scene: Scene, setting: Setting, answers: dict[str, Answer], right: dict[str, Answer]) -> dict[str, Any]:
    plain = [each.request for each in scene.arrivals if each.is_plain] + list(scene.later)
    blended = [each.request for each in scene.arrivals if not each.is_plain]

    def otherwise(requests: list[Request]) -> list[str]:
        given = [request for request in requests if request.name in answers]
        return [each.name for each in given if not is_same(answers[each.name], right[key_of(each)])]

    polluted, wrong = otherwise(plain), otherwise(blended) if setting.ratio == 1 else []
    return {
        "tried": sum(each.name in answers for each in plain),
        "polluted": len(polluted),
        "wrong": len(wrong),
        "what": [*polluted, *wrong],
    }
