"""Parts of the server: settings out of range, pages of a list, fields of OpenAI's types and vLLM's requests, of which
none is dropped silently, and freed memory."""

import asyncio
import ctypes
import ctypes.util
import hashlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cacheblend.cli.serve import _reload_on_hangup
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import BlockName
from cacheblend.serve import memory
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fields import ACCEPTED, REFUSED, REFUSED_RESPONSES, check_fields
from cacheblend.serve.keys import KeyRing, add_key, read_keys, remove_key
from cacheblend.serve.routes.chunks import page_of
from cacheblend.serve.schemas import ChatRequest, StreamOptions
from cacheblend.serve.settings import ServeSettings
from request_fields import CHAT, KINDS, VLLM, openai_fields

COUNTS = ("chunk_tokens", "max_body_bytes", "max_prompt_tokens", "max_chunks", "max_choices", "max_tokens")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({name: 0}, f"{name} must be 1 or more, got 0") for name in COUNTS),
        ({"store_bytes": -1}, "store_bytes must be 0 or more, got -1"),
        ({"pin_bytes": -1}, "pin_bytes must be 0 or more"),
        ({"drain_s": -1.0}, "drain_s must be 0 or more"),
        ({"drain_s": math.nan}, "drain_s must be 0 or more, got nan"),
        ({"timeout_s": 0.0}, "timeout_s must be a number of seconds above 0, got 0.0"),
        ({"timeout_s": math.inf}, "timeout_s must be a number of seconds above 0, got inf"),
        ({"body_s": -1.0}, "body_s must be a number of seconds above 0"),
        ({"headers_s": 0.0}, "headers_s must be a number of seconds above 0"),
        ({"headers_s": 0.0005}, "headers_s must be 0.001 or more, got 0.0005"),
        ({"tool_call_parser": "gpt"}, "no tool call parser 'gpt'; there are auto, hermes, llama3"),
        ({"active": 0}, "active must be 1 or more, got 0"),
        ({"waiting": 0}, "waiting must be 1 or more, got 0"),
    ],
)
def test_what_is_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ServeSettings(**given)
    ServeSettings(chunk_tokens=1, max_prompt_tokens=1, drain_s=0, store_bytes=0, active=1, waiting=1)


def test_a_hangup_has_the_keys_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend.serve.keys.LOOK_S", math.inf)  # nobody looks at the file
    file, before = tmp_path / "keys.json", signal.getsignal(signal.SIGHUP)
    add_key(file, "one")
    settings = ServeSettings(keys=KeyRing(read_keys(file), file))
    try:
        _reload_on_hangup(settings)
        add_key(file, "two")
        assert [key.name for key in settings.keys.keys] == ["one"]
        os.kill(os.getpid(), signal.SIGHUP)
        assert [key.name for key in settings.keys.keys] == ["one", "two"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_file_of_keys_keeps_its_permissions_and_every_key_that_was_told(tmp_path: Path) -> None:
    """A server that may read the file as a member of its group may go on, and no key is lost of two added at once."""
    file = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda number: add_key(file, str(number)), range(24)))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    remove_key(file, "3")
    assert file.stat().st_mode & 0o777 == 0o640
    assert {key.sha256 for key in read_keys(file)} == {
        hashlib.sha256(secret.encode()).hexdigest() for number, secret in enumerate(told) if number != 3
    }
    assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]


def test_a_link_to_a_file_of_keys_stays_one(tmp_path: Path) -> None:
    """A key removed through it is one that a server of the file itself does not take any more."""
    file, link = tmp_path / "keys.json", tmp_path / "link.json"
    link.symlink_to("keys.json")
    add_key(link, "one")
    add_key(link, "two")
    remove_key(link, "one")
    assert link.is_symlink() and [key.name for key in read_keys(file)] == ["two"]


NAMES = st.sets(st.binary(min_size=1, max_size=3), max_size=30).map(lambda names: [BlockName(n) for n in sorted(names)])


