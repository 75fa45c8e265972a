"""Repeated and interrupted builds: stages run or reused, and validity of every file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnxruntime.quantization import quantize_dynamic

from checkpoints import save_checkpoint
from e2e.warm_processes import run_warm
from e2e.workplace import TIMEOUT_S
from graphs import run_onnx
from schemas import manifest_schema, sidecar_schema
from winml.modelkit import BuildResult, InputTensorSpec, build_hf_model, build_onnx_model
from winml.modelkit.builds.build import run_build
from winml.modelkit.builds.build_model import exported_model
from winml.modelkit.builds.config import WinMLBuildConfig, parse_build_config
from winml.modelkit.builds.plan import BuildPlan, plan_build
from winml.modelkit.builds.planned_build import planned_build
from winml.modelkit.builds.stages import STAGES, StageOutcome, StageTask
from winml.modelkit.errors import ConfigError, InputError, OutputExistsError, StageError, UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.file_names import is_data_of
from winml.modelkit.models.inputs.options import parse_shape_config
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest
from winml.modelkit.ort.feeds import make_feeds

KEYS = ("winml.hierarchy.tag", "winml.hierarchy.depth")
FIXED = {"dynamic_batch": False}
FUSIONS = {
    "export": FIXED, "optim": {"gelu_fusion": True, "matmul_add_fusion": True}, "quant": None, "compile": None,
}  # fmt: skip
PLAIN = {"export": FIXED, "optim": {"level": "none"}, "quant": None, "compile": None}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for this test."""
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small BERT."""
    return save_checkpoint("bert", tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def first(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """A build with fusions."""
    return build_hf_model(str(bert), tmp_path_factory.mktemp("first") / "out", config=FUSIONS)


@pytest.fixture
def out(first: BuildResult, tmp_path: Path) -> Path:
    """A copy of the first build, for further builds."""
    return Path(shutil.copytree(first.folder, tmp_path / "out"))


def statuses(result: BuildResult) -> dict[str, str]:
    """Return stage name → status."""
    return {stage.name: stage.status for stage in result.manifest.stages}


def reason(result: BuildResult, stage: str) -> str:
    """Return the reason why a stage was run again or skipped."""
    found = result.manifest.stage(stage)
    assert found is not None
    return found.reason


def check_artifacts(folder: Path) -> dict[str, Counter[str]]:
    """Check every ONNX file of a build; return file name → operator counts."""
    found = {}
    for path in sorted(folder.glob("*.onnx")):
        onnx.checker.check_model(str(path))
        model = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            keys = Counter(entry.key for entry in node.metadata_props)
            assert (1, 1) == (keys[KEYS[0]], keys[KEYS[1]]), f"{path.name}: {node.name}"
        found[path.name] = Counter(node.op_type for node in model.graph.node)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder with its content."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_build_leaves_a_model_per_stage_the_config_and_a_manifest(first: BuildResult) -> None:
    """The manifest lists exactly the files in the folder, satisfies its schema, and counts one normalization."""
    names = {path.name for path in first.folder.iterdir()}
    assert {"export.onnx", "optimized.onnx", "model.onnx", "export_htp_metadata.json"} < names
    record = json.loads((first.folder / "build_manifest.json").read_text(encoding="utf-8"))
    jsonschema.validate(record, manifest_schema())
    assert names == set(record["files"])
    assert ("done", 1) == (record["status"], record["normalizations"])
    assert {"export": "run", "optimize": "run", "quantize": "skipped", "compile": "skipped"} == statuses(first)
    assert (first.folder / "model.onnx").read_bytes() == (first.folder / "optimized.onnx").read_bytes()
    for stage in record["parts"][0]["stages"][:2]:
        assert stage["seconds"] > 0
        assert stage["peak_memory_bytes"] > 10_000_000
        assert 100.0 == stage["coverage"]["percent"]


def remove_node_counts(module: dict[str, Any]) -> dict[str, Any]:
    """Return the module tree without node counts, which differ between the files of one model."""
    children = [remove_node_counts(child) for child in module.get("children", ())]
    return {**{key: value for key, value in module.items() if key != "nodes"}, "children": children}


def test_sidecar_of_the_result_describes_its_nodes(first: BuildResult) -> None:
    """The sidecar satisfies its schema, lists every node of model.onnx and has the digest of that file."""
    sidecar = json.loads((first.folder / "model_htp_metadata.json").read_text(encoding="utf-8"))
    jsonschema.validate(sidecar, sidecar_schema())
    model = onnx.load(first.folder / "model.onnx")
    assert sorted(node.name for node in model.graph.node) == sorted(sidecar["nodes"])
    assert len(model.graph.node) == sidecar["statistics"]["node_count"]
    assert hashlib.sha256((first.folder / "model.onnx").read_bytes()).hexdigest() == sidecar["model_sha256"]
    assert "model.onnx" == sidecar["outputs"]["files"][0]["name"]
    exported = json.loads((first.folder / "export_htp_metadata.json").read_text(encoding="utf-8"))
    assert exported["model_sha256"] != sidecar["model_sha256"]
    assert remove_node_counts(exported["modules"]) == remove_node_counts(sidecar["modules"])


def test_sidecar_of_another_model_is_not_used(bert: Path, out: Path) -> None:
    """A sidecar with the digest of another file is left out, with a note."""
    sidecar = json.loads((out / "export_htp_metadata.json").read_text(encoding="utf-8"))
    text = json.dumps({**sidecar, "model_sha256": "0" * 64})
    (out / "export_htp_metadata.json").write_text(text, encoding="utf-8")
    # The manifest has the digest of the changed sidecar, as if one program had written both.
    manifest = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    record = manifest["parts"][0]["stages"][0]["files"][1]
    assert "export_htp_metadata.json" == record["name"]
    record.update(size_bytes=len(text.encode()), sha256=hashlib.sha256(text.encode()).hexdigest())
    manifest["parts"][0]["sidecar"] = None
    (out / "build_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    result = build_hf_model(str(bert), out, config=FUSIONS)
    assert any("export.onnx" in note for note in result.notes)
    assert not (out / "model_htp_metadata.json").exists()


def test_build_of_the_shape_of_bert_large_fuses_and_keeps_one_tag_per_node(tmp_path: Path) -> None:
    """Gelu and MatMul + Add are fused, onnx accepts every file, and the last stage writes the deployed file."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 1}
    checkpoint = save_checkpoint("bert", tmp_path / "checkpoint", **sizes)
    result = build_hf_model(str(checkpoint), tmp_path / "out", config=FUSIONS)
    operators = check_artifacts(result.folder)
    assert operators["model.onnx"] == operators["optimized.onnx"]
    assert (1, 0) == (operators["model.onnx"]["Gelu"], operators["export.onnx"]["Gelu"])
    assert operators["model.onnx"]["Gemm"] > operators["export.onnx"]["Gemm"]
    assert ["model.onnx"] == [file.name for file in result.manifest.model]
    assert not any(is_data_of("optimized.onnx", name) for name in result.manifest.files)
    feeds = make_feeds([InputTensorSpec.model_validate(spec) for spec in _inputs(result)], seed=5)
    expected, actual = (run_onnx(result.folder / name, feeds) for name in ("export.onnx", "model.onnx"))
    assert all(np.allclose(expected[name], actual[name], atol=1e-4) for name in expected)


