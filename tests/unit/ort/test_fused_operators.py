"""Table of kernels for the operators that fusions create."""

from __future__ import annotations

import onnxruntime
import pytest
from onnxruntime.capi import _pybind_state as ort_state

from graphs import parse
from winml.modelkit.errors import UsageError
from winml.modelkit.optimize.capabilities import ATTENTION_VARIANT, CAPABILITIES
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize
from winml.modelkit.ort.fused_operators import kernel_types, providers_with_kernels
from winml.modelkit.ort.graph_inputs import element_type

FLOATS = ("float32", "float16", "bfloat16")
GRAPH = """g ({0}[2, 4, 8] x) => ({0}[2, 4, 8] y) <{0}[8] b = {{1, 1, 1, 1, 1, 1, 1, 1}}> {{
    h = Add (x, b) y = com.microsoft.Gelu (h)
}}"""


@pytest.mark.skipif(not onnxruntime.__version__.startswith("1.32"), reason="the table is of ONNX Runtime 1.32")
def test_cpu_column_equals_the_kernels_of_the_runtime() -> None:
    """A row is supported in a type if a kernel takes the type in any of its parameters."""
    listed: dict[str, set[str]] = {}
    for kernel in ort_state.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider" and kernel.domain == "com.microsoft":
            types = {element_type(name) for names in kernel.type_constraints.values() for name in names}
            listed.setdefault(f"com.microsoft:{kernel.op_name}", set()).update(types)
    for operator in {operator for entry in CAPABILITIES.values() for operator in entry.kernels}:
        if operator in listed:
            assert listed[operator].intersection(FLOATS) == {*kernel_types(operator)["cpu"]}, operator


def test_attention_with_a_bias_runs_on_two_providers() -> None:
    """CUDA refuses the bias of GroupQueryAttention, and DirectML ignores it."""
    assert ("cpu", "webgpu") == providers_with_kernels(["com.microsoft:GroupQueryAttention(attention_bias)"])


@pytest.mark.parametrize(
    ("ep", "enabled"),
    [
        ("cpu", {"rotary_attention_fusion", "right_padding", "packed_projection_fusion"}),
        ("cuda", {"rotary_attention_fusion", "right_padding", "packed_projection_fusion"}),
        ("dml", {"right_padding"}),
        ("qnn", set()),
    ],
)
def test_attention_without_a_bias_runs_on_more_providers(ep: str, enabled: set[str]) -> None:
    """Lengths instead of a mask give CUDA and DirectML a fused attention; DirectML's does not rotate."""
    options = OptimizeOptions(ep=ep).with_decoder_fusions(ATTENTION_VARIANT)
    assert enabled == {entry.name for entry in options.enabled()}.intersection(ATTENTION_VARIANT)
    fusion = CAPABILITIES["group_query_attention_fusion"]
    assert options.is_enabled(fusion) == bool(enabled)
    assert OptimizeOptions(ep=ep).with_decoder_fusions().is_enabled(fusion) == (ep == "cpu")
    if ep == "cuda":
        assert not options.judging_capability(fusion).has_kernels(ep, {"float32"})
        assert options.judging_capability(fusion).has_kernels(ep, {"float16"})


@pytest.mark.parametrize(("dtype", "is_supported"), [("float", True), ("bfloat16", False)])
def test_fusion_by_name_needs_a_kernel_for_the_type_of_the_graph(dtype: str, is_supported: bool) -> None:
    """WebGPU has no kernels for bfloat16."""
    model = parse(GRAPH.format(dtype), domains=', "com.microsoft" : 1')
    options = OptimizeOptions.model_validate({"bias_gelu_fusion": True, "ep": "webgpu"})
    if is_supported:
        assert 1 == optimize(model, options).fired["bias_gelu_fusion"]
    else:
        with pytest.raises(UsageError, match="bfloat16"):
            optimize(model, options)


def test_levels_leave_out_fusions_without_kernels_for_the_type() -> None:
    """The CPU provider runs other types between casts."""
    fusion = CAPABILITIES["skip_simplified_layer_norm_fusion"]
    assert not fusion.has_kernels("dml", {"bfloat16"})
    assert fusion.has_kernels("dml", {"bfloat16", "float16"})
    assert fusion.has_kernels("cpu", {"float64"})