@given(NAMES, st.integers(1, 8), st.integers(1, 4))
def test_pages_have_every_entry_of_the_list_once(names: list[BlockName], limit: int, every: int) -> None:
    wanted, read, found, after = names[::every], list[BlockName](), list[str](), ""

    def entry(name: BlockName) -> BlockName | None:
        read.append(name)
        return name if name in wanted else None

    for _ in range(len(names) + 1):
        page = page_of([names], limit, after, entry, lambda page: [name.hex() for name in page])
        assert len(page["data"]) <= limit
        assert len(read) <= (limit + 1) * every  # up to the first entry of the next page
        read.clear()
        found += page["data"]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert found == [name.hex() for name in wanted]
    names = [BlockName(bytes([number])) for number in (1, 3, 5)]
    assert page_of([names], 2, "02", lambda name: name, list)["data"] == names[1:]  # a page's last entry may be gone


CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
PAGE = Path(__file__).parents[2] / "docs/serve.md"


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_silent(kind: str, record_property: Any) -> None:
    schema, body, _ = KINDS[kind]
    silent = []
    for name in openai_fields(kind) | VLLM:
        if name not in schema.refused and (name in schema.model_fields or name in ACCEPTED):
            continue
        try:
            schema.model_validate({**body, name: "something that no server does by itself"})
        except ApiError as error:
            assert error.status == 400 and error.param == name and name in error.message
        else:
            silent.append(name)
    record_property("silent_parameters", len(silent))
    assert not silent
    nulls = dict.fromkeys((openai_fields(kind) | VLLM) - set(body))  # null is not said
    assert schema.model_validate(body | nulls) == schema.model_validate(body)


@pytest.mark.parametrize("name", sorted(REFUSED_RESPONSES))
def test_values_that_ask_for_what_is_done_anyway_are_taken(name: str) -> None:
    for table in (REFUSED, REFUSED_RESPONSES):
        for value in (*table[name].neutral, None) if name in table else ():
            check_fields({name: value}, (), table)
    with pytest.raises(ApiError, match=f"{name} is not supported: .+"):
        check_fields({name: {"another": "value"}}, ("n", "max_tokens"), REFUSED_RESPONSES)


