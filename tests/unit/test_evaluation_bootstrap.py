"""Intervals: against a plain loop, against theory, paired, with gaps."""

import numpy as np
import pytest

from cacheblend.evaluation import bootstrap
from cacheblend.evaluation.bootstrap import bootstrap_means

NAN = float("nan")


def test_a_plain_loop_over_the_same_draws_gives_the_same_interval() -> None:
    values = np.random.default_rng(1).random((13, 3))
    found = bootstrap_means(values, resamples=400, seed=5)
    draws = np.random.default_rng(5).integers(13, size=(400, 13))
    means = np.array([values[rows].mean(axis=0) for rows in draws])
    np.testing.assert_allclose(found.mean, values.mean(axis=0))
    np.testing.assert_allclose(found.low, np.percentile(means, 2.5, axis=0))
    np.testing.assert_allclose(found.high, np.percentile(means, 97.5, axis=0))
    assert found.count.tolist() == [13, 13, 13]


def test_the_interval_is_as_wide_as_the_normal_one_for_many_rows() -> None:
    values = (np.random.default_rng(2).random((2000, 1)) < 0.3).astype(float)
    found = bootstrap_means(values, resamples=4000)
    error = 1.96 * np.sqrt(values.var() / 2000)
    assert found.low[0] == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert found.high[0] == pytest.approx(values.mean() + error, abs=0.1 * error)


def test_a_difference_has_the_paired_interval() -> None:
    full = (np.random.default_rng(3).random(200) < 0.5).astype(float)
    other = full.copy()
    other[0] = 1 - other[0]
    found = bootstrap_means(np.stack([full, other, other - full], axis=1))
    assert found.high[2] - found.low[2] < (found.high[0] - found.low[0]) / 3
    assert abs(found.mean[2]) == pytest.approx(1 / 200)


def test_rows_without_a_value_count_for_nothing() -> None:
    values = np.array([[1.0, 1.0, NAN], [0.0, NAN, NAN], [1.0, 1.0, NAN]])
    found = bootstrap_means(values, resamples=300)
    assert found.count.tolist() == [3, 2, 0]
    assert found.mean[:2].tolist() == [pytest.approx(2 / 3), 1]
    assert (found.low[1], found.high[1]) == (1, 1)
    assert np.isnan([found.mean[2], found.low[2], found.high[2]]).all()


def test_a_seed_draws_the_same_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).random((50, 2))
    first, again, other = (bootstrap_means(values, resamples=200, seed=seed) for seed in (1, 1, 2))
    assert first.low.tolist() == again.low.tolist() != other.low.tolist()
    monkeypatch.setattr(bootstrap, "BLOCK", 120)  # two draws at once
    small = bootstrap_means(values, resamples=200, seed=1)
    np.testing.assert_allclose(small.low, first.low)
