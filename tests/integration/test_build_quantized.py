"""Builds with a precision: they end with that precision or with an error."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import onnx_ir as ir
import pytest

from checkpoints import save_checkpoint
from e2e.in_process import run_here
from e2e.warm_processes import run_warm
from e2e.workplace import TIMEOUT_S, WITH_A_LIMIT
from integration.test_parts import stages_of
from schemas import manifest_schema, sidecar_schema
from two_parts import export_loaded, two_parts
from winml.modelkit import BuildResult, build_hf_model, build_onnx_model
from winml.modelkit.builds.build import run_build
from winml.modelkit.builds.config import parse_build_config
from winml.modelkit.builds.plan import plan_build
from winml.modelkit.errors import UsageError, VerificationError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.file_quantization import Quantization
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.transform.graph_file import EXTERNAL_BYTES, GraphHandover


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for this test."""
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small BERT."""
    return save_checkpoint("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small Llama in bfloat16; most of its 3 MB are embeddings."""
    import torch

    from checkpoints import build_model

    folder = tmp_path_factory.mktemp("llama")
    build_model("llama", vocab_size=20_000, tie_word_embeddings=False).to(torch.bfloat16).save_pretrained(folder)
    return folder


def statuses(result: BuildResult) -> list[str]:
    """Return the status of each stage before the compile stage."""
    return [stage.status for stage in result.manifest.stages[:3]]


def operators(path: Path) -> Counter[str]:
    """Check a file and return its operator counts; every node has a tag."""
    onnx.checker.check_model(str(path))
    return tagged_operators(path)


