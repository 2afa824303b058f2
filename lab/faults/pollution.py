"""Plays scenes in an engine with the plug-in, and compares every plain answer with a vLLM that has no plug-in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.faults.engine import PATIENT_S, Answer, Engine, Request, is_same
from lab.faults.prompts import Texts
from lab.faults.scenes import Scene, draw, plain_twins

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


SETTINGS = {
    "full reuse": Setting(0.0, {"block_size": 32}),
    "pieces": Setting(0.15, {"block_size": 32, "max_num_batched_tokens": 96}, budget_row_layers=400),
    "few blocks": Setting(0.15, {"block_size": 32, "num_gpu_blocks_override": 56, "max_model_len": 1024}, 60),
    "ratio 1": Setting(1.0, {"block_size": 64}),
    "two connectors": Setting(1.0, {"block_size": 64}, is_beside_another=True),
}
"""What is varied over engines; the rest is drawn for each scene."""


def scenes_of(setting: Setting, seed: int, count: int) -> list[Scene]:
    """The scenes of an engine."""
    return draw(seed, count, setting.engine["block_size"], plain_tokens=setting.plain_tokens)


def right_answers(model: Path, settings: Sequence[Setting], seed: int, count: int) -> dict[str, Answer]:
    """What vLLM without the plug-in answers, by request; `key_of` names requests of several settings."""
    engine = Engine(model, None, enable_prefix_caching=False)
    twins = {key_of(r): r for s in settings for r in plain_twins(scenes_of(s, seed, count))}
    asked = [replace(request, name=str(number)) for number, request in enumerate(twins.values())]
    answers = engine.ask(asked)
    return {key: answers[str(number)] for number, key in enumerate(twins)}


def key_of(request: Request) -> str:
    """Equal for requests that a vLLM without the plug-in must answer equally."""
    return ",".join(map(str, (request.tokens, *request.ids)))


def play(
    model: Path, store: Path, name: str, right: dict[str, Answer], seed: int, count: int, first: int
) -> Iterator[dict[str, Any]]:
    """Plays the scenes from `first` on; a result for each.

    Args:
        model, store: folders.
        name: of the setting.
        right: see `right_answers`.
        seed, count: of the scenes.
        first: the scenes in front of it are left out.

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
    for number, scene in enumerate(scenes_of(setting, seed, count)):
        if number < first:
            continue
        yield {"begin": number}
        known = _known_to_another(engine, number) if setting.is_beside_another else []
        engine.scramble(number)
        before, engine.beside = engine.counters().get("requests", 0.0), 0
        judged = _judged(scene, setting, _played(engine, scene, known, waits=number % 2 == 0), right)
        blended = int(engine.counters().get("requests", 0.0) - before)
        yield judged | {"blended": blended, "beside": engine.beside}


def _known_to_another(engine: Engine, number: int) -> list[Request]:
    """A request that the other connector loads within the step that schedules it, since it was asked before."""
    known = Request(f"known-{number}", Texts(number).ids(100), (), 1)
    engine.ask([known])
    return [replace(known, name=f"{known.name}-again")]


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
