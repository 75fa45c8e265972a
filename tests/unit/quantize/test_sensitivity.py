"""Sensitivity of each module, quantized alone, and the ranking of modules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from graphs import parse
from module_chains import SIZE, save_chain, save_groups
from unit.quantize.qdq_graphs import tagged_graph
from winml.modelkit import HTPExporter, WinMLExportConfig, quantization_sensitivity, quantize_onnx
from winml.modelkit.compare.fidelity import OutputFidelity, measure_fidelity
from winml.modelkit.errors import ConfigError, InputError, StageError, UsageError
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
from winml.modelkit.ort.host import resident_bytes
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult, quantize
from winml.modelkit.quantize.preparation import read_prepared
from winml.modelkit.quantize.quantized_variants import weight_bytes
from winml.modelkit.quantize.sensitivity_options import SensitivityOptions, parse_target
from winml.modelkit.quantize.sensitivity_records import (
    MeasuredVariant,
    ModuleSensitivity,
    QuantizationSensitivity,
)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Nested modules, of which four have a matrix."""
    return save_chain(tmp_path / "chain.onnx")


def _row(result: QuantizationSensitivity, tag: str, part: str = "module") -> ModuleSensitivity:
    (row,) = (module for module in result.modules if (module.tag, module.part) == (tag, part))
    return row


def _quantized_sqnr_db(source: Path, output: Path, seeds: range, **flags: Any) -> float:
    """Return the ratio of a file that ``quantize_onnx`` writes, on the values a sensitivity run draws."""
    quantize_onnx(source, output, verify=False, overwrite=True, **flags)
    floats, few = Session(source), Session(output)
    draws = [draw_feeds(graph_inputs(floats), {"batch": 1}, seed) for seed in seeds]
    return measure_fidelity([floats.run(d) for d in draws], [few.run(d) for d in draws], 0.0).worst.sqnr_db


def test_every_module_of_the_tree_is_measured_alone(chain: Path, tmp_path: Path) -> None:
    """A row equals the ratio of a file with only this module quantized."""
    result = quantization_sensitivity(chain, samples=3)
    expected = {("/M", "module"), ("/M", "own nodes"), ("/M/A.0", "module"), ("/M/A.0", "own nodes"),
                ("/M/A.0/B", "module"), ("/M/A.1", "module"), ("/M/C", "module")}  # fmt: skip
    assert expected == {(module.tag, module.part) for module in result.modules}
    for path in ("a.0", "a.0.b", "a.1"):
        (row,) = (item for item in result.modules if item.path == path and item.part == "module")
        alone = _quantized_sqnr_db(chain, tmp_path / "alone.onnx", range(3), include=(path,))
        assert alone == pytest.approx(row.sqnr_db, abs=1e-3)
    whole = _quantized_sqnr_db(chain, tmp_path / "whole.onnx", range(3))
    assert whole == pytest.approx(_row(result, "/M").sqnr_db, abs=1e-3)
    assert result.whole == _row(result, "/M").form


def test_many_modules_are_ranked_on_few_samples_first(tmp_path: Path) -> None:
    """The ranking nearly equals the one on all samples; the most sensitive modules are measured on all of them.

    The root, four groups and 16 members are 21 variants; groups of little influence are estimated from their members.
    """
    path = save_groups(tmp_path / "groups.onnx", groups=4, members=4)
    sizes = {"batch": 256}
    quick, full = quantization_sensitivity(path, sizes=sizes), quantization_sensitivity(path, sizes=sizes, samples=16)
    rows = {row.tag: row for row in full.modules}
    ratios = np.array([[row.sqnr_db, rows[row.tag].sqnr_db] for row in quick.modules], float)
    assert np.corrcoef(ratios.argsort(axis=0).argsort(axis=0).T)[0, 1] > 0.95
    assert np.abs(ratios[:, 0] - ratios[:, 1]).max() < 2
    np.testing.assert_allclose(ratios[:8, 0], ratios[:8, 1], atol=1e-9)
    assert ["16 samples"] * 8 == [row.basis_words for row in quick.modules[:8]]
    assert {"4 samples"} <= {row.basis_words for row in quick.modules[8:]} <= {"4 samples", "estimate"}
    assert {("16 samples", "measured", 16)} == {
        (row.basis_words, row.as_record()["basis"], row.as_record()["samples"]) for row in full.modules
    }
    assert ["samples 16 measures" in note for note in quick.notes].count(True) == 1
    assert not any(re.search(r"samples \d+ measures", note) for note in full.notes)
    few_values = quantization_sensitivity(path)
    assert {"16 samples"} == {row.basis_words for row in few_values.modules}