def tagged_operators(path: Path) -> Counter[str]:
    """Return the operator counts of a file, for operators unknown to onnx.checker as well; every node has a tag."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        assert any(entry.key == "winml.hierarchy.tag" and entry.value for entry in node.metadata_props), node.name
    return Counter(node.op_type for node in model.graph.node)


def test_precision_is_built_and_another_one_reuses_the_export(bert: Path, tmp_path: Path) -> None:
    """Another precision reuses the export, and without a precision the float file is restored."""
    out = tmp_path / "out"
    first = build_hf_model(bert, out, precision="int8")
    assert ["run", "run", "run"] == statuses(first)
    jsonschema.validate(json.loads((out / "build_manifest.json").read_text("utf-8")), manifest_schema())
    assert (out / "quantized.onnx").read_bytes() == first.model_path.read_bytes()
    assert operators(first.model_path)["MatMulInteger"] > 10
    assert ["reused", "reused", "reused"] == statuses(build_hf_model(bert, out, precision="int8"))
    fewer = build_hf_model(bert, out, precision="int8", config={"quant": {"exclude": ["BertLayer"]}})
    assert ["reused", "reused", "run"] == statuses(fewer)
    stage = fewer.manifest.stage("quantize")
    assert stage is not None
    assert "options changed: quant.exclude" in stage.reason
    assert "excluded by BertLayer" in stage.summary
    assert operators(fewer.model_path)["MatMulInteger"] < 3
    plain = build_hf_model(bert, out)
    assert ["reused", "run", "skipped"] == statuses(plain)
    assert not (out / "quantized.onnx").exists()
    assert "MatMulInteger" not in operators(plain.model_path)
    few = build_hf_model(bert, out, precision="int4")
    assert ["reused", "run", "run"] == statuses(few)  # 4-bit weights have no default level
    assert operators(few.model_path)["MatMulNBits"] > 10


def test_written_config_builds_the_same_files(bert: Path, tmp_path: Path) -> None:
    """The config contains the resolved values, so no stage runs."""
    first = build_hf_model(bert, tmp_path / "out", precision="int4", config={"quant": {"exclude": ["BertPooler"]}})
    again = build_hf_model(bert, tmp_path / "out", config=tmp_path / "out" / "winml_build_config.json")
    assert (["skipped", "skipped", "run"], ["skipped", "skipped", "reused"]) == (statuses(first), statuses(again))


def test_result_below_the_threshold_fails_and_leaves_no_quantized_file(bert: Path, tmp_path: Path) -> None:
    """Both builds fail, by files and in memory; only the build by files keeps its export."""
    for precision, kept in (("int8", True), ("int4", False)):
        out = tmp_path / precision
        with pytest.raises(VerificationError, match="SQNR"):
            build_hf_model(bert, out, precision=precision, config={"quant": {"min_sqnr_db": 150.0}})
        assert kept == (out / "export.onnx").exists()
        assert not (out / "model.onnx").exists()
        assert not (out / "quantized.onnx").exists()


def test_onnx_file_is_built_to_few_bits(bert: Path, tmp_path: Path) -> None:
    """The export is skipped, and the stage refuses a file that is quantized already."""
    exported = build_hf_model(bert, tmp_path / "first", precision="int8").folder / "export.onnx"
    result = build_onnx_model(exported, tmp_path / "second", precision="int4")
    assert ["skipped", "run", "run"] == statuses(result)
    assert operators(result.model_path)["MatMulNBits"] > 10


def test_combined_quantization_and_optimization_has_one_file(bert: Path, tmp_path: Path) -> None:
    """The sidecar lists the nodes, the manifest names the tool of each stage, and the optimizer runs first."""
    out = tmp_path / "out"
    result = build_hf_model(bert, out, precision="int4", config={"optim": {"gelu_fusion": True}})
    assert ["skipped", "skipped", "run"] == statuses(result)
    assert {"quantized.onnx", "model.onnx"} == {path.name for path in out.glob("*.onnx*")}
    assert {path.name for path in out.iterdir()} == set(result.manifest.files)
    found = operators(result.model_path)
    assert (2, True) == (found["Gelu"], found["MatMulNBits"] > 10)
    sidecar = json.loads((out / "model_htp_metadata.json").read_text("utf-8"))
    jsonschema.validate(sidecar, sidecar_schema())
    names = {node.name for node in onnx.load(result.model_path).graph.node}
    assert names == set(sidecar["nodes"])
    export, _, stage = result.manifest.stages[:3]
    assert "memory" in export.reason
    assert (1, 100.0) == (stage.normalizations, stage.coverage.percent if stage.coverage else None)
    assert "SQNR" in stage.summary
    assert any(note.startswith("Compared with PyTorch: SQNR") for note in result.notes)
    changed = build_hf_model(bert, out, precision="int4")
    assert ["skipped", "skipped", "run"] == statuses(changed)
    assert "Gelu" not in operators(changed.model_path)


def test_parts_are_each_quantized(tmp_path: Path) -> None:
    """Both paths, by files and in memory, write two quantized graphs."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    config = parse_build_config({"quant": {"precision": "int8"}, "compile": None}, "")[0]
    plan = plan_build(config, ModelRequest(str(tmp_path / "config.json"), random_weights=True))
    built = run_build(plan, tmp_path / "out", stages=stages_of())
    assert {"encoder.onnx", "decoder.onnx"} == {path.name for path in built.part_paths.values()}
    assert all(operators(path)["MatMulInteger"] for path in built.part_paths.values())

    options = QuantizeOptions(precision="int4")
    handover = GraphHandover(lambda path, _model: [Quantization(path, options, {})], EXTERNAL_BYTES)
    result = export_loaded(HTPExporter(WinMLExportConfig(), handover=handover), two_parts(), tmp_path / "few.onnx")
    for part in result.parts:
        assert part.fidelity is not None
        assert part.fidelity.is_verified
        assert operators(part.model_path)["MatMulNBits"]


def test_weights_that_stay_in_the_checkpoint_are_compared_all_the_same(bert: Path, tmp_path: Path) -> None:
    """A dynamo trace without weights is compared as a whole; manifest and notes say how."""
    config = {"export": {"exporter": "dynamo"}}
    result = build_hf_model(bert, tmp_path / "out", precision="int4", config=config)
    stage = result.manifest.stage("quantize")
    assert stage is not None
    assert "weights streamed" in stage.summary
    assert any("Compared with PyTorch" in note and "weights streamed" in note for note in result.notes)


