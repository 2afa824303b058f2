"""Turns the shadow check of an engine on."""

from dataclasses import replace

from cacheblend.core.errors import InvalidInputError, check_type
from cacheblend.core.fuse.prefill import BlendedPrefill
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.hf.shadow_check import ShadowCheck
from cacheblend.engines.shadow import ShadowSettings, ShadowWatch


def watch(engine: BlendEngine, settings: ShadowSettings, *, seed: int | None = None) -> ShadowWatch:
    """Compares a share of the engine's blended answers with full prefill from now on, when there is time.

    Without a scheduler that is when no request has been under way for a moment (`background.QUIET_S`); under a
    scheduler that is never idle, the check takes as large a share of the time as of the requests. With a floor, the
    engine's ratio may be raised for requests that name none.

    `seed`: of what is drawn; None: another one each time. Returns what is found: figures, history, and the ratio in
    force. Raises `InvalidInputError`: the engine has a check already."""
    check_type(engine, BlendEngine, "engine")
    check_type(settings, ShadowSettings, "settings")
    runtime = engine.runtime
    if runtime.shadow is not None:
        raise InvalidInputError(
            f"the answers of {engine.name or 'this engine'} are checked already; open another engine"
        )

    def raise_by(factor: float) -> None:
        runtime.settings = replace(runtime.settings, raised_by=factor)

    def open_full(prompt: Prompt, last_rows: int) -> BlendedPrefill:
        return runtime.prefiller.open_full(prompt, runtime.planner, last_rows)

    made = ShadowWatch(settings, engine.name, runtime.settings.selector().share, raise_by, seed)
    runtime.shadow = ShadowCheck(made, open_full, runtime.adapters.latest_version, runtime.background.wake)
    runtime.background.idle_work = runtime.shadow
    return made
