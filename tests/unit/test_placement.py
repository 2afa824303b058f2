"""Where to keep KV caches: the paper's comparison of loading and recomputing."""

import json
from pathlib import Path

import pytest

from cacheblend.core.cost.cost_model import MARGIN
from cacheblend.core.cost.devices import Device, cheapest, place, recompute_s
from cacheblend.core.errors import InvalidInputError
from command_line import runner

GB = 1e9
RAM, NVME, DISK = Device("memory", 20 * GB, 3), Device("nvme", 3 * GB, 0.1), Device("disk", 0.15 * GB, 0.02)


def placed(*devices: Device, prefill_s: float = 2.0, floor: float = 0.15):  # type: ignore[no-untyped-def]
    return place(
        list(devices), prefill_s=prefill_s, layers=32, context_bytes=0.5 * GB, stored_bytes=1000 * GB, floor=floor
    )


def test_a_fast_device_keeps_the_floor_and_a_slow_one_recomputes_for_free() -> None:
    ram, nvme, disk = placed(RAM, NVME, DISK)
    assert (ram.ratio, nvme.ratio) == (0.15, 0.15)
    assert ram.load_s == pytest.approx(0.025)
    assert ram.ttft_s == pytest.approx(recompute_s(2.0, 32, 0.15)) == pytest.approx(2 / 32 + 0.15 * 2 * 31 / 32)
    assert disk.ratio == 1.0 and disk.ttft_s == pytest.approx(0.5 / 0.15)
    (between,) = placed(Device("between", 0.5 * GB, 0))
    assert 0.15 < between.ratio < 1
    assert between.recompute_s == pytest.approx(MARGIN * between.load_s)


def test_the_cheapest_that_hides_its_loading() -> None:
    devices = placed(RAM, NVME, DISK)
    best = cheapest(devices, 2.0)
    assert best is not None and best.device is NVME
    assert [each.hides for each in devices] == [True, True, False]
    assert [each.monthly for each in devices] == pytest.approx([3000, 100, 20])


def test_where_none_hides_the_soonest_and_where_none_is_sooner_none() -> None:
    slow = [Device("a", 0.3 * GB, 1), Device("b", 0.4 * GB, 5)]
    best = cheapest(placed(*slow), 2.0)
    assert best is not None and best.device.name == "b"
    assert cheapest(placed(Device("tape", 0.01 * GB, 0)), 2.0) is None


@pytest.mark.parametrize("text", ["nvme", "nvme:3", "nvme:x:1", "nvme:0:1", "nvme:3:-1", "a:1:2:3"])
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"nvme|a device is"):
        Device.parse(text)


@pytest.mark.parametrize("wrong", [{"prefill_s": 0.0}, {"floor": 1.5}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match="above 0"):
        placed(RAM, **wrong)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runner(capsys, "plan", "-m", "nano")
    shown = run("--prefill-s", 0.5, "-c", 2048, "--plot", tmp_path / "plan.png")
    assert shown.code == 0, shown.err
    assert "hides its loading" in shown.out and "nvme" in shown.out
    assert "recomputing takes" in shown.out and "at 0.15" in shown.out
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    result = run("--prefill-s", 0.5, "--device", "mine:1:0.5", "--stored-tokens", 1e9, "--json").json
    assert result["bytes_per_token"] == 12 * 2 * 2 * 32 * 2
    assert result["devices"][0]["monthly"] == pytest.approx(result["bytes_per_token"] * 0.5)
    int4 = run("--prefill-s", 0.5, "--codec", "int4", "--json").json
    assert int4["bytes_per_token"] < 0.32 * result["bytes_per_token"]
    cost_model = tmp_path / "machine.json"
    tiers = {"disk": {"bytes_per_s": 2e9}}
    cost_model.write_text(json.dumps({"format": 1, "prefill_s": [[100, 0.1], [1000, 1.0]], "tiers": tiers}))
    own = run("--cost-model", cost_model, "-c", 500, "-d", "disk::0.1", "-d", "tape:0.1:0", "--json").json
    assert own["prefill_s"] == pytest.approx(0.5)
    assert [each["bytes_per_s"] for each in own["devices"]] == [2e9, 1e8]
    assert "no tier 'nvme' was measured (disk)" in run("--cost-model", cost_model, "-d", "nvme::1").err
    assert "--cost-model has them" in run("--prefill-s", 1, "-d", "nvme::1").err
    assert "either a cost model" in run().err
    assert "cannot be read" in run("--cost-model", tmp_path / "none").err
    assert "a device is name:GB/s:price" in run("--prefill-s", 1, "-d", "x").err
