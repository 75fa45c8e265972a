"""``winml sys``, as a user runs it for a bug report."""

from __future__ import annotations

import getpass
import json
import platform
from importlib.metadata import version
from pathlib import Path

import onnxruntime as ort
import pytest

from e2e.workplace import Workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace that stays empty."""
    root = tmp_path_factory.mktemp("sys")
    for name in ("here", "home", "temporary"):
        (root / name).mkdir()
    return Workplace(root)


def test_json_has_versions_providers_devices_and_memory(place: Workplace) -> None:
    """The versions are those of the installed metadata."""
    outcome = place.winml("sys", "--format", "json")
    assert (0, "") == (outcome.code, outcome.err)
    found = json.loads(outcome.out)
    for name in ("torch", "onnx", "onnxruntime", "transformers"):
        assert version(name) == found["versions"][name]
    assert platform.python_version() == found["versions"]["python"]
    present = {entry["name"] for entry in found["execution_providers"] if entry["is_present"]}
    assert set(ort.get_available_providers()) == present
    assert {"cpu"} <= {entry["kind"] for entry in found["devices"]}
    assert found["memory"]["total_bytes"] >= found["memory"]["available_bytes"] > 0
    assert found["processor"]["logical_cores"] >= 1


def test_table_has_install_commands_of_missing_providers(place: Workplace) -> None:
    """Each present provider has a line, and each missing provider the package that installs it."""
    outcome = place.winml("sys")
    assert (0, "") == (outcome.code, outcome.err)
    assert version("torch") in outcome.out
    assert "cpu (CPUExecutionProvider)" in outcome.out
    assert {} == place.files()


@pytest.mark.parametrize("arguments", [(), ("--format", "json")])
def test_sys_output_contains_no_path_or_user_name(place: Workplace, arguments: tuple[str, ...]) -> None:
    """The output can be published anywhere."""
    out = place.winml("sys", *arguments).out
    secrets = {str(Path.home()), str(place.root), platform.node()}
    # A user called as a library is would be found everywhere.
    secrets |= {getpass.getuser()} if len(getpass.getuser()) > 4 else set()
    assert [] == [secret for secret in secrets if secret and secret in out]
    assert "site-packages" not in out
