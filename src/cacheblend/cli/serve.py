"""`cacheblend serve` and `cacheblend keys`: the server, and who may ask it."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.cli.blending import (
    CheckLayers,
    Measure,
    ProfileFile,
    Ratios,
    SelectorName,
    Threshold,
    blending_settings,
)
from cacheblend.cli.options import (
    BLENDING,
    AnchorRule,
    BlockSize,
    Capture,
    Codec,
    CostModelFile,
    Device,
    Dtype,
    ModelFolder,
    Salt,
    StoreUrl,
)
from cacheblend.cli.output import console

SERVER, BOUNDS = "Server", "Bounds"

Host = Annotated[str, typer.Option("--host", help="Address to listen at.", rich_help_panel=SERVER)]
Port = Annotated[int, typer.Option("--port", help="0: a free one.", rich_help_panel=SERVER)]
KeyFile = Annotated[
    Path | None,
    typer.Option("--keys", help="File of API keys (`keys add`); without it anyone may ask.", rich_help_panel=SERVER),
]
Playground = Annotated[
    bool, typer.Option("--playground/--no-playground", help="The page at /.", rich_help_panel=SERVER)
]
ChunkTokens = Annotated[
    int,
    typer.Option("--chunk-tokens", help="Least tokens of a text that is a chunk of its own.", rich_help_panel=BLENDING),
]
Active = Annotated[int, typer.Option("--active", help="Requests under way at once.", rich_help_panel=BOUNDS)]
Waiting = Annotated[int, typer.Option("--waiting", help="Requests in the queue; then 429.", rich_help_panel=BOUNDS)]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds of a request.", rich_help_panel=BOUNDS)]
Drain = Annotated[float, typer.Option("--drain", help="Seconds to finish in at the end.", rich_help_panel=BOUNDS)]
MaxPrompt = Annotated[
    int | None,
    typer.Option("--max-prompt-tokens", help="Default: the model's context.", rich_help_panel=BOUNDS),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", help="Of an answer, where a client does not say.", rich_help_panel=BOUNDS)
]
StoreQuota = Annotated[
    str | None, typer.Option("--store-quota", help="Bytes that each key may store: 20GiB.", rich_help_panel=BOUNDS)
]
PinQuota = Annotated[
    str | None, typer.Option("--pin-quota", help="Bytes that each key may pin.", rich_help_panel=BOUNDS)
]

keys_app = typer.Typer(help="API keys of a server, hashed in a file.", no_args_is_help=True)
File = Annotated[Path, typer.Option("--file", "-f", help="The file.")]


def serve(
    model: ModelFolder,
    store: StoreUrl = "memory",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    keys: KeyFile = None,
    playground: Playground = True,
    ratio: Ratios = None,
    selector: SelectorName = None,
    check_layer: CheckLayers = None,
    measure: Measure = None,
    threshold: Threshold = None,
    profile: ProfileFile = None,
    anchor: AnchorRule = "auto",
    block_size: BlockSize = 256,
    codec: Codec = "raw",
    salt: Salt = "",
    cost_model: CostModelFile = None,
    chunk_tokens: ChunkTokens = 64,
    capture: Capture = True,
    active: Active = 8,
    waiting: Waiting = 64,
    timeout: Timeout = 600.0,
    drain: Drain = 30.0,
    max_prompt_tokens: MaxPrompt = None,
    max_tokens: MaxTokens = 512,
    store_quota: StoreQuota = None,
    pin_quota: PinQuota = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Serve a model through OpenAI's API, passages reused at any position; a page to try it on is at /."""
    from importlib.util import find_spec

    from cacheblend.core.errors import InvalidInputError

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise InvalidInputError(f"serve needs {', '.join(missing)}: pip install 'cacheblend[serve]'")
    if anchor == "system":
        raise InvalidInputError("serve computes chunks ahead of their prompts: the anchor 'system' cannot be used")
    import uvicorn

    from cacheblend.cli.models import open_engine
    from cacheblend.engines.hf.background import run_apart
    from cacheblend.engines.hf.tickets import Limits
    from cacheblend.serve.app import create_app
    from cacheblend.serve.keys import KeyRing, read_keys
    from cacheblend.serve.memory import keep_few_kernels
    from cacheblend.serve.settings import ServeSettings
    from cacheblend.store import parse_bytes

    if keys is not None and not keys.exists():
        raise InvalidInputError(f"there is no file {keys}; make one with `cacheblend keys add NAME --file {keys}`")
    settings = ServeSettings(
        keys=KeyRing(() if keys is None else read_keys(keys)),
        chunk_tokens=chunk_tokens,
        limits=Limits(active=active, waiting=waiting),
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        timeout_s=timeout,
        drain_s=drain,
        store_bytes=None if store_quota is None else parse_bytes(store_quota),
        pin_bytes=None if pin_quota is None else parse_bytes(pin_quota),
        playground=playground,
    )
    if keys is not None and not settings.keys.keys:
        raise InvalidInputError(f"{keys} has no key in it; add one with `cacheblend keys add NAME --file {keys}`")
    config = blending_settings(ratio, selector, check_layer, measure, threshold) | {
        "anchor": anchor,
        "block_size": block_size,
        "codec": codec,
        "capture": capture,
        "salt": salt,
        "cost_model": None if cost_model is None else str(cost_model),
    }
    keep_few_kernels()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # The scheduler's thread alone keeps an OpenMP team: this one serves HTTP for as long as the server runs.
    opened = run_apart(lambda: open_engine(model, store, config, profile=profile, dtype=dtype, device=device))
    with opened as engine:
        say = console(stderr=True)
        say.print(
            f"{engine.name} at http://{host}:{port}/v1" + (", the page at /" if playground else ""), soft_wrap=True
        )
        if not settings.keys.keys and host not in ("127.0.0.1", "localhost", "::1"):
            say.print("anyone who reaches this address may ask: give --keys", style="yellow", soft_wrap=True)
        uvicorn.run(
            create_app(engine, settings),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=max(1, round(drain)),
            server_header=False,
        )


@keys_app.command("add")
def add(name: Annotated[str, typer.Argument(help="For logs.")], file: File = Path("keys.json")) -> None:
    """Make a key and print it, this once. A running server knows it behind its next start."""
    from cacheblend.serve.keys import add_key

    typer.echo(add_key(file, name))


@keys_app.command("rm")
def remove(name: Annotated[str, typer.Argument(help="Of the key.")], file: File = Path("keys.json")) -> None:
    """Take a key back."""
    from cacheblend.serve.keys import remove_key

    remove_key(file, name)


@keys_app.command("ls")
def listed(file: File = Path("keys.json")) -> None:
    """Names of the keys."""
    from cacheblend.serve.keys import read_keys

    for key in read_keys(file):
        typer.echo(key.name)