def _inputs(result: BuildResult) -> list[dict[str, Any]]:
    record = json.loads((result.folder / "winml_build_config.json").read_text(encoding="utf-8"))
    return [{**spec, "shape": tuple(spec["shape"]), "value_range": tuple(spec["value_range"])}
            for spec in record["export"]["input_tensors"]]  # fmt: skip


def test_build_without_possible_fusions_keeps_graph_and_tags(tmp_path: Path) -> None:
    """The fusions of the other test are requested, but nothing in the graph matches."""
    checkpoint = save_checkpoint("resnet", tmp_path / "checkpoint")
    result = build_hf_model(str(checkpoint), tmp_path / "out", config=FUSIONS)
    operators = check_artifacts(result.folder)
    assert operators["export.onnx"] == operators["model.onnx"]


def test_build_without_optimization_links_the_file(bert: Path, tmp_path: Path) -> None:
    """An empty section and a valid stamp mean a single normalization; the file is the same under another name."""
    result = build_hf_model(str(bert), tmp_path / "out", config=PLAIN)
    assert 1 == result.manifest.normalizations
    assert "already normalized" == next(stage.summary for stage in result.manifest.stages if stage.name == "optimize")
    assert (tmp_path / "out" / "model.onnx").samefile(tmp_path / "out" / "export.onnx")


