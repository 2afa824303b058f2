"""Opens a model folder for a command: without a library's output, errors as one line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.cli.output import status
from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.nano import model_path

if TYPE_CHECKING:
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.hf import BlendEngine


SHIPPED = "nano"


def open_engine(
    folder: Path,
    store: str,
    config: "BlendConfig | Mapping[str, Any]",
    *,
    profile: Path | None = None,
    dtype: str = "auto",
    device: str | None = None,
    quiet: bool = False,
) -> "BlendEngine":
    """The engine on a model folder and a store. Settings that `config` leaves open come from the model's profile.

    Raises:
        InvalidInputError: not a model folder (see `model_folder`), it cannot be loaded, or a setting is wrong; settings
            are checked before the weights are read.
        CacheBlendError: as `BlendEngine.from_pretrained`.
    """
    folder, name = model_folder(folder), model_name(folder)
    _check_early(folder, config, profile)
    check_store(store)
    with status(f"opening {name} ...", quiet=quiet):
        quiet_transformers()
        from cacheblend.engines.hf import BlendEngine

        try:
            engine = BlendEngine.from_pretrained(
                folder,
                store=store,
                config=config,
                profile=profile,
                dtype=checked_dtype(dtype),
                device=checked_device(device),
            )
        except CacheBlendError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidInputError(f"{folder} cannot be loaded: {reason[0]}") from error
    engine.name = name
    return engine


def check_store(url: str) -> None:
    """Refuses a URL whose port is none; the rest is checked when the store is opened.

    Raises:
        InvalidInputError: the port is no number, or out of range.
    """
    from urllib.parse import urlsplit

    try:
        for each in url.split(","):
            _ = urlsplit(each.strip()).port
    except ValueError as error:
        raise InvalidInputError(f"store {url!r} is not a URL: {error}") from error


def _check_early(folder: Path, config: "BlendConfig | Mapping[str, Any]", profile: Path | None) -> None:
    """Refuses wrong settings before weights are read.

    Raises:
        InvalidInputError: a setting is out of range, or a file of settings cannot be read.
    """
    from cacheblend.core.config import BlendConfig
    from cacheblend.core.fuse.prefill import check_selector
    from cacheblend.core.select.selection import selection_fields
    from cacheblend.engines.cost_model import load_cost_model
    from cacheblend.engines.settings import read_profile

    if profile is not None:
        read_profile(profile)
    if isinstance(config, BlendConfig):
        return
    chosen = BlendConfig(**config)
    layers = layers_of(folder)
    if layers is not None and selection_fields(config):
        check_selector(chosen.make_selector(), layers)
    if chosen.cost_model is not None:
        load_cost_model(Path(chosen.cost_model))


def model_folder(model: Path) -> Path:
    """The folder that ``--model`` names: ``nano`` is the model that ships, unless a folder has that name.

    Raises:
        InvalidInputError: there is no such folder.
    """
    if _ships(model):
        return model_path()
    if not model.is_dir():
        raise InvalidInputError(
            f"{model} is no folder; --model takes a folder with config.json and weights, or {SHIPPED}"
        )
    return model


def model_name(model: Path) -> str:
    """A model's name in titles and file names: its folder's name, or ``nano`` for the one that ships."""
    shipped = _ships(model) or model.resolve() == model_path().resolve()
    return SHIPPED if shipped else model.resolve().name


def layers_of(model: Path) -> int | None:
    """Decoder layers by the folder's config.json alone, so that wrong options are reported before weights are read.

    None: the file does not say.
    """
    try:
        config = json.loads((model_folder(model) / "config.json").read_text(encoding="utf-8"))
        count = config.get("num_hidden_layers", config.get("text_config", {}).get("num_hidden_layers"))
    except (OSError, ValueError, AttributeError):
        return None  # opening the model reports what is wrong
    return count if isinstance(count, int) else None


def _ships(model: Path) -> bool:
    return str(model) == SHIPPED and not model.is_dir()


def quiet_transformers() -> None:
    """Turns off transformers' progress bars and advice: stdout and stderr belong to the command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def checked_dtype(name: str) -> Any:
    """The torch dtype of that name, or ``"auto"``.

    Raises:
        InvalidInputError: there is no such dtype.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in known:
        raise InvalidInputError(f"no dtype is called {name!r}; there are auto, {', '.join(known)}")
    return known.get(name, "auto")


def checked_device(name: str | None) -> Any:
    """The torch device of that name; None for None.

    Raises:
        InvalidInputError: it cannot be used here.
    """
    import torch

    if name is None:
        return None
    try:
        if torch.empty(1, device=name).is_meta:
            raise ValueError("it holds no data")
    except Exception as error:
        raise InvalidInputError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return torch.device(name)
