"""Moves of files that another program has open for a moment, as on Windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from winml.modelkit.errors import WriteError
from winml.modelkit.onnx.files import moving
from winml.modelkit.onnx.files.moving import move_file
from winml.modelkit.onnx.files.output_files import OutputFiles


class _HeldError(PermissionError):
    """Windows' error for replacing a file that a program has open."""

    winerror = 5


@pytest.fixture(params=[5, 32, 33])
def refusals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Targets that cannot be replaced: each entry refuses one attempt, with the error code of the parameter."""
    monkeypatch.setattr(moving, "_PAUSES", (0.0,) * len(moving._PAUSES))
    monkeypatch.setattr(_HeldError, "winerror", request.param)
    refusals: list[Path] = []
    replace = Path.replace

    def refuse(source: Path, target: Path) -> Path:
        if target in refusals:
            refusals.remove(target)
            raise _HeldError(13, "Access is denied", str(source))
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", refuse)
    return refusals


def test_file_held_for_a_moment_is_replaced(tmp_path: Path, refusals: list[Path]) -> None:
    """A virus scanner that reads the earlier file delays the move and does not fail it."""
    source, target = tmp_path / "new", tmp_path / "model.onnx"
    source.write_text("new")
    target.write_text("earlier")
    refusals += [target, target]
    move_file(source, target)
    assert (target.read_text(), source.exists(), refusals) == ("new", False, [])


def test_file_that_stays_open_is_reported(tmp_path: Path, refusals: list[Path]) -> None:
    """The error says that another program has the file open; the earlier file is unchanged."""
    target = tmp_path / "model.onnx"
    target.write_text("earlier")
    refusals += [target] * 100
    with OutputFiles() as files:
        files.reserve(target).write_text("new")
        with pytest.raises(WriteError, match="another program has it open"):
            files.commit()
    assert target.read_text() == "earlier"


@pytest.mark.parametrize("refusals", [32], indirect=True)
def test_failed_undo_does_not_hide_the_reason(
    tmp_path: Path, refusals: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither moves back nor removals work: the error names the file that could not be replaced."""
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    first.write_text("earlier")
    second.write_text("earlier")

    def refuse_removal(path: Path, *, missing_ok: bool = False) -> None:
        raise _HeldError(13, "Access is denied", str(path))

    with OutputFiles() as files:
        for target in (first, second):
            staged = files.reserve(target)
            staged.write_text("new")
            refusals += [staged] * 100
        refusals += [first] * 100  # the file reserved first is moved last
        monkeypatch.setattr(Path, "unlink", refuse_removal)
        with pytest.raises(WriteError, match=r"first\.onnx"):
            files.commit()
    assert "earlier" == first.read_text()


@pytest.mark.parametrize("refusals", [5], indirect=True)
def test_denied_new_file_is_not_repeated(tmp_path: Path, refusals: list[Path]) -> None:
    """Where no file is, access is denied for good."""
    source, target = tmp_path / "new", tmp_path / "model.onnx"
    source.write_text("new")
    refusals += [target, target]
    with pytest.raises(_HeldError):
        move_file(source, target)
    assert refusals == [target]
