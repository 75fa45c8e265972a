"""Nodes that an execution provider does not run, according to kernels and documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.inspect.provider_check import check_provider
from winml.modelkit.inspect.provider_fit import ProviderFit
from winml.modelkit.metadata_keys import COMPILE_KEY, COMPILE_TRACE_KEY, MODULE_KEY, TAG_KEY
from winml.modelkit.onnx.node_facts import read_facts
from winml.modelkit.ort.device_trace import CompilationTrace, CompiledNode
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS, Device
from winml.modelkit.ort.kernels import (
    documented_providers,
    kernel_table,
    operator_table,
    reports_placement,
)

Check = Callable[..., ProviderFit]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that builds and checks two tagged nodes, ``Relu`` and another operator."""

    def build(ep: str, operator: str = "Erf", dtype: int = TensorProto.FLOAT, **options: Any) -> ProviderFit:
        size: str | int = options.pop("size", 2)
        nodes = [
            helper.make_node("Relu", ["x"], ["h"], name="/block/Relu"),
            helper.make_node(operator, ["h"], ["y"], name="/block/act/Op", domain=options.pop("domain", "")),
        ]
        for node, tag, path in zip(nodes, ("/Net/Block", "/Net/Block/Act"), ("block", "block.act"), strict=True):
            node.metadata_props.add(key=TAG_KEY, value=tag)
            node.metadata_props.add(key=MODULE_KEY, value=path)
        values = [helper.make_tensor_value_info(name, dtype, [size, 3]) for name in "xy"]
        graph = helper.make_graph(nodes, "net", values[:1], values[1:])
        opsets = [helper.make_opsetid("", int(options.pop("opset", "17"))), helper.make_opsetid("com.microsoft", 1)]
        path = tmp_path / "model.onnx"
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
        return check_provider(path, ep, None, options)

    return build


@pytest.mark.parametrize(("operator", "opset", "is_fused"), [("Gelu", "20", False), ("Swish", "24", True)])
def test_remedy_of_a_composed_operator_is_an_older_opset(
    check: Check, operator: str, opset: str, is_fused: bool
) -> None:
    """From opset 23 on, the optimizer fuses into such operators on request only."""
    remedy = check("nnapi", operator, opset=opset).findings[0].remedy
    assert f"--opset {int(opset) - 1}" in remedy
    assert is_fused == ("--operators standard" in remedy)


def test_documented_operator_is_supported_and_an_unlisted_operator_is_named_with_its_module(check: Check) -> None:
    """NNAPI's list has Relu and not Erf; the result has source and version of the list."""
    fit = check("nnapi")
    assert (("document", 2, 1), False) == ((fit.basis, fit.nodes, fit.taken), fit.runs_all)
    assert [("operator", "Erf", {"block.act": 1}, ("/block/act/Op",))] == [
        (finding.kind, finding.what, finding.modules, finding.nodes) for finding in fit.findings
    ]
    assert "--check" in fit.findings[0].remedy
    assert "nnapi_supported_ops.md" in fit.source
    assert check("nnapi", "Sigmoid").runs_all


def test_open_size_is_a_finding_for_a_provider_with_fixed_sizes(check: Check) -> None:
    """Every node with a dynamic size is a finding; the remedy is a command with a usual size."""
    fit = check("nnapi", "Sigmoid", size="sequence_length")
    assert [("open size", "sequence_length", {"block": 1, "block.act": 1})] == [
        (finding.kind, finding.what, finding.modules) for finding in fit.findings
    ]
    assert 0 == fit.taken
    assert "--shape-config sequence_length=128" in fit.findings[0].remedy
    assert check("tensorrt", "Sigmoid", size="sequence_length").runs_all


def test_element_type_that_the_document_does_not_list_is_a_finding(check: Check) -> None:
    """TensorRT's list has no int8 for Relu; float64 is cast."""
    fit = check("tensorrt", "Abs", TensorProto.INT8)
    assert ["Relu of int8", "Abs of int8"] == [finding.what for finding in fit.findings]
    assert {"dtype"} == {finding.kind for finding in fit.findings}
    assert check("tensorrt", "Abs", TensorProto.DOUBLE).runs_all


def test_operator_that_runs_on_another_device_only_is_a_finding(check: Check) -> None:
    """QNN's list limits IsInf to one backend; other conditions of the list are limits."""
    fit = check("qnn", "IsInf")
    assert [("operator", "IsInf", "supported on cpu only")] == [
        (finding.kind, finding.what, finding.reason) for finding in fit.findings
    ]
    assert [("IsInf", 1)] == [(limit.operator, limit.count) for limit in fit.limits]


