"""Settings: each bad one is refused at once, by name; and the report."""

import json
import math
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.report import BlendReport
from cacheblend.core.select.question_selectors import Hybrid, Query
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import (
    AllRows,
    Gradual,
    Head,
    Hkvd,
    NoRows,
    RandomRows,
    Threshold,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute_ratio": -0.1}, r"0\.\.1, got -0.1"),
        ({"recompute_ratio": 1.01}, r"0\.\.1, got 1.01"),
        ({"recompute_ratio": math.nan}, r"0\.\.1, got nan"),
        ({"recompute_ratio": math.inf}, r"0\.\.1, got inf"),
        ({"recompute_ratio": "0.5"}, r"0\.\.1, got '0.5'"),
        ({"recompute_ratio": None}, r"0\.\.1, got None"),
        ({"check_layers": ()}, r"ascending, at least 1.*got \(\)"),
        ({"check_layers": (0,)}, r"at least 1.*layer 0.*got \(0,\)"),
        ({"check_layers": (-1, 2)}, r"at least 1.*got \(-1, 2\)"),
        ({"check_layers": (3, 2)}, r"ascending.*got \(3, 2\)"),
        ({"check_layers": (2, 2)}, r"ascending.*got \(2, 2\)"),
        ({"selector": "threshold", "threshold": 1.0, "check_layers": (0,)}, "at least 1"),
        ({"ratios": (0.1, 0.2), "check_layers": (1, 2)}, r"must not rise.*got \(0.1, 0.2\)"),
        ({"ratios": (0.2, 0.1)}, r"1 check layers \(1,\) need as many ratios, got \(0.2, 0.1\)"),
        ({"ratios": (1.5,)}, r"0\.\.1, got \(1.5,\)"),
        ({"ratios": (math.nan,)}, r"0\.\.1, got \(nan,\)"),
        ({"selector": "hkvdd"}, "no selector is called 'hkvdd'; there are hkvd, query, hybrid, threshold, head"),
        ({"selector": "threshold"}, "needs a bound; set `threshold`"),
        ({"selector": "threshold", "threshold": -1.0}, "at least 0, got -1.0"),
        ({"selector": "threshold", "threshold": math.nan}, "finite.*got nan"),
        ({"measure": "q"}, "one of kv, k, v, got 'q'"),
        ({"selector": "threshold", "threshold": 1.0, "measure": "q"}, "one of kv, k, v, got 'q'"),
        ({"selector": "query", "pool": "word"}, "'sentence' or 1 to 2147483648 tokens, got 'word'"),
        ({"selector": "query", "pool": 0}, "1 to 2147483648 tokens, got 0"),
        ({"selector": "hybrid", "pool": True}, "1 to 2147483648 tokens, got True"),
        ({"selector": "query", "question_rows": 1}, "question_rows must be a whole number, at least 2 .*, got 1"),
        ({"selector": "query", "lead": -1}, "lead must be a whole number of spans"),
        ({"selector": "query", "question_rows": 2.5}, "whole number.*got 2.5"),
        ({"selector": "query", "question_rows": "64"}, "whole number.*got '64'"),
        ({"selector": "query", "question_words": -0.5}, "finite weight of at least 0, got -0.5"),
        ({"selector": "hybrid", "question_words": float("nan")}, "finite weight of at least 0, got nan"),
        ({"selector": "query", "hops": -1}, r"hops must be a whole number, 0 to 4 .*, got -1"),
        ({"selector": "hybrid", "hops": 5}, r"0 to 4 .*, got 5"),
        ({"selector": "query", "hops": True}, "whole number.*got True"),
        ({"selector": "query", "hops": 1.0}, "whole number.*got 1.0"),
        ({"selector": "query", "hop_spans": 0}, "hop_spans must be a whole number of spans, 1 to 8, got 0"),
        ({"selector": "hybrid", "hop_spans": 9}, "1 to 8, got 9"),
        ({"selector": "query", "head_rows": -1}, "head_rows must be a whole number of rows, at least 0, got -1"),
        ({"selector": "hybrid", "head_rows": 1.5}, "at least 0, got 1.5"),
        ({"selector": "query", "hop_rows": 1}, "hop_rows must be a whole number, at least 2 .*, or 0 .*, got 1"),
        ({"selector": "query", "hop_rows": -2}, "got -2"),
        ({"selector": "query", "hops": 1, "hop_rows": 0}, "words alone; set question_words above 0, or hop_rows"),
        ({"selector": "query", "pool": 10**30}, "1 to 2147483648 tokens"),
        ({"selector": "hybrid", "check_layers": ()}, "check layers|as many ratios"),
        ({"selector": "hybrid", "ratios": (-0.5,)}, "0..1, got .-0.5"),
        ({"check_layers": (1.5,)}, "whole numbers"),
        ({"selector": "hybrid", "rank": "both"}, "one of deviation, either, got 'both'"),
        ({"selector": "hybrid", "early_ratio": 1.5}, r"0\.\.1, got 1.5"),
        ({"selector": "hybrid", "early_ratio": -0.5}, r"0\.\.1, got -0.5"),
        ({"selector": "hybrid", "ratios": (0.1, 0.2), "check_layers": (1, 2)}, "must not rise"),
        ({"selector": "hybrid", "measure": "q"}, "one of kv, k, v, got 'q'"),
        ({"anchor": "eos"}, "auto, none, bos, system, got 'eos'"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"block_size": 1.5}, "block_size must be a whole number, got 1.5"),
        ({"capture_queue": float("nan")}, "capture_queue must be a whole number, got nan"),
        ({"capture": "false"}, "capture must be true or false, got 'false'"),
        ({"salt": 5}, "salt must be a text, got 5"),
        ({"salt": "a\udcff"}, r"salt 'a\\udcff' has a lone surrogate at character 1"),
        ({"tile_rows": -1}, "tile_rows must be at least 0, got -1"),
        ({"capture_batch_tokens": 0}, "capture_batch_tokens must be at least 1, got 0"),
        ({"read_ahead": -1}, "read_ahead must be at least 0, got -1"),
        ({"capture_queue": -1}, "capture_queue must be at least 0, got -1"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BlendConfig(**settings)
    with pytest.raises(InvalidInputError, match=message):
        BlendConfig.of(settings)


def test_what_decides_quality_is_a_type_of_its_own_and_a_device_decides_the_tiles() -> None:
    config = BlendConfig(recompute_ratio=0.1, selector="query", pool=8, block_size=64)
    assert config.selection == Selection(recompute_ratio=0.1, selector="query", pool=8)
    assert config.selection.make_selector() == config.make_selector() == Query(0.1, pool=8)
    assert BlendConfig.of({"recompute_ratio": 0.1, "selector": "query", "pool": 8, "block_size": 64}) == config
    assert BlendConfig(check_layers=(1, 2), ratios=(0.5, 0.25)).selection.final_ratio == 0.25
    with pytest.raises(InvalidInputError, match="no field 'ratio'; it has recompute_ratio, selector"):
        BlendConfig.of({"ratio": 0.1})
    with pytest.raises(InvalidInputError, match=r"0\.\.1, got 2"):
        Selection(recompute_ratio=2)
    assert [BlendConfig().on(device).tile_rows for device in ("cpu", "cuda")] == [1024, 4096]
    assert [BlendConfig(tile_rows=7).on(device).tile_rows for device in ("cpu", "cuda")] == [7, 7]


def test_every_selector_can_be_named_and_one_check_by_its_layer_or_its_ratio() -> None:
    for kind in (Query, Hybrid, Threshold, Head, RandomRows, NoRows, AllRows):
        name = kind.__name__.removesuffix("Rows").lower().replace("no", "none")
        assert isinstance(BlendConfig(selector=name, threshold=1.0).make_selector(), kind)
    assert BlendConfig(selector="hkvd").make_selector() == BlendConfig().make_selector() == Gradual(0.15, "kv")
    assert BlendConfig(check_layers=(1,)).make_selector() == Hkvd((1,), (0.15,))
    assert BlendConfig(ratios=(0.2,)).make_selector() == Hkvd((1,), (0.2,))
    assert BlendConfig(ratios=(0.2,)).make_selector(0.3) == Hkvd((1,), (0.3,))
    assert BlendConfig(measure="v").make_selector(0.3) == Gradual(0.3, "v")


def test_settings_and_a_requests_ratio_make_the_selector() -> None:
    config = BlendConfig(check_layers=(1, 3), ratios=(0.5, 0.25))
    assert config.make_selector() == Hkvd((1, 3), (0.5, 0.25))
    assert config.make_selector(0.75) == Hkvd((1, 3), (0.75, 0.75))
    assert config.make_selector(0) == Hkvd((1, 3), (0, 0))
    assert BlendConfig(selector="head").make_selector(0.5) == Head(0.5)
    with pytest.raises(InvalidInputError, match="got 2"):
        config.make_selector(2)
    # hybrid's early share follows the ratios
    config = BlendConfig(selector="hybrid", check_layers=(1, 3), ratios=(0.5, 0.25), pool=4, question_rows=8)
    assert config.make_selector() == Hybrid((1, 3), (0.5, 0.25), 0.75, pool=4, question_rows=8)
    assert config.make_selector(0.5) == Hybrid((1, 3), (0.5, 0.5), 1.0, pool=4, question_rows=8)
    fixed = BlendConfig(selector="hybrid", ratios=(0.25,), early_ratio=0.375, rank="deviation", measure="k")
    assert fixed.make_selector() == Hybrid((1,), (0.25,), 0.375, "deviation", "k")
    assert fixed.make_selector(0.5) == Hybrid((1,), (0.5,), 0.5, "deviation", "k")
    # hops reach the selectors that ask
    assert BlendConfig(selector="query").make_selector() == Query(0.15)  # hops 0
    config = BlendConfig(selector="query", hops=2, hop_spans=1)
    assert config.make_selector() == config.selection.make_selector() == Query(0.15, hops=2, hop_spans=1)
    config = BlendConfig(selector="query", question_words=2.0, hops=1, hop_rows=0)
    assert config.make_selector() == Query(0.15, words=2.0, hops=1, hop_rows=0)
    config = BlendConfig(selector="hybrid", early_ratio=0.5, hops=1)
    assert config.make_selector() == Hybrid((1,), (0.15,), 0.5, hops=1, hop_spans=2)
    assert config.make_selector(0.25) == Hybrid((1,), (0.25,), 0.5, hops=1, hop_spans=2)


def test_the_report_is_json_with_its_sum_and_shares_nothing() -> None:
    report = BlendReport(prompt_tokens=10, hit_tokens={"prefix": 2, "memory": 3, "disk": 0}, fallbacks=["why"])
    read = json.loads(json.dumps(report.to_dict()))
    assert read["loaded_tokens"] == report.loaded_tokens == 5 and read["fallbacks"] == ["why"]
    assert read["hit_tokens"] == {"prefix": 2, "memory": 3, "disk": 0}
    report.to_dict()["fallbacks"].append("y")
    assert report.fallbacks == ["why"] and BlendReport().loaded_tokens == 0
