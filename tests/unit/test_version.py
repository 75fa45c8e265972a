"""The command that installs an extra, for every source that winml was installed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winml.modelkit.version import install_command, library_versions

METADATA = """Metadata-Version: 2.4
Name: winml-modelkit
Version: 1.0
Provides-Extra: eval
Requires-Dist: numpy>=2.0
Requires-Dist: datasets>=5.2; extra == 'eval'
"""


@pytest.mark.parametrize("is_there", [True, False])
def test_extra_is_named_with_the_folder_or_its_packages_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """The folder that winml was installed from may be deleted."""
    source = tmp_path / "source of winml"
    if is_there:
        source.mkdir()
        (source / "pyproject.toml").touch()
    information = tmp_path / "site" / "winml_modelkit-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(METADATA)
    (information / "direct_url.json").write_text(json.dumps({"dir_info": {}, "url": source.as_uri()}))
    monkeypatch.syspath_prepend(information.parent)
    expected = f'pip install "{source}[eval]"' if is_there else 'pip install "datasets>=5.2"'
    assert expected == install_command("eval")


def test_library_versions_omit_missing_packages() -> None:
    """The versions are keyed by distribution, not by module."""
    assert {"onnx-ir"} == set(library_versions(["onnx-ir", "no-such-distribution"]))