def test_second_build_reuses_every_stage_and_changes_no_model(bert: Path, out: Path) -> None:
    before = contents(out)
    result = build_hf_model(str(bert), out, config=FUSIONS)
    assert {"export": "reused", "optimize": "reused", "quantize": "skipped", "compile": "skipped"} == statuses(result)
    after = contents(out)
    assert before.keys() == after.keys()
    assert {name: before[name] for name in before if name != "build_manifest.json"} == {
        name: after[name] for name in after if name != "build_manifest.json"
    }


def rewrite_as_version_1(folder: Path) -> dict[str, Any]:
    """Rewrite the manifest of a build in version 1."""
    path = folder / "build_manifest.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    (part,) = record.pop("parts")
    earlier = {**record, "manifest_version": 1, "model": part["model"], "stages": part["stages"]}
    path.write_text(json.dumps(earlier, indent=2), encoding="utf-8")
    return earlier


def test_build_of_the_first_manifest_version_is_reused(bert: Path, out: Path) -> None:
    """No stage runs, no model changes, and the manifest has the present version afterwards."""
    earlier = rewrite_as_version_1(out)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "build_manifest.json"}
    result = build_hf_model(str(bert), out, config=FUSIONS)
    assert {"export": "reused", "optimize": "reused", "quantize": "skipped", "compile": "skipped"} == statuses(result)
    assert () == result.notes
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.name != "build_manifest.json"}
    record = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    assert (2, ["model"]) == (record["manifest_version"], [part["name"] for part in record["parts"]])
    assert earlier["model"] == record["parts"][0]["model"]


def test_changed_optimizer_flag_runs_from_optimize_on(bert: Path, out: Path) -> None:
    """The export is reused; the reason names the flag."""
    result = build_hf_model(str(bert), out, config={**FUSIONS, "optim": {"gelu_fusion": True}})
    assert ("reused", "run") == (statuses(result)["export"], statuses(result)["optimize"])
    assert "options changed: optim.matmul_add_fusion True → none" == reason(result, "optimize")


def test_changed_weights_rerun_all_stages(bert: Path, out: Path, tmp_path: Path) -> None:
    """The content of the checkpoint counts, not only its name."""
    checkpoint = Path(shutil.copytree(bert, tmp_path / "checkpoint"))
    build_hf_model(str(checkpoint), tmp_path / "there", config=PLAIN)
    save_checkpoint("bert", checkpoint, seed=1)
    result = build_hf_model(str(checkpoint), tmp_path / "there", config=PLAIN)
    assert {"run"} == {statuses(result)[name] for name in ("export", "optimize")}
    assert reason(result, "export").startswith("its input changed: files.model.safetensors")


def test_finished_build_of_another_model_is_replaced_on_request_only(bert: Path, out: Path, tmp_path: Path) -> None:
    """The message names both models; a copy of the model under another name counts as the same model."""
    before = contents(out)
    other = save_checkpoint("bert", tmp_path / "other", seed=1)
    with pytest.raises(OutputExistsError) as refused:
        build_hf_model(str(other), out, config=PLAIN)
    assert {str(bert), str(other)} <= {*refused.value.message.replace(",", "").split()}
    with pytest.raises(OutputExistsError):
        planned_build(plan_build(WinMLBuildConfig(), ModelRequest(str(other))), out)
    assert before == contents(out)
    copied = shutil.copytree(bert, tmp_path / "copy")
    assert str(copied) == build_hf_model(str(copied), out, config=FUSIONS).manifest.input["model"]
    assert "run" == statuses(build_hf_model(str(other), out, config=PLAIN, rebuild=True))["export"]


def test_damaged_result_is_rebuilt_with_a_note(bert: Path, out: Path) -> None:
    """The digest does not match, although size and time may."""
    path = out / "optimized.onnx"
    times, content = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times, times))
    result = build_hf_model(str(bert), out, config=FUSIONS)
    assert ("reused", "run") == (statuses(result)["export"], statuses(result)["optimize"])
    assert any("optimized.onnx is" in note for note in result.notes)


