"""`cacheblend serve`: parses options, binds the address, opens the engine; what answers is in `cacheblend.serve`."""

import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend.cli.options import (
    IN_MEMORY,
    MOST_TOKENS,
    BlendOptions,
    DeviceOptions,
    ModelOptions,
    Shadow,
    StoreOptions,
    ToolCallParser,
)
from cacheblend.cli.output import console
from cacheblend.cli.selection_options import BLENDING

if TYPE_CHECKING:
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.engines.hf import BlendEngine
    from cacheblend.serve.keys import KeyRing
    from cacheblend.serve.settings import ServeSettings

SERVER, BOUNDS = "Server", "Bounds"
LOCAL = ("127.0.0.1", "localhost", "::1")
LONGEST_S = 1e6
"""Upper bound of options that are seconds: eleven days."""


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, and who may use it."""

    host: Annotated[str, typer.Option("--host", help="Address to listen at.", rich_help_panel=SERVER)] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.", rich_help_panel=SERVER)] = 8000
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys", help="File of API keys (`keys add`); without it no key is needed.", rich_help_panel=SERVER
        ),
    ] = None
    playground: Annotated[
        bool, typer.Option("--playground/--no-playground", help="Serve the page at /.", rich_help_panel=SERVER)
    ] = True
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="A name that clients may call this server by, without --keys; several times. *: any.",
            rich_help_panel=SERVER,
            show_default=False,
        ),
    ] = None
    metrics_keys: Annotated[
        Path | None,
        typer.Option("--metrics-keys", help="File of keys that may read /metrics alone.", rich_help_panel=SERVER),
    ] = None
    ready_needs_store: Annotated[
        bool,
        typer.Option(
            "--ready-needs-store/--ready-without-store",
            help="/ready is 503 while a tier of the store does not answer.",
            rich_help_panel=SERVER,
        ),
    ] = False
    chunk_tokens: Annotated[
        int,
        typer.Option(
            "--chunk-tokens",
            min=1,
            max=MOST_TOKENS,
            help="Least tokens of a text that is a chunk of its own.",
            rich_help_panel=BLENDING,
        ),
    ] = 64
    tool_call_parser: ToolCallParser = "auto"
    shadow: Shadow = 0.0
    shadow_floor: Annotated[
        float | None,
        typer.Option(
            "--shadow-floor",
            min=0,
            max=1,
            help="Least agreement of checked answers; below it the recompute ratio is raised. Needs --shadow.",
            rich_help_panel=SERVER,
        ),
    ] = None


@dataclass(frozen=True)
class BoundOptions:
    """Bounds of the server's work."""

    active: Annotated[
        int, typer.Option("--active", min=1, max=10_000, help="Requests served at once.", rich_help_panel=BOUNDS)
    ] = 8
    waiting: Annotated[
        int,
        typer.Option(
            "--waiting", min=0, max=1_000_000, help="Requests in the queue; more get 429.", rich_help_panel=BOUNDS
        ),
    ] = 64
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.001, max=LONGEST_S, help="Seconds of a request at most.", rich_help_panel=BOUNDS
        ),
    ] = 600.0
    connections: Annotated[
        int, typer.Option("--connections", min=1, max=1_000_000, help="Open at once at most.", rich_help_panel=BOUNDS)
    ] = 1000
    header_timeout: Annotated[
        float,
        typer.Option(
            "--header-timeout",
            min=0.001,
            max=LONGEST_S,
            help="Seconds that a connection may be open without a request.",
            rich_help_panel=BOUNDS,
        ),
    ] = 30.0
    body_timeout: Annotated[
        float,
        typer.Option(
            "--body-timeout",
            min=0.001,
            max=LONGEST_S,
            help="Seconds of a client to send a body, or to go on reading.",
            rich_help_panel=BOUNDS,
        ),
    ] = 60.0
    drain: Annotated[
        float,
        typer.Option(
            "--drain", min=0, max=LONGEST_S, help="Seconds to finish requests in at shutdown.", rich_help_panel=BOUNDS
        ),
    ] = 30.0
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens",
            min=1,
            max=MOST_TOKENS,
            help="Longest prompt. Default: the model's context.",
            rich_help_panel=BOUNDS,
        ),
    ] = None
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            max=MOST_TOKENS,
            help="Tokens of an answer, where a client does not say.",
            rich_help_panel=BOUNDS,
        ),
    ] = 512
    store_quota: Annotated[
        str | None,
        typer.Option("--store-quota", help="Bytes that each key may store: 20GiB.", rich_help_panel=BOUNDS),
    ] = None
    pin_quota: Annotated[
        str | None, typer.Option("--pin-quota", help="Bytes that each key may pin.", rich_help_panel=BOUNDS)
    ] = None


