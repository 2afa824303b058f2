"""What the shadow check concludes from comparisons: windows, bounds, labels, and the steps of the floor."""

import logging
import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selection import Selection
from cacheblend.engines import shadow
from cacheblend.engines.bounds import allowed_errors, lower_bound
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.shadow import Compared, Floor, Labels, ShadowSettings, ShadowWatch, compare, factors_from
from cacheblend.serve.metrics import Metrics
from cacheblend.store import MemoryStore
from campaign import share
from prometheus import watched_runtime

GOOD, BAD = Compared(0.001, (True, True)), Compared(2.0, (False, True))
MINE = Labels("a", "hybrid")


def watch(floor: float | None = 0.8, ratio: float | None = 0.12, **others: object) -> ShadowWatch:
    return ShadowWatch(ShadowSettings(1.0, floor, **others), "m", ratio, seed=1)  # type: ignore[arg-type]


def test_a_comparison_is_the_divergence_of_the_first_token_and_who_is_likeliest() -> None:
    torch.manual_seed(0)
    full, first = torch.randn(3, 7), torch.randn(7)
    p, q = full[0].softmax(-1), first.softmax(-1)
    likeliest = [int(full[0].argmax()), (int(full[1].argmax()) + 1) % 7, int(full[2].argmax())]
    found = compare(first, likeliest, full)
    assert found.agreed == (True, False, True) and found.first
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-5)
    # Logits that are not finite are far away, and poison no sum.
    for bad in (math.nan, math.inf):
        broken = torch.full((5,), bad)
        far = [shadow.kl_divergence(*pair) for pair in ((torch.randn(5), broken), (broken, torch.randn(5)))]
        assert far == [shadow.MOST_KL] * 2
    barred = torch.tensor([0.0, 1.0, -math.inf])  # a token that a model never gives
    assert shadow.kl_divergence(barred, barred) == 0.0
    assert shadow.kl_divergence(torch.tensor([0.0, 0.0]), torch.tensor([0.0, -math.inf])) == shadow.MOST_KL


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"share": 0.0}, "above 0"),
        ({"share": 1.1}, "at most 1"),
        ({"share": math.nan}, "above 0"),
        ({"share": 0.1, "floor": 1.0}, "between 0 and 1"),
        ({"share": 0.1, "floor": 0.99999}, "lower it"),
        ({"share": 0.1, "floor": 0.95, "window": 58}, "at least 59"),
        ({"share": 0.1, "window": 0}, "window"),
        ({"share": 0.1, "confidence": 1.5}, "confidence"),
    ],
)
def test_settings_that_cannot_hold_are_refused_with_the_way_out(given: dict[str, float], what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        ShadowSettings(**given)  # type: ignore[arg-type]
    for floor in (0.5, 0.8, 0.95, 0.99):  # a window of its own size forgives four
        assert allowed_errors(ShadowSettings(0.1, floor).rows, floor, 0.95) == 4


@given(st.floats(0.01, 1), st.sampled_from(["hkvd", "hybrid", "query", "head", "random"]), st.floats(1, 20))
def test_raised_settings_recompute_more_in_steps(ratio: float, selector: str, factor: float) -> None:
    layers = (1, 3)
    schedule = (min(1.0, 2 * ratio), ratio)
    base = Selection(recompute_ratio=ratio, selector=selector, check_layers=layers, ratios=schedule)
    more = base.scaled(factor).make_selector().share
    assert more is not None and more == pytest.approx(min(1.0, ratio * factor))
    # A request that names a ratio keeps it, and the controller never goes below the floor's.
    raised = BlendSettings(BlendSettings().config, raised_by=2.0)
    assert raised.selector().share == pytest.approx(0.3)
    assert raised.selector(0.05).share == 0.05
    assert raised.at_least(0.2).share == pytest.approx(0.3)
    assert raised.at_least(0.5).share == 0.5
    factors = factors_from(ratio)  # steps rise by half and end in full recompute
    assert factors[0] == 1.0
    if ratio >= 1:
        assert factors == (1.0,)
        return
    assert math.isinf(factors[-1])
    assert all(b == pytest.approx(1.5 * a) for a, b in pairwise(factors[:-1]))
    assert all(ratio * factor <= shadow.FULL_ABOVE for factor in factors[1:-1])
    assert len(factors) == 2 or ratio * factors[-2] * 1.5 > shadow.FULL_ABOVE
    # A selector without a ratio goes to full recompute at once.
    assert factors_from(None) == (1.0, math.inf) == factors_from(0.0) == factors_from(0.009)


def slow_floor(settings: ShadowSettings, steps: int, told: Sequence[tuple[bool, bool]]) -> list[int]:
    """The step after each comparison, from the whole list each time."""
    assert settings.floor is not None
    rows, step, since, wait, is_trial = settings.rows, 0, 0, 1, False
    found = []
    for end in range(1, len(told) + 1):
        since += 1
        window = told[end - since : end][-rows:]
        agreed = [sum(each[i] for each in window) + (rows - len(window)) for i in (0, 1)]
        is_lost = any(lower_bound(count, rows, settings.confidence) < settings.floor for count in agreed)
        if is_lost and step < steps - 1:
            step, since, wait, is_trial = step + 1, 0, (min(2 * wait, shadow.MOST_WINDOWS) if is_trial else 1), False
        elif not is_lost:
            if is_trial and since >= rows:
                is_trial, wait = False, 1
            if step and since >= rows * wait:
                step, since, is_trial = step - 1, 0, True
        found.append(step)
    return found


@settings(max_examples=share(60), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.5, 0.7, 0.9]), st.integers(1, 5))
def test_the_floor_does_what_its_definition_says(rng: random.Random, floor: float, steps: int) -> None:
    chosen = ShadowSettings(1.0, floor)
    made, rates = Floor(chosen, steps), [rng.random() ** 0.3 for _ in range(steps)]
    told, found = [], []
    for _ in range(rng.randint(1, 400)):
        if rng.random() < 0.01:
            rates = [rng.random() ** 0.3 for _ in range(steps)]
        told.append((rng.random() < rates[made.step], rng.random() < rates[made.step]))
        change = made.add(*told[-1])
        found.append(made.step)
        assert change is None or (change.step == made.step and 0 <= change.bound <= change.agreement <= 1)
    assert found == slow_floor(chosen, steps, told)
    assert made.raised - made.lowered == made.step


