"""Registry entries of packages on Python's path, and reports of broken entries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from winml.modelkit import registries
from winml.modelkit.builds.config import parse_build_config
from winml.modelkit.errors import UsageError
from winml.modelkit.optimize.capabilities import CAPABILITIES, RESERVED
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.registries import CONTRACT, Registry, installed_plug_ins
from winml.modelkit.sweep.sweep import SweepOptions, sweep_models
from winml.modelkit.sweep.work_queue import QUEUES

_CONTRACT = f"[winml.contract]\n{CONTRACT} = winml.modelkit.extend:CONTRACT\n"


def _package(folder: Path, name: str, entry_points: str, contract: str = _CONTRACT) -> None:
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(contract + entry_points, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _numbers() -> Registry[float]:
    return Registry("numbers", "number", {"one": 1.0, "tau": "math:tau"}, lambda: float)


def test_names_are_known_without_an_import_and_objects_after_an_import(folder: Path) -> None:
    """Built-in names come first, and a module is imported for its object."""
    _package(folder, "pies", "[winml.numbers]\npie = registered_number:PIE\n")
    (folder / "registered_number.py").write_text("PIE = 3.25\n", encoding="utf-8")
    numbers = _numbers()
    assert ("one", "tau", "pie") == numbers.names
    assert ["one", "tau", "pie"] == list(numbers)
    assert (1.0, 3.25, "pies 1.0", "") == (numbers["one"], numbers["pie"], numbers.source("pie"), numbers.source("one"))
    with pytest.raises(UsageError) as refused:
        numbers.find("pi", "--number")
    assert "'pie'" in refused.value.hint


def test_duplicate_names_wrong_types_and_other_contracts_are_reported(folder: Path) -> None:
    """Each such entry has a problem and is not listed; a request of its name raises an error with the package."""
    _package(folder, "a-first", "[winml.numbers]\npie = math:e\none = math:pi\nword = os:sep\n")
    _package(folder, "b-second", "[winml.numbers]\npie = math:pi\n")
    _package(folder, "old", "[winml.numbers]\nzero = math:e\n", "[winml.contract]\nv0 = x:y\n")
    numbers = _numbers()
    assert ["one", "tau", "pie"] == list(numbers)
    problems = {(item.package, item.name): item.problem for item in numbers.reported()}
    assert "" == problems.pop(("a-first", "pie"))
    wrong = {key for key, problem in problems.items() if problem}
    assert {("a-first", "one"), ("a-first", "word"), ("b-second", "pie"), ("old", "zero")} == wrong
    with pytest.raises(UsageError, match="package old"):
        numbers["zero"]
    assert {"numbers"} == {item.group for item in installed_plug_ins()}


def test_package_with_damaged_entry_points_is_reported_and_other_packages_work(folder: Path) -> None:
    """Name and version of a package with a damaged METADATA are read from the folder."""
    _package(folder, "bad_entries", "")
    (folder / "bad_entries-1.0.dist-info" / "entry_points.txt").write_bytes(b"[winml.numbers]\nbad = \xff:x\n")
    _package(folder, "no_value", "[winml.numbers]\nword\n")
    _package(folder, "bad_metadata", "[winml.numbers]\npie = math:pi\n")
    (folder / "bad_metadata-1.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\n")
    numbers = _numbers()
    assert ["one", "tau", "pie"] == list(numbers)
    assert numbers.source("pie").startswith("bad_metadata ")
    damaged = {item.package: item.problem for item in installed_plug_ins() if item.problem and item.name != "pie"}
    assert {"bad_entries", "no_value"} == {*damaged}
    assert all("entry_points.txt is damaged" in problem for problem in damaged.values())


def test_plug_in_that_prints_does_not_write_to_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output of its import goes to stderr."""
    _package(folder, "printing", "[winml.numbers]\npie = printing_number:PIE\n")
    (folder / "printing_number.py").write_text("print('loaded')\nPIE = 3.25\n", encoding="utf-8")
    assert 3.25 == _numbers()["pie"]
    assert ("", "loaded\n") == capsys.readouterr()


@pytest.mark.parametrize(("variable", "is_loaded"), [(":other", False), ("other::", False), (".:other:", True)])
def test_working_directory_adds_plug_ins_only_if_named(tmp_path: Path, variable: str, is_loaded: bool) -> None:
    """An empty entry of PYTHONPATH, as an unset variable leaves it, names nothing."""
    _package(tmp_path, "pies", "[winml.numbers]\npie = math:pi\n")
    program = "from winml.modelkit.registries import installed_sources as s; print(s('numbers'))"
    package = str(Path(registries.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({package!r}); {program}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": variable.replace(":", os.pathsep)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert is_loaded == ("pies 1.0" in done.stdout)


def test_reader_of_a_package_reads_configs_of_its_tool(folder: Path) -> None:
    """The reader returns the config and its notes; other configs stay unchanged."""
    _package(folder, "reader", "[winml.configs]\nother = registered_reader:read\n")
    (folder / "registered_reader.py").write_text(
        "def read(value, source):\n"
        "    return ({'layout': value['for']}, ['made: not used']) if 'made' in value else (value, [])\n",
        encoding="utf-8",
    )
    config, notes = parse_build_config({"made": "by another", "for": "optimum"}, "other.json")
    assert ("optimum", ("made: not used",)) == (config.layout, notes)
    assert () == parse_build_config({"layout": "genai"}, "own.json")[1]


def test_queue_of_a_package_is_requested_by_its_name(folder: Path) -> None:
    """A sweep checks the address before it writes anything.

    An unknown name and a text without an address are refused.
    """
    _package(folder, "queue", "[winml.queues]\nshelf = registered_queue:SHELF\n")
    (folder / "registered_queue.py").write_text(
        "from winml.modelkit.extend import QueueKind, UsageError\n"
        "def refuse(address):\n"
        "    raise UsageError(f'nobody works at {address}')\n"
        "SHELF = QueueKind(refuse, None)\n",
        encoding="utf-8",
    )
    assert ("ray", "shelf") == QUEUES.names
    for queue, words in (
        ("shelf=there", "nobody works at there"),
        ("shelf", "NAME=ADDRESS"),
        ("shell=x", "no such work"),
    ):
        with pytest.raises(UsageError, match=words):
            sweep_models([str(folder / "a.onnx")], folder / "swept", options=SweepOptions(queue=queue))
    assert not (folder / "swept").exists()


def test_reserved_names_of_capabilities_are_option_names() -> None:
    """A capability with the name of a member of the record would replace the member."""
    members = {name for name in dir(OptimizeOptions) if not name.startswith(("_", "model_"))}
    inherited = {"construct", "copy", "dict", "from_orm", "json", "parse_file", "parse_obj", "parse_raw", "schema"}
    inherited |= {"schema_json", "update_forward_refs", "validate"}
    fields = {*OptimizeOptions.model_fields}
    assert (members | fields) - {*CAPABILITIES} - inherited <= RESERVED
