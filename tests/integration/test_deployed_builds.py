"""Deployed files of builds, run in another folder without the rest of the build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from checkpoints import save_checkpoint
from e2e.in_process import run_here
from winml.modelkit import build_onnx_model
from winml.modelkit.errors import StageError
from winml.modelkit.file_names import is_data_of
from winml.modelkit.ort.sessions import Session

NET = """import torch


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 4))

def example_inputs():
    return torch.ones(2, 3000)
"""
"""A net with 36 MB of weights, which the optimize stage keeps in a separate file."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the large net."""
    folder = tmp_path_factory.mktemp("net")
    (folder / "net.py").write_text(NET, encoding="utf-8")
    outcome = run_here("export", "-m", f"{folder / 'net.py'}:build", "-o", folder / "net.onnx", "-q")
    assert 0 == outcome.code, outcome.err
    return folder / "net.onnx"


def build(*arguments: str | Path) -> dict[str, Any]:
    outcome = run_here("build", *arguments, "-q", "-f", "json")
    assert 0 == outcome.code, outcome.err
    record: dict[str, Any] = json.loads(outcome.out)
    return record


def statuses(record: dict[str, Any]) -> list[str]:
    return [stage["status"] for stage in record["parts"][0]["stages"]]


def answer(path: Path) -> Any:
    (values,) = Session(path).run({"input": np.ones((2, 3000), np.float32)}).values()
    return values


def test_model_of_a_build_runs_alone(source: Path, tmp_path: Path) -> None:
    """The deployed model is the last stage's file with one copy of the weights; a second build rewrites nothing."""
    record = build("-m", source, "-o", tmp_path / "out", "--level", "full")
    assert (tmp_path / "out" / "model.onnx").samefile(tmp_path / "out" / "optimized.onnx")
    (tmp_path / "alone").mkdir()
    alone = Path(shutil.copy(tmp_path / "out" / "model.onnx", tmp_path / "alone"))
    assert np.allclose(answer(source), answer(alone), atol=1e-4)
    assert (
        [file["name"] for file in record["deploy"]]
        == ["model.onnx"]
        == [file["name"] for file in record["parts"][0]["model"]]
    )
    state = (tmp_path / "out" / "model.onnx").stat()
    again = build("-m", source, "-o", tmp_path / "out", "--level", "full")
    assert ["skipped", "reused", "skipped", "skipped"] == statuses(again)
    assert (state.st_ino, state.st_mtime_ns) == (
        (tmp_path / "out" / "model.onnx").stat().st_ino,
        (tmp_path / "out" / "model.onnx").stat().st_mtime_ns,
    )


def test_model_above_the_file_limit_has_a_data_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary lists model and data file with their sizes, and both are deployed."""
    from winml.modelkit.onnx.files import writing

    for writer in (writing.write_model, writing.place_self_contained):
        monkeypatch.setitem(writer.__kwdefaults__, "inline_limit_bytes", 1_000_000)
    outcome = run_here("build", "-m", source, "-o", tmp_path / "out", "--level", "full")
    assert 0 == outcome.code, outcome.err
    manifest = json.loads((tmp_path / "out" / "build_manifest.json").read_bytes())
    model, data = (file["name"] for file in manifest["deploy"])
    assert is_data_of(model, data)
    for line in ("model ", "deploy "):
        (told,) = (words for words in outcome.out.splitlines() if words.startswith(line))
        assert all(words in told for words in (model, data, "36.1 MB"))
    for name in (model, data):
        (tmp_path / "alone").mkdir(exist_ok=True)
        shutil.copy(tmp_path / "out" / name, tmp_path / "alone")
    assert np.allclose(answer(source), answer(tmp_path / "alone" / model), atol=1e-4)
    onnx.checker.check_model(str(tmp_path / "alone" / model))


def test_model_that_shares_the_data_of_its_stage_is_placed_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of earlier versions shared the data file; the stage is reused."""
    from winml.modelkit.onnx.files import writing

    monkeypatch.setitem(writing.write_model.__kwdefaults__, "inline_limit_bytes", 1_000_000)
    out = tmp_path / "out"
    build("-m", source, "-o", out, "--level", "full")
    manifest = json.loads((out / "build_manifest.json").read_bytes())
    (part,) = manifest["parts"]
    shutil.copy(out / "optimized.onnx", out / "model.onnx")
    files = part["stages"][1]["files"]
    assert 2 == len(files), "its weights are outside"
    part["model"] = [{**files[0], "name": "model.onnx"}, *files[1:]]
    (out / "build_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    record = build("-m", source, "-o", out, "--level", "full")
    assert "reused" == statuses(record)[1]
    assert ["model.onnx"] == [file["name"] for file in record["parts"][0]["model"]]


def test_folder_contains_deployed_files_only(tmp_path: Path) -> None:
    """The folder contains the models of all parts and the checkpoint's files; the next build recognizes them."""
    checkpoint = save_checkpoint("t5", tmp_path / "t5")
    out = tmp_path / "out"
    command = ("-m", checkpoint, "-o", out, "--no-verify", "--layout", "optimum")
    record = build(*command, "--deploy-only")
    deployed = {file["name"] for file in record["deploy"]}
    assert {"encoder_model.onnx", "decoder_model_merged.onnx", "config.json"} <= deployed
    assert {*deployed, "build_manifest.json"} == {path.name for path in out.iterdir()} == {*record["files"]}
    outcome = run_here("perf", out, "--iterations", "1", "--warmup", "0", "-q", "-f", "json")
    assert {"encoder", "decoder"} == {*json.loads(outcome.out)["parts"]}
    complete = build(*command)
    assert {"run", "skipped"} == {*statuses(complete)}
    assert deployed == {file["name"] for file in complete["deploy"]}
    assert {"export_encoder.onnx", "winml_build_config.json"} <= {path.name for path in out.iterdir()}


def test_deploy_only_is_refused_for_the_cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of the cache keep results for other builds."""
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    outcome = run_here("build", "-m", source, "--use-cache", "--deploy-only")
    assert 2 == outcome.code
    assert "-o FOLDER" in outcome.err


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ((), "full"),
        (("--level", "basic"), "basic"),
        (("-c", '{"optim": {"gelu_fusion": true}}'), "none"),
        (("--skip-pre-normalization",), "none"),
    ],
)
def test_build_optimizes_unless_the_request_states_otherwise(
    source: Path, tmp_path: Path, options: tuple[str, ...], level: str
) -> None:
    """The level is full by default; a stated level or capability, or a file to leave as it is, replaces it."""
    assert 0 == run_here("build", "-m", source, "-o", tmp_path / "out", "--no-verify", *options).code
    config = json.loads((tmp_path / "out" / "winml_build_config.json").read_text(encoding="utf-8"))
    assert level == config["optim"]["level"]


def test_graph_that_no_level_supports_is_built_without_optimization(tmp_path: Path) -> None:
    """The default level is replaced by a lower one if it fails, with a note; a requested level fails."""
    body = "g (float[2] x) => (float[2] y) { z = own.Op (x) y = Neg (z) }"
    text = f'<ir_version: 8, opset_import: ["": 17, "own": 1]> {body}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    result = build_onnx_model(tmp_path / "model.onnx", tmp_path / "out", verify=False)
    assert any("level full" in note and "own" in note for note in result.notes)
    assert {"Op", "Neg"} == {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    with pytest.raises(StageError, match="own"):
        build_onnx_model(tmp_path / "model.onnx", tmp_path / "o", verify=False, config={"optim": {"level": "full"}})
