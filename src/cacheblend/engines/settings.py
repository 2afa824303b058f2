"""What an engine blends by: a user's own configuration, or the profile in the model's folder, or the defaults."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.profile import Profile, config_of, decides_quality
from cacheblend.core.select.selectors import Selector

PROFILE_NAME = "blend-profile.json"
"""Of a profile in a model's folder."""
_OLD_PROFILE_NAME = "cacheblend.json"  # up to 0.1; a store's format file has this name, too

logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class Settings:
    """A configuration, and where it comes from.

    Attributes:
        config: what is blended by.
        profile: whose settings these are; None if they are the user's or the defaults.
        source: the same for people, in one line.
    """

    config: BlendConfig = field(default_factory=BlendConfig)
    profile: Profile | None = None
    source: str = "given by the caller"

    def selector(self, ratio: float | None = None) -> Selector:
        """The selector of a request; a ratio tells even those to blend whose profile says they should not."""
        told = ratio is not None and self.profile is not None and not self.profile.blend
        return (BlendConfig() if told else self.config).make_selector(ratio)


def resolve_settings(
    config: BlendConfig | Mapping[str, Any] | None,
    folder: Path,
    fingerprint: str,
    file: str | Path | None = None,
) -> Settings:
    """From what the caller wants and what the folder has to the settings.

    Args:
        config: a whole configuration goes before any profile, which is then not even read. A mapping of fields, or
            None, is laid over the profile; if one of its fields decides quality, the profile is set aside.
        folder: the model's.
        fingerprint: of its weights, as opened.
        file: the profile; None takes the folder's own, if it has one.

    Raises:
        InvalidInputError: a damaged profile or one with unknown fields, or a `file` that would have no say.
    """
    overrides = {} if config is None or isinstance(config, BlendConfig) else dict(config)
    by_hand = isinstance(config, BlendConfig) or decides_quality(overrides)
    if by_hand and file is not None:
        raise InvalidInputError(f"the profile {file} has no say beside settings of your own; give one of the two")
    if isinstance(config, BlendConfig):
        return Settings(config)
    if by_hand:
        return Settings(config_of(overrides))
    path = profile_file(folder) if file is None else Path(file)
    if file is None and not path.is_file():
        return Settings(config_of(overrides), source=f"the defaults; {folder.resolve().name} has no profile")
    return _of_profile(read_profile(path), path, fingerprint, overrides)


def profile_file(folder: Path) -> Path:
    """The profile in a model's folder, or where it would be; one of the old name is read as long as it is the only."""
    named, old = folder / PROFILE_NAME, folder / _OLD_PROFILE_NAME
    return old if old.is_file() and not named.exists() else named


def _of_profile(profile: Profile, path: Path, fingerprint: str, overrides: dict[str, Any]) -> Settings:
    if profile.fingerprint != fingerprint:
        source = f"the defaults; the profile {path} was made for other weights or load options, and is not used"
        logger.warning("%s: measure it anew with cacheblend doctor --quality", source)
        return Settings(config_of(overrides), source=source)
    if not profile.blend:
        source = (
            f"the profile {path}: no setting passed on {profile.measured.data or 'its data'}, so nothing is blended"
        )
        logger.warning("%s; a ratio or a configuration of your own blends all the same", source)
        return Settings(profile.config(**overrides), profile, source)
    return Settings(profile.config(**overrides), profile, f"the profile {path} ({describe(profile.settings)})")


def describe(settings: Mapping[str, Any]) -> str:
    """Fields of a configuration in a few words: ``hkvd, recompute_ratio 0.15, check_layers 1``."""
    words = [str(settings.get("selector", BlendConfig.selector))]
    for name, value in settings.items():
        if name == "selector" or value is None:
            continue
        text = " ".join(f"{item:g}" for item in value) if isinstance(value, tuple | list) else str(value)
        words.append(f"{name} {text}")
    return ", ".join(words)


def read_profile(file: Path) -> Profile:
    """The profile of a file.

    Raises:
        InvalidInputError: it cannot be read, or is none; the message names file and field.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"the profile {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(
            f"the profile {file} is damaged ({error}); delete it, or measure it anew with cacheblend doctor --quality"
        ) from error
    return Profile.from_dict(data, f"the profile {file}")


def write_profile(file: Path, profile: Profile) -> None:
    """Writes a profile: whole, or not at all.

    Raises:
        InvalidInputError: the folder cannot be written to.
    """
    _write(file, json.dumps(profile.to_dict(), indent=2, ensure_ascii=False) + "\n")


def check_writable(file: Path) -> None:
    """Raises `InvalidInputError` if a profile could not be written there: before hours of work, not behind them."""
    _write(file, None)


def _write(file: Path, text: str | None) -> None:
    """Replaces a file; without a text it only tries whether it could."""
    if not file.name or file.is_dir():
        raise InvalidInputError(f"the profile {file} is a folder; name a file with --profile FILE")
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        fresh.write_text(text or "", encoding="utf-8")
        if text is None:
            fresh.unlink()
        else:
            fresh.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise InvalidInputError(
            f"the profile {file} cannot be written: {error.strerror}; name another place with --profile FILE"
        ) from error
