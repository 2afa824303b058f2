"""The loading controller of a vLLM engine: it starts with nothing, and learns from what its workers report."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.engines.settings import load_cost_model, write_cost_model
from cacheblend.engines.vllm.scheduler.load_control import RATIO_STEP, LoadChoice, LoadControl
from campaign import share
from unit.test_controller import plan_of

LAYERS = 24
STORED = KVLayout((LayerShape(1, 128),) * LAYERS, torch.bfloat16)
BYTES = STORED.block_bytes(1)
CONFIG = BlendConfig()
PACE = 1e-5
"""Seconds of a row-layer."""
SLOW_S3 = CostModel(((256, 256 * LAYERS * PACE), (4096, 4096 * LAYERS * PACE)), {"s3": TierSpeed(5e9, 0.02)})


@dataclass(frozen=True)
class Outcome:
    """As `jobs.BlendOutcome`, which needs vLLM."""

    failure: str = ""
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    recomputed_tokens: int = 0
    row_layers: int = 0
    prefill_share: float = 0.0
    seconds: float = 0.0
    compute_s: float | None = None
    read_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class World:
    """Devices as they are: bytes/s and seconds a layer, by tier."""

    speeds: dict[str, TierSpeed]
    pace: float = PACE
    is_alone: bool = True

    def run(self, choice: LoadChoice, cached: int = 0) -> Outcome:
        plan = choice.plan.with_resident(cached) if cached else choice.plan
        ratio = CONFIG.recompute_ratio if choice.ratio is None else choice.ratio
        exact = plan.prefix_length
        reused = sum(len(span) for span in plan.spans if span.source is Source.LOADED)
        rows = len(plan) - exact
        row_layers = round(rows + (rows - reused + ratio * reused) * (LAYERS - 1))
        read: dict[str, float] = {}
        for tier in {s.tier for s in plan.spans if s.tier and s.source in (Source.PREFIX, Source.LOADED)}:
            spans = [s for s in plan.spans if s.tier == tier]
            read[tier] = self.speeds[tier].seconds(len(spans), BYTES * sum(map(len, spans)), LAYERS)
        hits = plan.hit_tokens()
        hits = {**hits, "vllm": cached, "prefix": hits["prefix"] - cached}
        compute = row_layers * self.pace if self.is_alone else None
        return Outcome(hit_tokens=hits, row_layers=row_layers, compute_s=compute, read_s=read, seconds=1e3)


def step(control: LoadControl, world: World, plan: BlendPlan) -> LoadChoice:
    choice = control.decide(plan)
    if not choice.is_all_left_out:
        control.learn(choice.plan, world.run(choice))
    return choice


def tiers_read(choice: LoadChoice) -> set[str]:
    return {s.tier for s in choice.plan.spans if s.tier and s.source in (Source.PREFIX, Source.LOADED)}


def opened(cost_model: CostModel | None = None) -> LoadControl:
    return LoadControl(CONFIG, STORED, cost_model)


def test_the_first_measurement_of_computing_is_enough_and_a_raised_ratio_leaves_out_more() -> None:
    control, plan = opened(), plan_of(["disk"] * 4)
    assert control.decide(plan) == LoadChoice(plan)
    busy = World({"disk": TierSpeed(1.0)}, is_alone=False)
    for _ in range(5):  # nobody knows how long computing takes
        assert step(control, busy, plan).plan is plan
    for nonsense in (0.0, float("inf"), float("nan")):
        control.learn_pace(10, nonsense)
    assert control.cost_model is None
    control.learn_pace(1024 * LAYERS, 1024 * LAYERS * PACE)
    known = control.cost_model
    assert known is not None and known.full_s(2048) == pytest.approx(2048 * LAYERS * PACE)
    control.learn_pace(1, 1e9)
    assert control.cost_model == known
    # between the two: worth loading at the configured ratio, not where most of it is recomputed anyway
    plan = plan_of(["disk"] * 8)
    known = [CostModel(((256, 0.06), (4096, 1.0)), {"disk": TierSpeed(10 ** (6 + at / 20))}) for at in range(60)]
    left = [
        {ratio: opened(each).decide(plan, ratio).is_all_left_out for ratio in (None, 0.15, 0.34, 0.6)} for each in known
    ]
    assert all(each[None] == each[0.15] <= each[0.34] <= each[0.6] for each in left)
    assert any(each[0.6] and not each[0.15] for each in left)


def test_slow_stores_are_left_out_tried_again_and_used_once_they_are_fast() -> None:
    control, world, plan = opened(), World({"disk": TierSpeed(5e9)}), plan_of(["disk"] * 8)
    for _ in range(50):
        choice = step(control, world, plan)
        assert choice.plan is plan and choice.ratio is None and not choice.is_all_left_out
    known = control.cost_model
    assert known is not None and known.full_s(4096) * known.overhead == pytest.approx(4096 * LAYERS * PACE, rel=0.1)
    # slower than computing: left out from the fourth request on
    control, world, plan = opened(), World({"disk": TierSpeed(1e6)}), plan_of(["disk"] * 8)
    for _ in range(3):
        assert step(control, world, plan).plan is plan
    choice = step(control, world, plan)
    assert choice.is_all_left_out and not tiers_read(choice) and choice.ratio is None
    assert choice.decision is not None and "computing the whole prompt" in choice.decision.reason
    assert not choice.plan.missed_chunks()  # what is left out is not stored again
    for slow in range(3):  # one slow reading of a new store, such as the first, which opens connections
        control, plan = opened(), plan_of(["disk"] * 8)
        for number in range(20):
            world = World({"disk": TierSpeed(1e5 if number == slow else 5e9)})
            assert step(control, world, plan).plan is plan
    control = opened()  # of two disks the slow one alone
    world = World({"disk": TierSpeed(5e9), "disk-2": TierSpeed(1e6), "memory": TierSpeed(2e10)})
    plan = plan_of(["disk", "disk-2", "memory", "disk-2", "disk"])
    for _ in range(3):
        assert tiers_read(step(control, world, plan)) == {"disk", "disk-2", "memory"}
    for _ in range(20):
        choice = step(control, world, plan)
        assert tiers_read(choice) == {"disk", "memory"} and not choice.is_all_left_out
    control, plan = opened(), plan_of(["disk"] * 8)  # tried again and used once it is fast
    world = World({"disk": TierSpeed(1e6)})
    for _ in range(3):
        step(control, world, plan)
    slow = [bool(tiers_read(step(control, world, plan))) for _ in range(1500)]
    assert 0 < sum(slow) < 75  # tried again now and then
    world.speeds["disk"] = TierSpeed(5e9)
    fast = [step(control, world, plan) for _ in range(800)]
    assert all(choice.plan is plan and choice.ratio is None for choice in fast[-20:])
    # where loading takes longer anyway more is recomputed, in few steps
    control, plan = opened(SLOW_S3), plan_of(["s3"] * 8)
    assert control.decide(plan, raises=False).ratio is None
    choice = control.decide(plan)
    assert choice.ratio is not None and choice.decision is not None and choice.plan is plan
    assert CONFIG.recompute_ratio < choice.ratio <= choice.decision.ratio < choice.ratio + RATIO_STEP
    assert len({step(control, World(dict(SLOW_S3.tiers)), plan).ratio for _ in range(40)}) <= 3


@pytest.mark.parametrize("raised", [1.5, 2.25, 4.0])
def test_steps_begin_at_the_ratio_in_force(raised: float) -> None:
    """The floor of the shadow check has raised it: expected times count it, and no lower one is chosen."""
    one_check = BlendConfig(selector="hkvd", check_layers=(1,))
    in_force, plan = one_check.recompute_ratio * raised, plan_of(["s3"] * 8)
    control = LoadControl(one_check, STORED, SLOW_S3)
    higher = LoadControl(replace(one_check, recompute_ratio=in_force), STORED, SLOW_S3)
    assert control.decide(plan, in_force) == higher.decide(plan)
    choice, lowest = control.decide(plan, in_force, raises=False), control.decide(plan, raises=False)
    assert choice.ratio is None and choice.decision is not None and lowest.decision is not None
    assert choice.decision.ratio >= in_force
    fast = opened(CostModel(SLOW_S3.prefill_s, {"s3": TierSpeed(5e12)}))
    times = [fast.decide(plan, ratio).decision for ratio in (None, in_force)]
    assert times[0] is not None and times[1] is not None and times[1].compute_s > 1.2 * times[0].compute_s


@given(st.floats(0, 1), st.floats(1e5, 1e10), st.floats(0, 0.2), st.lists(st.sampled_from(["a", "b", ""]), min_size=1))
@settings(max_examples=share(80), deadline=None)
def test_ratios_are_steps_above_the_floor(floor: float, speed: float, latency: float, tiers: list[str]) -> None:
    config = BlendConfig(recompute_ratio=floor)
    known = CostModel(((256, 0.06), (4096, 1.0)), {"a": TierSpeed(speed, latency), "b": TierSpeed(1e9)})
    plan = plan_of(tiers[:6], 128)
    choice = LoadControl(config, STORED, known).decide(plan)
    if choice.ratio is not None:
        steps = (choice.ratio - floor) / RATIO_STEP
        assert floor < choice.ratio <= 1 and (abs(steps - round(steps)) < 1e-3 or choice.ratio == 1)
    left = {span.name for span in plan.spans if span.source is Source.LOADED} - {
        span.name for span in choice.plan.spans if span.source is Source.LOADED
    }
    assert left == choice.plan.left_out and len(choice.plan) == len(plan)
    assert choice.is_all_left_out == (choice.decision is not None and not tiers_read(choice))


def test_what_failed_is_held_or_ran_beside_others_tells_nothing_but_a_tier_given_up_is_left_out() -> None:
    control, plan = opened(), plan_of(["disk"] * 8)
    control.learn_pace(1024 * LAYERS, 1024 * LAYERS * PACE)
    known = control.cost_model
    good = World({"disk": TierSpeed(1.0)}).run(LoadChoice(plan))
    for _ in range(3):
        control.learn(plan, replace(good, failure="OSError"))
        control.learn(plan, replace(good, hit_tokens={"disk": 256}))
        control.learn(plan, replace(good, hit_tokens={}))
    assert control.cost_model == known and control.decide(plan).plan is plan
    for _ in range(3):
        control.learn(plan, good)
    assert control.decide(plan).is_all_left_out
    control, plan = opened(), plan_of(["disk"] * 8)  # what vLLM holds already is neither read nor learnt
    world = World({"disk": TierSpeed(1e9)})
    for cached in (0, 60, 700, 1000):
        choice = control.decide(plan)
        assert choice.plan is plan
        control.learn(plan, world.run(choice, cached))
    known = control.cost_model
    assert known is not None and known.overhead == pytest.approx(1.0, rel=0.1)
    control, plan = opened(), plan_of(["disk"] * 8)  # where others compute at the same time only tiers are learnt
    control.learn_pace(1024 * LAYERS, 1024 * LAYERS * PACE)
    for _ in range(3):
        step(control, World({"disk": TierSpeed(1e6)}, is_alone=False), plan)
    known = control.cost_model
    assert known is not None and known.overhead == 1.0
    assert control.decide(plan).is_all_left_out
    # given up again and again: less of it is loaded from the fourth time on, and soon nothing
    control, plan = opened(), plan_of(["memory", *["s3"] * 7])
    assert control.compute_s(plan) is None
    control.learn_pace(1024 * LAYERS, 1024 * LAYERS * PACE)
    assert control.compute_s(plan) == pytest.approx(8 * 512 * LAYERS * PACE, rel=0.01)
    given_up = Outcome(failure="load timeout", read_s={"s3": 8 * 512 * LAYERS * PACE})
    loaded = []
    for _ in range(20):
        choice = control.decide(plan)
        loaded.append(sum(len(s) for s in choice.plan.spans if s.tier == "s3" and s.source is Source.LOADED))
        control.learn(plan, given_up)
    assert loaded[:3] == [7 * 512] * 3 and loaded[3] < 4 * 512 and loaded[-1] == 0
    assert tiers_read(choice) == {"memory"}


def test_a_cost_models_file_is_where_it_starts(tmp_path: Path) -> None:
    known = CostModel(((256, 0.06), (4096, 1.0)), {"disk": TierSpeed(1e5)})
    exact = plan_of(["disk", "disk"]).exact_only()
    assert opened(known).decide(exact) == LoadChoice(exact) and exact.left_out, "an exact prefix alone stays as it is"
    write_cost_model(tmp_path / "cost.json", known, "weights", "cpu", STORED)

    def start(**other: str) -> LoadControl:
        measured = {"model": "weights", "codec": "raw", "device": "cpu"}
        return opened(load_cost_model(tmp_path / "cost.json", **measured | other))

    assert start().cost_model == known and start().decide(plan_of(["disk"])).is_all_left_out
    for others in ({"model": "others"}, {"device": "cuda"}, {"codec": "int8"}):
        with pytest.raises(InvalidInputError, match="was measured"):
            start(**others)
    assert opened().cost_model is None


def test_threads_decide_while_another_learns() -> None:
    control, world = opened(), World({"a": TierSpeed(1e9), "b": TierSpeed(1e6)})
    plans = [plan_of(["a", "b"][: 1 + number % 2] * (1 + number % 3), 256) for number in range(6)]

    def work(seed: int) -> None:
        for number in range(150):
            step(control, world, plans[(seed + number) % len(plans)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert control.cost_model is not None
