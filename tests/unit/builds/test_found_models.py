"""Models that a name means: an ONNX file, the model of a folder, or a model still to be exported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from winml.modelkit.builds.found_models import onnx_file, onnx_file_in, part_files
from winml.modelkit.builds.manifest_records import BuildManifest, FileRecord, PartRecord
from winml.modelkit.errors import InputError, ModelPathError
from winml.modelkit.metadata_keys import PART_KEY


def folder(path: Path, *names: str) -> Path:
    """Make a folder with empty files."""
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


def test_onnx_file_resolves_to_its_path(tmp_path: Path) -> None:
    """An ONNX file is found with an extension in any case; a missing file is an error."""
    folder(tmp_path / "a", "x.onnx", "y.ONNX")
    assert tmp_path / "a" / "x.onnx" == onnx_file(str(tmp_path / "a" / "x.onnx"))
    assert tmp_path / "a" / "y.ONNX" == onnx_file(str(tmp_path / "a" / "y.ONNX"))
    with pytest.raises(ModelPathError, match=r"z\.onnx:"):
        onnx_file(str(tmp_path / "a" / "z.onnx"))


@pytest.mark.parametrize("name", ["owner/name", "net.py:build", "missing/folder"])
def test_other_names_are_not_resolved_to_files(name: str) -> None:
    """Names of models on the Hub are not looked up here."""
    assert onnx_file(name) is None


def test_folder_of_a_build_is_its_model(tmp_path: Path) -> None:
    """The manifest makes it a build even beside a config; a build without its model is an error."""
    built = folder(tmp_path / "built", "model.onnx", "build_manifest.json", "config.json")
    assert built / "model.onnx" == onnx_file(str(built))
    assert tmp_path / "bare" / "model.onnx" == onnx_file(str(folder(tmp_path / "bare", "model.onnx")))
    with pytest.raises(ModelPathError, match=r"model\.onnx"):
        onnx_file(str(folder(tmp_path / "broken", "build_manifest.json")))


def test_folder_of_several_parts_lists_its_parts(tmp_path: Path) -> None:
    """The error for a finished build lists its models; an unfinished build has to be made again."""
    built = folder(tmp_path / "built", "encoder.onnx", "decoder.onnx")
    files = [FileRecord(name=f"{name}.onnx", size_bytes=0, sha256="") for name in ("encoder", "decoder")]
    parts = tuple(PartRecord(name=file.name.removesuffix(".onnx"), model=(file,)) for file in files)
    for status, words in (("done", r"several parts: encoder\.onnx, decoder\.onnx"), ("unfinished", "is unfinished")):
        manifest = BuildManifest(status=status, files=(), parts=parts)  # type: ignore[arg-type]
        (built / "build_manifest.json").write_text(json.dumps(manifest.as_record()))
        with pytest.raises(ModelPathError, match=words):
            onnx_file(str(built))


def test_folder_of_parts_and_another_model_is_refused_with_their_names(tmp_path: Path) -> None:
    """Neither the parts nor the other model are the model of the folder."""
    for name in ("encoder", "decoder", "vit"):
        model = onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> m (float[1] x) => (float[1] y) { y = Identity (x) }'
        )
        if name != "vit":
            part = {"name": name, "of": ["encoder", "decoder"], "feeds": []}
            onnx.helper.set_model_props(model, {PART_KEY: json.dumps(part)})
        onnx.save(model, tmp_path / f"{name}.onnx")
    with pytest.raises(ModelPathError, match=r"decoder\.onnx, encoder\.onnx.* vit\.onnx"):
        part_files(str(tmp_path))
    (tmp_path / "vit.onnx").unlink()
    assert ["encoder", "decoder"] == [*part_files(str(tmp_path))]


def test_checkpoint_that_holds_an_export_stays_a_checkpoint(tmp_path: Path) -> None:
    """The weights of the checkpoint are the model; the ONNX file beside them may be old."""
    assert onnx_file(str(folder(tmp_path / "checkpoint", "config.json", "model.onnx", "model.safetensors"))) is None


def test_export_beside_its_tokenizer_is_the_model_of_its_folder(tmp_path: Path) -> None:
    """A config without weights makes no checkpoint."""
    place = folder(tmp_path / "exported", "config.json", "tokenizer.json", "model.onnx")
    assert place / "model.onnx" == onnx_file(str(place))


def test_only_file_of_a_folder_without_weights_is_its_model(tmp_path: Path) -> None:
    """A user names an export freely; a folder with several ONNX files has no model."""
    place = folder(tmp_path / "exported", "config.json", "minilm.onnx")
    assert place / "minilm.onnx" == onnx_file(str(place)) == onnx_file_in(str(place))
    (place / "other.onnx").touch()
    assert onnx_file_in(str(place)) is None
    (place / "config.json").unlink()
    with pytest.raises(ModelPathError, match="a checkpoint") as raised:
        onnx_file_in(str(place))
    assert "minilm.onnx, other.onnx" in raised.value.hint


def test_names_without_model_folders_return_nothing(tmp_path: Path) -> None:
    """The caller of this function reports such a name."""
    checkpoint = folder(tmp_path / "checkpoint", "config.json", "model.onnx", "model.safetensors")
    empty = folder(tmp_path / "empty")
    for name in (str(checkpoint), str(empty), "owner/name", "x" * 5000, "zero\0byte", str(checkpoint / "model.onnx")):
        assert onnx_file_in(name) is None


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_model_linked_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    """A foreign folder opens no other file of the machine."""
    other = folder(tmp_path / "other", "model.onnx") / "model.onnx"
    built = folder(tmp_path / "built", "build_manifest.json")
    (built / "model.onnx").symlink_to(other)
    with pytest.raises(InputError, match=r"model\.onnx"):
        onnx_file(str(built))
