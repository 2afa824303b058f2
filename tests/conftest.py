"""Shared by all tiers."""

import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings

from faults import Faults

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as NumPy; read when they are imported

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # workers share the cores


@pytest.fixture
def faults(record_property: Callable[[str, object], None]) -> Faults:
    return Faults(record_property)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much was broken in tests that passed."""
    found: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "faults":
                found[value[0]] += value[1]
    if found:
        terminalreporter.section("faults, each a miss or a recompute and never a wrong answer")
        for what, number in sorted(found.items()):
            terminalreporter.write_line(f"{number:>8,}  {what}")
