"""Measurements that are kept, so that an interrupted run measures nothing twice."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cacheblend.engines import provenance
from cacheblend.evaluation.records import LineLog


class Kept(LineLog[dict[str, Any]]):
    """Measurements by key, each written as soon as it is finished, with the machine. Close it, or use `with`."""

    def __init__(self, folder: Path | None, config: Mapping[str, Any]) -> None:
        super().__init__(folder, config, lambda line: {name: line[name] for name in ("key", "value", "machine")})

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The measurement of this key; measured if it is not there yet. Plain JSON."""
        if not self.has(key):
            self.items.append({"key": key, "value": measure(), "machine": provenance.machine_line()})
            self.append(self.items[-1])
        return self.value(key)

    def has(self, key: str) -> bool:
        return any(item["key"] == key for item in self.items)

    def value(self, key: str) -> Any:
        return next(item["value"] for item in self.items if item["key"] == key)

    @property
    def machines(self) -> list[str]:
        return list(dict.fromkeys(item["machine"] for item in self.items))