def run(made: ShadowWatch, rates: Sequence[float], count: int, rng: random.Random) -> list[int]:
    """The step before each comparison; agreement is that of the step."""
    steps = []
    for _ in range(count):
        steps.append(made.step)
        if made.is_full:
            made.takes(0, 0, by_floor=True)
        else:
            agrees = rng.random() < rates[made.step]
            made.add(MINE, Compared(0.1, (agrees, agrees)), made.step)
    return steps


def test_a_watch_raises_to_full_recompute_and_tells_each_change(caplog: pytest.LogCaptureFixture) -> None:
    made = watch(None)
    run(made, [0.0], 300, random.Random(0))
    assert made.step == 0 and made.history()[-1].agreement == 0.0 and made.history()[-1].rows == 200
    made, rng = watch(0.8), random.Random(5)  # nothing blended agrees: attempts become rare
    last = len(factors_from(0.12)) - 1
    steps = run(made, [0.0] * (last + 1), 6000, rng)
    assert made.ratio == 1.0 or made.step == last - 1
    assert sum(step == last for step in steps) > 0.9 * len(steps)
    lowered = made.figures().lowered
    assert 3 <= lowered <= 6000 / made.settings.rows / 4
    caplog.clear()
    told: list[float] = []  # each change is one line and one count, and tells the engine
    made = ShadowWatch(ShadowSettings(1.0, 0.8), "m", 0.3, told.append, seed=1)
    with caplog.at_level(logging.INFO, "cacheblend.shadow"):
        run(made, [0.0] * 4, 40, random.Random(0))
    figures = made.figures()
    assert len(caplog.records) == figures.raised + figures.lowered == len(told) >= 2
    assert told[0] == 1.5 and math.isinf(told[-1]) and figures.ratio == 1.0
    assert "m: recompute ratio raised to full recompute" in caplog.text and "floor 0.8" in caplog.text


