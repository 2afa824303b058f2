"""Which versions of vLLM are refused, and by which words."""

import logging
import sys
from types import SimpleNamespace

import pytest

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.vllm import plugin
from cacheblend.engines.vllm.versions import TESTED, check_version, explained_imports


@pytest.mark.parametrize("found", ["0.31.0", "0.31.1", "0.32.0", "0.32.2", "0.32.0+cpu", "0.32.0.post1"])
def test_what_the_tests_ran_on_starts(found: str) -> None:
    check_version(found, allowed=False)


@pytest.mark.parametrize(
    "found", ["0.28.0", "0.29.0", "0.30.1", "0.33.0", "0.3.2", "1.32.0", "0.320.0", "0.32.0rc1", "0.32.1.dev7", "dev"]
)
def test_another_version_is_refused_by_number(found: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_version(found, allowed=False)
    words = str(refused.value)
    assert found in words and ", ".join(TESTED) in words and '"allow_untested_version": true' in words
    with caplog.at_level(logging.WARNING, logger="cacheblend.vllm"):
        check_version(found, allowed=True)
    assert found in caplog.text


def vllm_without_internals(monkeypatch: pytest.MonkeyPatch, version: str) -> list[str]:
    """A vLLM whose modules are elsewhere; returns the names of the models that will be registered with it."""
    registered: list[str] = []
    registry = SimpleNamespace(register_model=lambda name, path: registered.append(name))
    for name in [name for name in sys.modules if name.startswith(("vllm.", "cacheblend.engines.vllm.internals"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version, ModelRegistry=registry))
    return registered


@pytest.mark.parametrize("version", ["0.40.0", "0.32.0"])
def test_where_vllm_lacks_what_the_connector_needs_vllm_itself_still_starts(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registered = vllm_without_internals(monkeypatch, version)
    with caplog.at_level(logging.WARNING, logger="vllm.cacheblend"):
        plugin.register()
    assert registered == []
    assert "CacheBlendConnector cannot be used here" in caplog.text
    assert ("this is vLLM 0.40.0" in caplog.text) == (version == "0.40.0")


def test_the_connector_names_the_version_that_lacks_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import cacheblend.engines.vllm

    monkeypatch.delitem(sys.modules, "cacheblend.engines.vllm.connector", raising=False)
    vllm_without_internals(monkeypatch, "0.40.0")
    with pytest.raises(InvalidInputError, match=r"tested with vLLM 0\.31, .* this is vLLM 0\.40\.0, which lacks"):
        _ = cacheblend.engines.vllm.CacheBlendConnector
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0")
    with pytest.raises(ImportError), explained_imports():
        import vllm.config  # noqa: F401