def test_other_library_versions_rerun_all_stages(bert: Path, out: Path) -> None:
    """A result of another version of onnx may differ."""
    record = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    for stage in record["parts"][0]["stages"][:2]:
        stage["origin"]["versions"]["onnx"] = "1.0"
    (out / "build_manifest.json").write_text(json.dumps(record))
    result = build_hf_model(str(bert), out, config=FUSIONS)
    assert {"run"} == {statuses(result)[name] for name in ("export", "optimize")}
    assert reason(result, "export").startswith("versions changed: onnx 1.0 → ")


def test_disabled_new_option_leaves_a_finished_stage_up_to_date(bert: Path, out: Path) -> None:
    """The stage's record lacks the option, so the default applies; another value is a change."""
    record = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    del record["parts"][0]["stages"][0]["origin"]["options"]["export"]["hierarchy"]
    (out / "build_manifest.json").write_text(json.dumps(record))
    assert {"reused", "skipped"} == {*statuses(build_hf_model(str(bert), out, config=FUSIONS)).values()}
    del record["parts"][0]["stages"][1]["origin"]["options"]["optim"]["gelu_fusion"]
    (out / "build_manifest.json").write_text(json.dumps(record))
    assert "run" == statuses(build_hf_model(str(bert), out, config=FUSIONS))["optimize"]


def test_rebuild_reruns_all_stages_and_changes_no_foreign_file(bert: Path, out: Path) -> None:
    """Files of an earlier build are removed only if the manifest lists them."""
    (out / "notes.onnx").write_text("mine")
    result = build_hf_model(str(bert), out, config={**PLAIN, "optim": None}, rebuild=True)
    assert ("run", "skipped") == (statuses(result)["export"], statuses(result)["optimize"])
    assert "mine" == (out / "notes.onnx").read_text()
    assert not (out / "optimized.onnx").exists()


def test_resolved_config_builds_the_same(bert: Path, first: BuildResult, tmp_path: Path) -> None:
    """The written config is all that a build needs."""
    result = build_hf_model(str(bert), tmp_path / "again", config=first.folder / "winml_build_config.json")
    assert (first.folder / "model.onnx").read_bytes() == (tmp_path / "again" / "model.onnx").read_bytes()
    before, after = (
        json.loads((folder / "winml_build_config.json").read_text()) for folder in (first.folder, result.folder)
    )
    assert before == after


def test_resolved_config_in_its_own_folder_reuses_every_stage(bert: Path, out: Path) -> None:
    """The config contains the resolved values; a changed value runs the stage again."""
    path = out / "winml_build_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    plan = _plan_of(config, bert)
    assert {"reused", "skipped"} == set(statuses(run_build(plan, out)).values())
    config["export"]["opset_version"] = 16
    result = run_build(_plan_of(config, bert), out)
    assert "options changed: export.opset_version none → 16" == reason(result, "export")


def _plan_of(config: dict[str, Any], model: Path) -> BuildPlan:
    """Plan a build from a config that names its task."""
    request = ModelRequest(str(model), task=config["loader"]["task"])
    return plan_build(parse_build_config(config, "config")[0], request)


def test_resolved_config_repeats_the_input_options(bert: Path, tmp_path: Path) -> None:
    """Sizes and dynamic dimensions are part of the written inputs."""
    shapes = parse_shape_config('{"sequence_length": 16}')
    request = ModelRequest(str(bert), shape_config=shapes, dynamic=DynamicRequest(batch=True))
    run_build(plan_build(parse_build_config(PLAIN, "")[0], request), tmp_path)
    config = json.loads((tmp_path / "winml_build_config.json").read_text(encoding="utf-8"))
    assert {"reused", "skipped"} == set(statuses(run_build(_plan_of(config, bert), tmp_path)).values())
    for spec in config["export"]["input_tensors"]:
        spec["shape"][1] = 12
    assert "input_specs" in reason(run_build(_plan_of(config, bert), tmp_path), "export")


