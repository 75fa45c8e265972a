"""Names in foreign files: they lead to no file outside of the folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import onnx
import pytest

from e2e.in_process import run_here
from module_chains import save_chain
from winml.modelkit.builds.manifest_records import BuildManifest, FileRecord, PartRecord

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need rights there")


@pytest.fixture(name="built")
def make_hostile_build(here: Path) -> Path:
    """A build folder with a link to a model outside."""
    (here / "built").mkdir()
    save_chain(here / "secret.onnx")
    if sys.platform != "win32":
        (here / "built" / "link.onnx").symlink_to(here / "secret.onnx")
    return here / "built"


def write_manifest(built: Path, *names: str) -> None:
    """Write the manifest of a finished build with these files, one for each part."""
    files = [FileRecord(name=name, size_bytes=0, sha256="") for name in names]
    parts = tuple(PartRecord(name=f"part{number}", model=(file,)) for number, file in enumerate(files))
    manifest = BuildManifest(status="done", files=(), parts=parts)
    (built / "build_manifest.json").write_text(json.dumps(manifest.as_record()), encoding="utf-8")


@pytest.mark.parametrize(
    "arguments",
    [("perf", "built"), ("compare", "secret.onnx", "built"), ("generate", "built", "-p", "x")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize(
    "names",
    [("../secret.onnx",), ("{here}/secret.onnx",), ("../secret.onnx", "../secret.onnx")]
    + ([] if sys.platform == "win32" else [("link.onnx",)]),
)
def test_manifest_that_leads_out_of_its_folder_is_refused(
    here: Path, built: Path, names: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    """The message has the manifest, the name and the expectation; the file outside is not opened."""
    names = tuple(name.format(here=here) for name in names)
    write_manifest(built, *names)
    refused = run_here(*arguments)
    assert (1, "") == (refused.code, refused.out), refused.err
    for words in ("build_manifest.json", repr(names[0]), "below built"):
        assert words in refused.err


def test_manifest_names_a_file_below_its_folder(here: Path, built: Path) -> None:
    """A layout may place a model in a subfolder."""
    (built / "onnx").mkdir()
    shutil.copy(here / "secret.onnx", built / "onnx" / "model.onnx")
    write_manifest(built, "onnx/model.onnx")
    assert 0 == run_here("perf", "built", "--iterations", "2").code


@needs_links
@pytest.mark.parametrize("verb", ["inspect", "perf", "optimize", "quantize", "compare", "diff", "extract", "compile"])
@pytest.mark.parametrize("data", ["link", "device", "pipe"])
def test_invalid_data_file_is_never_read(here: Path, verb: str, data: str) -> None:
    """A link out of the folder, a device and a pipe are refused at once, in one sentence."""
    (here / "model").mkdir()
    model = onnx.load(save_chain(here / "plain.onnx"))
    onnx.save(model, here / "model" / "model.onnx", save_as_external_data=True, size_threshold=0, location="data.bin")
    (here / "model" / "data.bin").replace(here / "elsewhere.bin")
    if data == "pipe":
        os.mkfifo(here / "model" / "data.bin")
    else:
        target = {"link": here / "elsewhere.bin", "device": Path("/dev/zero")}[data]
        (here / "model" / "data.bin").symlink_to(target)
    rest = {
        "compare": ("plain.onnx",),
        "diff": ("plain.onnx",),
        "extract": ("--module", "c", "-o", "out"),
        "compile": ("--ep", "cpu", "-o", "out.onnx"),
        "optimize": ("-o", "out.onnx"),
        "quantize": ("-o", "out.onnx"),
    }.get(verb, ())
    path = ("-m", "model/model.onnx") if verb in ("optimize", "quantize", "compile") else ("model/model.onnx",)
    done = run_here(verb, *path, *rest)
    assert (0 if verb == "inspect" else 1) == done.code, done.err
    assert "data.bin" in done.out + done.err
    assert "internal error" not in done.err


def test_checkpoint_named_in_a_file_is_never_fetched_from_the_hub(here: Path) -> None:
    """Without a value, ``--reference`` accepts a local checkpoint only; the command is refused before it writes."""
    model = onnx.load(save_chain(here / "model.onnx"))
    for name in ("owner/name", "\\\\server\\share", "//server/share/folder", "pack.module:factory"):
        del model.metadata_props[:]
        model.metadata_props.add(key="winml.model", value=json.dumps({"name_or_path": name}))
        onnx.save(model, here / "model.onnx")
        refused = run_here("generate", "model.onnx", "-p", "x", "--reference")
        assert (2, "") == (refused.code, refused.out), refused.err
        assert name in refused.err
        assert "--reference CHECKPOINT" in refused.err