def test_estimate_adds_the_errors_of_the_parts() -> None:
    """Two equal errors are 3 dB more; outputs are added separately, and the worst one counts."""
    forms = [
        MeasuredVariant(OutputFidelity("a", 20.0, 1, 0, 0), 1, 90, samples=4, outputs_db={"a": 20.0, "b": other})
        for other in (30.0, 20.5)
    ]
    estimate = MeasuredVariant.estimated(forms, 100)
    assert estimate is not None
    assert estimate.worst is not None
    assert ("a", 80, 2, 4, True) == (
        estimate.worst.name, estimate.weight_bytes, estimate.nodes, estimate.samples, estimate.is_estimate
    )  # fmt: skip
    assert pytest.approx({"a": 20 - 3.0103, "b": 20.038}, abs=1e-3) == estimate.outputs_db
    assert pytest.approx(10 ** (-16.9897 / 20), rel=1e-5) == estimate.worst.relative_error
    assert MeasuredVariant.estimated([forms[0], MeasuredVariant(None, 1, 90, "does not run")], 100) is None


def test_own_nodes_leave_out_the_modules_below(chain: Path) -> None:
    """The four matrices are four units, and together have the nodes and parameters of the whole model."""
    result = quantization_sensitivity(chain, samples=1)
    units = [
        _row(result, "/M", "own nodes"),
        _row(result, "/M/A.0", "own nodes"),
        _row(result, "/M/A.0/B"),
        _row(result, "/M/A.1"),
    ]
    assert [1, 1, 1, 1] == [unit.form.nodes for unit in units if unit.form]
    assert [SIZE**2] * 4 == [unit.parameters for unit in units]
    assert 4 == result.whole.nodes
    assert all(unit.size_bytes_saved > 0 for unit in units)
    assert result.float_bytes - result.whole.weight_bytes == sum(unit.size_bytes_saved for unit in units)


def test_ranking_begins_with_the_worst_and_ends_with_unquantized_modules(chain: Path) -> None:
    """The ratios rise; a module without weights has no ratio."""
    result = quantization_sensitivity(chain, samples=1)
    ratios = [module.sqnr_db for module in result.measured]
    assert sorted(filter(None, ratios)) == ratios
    last = result.modules[-1]
    assert ("/M/C", None, "nothing to quantize") == (last.tag, last.sqnr_db, last.problem)
    assert last.as_record()["sqnr_db"] is None


def test_forms_of_the_same_nodes_are_measured_once(chain: Path) -> None:
    """The root and the whole model are measured once: six measurements for six modules and parts."""
    result = quantization_sensitivity(chain, samples=1)
    assert 6 == len(result.measured)
    assert 6 == result.cost.measured


def test_planted_outlier_is_ranked_worst(tmp_path: Path) -> None:
    """The module with a column of 80 times the size in its weight is the worst unit with per-tensor scales."""
    for outlier, tag, part in (("w3", "/M/A.0/B", "module"), ("w2", "/M/A.0", "own nodes")):
        source = save_chain(tmp_path / f"{outlier}.onnx", outlier=outlier)
        result = quantization_sensitivity(source, per_channel=False)
        unit_parts = {("/M", "own nodes"), ("/M/A.0", "own nodes"), ("/M/A.0/B", "module"), ("/M/A.1", "module")}
        units = [module for module in result.modules if (module.tag, module.part) in unit_parts]
        assert (tag, part) == (units[0].tag, units[0].part)


