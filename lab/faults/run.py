"""Campaigns of faults in vLLM with the plug-in: answers wrong, engines ended, requests hung, plain requests polluted.

Runs the programs of `lab.faults` in child processes, one engine each. Imports no vLLM.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.failures import count_failure
from cacheblend.engines.provenance import stamp
from lab.bench import AdvanceStage, silent
from lab.faults import pollution, trials
from lab.faults.children import Watched, watch
from lab.faults.engine import make_model
from lab.faults.measured import MEASURES
from lab.servers.vllm_server import check_installed, version_of_vllm

STAGES = (*MEASURES, "pollution", "faults")
"""The campaigns."""

FIGURES = {
    "held": ("held_up_ms", "held_up_blend_ms"),
    "lookups": ("lookups_per_request",),
    "equal": ("equal_prompts",),
}
"""What is reported of each measurement."""

QUIET = ("lookups", "equal", "pollution")
"""Those that inject nothing: no blend may fail in them."""


@dataclass(frozen=True)
class Settings:
    """What is tried.

    Attributes:
        tried: faults at least; plain requests compared with a vLLM without the plug-in are twice as many at least.
        seed: of everything drawn.
        only: campaigns.
        engines: settings of `pollution` and `trials` by name; empty: all of them.
    """

    tried: int = 520
    seed: int = 0
    only: tuple[str, ...] = STAGES
    engines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = (*pollution.SETTINGS, *trials.SETTINGS)
        for given, names, what in ((self.only, STAGES, "campaign"), (self.engines, known, "engine")):
            for name in given:
                if name not in names:
                    raise InvalidInputError(f"there is no {what} {name!r}; there are {', '.join(names)}")
        if self.tried < 1:
            raise InvalidInputError(f"at least one fault must be tried, got {self.tried}")

    def chosen(self, settings: Sequence[str]) -> list[str]:
        """Those of these engines that are wanted."""
        return [name for name in settings if not self.engines or name in self.engines]


def run(settings: Settings, advance: AdvanceStage = silent) -> dict[str, Any]:
    """Runs the chosen campaigns; `failed_blends` are those where nothing was injected."""
    check_installed()
    with tempfile.TemporaryDirectory(prefix="cacheblend-faults-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        found: dict[str, dict[str, Any]] = {}
        measures = [name for name in MEASURES if name in settings.only]
        if measures:
            found |= _measured(model, folder, settings, measures, advance)
        if "pollution" in settings.only:
            found["pollution"] = _pollution(model, folder, settings, advance)
        if "faults" in settings.only:
            found["faults"] = _faults(model, folder, settings, advance)
    failed = sum((Counter(found.get(name, {}).get("failed", {})) for name in QUIET), Counter[str]())
    for reason, count in failed.items():
        count_failure(reason, count)
    return {
        "figures": _figures(found),
        "failed_blends": failed.total(),
        "vllm": version_of_vllm(),
        "campaigns": found,
        **stamp(),
    }


def _figures(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, keys in FIGURES.items():
        if name in found:
            figures |= {key: found[name][key] for key in keys}
    tries = [found[name] for name in ("pollution", "faults") if name in found]
    if tries:
        figures |= {key: sum(each.get(key, 0) for each in tries) for key in ("wrong", "ended", "hung", "left")}
    if "faults" in found:
        figures["tried"] = found["faults"]["tried"]
    if "pollution" in found:
        figures |= {"polluted": found["pollution"]["polluted"], "pollution_tried": found["pollution"]["tried"]}
    return figures


def _measured(
    model: Path, folder: Path, settings: Settings, measures: Sequence[str], advance: AdvanceStage
) -> dict[str, dict[str, Any]]:
    job = {"campaign": "measures", "measures": measures, "model": str(model), "folder": str(folder / "measured")}

    def on_line(lines: int) -> None:
        advance(measures[lines - 1], 1, 1)

    watched = watch(folder, {**job, "seed": settings.seed}, "measures", restarts=0, on_line=on_line)
    if not watched.is_complete:
        raise InvalidInputError(f"a measurement did not end:\n{watched.words}")
    for line in watched.lines:
        failed = line.pop("failed")
        for name, result in line.items():
            result["failed"] = failed if name in QUIET else {}
    return {name: result for line in watched.lines for name, result in line.items()}


def _pollution(model: Path, folder: Path, settings: Settings, advance: AdvanceStage) -> dict[str, Any]:
    names = settings.chosen(list(pollution.SETTINGS))
    chosen = [pollution.SETTINGS[name] for name in names]
    wanted = 2 * settings.tried  # plain answers are compared in all, at least
    most = 1 + wanted // len(chosen)  # each scene compares some
    scenes = ([s.compared for s in each.scenes(settings.seed, most)] for each in chosen)
    totals = accumulate(sum(each) for each in zip(*scenes, strict=True))
    count = next(count for count, total in enumerate(totals, 1) if total >= wanted)
    job = {"model": str(model), "seed": settings.seed, "count": count}
    asked = {**job, "campaign": "right answers", "folder": "", "settings": names}
    right = watch(folder, asked, "right answers", restarts=0)
    if not right.is_complete:
        raise InvalidInputError(f"vLLM without the plug-in did not answer:\n{right.words}")
    (folder / "right.json").write_text(json.dumps(right.lines[0]["answers"]))
    jobs = {name: {**job, "right": str(folder / "right.json")} for name in names}
    keys = ("tried", "polluted", "wrong", "blended", "beside")
    found, result = _watched("pollution", jobs, folder, count * len(names), keys, advance)
    return {**result, "failed": dict(sum((each.failed for each in found), Counter[str]()))}


def _faults(model: Path, folder: Path, settings: Settings, advance: AdvanceStage) -> dict[str, Any]:
    names = settings.chosen(list(trials.SETTINGS))
    shares = sum(trials.SETTINGS[name].share for name in names)
    jobs = {}
    for name in names:
        setting = trials.SETTINGS[name]
        count = -int(-settings.tried * setting.share / shares // 1)
        jobs[name] = {"model": str(model), "seed": settings.seed, "count": count, "ranks": setting.ranks}
    found, result = _watched("faults", jobs, folder, settings.tried, ("met", "wrong", "left", "moved"), advance)
    lost = sum(each.ended + each.hung for each in found)  # these trials wrote nothing
    return {"tried": result.pop("met") + lost, **result}


def _watched(
    campaign: str,
    jobs: Mapping[str, dict[str, Any]],
    folder: Path,
    total: int,
    keys: Sequence[str],
    advance: AdvanceStage,
) -> tuple[list[Watched], dict[str, Any]]:
    """The engines of a campaign, by the names of their settings, one after the other; counts of all and of each."""
    found: dict[str, Watched] = {}
    counts: dict[str, dict[str, int]] = {}
    for place, (name, job) in enumerate(jobs.items()):
        before = sum(each.done for each in found.values())

        def told(done: int, before: int = before) -> None:
            advance(campaign, min(total, before + done), total)

        child = {**job, "campaign": campaign, "setting": name, "folder": str(folder / f"{campaign}-{place}")}
        found[name] = each = watch(folder, child, name, on_line=told)
        counts[name] = {key: each.total(key) for key in keys}
        counts[name] |= {"ended": each.ended, "hung": each.hung + each.total("hung")}
    totals = {key: sum(each[key] for each in counts.values()) for key in (*keys, "ended", "hung")}
    injects = campaign not in QUIET
    engines = {name: {**counts[name], **each.described(injects=injects)} for name, each in found.items()}
    return list(found.values()), {**totals, "engines": engines}