def test_wrong_weight_of_a_block_is_detected_with_streamed_weights(bert: Path, tmp_path: Path) -> None:
    """The error is planted between export and quantizer; the message names the module."""

    def works(path: Path, model: Any) -> list[Quantization]:
        name = next(name for name in model.graph.initializers if "layer.1.output.dense.weight" in name)
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(-value.const_value.numpy(), name=name)
        return [Quantization(path, QuantizeOptions(precision="int8", mode="weight-only"), {})]

    # Small files get external weights here, in pieces of a layer or less.
    handover = GraphHandover(works, external_from_bytes=1000, piece_bytes=4000)
    exporter = HTPExporter(WinMLExportConfig(exporter="dynamo"), handover=handover)
    with pytest.raises(VerificationError, match=r"module: \S*layer.1.output"):
        exporter.export_checkpoint(ModelRequest(str(bert)), tmp_path / "few.onnx")
    assert not [*tmp_path.glob("*.onnx")]


def _build_with_a_limit(llama: Path, folder: Path, limit: int, *more: str) -> tuple[int, str]:
    # Random weights suffer more than trained ones.
    sizes = ("--shape-config", '{"sequence_length": 8}', "--min-sqnr", "3")
    words = [str(limit), "build", "-m", str(llama), "-o", "out", "-q", *sizes, *more]
    code, _, err = run_warm(words, folder, os.environ, "", TIMEOUT_S, WITH_A_LIMIT)
    return code, err


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no POSIX limits on the size of a file")
def test_low_bit_build_writes_no_float_file(llama: Path, tmp_path: Path) -> None:
    """The system refuses larger files: 5 MB as float32, 2.7 MB as stored in the checkpoint, 0.9 MB in 4 bits."""
    code, err = _build_with_a_limit(llama, tmp_path, 1_700_000, "--precision", "int4")
    assert 0 == code, err
    model = tmp_path / "out" / "model.onnx"
    assert model.stat().st_size < 1_400_000
    # onnx.checker does not know the operators of the fused decoder, so ONNX Runtime judges.
    Session(model)
    counts = tagged_operators(model)
    assert 16 == counts["MatMulNBits"] + counts["GatherBlockQuantized"]
    code, err = _build_with_a_limit(llama, tmp_path, 1_700_000, "--precision", "int8", "--dtype", "fp32", "--rebuild")
    assert (1, True) == (code, "cannot write" in err)


def test_precision_without_the_stage_is_refused(bert: Path, tmp_path: Path) -> None:
    """The build fails instead of writing float32."""
    config: dict[str, Any] = {"quant": {"mode": "weight-only"}}
    with pytest.raises(UsageError, match="uint8"):
        build_hf_model(bert, tmp_path / "out", precision="uint8", config=config)
    assert not (tmp_path / "out").exists()


def test_folder_of_a_refused_build_names_the_stage_that_failed(bert: Path, tmp_path: Path) -> None:
    """Every command reports the failed stage until a build in the folder succeeds."""
    place = tmp_path / "built"
    refused = run_here("build", "-m", bert, "-o", place, "-p", "int8", "--min-sqnr", "190")
    assert 3 == refused.code, refused.err
    manifest = json.loads((place / "build_manifest.json").read_text(encoding="utf-8"))
    jsonschema.validate(manifest, manifest_schema())
    assert ("unfinished", "quantize") == (manifest["status"], manifest["failed"])
    assert manifest["reason"] in refused.err
    for verb, *options in (("run",), ("generate", "-p", "the"), ("perf",), ("inspect",)):
        outcome = run_here(verb, place, *options)
        assert 0 != outcome.code
        assert "failed in the stage quantize" in outcome.err
        assert manifest["reason"] in outcome.err
    assert 0 == run_here("build", "-m", bert, "-o", place, "-p", "int8", "--min-sqnr", "0").code
    manifest = json.loads((place / "build_manifest.json").read_text(encoding="utf-8"))
    assert ("done", None, None) == (manifest["status"], manifest["failed"], manifest["reason"])