def test_cpu_provider_reports_its_kernels(check: Check) -> None:
    """The provider has kernels of Erf for float32 and not for float64, and no operator of another domain."""
    fit = check("cpu")
    assert (("kernels", 2, 2), True) == ((fit.basis, fit.nodes, fit.taken), fit.runs_all)
    fit = check("cpu", dtype=TensorProto.DOUBLE)
    assert [("dtype", "Erf of float64", "kernels take float32")] == [
        (finding.kind, finding.what, finding.reason) for finding in fit.findings
    ]
    fit = check("cpu", "Unheard", domain="com.microsoft")
    assert [("operator", "com.microsoft.Unheard")] == [(finding.kind, finding.what) for finding in fit.findings]


def test_listed_kernels_equal_session_kernels() -> None:
    """The private list of ONNX Runtime agrees with its sessions: Erf has one kernel, for float32."""
    table = kernel_table("CPUExecutionProvider", {"": 17})
    assert table is not None
    assert [("T", frozenset({"float32"}))] == list(table.kernels["", "Erf"][-1].types.items())


def test_undocumented_provider_is_refused(check: Check) -> None:
    """The provider is not installed and has no table; the message names the providers with one."""
    with pytest.raises(UsageError, match="no operator table") as caught:
        check("vitisai")
    assert "tensorrt" in (caught.value.hint or "")


def test_compiled_model_is_refused(check: Check) -> None:
    """A compiled model has no operators to check."""
    with pytest.raises(InputError, match="already compiled"):
        check("qnn", "EPContext", domain="com.microsoft")


@pytest.mark.parametrize(("device", "options"), [("gpu", {}), (None, {"soc_model": "43"}), (None, {"vtcm": "8"})])
def test_compiled_file_states_one_device_and_its_options(
    device: Device | None, options: dict[str, str], tmp_path: Path
) -> None:
    """Its placement was decided when it was compiled, so another request is refused instead of ignored."""
    path = tmp_path / "npu.onnx"
    model = helper.make_model(helper.make_graph([], "net", [], []), ir_version=9)
    trace = CompilationTrace(
        (CompiledNode("/Add", "Add", "/Net"), CompiledNode("/Erf", "Erf", "/Net", "no kernel")), {}
    )
    compiled = {"provider": "QNNExecutionProvider", "device": "npu", "options": {"soc_model": "60"}}
    for key, value in ((COMPILE_TRACE_KEY, trace.as_metadata()), (COMPILE_KEY, json.dumps(compiled))):
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    fit = check_provider(path, "qnn", "npu", {"soc_model": "60"})
    assert (2, 1) == (fit.nodes, fit.taken)
    with pytest.raises(UsageError, match="was compiled"):
        check_provider(path, "qnn", device, options)


def test_tables_are_of_known_providers_and_name_their_source() -> None:
    """Each table has an address, a version and operators known to onnx, except for those of older versions."""
    old = {"ImageScaler", "ParametricSoftplus", "ScaledTanh", "Inverse", "GroupNormalization", "Upsample", "Scatter"}
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()} | old
    for short in documented_providers():
        table = operator_table(short)
        assert table is not None
        assert (True, True) == (short in EXECUTION_PROVIDERS, table.source.startswith("https://"))
        assert table.version
        assert set() == {name for name in table.operators if "." not in name} - known


def test_derived_sizes_and_unknown_shapes_are_reported() -> None:
    """A value without a shape depends on every dynamic size; an expression depends on the sizes in it."""
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["i"], name="a"), helper.make_node("Relu", ["x"], ["y"], name="b")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "past + new"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
    )
    model = helper.make_model(graph)
    model.metadata_props.add(key="winml.io.inputs", value='[{"name": "x", "sums": {"past + new": ["past", "new"]}}]')
    facts = read_facts(model)
    assert ({"batch", "past + new"}, {"past + new"}) == (set(facts.open_places), set(facts.sums))
    assert [{"batch", "past + new"}] * 2 == [set(node.open_names) for node in facts.nodes]


def test_size_that_depends_on_data_is_a_finding_of_its_own_with_fixed_inputs(tmp_path: Path) -> None:
    """The number of nonzero elements is known at run time only; a provider with fixed sizes does not run the node."""
    path = save(tmp_path, [("NonZero", ["x"], "i", "find")], TensorProto.FLOAT, output=TensorProto.INT64)
    fit = check_provider(path, "qnn")
    assert [("unknown size", "NonZero", ("find",))] == [
        (finding.kind, finding.what, finding.nodes) for finding in fit.findings if finding.kind != "operator"
    ]
    assert not any("unknown size" == finding.kind for finding in check_provider(path, "tensorrt").findings)


