"""Models of two parts: files, tags, metadata, builds and common failures."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import onnx
import pytest
import torch

from checkpoints import save_checkpoint
from graphs import run_onnx
from schemas import manifest_schema, sidecar_schema
from two_parts import Translator, export_loaded, translator, two_parts
from winml.modelkit import ExportResult, HTPExporter, WinMLExportConfig
from winml.modelkit.builds.build import BuildCache, identify_plan, run_build
from winml.modelkit.builds.config import parse_build_config
from winml.modelkit.builds.manifest_records import BuildResult, build_lines
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.builds.stage_walk import StageStore
from winml.modelkit.builds.stages import STAGES, Stage, StageOutcome, StageTask, export_outcomes
from winml.modelkit.errors import InternalError, OutputExistsError, UsageError, VerificationError, WinMLError
from winml.modelkit.export.loading import load_weightless
from winml.modelkit.export.table import export_document
from winml.modelkit.models.parts import LoadedModel
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model
from winml.modelkit.onnx.bundle import ModelBundle, PartFeed, read_part_description
from winml.modelkit.onnx.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.report.module_tree import TreeLimits
from winml.modelkit.report.terminal import console_for, print_document

NAMES = ("encoder", "decoder")
FEED = PartFeed("states", "decoder", "encoded")


@pytest.fixture(scope="module", params=["torchscript", "dynamo"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExportResult:
    """Both parts, exported by each exporter."""
    exporter = HTPExporter(WinMLExportConfig(exporter=request.param))
    folder = tmp_path_factory.mktemp("parts")
    return export_loaded(exporter, two_parts(), folder / "net.onnx", with_report=True)


def nodes_of(path: Path) -> dict[str, dict[str, str]]:
    """Return the metadata of each node."""
    return {node.name: {entry.key: entry.value for entry in node.metadata_props} for node in onnx.load(path).graph.node}


def test_each_part_has_its_files_only(exported: ExportResult) -> None:
    """Each part has model, sidecar and report, named after the output and the part."""
    folder = exported.parts[0].model_path.parent
    suffixes = (".onnx", "_htp_metadata.json", "_htp_export_report.md")
    assert {f"net_{name}{suffix}" for name in NAMES for suffix in suffixes} == {path.name for path in folder.iterdir()}
    for part in exported.parts:
        assert f"net_{part.name}.onnx" == part.files[0].path.name == part.model_path.name
        assert 3 == len(part.files)
    assert exported.files == (*exported.parts[0].files, *exported.parts[1].files)


def test_each_part_is_verified_and_wholly_tagged_with_paths_of_the_whole_model(exported: ExportResult) -> None:
    """The root is the whole model, and the modules around a part are in its tags."""
    for part in exported.parts:
        assert part.verification is not None
        assert part.verification.is_verified
        assert 100.0 == part.coverage.percent
        for name, keys in nodes_of(part.model_path).items():
            assert keys["winml.hierarchy.tag"].startswith("/Translator")
            assert name.startswith("/")
    encoder, decoder = (nodes_of(part.model_path) for part in exported.parts)
    tags = {
        keys["winml.hierarchy.module"]: keys["winml.hierarchy.tag"] for keys in (*encoder.values(), *decoder.values())
    }
    assert "/Translator/Body/Stack.encoder/Block.1" == tags["body.encoder.blocks.1"]
    assert "/Translator/Body/Stack.decoder/Block" == tags["body.decoder.block"]
    assert all(keys["winml.hierarchy.module"].startswith("body.encoder") for keys in encoder.values())
    assert all(name.startswith("/body/encoder") for name in encoder)
    assert all(keys["winml.hierarchy.module"].startswith("body.decoder") for keys in decoder.values())


def test_tags_of_parts_equal_the_whole_model(exported: ExportResult, tmp_path: Path) -> None:
    """An export of the whole model gives a module the same tag."""
    inputs = {"ids": torch.zeros(2, 5, dtype=torch.int64), "targets": torch.zeros(2, 3, dtype=torch.int64)}
    whole = HTPExporter(WinMLExportConfig(verify=False)).export(translator(), tmp_path / "whole.onnx", inputs)
    tags = {node.path: node.tag for node in whole.only_part.tree}
    for part in exported.parts:
        assert {node.path: node.tag for node in part.tree}.items() <= tags.items()


def test_files_record_their_part_and_feeds(exported: ExportResult) -> None:
    """Metadata, sidecar and the bundle of both files agree on part and feeds."""
    for part, feeds in zip(exported.parts, ((FEED,), ()), strict=True):
        record = {"name": part.name, "of": list(NAMES), "feeds": [feed.as_record() for feed in feeds]}
        texts = {entry.key: entry.value for entry in onnx.load(part.model_path).metadata_props}
        assert record == json.loads(texts["winml.part"])
        sidecar = json.loads(part.files[-1].path.read_text(encoding="utf-8"))
        jsonschema.validate(sidecar, sidecar_schema())
        assert record == sidecar["part"]
        assert ["schema_version", 2] == [next(iter(sidecar)), sidecar["schema_version"]]
        assert set(nodes_of(part.model_path)) == set(sidecar["nodes"])
    bundle = ModelBundle.read([part.model_path for part in reversed(exported.parts)])
    assert NAMES == tuple(bundle.paths)
    assert {"encoder": (FEED,), "decoder": ()} == bundle.feeds


def test_joined_parts_equal_the_whole_model(exported: ExportResult) -> None:
    """The decoder's file takes the output of the encoder's file."""
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 16, (2, 5)), rng.integers(0, 16, (2, 3))
    encoder, decoder = (part.model_path for part in exported.parts)
    states = run_onnx(encoder, {"ids": ids})["states"]
    answer = run_onnx(decoder, {"targets": targets, "encoded": states})["logits"]
    with torch.no_grad():
        expected = translator()(torch.from_numpy(ids), torch.from_numpy(targets))["logits"]
    assert np.allclose(expected.numpy(), answer, atol=1e-5)


def test_several_parts_are_listed_separately(exported: ExportResult) -> None:
    """Record and terminal list each part; access to a single part raises an error."""
    record = exported.as_record()
    assert list(NAMES) == [part["name"] for part in record["parts"]]
    assert "coverage" not in record
    assert 100.0 == record["parts"][1]["coverage"]["percent"]
    with pytest.raises(UsageError, match=r"2 \(encoder, decoder\)"):
        _ = exported.only_part.coverage
    stream = io.StringIO()
    print_document(export_document(exported, TreeLimits()), console_for(stream))
    for name in NAMES:
        assert f"part       {name}" in stream.getvalue()
        assert f"net_{name}.onnx" in stream.getvalue()
    assert 8 + 7 == len(exported.steps)


def test_model_is_restored(tmp_path: Path) -> None:
    """Forwards of the modules around a part are restored, too."""
    model = translator()
    export_loaded(HTPExporter(), two_parts(model), tmp_path / "net.onnx")
    assert not any("forward" in vars(module) for module in model.modules())


def _failing_second() -> LoadedModel:
    """Return the model with a decoder of random outputs."""
    model = translator()
    model.body.decoder.head.register_forward_hook(lambda _module, _inputs, output: torch.bernoulli(output.sigmoid()))
    return two_parts(model)


def test_failure_of_the_second_part_writes_no_file(tmp_path: Path) -> None:
    """Earlier files are unchanged, and the first part of the new set is not written either."""
    with pytest.raises(VerificationError):
        export_loaded(HTPExporter(), _failing_second(), tmp_path / "new" / "net.onnx")
    assert not (tmp_path / "new").exists()
    export_loaded(HTPExporter(), two_parts(translator(seed=1)), tmp_path / "net.onnx")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(VerificationError):
        export_loaded(HTPExporter(), _failing_second(), tmp_path / "net.onnx", overwrite=True)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("feed", [PartFeed("gone", "decoder", "encoded"), PartFeed("states", "decoder", "gone")])
def test_feed_between_unknown_tensors_is_an_internal_error(feed: PartFeed, tmp_path: Path) -> None:
    """The mistake is found before any file is written."""
    loaded = two_parts()
    encoder = dataclasses.replace(loaded.parts[0], feeds=(feed,))
    with pytest.raises(InternalError, match="gone"):
        export_loaded(
            HTPExporter(), dataclasses.replace(loaded, parts=(encoder, loaded.parts[1])), tmp_path / "net.onnx"
        )
    assert not any(tmp_path.iterdir())


def test_file_of_a_part_that_exists_is_refused(tmp_path: Path) -> None:
    """The refusal comes before tracing."""
    (tmp_path / "net_decoder.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"net_decoder\.onnx"):
        export_loaded(HTPExporter(), two_parts(), tmp_path / "net.onnx")
    assert ["net_decoder.onnx"] == [path.name for path in tmp_path.iterdir()]


def test_names_of_outputs_fit_no_model_of_several_parts(tmp_path: Path) -> None:
    """One list cannot describe two graphs."""
    config = WinMLExportConfig(output_tensors=(OutputTensorSpec(name="y", shape=(2,), dtype="float32"),))
    with pytest.raises(UsageError, match="encoder, decoder"):
        export_loaded(HTPExporter(config), two_parts(), tmp_path / "net.onnx")


def test_model_without_hierarchy_has_no_part_description(tmp_path: Path) -> None:
    """The part description is omitted like every other ``winml.*`` key."""
    result = export_loaded(HTPExporter(WinMLExportConfig(hierarchy=False)), two_parts(), tmp_path / "net.onnx")
    assert [None, None] == [read_part_description(part.model_path) for part in result.parts]


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_parts_of_a_checkpoint_without_weights_in_memory_are_exported_and_verified(
    exporter: Literal["torchscript", "dynamo"], tmp_path: Path
) -> None:
    """T5's stacks share a class and an embedding; weights are read from the checkpoint by paths of the whole model."""
    request = ModelRequest(str(save_checkpoint("t5", tmp_path / "checkpoint")), cache=False)
    loaded = load_weightless(resolve_model(request, needs_weights=True), request)
    assert loaded.only_part.stored is not None
    width = loaded.model.config.d_model
    ids = InputTensorSpec(name="input_ids", shape=(2, 6), dtype="int64", value_range=(0, 90))
    states = InputTensorSpec(name="encoder_hidden_states", shape=(2, 6, width), dtype="float32")
    parts = tuple(
        dataclasses.replace(
            loaded.only_part, name=name, path=name, inputs=inputs, forward_kwargs={"use_cache": False}, feeds=feeds
        )
        for name, inputs, feeds in (
            ("encoder", (ids,), (PartFeed("last_hidden_state", "decoder", "encoder_hidden_states"),)),
            ("decoder", (ids, states), ()),
        )
    )
    config = WinMLExportConfig(exporter=exporter)
    result = export_loaded(HTPExporter(config), dataclasses.replace(loaded, parts=parts), tmp_path / "t5.onnx")
    for part in result.parts:
        assert part.verification is not None
        assert part.verification.is_verified
        assert 100.0 == part.coverage.percent
        root = type(loaded.model).__name__
        tags = {node.tag for node in part.nodes}
        assert all(tag.startswith(f"/{root}/T5Stack.{part.name}") for tag in tags)


