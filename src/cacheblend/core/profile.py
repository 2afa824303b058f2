"""A model's profile: the settings it is blended with, and the measurement that they rest on. A profile sets only fields
of `Selection`. They were measured together, so they only hold together: if a user sets one of them, no setting of the
profile is used. Knows JSON's values; does not read files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, fits_type, type_in_words
from cacheblend.core.select.selection import Selection, selection_fields

FORMAT = 3
_LARGEST = 1e300  # number in a file; larger whole numbers cannot be floats


@dataclass(frozen=True)
class Measurement:
    """The measurement that a profile rests on."""

    model: str = ""  # name of the model's folder, for display
    data: str = ""  # name of the file with the evaluated rows
    data_sha256: str = ""  # hex digest of what was read of that file; empty where there was no file
    rows: int = 0  # rows of the confirmation, none of which the search had used
    threshold: float = 0.0  # required agreement of first tokens with full recompute
    confidence: float = 0.0  # of the one-sided bounds, over all attempts together
    # share of rows whose first token is that of full recompute; None where no setting passed
    agreement: float | None = None
    bound: float | None = None  # lower bound of the agreement
    compute: float | None = None  # share of a full prefill's work, algorithm.md section 7
    f1_rows: int = 0  # rows with gold answers; few of them show no F1 (docs/evaluation.md)
    f1_difference: float | None = None  # mean F1 minus that of full recompute; None without gold answers
    f1_bound: float | None = None  # lower bound of that difference
    dtype: str = ""  # of the weights
    anchor: str = ""  # that the chunks were computed after, see `Anchor.described`
    codec: str = "raw"  # that they were stored with
    date: str = ""  # of the run, ISO 8601
    versions: Mapping[str, str] = field(default_factory=dict)  # of the packages that affect numerical results


@dataclass(frozen=True)
class Profile:
    """The settings that a model is blended with. Raises `InvalidInputError`: a field that is not one of `Selection`, or
    a value that it refuses."""

    fingerprint: str  # of the weights it was measured on; it is not valid for others
    settings: Mapping[str, Any]  # fields of `Selection`; the others have their defaults
    measured: Measurement = field(default_factory=Measurement)  # the measurement that the settings rest on

    def __post_init__(self) -> None:
        known = [f.name for f in fields(Selection)]
        for name in sorted(self.settings):
            if name not in known:
                raise InvalidInputError(f"a profile cannot set {name!r}; it can only set {', '.join(known)}")
        Selection(**self.settings)  # raises on wrong values

    @property
    def selection(self) -> Selection:
        return Selection(**self.settings)

    @property
    def blend(self) -> bool:  # false: no setting passed, so everything except exact prefixes is recomputed
        return bool(self.settings.get("selector") != "all")

    def config(self, **overrides: Any) -> BlendConfig:
        """The profile's settings with the overrides, fields of `BlendConfig`; only the overrides where one of them is a
        field of `Selection`. Raises `InvalidInputError`: there is no such field, or a value is outside its limits."""
        return BlendConfig.of(overrides if selection_fields(overrides) else {**self.settings, **overrides})

    def to_dict(self) -> dict[str, Any]:
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
        """The opposite of `to_dict`; `where`: name of the JSON file. Raises `InvalidInputError`: it has another form,
        or a field that this version does not know; the message names file and field."""
        top = _fields(data, where, "", {"format", "fingerprint", "blend", "settings", "measured"})
        if top["format"] != FORMAT:
            raise InvalidInputError(
                f"{where}, field 'format': this version reads profiles of format {FORMAT}, not {top['format']!r}; "
                "measure again: `cacheblend doctor --quality`"
            )
        if not isinstance(top["fingerprint"], str) or not top["fingerprint"]:
            raise _wrong(where, "fingerprint", "a text", top["fingerprint"])
        settings = _typed_fields(top["settings"], where, "settings", Selection)
        settings.setdefault("selector", "hkvd")  # the default once
        measured = Measurement(**_typed_fields(top["measured"], where, "measured", Measurement))
        try:
            profile = Profile(top["fingerprint"], settings, measured)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}, field 'settings': {error}") from error
        if top["blend"] is not profile.blend:
            raise InvalidInputError(
                f"{where}, field 'blend': it is {top['blend']!r}, but the field 'settings' says the opposite"
            )
        return profile


def quality_settings(selection: Selection) -> dict[str, Any]:
    """The selector, and the fields of `Selection` that are not the defaults."""
    found = {f.name: (getattr(selection, f.name), f.default) for f in fields(Selection)}
    return {name: value for name, (value, default) in found.items() if value != default or name == "selector"}


# ---- from JSON --------------------------------------------------------------------------------------------


def _typed_fields(value: Any, where: str, prefix: str, kind: type) -> dict[str, Any]:
    """`value` as an object of some of a dataclass's fields, each of its declared type; lists become tuples."""
    hints = get_type_hints(kind)
    found = _fields(value, where, f"{prefix}.", set(hints), optional=set(hints))
    for name, given in found.items():
        found[name] = each = tuple(given) if isinstance(given, list) else given
        numbers = [item for item in (each if isinstance(each, tuple) else (each,)) if isinstance(item, int | float)]
        if not fits_type(each, hints[name]) or not all(abs(number) <= _LARGEST for number in numbers):
            wanted = type_in_words(hints[name]).replace("a tuple", "a list").replace("None", "null")
            raise _wrong(where, f"{prefix}.{name}", wanted.replace("a Mapping", "an object of texts"), given)
    return found


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
                "measure a new profile with it (cacheblend doctor --quality), or remove the field"
            )
    for name in sorted(known - optional):
        if name not in value:
            raise InvalidInputError(f"{where}, field '{prefix}{name}': it is missing")
    return dict(value)


def _wrong(where: str, name: str, kind: str, value: Any) -> InvalidInputError:
    return InvalidInputError(f"{where}, field '{name}': expected {kind}, found {value!r:.60}")