def test_windows_are_of_the_settings_in_force_and_answers_count_by_one_token_for_their_tenant() -> None:
    made, own = watch(), Labels("a", "hkvd", "request")

    def figures(labels: Labels) -> tuple[int, tuple[float, float, int]]:
        found = {series.labels: series for series in made.figures().series}[labels]
        return found.compared, found.agreement["first_token"]

    for _ in range(50):
        made.add(MINE, BAD, step=3)  # of another ratio
        made.add(own, BAD, step=None)  # of requests with their own
    assert made.step == 0 and not made.history()
    assert figures(MINE) == (50, (1.0, 0.0, 0)) and figures(own) == (50, (0.0, 0.0, 44))
    for _ in range(5):
        made.add(MINE, BAD, made.step)
    assert made.step == 1, "a change empties the windows that it concerns"
    assert figures(MINE) == (55, (1.0, 0.0, 0)) and figures(own) == (50, (0.0, 0.0, 44))
    for _ in range(4):
        made.add(MINE, BAD, made.step)
    assert figures(MINE) == (59, (0.0, 0.0, 4))
    made.begin_anew()  # another model, with the step in force
    assert made.step == 1 and figures(MINE) == (59, (1.0, 0.0, 0))
    made = watch(None, window=2000)  # an answer counts by one of its tokens
    for _ in range(2000):
        made.add(MINE, Compared(0.0, (True, False, True, True)), 0)
    (series,) = made.figures().series
    assert series.agreement["first_token"][0] == 1.0
    assert series.agreement["answer"][0] == pytest.approx(0.75, abs=0.04)
    assert (series.agreed, series.differed) == (6000, 2000)

    made = watch()
    for number in range(3 * shadow.MOST_TENANTS):
        made.add(Labels(f"tenant {number}", "hkvd"), GOOD, 0)
    tenants = {each.labels.tenant: each.compared for each in made.figures().series}
    # beyond the bound they share one
    assert len(tenants) == shadow.MOST_TENANTS + 1 and tenants[shadow.OTHERS] == 2 * shadow.MOST_TENANTS


@given(st.lists(st.booleans(), min_size=1, max_size=120))
def test_the_bound_shown_is_the_exact_one_of_the_window(told: list[bool]) -> None:
    made = watch(None, window=50)
    for agreed in told:
        made.add(MINE, Compared(0.5, (agreed,)), 0)
    (series,) = made.figures().series
    last = told[-50:]
    bound = lower_bound(sum(last), len(last), 0.95)
    assert series.agreement == dict.fromkeys(("first_token", "answer"), (sum(last) / len(last), bound, len(last)))
    assert (series.compared, series.agreed) == (len(told), sum(told)) and sum(series.kl_counts) == len(told)


def test_what_is_written_is_read_by_prometheus_from_a_server_and_from_vllm() -> None:
    made = watch()
    for _ in range(3):
        made.add(MINE, GOOD, 0)
    made.add(Labels('b"\n', "hkvd", "request"), BAD, None)
    made.drop("queue full")
    with MemoryStore() as store:
        text = Metrics(watched_runtime(store, made), lambda: 0, lambda: 0).text().decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples[("cacheblend_shadow_total", "a", "engine", "hybrid", "m")] == 3
    assert samples[("cacheblend_shadow_agreement", "a", "engine", "first_token", "hybrid", "m")] == 1
    bound = samples[("cacheblend_shadow_agreement_bound", "a", "answer", "engine", "hybrid", "m")]
    assert bound == pytest.approx(lower_bound(3, 3, 0.95))
    assert samples[("cacheblend_shadow_kl_count", "a", "engine", "hybrid", "m")] == 3
    assert samples[("cacheblend_shadow_kl_bucket", "+Inf", 'b"\n', "hkvd", "m", "request")] == 1
    assert samples[("cacheblend_shadow_kl_bucket", "1.0", 'b"\n', "hkvd", "m", "request")] == 0
    assert samples[("cacheblend_shadow_dropped_total", "m", "queue full")] == 1
    assert samples[("cacheblend_shadow_ratio", "m")] == pytest.approx(0.12)
    assert samples[("cacheblend_shadow_changes_total", "m", "raised")] == 0
    assert samples[("cacheblend_shadow_tokens_total", 'b"\n', "hkvd", "m", "no", "request")] == 1
