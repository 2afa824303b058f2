"""A model's profile: how this model is blended, and the measurement that says so. Plain data; files are not its matter.

A profile sets only those fields of `BlendConfig` that decide an answer's quality. They were measured together, so
they hold together: whoever sets one of them by hand sets the profile's aside.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError

FORMAT = 1
_LARGEST = 1e300  # of a number in a file; larger whole numbers are no floats

RUNNING_FIELDS = frozenset(
    [
        "anchor",
        "block_size",
        "codec",
        "cost_model",
        "salt",
        "tile_rows",
        "read_ahead",
        "capture",
        "capture_queue",
        "capture_batch_tokens",
    ]
)
"""Fields of `BlendConfig` that say how an engine runs; all others decide quality."""

QUALITY_FIELDS = frozenset(f.name for f in fields(BlendConfig)) - RUNNING_FIELDS


@dataclass(frozen=True)
class Measurement:
    """What a profile rests on.

    Attributes:
        model: the folder's name, for people.
        data: name of the file whose rows were asked.
        data_sha256: hex, of its bytes; empty where there was no file.
        rows: rows of the confirmation, none of which the search had seen.
        threshold: agreement of first tokens with full recompute that was asked for.
        confidence: of the one-sided bounds, all attempts together.
        agreement: share of rows with full recompute's first token; None where no setting passed.
        bound: its lower bound.
        compute: share of a full prefill's work, algorithm.md section 7.
        f1_difference: mean F1 less full recompute's; None without gold answers.
        f1_bound: its lower bound.
        dtype: of the weights.
        anchor: what the chunks stood behind.
        date: of the run, ISO 8601.
        versions: of the packages that decide numbers.
    """

    model: str = ""
    data: str = ""
    data_sha256: str = ""
    rows: int = 0
    threshold: float = 0.0
    confidence: float = 0.0
    agreement: float | None = None
    bound: float | None = None
    compute: float | None = None
    f1_difference: float | None = None
    f1_bound: float | None = None
    dtype: str = ""
    anchor: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """How a model is blended.

    Attributes:
        fingerprint: of the weights it was measured on; it holds for no others.
        settings: fields of `BlendConfig`, of `QUALITY_FIELDS` only.
        measured: what it rests on.

    Raises:
        InvalidInputError: no such field, or a value that `BlendConfig` refuses.
    """

    fingerprint: str
    settings: Mapping[str, Any]
    measured: Measurement = field(default_factory=Measurement)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.settings) - QUALITY_FIELDS)
        if unknown:
            raise InvalidInputError(
                f"a profile cannot set {unknown[0]!r}; it sets {', '.join(sorted(QUALITY_FIELDS))} and no more"
            )
        BlendConfig(**self.settings)

    @property
    def blend(self) -> bool:
        """False: no setting passed, so everything is recomputed but exact prefixes."""
        return bool(self.settings.get("selector") != "all")

    def config(self, **overrides: Any) -> BlendConfig:
        """The configuration: the profile's settings, or the overrides' alone where they decide quality too.

        Args:
            **overrides: fields of `BlendConfig`.

        Raises:
            InvalidInputError: no such field, or a value that it cannot have.
        """
        return config_of(overrides if decides_quality(overrides) else {**self.settings, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()}
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "blend": self.blend,
            "settings": settings,
            "measured": asdict(self.measured) | {"versions": dict(self.measured.versions)},
        }

    @staticmethod
    def from_dict(data: Any, where: str) -> "Profile":
        """What `to_dict` gave.

        Args:
            data: as read.
            where: of the file, for messages.

        Raises:
            InvalidInputError: another form, or a field that this version does not know; it names file and field.
        """
        top = _fields(data, where, "", {"format", "fingerprint", "blend", "settings", "measured"})
        if top["format"] != FORMAT:
            raise InvalidInputError(
                f"{where}, field 'format': this version reads profiles of format {FORMAT}, not {top['format']!r}"
            )
        if not isinstance(top["fingerprint"], str) or not top["fingerprint"]:
            raise _wrong(where, "fingerprint", "a text", top["fingerprint"])
        settings = _settings(top["settings"], where)
        measured = _measurement(top["measured"], where)
        try:
            profile = Profile(top["fingerprint"], settings, measured)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}, field 'settings': {error}") from error
        if top["blend"] is not profile.blend:
            raise InvalidInputError(
                f"{where}, field 'blend': it is {top['blend']!r}, which the field 'settings' contradicts"
            )
        return profile


def decides_quality(overrides: Mapping[str, Any]) -> bool:
    """One of the fields decides quality, so that a profile has no say beside them."""
    return not QUALITY_FIELDS.isdisjoint(overrides)


def quality_settings(config: BlendConfig) -> dict[str, Any]:
    """The fields of a configuration that decide quality and are not the defaults, and always the selector."""
    found = {f.name: (getattr(config, f.name), f.default) for f in fields(config) if f.name in QUALITY_FIELDS}
    return {name: value for name, (value, default) in found.items() if value != default or name == "selector"}


def config_of(values: Mapping[str, Any]) -> BlendConfig:
    """`BlendConfig` of these fields.

    Raises:
        InvalidInputError: no such field, or a value that it cannot have.
    """
    unknown = sorted(set(values) - QUALITY_FIELDS - RUNNING_FIELDS)
    if unknown:
        known = ", ".join(f.name for f in fields(BlendConfig))
        raise InvalidInputError(f"BlendConfig has no field {unknown[0]!r}; it has {known}")
    return BlendConfig(**values)


_OPTIONAL: dict[str, Any] = {"ratios": (), "threshold": 0.0, "early_ratio": 0.0}
"""Fields of `BlendConfig` whose default is None: a value of the kind that they have otherwise."""


# ---- from JSON --------------------------------------------------------------------------------------------


def _settings(value: Any, where: str) -> dict[str, Any]:
    """Settings with tuples for lists; every value of its field's kind."""
    kinds = {f.name: f.default for f in fields(BlendConfig) if f.name in QUALITY_FIELDS}
    settings = _fields(value, where, "settings.", set(kinds), optional=set(kinds))
    for name, found in settings.items():
        if (name == "pool" and _is_number(found)) or (name in _OPTIONAL and found is None):
            continue  # BlendConfig judges
        _check_kind(found, _OPTIONAL.get(name, kinds[name]), where, f"settings.{name}")
    return {name: tuple(found) if isinstance(found, list) else found for name, found in settings.items()}


