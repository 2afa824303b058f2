"""Which settings an engine uses: the caller's configuration, the profile in the model's folder, or the defaults; and
the loading controller, by a cost model's file."""

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.cost.controller import Controller
from cacheblend.core.cost.cost_model import CostModel
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.fuse.prefill import check_selector, first_reused_layer
from cacheblend.core.plan.blocks import KVLayout
from cacheblend.core.plan.planner import Planner
from cacheblend.core.profile import Profile
from cacheblend.core.select.selection import Selection, selection_fields
from cacheblend.core.select.selectors import Head, Selector
from cacheblend.engines.files import target_of, write_whole
from cacheblend.engines.fingerprint import ModelIdentity

PROFILE_NAME = "blend-profile.json"  # name of a profile's file in a model's folder
COST_FORMAT = 1  # of a cost model's file

logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class BlendSettings:
    """A configuration and its origin."""

    config: BlendConfig = field(default_factory=BlendConfig)  # the settings in use
    profile: Profile | None = None  # the profile that set them; None if the user did, or they are the defaults
    source: str = "given by the caller"  # the origin in one line, for display
    default: BlendConfig = field(default_factory=BlendConfig)  # what blends where the profile says not to
    raised_by: float = 1.0  # factor of the shares that requests name none of (the shadow check's floor); infinite: full

    @property
    def is_full(self) -> bool:
        """A request that names no ratio and no selector has everything recomputed that is not exact."""
        return math.isinf(self.raised_by)

    def on(self, identity: ModelIdentity) -> "BlendSettings":
        """The same with what ``auto`` means for a model."""
        default = identity.resolved(BlendConfig(anchor=self.config.anchor))
        return replace(self, config=identity.resolved(self.config), default=default)

    def compare(self, planner: Planner) -> None:
        """Says so where chunks have another anchor or codec than those that the profile was measured with."""
        if self.profile is None:
            return
        then, now = self.profile.measured, {"anchor": planner.anchor.described, "codec": planner.codec}
        for what, name in now.items():
            if (measured := getattr(then, what)) not in ("", name):
                known = self.source, what, measured, name
                logger.warning("%s was measured with the %s %s, not %s: its quality here is unknown", *known)

    def selector(self, ratio: float | None = None, name: str | None = None) -> Selector:
        """The selector of a request that may name a ratio and a selector. What is named blends even where the profile
        says not to blend. A selector that is not the one in use has its own defaults, but for a recompute ratio that
        the caller configured: the fields of a profile were measured together, and those of one selector say nothing of
        another's. Raises `InvalidInputError`: no selector has this name, it needs more than a name, or a ratio outside
        0..1."""
        if ratio is None and name is None:
            return (self.config if self.is_full else self.config.scaled(self.raised_by)).make_selector()
        forced = self.profile is not None and not self.profile.blend
        own = self.default if forced else self.config
        if name in (None, "auto", own.selector):
            return own.make_selector(ratio)
        default = own.recompute_ratio if self.profile is None else Selection.recompute_ratio
        return Selection(selector=name).make_selector(default if ratio is None else ratio)

    def of_moved(self, at_least: float = 0.0) -> Selector:
        """The selector of a request whose loaded tokens are all runs of an edited history: the first rows of each have
        seen most of what is gone. Where everything is recomputed, so are they. `at_least`: the loading controller's."""
        own = self.selector()
        if self.config.selector == "all" or own.share == 1:
            return own
        return Head(min(1.0, max(at_least, self.config.edit_ratio * self.raised_by)))

    def at_least(self, ratio: float) -> Selector:
        """The selector that the loading controller gets for a ratio of its choice: never one below that in force."""
        own = self.selector()
        return own if own.share is not None and own.share >= ratio else self.selector(ratio)


def resolve_settings(
    config: BlendConfig | Mapping[str, Any] | None,
    folder: Path,
    fingerprint: str,
    file: str | Path | None = None,
) -> BlendSettings:
    """The settings of an engine from the caller's configuration and the model's profile: the `file`, or the one in its
    folder, if there is one.

    A whole `BlendConfig` takes precedence over any profile, which is then not even read. A mapping of fields, or None,
    overrides the profile's fields; if one of them is a field of `Selection`, the profile is not used. Raises
    `InvalidInputError`: an unknown field or a wrong value, a damaged profile, or a `file` that would not be used.
    """
    overrides = {} if config is None or isinstance(config, BlendConfig) else dict(config)
    by_hand = isinstance(config, BlendConfig) or bool(selection_fields(overrides))
    if by_hand and file is not None:
        raise InvalidInputError(f"the profile {file} would not be used beside your own settings; give one of the two")
    if isinstance(config, BlendConfig):
        return BlendSettings(config)
    if by_hand:
        return BlendSettings(BlendConfig.of(overrides))
    path = folder / PROFILE_NAME if file is None else Path(file)
    if file is None and not path.is_file():
        return BlendSettings(BlendConfig.of(overrides), source=f"the defaults; {folder.resolve().name} has no profile")
    profile = read_profile(path)
    if profile.fingerprint != fingerprint:
        source = f"the defaults; the profile {path} was made for other weights or load options, and is not used"
        logger.warning("%s: measure a new one with cacheblend doctor --quality", source)
        return BlendSettings(BlendConfig.of(overrides), source=source)
    source = f"the profile {path} ({describe(profile.settings)})"
    if not profile.blend:
        source = (
            f"the profile {path}: no setting passed on {profile.measured.data or 'its data'}, so nothing is blended"
        )
        logger.warning("%s; give a ratio or a configuration to blend nevertheless", source)
    return BlendSettings(profile.config(**overrides), profile, source)


