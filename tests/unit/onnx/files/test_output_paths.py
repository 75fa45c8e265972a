"""Names and paths of the files of an export."""

from __future__ import annotations

from pathlib import Path

import pytest

from winml.modelkit.errors import OutputExistsError, UsageError, WriteError
from winml.modelkit.onnx.files.output_files import ExportPaths


def paths(output: Path, **options: bool) -> ExportPaths:
    """Name all files."""
    return ExportPaths.for_output(output, **{"with_sidecar": True, "with_report": True, **options})


def test_for_output_names_are_documented() -> None:
    """Sidecar and report have the stem of the model, the data file its whole name."""
    found = paths(Path("out/bert.v1.onnx"))
    assert Path("out/bert.v1_htp_metadata.json") == found.sidecar
    assert Path("out/bert.v1_htp_export_report.md") == found.report


def test_for_output_omits_unrequested_files() -> None:
    """A sidecar needs the hierarchy, a report needs a request."""
    found = paths(Path("model.onnx"), with_sidecar=False, with_report=False)
    assert (None, None) == (found.sidecar, found.report)


@pytest.mark.parametrize(("name", "better"), [("model.pt", "model.pt.onnx"), ("out/m.v2", "out/m.v2.onnx")])
def test_for_output_other_ending_is_refused_with_a_name(name: str, better: str) -> None:
    """The error suggests a valid name."""
    with pytest.raises(UsageError, match=r"in \.onnx") as caught:
        paths(Path(name))
    assert f"Name it {Path(better)}" == caught.value.hint


def test_for_output_without_an_ending_may_have_meant_a_folder() -> None:
    """The error suggests both names."""
    with pytest.raises(UsageError, match=r"in \.onnx") as caught:
        paths(Path("new"))
    assert all(str(name) in caught.value.hint for name in ("new.onnx", Path("new") / "model.onnx"))


@pytest.mark.parametrize("name", ["folder", "folder.onnx"])
def test_for_output_directory_is_refused_with_a_name(name: str, tmp_path: Path) -> None:
    """A directory is refused regardless of its name."""
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="directory") as caught:
        paths(tmp_path / name)
    assert str(tmp_path / name / "model.onnx") in caught.value.hint


@pytest.mark.parametrize("name", ["model.onnx", "model_htp_metadata.json", "model_htp_export_report.md"])
def test_refuse_existing_names_the_existing_file(name: str, tmp_path: Path) -> None:
    """Any existing file of the export is refused without ``overwrite``."""
    (tmp_path / name).write_text("earlier")
    with pytest.raises(OutputExistsError, match=name):
        paths(tmp_path / "model.onnx").refuse_existing(overwrite=False)
    paths(tmp_path / "model.onnx").refuse_existing(overwrite=True)


def test_refuse_existing_looks_only_at_files_that_will_be_written(tmp_path: Path) -> None:
    """An existing report does not matter if no report is written."""
    (tmp_path / "model_htp_export_report.md").write_text("earlier")
    paths(tmp_path / "model.onnx", with_report=False).refuse_existing(overwrite=False)


def test_refuse_existing_place_below_a_file_is_refused(tmp_path: Path) -> None:
    """A file cannot be a directory of the output."""
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        paths(tmp_path / "file" / "model.onnx").refuse_existing(overwrite=False)
