"""Models on a GPU: measurement without copies, 16 bits, times by module and provider support.

Needs an ONNX Runtime with CUDA's provider (``pip install onnxruntime-gpu``, in place of ``onnxruntime``) and a device.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from checkpoints import save_checkpoint
from graphs import parse
from winml.modelkit import build_hf_model, compile_onnx
from winml.modelkit.compare.fidelity import measure_fidelity
from winml.modelkit.compile.declared_options import DEFAULT_MIN_SQNR_DB
from winml.modelkit.errors import UsageError
from winml.modelkit.inspect.provider_check import check_provider
from winml.modelkit.ort.devices import choose_provider, present_providers
from winml.modelkit.ort.opened_model import RunOptions, values_for
from winml.modelkit.ort.sessions import Session
from winml.modelkit.profile.by_module import profile_by_module
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.profile.module_records import ProfiledModules
from winml.modelkit.profile.perf import PerfOptions, measure_model
from winml.modelkit.profile.records import PerfResult

pytestmark = pytest.mark.gpu

EP, MEMORY = "cuda", "cuda"
FEW = LatencyOptions(iterations=20, warmup=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT."""
    return save_checkpoint("bert", tmp_path_factory.mktemp("source") / "bert")


@pytest.fixture(scope="module")
def half(checkpoint: Path) -> Path:
    """The BERT model, built in 16-bit floating point."""
    return build_hf_model(checkpoint, checkpoint.with_name("half"), precision="fp16").folder / "model.onnx"


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Path:
    """The BERT model, built in float32."""
    return build_hf_model(checkpoint, checkpoint.with_name("plain")).folder / "model.onnx"


def _session(path: Path | bytes) -> Session:
    chosen = choose_provider(EP, None, {})
    return Session(path, providers=chosen.names, provider_options=chosen.options)


def test_copies_are_timed_only_without_io_binding(tmp_path: Path) -> None:
    """The copies of 64 MB to the device and back take far longer than a Relu."""
    path = tmp_path / "copied.onnx"
    ir.save(parse("g (float[4096, 4096] x) => (float[4096, 4096] y) { y = Relu (x) }"), path)

    def measured(*, io_binding: bool) -> PerfResult:
        return measure_model(path, PerfOptions(RunOptions("copied", ep=EP, io_binding=io_binding), FEW))

    bound, passed = measured(io_binding=True), measured(io_binding=False)
    assert ((MEMORY,), ("cpu",)) == (bound.output_memory, passed.output_memory)
    assert {"y": (4096, 4096)} == bound.output_shapes == passed.output_shapes
    assert 2 * bound.latency.summary.p50 < passed.latency.summary.p50


@pytest.mark.parametrize("dtype", ["float", "bfloat16"])
def test_device_values_are_read_back_unchanged(dtype: str) -> None:
    """A shape, computed in CPU memory, stays there."""
    model = parse(f"g ({dtype}[N, 3] x) => ({dtype}[N, 3] y, int64[2] s) {{ y = Add (x, x) s = Shape (y) }}")
    value = np.arange(6).reshape(2, 3).astype(np.float32 if dtype == "float" else ml_dtypes.bfloat16)
    run = _session(ir.to_proto(model).SerializeToString()).prepare({"x": value})
    for _ in range(2):
        run()
    outputs = run.outputs()
    y, s = outputs["y"], outputs["s"]
    assert y is not None
    assert s is not None
    assert (value.dtype, (value + value).tolist(), [2, 3]) == (y.dtype, y.tolist(), s.tolist())
    assert MEMORY in run.output_memory


def test_16_bit_model_on_the_device_equals_the_plain_model(half: Path, plain: Path) -> None:
    """The plain model runs in 32 bits on the CPU."""
    reference = Session(plain)
    feeds = values_for(reference, RunOptions("plain")).feeds
    answers = _session(half).run(feeds)
    fidelity = measure_fidelity([reference.run(feeds)], [answers], DEFAULT_MIN_SQNR_DB)
    assert fidelity.is_verified, fidelity


def test_provider_reports_its_supported_nodes(half: Path) -> None:
    """The provider takes most of a BERT; each node left to the CPU has a reason."""
    fit = check_provider(half, EP)
    assert fit.basis in ("provider", "kernels")
    assert fit.taken > fit.nodes / 2
    assert all(finding.reason and finding.remedy for finding in fit.findings)


def test_device_time_is_reported_by_module(half: Path) -> None:
    """Kernels of the provider have the names of nodes, as those of the CPU do."""
    profiled = profile_by_module(half, RunOptions("model", ep=EP), FEW)
    assert isinstance(profiled, ProfiledModules)
    record = profiled.as_record()["by_module"]
    assert record["tree"][0]["total_ms"] > 0
    assert record["unattributed_share"] < 0.5


def test_provider_without_compiled_files_is_refused(half: Path, tmp_path: Path) -> None:
    """CUDA runs the file without compilation; nothing is written."""
    with pytest.raises(UsageError, match="CUDAExecutionProvider"):
        compile_onnx(half, tmp_path / "cuda.onnx", ep="cuda")
    assert [] == list(tmp_path.iterdir())


def test_tensorrt_compiles_one_part_with_equal_outputs(plain: Path, tmp_path: Path) -> None:
    """The part lists its modules, and is opened and compared on the device."""
    if "TensorrtExecutionProvider" not in present_providers():
        pytest.skip("no TensorRT device: its provider is not installed")
    compiled = compile_onnx(plain, tmp_path / "tensorrt.onnx", ep="tensorrt")
    assert compiled.parts
    assert all(part.modules for part in compiled.parts)
    assert compiled.comparison is not None
