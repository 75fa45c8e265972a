"""Comparison of the outputs of two files: amounts by their distance, symbols by equality."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from rich.console import Console

from graphs import parse
from winml.modelkit import compare_models as compare_by_name
from winml.modelkit.compare.comparing import CompareOptions, compare_models
from winml.modelkit.compare.records import ModelComparison
from winml.modelkit.compare.table import comparison_document
from winml.modelkit.errors import ConfigError, MeasureError, UsageError
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.profile.perf import PerfOptions, measure_model
from winml.modelkit.report.terminal import print_document
from winml.modelkit.tags.tagging import NodeTag, clear_tag, write_tag


def _compared(folder: Path, reference: str, candidate: str, declared: str) -> ModelComparison:
    """Compare two graphs with the same input and different bodies."""
    for name, body in (("reference.onnx", reference), ("candidate.onnx", candidate)):
        ir.save(parse(f"m (float[4, 8] x) => ({declared}) {{ {body} }}"), folder / name)
    options = CompareOptions(RunOptions("candidate.onnx"))
    return compare_models(folder / "reference.onnx", folder / "candidate.onnx", options)


POSITIONS = """n = Constant <value_ints = [64, 4]> () p = ConstantOfShape (n) s = Shape <start = 0, end = 1> (x)
    z = Constant <value_ints = [0]> () t = Slice (p, z, s) y = Add (x, t)"""


def test_missing_sizes_are_chosen_within_the_model_limits(tmp_path: Path) -> None:
    """A table of 64 positions refuses the default of 128 tokens, so 64 are chosen; a requested size is not changed."""
    path = tmp_path / "m.onnx"
    ir.save(parse(f"m (float[sequence, 4] x) => (float[sequence, 4] y) {{ {POSITIONS} }}"), path)
    compared = compare_by_name(path, path)
    assert any("sequence 64" in note for note in compared.notes)
    assert measure_model(path, PerfOptions(RunOptions("m.onnx"), LatencyOptions(2, warmup=0))).latency.first_run_ms > 0
    with pytest.raises(MeasureError) as failed:
        compare_by_name(path, path, run=RunOptions("m.onnx", {"sequence": 128}))
    assert "run.sizes" in failed.value.hint
    with pytest.raises(ConfigError, match="foo"):
        compare_by_name(path, path, foo=1)


def test_candidate_runs_on_the_stated_provider(tmp_path: Path) -> None:
    """The provider is recorded; a model in PyTorch runs on none."""
    path = tmp_path / "m.onnx"
    ir.save(parse("m (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }"), path)
    assert "CPUExecutionProvider" == compare_by_name(path, path, ep="cpu").as_record()["provider"]
    assert compare_by_name(path, path).as_record()["provider"] is None
    with pytest.raises(UsageError, match="ONNX file as candidate"):
        compare_by_name(path, torch.nn.ReLU(), ep="cpu")


def test_labels_are_compared_by_the_share_of_equal_labels(tmp_path: Path) -> None:
    """ArgMin in place of ArgMax has no equal label, however near the indices are."""
    right = "y = ArgMax <axis = 1, keepdims = 0> (x)"
    result = _compared(tmp_path, right, right.replace("Max", "Min"), "int64[4] y")
    (output,) = result.outputs
    assert 0.0 == output.fidelity.equal_share
    assert output.as_record()["sqnr_db"] < 0
    shown = io.StringIO()
    print_document(comparison_document(result), Console(file=shown, width=200))
    assert "y: 0.0 %" in shown.getvalue()


def test_equal_nan_is_no_agreement(tmp_path: Path) -> None:
    """The output has a problem, which names the only value."""
    body = "a = Abs (x) n = Neg (a) l = Sub (n, a) y = Log (l)"
    (output,) = _compared(tmp_path, body, body, "float[4, 8] y").outputs
    assert "the reference returns only NaN" == output.fidelity.problem


def _saved(path: Path, body: str, shape: str = "4, 8") -> Path:
    ir.save(parse(f"m (float[{shape}] x) => (float[{shape}] y) {{ {body} }}"), path)
    return path


def test_random_model_is_refused(tmp_path: Path) -> None:
    """Neither a node that draws random numbers nor a dropout can be compared; the error names the node."""
    drawing = _saved(tmp_path / "drawing.onnx", "noise = RandomNormalLike (x) y = Add (x, noise)")
    plain = _saved(tmp_path / "plain.onnx", "y = Identity (x)")
    with pytest.raises(UsageError, match="RandomNormalLike") as refusal:
        compare_by_name(plain, drawing)
    assert str(drawing) in refusal.value.message

    class Noisy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x)

    with pytest.raises(UsageError, match="Noisy returns different outputs"):
        compare_by_name(Noisy(), plain, inputs={"x": torch.ones(4, 8)}, names={"output": "y"})


def test_calls_of_one_module_have_a_row_each() -> None:
    """A layer that is called twice has two rows, and the second call is not blamed for the error of the first."""

    class Layer(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale, self.calls = scale, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + 1

    class Twice(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer = Layer(scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x) * 2)

    result = compare_by_name(Twice(1.0), Twice(1.5), by_module=True, inputs=torch.ones(2, 3))
    assert result.modules is not None
    rows = [(module.identity.module, module.identity.call, module.identity.calls) for module in result.modules]
    assert [("layer", 1, 2), ("layer", 2, 2), ("", 1, 1)] == rows
    assert result.first_divergence is result.modules[0]


def test_models_without_common_outputs_are_refused(tmp_path: Path) -> None:
    """Two whole models share no output name; by module, a file has no module names."""
    reference = _saved(tmp_path / "reference.onnx", "y = Abs (x)")
    ir.save(parse("m (float[4, 8] x) => (float[4, 8] z) { z = Abs (x) }"), tmp_path / "other.onnx")
    with pytest.raises(UsageError, match="in common"):
        compare_by_name(reference, tmp_path / "other.onnx")
    bare = onnx.load(reference)
    for node in bare.graph.node:
        del node.metadata_props[:]
        node.name = ""
    onnx.save(bare, tmp_path / "bare.onnx")
    with pytest.raises(UsageError, match=r"bare\.onnx .*module"):
        compare_by_name(reference, tmp_path / "bare.onnx", by_module=True)


def test_different_models_are_reported_as_different(tmp_path: Path) -> None:
    """The outputs with equal names are compared; notes tell the few common modules and the outputs left out."""
    one, other = tmp_path / "one.onnx", tmp_path / "other.onnx"
    header = "m (float[4, 8] x) => (float[4, 8] y, float[4, 8] {0}) {{ {1} }}"
    ir.save(parse(header.format("b", "a = Abs (x) b = Neg (a) y = Tanh (b)")), one)
    ir.save(parse(header.format("c", "a = Relu (x) c = Exp (a) y = Sigmoid (c)")), other)
    result = compare_by_name(one, other)
    (few,) = (note for note in result.notes if "few modules" in note)
    assert f"1 of 4 of {one}, 1 of 4 of {other}" in few
    assert not any("few modules" in note for note in compare_by_name(one, one).notes)
    assert any(f"Outputs of {one} only: b; of {other} only: c. " in note for note in result.notes)
    ir.save(parse("m (float[4, 8] z) => (float[4, 8] y) { a = Relu (z) c = Exp (a) y = Sigmoid (c) }"), other)
    with pytest.raises(UsageError, match="takes x") as refused:
        compare_by_name(one, other)
    assert "names reference=candidate" in refused.value.hint
    assert "in common" in refused.value.hint


def test_sizes_that_cannot_be_both_are_refused(tmp_path: Path) -> None:
    """The error names the fixed sizes of both models."""
    one, other = (_saved(tmp_path / f"{size}.onnx", "y = Abs (x)", f"{size}, 8") for size in (4, 6))
    with pytest.raises(UsageError, match=r"float32\[4, 8\].*float32\[6, 8\]"):
        compare_by_name(one, other)


def test_folder_of_values_is_run_file_by_file(tmp_path: Path) -> None:
    """Each file is one draw; outputs of one side only are listed in the order of the file."""
    reference = _saved(tmp_path / "reference.onnx", "y = Abs (x)")
    more = "m (float[4, 8] x) => (float[4, 8] y, float[4, 8] d, float[4, 8] c, float[4, 8] b, float[4, 8] a)"
    ir.save(parse(f"{more} {{ y = Relu (x) d = Neg (x) c = Neg (x) b = Neg (x) a = Neg (x) }}"), tmp_path / "more.onnx")
    (tmp_path / "values").mkdir()
    for number, sign in enumerate((1, -1)):
        np.savez(tmp_path / "values" / f"{number}.npz", x=np.full((4, 8), sign, np.float32))
    run = RunOptions("more.onnx", input_data=tmp_path / "values")
    result = compare_by_name(reference, tmp_path / "more.onnx", run=run)
    assert (2, "file") == (result.samples.count, result.samples.source)
    assert np.isclose(np.sqrt(0.5), result.worst.fidelity.relative_error)
    assert f"Outputs of {tmp_path / 'more.onnx'} only: d, c, b, a." in result.notes
    with pytest.raises(UsageError, match=r"no \.npz file"):
        compare_by_name(reference, reference, run=RunOptions("r", input_data=tmp_path))


def test_values_of_a_file_are_named_like_the_inputs_of_the_candidate(tmp_path: Path) -> None:
    """The error names the missing input and the inputs of the graph."""
    model = _saved(tmp_path / "model.onnx", "y = Abs (x)")
    np.savez(tmp_path / "wrong.npz", ids=np.ones((4, 8), np.float32))
    with pytest.raises(UsageError, match="'ids'"):
        compare_by_name(model, model, run=RunOptions("model.onnx", input_data=tmp_path / "wrong.npz"))


def test_files_without_tags_and_common_modules_are_compared_by_node(tmp_path: Path) -> None:
    """One tool names nodes after modules, another one does not: values with the same names are compared."""
    for name, factor in (("scoped", 2), ("bare", 3)):
        header = f"m (float[2, 4] x) => (float[2, 4] y) <float c = {{{factor}}}>"
        model = parse(f"{header} {{ a = Relu (x) b = Mul (a, c) y = Neg (b) }}")
        for number, node in enumerate(model.graph):
            clear_tag(node)
            node.name = f"/layer.{number}/act/{node.op_type}" if name == "scoped" else ""
        ir.save(model, tmp_path / f"{name}.onnx")
    result = compare_by_name(tmp_path / "scoped.onnx", tmp_path / "bare.onnx", by_module=True)
    assert result.first_divergence is not None
    assert "b" == result.first_divergence.identity.module
    assert any("nodes are" in note for note in result.notes)


def test_output_that_never_changes_is_not_checked(tmp_path: Path) -> None:
    """Equal zeros prove nothing: a note says what to do."""
    result = _compared(tmp_path, "n = Neg (x) a = Abs (n) b = Neg (a) y = Relu (b)", "y = Sub (x, x)", "float[4, 8] y")
    assert any(note.startswith("Not checked: ") and "--input-data" in note for note in result.notes)


def test_module_that_is_wrong_in_some_samples_only_is_named(tmp_path: Path) -> None:
    """Values of modules are those of a sample with different outputs, which need not be the first."""
    equal = 0
    for limit in (9.0, 1.0, 1.5, 2.0, 2.5):
        bounds = f"<float low = {{-9.0}}, float high = {{{limit}}}>"
        graph = f"m (float[2, 4] x) => (float[2, 4] y) {bounds} {{ a = Clip (x, low, high) y = Neg (a) }}"
        ir.save(parse(graph), tmp_path / f"{limit}.onnx")
        result = compare_by_name(tmp_path / "9.0.onnx", tmp_path / f"{limit}.onnx", by_module=True)
        if result.worst.fidelity.relative_error:
            assert result.first_divergence is not None
            assert "clip" == result.first_divergence.identity.module
            equal += result.worst.fidelity.by_sample_db[0] == 200
    assert equal  # of one limit at least, the first sample has no larger number


@pytest.mark.parametrize("changed", [(1,), (1, 3)])
def test_wrong_modules_of_two_quantized_files_are_named(tmp_path: Path, changed: tuple[int, ...]) -> None:
    """If most quantized modules are equal, the others have no error of rounding that a wrong one must exceed."""
    for name, wrong in (("right", ()), ("wrong", changed)):
        scales = [f"float s{number} = {{{0.022 if number in wrong else 0.02}}}" for number in range(5)]
        steps = [
            f"q{number} = QuantizeLinear (x{number}, s) d{number} = DequantizeLinear (q{number}, s{number})"
            f" x{number + 1} = Softplus (d{number})"
            for number in range(5)
        ]
        header = f"m (float[4, 8] x0) => (float[4, 8] x5) <float s = {{0.02}}, {', '.join(scales)}>"
        model = parse(f"{header} {{ {' '.join(steps)} }}")
        for number, node in enumerate(model.graph):
            write_tag(node, NodeTag(f"/M/Act.{number // 3}", f"act.{number // 3}", "direct"))
        ir.save(model, tmp_path / f"{name}.onnx")
    result = compare_by_name(tmp_path / "right.onnx", tmp_path / "wrong.onnx", by_module=True)
    assert result.first_divergence is not None
    assert "act.1" == result.first_divergence.identity.module