def stages_of(load: Callable[[], LoadedModel] = two_parts, calls: list[str] | None = None) -> tuple[Stage, ...]:
    """Return the stages of a build with an export of two parts; ``calls`` records their runs."""
    counted = [] if calls is None else calls

    def export(task: StageTask) -> tuple[StageOutcome, ...]:
        counted.append("export")
        assert task.plan.config.export is not None
        exporter = HTPExporter(task.plan.config.export, on_step=task.on_step, on_parts=task.claim_parts)
        return export_outcomes(task.plan, export_loaded(exporter, load(), task.output, overwrite=True))

    def optimize(task: StageTask) -> tuple[StageOutcome, ...]:
        counted.append(task.output.name)
        return STAGES[1].work(task)

    return (dataclasses.replace(STAGES[0], work=export), dataclasses.replace(STAGES[1], work=optimize), *STAGES[2:])


def plan_for(folder: Path, **optim: Any) -> BuildPlan:
    """Return the plan for a config file in place of the model; the file's content decides about reuse."""
    (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    config = parse_build_config({"optim": optim, "quant": None, "compile": None}, "")[0]
    return plan_build(config, ModelRequest(str(folder / "config.json"), random_weights=True))


BUILT = {
    "export_encoder.onnx", "export_encoder_htp_metadata.json", "optimized_encoder.onnx", "encoder.onnx",
    "encoder_htp_metadata.json", "decoder_htp_metadata.json",
    "export_decoder.onnx", "export_decoder_htp_metadata.json", "optimized_decoder.onnx", "decoder.onnx",
    "winml_build_config.json", "build_manifest.json",
}  # fmt: skip


def both_parts(*words: str) -> dict[str, list[str]]:
    """Return the same stage statuses for both parts."""
    return {name: list(words) for name in NAMES}


def statuses(result: BuildResult) -> dict[str, list[str]]:
    """Return part → statuses of export and optimize."""
    return {part.name: [stage.status for stage in part.stages[:2]] for part in result.manifest.parts}


def test_build_of_two_parts_reuses_the_stages_of_each(tmp_path: Path) -> None:
    """The second run reuses every stage; a changed option runs the optimizer alone, for both parts."""
    calls: list[str] = []
    out = tmp_path / "out"
    result = run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=stages_of(calls=calls))
    assert ["export", "optimized_encoder.onnx", "optimized_decoder.onnx"] == calls
    assert {path.name for path in out.iterdir()} == set(result.manifest.files) == BUILT
    record = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    jsonschema.validate(record, manifest_schema())
    assert [2, list(NAMES)] == [record["manifest_version"], [part["name"] for part in record["parts"]]]
    assert {name: out / f"{name}.onnx" for name in NAMES} == result.part_paths
    assert NAMES == tuple(ModelBundle.read(list(result.part_paths.values())).paths)
    before = {path.name: path.read_bytes() for path in out.glob("*.onnx")}
    again = run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=stages_of(calls=calls))
    assert 3 == len(calls)
    assert both_parts("reused", "reused") == statuses(again)
    assert before == {path.name: path.read_bytes() for path in out.glob("*.onnx")}
    other = run_build(plan_for(tmp_path, matmul_add_fusion=True), out, stages=stages_of(calls=calls))
    assert both_parts("reused", "run") == statuses(other)
    assert "encoder optimize" in dict(build_lines(other))


