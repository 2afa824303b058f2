"""A profile's round trip, what it refuses, and whose settings an engine ends up with."""

import json
import logging
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.profile import Measurement, Profile, quality_settings
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selection import Selection, selection_fields
from cacheblend.core.select.selectors import AllRows, Gradual
from cacheblend.engines.files import write_whole
from cacheblend.engines.settings import (
    PROFILE_NAME,
    BlendSettings,
    check_writable,
    read_profile,
    resolve_settings,
    write_profile,
)

SETTINGS = {"selector": "hkvd", "check_layers": (1, 2), "ratios": (0.4, 0.2), "recompute_ratio": 0.2}
MEASURED = Measurement(
    model="tiny",
    data="rows.jsonl",
    rows=350,
    threshold=0.99,
    confidence=0.95,
    agreement=1.0,
    bound=0.9915,
    compute=0.21,
    versions={"torch": "2.13"},
)
PROFILE = Profile("f1", SETTINGS, MEASURED)


def write(path: Path, **changes: Any) -> Path:
    """A profile's file with some fields changed; None removes one."""
    data = {key: value for key, value in (PROFILE.to_dict() | changes).items() if value is not None}
    path.write_text(json.dumps(data))
    return path


def test_round_trip_and_which_settings_decide_quality(tmp_path: Path) -> None:
    file = tmp_path / PROFILE_NAME
    write_profile(file, PROFILE)
    assert read_profile(file) == PROFILE
    assert [child.name for child in tmp_path.iterdir()] == [PROFILE_NAME]
    # A profile may pool by sentence or by span
    for pool in ("sentence", 8):
        profile = Profile("f1", {"selector": "query", "pool": pool})
        write_profile(tmp_path / "p", profile)
        assert read_profile(tmp_path / "p").config().pool == pool
    # A profile may have hops
    selection = Selection(selector="hybrid", question_words=2.0, hops=1, hop_spans=3)
    assert quality_settings(selection) == {"selector": "hybrid", "question_words": 2.0, "hops": 1, "hop_spans": 3}
    assert "hops" not in quality_settings(Selection(selector="hybrid"))
    write_profile(tmp_path / "p", Profile("f1", quality_settings(selection)))
    config = read_profile(tmp_path / "p").config()
    assert config.selection == selection and config.make_selector() == selection.make_selector()
    # Trying whether a file can be written leaves nothing
    write_profile(tmp_path / "p", PROFILE)
    check_writable(tmp_path / "p")
    check_writable(tmp_path / "new")
    assert {child.name for child in tmp_path.iterdir()} == {PROFILE_NAME, "p"}
    assert read_profile(tmp_path / "p") == PROFILE
    # Every field either decides quality or does not
    quality = [field.name for field in fields(Selection)]
    everything = {field.name: getattr(BlendConfig(), field.name) for field in fields(BlendConfig)}
    assert list(selection_fields(everything)) == quality == list(everything)[: len(quality)]
    assert {"selector", "recompute_ratio", "check_layers", "ratios", "measure", "threshold"} <= set(quality)
    assert not {"anchor", "block_size", "codec", "salt", "cost_model"} & set(quality)
    # A profile cannot set how an engine runs
    with pytest.raises(InvalidInputError, match="a profile cannot set 'salt'"):
        Profile("f1", {"salt": "x"})
    # Quality settings are those that differ
    assert quality_settings(BlendConfig(salt="x")) == {"selector": "auto"}
    assert quality_settings(BlendConfig(**SETTINGS)) == SETTINGS
    # An unknown field is named
    with pytest.raises(InvalidInputError, match="no field 'ratio'"):
        resolve_settings({"ratio": 0.3}, Path(), "f1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": {"selector": "query", "hops": 9}},
            "hops must be a whole number, 0 to 4 (0: only the question), got 9",
        ),
        ({"settings": {"selector": "query", "hops": "one"}}, "hops"),
        *(({"format": old}, f"field 'format': this version reads profiles of format 3, not {old}") for old in (2, 4)),
        ({"settings": {"selector": "query", "hops": 1, "hop_rows": 0}}, "field 'settings.hop_rows'"),
        ({"format": None}, "field 'format': it is missing"),
        ({"fingerprint": 3}, "field 'fingerprint'"),
        ({"colour": 1}, "field 'colour': this version knows no such field"),
        ({"settings": [1]}, "field 'settings': expected an object"),
        ({"settings": {"salt": "x"}}, "field 'settings.salt'"),
        ({"settings": {"speed": 1}}, "field 'settings.speed'"),
        ({"settings": {"recompute_ratio": "much"}}, "field 'settings.recompute_ratio': expected a number"),
        ({"settings": {"recompute_ratio": 1.5}}, "field 'settings': a recompute ratio must be in 0..1"),
        ({"settings": {"check_layers": 1}}, "field 'settings.check_layers': expected a list of whole numbers or null"),
        ({"settings": {"selector": "best"}}, "field 'settings': no selector is called 'best'"),
        ({"settings": {"selector": ["hkvd"]}}, "field 'settings.selector': expected a text"),
        ({"settings": {"pool": [1]}}, "field 'settings.pool': expected 'sentence' or a whole number"),
        ({"settings": {"ratios": 0.5}}, "field 'settings.ratios': expected a list of numbers or null"),
        ({"settings": {"threshold": "1"}}, "field 'settings.threshold': expected a number or null"),
        ({"blend": False}, "field 'blend'"),
        ({"measured": {"rows": 1.5}}, "field 'measured.rows': expected a whole number"),
        ({"measured": {"luck": 1}}, "field 'measured.luck'"),
        ({"measured": {"versions": {"torch": 2}}}, "field 'measured.versions'"),
    ],
)
def test_names_the_file_and_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / PROFILE_NAME, **changes)
    with pytest.raises(InvalidInputError) as caught:
        read_profile(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_files_that_are_damaged_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("{", "[]", '"x"', "{}"):
        (tmp_path / PROFILE_NAME).write_text(text)
        with pytest.raises(InvalidInputError, match=PROFILE_NAME.replace(".", r"\.")):
            read_profile(tmp_path / PROFILE_NAME)
    # A link stays one, a pipe is just written to, and what fails leaves the file
    (tmp_path / "link").symlink_to(tmp_path / "file")
    reading, writing = os.pipe()
    for name in ("link", f"/proc/self/fd/{writing}"):
        write_whole(tmp_path / name, "whole")
    assert (tmp_path / "link").is_symlink() and os.read(reading, 9) == b"whole"
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "link", "\ud800")
    assert (tmp_path / "file").read_text() == "whole"
    (tmp_path / "file").chmod(0o640)
    write_whole(tmp_path / "link", "again")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640  # what somebody keeps to a group stays so
    (tmp_path / "apart").symlink_to(tmp_path / "gone" / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in {"apart": "No such file or directory", "loop": "Too many levels of symbolic links"}.items():
        for act in (lambda file: check_writable(file), lambda file: write_profile(file, PROFILE)):
            with pytest.raises(InvalidInputError, match=f"{why}; name another place"):
                act(tmp_path / name)
        assert (tmp_path / name).is_symlink()
    # what a program's output goes to is no file to be replaced: what stands there stays, and so does what comes
    (tmp_path / "log").write_text("before\n")
    with (tmp_path / "log").open("a") as log:
        (tmp_path / "output").symlink_to(f"/proc/self/fd/{log.fileno()}")
        write_whole(tmp_path / "output", "whole\n")
        log.write("after\n")
    assert (tmp_path / "log").read_text() == "before\nwhole\nafter\n"

    def refuse(self: Path, *_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)  # whoever runs the tests may write anywhere
    for act in (lambda: check_writable(tmp_path / "p"), lambda: write_profile(tmp_path / "p", PROFILE)):
        with pytest.raises(InvalidInputError, match="Permission denied; name another place with --profile"):
            act()


def test_a_profile_that_says_not_to_blend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_profile(tmp_path / PROFILE_NAME, Profile("f1", {"selector": "all"}, MEASURED))
    found = resolve_settings({"salt": "x"}, tmp_path, "f1")
    assert found.selector() == AllRows()
    assert found.selector(0.3) == Gradual(0.3), "an explicit ratio blends"
    assert len(caplog.records) == 1
    assert "nothing is blended" in caplog.text
    assert resolve_settings({"recompute_ratio": 0.3}, tmp_path, "f1").selector() == Gradual(0.3)
    # the fields of a profile were measured together: a hybrid's check layers and shares say nothing of hkvd's
    own = {"selector": "hybrid", "check_layers": [2, 3], "ratios": [0.3, 0.02], "early_ratio": 0.5, "head_rows": 24}
    write_profile(tmp_path / PROFILE_NAME, Profile("f1", own, MEASURED))
    found = resolve_settings(None, tmp_path, "f1")
    assert found.selector(name="hybrid") == found.selector()
    assert found.selector(name="hkvd") == Gradual(0.15) and found.selector(0.3, "hkvd") == Gradual(0.3)
    assert found.selector(0.3, "query") == Query(0.3)
    assert resolve_settings({"recompute_ratio": 0.2, "lead": 2}, tmp_path, "f1").selector(name="query") == Query(0.2)
    assert replace(found, raised_by=2.0).selector(name="hybrid") == found.selector()  # the floor raises unnamed ones
    with pytest.raises(InvalidInputError, match="no selector is called 'best'"):
        found.selector(name="best")
    write_profile(tmp_path / PROFILE_NAME, Profile("f1", {"selector": "all"}, MEASURED))
    assert resolve_settings(None, tmp_path, "f1").selector(name="hkvd") == Gradual(0.15)


def test_whose_settings_an_engine_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # No profile means the defaults
    found = resolve_settings(None, tmp_path, "f1")
    assert (found.config, found.profile) == (BlendConfig(), None)
    assert "has no profile" in found.source
    # Without a configuration the profile decides
    write(tmp_path / PROFILE_NAME)
    found = resolve_settings(None, tmp_path, "f1")
    assert found.config == BlendConfig(**SETTINGS)
    assert found.profile == PROFILE
    assert "hkvd, check_layers 1 2" in found.source
    # Fields that do not decide quality are laid over the profile
    found = resolve_settings({"salt": "x", "capture": False}, tmp_path, "f1")
    assert found.config == replace(BlendConfig(**SETTINGS), salt="x", capture=False)
    # With one field that decides quality the profile is not used
    found = resolve_settings({"recompute_ratio": 0.3}, tmp_path, "f1")
    assert found.config == BlendConfig(recompute_ratio=0.3)
    assert found.profile is None
    assert PROFILE.config(recompute_ratio=0.3) == found.config
    (tmp_path / PROFILE_NAME).write_text("{")  # beside a whole configuration
    assert resolve_settings(BlendConfig(), tmp_path, "f1").config == BlendConfig()
    with pytest.raises(InvalidInputError, match="damaged"):
        resolve_settings(None, tmp_path, "f1")
    caplog.clear()
    write(tmp_path / PROFILE_NAME)  # of other weights
    found = resolve_settings(None, tmp_path, "f2")
    assert (found.config, found.profile) == (BlendConfig(), None)
    assert "other weights" in found.source
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path / PROFILE_NAME) in caplog.text
    # Behind another anchor than it was measured with its quality is unknown
    caplog.clear()
    texts = [Anchor("text", 1, ((1, number),)) for number in range(2)]
    behind = replace(PROFILE, measured=replace(PROFILE.measured, anchor=texts[0].described))
    settings = BlendSettings(BlendConfig(), behind, "the profile p")
    settings.compare(Planner(b"r" * 16, texts[0], 16))
    assert not caplog.records
    settings.compare(Planner(b"r" * 16, texts[0], 16, codec="int8"))
    assert "with the codec raw, not int8" in caplog.text
    for other in (texts[1], Anchor("bos", 1)):
        settings.compare(Planner(b"r" * 16, other, 16))
        assert f"the anchor {texts[0].described}, not {other.described}" in caplog.text
    elsewhere = write(tmp_path / "other.json")  # elsewhere
    assert resolve_settings(None, tmp_path / "model", "f1", elsewhere).profile == PROFILE
    with pytest.raises(InvalidInputError, match="cannot be read"):
        resolve_settings(None, tmp_path, "f1", tmp_path / "none.json")
    for config in (BlendConfig(), {"selector": "none"}):
        with pytest.raises(InvalidInputError, match="would not be used"):
            resolve_settings(config, tmp_path, "f1", elsewhere)
