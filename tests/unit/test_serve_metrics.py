"""The metrics of a running server, and those that the dashboard asks for."""

import json
import re
from pathlib import Path

from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.shadowing import ShadowCheck
from cacheblend.engines.shadow import Compared, Labels, ShadowSettings, ShadowWatch
from cacheblend.serve.metrics import Metrics
from cacheblend.store import MemoryStore

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"


def metrics_text() -> str:
    with MemoryStore() as store:
        watch = ShadowWatch(ShadowSettings(0.5), "nano", 0.15)
        watch.add(Labels("a", "hkvd"), Compared(0.1, (True,)), 0)
        watch.drop("queue full")
        check = ShadowCheck(watch, lambda prompt, rows: None, lambda: 0, lambda: None)  # type: ignore[arg-type, return-value]
        metrics = Metrics(store, lambda: 3, lambda: 2, lambda: {"queue full": 5, "failed": 1}, check)
        report = BlendReport(10, {"memory": 4}, ttft_s=0.2, fallbacks=["1 block(s) lost: gone", "and again"])
        metrics.report(report, "blend")
        metrics.request(200)
        metrics.gap(0.01)
        return metrics.text().decode()


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