def test_depth_merges_deeper_modules_into_their_parent(chain: Path) -> None:
    """The matrices of A.0 and of B are one part at depth 2."""
    result = quantization_sensitivity(chain, depth=2, samples=1)
    row = _row(result, "/M/A.0")
    assert row.form is not None
    assert 2 == row.form.nodes
    assert {"/M", "/M/A.0", "/M/A.1", "/M/C"} == {module.tag for module in result.modules}


def test_selector_names_the_only_modules(chain: Path) -> None:
    """Modules that are not named are not measured."""
    result = quantization_sensitivity(chain, module="a.*", samples=1)
    assert {"/M/A.0", "/M/A.1"} == {module.tag for module in result.modules}


def test_options_of_the_user_hold_for_each_module(chain: Path) -> None:
    """Modules excluded, not included or set to fp32 by a rule are quantized in no variant."""
    for flags in ({"exclude": ("a.0.b",)}, {"per_module": {"a.0.b": "fp32"}}, {"include": ("a.1",)}):
        result = quantization_sensitivity(chain, samples=1, **flags)
        row = _row(result, "/M/A.0/B")
        assert (None, 0) == (row.sqnr_db, row.parameters)
    assert 1 == result.whole.nodes
    only = _row(result, "/M")
    assert only.form == _row(result, "/M/A.1").form == result.whole


@pytest.mark.parametrize("jobs", [1, 2])
def test_jobs_affect_the_time_only(chain: Path, jobs: int) -> None:
    """Parallel measurements equal sequential ones."""
    result = quantization_sensitivity(chain, samples=2, jobs=jobs)
    reference = quantization_sensitivity(chain, samples=2)
    for left, right in zip(reference.measured, result.measured, strict=True):
        assert (left.tag, left.part) == (right.tag, right.part)
        assert left.sqnr_db == pytest.approx(right.sqnr_db, abs=1e-2)


def test_values_of_a_file_replace_random_values(chain: Path, tmp_path: Path) -> None:
    """The result names the source and the shapes of the values."""
    values = tmp_path / "values.npz"
    np.savez(values, x=np.linspace(-1, 1, 5 * SIZE, dtype=np.float32).reshape(5, SIZE))
    result = quantization_sensitivity(chain, input_data=values)
    assert ("file", 1, {"x": (5, SIZE)}) == (result.input_source, result.samples, dict(result.input_shapes))


def test_target_is_reached_by_the_reported_rules(chain: Path, tmp_path: Path) -> None:
    """A file quantized by the rules has the measured ratio, and no module can be removed from the list."""
    plain = quantization_sensitivity(chain)
    assert plain.whole.worst is not None
    target = plain.whole.worst.lower_db + 3
    result = quantization_sensitivity(chain, target=f"sqnr_db={target}", iterations=4)
    listed = result.exclude_list
    assert listed is not None
    assert listed.is_met
    assert listed.form.worst is not None
    reached = _quantized_sqnr_db(chain, tmp_path / "out.onnx", range(16), per_module=dict(listed.rules))
    assert reached == pytest.approx(listed.form.worst.sqnr_db, abs=1e-3)
    assert reached >= target
    size = listed.form.weight_bytes
    assert result.whole.weight_bytes < size < result.float_bytes
    assert listed.latency is not None
    assert listed.latency.p50_ms > 0
    assert len(listed.excluded) < 4
    # Each way to make the list shorter was measured, and none met the target.
    put_back = [trial for trial in listed.trials if trial.excluded == len(listed.excluded) - 1]
    assert len(listed.excluded) <= len(put_back)
    assert not any(trial.is_met for trial in put_back)


