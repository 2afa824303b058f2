"""The text of a server's /metrics, every metric among it at least once."""

from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.shadow_check import ShadowCheck
from cacheblend.engines.shadow import Compared, Labels, ShadowSettings, ShadowWatch
from cacheblend.serve.metrics import Metrics
from cacheblend.store import MemoryStore


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