_KILLED = """
import dataclasses, os, signal, sys
from pathlib import Path
from winml.modelkit.builds.build import run_build
from winml.modelkit.builds.plan import plan_build
from winml.modelkit.builds.stages import STAGES
from winml.modelkit.builds.config import parse_build_config
from winml.modelkit.onnx.specs import DynamicRequest
from winml.modelkit.models.inputs.options import parse_shape_config
from winml.modelkit.models.request import ModelRequest

def die(task):
    (task.output.parent / ".winml-partial-abandoned").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)

stages = tuple(dataclasses.replace(stage, work=die) if stage.name == sys.argv[3] else stage for stage in STAGES)
optim = {"gelu_fusion": True, "matmul_add_fusion": True}
config = parse_build_config({"quant": None, "compile": None, "optim": optim}, "")[0]
run_build(plan_build(config, ModelRequest(sys.argv[1])), Path(sys.argv[2]), stages=stages)
"""


def _exit_code(program: str, folder: Path, *arguments: str | Path) -> int:
    """Run a program in a separate process that has imported the libraries, and return its exit code."""
    code, _, err = run_warm([*map(str, arguments)], folder, os.environ, "", TIMEOUT_S, program)
    assert "Traceback" not in err, err
    return code


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no SIGKILL")
@pytest.mark.parametrize(("stage", "kept"), [("export", "run"), ("optimize", "reused")])
def test_killed_build_resumes(bert: Path, tmp_path: Path, stage: str, kept: str) -> None:
    """Finished stages are kept, and leftovers of the killed process are removed."""
    out = tmp_path / "out"
    assert -signal.SIGKILL == _exit_code(_KILLED, tmp_path, bert, out, stage)
    assert "unfinished" == json.loads((out / "build_manifest.json").read_text())["status"]
    result = build_hf_model(str(bert), out, config=FUSIONS)
    assert (kept, "run") == (statuses(result)["export"], statuses(result)["optimize"])
    assert {path.name for path in out.iterdir()} == set(result.manifest.files)


def test_interruption_after_the_export_is_in_place_leaves_a_folder_to_build_in(bert: Path, tmp_path: Path) -> None:
    """Ctrl-C may come before the build records the exported files; they still belong to the build."""

    def interrupted(task: StageTask) -> tuple[StageOutcome, ...]:
        STAGES[0].work(task)
        raise KeyboardInterrupt

    plan = plan_build(parse_build_config(PLAIN, "")[0], ModelRequest(str(bert)))
    stages = (dataclasses.replace(STAGES[0], work=interrupted), *STAGES[1:])
    with pytest.raises(KeyboardInterrupt):
        run_build(plan, tmp_path / "out", stages=stages)
    assert (tmp_path / "out" / "export.onnx").exists()
    result = run_build(plan, tmp_path / "out")
    assert "done" == result.manifest.status
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(result.manifest.files)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipe_in_the_folder_is_refused(bert: Path, first: BuildResult, out: Path) -> None:
    """A pipe under one of our file names is not replaced, even if the manifest lists the name."""
    assert "model.onnx" in first.manifest.files
    (out / "model.onnx").unlink()
    os.mkfifo(out / "model.onnx")
    with pytest.raises(UsageError, match=r"model\.onnx .*pipe"):
        build_hf_model(str(bert), out, config=FUSIONS)
    assert (out / "model.onnx").is_fifo()


