"""The loading controller: what it loads and how much it recomputes, against trying everything; where to keep caches."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.core.cost.controller import Controller
from cacheblend.core.cost.cost_model import MARGIN, CostModel, TierSpeed
from cacheblend.core.cost.devices import Device, cheapest, place, recompute_s
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName, root_name
from cacheblend.core.plan.blocks import BlockEntry, EmptySource, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.settings import load_cost_model
from campaign import share
from command_line import runner

LAYERS, BYTES = 24, 12_288
PLANNER = Planner(root_name("m", "bfloat16"))
LAYOUT = KVLayout((LayerShape(1, 1),), torch.bfloat16)
PREFILL = ((256, 0.12), (1024, 0.5), (4096, 2.3))


class Holds(EmptySource):
    """Chunks, each in a tier."""

    def __init__(self, entries: dict[BlockName, BlockEntry]) -> None:
        self.entries = entries

    def find(self, names: list[BlockName]) -> list[BlockEntry | None]:
        return [self.entries.get(name) for name in names]


def plan_of(tiers: Sequence[str], tokens: int = 512) -> BlendPlan:
    """Chunks, each in its tier ("" is not stored), behind a system prompt and in front of a question."""
    segments = [chunk(np.arange(tokens) + 1000 * i) for i in range(1, len(tiers) + 1)]
    held: dict[BlockName, BlockEntry] = {}
    for segment, tier in zip(segments, tiers, strict=True):
        for span in PLANNER.plan(Prompt.of([segment]), Holds({})).spans if tier else ():
            held[span.name] = BlockEntry(segment.token_ids[span.start : span.stop], LAYOUT, tier)
    return PLANNER.plan(Prompt.of([text(range(60)), *segments, text(range(70, 102))]), Holds(held))


def controller(tiers: dict[str, float], floor: float = 0.15, latency: float = 0.0, **costs: float) -> Controller:
    speeds = {name: TierSpeed(speed, latency) for name, speed in tiers.items()}
    return Controller(CostModel(PREFILL, speeds, **costs), layers=LAYERS, bytes_per_token=BYTES, floor=floor)


def test_what_is_loaded_from_each_kind_of_tier_and_how_much_is_recomputed() -> None:
    # the fastest, the slowest, and nowhere
    decision = controller({"memory": 5e9}).decide(plan_of(["memory"] * 8))
    assert (decision.ratio, decision.left_out) == (0.15, frozenset())
    assert decision.compute_s > decision.load_s
    assert decision.ttft_s < decision.full_s / 3
    assert "all stored blocks from memory" in decision.reason
    decision = controller({"disk": 5e6}, latency=0.1).decide(plan_of(["disk"] * 8))
    assert len(decision.left_out) == 16 and decision.ratio == 1.0
    assert decision.ttft_s == decision.full_s
    assert "computing the whole prompt" in decision.reason
    decision = controller({}).decide(plan_of(["", ""]))
    assert (decision.left_out, decision.ratio, decision.ttft_s) == (frozenset(), 1.0, decision.full_s)
    assert decision.reason == "nothing is stored"
    # where each layer's latency is what takes time, leaving blocks out spares nothing
    decision = controller({"s3": 5e9}, latency=0.05).decide(plan_of(["s3"] * 8))
    assert decision.left_out == frozenset()
    assert 0.15 < decision.ratio < 1
    assert decision.compute_s == pytest.approx(MARGIN * decision.load_s)
    assert "loading takes longer" in decision.reason
    # only so much of a slow device is loaded as pays: a block that is left out is computed in context besides
    for bytes_per_s in (1.2e7, 5e7):
        decision = controller({"disk": bytes_per_s}).decide(plan_of(["disk"] * 8))
        assert 0 < len(decision.left_out) < 16
        assert decision.ttft_s < decision.full_s
        assert max(decision.load_s, decision.compute_s) <= 1.2 * min(decision.load_s, decision.compute_s)
        spans = plan_of(["disk"] * 8).spans
        first_left_out = min(span.start for span in spans if span.name in decision.left_out)
        assert all(span.start < first_left_out or span.name in decision.left_out or not span.tier for span in spans)
    # of two tiers the faster comes first, and a chunk that stands twice is loaded once
    plan = plan_of(["s3", "memory", "s3", "memory"])
    decision = controller({"memory": 5e9, "s3": 5e6}).decide(plan)
    assert {span.tier for span in plan.spans if span.name in decision.left_out} == {"s3"}
    assert not any(span.name in decision.left_out for span in plan.spans if span.tier == "memory")
    segment = chunk(range(512))
    prompt = Prompt.of([text([1]), segment, segment, text([2])])
    spans = PLANNER.plan(Prompt.of([segment]), Holds({})).spans
    held = {s.name: BlockEntry(segment.token_ids[s.start : s.stop], LAYOUT, "disk") for s in spans}
    plan = PLANNER.plan(prompt, Holds(held))
    decision = controller({"disk": 1e8}).decide(plan)
    assert decision.load_s == pytest.approx(512 * BYTES / 1e8)


@given(
    least=st.floats(0, 1),
    floor=st.floats(0, 1),
    speed=st.floats(1e5, 1e10),
    latency=st.floats(0, 0.2),
    tiers=st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=6),
)
@settings(max_examples=share(60), deadline=None)
def test_a_prompts_own_ratio_is_counted_as_if_it_were_the_floor(
    least: float, floor: float, speed: float, latency: float, tiers: list[str]
) -> None:
    """Above it (the shadow check's floor has raised it) or below (the client asked for less)."""
    plan, speeds = plan_of(tiers, 128), {"a": speed, "b": 1e9}
    own, as_floor = controller(speeds, floor, latency), controller(speeds, least, latency)
    assert own.decide(plan, least) == as_floor.decide(plan)
    assert own.decide(plan) == controller(speeds, floor, latency).decide(plan)
    assert own.decide(plan).ratio >= floor


def best_by_trying(control: Controller, plan: BlendPlan, floor: float) -> float:
    """The lowest expected time over all prefixes of the order of loading and many ratios, from the definition."""
    stored = [span for span in plan.spans if span.tier]
    best = control.cost_model.full_s(len(plan))
    for count, ratio in itertools.product(range(1, len(stored) + 1), np.linspace(floor, 1, 9)):
        taken = sorted(stored, key=lambda s: BYTES / control.cost_model.tiers[s.tier].bytes_per_s)[:count]
        tiers = {span.tier for span in taken}
        load = sum(
            control.cost_model.tiers[tier].seconds(
                sum(s.tier == tier for s in taken), BYTES * sum(len(s) for s in taken if s.tier == tier), LAYERS
            )
            for tier in tiers
        )
        reused = sum(len(span) for span in taken)
        rows = len(plan)
        active = rows - reused + ratio * reused
        unit = control.cost_model.full_s(rows) / rows / LAYERS
        compute = unit * (rows * 1.3 + active * (LAYERS - 1.3)) * control.cost_model.overhead
        best = min(best, max(load, compute) + min(load, compute) / LAYERS)
    return best


@given(
    st.lists(st.sampled_from(["memory", "disk", "s3", ""]), min_size=1, max_size=6),
    st.floats(6, 10),
    st.floats(6, 10),
    st.floats(0, 0.02),
    st.floats(0.5, 2.5),
)
@settings(deadline=None, max_examples=share(60))
def test_no_other_choice_is_expected_to_be_much_sooner(
    tiers: list[str], disk: float, s3: float, latency: float, overhead: float
) -> None:
    control = controller({"memory": 1e10, "disk": 10**disk, "s3": 10**s3}, latency=latency, overhead=overhead)
    plan = plan_of(tiers)
    decision = control.decide(plan)
    assert 0.15 <= decision.ratio <= 1  # the floor
    assert decision.ttft_s <= decision.full_s * (1 + 1e-9)
    assert decision.ttft_s <= best_by_trying(control, plan, 0.15) * 1.04  # the ratio fills what loading leaves


def test_it_learns_what_tiers_computing_and_full_prefills_take() -> None:
    control = controller({"disk": 1e9})
    plan = plan_of(["disk"] * 8)
    for _ in range(40):
        decision = control.decide(plan)
        expected = control.load_s([s for s in plan.spans if s.tier])["disk"]
        true_load = 4096 * BYTES / 5e7
        control.observe(
            decision, 1.5 * decision.compute_s / control.cost_model.overhead, {"disk": (true_load, expected)}
        )
    assert control.cost_model.tiers["disk"].bytes_per_s == pytest.approx(5e7, rel=0.02)
    assert control.cost_model.overhead == pytest.approx(1.5, rel=0.02)
    assert control.decide(plan).left_out
    # a full prefill
    control = controller({})
    plan = plan_of([""] * 4)
    for _ in range(40):
        control.observe(control.decide(plan), 3 * CostModel(PREFILL).full_s(len(plan)), {})
    assert control.cost_model.full_s(1024) == pytest.approx(1.5, rel=0.02)
    assert control.decide(plan).full_s == pytest.approx(control.cost_model.full_s(len(plan)))
    for _ in range(40):
        control.observe(control.decide(plan), 1e9, {})
    assert control.cost_model.full_s(1024) == pytest.approx(8 * 0.5)  # never far from what was measured
    # nothing of what nobody knows, and little of one wild observation
    control = controller({"disk": 1e9})
    decision = control.decide(plan_of(["disk"] * 8))
    control.observe(decision, None, {})
    assert control.cost_model == controller({"disk": 1e9}).cost_model
    control.observe(decision, 1e6, {"disk": (1e6, 0.05)})
    assert control.cost_model.overhead <= 1.6
    assert control.cost_model.tiers["disk"].bytes_per_s >= 1e9 / 1.6
    # passes that take just as long as expected at their own ratios teach nothing; counted at the floor they would
    control, plan = controller({"memory": 5e9}), plan_of(["memory"] * 8)
    for number in range(60):
        ratio = (0.15, 0.225, 0.3375, 0.5)[number % 4]
        took = controller({"memory": 5e9}, floor=ratio).decide(plan).compute_s
        control.observe(control.decide(plan, ratio), took, {})
    assert control.cost_model.overhead == pytest.approx(1.0)


def test_a_cost_model_between_and_beyond_the_measured_lengths_and_from_files(tmp_path: Path) -> None:
    cost_model = CostModel(PREFILL)
    assert cost_model.full_s(1024) == pytest.approx(0.5)
    assert cost_model.full_s(0) == 0
    assert cost_model.full_s(64) == pytest.approx(64 * 0.12 / 256)
    assert 0.5 < cost_model.full_s(2000) < 2.3
    assert cost_model.full_s(8192) > 2 * 2.3
    times = [cost_model.full_s(n) for n in range(1, 9000, 50)]
    assert all(later > earlier for earlier, later in itertools.pairwise(times))
    falling = CostModel(((100, 1.0), (200, 1.1)))
    assert falling.full_s(100_000) > 0 and math.isfinite(falling.full_s(100_000))
    # through JSON, and from a file as the first version of `cacheblend calibrate` wrote it
    cost_model = controller({"disk": 1e9}, latency=0.001, overhead=1.3, request_s=0.01).cost_model
    assert CostModel.from_dict(cost_model.to_dict()) == cost_model
    path = tmp_path / "cost.json"
    path.write_text(
        '{"format": 1, "model": "f1", "device": "cpu", "codec": "raw", "prefill_s": [[256, 0.12], [1024, 0.5]], '
        '"tiers": {"disk": {"bytes_per_s": 1e9, "layer_s": 0.001, "block_s": 0.0}}, "overhead": 1.2, "request_s": 0.01}'
    )
    expected = CostModel(((256, 0.12), (1024, 0.5)), {"disk": TierSpeed(1e9, 0.001)}, 1.2, 0.01)
    assert load_cost_model(path) == expected
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(InvalidInputError, match="no cost model of format 1; make one with `cacheblend calibrate`"):
        load_cost_model(path)


# ---- where to keep KV caches: the paper's comparison of loading and recomputing ----------------------------


GB = 1e9
RAM, NVME, DISK = Device("memory", 20 * GB, 3), Device("nvme", 3 * GB, 0.1), Device("disk", 0.15 * GB, 0.02)


def placed(*devices: Device, prefill_s: float = 2.0, floor: float = 0.15):  # type: ignore[no-untyped-def]
    return place(
        list(devices), prefill_s=prefill_s, layers=32, context_bytes=0.5 * GB, stored_bytes=1000 * GB, floor=floor
    )


def test_devices_and_the_cheapest_that_hides_its_loading() -> None:
    # a fast one keeps the floor, a slow one recomputes for free
    ram, nvme, disk = placed(RAM, NVME, DISK)
    assert (ram.ratio, nvme.ratio) == (0.15, 0.15)
    assert ram.load_s == pytest.approx(0.025)
    assert ram.ttft_s == pytest.approx(recompute_s(2.0, 32, 0.15)) == pytest.approx(2 / 32 + 0.15 * 2 * 31 / 32)
    assert disk.ratio == 1.0 and disk.ttft_s == pytest.approx(0.5 / 0.15)
    (between,) = placed(Device("between", 0.5 * GB, 0))
    assert 0.15 < between.ratio < 1
    assert between.recompute_s == pytest.approx(MARGIN * between.load_s)
    # the cheapest that hides its loading, else the soonest; none where none is sooner
    devices = placed(RAM, NVME, DISK)
    best = cheapest(devices, 2.0)
    assert best is not None and best.device is NVME
    assert [each.hides for each in devices] == [True, True, False]
    assert [each.monthly for each in devices] == pytest.approx([3000, 100, 20])
    slow = [Device("a", 0.3 * GB, 1), Device("b", 0.4 * GB, 5)]
    best = cheapest(placed(*slow), 2.0)
    assert best is not None and best.device.name == "b"
    assert cheapest(placed(Device("tape", 0.01 * GB, 0)), 2.0) is None


def test_what_is_no_ratio_no_cost_model_and_no_device_is_refused() -> None:
    for ratio in (-0.1, 1.1, math.nan):
        with pytest.raises(InvalidInputError, match=r"must be in 0\.\.1"):
            controller({}).decide(plan_of(["a"]), ratio)
        with pytest.raises(InvalidInputError, match=r"must be in 0\.\.1"):
            controller({}, floor=ratio)
    two = [[1, 1.0], [2, 2.0]]
    for times in ([[1, 1.0]], [[2, 1.0], [1, 2.0]], [[1, 1.0], [2, 0.0]], "x", None):
        with pytest.raises(InvalidInputError):
            CostModel.from_dict({"prefill_s": times, "tiers": {}} if times else {})
    for tier in ({"bytes_per_s": 0}, {"speed": 1}):
        with pytest.raises(InvalidInputError):
            CostModel.from_dict({"prefill_s": two, "tiers": {"disk": tier}})
    for wrong_text in ("nvme", "nvme:3", "nvme:x:1", "nvme:0:1", "nvme:3:-1", "a:1:2:3"):
        with pytest.raises(InvalidInputError, match=r"nvme|a device is"):
            Device.parse(wrong_text)
    for wrong in ({"prefill_s": 0.0}, {"floor": 1.5}):
        with pytest.raises(InvalidInputError, match="above 0"):
            placed(RAM, **wrong)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runner(capsys, "plan", "-m", "nano")
    shown = run("--prefill-s", 0.5, "-c", 2048)
    assert shown.code == 0, shown.err
    assert "hides its loading" in shown.out and "nvme" in shown.out
    assert "recomputing takes" in shown.out and "at 0.15" in shown.out
    result = run("--prefill-s", 0.5, "--device", "mine:1:0.5", "--stored-tokens", 1e9, "--json").json
    assert result["bytes_per_token"] == 12 * 2 * 2 * 32 * 2
    assert result["devices"][0]["monthly"] == pytest.approx(result["bytes_per_token"] * 0.5)
    int4 = run("--prefill-s", 0.5, "--codec", "int4", "--json").json
    assert int4["bytes_per_token"] < 0.32 * result["bytes_per_token"]
    cost_model = tmp_path / "machine.json"
    tiers = {"disk": {"bytes_per_s": 2e9}}
    measured = {"format": 1, "codec": "raw", "prefill_s": [[100, 0.1], [1000, 1.0]], "tiers": tiers}
    cost_model.write_text(json.dumps(measured))
    assert "with the codec raw, not int8" in run("--cost-model", cost_model, "--codec", "int8").err
    own = run("--cost-model", cost_model, "-c", 500, "-d", "disk::0.1", "-d", "tape:0.1:0", "--json").json
    assert own["prefill_s"] == pytest.approx(0.5)
    assert [each["bytes_per_s"] for each in own["devices"]] == [2e9, 1e8]
    assert "no tier 'nvme' was measured (disk)" in run("--cost-model", cost_model, "-d", "nvme::1").err
    assert "--cost-model has them" in run("--prefill-s", 1, "-d", "nvme::1").err
    assert "either a cost model" in run().err
    assert "cannot be read" in run("--cost-model", tmp_path / "none").err
    assert "a device is name:GB/s:price" in run("--prefill-s", 1, "-d", "x").err
