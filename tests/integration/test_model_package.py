"""Model packages: variants of one model that share weights, opened and chosen by ONNX Runtime."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.helper import make_graph, make_model
from transformers import AutoModel

from checkpoints import save_checkpoint
from e2e.in_process import run_here
from winml.modelkit import build_package, file_names
from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.builds.layouts import package
from winml.modelkit.builds.package_writing import PackageContent, write_package
from winml.modelkit.errors import ModelPathError, OutputExistsError, UsageError
from winml.modelkit.onnx.files import output_files
from winml.modelkit.onnx.files.moving import move_file
from winml.modelkit.onnx.files.named_paths import COPIES_FOLDER, cache_root

pytestmark = pytest.mark.skipif(
    not hasattr(onnxruntime, "ModelPackage"), reason="this ONNX Runtime has no model packages; 1.32 has"
)

TOKENS = np.array([[2, 5, 3, 7]], np.int64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("bert", tmp_path_factory.mktemp("bert"), hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A package with three variants, and its record."""
    folder = tmp_path_factory.mktemp("packages") / "bert"
    variants = ("--layout", "package", "--variants", "cpu,standard,webgpu")
    done = run_here("build", checkpoint, "-o", folder, *variants, "-q", "-f", "json")
    assert 0 == done.code, done.err
    return folder, json.loads(done.out)


def open_session(folder: Path, component: str = "model") -> Any:
    """Open the variant that ONNX Runtime chooses for the CPU."""
    options = onnxruntime.ModelPackageOptions(onnxruntime.SessionOptions())
    chosen = onnxruntime.ModelPackageContext(str(folder)).select_component(component, options)
    return chosen.get_selected_variant_name(), chosen.create_session()


def test_chosen_variant_computes_as_pytorch_does(checkpoint: Path, built: tuple[Path, dict[str, Any]]) -> None:
    """Without providers in the session options, ONNX Runtime chooses the first variant of the CPU."""
    variant, session = open_session(built[0])
    inputs = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS), "token_type_ids": np.zeros_like(TOKENS)}
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(checkpoint)(torch.as_tensor(TOKENS)).last_hidden_state.numpy()
    (states,) = session.run(["last_hidden_state"], {value.name: inputs[value.name] for value in session.get_inputs()})
    assert "cpu" == variant
    np.testing.assert_allclose(states, expected, atol=1e-5)  # float32, other order of sums


def test_library_of_onnxruntime_reads_variants_and_shared_weights(built: tuple[Path, dict[str, Any]]) -> None:
    """All providers of a variant share its folder, and the shared folder is named by the digest of its content."""
    folder, _ = built
    content = onnxruntime.ModelPackage.open(str(folder)).get_info()
    ((component, variants),) = [(entry["name"], entry["variants"]) for entry in content["components"]]
    (asset,) = content["shared_assets"]
    assert "model" == component
    assert {
        "cpu": "CPUExecutionProvider",
        "standard-openvino": "OpenVINOExecutionProvider",
        "standard-coreml": "CoreMLExecutionProvider",
        "standard-xnnpack": "XnnpackExecutionProvider",
        "webgpu": "WebGpuExecutionProvider",
    } == {entry["name"]: entry["ep"] for entry in variants}
    assert asset["uri"] == onnxruntime.ModelPackage.compute_directory_hash(asset["resolved_path"])


