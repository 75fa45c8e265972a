"""Independence of the repository from any machine, and coverage of its tests by CI."""

from __future__ import annotations

import fnmatch
import re

import pytest

from architecture.sources import REPOSITORY, repository_files

_BINARY = {".png", ".ico", ".gz", ".onnx", ".safetensors", ".pyc"}
# A path that starts at the root of somebody's machine: a home, a scratch folder, a mount.
_MACHINE_PATH = re.compile(
    r"(?<![\w.\-/~)}\]])/(?:home|Users|root|work|workspace|opt|tmp|mnt|media)/\w|[A-Za-z]:\\+Users\\+\w"
)
_PYTEST = re.compile(r"(?:-m )?pytest\b(?P<arguments>.*)$", re.MULTILINE)


def _text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_no_file_names_a_path_of_one_machine() -> None:
    """Nothing in the repository depends on, or gives away, the folder of a contributor."""
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in repository_files()
        if path.suffix not in _BINARY
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if _MACHINE_PATH.search(line)
    ]
    assert [] == found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("weights = '/" + "home/ada/model'", True),
        ("see C:" + "\\Users\\ada", True),
        ("/" + "tmp/out.onnx", True),
        ("/embeddings/word_embeddings/Gather", False),
        ("docs/work/plan.md", False),
        ("$HOME/tmp/x", False),
    ],
)
def test_machine_path_pattern_distinguishes_paths_from_names(line: str, expected: bool) -> None:
    """The pattern matches absolute paths of machines, but neither scopes of a graph nor relative paths."""
    assert expected == bool(_MACHINE_PATH.search(line))


def test_make_test_runs_all_of_tests() -> None:
    """The recipe names no folder and deselects nothing."""
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", _text("Makefile"), re.MULTILINE)
    assert recipe is not None
    assert ["-n auto"] == [match["arguments"].strip() for match in _PYTEST.finditer(recipe[1])]


def test_public_workflow_runs_all_of_tests() -> None:
    """No pytest call of the test workflow names a folder, deselects, or retries."""
    calls = [match["arguments"].strip() for match in _PYTEST.finditer(_text(".github/workflows/test.yml"))]
    assert calls
    assert {"-n auto"} == set(calls)


def test_no_test_folder_is_skipped_by_name(request: pytest.FixtureRequest) -> None:
    """The runner descends into every folder of tests, the one named like the subpackage ``build`` included."""
    patterns = [pattern for pattern in request.config.getini("norecursedirs") if pattern != "__pycache__"]
    folders = [path.name for path in (REPOSITORY / "tests").rglob("*") if path.is_dir() and path.name != "__pycache__"]
    assert [] == [name for name in folders for pattern in patterns if fnmatch.fnmatch(name, pattern)]
    assert [REPOSITORY / "tests"] == [request.config.rootpath / path for path in request.config.getini("testpaths")]


def test_every_test_file_is_collected_by_its_name(request: pytest.FixtureRequest) -> None:
    """A file with tests has a name that pytest collects."""
    patterns = request.config.getini("python_files")
    holders = [
        path
        for path in repository_files()
        if path.suffix == ".py"
        and path.is_relative_to(REPOSITORY / "tests")
        and re.search(r"^def test_", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert holders
    assert [] == [path.name for path in holders if not any(fnmatch.fnmatch(path.name, p) for p in patterns)]


def test_markers_are_documented(request: pytest.FixtureRequest) -> None:
    """Only a missing device, program or network, and slowness, may exclude a test."""
    ours = re.search(r"^markers = \[\n(.*?)^\]", _text("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert ours is not None
    assert ["gpu", "reader", "network", "slow"] == re.findall(r'^\s*"(\w+)(?:\(\w+\))?:', ours[1], re.MULTILINE)


def test_no_file_is_named_after_its_history() -> None:
    """The name of a file states the subject, not the history of the file."""
    stems = {path.stem for path in repository_files() if path.suffix == ".py"}
    assert [] == sorted(
        s for s in stems if re.search(r"_(new|old|extended|isolated|v\d+|final|fixed|utils|helpers)$", s)
    )
