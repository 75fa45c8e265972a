"""Selection of modules by name, class or address."""

from __future__ import annotations

import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.tags.selector import ModuleAddress, Selector, escape, select

MODULES = [
    ModuleAddress("", "/M", "M"),
    ModuleAddress("encoder", "/M/Encoder", "Encoder"),
    *(
        module
        for number in (0, 1, 10)
        for module in (
            ModuleAddress(f"encoder.layer.{number}", f"/M/Encoder/Layer.{number}", "Layer"),
            ModuleAddress(f"encoder.layer.{number}.output", f"/M/Encoder/Layer.{number}/Output", "Output"),
            ModuleAddress(f"encoder.layer.{number}.act", f"/M/Encoder/Layer.{number}/GELU", "GELU"),
        )
    ),
    ModuleAddress("output", "/M/Linear.output", "Linear"),
]


def _selected_paths(selector: str) -> list[str]:
    return [module.path for module in select(MODULES, selector)]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        # class names
        ("M", [""]),
        ("Layer", ["encoder.layer.0", "encoder.layer.1", "encoder.layer.10"]),
        ("L*", ["encoder.layer.0", "encoder.layer.1", "encoder.layer.10", "output"]),
        # module paths
        ("encoder.layer.*.output", ["encoder.layer.0.output", "encoder.layer.1.output", "encoder.layer.10.output"]),
        ("encoder.layer.?", ["encoder.layer.0", "encoder.layer.1"]),
        ("encoder.layer.[1-9]", ["encoder.layer.1"]),
        ("encoder.layer.[!1-9]", ["encoder.layer.0"]),
        ("encoder.layer.1.**", ["encoder.layer.1", "encoder.layer.1.output", "encoder.layer.1.act"]),
        ("encoder.**.1.act", ["encoder.layer.1.act"]),
        ("**.output", [f"encoder.layer.{number}.output" for number in (0, 1, 10)] + ["output"]),
        # as a tree prints them
        ("Layer.1", ["encoder.layer.1"]),
        ("Layer.[01]", ["encoder.layer.0", "encoder.layer.1"]),
        ("Layer.*", ["encoder.layer.0", "encoder.layer.1", "encoder.layer.10"]),
        ("Linear.output", ["output"]),
        # tags
        ("/M", [""]),
        ("/M/*", ["encoder", "output"]),
        ("/M/**/GELU", [f"encoder.layer.{number}.act" for number in (0, 1, 10)]),
        ("**/Layer.1", ["encoder.layer.1"]),
        ("/M/Encoder/**/**/Output", [f"encoder.layer.{number}.output" for number in (0, 1, 10)]),
        ("/**", [module.path for module in MODULES]),
    ],
)
def test_select_glob_names_modules_in_their_order(selector: str, expected: list[str]) -> None:
    """Classes, paths and tags are matched whole, and a single star stays between separators."""
    assert expected == _selected_paths(selector)


@pytest.mark.parametrize(
    "selector", ["layer", "encoder.layer", "/Encoder", "encoder*output", "Encoder/Layer.0", "*.0", "Lay*.0"]
)
def test_select_part_of_an_address_matches_nothing(selector: str) -> None:
    """An address is matched from its first to its last character."""
    with pytest.raises(UsageError, match="no module"):
        select(MODULES, selector)


@pytest.mark.parametrize("selector", ["[9-0]", "encoder.layer.[", "a]b", "\\", "[]"])
def test_select_odd_text_is_an_unmatched_glob(selector: str) -> None:
    """No text breaks the matching."""
    with pytest.raises(UsageError, match="no module"):
        select(MODULES, selector)


@pytest.mark.parametrize(
    ("selector", "nearest"),
    [("Outptu", "Output"), ("encoder.layer.0.outputs", "encoder.layer.0.output"), ("/M/Encodr", "/M/Encoder")],
)
def test_select_without_a_match_lists_the_nearest(selector: str, nearest: str) -> None:
    """The error offers addresses of the kind that was asked for, the likeliest first."""
    with pytest.raises(UsageError) as caught:
        select(MODULES, selector)
    assert caught.value.hint.startswith(f"Nearest: {nearest}")
    assert 2 == caught.value.exit_code


def test_select_without_a_similar_name_explains_selectors() -> None:
    """The error explains selectors if no name is similar."""
    with pytest.raises(UsageError) as caught:
        select(MODULES, "zzzz")
    assert caught.value.hint.startswith("Classes: ")
    assert "encoder.layer.*.output" in caught.value.hint


def test_untagged_module_is_matched_in_node_names() -> None:
    """The hint names the option that tags the module; paths of no node get another hint."""
    names = dict.fromkeys(["/encoder/layer.0/down/0/Conv", "/encoder/Add", "Reshape_3"], "/M")
    for selector in ("encoder.layer.0.down.0", "encoder.layer.*.down", "**.down.0"):
        with pytest.raises(UsageError) as caught:
            select(MODULES, selector, names)
        assert "--torch-module all" in caught.value.hint
    for selector in ("down.0", "encoder.layer.0.down.0.Conv", "Reshape_3"):
        with pytest.raises(UsageError) as caught:
            select(MODULES, selector, names)
        assert "--torch-module" not in caught.value.hint


@pytest.mark.parametrize("text", ["", "  "])
def test_selector_empty_text_is_refused(text: str) -> None:
    """An empty selector is a mistake, not the root."""
    with pytest.raises(UsageError, match="selector is empty"):
        Selector(text)


def test_escape_makes_glob_characters_literal() -> None:
    """An escaped address names itself."""
    odd = ModuleAddress("a[0].*", "/M/A[0]", "A?")
    assert [odd] == select([*MODULES, odd], escape(odd.path))
    assert [odd] == select([*MODULES, odd], escape(odd.tag))
    assert [odd] == select([*MODULES, odd], escape(odd.class_name))


def test_name_of_a_node_is_met_with_its_module() -> None:
    """Other tools exclude nodes; the hint is the selector of the module."""
    module = MODULES[-1]
    with pytest.raises(UsageError) as caught:
        select(MODULES, "/encoder/MatMul", {"/encoder/MatMul": module.tag})
    assert module.path in caught.value.message
    assert [module] == select(MODULES, caught.value.hint.rpartition(": ")[2].rstrip("."))
