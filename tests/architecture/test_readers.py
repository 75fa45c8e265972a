"""Installation of readers by `make readers`: once for each set of versions, and with the tests of readers only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import readers
from architecture.sources import REPOSITORY
from readers import NEWEST, PACKAGES, READERS, Installer, NotInstalledError, Reader, install_reader


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the versions of a reader `small`, which is installed beside it."""
    monkeypatch.setattr(readers, "VERSIONS", tmp_path)
    monkeypatch.setattr(readers, "INSTALLED", tmp_path / "installed")
    return tmp_path / "small.txt"


def test_reader_is_installed_again_only_when_its_versions_change(pins: Path) -> None:
    """The constraints that the file names count as versions, and an interrupted installation does not count."""
    installed: list[str] = []

    def install(listed: Path, folder: Path) -> None:
        folder.mkdir()
        installed.append(listed.read_text(encoding="utf-8"))
        if "broken" in installed[-1]:
            raise NotInstalledError("broken")

    def read_version(_folder: Path, _package: str) -> str:
        return "1.0"

    reader = Reader("small", (), Installer("{}.txt", install, read_version), ("one",))
    constraints = pins.with_name("constraints.txt")
    constraints.write_text("two==2\n", encoding="utf-8")
    for text, times in (("-c constraints.txt\none==1\n", 1), ("-c constraints.txt\none==1.1\n", 2)):
        pins.write_text(text, encoding="utf-8")
        assert ("one 1.0", "one 1.0", times) == (install_reader(reader), install_reader(reader), len(installed))
    constraints.write_text("two==3\n", encoding="utf-8")
    assert ("one 1.0", 3) == (install_reader(reader), len(installed))
    pins.write_text("broken\n", encoding="utf-8")
    for times in (4, 5):
        with pytest.raises(NotInstalledError, match="broken"):
            install_reader(reader)
        assert times == len(installed)


def test_reason_names_the_missing_package_or_program(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the error of pip, or the name of the missing program."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    pins.write_text("winml-absent-package==1.0\n", encoding="utf-8")
    with pytest.raises(NotInstalledError, match="winml-absent-package"):
        install_reader(Reader("small", (), PACKAGES, ("winml-absent-package",)))
    with pytest.raises(NotInstalledError, match="winml-absent-program"):
        install_reader(Reader("small", (), programs=(("winml-absent-program",),)))


PINNED = [reader for reader in READERS if reader.installer not in (None, NEWEST)]


@pytest.mark.parametrize("reader", PINNED, ids=lambda reader: reader.name)
def test_versions_of_a_reader_are_exact(reader: Reader) -> None:
    """A version is pinned by the reader's file, by constraints.txt or, for node packages, by the lock file."""
    assert reader.installer is not None
    pins = readers.VERSIONS / reader.installer.file.format(reader.name)
    if pins.suffix == ".json":
        assert '"integrity"' in pins.read_text(encoding="utf-8")
        return
    lines = [line for line in pins.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    shared = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").lower() if lines[0].startswith("-c ") else ""
    requirements = [Requirement(line) for line in lines if not line.startswith("-c ")]
    assert {*reader.packages} <= {item.name for item in requirements}
    loose = [item.name for item in requirements if not str(item.specifier).startswith("==")]
    assert [] == [name for name in loose if not re.search(rf"^{name.lower()}==", shared, re.MULTILINE)]


def test_tests_of_readers_run_only_on_request() -> None:
    """Without `--reader` no test of a reader runs; with `--reader` no other test runs."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", "tests/unit/report/test_page.py"]
    runs = {}
    for options in ((), ("--reader=chromium",)):
        done = subprocess.run([*command, *options], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        runs[options] = {line for line in done.stdout.splitlines() if "::" in line}
    left_out, requested = runs.values()
    assert {"test_names_are_text"} <= {line.partition("::")[2] for line in requested}
    assert {"test_page_of_a_large_model_is_small"} <= {line.partition("::")[2] for line in left_out}
    assert set() == left_out & requested


def test_ci_runs_the_readers_after_the_tests() -> None:
    """CI uses the commands that contributors use."""
    run = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    assert ["make test", "make readers"] == re.findall(r"^make .*$", run, re.MULTILINE)
