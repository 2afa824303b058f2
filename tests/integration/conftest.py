"""Servers that tests of several files share, where none asks for settings of its own."""

from collections.abc import Iterator

import pytest

from cacheblend.serve.settings import ServeSettings
from serving import running, shallow

SETTINGS = ServeSettings(chunk_tokens=16, hosts=("server.example",), drain_s=5)


@pytest.fixture(scope="session")
def nano_url() -> Iterator[str]:
    """The address of a server on the model that ships."""
    with running(SETTINGS) as address:
        yield address


@pytest.fixture(scope="session")
def shallow_url() -> Iterator[str]:
    """The address of a server on two of its layers."""
    with running(SETTINGS, model=shallow()) as address:
        yield address
