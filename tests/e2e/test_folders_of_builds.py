"""Verbs on the folder of a build: all parts, or one named part."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest

from checkpoints import save_checkpoint
from e2e.in_process import run_here

PARTS = ["encoder", "decoder"]
CROSS = "T5LayerCrossAttention"
FEW_RUNS = ("--iterations", "1", "--warmup", "0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two builds: ``t5`` of an encoder and a decoder, ``bert`` of one part; and both checkpoints."""
    place = tmp_path_factory.mktemp("place")
    for name in ("t5", "bert"):
        checkpoint = save_checkpoint(name, place / f"{name}-checkpoint")
        outcome = run_here("build", "-m", checkpoint, "-o", place / name, "--no-verify", "--no-optimize", "-q")
        assert 0 == outcome.code, outcome.err
    return place


def answer(*arguments: str | Path) -> dict[str, Any]:
    """Run a verb, and return its JSON."""
    outcome = run_here(*arguments, "-f", "json")
    assert 0 == outcome.code, outcome.err
    record: dict[str, Any] = json.loads(outcome.out)
    return record


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_quantized_folder_is_the_folder_of_a_build(place: Path, tmp_path: Path) -> None:
    """The parts keep their names, the config is copied, and other verbs accept the folder."""
    out = tmp_path / "int8"
    record = answer("quantize", "-m", place / "t5", "-o", out)
    assert PARTS == list(record["parts"])
    assert {} == record["unchanged"]
    assert {"config.json", "generation_config.json"} == set(record["companions"])
    assert {"encoder.onnx", "decoder.onnx", "build_manifest.json", *record["companions"]} == names(out)
    assert all(operators(out / f"{part}.onnx")["MatMulInteger"] for part in PARTS)
    compared = answer("compare", place / "t5", out)
    assert PARTS == list(compared["parts"])
    measured = answer("perf", out, *FEW_RUNS, "-q")
    assert PARTS == list(measured["parts"])
    built = answer("build", "-m", place / "t5-checkpoint", "-o", out, "--no-verify", "-q", "--rebuild")
    assert {*built["files"]} == names(out)
    assert not operators(out / "encoder.onnx")["MatMulInteger"]


def test_one_part_of_a_folder_is_changed_and_the_other_is_copied(place: Path, tmp_path: Path) -> None:
    """The other part is copied unchanged, and the summary says so."""
    out = tmp_path / "int8"
    record = answer("quantize", "-m", place / "t5", "-o", out, "--submodel", "decoder")
    assert (["decoder"], ["encoder"]) == (list(record["parts"]), list(record["unchanged"]))
    assert (out / "encoder.onnx").read_bytes() == (place / "t5" / "encoder.onnx").read_bytes()
    assert not (out / "encoder.onnx").samefile(place / "t5" / "encoder.onnx")
    outcome = run_here("quantize", "-m", place / "t5", "-o", out, "--submodel", "decoder", "--overwrite", "--no-verify")
    assert "unchanged" in next(line for line in outcome.out.splitlines() if line.startswith("encoder"))


def test_one_part_becomes_one_file(place: Path, tmp_path: Path) -> None:
    """An output file holds one part; several parts need a folder."""
    record = answer("quantize", "-m", place / "t5", "-o", tmp_path / "d.onnx", "--submodel", "decoder", "-q")
    assert str(place / "t5" / "decoder.onnx") == record["source"]
    assert {"d.onnx"} == names(tmp_path)
    outcome = run_here("quantize", "-m", place / "t5", "-o", tmp_path / "all.onnx")
    assert 2 == outcome.code
    assert "--submodel decoder" in outcome.err
    assert {"d.onnx"} == names(tmp_path)


def test_folder_of_one_part_is_quantized(place: Path, tmp_path: Path) -> None:
    """The record is that of the file plus the folder; sidecar and stages of the source are not copied."""
    record = answer("quantize", "-m", place / "bert", "-o", tmp_path / "out", "-q")
    assert str(tmp_path / "out" / "model.onnx") == record["model_path"]
    assert record["quantized"]
    assert str(tmp_path / "out") == record["folder"]
    assert {"model.onnx", "config.json", "build_manifest.json"} == names(tmp_path / "out")
    alone = answer("quantize", "-m", place / "bert", "-o", tmp_path / "alone.onnx", "-q")
    assert alone["quantized"] == record["quantized"]


@pytest.mark.parametrize("verb", [("optimize", "--level", "full"), ("compile", "--ep", "cpu")])
def test_folder_is_optimized_and_compiled(place: Path, tmp_path: Path, verb: tuple[str, ...]) -> None:
    """All parts are processed, and each is compared with its source."""
    out = tmp_path / "out"
    record = answer(*verb, "-m", place / "t5", "-o", out, "-q")
    assert PARTS == list(record["parts"])
    assert all(item["verification"] is not None for item in record["parts"].values())
    manifest = json.loads((out / "build_manifest.json").read_bytes())
    deployed = {file["name"] for file in manifest["deploy"]}
    assert {*deployed, "build_manifest.json"} == names(out) == {*manifest["files"]}
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in deployed:
        shutil.copy(out / name, alone / name)
    assert PARTS == list(answer("compare", place / "t5", alone)["parts"])