def test_damaged_file_of_one_part_reruns_its_stage(tmp_path: Path) -> None:
    """A damaged optimized file runs the optimizer of that part; a missing export runs the export of all parts."""
    out = tmp_path / "out"
    run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=stages_of())
    (out / "optimized_decoder.onnx").write_bytes(b"damaged")
    result = run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=stages_of())
    assert {"encoder": ["reused", "reused"], "decoder": ["reused", "run"]} == statuses(result)
    (out / "export_decoder.onnx").unlink()
    result = run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=stages_of())
    assert {"run"} == {statuses[0] for statuses in statuses(result).values()}
    assert any("export_decoder.onnx" in note for note in result.notes)


def test_build_failing_in_a_part_keeps_finished_parts(tmp_path: Path) -> None:
    """The next build continues with the failed part."""
    out = tmp_path / "out"

    def fail(task: StageTask) -> tuple[StageOutcome, ...]:
        if "decoder" in task.output.name:
            raise UsageError("no decoder today")
        return STAGES[1].work(task)

    export, optimize, *rest = stages_of()
    failing = (export, dataclasses.replace(optimize, work=fail), *rest)
    with pytest.raises(UsageError, match="no decoder"):
        run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=failing)
    assert "unfinished" == json.loads((out / "build_manifest.json").read_text())["status"]
    result = run_build(plan_for(tmp_path, gelu_fusion=True), out, stages=stages_of())
    assert {"encoder": ["reused", "reused"], "decoder": ["reused", "run"]} == statuses(result)