def test_folder_of_a_build_with_data_of_an_earlier_version_is_built_upon(bert: Path, out: Path) -> None:
    """Weights called ``<name>.onnx.data`` are reused while valid, and removed when replaced."""
    model = onnx.load(out / "optimized.onnx")
    for name in ("optimized.onnx", "model.onnx"):
        (out / name).unlink()
    # The earlier version linked both names to one file.
    onnx.save(model, out / "optimized.onnx", save_as_external_data=True, location="optimized.onnx.data")
    os.link(out / "optimized.onnx", out / "model.onnx")
    manifest = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    part = manifest["parts"][0]
    names = ("optimized.onnx", "optimized.onnx.data")
    records = [{"name": name, **_size_and_digest(out / name)} for name in names]
    part["stages"][1]["files"] = records
    part["model"] = [{**records[0], "name": "model.onnx"}, records[1]]
    part["sidecar"] = None
    manifest["files"] = sorted({*manifest["files"], *names})
    (out / "build_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    again = build_hf_model(str(bert), out, config=FUSIONS)
    assert "reused" == statuses(again)["optimize"]
    assert (out / "optimized.onnx.data").exists()
    changed = build_hf_model(str(bert), out, config=PLAIN)
    assert "run" == statuses(changed)["optimize"]
    assert {path.name for path in out.iterdir()} == set(changed.manifest.files)
    assert not (out / "optimized.onnx.data").exists()


def _size_and_digest(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_companion_the_user_changed_stays_and_is_the_users(bert: Path, out: Path) -> None:
    """No later build replaces or removes the changed file, with companions or without."""
    assert ["config.json"] == [
        record["name"] for record in json.loads((out / "build_manifest.json").read_text())["companions"]
    ]
    (out / "config.json").write_text("{}", encoding="utf-8")
    for with_companions in (True, False):
        plan = plan_build(
            parse_build_config(FUSIONS, "test")[0], ModelRequest(str(bert)), with_companions=with_companions
        )
        result = run_build(plan, out)
        assert "{}" == (out / "config.json").read_text(encoding="utf-8")
        assert "config.json" not in result.manifest.files
        assert with_companions == any("config.json" in note for note in result.notes)


def test_companion_is_updated_and_removed_with_the_checkpoint_file(bert: Path, tmp_path: Path) -> None:
    """A file that the user did not change is updated and removed together with the checkpoint's file."""
    checkpoint, out = shutil.copytree(bert, tmp_path / "checkpoint"), tmp_path / "out"
    (checkpoint / "vocab.txt").write_text("a", encoding="utf-8")
    build_hf_model(str(checkpoint), out, config=FUSIONS)
    (checkpoint / "vocab.txt").write_text("b", encoding="utf-8")
    result = build_hf_model(str(checkpoint), out, config=FUSIONS)
    assert "b" == (out / "vocab.txt").read_text(encoding="utf-8")
    assert {"config.json", "vocab.txt"} == {record.name for record in result.manifest.companions}
    (checkpoint / "vocab.txt").unlink()
    assert "vocab.txt" not in build_hf_model(str(checkpoint), out, config=FUSIONS).manifest.files
    assert not (out / "vocab.txt").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
def test_companion_of_a_killed_build_is_recognized(bert: Path, tmp_path: Path) -> None:
    """The file is in place, but the manifest of the finished build is not."""
    out = tmp_path / "out"
    assert -signal.SIGKILL == _exit_code(KILLED_AFTER_COMMIT, tmp_path, bert, out)
    assert (out / "config.json").is_file()
    manifest = json.loads((out / "build_manifest.json").read_text(encoding="utf-8"))
    assert ("unfinished", ["config.json"]) == (manifest["status"], [file["name"] for file in manifest["companions"]])
    result = build_hf_model(str(bert), out, config=PLAIN)
    assert "config.json" in result.manifest.files
    assert not any("config.json" in note for note in result.notes)


KILLED_AFTER_COMMIT = """
import os, signal, sys
from winml.modelkit import build_hf_model

def kill_when_config_appears(event, arguments):
    # The config is moved before the models; the commit ends with them.
    if event == "os.rename" and str(arguments[1]).endswith(os.sep + "build_manifest.json"):
        if os.path.exists(os.path.join(sys.argv[2], "config.json")):
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill_when_config_appears)
build_hf_model(sys.argv[1], sys.argv[2], config={"optim": {"level": "none"}, "quant": None, "compile": None})
"""


def test_failed_stage_keeps_finished_stages(bert: Path, tmp_path: Path) -> None:
    """The optimizer refuses a selector; the export is kept for the next build."""
    with pytest.raises((StageError, UsageError)):
        build_hf_model(str(bert), tmp_path / "out", config={**PLAIN, "optim": {"level": "basic", "module": ["none"]}})
    result = build_hf_model(str(bert), tmp_path / "out", config=PLAIN)
    assert ("reused", "run") == (statuses(result)["export"], statuses(result)["optimize"])


def test_cached_build_is_identified_by_its_dependencies(bert: Path, cache: Path) -> None:
    """Another config gets another folder, and takes the export from the first."""
    one = build_hf_model(str(bert), config=PLAIN)
    again = build_hf_model(str(bert), config=PLAIN)
    other = build_hf_model(str(bert), config=FUSIONS)
    assert one.folder == again.folder != other.folder
    assert cache in one.folder.parents
    assert {"reused", "skipped"} == set(statuses(again).values())
    assert ("reused", "from the cache") == (statuses(other)["export"], reason(other, "export"))
    check_artifacts(other.folder)


def test_build_without_companions_is_one_of_its_own(bert: Path) -> None:
    """A build with companions and one without have separate folders in the cache."""
    config = {**PLAIN, "optim": None}
    without = build_hf_model(str(bert), config=config, with_companions=False)
    whole = build_hf_model(str(bert), config=config)
    again = build_hf_model(str(bert), config=config, with_companions=False)
    assert without.folder == again.folder != whole.folder
    assert not (without.folder / "config.json").exists()
    assert (whole.folder / "config.json").exists()
    assert "from the cache" == reason(whole, "export")


@pytest.mark.parametrize("name", ["export.onnx", "build_manifest.json"])
def test_damaged_cache_entry_is_rebuilt_with_a_note(bert: Path, cache: Path, name: str) -> None:
    """A damaged manifest does not stop a build in the cache, where every file is ours."""
    one = build_hf_model(str(bert), config={**PLAIN, "optim": None})
    (one.folder / name).write_bytes(b"{")
    again = build_hf_model(str(bert), config={**PLAIN, "optim": None})
    assert any("damaged" in note for note in again.notes)
    assert one.manifest.model == again.manifest.model
    check_artifacts(again.folder)


def test_exported_model_is_exported_once(bert: Path) -> None:
    """Later exports and builds of the model take the ONNX file from the cache."""
    path = exported_model(ModelRequest(str(bert)), WinMLExportConfig())
    made = path.stat().st_mtime_ns
    assert made == exported_model(ModelRequest(str(bert)), WinMLExportConfig()).stat().st_mtime_ns
    assert "from the cache" == reason(build_hf_model(str(bert), config=PLAIN), "export")


_FACTORY = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)

def example_inputs():
    return torch.ones(1, 4)
"""


def test_factory_is_exported_each_time(tmp_path: Path) -> None:
    """Files cannot show a factory's result, so it is exported again; later stages are reused if the graph is equal."""
    script = tmp_path / "net.py"
    script.write_text(_FACTORY, encoding="utf-8")
    config = {**PLAIN, "optim": {"gelu_fusion": True}}
    build_hf_model(f"{script}:make", tmp_path / "out", config=config)
    result = build_hf_model(f"{script}:make", tmp_path / "out", config=config)
    assert "run" == statuses(result)["export"]
    assert "a factory may return a different model each time" == reason(result, "export")
    assert "reused" == statuses(result)["optimize"]


@pytest.fixture
def untagged() -> onnx.ModelProto:
    """A foreign model without tags, with an operator of ONNX Runtime and one of an unknown domain."""
    text = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[2, 4] x) => (float[2, 4] y) { a = Identity(x)  b = com.microsoft.Gelu(a)  y = Relu(b) }"""
    return onnx.parser.parse_model(text)


def test_foreign_model_is_built_and_its_coverage_is_unknown(untagged: onnx.ModelProto, tmp_path: Path) -> None:
    """No tag is invented; the input file is unchanged."""
    onnx.save(untagged, tmp_path / "theirs.onnx")
    before = (tmp_path / "theirs.onnx").read_bytes()
    result = build_onnx_model(tmp_path / "theirs.onnx", tmp_path / "out")
    assert ("skipped", "run") == (statuses(result)["export"], statuses(result)["optimize"])
    optimize = result.manifest.stage("optimize")
    assert optimize is not None
    assert optimize.coverage is not None
    assert (None, 1, 2) == (optimize.coverage.percent, result.manifest.normalizations, optimize.nodes)
    assert before == (tmp_path / "theirs.onnx").read_bytes()


def test_optimized_model_can_be_built_from(first: BuildResult, tmp_path: Path) -> None:
    """The model is not normalized again, and keeps its tags."""
    result = build_onnx_model(first.model_path, tmp_path / "out", config=PLAIN)
    assert 0 == result.manifest.normalizations
    assert check_artifacts(tmp_path / "out")["model.onnx"] == check_artifacts(first.folder)["model.onnx"]


def test_build_does_not_link_its_source_file(first: BuildResult, tmp_path: Path) -> None:
    """A write into the copy must not change the user's file."""
    source = Path(shutil.copy(first.folder / "model.onnx", tmp_path / "mine.onnx"))
    for name, config in (("plain", PLAIN), ("none", {**PLAIN, "optim": None})):
        result = build_onnx_model(source, tmp_path / name, config=config)
        assert source.read_bytes() == result.model_path.read_bytes()
    assert 1 == source.stat().st_nlink


