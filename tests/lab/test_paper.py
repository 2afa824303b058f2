"""The paper's evaluation without a model: points of figures, kept measurements, sweeps, names of methods."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation.records import ROWS
from cacheblend.evaluation.scorers import ExactMatch, WordF1
from lab.paper import drawing
from lab.paper.answered import AGREEMENT, ALL, Answered, points, score
from lab.paper.compared import TITLES
from lab.paper.context import Kept, Sweeps

answered = st.builds(
    Answered,
    data=st.sampled_from(["a", "b"]),
    method=st.sampled_from([(family, title) for family, title in TITLES.items()][:3]),
    ratio=st.none(),
    x=st.sampled_from([1, 2, None]),
    ttft_s=st.floats(0.001, 10),
    scores=st.one_of(st.just({}), st.fixed_dictionaries({"f1": st.floats(0, 1)})),
    agrees=st.sampled_from([None, 0.0, 1.0]),
    compute=st.sampled_from([None, 0.25, 1.0]),
)


@given(st.lists(answered, min_size=1, max_size=25), st.booleans())
def test_points_are_means_of_their_answers(answers: list[Answered], by_data: bool) -> None:
    found = points(answers, by_data=by_data)
    assert sum(point["rows"] for point in found) == len(answers)
    for point in found:
        of = [
            each
            for each in answers
            if (each.method[1], each.x, each.data if by_data else ALL) == (point["method"], point["x"], point["data"])
        ]
        assert point["ttft_s"]["median"] == pytest.approx(np.median([each.ttft_s for each in of]))
        for name, values in (
            ("f1", [each.scores["f1"] for each in of if each.scores]),
            (AGREEMENT, [each.agrees for each in of if each.agrees is not None]),
        ):
            assert (name in point["quality"]) == bool(values)
            if values:
                quality = point["quality"][name]
                assert quality["n"] == len(values)
                assert quality["mean"] == pytest.approx(np.mean(np.array(values, dtype=float)))
                assert quality["low"] - 1e-9 <= quality["mean"] <= quality["high"] + 1e-9
    assert json.loads(json.dumps(found)) == found


def test_the_best_of_several_answers_counts() -> None:
    scorers = [WordF1(), ExactMatch()]
    assert score(scorers, "the red bridge", ["a clock", "red bridge"]) == {"f1": 1.0, "em": 1.0}
    assert score(scorers, "the red bridge", []) == {}


def test_without_gold_answers_the_first_token_is_drawn() -> None:
    assert drawing.measure_of([{"quality": {}}]) == AGREEMENT
    assert drawing.measure_of([{"quality": {AGREEMENT: {}}}]) == AGREEMENT
    assert drawing.measure_of([{"quality": {}}, {"quality": {"f1": {}, AGREEMENT: {}}}]) == "f1"


def test_every_family_has_a_colour_and_a_marker_of_its_own() -> None:
    assert set(drawing.COLOURS) == set(drawing.MARKERS) == set(TITLES)
    assert len(set(drawing.COLOURS.values())) == len(set(drawing.MARKERS.values())) == len(TITLES)


@pytest.mark.parametrize("seed", range(5))
def test_measurements_are_kept_over_kills(tmp_path: Path, seed: int) -> None:
    """Each is measured once; a line that was cut off is measured again."""
    draw, measured = random.Random(seed), list[str]()
    wanted = {f"point {number}": {"value": draw.random()} for number in range(8)}

    def measure(key: str) -> Any:
        measured.append(key)
        return wanted[key]

    cuts = 0
    for _ in range(6):
        with Kept(tmp_path, {"a": 1}) as kept:
            for key in draw.sample(sorted(wanted), draw.randint(0, 4)):
                assert kept.get(key, lambda key=key: measure(key)) == wanted[key]  # type: ignore[misc]
        file = tmp_path / ROWS
        if draw.random() < 0.5 and file.read_bytes():
            cuts += 1
            file.write_bytes(file.read_bytes()[: -draw.randint(1, 8)])
    with Kept(tmp_path, {"a": 1}) as kept:
        for key, value in wanted.items():
            assert kept.get(key, lambda key=key: measure(key)) == value  # type: ignore[misc]
        assert len(kept.machines) == 1
    assert set(measured) == set(wanted)
    assert len(measured) <= len(wanted) + cuts


def test_wrong_points_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"0\.\.1"):
        Sweeps(ratios=(1.5,))
    with pytest.raises(InvalidInputError, match="at least 1, got 0"):
        Sweeps(chunk_numbers=(0, 2))