def serve(
    model: ModelOptions,
    blend: BlendOptions,
    device: DeviceOptions,
    server: ServerOptions,
    bounds: BoundOptions,
    store: StoreOptions = IN_MEMORY,
) -> None:
    """Serve a model through OpenAI's API, passages reused at any position; a page to try it on is at /."""
    _check_installed()
    from cacheblend.core.errors import InvalidInputError

    if blend.anchor == "system":
        raise InvalidInputError(
            "--anchor system: serve computes chunks before it knows their prompts; use auto, bos or none"
        )
    settings, config = _settings(server, bounds), blend.settings()

    from cacheblend.cli.models import open_engine
    from cacheblend.engines.hf.background import run_apart
    from cacheblend.serve import memory
    from cacheblend.serve.log_lines import log_json

    with bind(server.host, server.port) as sockets:
        memory.keep_few_kernels()
        log_json()
        logging.getLogger("httpx").setLevel(logging.WARNING)
        # The scheduler's thread alone keeps an OpenMP team: this one serves HTTP for as long as the server runs.
        opened = run_apart(
            lambda: open_engine(
                model.model, store.store, config, profile=blend.profile, dtype=device.dtype, device=device.device
            )
        )
        with opened as engine:
            memory.collect_no_libraries()
            _run(engine, settings, server.host, sockets)
            engine.close(wait=False)  # the server has waited for missed chunks as long as --drain allows


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to every address of the host, closed in the end; they listen when the server is ready to answer.

    Args:
        host: a name may have several addresses: ``localhost`` often is 127.0.0.1 and ::1.
        port: 0 takes a free one, the same for all addresses where that is possible.

    Raises:
        InvalidInputError: the host is not known or not of this machine, or the port is taken.
    """
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


def _cannot_listen(host: str, port: int, error: Exception) -> "InvalidInputError":
    from cacheblend.core.errors import InvalidInputError

    reason = getattr(error, "strerror", None) or "not the name of a host"
    return InvalidInputError(
        f"--host {host} --port {port}: the server cannot listen there ({reason}); name an address of this machine "
        "and a free port (--port 0 takes one)"
    )


def _check_installed() -> None:
    from importlib.util import find_spec

    from cacheblend.core.errors import InvalidInputError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InvalidInputError(f"serve needs {', '.join(missing)}: pip install 'cacheblend[serve]'")


def _settings(server: ServerOptions, bounds: BoundOptions) -> "ServeSettings":
    from cacheblend.engines.hf.tickets import Limits
    from cacheblend.serve.settings import ServeSettings
    from cacheblend.store import parse_bytes

    return ServeSettings(
        keys=_key_ring(server.keys),
        metrics_keys=_key_ring(server.metrics_keys),
        hosts=(server.host, *(server.allowed_host or ())),
        ready_needs_store=server.ready_needs_store,
        chunk_tokens=server.chunk_tokens,
        limits=Limits(active=bounds.active, waiting=bounds.waiting),
        max_prompt_tokens=bounds.max_prompt_tokens,
        max_tokens=bounds.max_tokens,
        timeout_s=bounds.timeout,
        connections=bounds.connections,
        headers_s=bounds.header_timeout,
        body_s=bounds.body_timeout,
        drain_s=bounds.drain,
        store_bytes=None if bounds.store_quota is None else parse_bytes(bounds.store_quota),
        pin_bytes=None if bounds.pin_quota is None else parse_bytes(bounds.pin_quota),
        playground=server.playground,
        shadow=server.shadow,
        shadow_floor=server.shadow_floor,
        tool_call_parser=server.tool_call_parser,
    )


def _key_ring(file: Path | None) -> "KeyRing":
    from cacheblend.cli.keys import check_file
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.serve.keys import KeyRing, read_keys

    if file is None:
        return KeyRing()
    check_file(file)
    known = read_keys(file)
    if not known:
        raise InvalidInputError(f"{file} has no key in it; add one with `cacheblend keys add NAME --file {file}`")
    return KeyRing(known, file)


def _reload_on_hangup(settings: "ServeSettings") -> None:
    """SIGHUP has the files of keys read again at once, where there is such a signal."""
    if hasattr(signal, "SIGHUP"):
        rings = (settings.keys, settings.metrics_keys)

        def reload(*_: object) -> None:
            for ring in rings:
                ring.reload()

        signal.signal(signal.SIGHUP, reload)


def _run(engine: "BlendEngine", settings: "ServeSettings", host: str, sockets: list[socket.socket]) -> None:
    """Says where the server is, and serves until it is stopped."""
    import uvicorn

    from cacheblend.core.errors import InvalidInputError
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
    page = ", the page at /" if settings.playground else ""
    say = console(stderr=True)
    say.print(f"{engine.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1{page}", soft_wrap=True)
    if not settings.keys.keys and host not in LOCAL:
        say.print("anyone who reaches this address may use it: give --keys", style="yellow", soft_wrap=True)
    config = uvicorn.Config(
        application,
        log_level="warning",
        log_config=None,  # its lines go where the others do
        server_header=False,
        ws="none",  # there is none here, and one would pass by what is in front of the routes
    )
    server = DrainingServer(config, application.state.server)
    with contextlib.suppress(KeyboardInterrupt):  # raised again after a clean stop
        server.run(sockets=sockets)
    if not server.started:
        raise InvalidInputError("the server did not start; see the log")