def check_settings(
    config: BlendConfig | Mapping[str, Any] | None, folder: Path, file: str | Path | None = None
) -> None:
    """Refuses what `resolve_settings` and an engine would refuse, as far as that is known before weights are read.
    Raises `InvalidInputError`: a wrong setting, a check layer that the model does not have, or a profile or cost model
    that cannot be read."""
    if file is not None:
        read_profile(Path(file))
    given = config if isinstance(config, BlendConfig) else BlendConfig.of({} if config is None else config)
    layers = layers_of(folder)
    if layers is not None and (isinstance(config, BlendConfig) or selection_fields(config or {})):
        check_selector(given.make_selector(), layers)
    if given.cost_model is not None:
        load_cost_model(given.cost_model)


def layers_of(folder: Path) -> int | None:
    """Decoder layers by the folder's config.json alone; None if the file does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        count = config.get("num_hidden_layers", config.get("text_config", {}).get("num_hidden_layers"))
    except (OSError, ValueError, AttributeError):
        return None  # opening the model reports what is wrong
    return count if isinstance(count, int) else None


def describe(settings: Mapping[str, Any]) -> str:
    """Fields of a configuration in one line: ``hkvd, recompute_ratio 0.15, check_layers 1``."""
    words = [str(settings.get("selector", BlendConfig.selector))]
    for name, value in settings.items():
        if name == "selector" or value is None:
            continue
        text = " ".join(f"{item:g}" for item in value) if isinstance(value, tuple | list) else str(value)
        words.append(f"{name} {text}")
    return ", ".join(words)


def read_profile(file: Path) -> Profile:
    """Reads a profile. Raises `InvalidInputError` if the file cannot be read or is none, with file and field."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"the profile {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInputError(
            f"the profile {file} is damaged ({error}); delete it, or measure a new one with cacheblend doctor --quality"
        ) from error
    return Profile.from_dict(data, f"the profile {file}")


def write_profile(file: Path, profile: Profile) -> None:
    """Writes a profile atomically. Raises `InvalidInputError` if the folder cannot be written to."""
    with _written(file):
        write_whole(file, json.dumps(profile.to_dict(), indent=2, ensure_ascii=False) + "\n")


def check_writable(file: Path) -> None:
    """Raises `InvalidInputError` if a profile cannot be written there; called before hours of measuring."""
    with _written(file):
        write_whole(fresh := target_of(file).with_name(f"{file.name}.new"), "")
        fresh.unlink(missing_ok=True)  # another run, which checks the same place


@contextlib.contextmanager
def _written(file: Path) -> Iterator[None]:
    if not file.name or file.is_dir():
        raise InvalidInputError(f"the profile {file} is a folder; name a file with --profile FILE")
    try:
        yield
    except OSError as error:
        raise InvalidInputError(
            f"the profile {file} cannot be written: {error.strerror}; name another place with --profile FILE"
        ) from error


# ---- a cost model's file --------------------------------------------------------------------------------------


def write_cost_model(path: Path, cost_model: CostModel, fingerprint: str, device: str, layout: KVLayout) -> None:
    """Writes a cost model for `load_cost_model`, with the model's fingerprint and the kind of device, such as
    ``cuda``."""
    what = {"format": COST_FORMAT, "model": fingerprint, "device": device, "codec": layout.codec}
    write_whole(path, json.dumps(what | cost_model.to_dict(), indent=1) + "\n")


def load_cost_model(path: str | Path, **wanted: str) -> CostModel:
    """Reads a cost model. Raises `InvalidInputError`: it cannot be read, or was measured on another ``model`` (a
    fingerprint), ``codec`` or kind of ``device`` than is wanted."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"the cost model {path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != COST_FORMAT:
        raise InvalidInputError(
            f"{path} is no cost model of format {COST_FORMAT}; make one with `cacheblend calibrate`"
        )
    for what, value in wanted.items():
        if (found := data.get(what)) != value:
            how = "on another model" if what == "model" else f"with the {what} {found}, not {value}"
            raise InvalidInputError(f"the cost model {path} was measured {how}; measure again")
    return CostModel.from_dict(data)


def controller_of(cost_model: CostModel, config: BlendConfig, layout: KVLayout) -> Controller:
    """The controller of an engine with these settings; `layout` is that of the stored chunks."""
    selector = config.make_selector().of_model(len(layout.layers))
    early = selector.at_start or not selector.check_layers
    return Controller(
        cost_model,
        layers=len(layout.layers),
        bytes_per_token=layout.block_bytes(config.block_size) / config.block_size,  # tokens share a codec's scales
        floor=config.selection.final_ratio,  # the one that quality requires
        check_layer=None if early else first_reused_layer(selector),
    )