def test_list_is_shortened_on_the_samples_of_the_result(tmp_path: Path) -> None:
    """Samples of the search may need a module in float that those of the result do not need."""
    torch.manual_seed(3)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(8)), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for position, block in enumerate(self.blocks):
                x = x + torch.tanh(block(x)) / (1 + 0.5 * position)
            return self.out(x)

    path = tmp_path / "net.onnx"
    HTPExporter(WinMLExportConfig()).export(Residual().eval(), path, {"x": torch.randn(2, 32)})
    options: dict[str, Any] = {"precision": "fp16", "samples": 2, "iterations": 2}
    whole = quantization_sensitivity(path, **options).whole
    assert whole.worst is not None
    target = whole.worst.lower_db - 0.5
    listed = quantization_sensitivity(path, target=f"sqnr_db={target}", **options).exclude_list
    assert listed is not None
    first = listed.trials[0]
    assert not first.is_met, "the samples of the search are harder"
    assert listed.is_met
    assert () == listed.excluded
    assert whole == listed.form
    # Each verdict is that of the requested target.
    values = {trial.form.worst.lower_db: trial.is_met for trial in listed.trials if trial.form.worst}
    assert all(is_met == (value >= target) for value, is_met in values.items())


def test_unreachable_target_returns_the_best_list(chain: Path) -> None:
    """The best list tried still has one module of fewer bits."""
    listed = quantization_sensitivity(chain, target="sqnr_db=190", samples=1).exclude_list
    assert listed is not None
    assert listed.form.worst is not None
    assert not listed.is_met
    assert 3 == len(listed.excluded)
    # The list is chosen by other samples than it is judged on.
    best = max((trial for trial in listed.trials if trial.form.worst), key=lambda trial: trial.form.worst.lower_db)
    assert 3 == best.excluded
    assert listed.form.worst != best.form.worst


def test_target_that_the_whole_meets_needs_no_list(chain: Path) -> None:
    """The measurement of the whole model is enough."""
    listed = quantization_sensitivity(chain, target="cosine=0.5", samples=1, iterations=2).exclude_list
    assert listed is not None
    assert listed.is_met
    assert ((), {}, 1) == (listed.excluded, dict(listed.rules), len(listed.trials))


def test_inner_module_keeps_its_bits_inside_a_quantized_module(tmp_path: Path) -> None:
    """The rules name the inner module first, for the first that matches wins."""
    source = save_chain(tmp_path / "chain.onnx", outlier="w2")
    result = quantization_sensitivity(source, per_channel=False, target="sqnr_db=12", iterations=2)
    listed = result.exclude_list
    assert listed is not None
    assert listed.is_met
    assert ("/M/A.0",) == listed.excluded
    assert [("a.0.b", "int8"), ("a.0", "fp32")] == list(listed.rules.items())
    written = quantize_onnx(source, tmp_path / "o.onnx", per_channel=False, per_module=dict(listed.rules), verify=False)
    assert {"/M": 1, "/M/A.0": 0, "/M/A.0/B": 1, "/M/A.1": 1} == {m.tag: m.quantized for m in written.modules}


def test_rules_of_the_user_follow_the_reported_rules(chain: Path) -> None:
    """A user's rule for the same selector is dropped; other rules stay."""
    found = quantization_sensitivity(chain, target="sqnr_db=190", samples=1, per_module={"a.1": "uint8"}).exclude_list
    assert found is not None
    assert "uint8" == found.rules["a.1"]


