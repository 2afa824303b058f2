"""The floor of the shadow check at work on the model that ships: python -m lab.suite.shadow_floor [picture.svg]

Two engines answer questions, and every answer is compared with full prefill. The first is far too lean for its
questions across passages; the traffic of the second changes from direct questions to chains of two, and back. Needs
matplotlib.
"""

import sys
import time
from pathlib import Path

from cacheblend import BlendEngine, SamplingParams
from cacheblend.engines.shadow import Moment, ShadowSettings
from cacheblend.nano import model_path
from lab.bench import picture
from lab.nano.questions import Prompts, draw_questions
from lab.suite.suite import SETTINGS

FLOOR = 0.8
SMALL = Prompts(passages=(3, 4), tokens=(48, 80))
LEAN = {"selector": "hkvd", "recompute_ratio": 0.06, "check_layers": (1,)}
AMPLE = {"selector": "hybrid", "recompute_ratio": 0.12, "check_layers": (4,), "early_ratio": 0.4, "question_words": 1.0}
PANELS = {
    "hkvd at 0.06, questions across passages": (LEAN, [("cross-hard", 170)]),
    "hybrid without hops": (AMPLE, [("direct", 60), ("chain2", 100), ("direct", 130)]),
}


def answer(config: dict[str, object] | None, traffic: list[tuple[str, int]]) -> list[Moment]:
    """The window after each comparison."""
    with BlendEngine.from_pretrained(model_path(), store="memory", config=config) as engine:
        engine.name = "nano"
        watched = engine.runtime.watch(ShadowSettings(1.0, FLOOR), seed=0)
        for part, (category, count) in enumerate(traffic):
            for row in draw_questions(50 + part, count, [category], SMALL):
                engine.warm(row.passages)
                parts = SETTINGS.template.parts(engine, row.passages, row.question)
                engine.generate(parts, SamplingParams(max_new_tokens=2))
                while engine.runtime.shadow is not None and engine.runtime.shadow.waiting:
                    if not engine.runtime.background.advance_idle():
                        time.sleep(0.001)
        return watched.history()


def draw(found: dict[str, list[Moment]], path: str) -> None:
    with picture(Path(path), lines=len(found), width=9, height=3.2) as panels:
        for panel, (title, moments) in zip(panels, found.items(), strict=True):
            panel.plot([each.agreement for each in moments], color="tab:blue", label="agreement with full prefill")
            panel.plot([each.bound for each in moments], color="tab:blue", linestyle=":", label="its lower bound")
            panel.plot([each.ratio for each in moments], color="tab:orange", label="recompute ratio")
            panel.axhline(FLOOR, color="tab:red", linestyle="--", label="floor")
            at = 0
            for category, count in PANELS[title][1]:
                panel.annotate(category, (at + 2, 1.03), annotation_clip=False, fontsize=9)
                panel.axvline(at, color="0.7", linewidth=0.8)
                at += count
            panel.set(title=title, ylim=(0, 1.1), xlim=(0, len(moments)), xlabel="answers compared")
        panels[0].legend(loc="lower right", fontsize=8)


if __name__ == "__main__":
    draw({title: answer(*panel) for title, panel in PANELS.items()}, (sys.argv[1:] or ["shadow.svg"])[0])
