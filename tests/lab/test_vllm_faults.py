"""What `lab vllm faults` draws, damages, compares and watches, without vLLM."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cacheblend.core.errors import InvalidInputError
from lab.faults import children, engine, injection, trials
from lab.faults.engine import Engine, found_in, is_same
from lab.faults.pollution import draw, plain_twins
from lab.faults.run import Settings

SEED = 5


def test_scenes_hold_the_situations_that_they_are_for() -> None:
    """Or the test above shows nothing."""
    scenes = draw(SEED, 60, 32)
    orders, aborted, fronts = set(), 0, set()
    for scene in scenes:
        first = [each for each in scene.arrivals if each.step == 0]
        orders.add(tuple(each.is_plain for each in first))
        aborted += sum(each.aborted is not None for each in scene.arrivals)
        fronts |= {each.request.spans[0][0] % 32 for each in first if each.request.spans}
    assert {(True, False), (False, True), (True, False, False), (False, True, False)} <= orders
    assert len(orders) >= 15
    assert aborted >= 10
    assert {0, 1, 31} <= fronts  # on a block's border, and beside it
    assert scenes == draw(SEED, 80, 32)[:60]


def test_every_blended_prompt_is_asked_later_as_a_plain_one() -> None:
    for scene in draw(SEED, 20, 64):
        later = {request.ids for request in scene.later}
        assert {each.request.ids for each in scene.arrivals if not each.is_plain} <= later
        assert all(request.spans == () for request in [*scene.later, *plain_twins([scene])])


def answer(*steps: dict[str, float]) -> dict[str, Any]:
    return {"tokens": [int(max(step, key=lambda token: step[token])) for step in steps], "logprobs": list(steps)}


def test_answers_are_compared_by_tokens_and_probabilities_up_to_a_tie() -> None:
    right = answer({"5": -0.1, "6": -3.0}, {"7": -0.5, "8": -0.5001})
    assert is_same(right, right)
    assert is_same(answer({"5": -0.1001, "6": -3.0}, {"7": -0.5002, "8": -0.5}), right)  # the two tie
    assert not is_same(answer({"5": -0.2, "6": -3.0}, {"7": -0.5, "8": -0.5001}), right)
    assert not is_same(answer({"6": -0.1, "5": -3.0}, {"7": -0.5, "8": -0.5001}), right)
    assert not is_same(answer({"5": -0.1, "6": -3.0}), right)


def test_names_left_behind_are_found_through_objects_and_containers() -> None:
    held = type("Held", (), {"__module__": "cacheblend.anything"})()
    held.jobs = [{"t-7": ("x", {"t-8"})}]
    held.foreign = SimpleNamespace(name="t-9")  # not this package's
    held.itself = held
    assert len(found_in([held], ("t-",))) == 2
    assert found_in([held], ("other",)) == []


class SlowDisk(Engine):
    """Stores so many tokens each time that it is asked."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.stored, self.asked = tokens, 0.0, 0

    def ask(self, requests: Any) -> dict[str, Any]:
        self.asked += len(requests)
        return {}

    def settle(self) -> None:
        self.stored += self.tokens

    def counters(self) -> dict[str, float]:
        return {"captured_tokens": self.stored} if self.stored else {}

    def forget(self) -> None: ...

    @contextmanager
    def patient(self) -> Iterator[None]:
        yield


def test_nothing_is_compared_before_every_passage_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blend without one of them would be taken for the right answer, and every later one would be wrong."""
    slow, full = SlowDisk(40), SlowDisk(100)
    slow.fill(range(130), [(10, 60), (60, 110)])
    full.fill(range(130), [(10, 60), (60, 110)])
    assert (slow.asked, full.asked) == (3, 1)
    monkeypatch.setattr(engine, "PATIENT_S", 0.0)
    with pytest.raises(RuntimeError, match="0 of 100 tokens were stored in 0 s"):
        SlowDisk(0).fill(range(130), [(10, 110)])


def test_files_are_damaged_and_put_back(tmp_path: Path) -> None:
    store, kept = tmp_path / "store", tmp_path / "kept"
    for folder in (store, kept):
        (folder / "blocks").mkdir(parents=True)
        for number in range(40):
            (folder / "blocks" / f"{number}").write_bytes(bytes([number]) * 50)
    assert trials.damage(store, random.Random(1), every=False) == 1
    assert trials.damage(store, random.Random(2), every=True) in (39, 40)

    def contents(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "blocks").iterdir()}

    differing = [name for name, held in contents(kept).items() if contents(store).get(name) != held]
    assert len(differing) >= 38  # a bit may have been flipped back, and zeros stay zeros
    with trials.removed(store):
        assert not store.exists()
    trials.restore(kept, store)
    assert contents(store) == contents(kept)


def test_a_fault_is_met_once_at_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = SimpleNamespace(read=lambda: "real")
    holder.read = injection._faulty("store read", holder.read)
    injection._armed.append({"place": "store read", "after": 1, "times": 1, "error": "OutOfMemoryError"})
    assert holder.read() == "real"
    with pytest.raises(Exception, match="injected at store read"):
        holder.read()
    assert holder.read() == "real"
    assert injection.disarm() == 1
    assert injection.disarm() == 0


@pytest.mark.parametrize("wrong", [{"only": ("fautls",)}, {"engines": ("three ranks",)}, {"tried": 0}])
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        Settings(**wrong)


CHILD = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
with open(job["out"], "a", buffering=1) as out:
    for number in range(job["first"], 5):
        print(json.dumps({"begin": number}), file=out)
        if number == 1:
            os._exit(3)
        if number == 3:
            time.sleep(600)
        print(json.dumps({"trial": number, "met": 1}), file=out)
    print(json.dumps({"done": True}), file=out)
"""


def test_a_child_that_ends_or_hangs_is_counted_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "standin.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "CHILD", "standin")
    monkeypatch.setattr(children, "PATIENCE_S", 1.0)
    found = children.watch(tmp_path, {"campaign": "faults", "folder": str(tmp_path), "count": 9}, "one")
    assert found.is_complete
    assert [line["trial"] for line in found.lines] == [0, 2, 4]
    assert (found.ended, found.hung) == (1, 1)
    assert [lost["lost"] for lost in found.lost] == ["ended", "hung"]
    assert found.total("met") == 3
    json.dumps(found.described())


def test_engines_of_one_name_in_two_campaigns_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "standin.py").write_text(CHILD.replace("number == 1", "False").replace("number == 3", "False"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "CHILD", "standin")
    for _ in range(2):  # nor does what an earlier run left count
        for campaign in ("pollution", "faults"):
            found = children.watch(tmp_path, {"campaign": campaign, "folder": str(tmp_path), "count": 9}, "few blocks")
            assert [line["trial"] for line in found.lines] == [0, 1, 2, 3, 4]