def _interrupting(after: int) -> Any:
    """Return a quantizer that raises KeyboardInterrupt after some quantizations."""
    made = iter(range(after))

    def quantizer(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> QuantizeResult:
        if next(made, None) is None:
            raise KeyboardInterrupt
        return quantize(model, options, modules)

    return quantizer


@pytest.fixture
def interrupted(chain: Path, tmp_path: Path) -> Iterator[Path]:
    """The measurements of a run interrupted after three variants."""
    measured = tmp_path / "measured.json"
    with pytest.raises(KeyboardInterrupt):
        quantization_sensitivity(chain, samples=2, measured=measured, quantizer=_interrupting(3))
    return measured


def test_interrupted_run_resumes(chain: Path, interrupted: Path) -> None:
    """Finished measurements are reused, and the result is the same."""
    result = quantization_sensitivity(chain, samples=2, measured=interrupted)
    assert (3, 3) == (result.cost.resumed, result.cost.measured)
    reference = quantization_sensitivity(chain, samples=2)
    assert [row.as_record() for row in reference.modules] == [row.as_record() for row in result.modules]
    assert any("interrupted" in note for note in result.notes)


def test_interrupted_run_resumes_with_another_depth(chain: Path, interrupted: Path) -> None:
    """A measurement does not depend on the set of measured modules."""
    assert 3 == quantization_sensitivity(chain, samples=2, depth=2, measured=interrupted).cost.resumed


def test_measurements_of_other_options_are_refused(chain: Path, interrupted: Path) -> None:
    """The message names the difference; the file is replaced only with ``overwrite``."""
    with pytest.raises(UsageError, match="'int8', now 'uint8'"):
        quantization_sensitivity(chain, samples=2, precision="uint8", measured=interrupted)
    result = quantization_sensitivity(chain, samples=2, precision="uint8", measured=interrupted, overwrite=True)
    assert (0, 6) == (result.cost.resumed, result.cost.measured)


def test_measurements_of_another_model_are_refused(tmp_path: Path, interrupted: Path) -> None:
    """A file with the same graph and another weight is another model."""
    other = save_chain(tmp_path / "other.onnx", outlier="w1")
    with pytest.raises(UsageError):
        quantization_sensitivity(other, samples=2, measured=interrupted)


def _save_values(folder: Path, scale: float) -> Path:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "0.npz", x=np.linspace(-scale, scale, 4 * SIZE, dtype=np.float32).reshape(4, SIZE))
    return folder


def test_measurements_depend_on_the_content_of_calibration_data(chain: Path, tmp_path: Path) -> None:
    """The location of the data does not matter."""
    flags = {"mode": "qdq", "samples": 1, "measured": tmp_path / "measured.json"}
    first = _save_values(tmp_path / "first", 2.0)
    result = quantization_sensitivity(chain, calibration_data=str(first), **flags)
    (tmp_path / "elsewhere").mkdir()
    same = first.rename(tmp_path / "elsewhere" / "first")
    again = quantization_sensitivity(chain, calibration_data=str(same), **flags)
    assert (6, 0) == (again.cost.resumed, again.cost.measured)
    assert result.whole == again.whole
    _save_values(same, 0.1)
    with pytest.raises(UsageError, match="calibration was"):
        quantization_sensitivity(chain, calibration_data=str(same), **flags)
    other = quantization_sensitivity(chain, calibration_data=str(same), overwrite=True, **flags)
    assert other.whole.worst is not None
    assert result.whole.worst is not None
    assert other.whole.worst.sqnr_db < result.whole.worst.sqnr_db - 3


def test_measured_graph_is_the_written_graph(tmp_path: Path) -> None:
    """Normalizations are in the weights before there is a float graph to compare with."""
    source = tmp_path / "conv.onnx"
    body = """m (float[batch, 3, 8, 8] x) => (float[batch, 4, 8, 8] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w1) y = BatchNormalization (c, w2, w3, w4, w5) }"""
    weights = {"w1": (4, 3, 3, 3), **dict.fromkeys(("w2", "w3", "w4", "w5"), (4,))}
    graph = tagged_graph(body, ("/M/Conv", "/M/Norm"), weights)
    spread = graph.graph.initializers["w5"]
    spread.const_value = ir.tensor(np.array([0.5, 1, 2, 9], np.float32), name="w5")
    write_model(graph, source)
    options = QuantizeOptions(mode="qdq", samples=2)
    measured = read_prepared(source, options)
    assert ["Conv"] == [node.op_type for node in measured.model.graph]
    assert any("1 batch" in note for note in measured.notes)
    result = quantization_sensitivity(source, options=options, sizes={"batch": 1})
    written = _quantized_sqnr_db(source, tmp_path / "few.onnx", range(16), options=options, sizes={"batch": 1})
    assert result.whole.worst is not None
    assert written == pytest.approx(result.whole.worst.sqnr_db, abs=1e-2)


