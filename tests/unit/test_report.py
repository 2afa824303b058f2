"""The report as JSON."""

import json

from cacheblend.core.report import BlendReport


def test_a_report_is_json_with_its_sum() -> None:
    report = BlendReport(prompt_tokens=10, hit_tokens={"prefix": 2, "memory": 3, "disk": 0}, fallbacks=["why"])
    read = json.loads(json.dumps(report.to_dict()))
    assert read["loaded_tokens"] == report.loaded_tokens == 5
    assert read["hit_tokens"] == {"prefix": 2, "memory": 3, "disk": 0}
    assert read["fallbacks"] == ["why"]
    assert BlendReport().loaded_tokens == 0


def test_reports_share_nothing() -> None:
    one, other = BlendReport(), BlendReport()
    one.hit_tokens["memory"] = 1
    one.fallbacks.append("x")
    one.to_dict()["fallbacks"].append("y")
    assert (other.hit_tokens, other.fallbacks) == ({}, [])
    assert one.fallbacks == ["x"]
