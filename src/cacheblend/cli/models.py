"""Opens a model folder for a command: quietly, and with one line for what a user can put right."""

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
    """The engine on a model folder and a store. Settings that `config` leaves open are the model's profile's.

    ``nano`` means the model that ships, unless a folder is called so.

    Raises:
        InvalidInputError: not a model folder, or it cannot be loaded.
        CacheBlendError: as `BlendEngine.from_pretrained`.
    """
    if str(folder) == SHIPPED and not folder.is_dir():
        folder = model_path()
    if not folder.is_dir():
        raise InvalidInputError(
            f"{folder} is no folder; --model takes a folder with config.json and weights, or {SHIPPED}"
        )
    with status(f"opening {folder.name or folder} ...", quiet=quiet):
        quiet_transformers()
        from cacheblend.engines.hf import BlendEngine

        try:
            return BlendEngine.from_pretrained(
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


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers: stdout and stderr are the command's."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def checked_dtype(name: str) -> Any:
    """The torch dtype of that name, or ``"auto"``.

    Raises:
        InvalidInputError: none.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in known:
        raise InvalidInputError(f"no dtype is called {name!r}; there are auto, {', '.join(known)}")
    return known.get(name, "auto")


def checked_device(name: str | None) -> Any:
    """The torch device of that name; None where none is named.

    Raises:
        InvalidInputError: there is none.
    """
    import torch

    if name is None:
        return None
    try:
        torch.empty(1, device=name)
    except Exception as error:
        raise InvalidInputError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return torch.device(name)