def test_unnamed_nodes_are_matched_with_no_other_node(tmp_path: Path) -> None:
    """ONNX Runtime reports nodes by name and operator, so only a unique pair is attributed."""
    nodes = [
        ("Relu", ["x"], "a", ""),
        ("Erf", ["a"], "b", ""),
        ("Abs", ["b"], "c", "twice"),
        ("Neg", ["c"], "d", "twice"),
    ]
    path = save(tmp_path, [*nodes, ("Tanh", ["d"], "y", "once")], TensorProto.FLOAT)
    facts = read_facts(onnx.load(path))
    assert facts.nodes[-1] is facts.node_called("once", "Tanh", "")
    for name, operator in (("", "Erf"), ("twice", "Abs"), ("once", "Relu")):
        made = facts.node_called(name, operator, "ai.onnx")
        assert (name, operator, "", ()) == (made.name, made.op_type, made.domain, made.inputs)
    assert "" == facts.node_called("", "Erf", "").module


def test_unsupported_graph_has_no_node_on_the_device(check: Check) -> None:
    """TensorRT's document begins with opset 9; its list of operators has both nodes."""
    fit = check("tensorrt", "Abs", opset="8")
    (finding,) = fit.findings
    assert ("graph", 0) == (finding.kind, sum(module.on_device for module in fit.modules))
    assert {finding.reason} == {reason for module in fit.modules for reason in module.reasons}


def test_unnamed_nodes_have_their_own_findings(tmp_path: Path) -> None:
    """Nodes of branches too; the supported nodes of a module are not counted as unsupported."""
    value = [helper.make_tensor_value_info("b", TensorProto.FLOAT, [2])]
    branches = [
        helper.make_graph([helper.make_node(operator, ["x"], ["b"])], operator, [], value)
        for operator in ("Erf", "Sigmoid")
    ]
    choice = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    nodes = [choice, helper.make_node("Erf", ["y"], ["z"])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    fit = check_provider(path, "nnapi")
    found = {finding.what: finding.nodes for finding in fit.findings}
    assert {"If": ("/If",), "Erf": ("/Erf", "/Erf_1")} == found
    assert [(4, 1)] == [(module.nodes, module.on_device) for module in fit.modules]


@pytest.mark.parametrize(("opset", "counts"), [(17, (4, 2)), (16, (2, 1))])
def test_nodes_of_local_functions_count_once_per_call(opset: int, counts: tuple[int, int], tmp_path: Path) -> None:
    """A provider never sees a call: sessions inline functions. Those of another opset count once."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 17, "pkg" : 1]>
        net (float[2, 8] x) => (float[2, 8] z) {{ y = pkg.dense (x) z = pkg.dense (y) }}
        <domain: "pkg", opset_import: ["" : {opset}]> dense (a) => (c) {{ b = Erf (a) c = IsInf (b) }}
    """)
    onnx.save(model, tmp_path / "calls.onnx")
    fit = check_provider(tmp_path / "calls.onnx", "qnn", None, {})
    assert counts == (fit.nodes, fit.taken)
    assert ["IsInf"] == [finding.what for finding in fit.findings]


def test_cpu_provider_runs_float16_between_casts(tmp_path: Path) -> None:
    """A session reports it, or the kernels before 1.24.

    If no session opens, only the node that prevents it is a finding.
    """
    half = TensorProto.FLOAT16
    path = save(tmp_path, [("Erf", ["x"], "a", "first"), ("Erf", ["a"], "y", "second")], half)
    ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    fit = check_provider(path, "cpu")
    basis = "provider" if reports_placement() else "kernels"
    assert (True, basis, fit.nodes) == (fit.runs_all, fit.basis, fit.taken)
    casts = helper.make_node("Cast", ["a"], ["b"], name="cast", to=TensorProto.DOUBLE)
    path = save(
        tmp_path, [("Erf", ["x"], "a", "half"), casts, ("Erf", ["b"], "y", "double")], half, output=TensorProto.DOUBLE
    )
    fit = check_provider(path, "cpu")
    assert [("dtype", "Erf of float64", ("double",))] == [(item.kind, item.what, item.nodes) for item in fit.findings]
    note = "could not create a session" if reports_placement() else "does not report the provider of a node"
    assert any(note in words for words in fit.notes)


def save(
    folder: Path, nodes: Sequence[tuple[str, list[str], str, str] | onnx.NodeProto], dtype: int, *, output: int = 0
) -> Path:
    """Write a graph that reads ``x`` of 2 by 3."""
    made = [
        node if isinstance(node, onnx.NodeProto) else helper.make_node(node[0], node[1], [node[2]], name=node[3])
        for node in nodes
    ]
    graph = helper.make_graph(
        made,
        "net",
        [helper.make_tensor_value_info("x", dtype, [2, 3])],
        [helper.make_tensor_value_info(made[-1].output[0], output or dtype, None)],
    )
    path = folder / "saved.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path
