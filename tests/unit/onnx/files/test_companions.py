"""Copying of files beside a model, without changes to files of other owners."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from winml.modelkit.errors import InternalError
from winml.modelkit.onnx.files.companions import (
    Companions,
    earlier_companions,
    remove_companions,
    reserve_companions,
    settled_companions,
)
from winml.modelkit.onnx.files.output_files import OutputFiles


def place(source: Path, target: Path, *owned: str) -> Companions:
    """Copy all of a folder beside a model in another."""
    sources = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
    with OutputFiles() as files:
        companions = reserve_companions(files, target, dict(sorted(sources.items())), owned=owned)
        files.commit(overwrite=bool(owned))
    return companions


def fill(folder: Path, **texts: str) -> Path:
    """Write ``a`` as ``a.json``, ``b_c`` as ``b/c.json``."""
    for name, text in texts.items():
        path = folder / f"{name.replace('_', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_are_copied_with_their_folders(tmp_path: Path) -> None:
    """The names and the total size are counted."""
    source, target = fill(tmp_path / "from", config="{}", pool_config="[1]"), tmp_path / "to"
    companions = place(source, target)
    assert texts(source) == texts(target)
    assert (("config.json", "pool/config.json"), 5, ()) == (
        companions.names,
        companions.size_bytes,
        companions.notes,
    )


def test_foreign_file_stays_and_is_named(tmp_path: Path) -> None:
    """An equal file of another owner is neither replaced nor recorded as a companion."""
    source = fill(tmp_path / "from", config="new", vocab="same", merges="m")
    target = fill(tmp_path / "to", config="old", vocab="same")
    companions = place(source, target)
    assert (("merges.json",), ("config.json",)) == (companions.names, companions.foreign_names)
    assert {"config.json": "old", "vocab.json": "same", "merges.json": "m"} == texts(target)
    assert "config.json" in companions.notes[0]


def test_file_of_the_run_before_is_replaced(tmp_path: Path) -> None:
    """The sidecar lists the files of the earlier run."""
    source, target = fill(tmp_path / "from", config="new", vocab="same"), tmp_path / "to"
    fill(target, config="old", vocab="same")
    assert ("config.json", "vocab.json") == place(source, target, "config.json", "vocab.json").names
    assert texts(source) == texts(target)


def test_model_in_the_folder_of_its_checkpoint_owns_no_companion(tmp_path: Path) -> None:
    """A later export of another model must not replace the checkpoint's config."""
    folder = fill(tmp_path / "checkpoint", config="c")
    assert Companions() == place(folder, folder)


def test_earlier_companions_are_read_from_a_sidecar(tmp_path: Path) -> None:
    """A missing, old or damaged sidecar names no files."""
    sidecar = tmp_path / "model_htp_metadata.json"
    assert () == earlier_companions(sidecar)
    for text in ("{", "[]", '{"outputs": {}}', '{"outputs": {"companions": 3}}'):
        sidecar.write_text(text, encoding="utf-8")
        assert () == earlier_companions(sidecar)
    sidecar.write_text(json.dumps({"outputs": {"companions": ["config.json", 3]}}), encoding="utf-8")
    assert ("config.json",) == earlier_companions(sidecar)
    sidecar.write_text(json.dumps({"outputs": {"companions": ["../config.json", "C:x"]}}), encoding="utf-8")
    assert () == earlier_companions(sidecar)


def test_companion_changed_since_belongs_to_the_user(tmp_path: Path) -> None:
    """Digests in the sidecar identify changed files; sidecars of earlier versions have no digests."""
    companions = place(fill(tmp_path / "from", config="12", vocab="v"), tmp_path / "to")
    outputs = {"companions": list(companions.names), "companions_sha256": companions.sha256}
    sidecar = tmp_path / "to" / "model_htp_metadata.json"
    sidecar.write_text(json.dumps({"outputs": outputs}), encoding="utf-8")
    assert ("config.json", "vocab.json") == earlier_companions(sidecar)
    fill(tmp_path / "to", config="mine")
    (tmp_path / "to" / "vocab.json").unlink()
    assert ("vocab.json",) == earlier_companions(sidecar)


