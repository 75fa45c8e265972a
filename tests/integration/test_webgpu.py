"""Models on ONNX Runtime's WebGPU provider: builds, comparisons, placement of nodes, and generated text.

`make readers` installs the provider. The adapter is the Vulkan driver in software that comes with Chromium.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from e2e.in_process import run_here
from generating import PROMPT, save_decoder
from graphs import parse
from readers import folder_of
from winml.modelkit import compare_models
from winml.modelkit.ort.execution_providers import LIBRARY_VARIABLE
from winml.modelkit.ort.kernels import NO_KERNEL

pytestmark = pytest.mark.reader("webgpu")

_DRIVERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser")


@pytest.fixture(scope="module", autouse=True)
def _adapter() -> Any:
    """Make the provider and its adapter available to this process."""
    library = folder_of("webgpu") / "onnxruntime_ep_webgpu" / "libonnxruntime_providers_webgpu.so"
    drivers = [Path(folder) for folder in _DRIVERS if (Path(folder) / "vk_swiftshader_icd.json").is_file()]
    if not library.is_file() or not drivers:
        pytest.skip("no Vulkan driver in software: Chromium has no vk_swiftshader_icd.json, or this is not Linux")
    # The provider finds the loader by its name, installed or not.
    ctypes.CDLL(str(drivers[0] / "libvulkan.so.1"), mode=ctypes.RTLD_GLOBAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(drivers[0]))  # for processes of its own
        patch.setenv("VK_DRIVER_FILES", str(drivers[0] / "vk_swiftshader_icd.json"))
        patch.setenv("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
        patch.setenv(LIBRARY_VARIABLE, f"webgpu={library}")
        yield


@pytest.fixture(scope="module")
def built(_adapter: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, built for the provider."""
    folder = tmp_path_factory.mktemp("llama")
    checkpoint = save_decoder(folder / "checkpoint", num_hidden_layers=1, head_dim=16)
    done = run_here("build", "-m", checkpoint, "-o", folder / "built", "--ep", "webgpu", "-q")
    assert 0 == done.code, done.err
    return folder / "built"


def test_build_compares_on_the_provider_and_names_the_adapter(built: Path) -> None:
    """The outputs are those of the CPU within rounding."""
    (part,) = json.loads((built / "build_manifest.json").read_bytes())["parts"]
    (compiled,) = [stage for stage in part["stages"] if stage["name"] == "compile"]
    comparison = compiled["on_provider"]
    assert ("WebGpuExecutionProvider", "gpu", "cpu", "") == tuple(
        comparison[key] for key in ("provider", "device", "simulated_on", "problem")
    )
    assert comparison["sqnr_db"] > 90


def test_rounded_activations_are_compared_with_float_ones(built: Path, tmp_path: Path) -> None:
    """CPU and provider round activations of 4-bit products to 8 bits; random texts have fewer than 32 tokens."""
    folder = tmp_path / "int4"
    done = run_here("build", "-m", built / "model.onnx", "-o", folder, "--ep", "webgpu", "--precision", "int4", "-q")
    assert 0 == done.code, done.err
    (part,) = json.loads((folder / "build_manifest.json").read_bytes())["parts"]
    (compiled,) = [stage for stage in part["stages"] if stage["name"] == "compile"]
    comparison = compiled["on_provider"]
    # Measured: 42 dB; the driver in software computes attention of 32 tokens with 20 dB.
    assert min(comparison["cpu_rounding_db"], comparison["sqnr_db"]) > 30
    done = run_here("compare", built / "model.onnx", built / "model.onnx", "--ep", "webgpu", "--format", "json")
    record = json.loads(done.out)
    assert any(note.startswith("sequence_length 31: ") for note in record["notes"])
    assert all(output["sqnr_db"] > 90 for output in record["outputs"])


def test_build_fuses_operators_with_kernels_only(built: Path) -> None:
    """There is no kernel for a product with transposed inputs, and the attention rotates queries and keys itself."""
    operators = {node.op_type for node in onnx.load(built / "model.onnx").graph.node if node.domain == "com.microsoft"}
    assert {"GroupQueryAttention", "SkipSimplifiedLayerNormalization"} <= operators
    assert operators.isdisjoint({"FusedMatMul", "RotaryEmbedding"})


def test_generated_tokens_equal_those_of_the_cpu(built: Path) -> None:
    texts = []
    for place in ((), ("--ep", "webgpu")):
        done = run_here("generate", built, "-p", PROMPT, "--max-new-tokens", "6", "--format", "json", *place)
        assert 0 == done.code, done.err
        record = json.loads(done.out)
        texts.append(record["text"])
    assert texts[0] == texts[1]
    assert ("WebGpuExecutionProvider", "cpu") == (record["provider"], record["simulated_on"])


def test_comparison_runs_the_candidate_on_the_provider(tmp_path: Path) -> None:
    """The reference runs on the CPU."""
    model = tmp_path / "model.onnx"
    ir.save(parse("g (float[4, 64] x) => (float[4, 4] y) { t = Transpose (x) m = MatMul (x, t) y = Exp (m) }"), model)
    record = json.loads(run_here("compare", model, model, "--ep", "webgpu", "--format", "json").out)
    assert ("WebGpuExecutionProvider", "cpu", "gpu") == (record["provider"], record["device"], record["simulates"])
    assert all(0 < output["relative_error"] < 1e-4 for output in record["outputs"])
    assert compare_models(model, model).worst.fidelity.relative_error == 0


def test_inspection_names_reasons_and_copies_by_module(built: Path) -> None:
    """Mask and lengths are copied once for all layers; no value returns to the CPU."""
    done = run_here("inspect", built, "--ep", "webgpu", "--format", "json")
    fit = json.loads(done.out)["execution_provider"]
    assert {NO_KERNEL} == {finding["reason"] for finding in fit["findings"]}
    assert {("model", 2, 0)} == {(entry["module"], entry["to_device"], entry["to_cpu"]) for entry in fit["copies"]}


@pytest.mark.parametrize(("opset", "remedies"), [(24, ["--opset 17"]), (17, [])])
def test_operator_of_a_newer_opset_has_the_remedy_of_an_older_one(
    opset: int, remedies: list[str], tmp_path: Path
) -> None:
    """The provider has kernels of some operators up to an opset, such as Flatten."""
    model = parse("g (float[4, 8, 2] x) => (float[4, 16] z) { y = Exp (x) f = Flatten (y) z = Exp (f) }", opset=opset)
    ir.save(model, tmp_path / "model.onnx")
    done = run_here("inspect", tmp_path / "model.onnx", "--ep", "webgpu", "--format", "json")
    findings = json.loads(done.out)["execution_provider"]["findings"]
    assert len(remedies) == len(findings)
    assert all(words in finding["remedy"] for words, finding in zip(remedies, findings, strict=True))
