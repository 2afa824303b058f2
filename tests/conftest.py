"""Shared by all tiers."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import core, settings

import campaign
import failing
import kernel_cases
import vllm_table
from faults import Faults

# A busy machine is no failure.
settings.register_profile("campaign", deadline=None, max_examples=campaign.share(100), print_blob=True)
settings.load_profile("campaign")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as NumPy; read when they are imported

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background: what is started would inherit it
    signal.signal(signal.SIGINT, lambda *_: None)

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # workers share the cores


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "may_fail(*reasons): injects faults that are mended, see failing.py")
    config.addinivalue_line("markers", "slow(turn): a run in five has it, see campaign.py")
    if core.global_force_seed is None:  # else by --hypothesis-seed
        core.global_force_seed = campaign.SEED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in argument for argument in config.args):  # a test that is named runs
        config.hook.pytest_deselected(items=campaign.leave_out(items))


@pytest.fixture(scope="session", autouse=True)
def a_busy_machine_is_no_slow_store() -> None:
    """Tests of slow stores say themselves how long a request may wait."""
    from cacheblend.core.load import budget

    budget.LEAST_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def unwritten_rows_are_nan() -> None:
    """What attends to a row before it is placed or written shows."""
    from cacheblend.core.load.layer_kv import LayerKV

    unwritten = LayerKV.unwritten
    LayerKV.unwritten = lambda *args: LayerKV(*(part.fill_(torch.nan) for part in unwritten(*args)))  # type: ignore[method-assign]


@pytest.fixture(scope="module", autouse=True)
def garbage_is_of_this_module() -> None:
    """What was imported, collected and kept before outlives it: no garbage collection looks at that again, which takes
    long behind thousands of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, as models this small are not faster with more, and a cache folder of the module's own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def faults(record_property: Callable[[str, object], None]) -> Faults:
    return Faults(record_property)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Notes in how many cases a test compared a kernel; through the report, as tests may run in other processes. Fails
    a test in which something failed that nobody noticed."""
    kernel_cases.counted.cases = kernel_cases.counted.wrong = 0
    try:
        yield
        failing.check(item)
    finally:
        if kernel_cases.counted.cases:
            item.user_properties.append(("kernel_cases", (kernel_cases.counted.cases, kernel_cases.counted.wrong)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """The same of servers and engines of fixtures, once they have ended."""
    yield
    failing.check(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was drawn and counted: kernels compared, waits for the device, and what was broken in tests that passed."""
    again = f"CACHEBLEND_CAMPAIGNS={campaign.SHARE:g} CACHEBLEND_SEED={campaign.SEED}"
    terminalreporter.write_line(f"campaigns: {campaign.SHARE:.0%} of them; {again} draws the same")
    if counts := _noted(terminalreporter, "kernel_cases"):
        cases, wrong = (sum(column) for column in zip(*counts, strict=True))
        terminalreporter.write_line(f"kernel_cases: {cases}, wrong {wrong}")
    if syncs := _noted(terminalreporter, "syncs"):
        terminalreporter.write_line(f"syncs: at most {max(syncs)} in each of {len(syncs)} passes")
    for engine, histories, blocks, poisoned in _noted(terminalreporter, "poisoned_blocks"):
        terminalreporter.write_line(f"poisoned_blocks: {poisoned} of {blocks} in {histories} histories ({engine})")
    write_reach({name: (verdict, why) for name, verdict, why in _noted(terminalreporter, "reach")}, terminalreporter)
    found: Counter[str] = Counter()
    for what, number in _noted(terminalreporter, "faults", outcomes=("passed",)):
        found[what] += number
    if found:
        terminalreporter.section("faults, each a miss or a recompute and never a wrong answer")
        for what, number in sorted(found.items()):
            terminalreporter.write_line(f"{number:>8,}  {what}")


def write_reach(families: dict[str, tuple[str, str]], terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what came of each family in vLLM, and records it."""
    if not families:
        return
    terminalreporter.section("families of decoders in vLLM")
    lines = {name: f"{verdict}: {why}" if why else verdict for name, (verdict, why) in families.items()}
    for name, verdict in sorted(lines.items()):
        terminalreporter.write_line(f"{name:<20} {verdict}")
    wrong = sum(verdict == "fails" for verdict, _ in families.values())
    terminalreporter.write_line(f"families: {len(families)}, wrong {wrong}")
    if vllm_table.RECORDED:
        vllm_table.merge(Path(vllm_table.RECORDED), "families", lines, wrong=wrong)


def _noted(
    terminalreporter: pytest.TerminalReporter, name: str, outcomes: Sequence[str] = ("passed", "failed")
) -> list[Any]:
    """What tests noted under a name."""
    reports = [report for outcome in outcomes for report in terminalreporter.stats.get(outcome, [])]
    return [value for report in reports for key, value in report.user_properties if key == name]