def test_parts_come_from_the_cache(tmp_path: Path) -> None:
    """A build in another folder links the results of export and optimizer of both parts."""
    plan = plan_for(tmp_path, gelu_fusion=True)
    cache = BuildCache(identify_plan(plan), StageStore(tmp_path / "cache"))
    run_build(plan, tmp_path / "one", stages=stages_of(), cache=cache)
    result = run_build(plan, tmp_path / "two", stages=stages_of(), cache=cache)
    assert both_parts("reused", "reused") == statuses(result)
    assert {"from the cache"} == {stage.reason for part in result.manifest.parts for stage in part.stages[:2]}


def test_foreign_file_with_the_name_of_a_part_is_refused(tmp_path: Path) -> None:
    """Part names are unknown before the load; the foreign file is unchanged, and no other file is left."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "decoder.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match="written by"):
        run_build(plan_for(tmp_path), tmp_path / "out", stages=stages_of())
    assert ["decoder.onnx"] == [path.name for path in (tmp_path / "out").iterdir()]
    assert "mine" == (tmp_path / "out" / "decoder.onnx").read_text()


def test_foreign_file_is_refused_by_a_build_that_reuses_the_export(tmp_path: Path) -> None:
    """A stage skipped in the first build claims its names later; the foreign file is unchanged."""
    out, plan = tmp_path / "out", plan_for(tmp_path)
    without = dataclasses.replace(plan, config=plan.config.model_copy(update={"optim": None}))
    run_build(without, out, stages=stages_of())
    (out / "optimized_encoder.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match="written by"):
        run_build(plan, out, stages=stages_of())
    assert "mine" == (out / "optimized_encoder.onnx").read_text()


def test_build_that_becomes_one_of_parts_leaves_no_file_of_the_earlier(tmp_path: Path) -> None:
    """``model.onnx`` of the earlier build is removed."""

    def one_part() -> LoadedModel:
        loaded = two_parts()
        encoder = dataclasses.replace(loaded.parts[0], name="model", feeds=())
        return dataclasses.replace(loaded, parts=(encoder,))

    out = tmp_path / "out"
    run_build(plan_for(tmp_path), out, stages=stages_of(one_part))
    assert (out / "model.onnx").exists()
    run_build(plan_for(tmp_path), out, stages=stages_of(), rebuild=True)
    assert BUILT == {path.name for path in out.iterdir()}


def test_files_of_different_models_are_refused(exported: ExportResult, tmp_path: Path) -> None:
    """A missing part, a duplicate part and a separate model are refused."""
    encoder, decoder = (part.model_path for part in exported.parts)
    copy = Path(shutil.copy(encoder, tmp_path / "copy.onnx"))
    for paths in ([encoder], [encoder, copy, decoder]):
        with pytest.raises(WinMLError, match="all parts"):
            ModelBundle.read(paths)
    model = onnx.load(decoder)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "alone.onnx")
    with pytest.raises(WinMLError, match="which part"):
        ModelBundle.read([encoder, tmp_path / "alone.onnx"])


def test_whole_model_of_the_parts_is_the_exported_model() -> None:
    """Module paths refer to the whole model."""
    loaded = two_parts()
    assert isinstance(loaded.model, Translator)
    assert loaded.parts[1].module is loaded.model.body.decoder
