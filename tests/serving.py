"""A server on the model that ships, in a thread of the test's own process."""

import atexit
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend.engines.hf import BlendEngine
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.connections import DrainingServer
from cacheblend.serve.keys import KeyRing, add_key, read_keys
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import KVStore
from lab.servers.processes import free_port


def connected(url: str, timeout: float = 60) -> socket.socket:
    """A connection to a server; closed by ``with``."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def keys_of(folder: Path, *names: str) -> tuple[KeyRing, dict[str, dict[str, str]]]:
    """New keys in a folder's ``keys.json``, and by name the headers of a request with each."""
    file = folder / "keys.json"
    headers = {name: {"Authorization": f"Bearer {add_key(file, name)}"} for name in names}
    return KeyRing(read_keys(file), file), headers


@cache
def shallow() -> Path:
    """Two layers of the model that ships, with its tokenizer, for tests that do not ask what it answers: a folder."""
    folder = Path(tempfile.mkdtemp(prefix="shallow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(model_path(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*profile*", "*tensors"))
    config = AutoConfig.from_pretrained(model_path(), num_hidden_layers=2, layer_types=["full_attention"] * 2)
    AutoModelForCausalLM.from_pretrained(model_path(), config=config, dtype=torch.float32).save_pretrained(folder)
    return folder


@contextmanager
def running(settings: ServeSettings, store: KVStore | str = "memory", model: Path | None = None) -> Iterator[str]:
    """The address of a running server, which is stopped afterwards; its model is by default the one that ships."""
    with BlendEngine.from_pretrained(model or model_path(), store=store) as engine:
        engine.name = "nano"
        port = free_port()
        app = create_app(engine, settings)
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error")
        server = DrainingServer(config, app.state.server)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(60)