@pytest.mark.parametrize("name", ["../config.json", "..", "a/../../b", "/config.json", "C:config.json", "..\\b"])
def test_name_that_leads_out_is_never_written(tmp_path: Path, name: str) -> None:
    """Names that lead out of the folder are an internal error."""
    source = fill(tmp_path / "from", config="c") / "config.json"
    with OutputFiles() as files, pytest.raises(InternalError, match="leads out"):
        reserve_companions(files, tmp_path / "to", {name: source})


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_link_or_file_in_the_way_stays_and_is_named(tmp_path: Path) -> None:
    """Links are not followed and files in the way stay, even under names of an earlier run."""
    source = fill(tmp_path / "from", config="c", vocab="v", pool_config="p", dense_config="d", merges="m")
    target = fill(tmp_path / "to", kept="other")
    (target / "config.json").symlink_to(target / "kept.json")
    (target / "vocab.json").symlink_to(target / "missing.json")
    (target / "pool").write_text("a file", encoding="utf-8")
    fill(tmp_path / "elsewhere", x="x")
    (target / "dense").symlink_to(tmp_path / "elsewhere")
    companions = place(source, target, "config.json", "dense/config.json")
    assert (("merges.json",), {"config.json", "vocab.json", "pool/config.json", "dense/config.json"}) == (
        companions.names,
        set(companions.foreign_names),
    )
    assert {"kept.json": "other", "merges.json": "m", "pool": "a file", "config.json": "other"} == texts(target)
    assert {"x.json": "x"} == texts(tmp_path / "elsewhere")


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_that_appears_before_the_commit_stays(tmp_path: Path, overwrite: bool) -> None:
    """Such a file never fails the export; an equal file is not reported."""
    source, target = fill(tmp_path / "from", config="c", vocab="v", merges="mm"), tmp_path / "to"
    sources = {path.name: path for path in sorted(source.iterdir())}
    with OutputFiles() as files:
        companions = reserve_companions(files, target, sources)
        fill(target, config="other", vocab="v")
        files.commit(overwrite=overwrite)
    settled = settled_companions(companions, target, sources, files.gave_way)
    assert (("merges.json",), 2, ("config.json",)) == (settled.names, settled.size_bytes, settled.foreign_names)
    assert {"merges.json"} == settled.sha256.keys()
    assert {"config.json": "other", "vocab.json": "v", "merges.json": "mm"} == texts(target)


def test_obsolete_companions_are_removed_unless_another_model_needs_them(tmp_path: Path) -> None:
    """Their folders are removed too if they are empty."""
    folder = fill(tmp_path / "to", config="c", pool_config="p", dense_config="d", dense_own="o")
    model, other = folder / "model.onnx", folder / "other.onnx"
    names = ["config.json", "pool/config.json", "dense/config.json", "missing.json"]
    model.touch()
    other.touch()
    remove_companions(folder, names, [model])
    assert (folder / "config.json").is_file()
    remove_companions(folder, names, [model, other])
    assert {"model.onnx", "other.onnx", "dense/own.json"} == set(texts(folder))
    assert not (folder / "pool").exists()


@pytest.mark.parametrize("text", ["", '{"model": {"vocab": {"a": 1', "version https://git-lfs.github.com/spec/v1"])
def test_damaged_json_is_copied_and_named(tmp_path: Path, text: str) -> None:
    """A file that is cut off, or a pointer of Git LFS, is no tokenizer."""
    companions = place(fill(tmp_path / "from", config="{}\n", tokenizer=text), tmp_path / "to")
    assert ("tokenizer.json",) == companions.damaged
    assert ["tokenizer.json" in note for note in companions.notes] == [True]
    assert text == texts(tmp_path / "to")["tokenizer.json"]
