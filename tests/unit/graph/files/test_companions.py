"""Are files put beside a model without touching those of anybody else?"""

from __future__ import annotations

import json
from pathlib import Path

from winml.modelkit.graph.files.companions import Companions, earlier_companions, reserve_companions
from winml.modelkit.graph.files.output_files import OutputFiles


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
    """And counted."""
    source, target = fill(tmp_path / "from", config="12", pool_config="345"), tmp_path / "to"
    companions = place(source, target)
    assert texts(source) == texts(target)
    assert (("config.json", "pool/config.json"), 5, ()) == (
        companions.names,
        companions.size_bytes,
        companions.notes,
    )


def test_file_of_somebody_else_stays_and_is_named(tmp_path: Path) -> None:
    """What is equal is no matter, and does not become ours either."""
    source = fill(tmp_path / "from", config="new", vocab="same", merges="m")
    target = fill(tmp_path / "to", config="old", vocab="same")
    companions = place(source, target)
    assert (("merges.json",), ("config.json",)) == (companions.names, companions.kept)
    assert {"config.json": "old", "vocab.json": "same", "merges.json": "m"} == texts(target)
    assert "config.json" in companions.notes[0]


def test_file_of_the_run_before_is_replaced(tmp_path: Path) -> None:
    """Which ones these are is said by the sidecar."""
    source, target = fill(tmp_path / "from", config="new", vocab="same"), tmp_path / "to"
    fill(target, config="old", vocab="same")
    assert ("config.json", "vocab.json") == place(source, target, "config.json", "vocab.json").names
    assert texts(source) == texts(target)


def test_model_in_the_folder_of_its_checkpoint_owns_nothing(tmp_path: Path) -> None:
    """A later export of another model must not replace the checkpoint's config."""
    folder = fill(tmp_path / "checkpoint", config="c")
    assert Companions() == place(folder, folder)


def test_earlier_companions_are_read_from_a_sidecar(tmp_path: Path) -> None:
    """A missing, old or damaged one names none."""
    sidecar = tmp_path / "model_htp_metadata.json"
    assert () == earlier_companions(sidecar)
    for text in ("{", "[]", '{"outputs": {}}', '{"outputs": {"companions": 3}}'):
        sidecar.write_text(text, encoding="utf-8")
        assert () == earlier_companions(sidecar)
    sidecar.write_text(json.dumps({"outputs": {"companions": ["config.json", 3]}}), encoding="utf-8")
    assert ("config.json",) == earlier_companions(sidecar)
