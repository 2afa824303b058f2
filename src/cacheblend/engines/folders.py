"""Where a model's files are: a folder, the model that ships, or a snapshot in the hub's cache on this machine. Looks at
this machine only; nothing is downloaded."""

import re
from pathlib import Path

from cacheblend.core.errors import InvalidInputError

SHIPPED = "nano"  # name of the model that ships, unless a folder has that name
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")


def model_folder(model: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The folder that a model's name stands for: a folder, ``nano``, or a name on the hub, ``org/name``, of which this
    machine has a snapshot. Raises `InvalidInputError`: there is none; the message says how to get it."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if str(model) == SHIPPED:
        return shipped_folder()
    return cached_snapshot(str(model), revision, cache_dir)


def cached_snapshot(name: str, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The folder of a model's snapshot in the hub's cache on this machine. Raises `InvalidInputError` if there is
    none."""
    from huggingface_hub import snapshot_download

    if not _HUB_NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name} is no folder; a model is a folder with config.json and weights, {SHIPPED}, or a name on the hub "
            "(org/name) that was downloaded to this machine"
        )
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:
        # Whoever opened the model fetched what it needed of the repository. What this misses is named when it is read.
        if (held := getattr(error, "snapshot_path", None)) is not None:
            return Path(held)
        options = (f" --revision {revision}" if revision else "") + (f" --cache-dir {cache_dir}" if cache_dir else "")
        raise InvalidInputError(
            f"{name} is no folder, and there is no snapshot of a model of that name on this machine; download it with "
            f"`hf download {name}{options}`"
        ) from error


def name_of(folder: Path) -> str:
    """A model's name for people: its folder's, or that which it has on the hub; ``nano`` for the one that ships."""
    folder = folder.resolve()
    if folder == shipped_folder():
        return SHIPPED
    cached = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.split("--")[-1]
    return folder.name


def shipped_folder() -> Path:
    """Folder of the model that ships, as `AutoModelForCausalLM.from_pretrained` and `--model` take it."""
    return Path(__file__).resolve().parents[1] / "nano" / "model"
