"""A server on the model that ships, in a thread of the test's own process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from cacheblend.engines.hf import BlendEngine
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.connections import DrainingServer
from cacheblend.serve.settings import ServeSettings
from cacheblend.store import KVStore


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(settings: ServeSettings, store: KVStore | str = "memory") -> Iterator[str]:
    """The address of a running server, which is stopped afterwards."""
    with BlendEngine.from_pretrained(model_path(), store=store) as engine:
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