def test_weights_inside_the_file_are_not_loaded_into_memory(tmp_path: Path) -> None:
    """The float graph reads weights from the file shared by all variants."""
    size = 4096  # 64 MiB
    source = tmp_path / "large.onnx"
    values = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    graph = parse(f"m (float[1, {size}] x) => (float[1, {size}] y) {{ y = MatMul (x, w) }}")
    weight = ir.Value(name="w", const_value=ir.tensor(values, name="w"))
    graph.graph.initializers["w"] = weight
    graph.graph[0].replace_input_with(1, weight)
    write_model(graph, source, external=False)
    del graph, weight, values
    read_prepared(_save_plain(tmp_path / "warm.onnx", "y = Relu (a)"), QuantizeOptions())
    before = resident_bytes()
    measured = read_prepared(source, QuantizeOptions())
    assert weight_bytes(measured.model) == 4 * size**2
    assert resident_bytes() - before < size**2


def test_output_without_a_finite_value_is_left_out(tmp_path: Path) -> None:
    """The other outputs decide, and a note names the omitted output."""
    source = _save_plain(tmp_path / "two.onnx", "y = Tanh (a) b = Abs (a) c = Neg (b) z = Sqrt (c)", outputs="y z")
    result = quantization_sensitivity(source, samples=1)
    assert any("for z" in note for note in result.notes)
    assert result.whole.worst is not None
    assert ("y", "") == (result.whole.worst.name, result.whole.problem)


@pytest.mark.parametrize("content", ["", "[]", '{"request": {}}', '{"request": {}, "measured": {"a": {}}}'])
def test_damaged_measurements_are_refused(chain: Path, tmp_path: Path, content: str) -> None:
    """An unreadable file of measurements is refused."""
    measured = tmp_path / "measured.json"
    measured.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match="file of measurements"):
        quantization_sensitivity(chain, samples=1, measured=measured)


def test_file_without_tags_is_measured_by_the_scopes_of_its_names(tmp_path: Path) -> None:
    """The result names the source of the modules."""
    result = quantization_sensitivity(save_chain(tmp_path / "chain.onnx", tagged=False), samples=1)
    assert "node names" == result.tree_source
    assert {"a.0", "a.0.b", "a.1"} <= {module.path for module in result.measured}
    assert any("no winml tags" in note for note in result.notes)


_PLAIN = f"""m (float[4, {SIZE}] x) => (float[4, {SIZE}] y)
<float[{SIZE},{SIZE}] w = {{{", ".join(["0"] * SIZE**2)}}}> {{ a = MatMul (x, w) {{END}} }}"""


def _save_plain(path: Path, end: str, *, name: str = "", tagged: bool = True, outputs: str = "y") -> Path:
    declared = ", ".join(f"float[4, {SIZE}] {output}" for output in outputs.split())
    model = parse(_PLAIN.replace("{END}", end).replace(f"float[4, {SIZE}] y", declared))
    for number, node in enumerate(model.graph):
        node.name = f"{name}{number}"
        if not tagged:
            node.metadata_props.clear()
    write_model(model, path)
    return path


def test_model_of_one_module_has_one_row(tmp_path: Path) -> None:
    """The only list tried cannot reach a target that the whole model misses."""
    source = _save_plain(tmp_path / "one.onnx", "y = MatMul (a, w)")
    result = quantization_sensitivity(source, target="sqnr_db=150", samples=1)
    assert ["/M", "/M/MatMul"] == sorted(module.tag for module in result.measured)
    assert result.exclude_list is not None
    assert (False, 1) == (result.exclude_list.is_met, len(result.exclude_list.trials))


def test_file_without_modules_is_refused(tmp_path: Path) -> None:
    """The refusal explains that module information is missing."""
    source = _save_plain(tmp_path / "plain.onnx", "y = Relu (a)", tagged=False)
    with pytest.raises(UsageError, match="module information"):
        quantization_sensitivity(source)


def test_model_with_only_nan_outputs_is_refused(tmp_path: Path) -> None:
    """No damage could show."""
    source = _save_plain(tmp_path / "nan.onnx", "b = Abs (a) c = Neg (b) y = Sqrt (c)")
    with pytest.raises(StageError, match="only zeros, NaN"):
        quantization_sensitivity(source, samples=1)