def test_unknown_fields_are_named_and_the_page_says_what_becomes_of_the_others() -> None:
    for options in ({"include_usag": True}, {"include_obfuscation": True}, {"include_usage": "odd"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ChatRequest.model_validate({**CHAT, "stream_options": options})
    StreamOptions.model_validate({"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False})
    check_fields({"best_of": 1, "echo": False, "priority": 0}, ())
    for name, value in (("best_of", True), ("echo", 0), ("priority", False)):
        with pytest.raises(ApiError, match=name):
            check_fields({name: value}, ())
    with pytest.raises(ApiError, match="no field 'temprature'; did you mean temperature"):
        ChatRequest.model_validate({**CHAT, "temprature": 0.5})
    with pytest.raises(ApiError, match="there is no field"):
        ChatRequest.model_validate({**CHAT, "x" * 100_000: 1})
    with pytest.raises(ApiError) as error:
        ChatRequest.model_validate({**CHAT, "\ud800": 1})
    assert error.value.response().status_code == 400
    for where in ("cacheblend", "response_format", "stream_options"):  # of many the first is named
        with pytest.raises(ValidationError, match="there is no field 'k0'") as told:
            ChatRequest.model_validate({**CHAT, where: {f"k{number}": 0 for number in range(1000)}})
        assert told.value.error_count() == 1
    with pytest.raises(ValidationError, match="at most 1024") as told:
        ChatRequest.model_validate({**CHAT, "logit_bias": {f"k{number}": "x" for number in range(1025)}})
    assert told.value.error_count() == 1
    spec = importlib.util.spec_from_file_location("_fields", PAGE.parent / "_fields.py")  # the page
    assert spec is not None and spec.loader is not None
    fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    page = PAGE.read_text(encoding="utf-8")
    assert page == fields.written(page), "run python docs/_fields.py"
    for name in {*REFUSED_RESPONSES, *ACCEPTED, *(field for kind in KINDS.values() for field in kind[0].model_fields)}:
        assert f"| `{name}` |" in page, name


def test_the_heap_is_trimmed_and_an_administrators_bounds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = memory.heap_trimmer()
    assert trim is None or trim() in (0, 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.heap_trimmer() is None
    asyncio.run(asyncio.wait_for(memory.trim_heap_periodically(), 30))
    trims: list[int] = []  # until the server stops
    monkeypatch.setattr(memory, "heap_trimmer", lambda: lambda: trims.append(1))

    async def serve() -> None:
        task = asyncio.create_task(memory.trim_heap_periodically(every_s=0.01))
        while len(trims) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(serve(), 30))
    for name in CACHES:  # an administrator's own bounds
        monkeypatch.setenv(name, "7")
    memory.bound_caches()
    assert [os.environ[name] for name in CACHES] == ["7", "7"]
    monkeypatch.delenv(CACHES[1])
    memory.bound_caches()
    assert [os.environ[name] for name in CACHES] == ["7", str(memory.KERNELS)]


SHAPES = """
import sys
from cacheblend.serve.memory import heap_trimmer, bound_caches
trim = heap_trimmer() or (lambda: None)
if sys.argv[1] == "few":
    bound_caches()
import torch
torch.set_num_threads(1)
held = lambda: int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) / 1024
weight = torch.randn(384, 128).bfloat16()
trim()
before = held()
for rows in range(1, 1200):
    torch.nn.functional.linear(torch.randn(rows, 128).bfloat16(), weight)
trim()  # as the server does: what is measured is what the kernels hold, not the holes of the heap
print(held() - before)
"""


ARENAS = """
import ctypes, sys, threading
from cacheblend.serve.memory import HEAPS, bound_caches
if sys.argv[1] == "few":
    bound_caches()
libc, ready = ctypes.CDLL(None), threading.Barrier(12)
def allocate():
    libc.free(ctypes.c_void_p(libc.malloc(1000)))
    ready.wait()
libc.malloc.restype = ctypes.c_void_p
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
print(open(sys.argv[2]).read().count("<heap nr="), HEAPS)
"""


@pytest.mark.skipif(memory.heap_trimmer() is None, reason="needs glibc")
def test_a_server_has_few_heaps_unless_its_administrator_says_otherwise(tmp_path: Path) -> None:
    def heaps(how: str, **environment: str) -> tuple[int, int]:
        command = [sys.executable, "-c", ARENAS, how, str(tmp_path / "heaps")]
        own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC")}
        done = subprocess.run(command, env=own | environment, capture_output=True, text=True, timeout=60, check=True)
        found, bound = map(int, done.stdout.split())
        return found, bound

    found, bound = heaps("few")
    assert found <= bound < heaps("many")[0]
    for name, value in (("MALLOC_ARENA_MAX", bound + 2), ("GLIBC_TUNABLES", f"glibc.malloc.arena_max={bound + 2}")):
        assert heaps("few", **{name: str(value)})[0] > bound


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_products_of_many_shapes_leave_little_memory_in_use() -> None:
    """Only where there are such caches: a processor without bf16 products keeps little more than its heap's holes."""
    grown = {}
    unbound = {name: value for name, value in os.environ.items() if name not in CACHES}  # by a test before
    for how in ("few", "many"):
        done = subprocess.run(
            [sys.executable, "-c", SHAPES, how], env=unbound, capture_output=True, text=True, timeout=120
        )
        grown[how] = float(done.stdout)
    if grown["many"] < 100:
        pytest.skip(f"nothing is kept here: {grown['many']:.0f} MiB")
    assert grown["few"] < 0.6 * grown["many"]


def test_the_collector_leaves_out_what_there_was_when_the_server_began() -> None:
    """In a process of its own, since what is left out stays so."""
    program = """
import gc
from cacheblend.serve.memory import collect_no_libraries
collect_no_libraries()
assert gc.get_freeze_count() > 1000 and gc.isenabled()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
