"""Opens a model folder for a command: without a library's output, errors as one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.cli.options import DeviceOptions
from cacheblend.cli.output import status
from cacheblend.core.errors import CacheBlendError, InvalidInputError
from cacheblend.engines.folders import model_folder, name_of

if TYPE_CHECKING:
    from cacheblend.core.config import BlendConfig
    from cacheblend.engines.hf import BlendEngine


PATIENT_S = 86400.0
"""`load_timeout_s` of commands that compare what is loaded with what is computed, whatever the store takes."""


def open_engine(
    folder: Path,
    store: str,
    config: "BlendConfig | Mapping[str, Any]",
    device: DeviceOptions | None = None,
    *,
    profile: Path | None = None,
    quiet: bool = False,
) -> "BlendEngine":
    """The engine on a model folder and a store. Settings that `config` leaves open come from the model's profile."""
    folder, device = model_folder(folder), device or DeviceOptions()
    name = name_of(folder)
    with status(f"opening {name} ...", quiet=quiet):
        quiet_transformers()
        from cacheblend.engines.hf import BlendEngine
        from cacheblend.engines.hf.thread_count import fit_threads

        fit_threads()
        try:
            engine = BlendEngine.from_pretrained(
                folder,
                store=store,
                config=config,
                profile=profile,
                dtype=device.dtype,
                device=device.device,
            )
        except CacheBlendError:
            raise
        except Exception as error:
            from cacheblend.engines.hf.model_loader import loading_reason

            raise InvalidInputError(f"{folder} cannot be loaded: {loading_reason(error)}") from error
    engine.name = name
    return engine


def needed_model(model: Path | None) -> Path:
    """The folder that ``--model`` names, of commands that also say what the model is asked."""
    if model is None:
        raise InvalidInputError("--data needs a model: give --model FOLDER, or --model nano for the one that ships")
    return model_folder(model)


def quiet_transformers() -> None:
    """Turns off transformers' progress bars and advice: stdout and stderr belong to the command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def checked(device: DeviceOptions) -> tuple[Any, Any]:
    """The options' dtype, or ``"auto"``, and device, for what does not open a folder with them at once."""
    from cacheblend.engines.hf.model_loader import checked_device, checked_dtype

    return checked_dtype(device.dtype), checked_device(device.device)
