"""Messages of an interrupted command about the files it left."""

from __future__ import annotations

from pathlib import Path

import pytest

from winml.modelkit.cli._endings import resuming_words
from winml.modelkit.file_names import unfinished_work_path
from winml.modelkit.onnx.files import named_paths
from winml.modelkit.onnx.files.resumable_results import write_atomically


def test_state_of_a_search_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is named however deep its first file lies."""
    monkeypatch.setattr(named_paths, "_committed", type(named_paths._committed)())
    monkeypatch.chdir(tmp_path)
    folder = unfinished_work_path(tmp_path / "out.onnx")
    (folder / "layers" / "walk").mkdir(parents=True)
    assert "" == resuming_words()
    write_atomically(folder / "layers" / "walk" / "state.json", "{}")
    assert folder.name in resuming_words().split(";")[0].split()
