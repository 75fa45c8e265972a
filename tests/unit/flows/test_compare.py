"""Two files are compared by what they answer: amounts by their distance, symbols by being equal."""

from __future__ import annotations

import io
from pathlib import Path

import onnx_ir as ir
from rich.console import Console

from graphs import parse
from winml.modelkit.flows.compare.compare import CompareOptions, compare_models
from winml.modelkit.report.model_comparison import print_comparison
from winml.modelkit.results.model_comparison import ModelComparison
from winml.modelkit.runtime.opened_model import RunOptions


def _compared(folder: Path, reference: str, candidate: str, declared: str) -> ModelComparison:
    """Compare two graphs of one input, which differ in their body."""
    for name, body in (("reference.onnx", reference), ("candidate.onnx", candidate)):
        ir.save(parse(f"m (float[4, 8] x) => ({declared}) {{ {body} }}"), folder / name)
    options = CompareOptions(RunOptions("candidate.onnx"))
    return compare_models(folder / "reference.onnx", folder / "candidate.onnx", options)


def test_labels_are_compared_by_the_share_of_equal_ones(tmp_path: Path) -> None:
    """Of the least where the largest was meant, none is right, however near the indices are."""
    right = "y = ArgMax <axis = 1, keepdims = 0> (x)"
    result = _compared(tmp_path, right, right.replace("Max", "Min"), "int64[4] y")
    (output,) = result.outputs
    assert 0.0 == output.fidelity.equal_share
    assert output.as_record()["sqnr_db"] < 0
    shown = io.StringIO()
    print_comparison(result, Console(file=shown, width=200), verbose=False)
    assert "y: 0.0 % of its values equal" in shown.getvalue()


def test_equal_nan_are_no_agreement(tmp_path: Path) -> None:
    """An output of which nothing is finite has a problem."""
    body = "a = Abs (x) n = Neg (a) l = Sub (n, a) y = Log (l)"
    (output,) = _compared(tmp_path, body, body, "float[4, 8] y").outputs
    assert "the reference has no finite value" == output.fidelity.problem