def test_variants_share_weights_with_equal_bytes(built: tuple[Path, dict[str, Any]]) -> None:
    """The weights in float32 are stored once for two variants; half precision has others."""
    folder, record = built
    cpu, standard, webgpu = record["variants"]
    assert cpu["shared_bytes"] == standard["shared_bytes"] > 100_000 > webgpu["shared_bytes"]
    assert record["size_bytes"] < 0.8 * record["separate_bytes"]
    assert record["size_bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert "equal outputs" == standard["quality"]
    assert webgpu["quality"].startswith("SQNR ")
    assert (folder / "config.json").is_file()


def test_package_is_a_model_of_every_command(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A package has its variant for the CPU, the folder of a variant this one; each with the shared weights."""
    folder, _ = built
    cpu, standard = onnx_file(str(folder)), onnx_file(str(folder / "model" / "standard"))
    assert cpu is not None
    assert standard is not None
    assert cpu != standard
    _, session = open_session(folder)
    inputs = {"input_ids": TOKENS, "attention_mask": np.ones_like(TOKENS), "token_type_ids": np.zeros_like(TOKENS)}
    feeds = {value.name: inputs[value.name] for value in session.get_inputs()}
    (expected,) = session.run(["last_hidden_state"], feeds)
    for path in (cpu, standard):
        (states,) = onnxruntime.InferenceSession(path).run(["last_hidden_state"], feeds)
        np.testing.assert_allclose(states, expected, atol=1e-5)  # float32, other order of sums
    assert cpu == onnx_file(str(folder))
    done = run_here("quantize", folder, "-o", tmp_path / "int8", "-p", "int8", "-q")
    assert 0 == done.code, done.err
    assert (tmp_path / "int8" / "tokenizer_config.json").is_file() == (folder / "tokenizer_config.json").is_file()


def test_messages_name_the_variant_of_a_package(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The copy that is opened lies in the cache."""
    standard = built[0] / "model" / "standard"
    shown = run_here("inspect", standard)
    assert str(standard) in shown.out
    listed = run_here("inspect", standard, "-f", "json")
    viewed = run_here("view", built[0], standard, "-o", tmp_path / "page.html")
    refused = run_here("extract", standard, "--module", "nowhere", "-o", tmp_path / "part.onnx")
    assert (0, 0, 0) == (shown.code, listed.code, viewed.code), viewed.err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for text in (shown.out, listed.out, viewed.out, refused.err, page):
        assert str(cache_root() / COPIES_FOLDER) not in text


def test_package_without_the_cpu_names_its_variants(built: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder = shutil.copytree(built[0], tmp_path / "bert")
    path = folder / "model" / file_names.PACKAGE_COMPONENT_NAME
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["variants"]["cpu"]
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ModelPathError) as raised:
        onnx_file(str(folder))
    assert str(folder / "model" / "webgpu") in raised.value.hint


def test_card_of_a_package_compares_its_variants(built: tuple[Path, dict[str, Any]]) -> None:
    """Only variants for the CPU have a time."""
    folder, record = built
    cpu, _, webgpu = record["variants"]
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert [variant["name"] for variant in record["variants"]] == [*rows]
    assert webgpu["quality"] in rows["webgpu"]
    assert cpu["latency_ms"] > 0
    assert webgpu["latency_ms"] is None


def test_new_package_replaces_files_of_the_earlier_one_only(checkpoint: Path, tmp_path: Path) -> None:
    build_package(checkpoint, tmp_path / "bert", variants="standard,cpu", verify=False)
    (tmp_path / "bert" / "mine.txt").write_text("mine")
    (tmp_path / "mine.txt").write_text("mine")
    manifest = tmp_path / "bert" / "manifest.json"
    record = json.loads(manifest.read_bytes())
    record["additional_metadata"]["files"].append("../mine.txt")  # damaged
    manifest.write_text(json.dumps(record))
    result = build_package(checkpoint, tmp_path / "bert", variants="cpu", verify=False)
    assert ["not compared"] == [variant.quality for variant in result.variants]
    assert ("cpu", result.folder) == (open_session(tmp_path / "bert")[0], tmp_path / "bert")
    assert {"cpu", "component.json"} == {path.name for path in (tmp_path / "bert" / "model").iterdir()}
    assert not (tmp_path / "bert" / "shared_assets").exists()
    assert "mine" == (tmp_path / "bert" / "mine.txt").read_text() == (tmp_path / "mine.txt").read_text()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process to kill is a copy of this one")
def test_package_of_a_killed_command_is_completed(checkpoint: Path, tmp_path: Path) -> None:
    """A kill between two moves leaves a manifest that waits; the next command completes and replaces the package."""
    model = tmp_path / "source.onnx"
    onnx.save(make_model(make_graph([], "empty", [], []), ir_version=10), model)
    folder, variant = tmp_path / "bert", package.VARIANTS["cpu"]
    models = {"cpu": {"model": model}}
    content = PackageContent("bert", "bert", {"cpu": variant}, models, {"cpu": {}}, {"LICENSE": model}, lambda _: "")
    child = os.fork()
    if not child:
        moved: list[Path] = []

        def move_or_end(source: Path, target: Path) -> None:
            if moved[1:]:
                os._exit(0)
            moved.append(target)
            move_file(source, target)

        output_files.move_file = move_or_end
        try:
            write_package(folder, content, ())
        finally:
            os._exit(1)
    assert 0 == os.waitpid(child, 0)[1]
    assert not (folder / "manifest.json").exists()
    build_package(checkpoint, folder, variants="cpu", verify=False)
    assert "cpu" == open_session(folder)[0]
    assert [] == [path for path in folder.rglob("*") if path.name.startswith(".") or path.name == "LICENSE"]


def test_file_of_the_user_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    """The folder is left as it was."""
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(OutputExistsError):
        build_package(checkpoint, tmp_path, variants="cpu", verify=False)
    assert ["README.md"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    "options",
    [
        {"variants": "cpu,fpga"},
        {"variants": "cpu,cpu"},
        {"variants": ""},
        {"precision": "int8"},
        {"ep": "webgpu"},
        {"deploy_only": True},
        {"layout": "genai", "variants": "cpu"},
    ],
)
def test_options_that_contradict_a_package_are_refused(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        build_package(checkpoint, tmp_path / "bert", **options)
    assert not (tmp_path / "bert").exists()


def test_manifest_of_another_tool_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(OutputExistsError):
        build_package(checkpoint, tmp_path)


def test_factory_may_return_another_model_for_each_variant(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(2, 2)\n")
    with pytest.raises(UsageError, match="another model"):
        build_package(f"{tmp_path / 'net.py'}:net", tmp_path / "net")


def test_variants_without_the_layout_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    done = run_here("build", checkpoint, "-o", tmp_path / "bert", "--variants", "cpu")
    assert (2, True) == (done.code, "--layout package" in done.err)
