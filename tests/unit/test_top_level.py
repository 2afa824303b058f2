"""What can be imported from `cacheblend` itself, and that importing it loads nothing."""

import importlib
import subprocess
import sys

import pytest

import cacheblend


def test_each_name_is_that_of_its_module() -> None:
    found = {name: getattr(cacheblend, name) for name in cacheblend.__all__ if name != "__version__"}
    for name, value in found.items():
        assert getattr(importlib.import_module(value.__module__), name) is value
    assert set(cacheblend.__all__) <= set(dir(cacheblend))


def test_importing_loads_no_torch_until_a_name_is_used() -> None:
    code = (
        "import sys, cacheblend; assert 'torch' not in sys.modules and 'numpy' not in sys.modules;"
        "cacheblend.__version__, dir(cacheblend); assert not [m for m in sys.modules if m.startswith('cacheblend.')];"
        "from cacheblend import CacheBlendError, InvalidInputError; assert 'torch' not in sys.modules;"
        "from cacheblend import BlendEngine; assert 'torch' in sys.modules;"
        "import cacheblend.engines.hf as hf; assert hf.BlendEngine is BlendEngine"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'cacheblend' has no attribute 'BlendEngin'"):
        _ = cacheblend.BlendEngin  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="BlendEngin"):
        exec("from cacheblend import BlendEngin")


def test_stars_import_what_is_listed() -> None:
    names: dict[str, object] = {}
    exec("from cacheblend import *", names)
    assert set(cacheblend.__all__) <= set(names)