def test_model_with_some_nan_is_compared_at_its_finite_values(tmp_path: Path) -> None:
    """A variant with NaN in other positions has no ratio and is ranked worst."""
    source = _save_plain(tmp_path / "log.onnx", "y = Log (a)")
    result = quantization_sensitivity(source, samples=4)
    assert any("NaN" in note for note in result.notes)
    worst = result.modules[0]
    assert ("NaN or infinity in different places", None) == (worst.problem.partition(":")[0], worst.sqnr_db)
    assert worst.as_record()["sqnr_db"] is None


def test_quantized_file_is_refused(chain: Path, tmp_path: Path) -> None:
    """A quantized file has no float graph for comparison."""
    quantize_onnx(chain, tmp_path / "few.onnx", verify=False)
    with pytest.raises(InputError):
        quantization_sensitivity(tmp_path / "few.onnx")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"module": "d.*"}, "no module"),
        ({"module": "c"}, "^module c: no node"),
        ({"depth": 4}, "3 level"),
        ({"depth": 1, "module": "a.0.b"}, "up to depth 1"),
        ({"target": "sqnr=30"}, "'sqnr'"),
        ({"target": "sqnr_db"}, "METRIC=NUMBER"),
        ({"target": "cosine=2"}, "from -1 to 1"),
        ({"target": "sqnr_db=nan"}, "decibels"),
        ({"exclude": ("/M",)}, "no node to quantize"),
    ],
)
def test_unusable_request_is_refused(chain: Path, flags: dict[str, Any], words: str) -> None:
    """Each request is refused with a message about its error."""
    with pytest.raises(UsageError, match=words):
        quantization_sensitivity(chain, **flags)


def test_unknown_flag_names_the_nearest(chain: Path) -> None:
    """A misspelled flag is refused by its name."""
    with pytest.raises(ConfigError, match="depht"):
        quantization_sensitivity(chain, depht=1)


def test_relative_error_is_a_target_from_above() -> None:
    """Less is better."""
    target = parse_target("relative_error=0.1")
    assert ("relative_error", 0.1) == (target.metric, target.value)


def test_weights_in_a_file_of_their_own_are_measured_alike(chain: Path, tmp_path: Path) -> None:
    """Small weights are in the data file as well."""
    apart = tmp_path / "apart.onnx"
    onnx.save(onnx.load(chain), apart, save_as_external_data=True, location="apart.data", size_threshold=0)
    reference = quantization_sensitivity(chain, samples=1)
    result = quantization_sensitivity(apart, samples=1)
    assert [row.as_record() for row in reference.modules] == [row.as_record() for row in result.modules]


def test_record_is_json_with_the_documented_keys(chain: Path) -> None:
    """Programs depend on the keys."""
    record = json.loads(json.dumps(quantization_sensitivity(chain, target="sqnr_db=190", samples=1).as_record()))
    assert 1 == record["schema_version"]
    keys = {"module", "tag", "class", "part", "precision", "sqnr_db", "cosine", "relative_error", "output", "nodes",
            "parameters", "size_bytes_saved", "problem", "basis", "samples", "lower_sqnr_db"}  # fmt: skip
    assert keys == set(record["modules"][0])
    assert {"target", "is_met", "rules", "excluded", "size_bytes", "latency", "trials"} <= set(record["exclude_list"])
    assert {"sqnr_db", "size_bytes", "latency"} <= set(record["quantized"])


def test_keyword_beside_a_record_with_its_field_is_refused(chain: Path) -> None:
    with pytest.raises(UsageError, match="precision"):
        quantization_sensitivity(chain, options=QuantizeOptions(), precision="uint8")
    with pytest.raises(UsageError, match="depth"):
        quantization_sensitivity(chain, sensitivity=SensitivityOptions(), depth=2)
    with pytest.raises(ConfigError, match="depth"):
        quantization_sensitivity(chain, options=QuantizeOptions(), dept=2)
