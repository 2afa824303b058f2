"""From options to methods: every combination once, and what cannot be is said."""

from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import Hkvd, RandomRows, Threshold
from cacheblend.evaluation import Fused, SelectorChoice, make_methods


def names(**choices: Any) -> list[str]:
    return [method.label.name for method in make_methods(["blend"], **choices)]


def test_all_methods_by_name() -> None:
    methods = make_methods(["full", "prefix", "reuse", "blend", "map-reduce", "map-rerank", "full"])
    assert [method.label.kind for method in methods] == ["full", "prefix", "reuse", "blend", "map-reduce", "map-rerank"]
    assert methods[3].label.name == "blend hkvd gradual r=0.15"
    assert isinstance(methods[3], Fused) and methods[3].selector == BlendConfig().make_selector()


def test_blend_is_every_combination() -> None:
    found = names(selectors=["hkvd", "random"], ratios=[0.05, 0.3], check_layers=[(1,), (2,)])
    assert found == [
        "blend hkvd @1 r=0.05",
        "blend hkvd @1 r=0.3",
        "blend hkvd @2 r=0.05",
        "blend hkvd @2 r=0.3",
        "blend random r=0.05",
        "blend random r=0.3",
    ]


def test_methods_of_one_family_differ_by_their_ratio() -> None:
    methods = make_methods(["blend"], selectors=["hkvd", "none"], ratios=[0.05, 0.3])
    assert [(method.label.family, method.label.ratio) for method in methods] == [
        ("hkvd gradual", 0.05),
        ("hkvd gradual", 0.3),
        ("none", None),
    ]


def test_decreasing_ratios_go_with_as_many_check_layers() -> None:
    methods = make_methods(["blend"], ratios=[0.15, (0.45, 0.3, 0.15)], check_layers=[(1,), (1, 2, 3)])
    assert [method.label.name for method in methods] == [
        "blend hkvd @1 r=0.15",
        "blend hkvd @1,2,3 r=0.15",
        "blend hkvd @1,2,3 r=0.45,0.3,0.15",
    ]
    assert isinstance(methods[2], Fused) and methods[2].selector == Hkvd((1, 2, 3), (0.45, 0.3, 0.15))
    assert methods[2].label.ratio == 0.15
    with pytest.raises(InvalidInputError, match=r"2 decreasing ratios \(0.3, 0.1\) need as many check layers"):
        names(ratios=[(0.3, 0.1)], check_layers=[(1,), (1, 2, 3)])


def test_settings_stand_behind_the_selectors_name() -> None:
    assert SelectorChoice.parse("hkvd:measure=v").selector((0.1,), (2,)) == Hkvd((2,), (0.1,), "v")
    assert SelectorChoice.parse("threshold:threshold=2.5").selector((0.1,), (1,)) == Threshold(2.5, (1,))
    assert SelectorChoice.parse("random").selector((0.1,), (1,)) == RandomRows(0.1)
    found = names(selectors=["hkvd", "hkvd:measure=v"], check_layers=[None, (1,)])
    both = ("hkvd", "hkvd:measure=v")
    assert found == [f"blend {name} {checks} r=0.15" for name in both for checks in ("gradual", "@1")]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"selectors": ["hkvdd"]}, "no selector is called 'hkvdd'"),
        ({"selectors": ["hkvd:colour=red"]}, "there is no setting 'colour' here; settings are measure"),
        ({"selectors": ["hkvd:measure"]}, "'measure' is not of the form setting=value"),
        ({"selectors": ["hkvd:ratios=3"]}, "there is no setting 'ratios' here; settings are measure"),
        ({"selectors": ["hkvd:measure=w"]}, "measure must be one of kv, k, v, got 'w'"),
        ({"selectors": ["threshold:threshold=high"]}, "threshold must be a number or None, got 'high'"),
        ({"selectors": ["profile"]}, "needs a model's settings"),
        ({"ratios": [1.5]}, r"must be in 0..1, got 1.5"),
        ({"check_layers": [(0,)]}, "at least 1"),
    ],
)
def test_a_wrong_choice_is_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        names(**choices)


def test_unknown_methods_and_none_at_all() -> None:
    with pytest.raises(InvalidInputError, match="there is no method 'blnd'; choose from full, prefix, reuse, blend"):
        make_methods(["full", "blnd"])
    with pytest.raises(InvalidInputError, match="there is no method"):
        make_methods([])


def test_the_profile_stands_beside_the_same_settings_given_by_hand() -> None:
    methods = make_methods(["blend"], selectors=["hkvd", "profile"], profile=BlendConfig())
    assert [method.label.name for method in methods] == ["blend profile", "blend hkvd gradual r=0.15"]