def test_skipping_normalization_copies_the_file(untagged: onnx.ModelProto, tmp_path: Path) -> None:
    """The file is copied if no optimization is requested."""
    onnx.save(untagged, tmp_path / "theirs.onnx")
    request = ModelRequest(str(tmp_path / "theirs.onnx"))
    plan = plan_build(WinMLBuildConfig(), request, skip_pre_normalization=True)
    result = run_build(plan, tmp_path / "out")
    assert 0 == result.manifest.normalizations
    assert (tmp_path / "theirs.onnx").read_bytes() == result.model_path.read_bytes()


def test_model_with_unknown_operators_is_built_unverified(tmp_path: Path) -> None:
    """ONNX Runtime cannot run the model, which is an error unless verification is off."""
    text = """<ir_version: 8, opset_import: ["" : 17, "their.domain" : 1]>
        g (float[2, 4] x) => (float[2, 4] y) { a = Identity(x)  y = their.domain.Secret(a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "theirs.onnx")
    with pytest.raises(StageError, match="cannot verify"):
        build_onnx_model(tmp_path / "theirs.onnx", tmp_path / "out")
    result = build_onnx_model(tmp_path / "theirs.onnx", tmp_path / "out", verify=False)
    assert ["Secret"] == [node.op_type for node in onnx.load(result.model_path).graph.node]


def test_quantized_model_is_built(first: BuildResult, tmp_path: Path) -> None:
    """A model quantized by another tool is built with its remaining tags."""
    quantize_dynamic(first.folder / "export.onnx", tmp_path / "quantized.onnx")
    result = build_onnx_model(tmp_path / "quantized.onnx", tmp_path / "out", config={"optim": {"level": "basic"}})
    operators = {node.op_type for node in onnx.load(result.model_path).graph.node}
    assert "MatMulInteger" in operators


def test_model_without_its_data_is_refused(tmp_path: Path, untagged: onnx.ModelProto) -> None:
    """The message names the missing file, and nothing is written."""
    tensor = onnx.numpy_helper.from_array(np.ones((2, 4), dtype=np.float32), "w")
    onnx.external_data_helper.set_external_data(tensor, "gone.bin")
    tensor.ClearField("raw_data")
    untagged.graph.initializer.append(tensor)
    (tmp_path / "theirs.onnx").write_bytes(untagged.SerializeToString())
    with pytest.raises(InputError, match=r"gone\.bin is missing"):
        build_onnx_model(tmp_path / "theirs.onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [({"optimise": {}}, "optimise"), ({"export": None}, "not an ONNX"), ({"auto": False}, "input_tensors")],
)
def test_config_that_cannot_be_built_is_refused(
    bert: Path, tmp_path: Path, config: Mapping[str, Any], words: str
) -> None:
    """The refusal comes before any file is loaded."""
    with pytest.raises(ConfigError, match=words):
        build_hf_model(str(bert), tmp_path / "out", config=config)


def test_folder_of_the_model_is_refused(bert: Path, first: BuildResult) -> None:
    """The input is never overwritten."""
    with pytest.raises(UsageError, match="source model"):
        build_hf_model(str(bert), bert)
    with pytest.raises(UsageError, match="would replace"):
        build_onnx_model(first.model_path, first.folder)


def test_foreign_file_is_refused_before_the_model_is_loaded(bert: Path, tmp_path: Path) -> None:
    """The file is not ours to replace, with or without rebuild."""
    (tmp_path / "export.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match="written by"):
        build_hf_model(str(bert), tmp_path, rebuild=True)
    assert "mine" == (tmp_path / "export.onnx").read_text()