def test_steps_and_notes_name_their_part(place: Path, tmp_path: Path) -> None:
    """Steps are named on stderr during the run, notes on stdout in the summary."""
    outcome = run_here("optimize", "-m", place / "t5", "-o", tmp_path / "out", "--no-verify")
    assert 0 == outcome.code
    assert all(any(f"] {part}: " in line for line in outcome.err.splitlines()) for part in PARTS)
    assert set(PARTS) <= set(outcome.out.splitlines())


def test_selector_counts_for_the_parts_with_its_modules(place: Path, tmp_path: Path) -> None:
    """Other parts are quantized as a whole, or not at all with ``--include``.

    A selector without any match is refused.
    """
    first = "encoder.block.0.**"
    excluded = answer("quantize", "-m", place / "t5", "-o", tmp_path / "a", "--exclude", first, "-q")
    left = {part: sum(item["left"].values()) for part, item in excluded["parts"].items()}
    assert left["encoder"]
    assert not left["decoder"]
    included = answer("quantize", "-m", place / "t5", "-o", tmp_path / "b", "--include", first, "-q")
    assert (["encoder"], ["decoder"]) == (list(included["parts"]), list(included["unchanged"]))
    outcome = run_here("quantize", "-m", place / "t5", "-o", tmp_path / "c", "--exclude", "Nothing")
    assert 2 == outcome.code
    assert "Nothing" in outcome.err
    assert {"a", "b"} == names(tmp_path)


def test_failed_part_leaves_the_folder_unchanged(place: Path, tmp_path: Path) -> None:
    """The folder keeps its earlier files, or is not created: no part is put in place alone."""
    arguments = ("quantize", "-m", place / "t5", "-o", tmp_path / "out", "-q")
    assert 3 == run_here(*arguments, "--min-sqnr", "200").code
    assert not (tmp_path / "out").exists()
    assert 0 == run_here(*arguments).code
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert 2 == run_here(*arguments).code  # the folder exists
    assert 3 == run_here(*arguments, "--overwrite", "--min-sqnr", "200").code
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_folder_is_not_overwritten_by_itself_or_a_file(place: Path, tmp_path: Path) -> None:
    """A checkpoint is no build, and a part must exist."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    for arguments in (
        ("-m", place / "t5", "-o", place / "t5", "--overwrite"),
        ("-m", place / "t5", "-o", tmp_path / "file"),
        ("-m", place / "bert-checkpoint", "-o", tmp_path / "out"),
        ("-m", place / "t5", "-o", tmp_path / "out", "--submodel", "vision"),
        ("-m", place / "t5" / "encoder.onnx", "-o", tmp_path / "out.onnx", "--submodel", "encoder"),
        ("-m", place / "t5", "--sensitivity"),
    ):
        outcome = run_here("quantize", *arguments)
        assert 2 == outcome.code, outcome.err
    assert {"file"} == names(tmp_path)


def test_check_looks_at_every_part(place: Path) -> None:
    """A named part is checked alone."""
    checked = answer("optimize", "-m", place / "t5", "--check", "--level", "full")
    assert PARTS == list(checked["parts"])
    one = answer("optimize", "-m", place / "t5", "--check", "--level", "full", "--submodel", "encoder")
    assert one == {"schema_version": one["schema_version"], **checked["parts"]["encoder"]}


def test_inspect_shows_every_part(place: Path) -> None:
    """A named part is shown alone."""
    inspected = answer("inspect", place / "t5")
    assert PARTS == list(inspected["parts"])
    decoder = {"schema_version": inspected["schema_version"], **inspected["parts"]["decoder"]}
    assert decoder == answer("inspect", place / "t5", "--submodel", "decoder")
    assert decoder == answer("inspect", place / "t5" / "decoder.onnx")
    shown = run_here("inspect", place / "t5", "--module", "decoder.block.0").out.splitlines()
    assert set(PARTS) & set(shown)


def test_extract_cuts_modules_out_of_every_part(place: Path, tmp_path: Path) -> None:
    """Each part gets a folder of its own; a part without the module gets none."""
    record = answer("extract", place / "t5", "--module", CROSS, "-o", tmp_path / "out", "-q")
    assert PARTS == list(record["parts"])
    assert all((tmp_path / "out" / part / "extract_manifest.json").is_file() for part in PARTS)
    only = answer("extract", place / "t5", "--module", "encoder.block.0.layer.0", "-o", tmp_path / "only", "-q")
    assert ["encoder"] == list(only["parts"])
    one = answer("extract", place / "t5", "--submodel", "decoder", "--module", CROSS, "-o", tmp_path / "one", "-q")
    assert {module["file"] for module in record["parts"]["decoder"]["modules"]} == {
        module["file"] for module in one["modules"]
    }
    assert (tmp_path / "one" / "extract_manifest.json").is_file()


def test_perf_measures_modules_of_every_part(place: Path) -> None:
    """Parts without the modules are left out; an option for a single graph needs ``--submodel``."""
    measured = answer("perf", place / "t5", "--module", CROSS, *FEW_RUNS, "-q")
    assert PARTS == list(measured["parts"])
    only = answer("perf", place / "t5", "--module", "encoder.block.0.layer.0", *FEW_RUNS, "-q")
    assert ["encoder"] == list(only["parts"])
    one = answer("perf", place / "t5", "--submodel", "encoder", "--by-module", *FEW_RUNS, "-q")
    assert one["by_module"] is not None
    refused = run_here("perf", place / "t5", "--by-module", *FEW_RUNS)
    assert 2 == refused.code
    assert "--submodel" in refused.err
