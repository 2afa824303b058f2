"""The metrics of a running server, and those that the dashboard asks for."""

import json
import re
from pathlib import Path

from metrics_text import metrics_text

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"


def test_every_metric_of_the_dashboard_exists() -> None:
    known = {line.split("{")[0].split(" ")[0] for line in metrics_text().splitlines() if not line.startswith("#")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"cacheblend_\w+", t["expr"])}
    assert len(asked) >= 10
    assert asked <= known


def test_failures_are_counted_by_reason() -> None:
    text = metrics_text()
    assert 'cacheblend_fallbacks_total{reason="lost block"} 2.0' in text
    assert 'cacheblend_captures_given_up_total{reason="queue full"} 5.0' in text
    assert "cacheblend_requests_waiting 3.0" in text
