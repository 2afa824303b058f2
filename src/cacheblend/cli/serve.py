"""`cacheblend serve`: parses options, binds the address, opens the engine; what answers is in `cacheblend.serve`."""

import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cacheblend.cli import options
from cacheblend.cli.keys import check_file
from cacheblend.cli.models import open_engine
from cacheblend.cli.option_groups import option
from cacheblend.cli.output import console
from cacheblend.core.errors import InvalidInputError
from cacheblend.serve.keys import KeyRing, read_keys
from cacheblend.serve.settings import BOUNDS, SERVER, ServeSettings

if TYPE_CHECKING:
    from cacheblend.engines.hf import BlendEngine

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AccessOptions:
    """Where the server listens, who may use it, and how much each of them."""

    panel: ClassVar = SERVER
    host: str = option("127.0.0.1", "Address to listen at.")
    port: int = option(8000, "0: a free one.", least=0, most=65535)
    keys: Path | None = option(None, "File of API keys (`keys add`); without it no key is needed.")
    allowed_host: list[str] | None = option(
        None, "A name that clients may call this server by, without --keys; several times. *: any."
    )
    metrics_keys: Path | None = option(None, "File of keys that may read /metrics alone.")
    store_quota: str | None = option(None, "Bytes that each key may store: 20GiB.", panel=BOUNDS)
    pin_quota: str | None = option(None, "Bytes that each key may pin.", panel=BOUNDS)

    def of(self, settings: ServeSettings) -> ServeSettings:
        """The settings with these, the files of keys read."""
        from cacheblend.store import parse_bytes

        rings = []
        for file in (self.keys, self.metrics_keys):
            if file is not None:
                check_file(file)
            if not (known := read_keys(file) if file else ()) and file is not None:
                raise InvalidInputError(
                    f"{file} has no key in it; add one with `cacheblend keys add NAME --file {file}`"
                )
            rings.append(KeyRing(known, file))
        store, pin = (None if quota is None else parse_bytes(quota) for quota in (self.store_quota, self.pin_quota))
        hosts = (self.host, *(self.allowed_host or ()))
        return replace(settings, keys=rings[0], metrics_keys=rings[1], hosts=hosts, store_bytes=store, pin_bytes=pin)


def serve(
    model: options.ModelOptions,
    blend: options.BlendOptions,
    device: options.DeviceOptions,
    access: AccessOptions,
    settings: ServeSettings,
    store: options.StoreOptions = options.IN_MEMORY,
) -> None:
    """Serve a model through OpenAI's API, passages reused at any position; a page to try it on is at /."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InvalidInputError(f"serve needs {', '.join(missing)}: pip install 'cacheblend[serve]'")
    if blend.anchor == "system":
        raise InvalidInputError(
            "--anchor system: serve computes chunks before it knows their prompts; use auto, text, bos or none"
        )
    settings, config = access.of(settings), blend.settings()

    from cacheblend.core.config import BlendConfig
    from cacheblend.serve import memory
    from cacheblend.serve.log_lines import log_json
    from cacheblend.store.open import check_store_url

    BlendConfig(**config)
    check_store_url(store.store)  # as the settings: what is wrong is said alone, before the model is opened
    memory.bound_caches()
    with bind(access.host, access.port) as sockets:
        log_json()
        logging.getLogger("httpx").setLevel(logging.WARNING)
        console(stderr=True).print(f"opening {model.model} ...", soft_wrap=True)
        with open_engine(model.model, store.store, config, device, profile=blend.profile) as engine:
            memory.collect_no_libraries()
            _run(engine, settings, access.host, sockets)
            engine.close(wait=False)  # the server has waited for missed chunks as long as --drain allows


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to every address of the host, closed in the end; they listen once the server can answer. A name may
    have several: ``localhost`` often is 127.0.0.1 and ::1. Port 0 takes a free one, if possible the same for all."""
    with contextlib.ExitStack() as closing:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            sockets: list[socket.socket] = []
            for family, kind, _, _, address in dict.fromkeys(found):
                bound = closing.enter_context(socket.socket(family, kind))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                taken = sockets[0].getsockname()[1] if sockets else port
                bound.bind((address[0], taken, *address[2:]))
                sockets.append(bound)
        except (OSError, UnicodeError, ValueError) as error:
            raise _cannot_listen(host, port, error) from error
        yield sockets


def _cannot_listen(host: str, port: int, error: Exception) -> InvalidInputError:
    reason = getattr(error, "strerror", None) or "not the name of a host"
    return InvalidInputError(
        f"--host {host} --port {port}: the server cannot listen there ({reason}); name an address of this machine "
        "and a free port (--port 0 takes one)"
    )


def _reload_on_hangup(settings: ServeSettings) -> None:
    """SIGHUP has the files of keys read again at once."""

    def reload(*_: object) -> None:
        settings.keys.reload()
        settings.metrics_keys.reload()

    signal.signal(signal.SIGHUP, reload)


def _run(engine: "BlendEngine", settings: ServeSettings, host: str, sockets: list[socket.socket]) -> None:
    """Says where the server is, and serves until it is stopped."""
    import uvicorn

    from cacheblend.serve.app import create_app
    from cacheblend.serve.connections import DrainingServer

    _reload_on_hangup(settings)
    application: Any = create_app(engine, settings)
    port = sockets[0].getsockname()[1]
    try:
        for bound in sockets:
            bound.listen()  # another server may have bound the port, too, while this one read weights
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    say, page = console(stderr=True), ", the page at /" if settings.playground else ""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    say.print(f"{engine.name} at {address}{page}", soft_wrap=True)
    if not settings.keys.keys and host not in LOCAL:
        say.print("anyone who reaches this address may use it: give --keys", style="yellow", soft_wrap=True)
    # Its log lines go where the others do. There are no websockets, which would pass by what guards the routes.
    options: Any = {"log_level": "warning", "log_config": None, "server_header": False, "ws": "none"}
    running = DrainingServer(uvicorn.Config(application, **options), application.state.server)
    with contextlib.suppress(KeyboardInterrupt):  # before it served
        running.run(sockets=sockets)
    if not running.started:
        raise InvalidInputError("the server did not start; see the log")