def _measurement(value: Any, where: str) -> Measurement:
    kinds = {f.name: f.default for f in fields(Measurement)}
    measured = _fields(value, where, "measured.", set(kinds), optional=set(kinds))
    for name, found in measured.items():
        if name == "versions":
            if not isinstance(found, dict) or not all(isinstance(version, str) for version in found.values()):
                raise _wrong(where, "measured.versions", "an object of texts", found)
        else:
            _check_kind(found, kinds[name], where, f"measured.{name}")
    return Measurement(**measured)


def _fields(
    value: Any, where: str, prefix: str, known: set[str], optional: set[str] | frozenset[str] = frozenset()
) -> dict[str, Any]:
    """`value` as an object of known fields."""
    if not isinstance(value, dict):
        raise _wrong(where, prefix.rstrip(".") or "(whole file)", "an object", value)
    for name in value:
        if name not in known:
            raise InvalidInputError(
                f"{where}, field '{prefix}{name}': this version knows no such field; "
                "measure the profile anew with it (cacheblend doctor --quality), or remove the field"
            )
    for name in sorted(known - optional):
        if name not in value:
            raise InvalidInputError(f"{where}, field '{prefix}{name}': it is missing")
    return dict(value)


def _check_kind(value: Any, default: Any, where: str, name: str) -> None:
    """A value must be of its default's kind; where that is None, a number, a text, a list of numbers or null."""
    if default is None:
        if value is None or isinstance(value, str) or _is_number(value) or _is_numbers(value):
            return
        raise _wrong(where, name, "a number, a text or a list of numbers", value)
    fits, kind = {
        int: (isinstance(value, int) and not isinstance(value, bool), "a whole number"),
        float: (_is_number(value), "a number"),
        str: (isinstance(value, str), "a text"),
        tuple: (_is_numbers(value), "a list of numbers"),
    }[type(default)]
    if not fits:
        raise _wrong(where, name, kind, value)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= _LARGEST and math.isfinite(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(item) for item in value)


def _wrong(where: str, name: str, kind: str, value: Any) -> InvalidInputError:
    return InvalidInputError(f"{where}, field '{name}': expected {kind}, found {value!r:.60}")
