"""Optimization of a file: result, refusals, and copies of unchanged files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from checkpoints import save_checkpoint
from graphs import parse
from winml.modelkit import (
    HTPExporter,
    WinMLExportConfig,
    optimize_model,
    optimize_onnx,
    quantize_model,
    run_optimize_analyze_loop,
)
from winml.modelkit.compare.words import equality_words
from winml.modelkit.errors import (
    ConfigError,
    InputError,
    ModelPathError,
    OptimizeError,
    OutputExistsError,
    StageError,
    UsageError,
    VerificationError,
)
from winml.modelkit.file_names import is_data_of
from winml.modelkit.metadata_keys import NORMALIZED_KEY
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.fingerprint import is_normalized, stamp
from winml.modelkit.optimize.records import OptimizationRound
from winml.modelkit.ort.graph_sessions import newest_ir_version, newest_opset
from winml.modelkit.transform.graph_file import ALREADY_NORMALIZED

BODY = """m (float[N, 3] x) => (float[N, 3] y) <float two = {2}, float half = {0.5}>
    { a = Identity (x) b = Mul (a, two) c = Transpose <perm = [1, 0]> (b) d = Relu (c)
      e = Transpose <perm = [1, 0]> (d) y = Mul (e, half) }"""


def _save(path: Path, *, stamped: bool, body: str = BODY, data: bool = False) -> Path:
    model = parse(body)
    if stamped:
        stamp(model)
    ir.save(model, path, external_data=f"{path.name}.data" if data else None, size_threshold_bytes=0)
    return path


_WIDE_BODY = BODY.replace("3]", "100]").replace("float two = {2}", f"float[100] two = {{{', '.join(['2'] * 100)}}}")
"""The same graph with weights large enough for external data."""


def _operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def test_no_flags_and_a_valid_stamp_copy_the_source(tmp_path: Path) -> None:
    """The copy is no link: a later change of the copy does not reach the source."""
    source = _save(tmp_path / "in.onnx", stamped=True)
    result = optimize_onnx(source, tmp_path / "out.onnx")
    assert source.read_bytes() == result.model_path.read_bytes()
    result.model_path.write_bytes(b"changed")
    assert source.read_bytes() != b"changed"
    assert (True, 0) == (result.is_copy, result.normalizations)
    assert (ALREADY_NORMALIZED,) == result.notes
    assert result.verification is None
    assert sorted(["in.onnx", "out.onnx"]) == sorted(path.name for path in tmp_path.iterdir())


def test_graph_changed_after_its_stamp_is_normalized_again(tmp_path: Path) -> None:
    """A stamp that does not fit the graph is ignored."""
    source = _save(tmp_path / "in.onnx", stamped=True)
    touched = onnx.load(source)
    touched.graph.node[1].op_type = "Add"
    onnx.save(touched, source)
    result = optimize_onnx(source, tmp_path / "out.onnx")
    assert (False, 1) == (result.is_copy, result.normalizations)
    assert "Identity" not in _operators(result.model_path)
    assert is_normalized(ir.load(result.model_path))
    assert result.verification is not None
    assert result.verification.is_verified


def test_normalization_can_be_left_out_and_is_not_claimed_then(tmp_path: Path) -> None:
    """Without normalization the file keeps its Identity, and has no stamp."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    result = optimize_onnx(source, tmp_path / "out.onnx", skip_normalization=True)
    assert result.normalizations == 0
    assert "Identity" in _operators(result.model_path)
    assert NORMALIZED_KEY not in ir.load(result.model_path).metadata_props


def test_optimized_file_is_stamped_verified_and_recorded(tmp_path: Path) -> None:
    """The record has the counts before and after, and the changes of each module."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    result = optimize_onnx(source, tmp_path / "out.onnx", level="basic")
    assert ["Mul", "Relu", "Mul"] == _operators(result.model_path)
    assert (6, 3) == (result.before.nodes, result.after.nodes)
    assert {"Transpose": (2, 0), "Identity": (1, 0)} == result.operator_changes()
    assert ["/M/Identity", "/M/Transpose"] == sorted(change.tag for change in result.module_changes())
    assert result.coverage.is_complete
    assert is_normalized(ir.load(result.model_path))
    record = result.as_record()
    assert 100.0 == record["coverage"]["percent"]
    assert (6, 3) == (record["before"]["nodes"], record["after"]["nodes"])
    # Open dimensions were tried at two sizes.
    assert 2 == len(record["verification"]["outputs"])


def test_second_optimization_copies_the_file_unchanged(tmp_path: Path) -> None:
    """An optimized file is normalized, so a run without options copies the file."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    first = optimize_onnx(source, tmp_path / "first.onnx", level="full")
    assert optimize_onnx(first.model_path, tmp_path / "second.onnx").is_copy


def test_external_weights_stay_external_and_are_embedded_on_demand(tmp_path: Path) -> None:
    """Data files are read and written, and the result does not use those of the source."""
    source = _save(tmp_path / "in.onnx", stamped=False, body=_WIDE_BODY, data=True)
    outside = optimize_onnx(source, tmp_path / "a" / "out.onnx", level="basic", external_data=True)
    model, data = (file.path.name for file in outside.files)
    assert "out.onnx" == model
    assert is_data_of(model, data)
    inside = optimize_onnx(source, tmp_path / "b" / "out.onnx", level="basic", external_data=False)
    assert ["out.onnx"] == [file.path.name for file in inside.files]


def test_large_weights_become_external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights above the limit are stored in a data file."""
    monkeypatch.setattr("winml.modelkit.transform.graph_file.EXTERNAL_BYTES", 4)
    source = _save(tmp_path / "in.onnx", stamped=False, body=_WIDE_BODY)
    assert 2 == len(optimize_onnx(source, tmp_path / "out.onnx", level="basic").files)


def test_wrong_result_is_refused_and_not_written(tmp_path: Path) -> None:
    """ONNX Runtime takes x⁴ for x² in a layer normalization; the comparison with the source finds it."""
    body = """m (float[2, 3, 4] x) => (float[2, 3, 4] y)
        <float four = {4}, float epsilon = {0.00001}, float[4] g = {1, 2, 3, 4}, float[4] b = {4, 3, 2, 1}>
        { mean = ReduceMean <axes = [-1]> (x) d = Sub (x, mean) p = Pow (d, four) v = ReduceMean <axes = [-1]> (p)
          e = Add (v, epsilon) s = Sqrt (e) n = Div (d, s) h = Mul (n, g) y = Add (h, b) }"""
    source = _save(tmp_path / "in.onnx", stamped=False, body=body)
    with pytest.raises(VerificationError, match=r"of in\.onnx") as raised:
        optimize_onnx(source, tmp_path / "new" / "out.onnx", layer_norm_fusion=True)
    assert raised.value.exit_code == 3
    assert ["in.onnx"] == [path.name for path in tmp_path.iterdir()]
    assert optimize_onnx(source, tmp_path / "out.onnx", layer_norm_fusion=True, verify=False).verification is None


def test_custom_domain_passes_through_unverified(tmp_path: Path) -> None:
    """The graph around a custom operator is normalized; a note says that it cannot be compared."""
    body = "m (float[2, 3] x) => (float[2, 3] y) { a = Identity (x) b = f.Unheard (a) y = Identity (b) }"
    model = parse(body, domains=', "f" : 1')
    source = tmp_path / "in.onnx"
    ir.save(model, source)
    with pytest.raises(StageError, match=r"in\.onnx .*Unheard") as raised:
        optimize_onnx(source, tmp_path / "out.onnx")
    assert (1, True) == (raised.value.exit_code, "verify=False" in raised.value.hint)
    result = optimize_onnx(source, tmp_path / "out.onnx", verify=False)
    assert ["Unheard"] == _operators(result.model_path)


def test_quantized_and_optimized_models_pass_through(tmp_path: Path) -> None:
    """Operators of ONNX Runtime and quantized ones stay unchanged, with the same outputs."""
    body = """m (float[2, 3, 4] x) => (float[2, 3, 4] y)
        <float scale = {0.1}, uint8 zero = {10}, float[4] b = {1, 2, 3, 4}>
        { q = QuantizeLinear (x, scale, zero) d = DequantizeLinear (q, scale, zero) a = Add (d, b)
          y = com.microsoft.Gelu (a) }"""
    model = parse(body, domains=', "com.microsoft" : 1')
    ir.save(model, tmp_path / "in.onnx")
    result = optimize_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx", level="full")
    assert ["QuantizeLinear", "DequantizeLinear", "BiasGelu"] == _operators(result.model_path)
    again = optimize_onnx(result.model_path, tmp_path / "again.onnx", level="full")
    assert {} == again.operator_changes()
    onnx.checker.check_model(tmp_path / "again.onnx")


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"level": "most"}, ConfigError, "level"),
        ({"gelu_fuson": True}, ConfigError, "'gelu_fusion'"),
        ({"ep": "qmn"}, UsageError, "execution provider"),
    ],
)
def test_wrong_flags_are_refused_before_any_read(
    tmp_path: Path, flags: Mapping[str, Any], error: type[Exception], words: str
) -> None:
    """The message names the wrong option."""
    with pytest.raises(error, match=words):
        optimize_onnx(tmp_path / "missing.onnx", tmp_path / "out.onnx", **flags)


def test_missing_files_and_existing_outputs_are_refused(tmp_path: Path) -> None:
    """Each has its own error; an existing output stays unchanged."""
    with pytest.raises(ModelPathError):
        optimize_onnx(tmp_path / "missing.onnx", tmp_path / "out.onnx")
    source = _save(tmp_path / "in.onnx", stamped=False, data=True)
    (tmp_path / "out.onnx").write_bytes(b"earlier")
    with pytest.raises(OutputExistsError):
        optimize_onnx(source, tmp_path / "out.onnx")
    (tmp_path / "in.onnx.data").unlink()
    with pytest.raises(InputError, match=r"in\.onnx\.data"):
        optimize_onnx(source, tmp_path / "out.onnx", overwrite=True)
    assert b"earlier" == (tmp_path / "out.onnx").read_bytes()


def test_output_never_takes_the_data_of_the_source(tmp_path: Path) -> None:
    """The data file of an earlier output may be used by the source, under any name of the source."""
    source = _save(tmp_path / "in.onnx", stamped=False, data=True)
    moved = onnx.load(source, load_external_data=False)
    for tensor in moved.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "out.onnx.data" if entry.key == "location" else entry.value
    onnx.save(moved, source)
    data = (tmp_path / "in.onnx.data").rename(tmp_path / "out.onnx.data").read_bytes()
    for name in ("in.onnx", "in.model"):
        source = source.rename(tmp_path / name)
        shutil.copyfile(source, tmp_path / "out.onnx")
        optimize_onnx(source, tmp_path / "out.onnx", level="full", overwrite=True)
        assert data == (tmp_path / "out.onnx.data").read_bytes()


def test_file_is_not_optimized_in_place(tmp_path: Path) -> None:
    """The source stays unchanged under any path to it; a hard link to it is another file."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    content = source.read_bytes()
    (tmp_path / "there").mkdir()
    for output in (source, tmp_path / "there" / ".." / "in.onnx"):
        with pytest.raises(UsageError, match="the input"):
            optimize_onnx(source, output, level="full", overwrite=True)
    (tmp_path / "linked.onnx").hardlink_to(source)
    optimize_onnx(source, tmp_path / "linked.onnx", level="full", overwrite=True)
    assert content == source.read_bytes() != (tmp_path / "linked.onnx").read_bytes()


def test_files_are_named_by_the_paths_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the output is relative to the working directory."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    monkeypatch.chdir(tmp_path)
    assert [Path("out.onnx")] == [file.path for file in optimize_onnx(source.name, "out.onnx", level="basic").files]


def test_loop_continues_until_a_round_without_changes(tmp_path: Path) -> None:
    """Every round is recorded, including the last one without a change."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    loop = run_optimize_analyze_loop(source, tmp_path / "out.onnx", level="basic")
    assert [True, False] == [item.changed for item in loop.rounds]
    assert loop.is_settled
    assert {"Transpose": (2, 0)} == loop.rounds[0].operator_changes()
    assert loop.file.verification is not None
    assert [1, 2] == [item["number"] for item in loop.as_record()["rounds"]]


def test_loop_takes_the_flags_of_the_next_round_from_the_analysis(tmp_path: Path) -> None:
    """The function that analyzes a round returns the options of the next round, or None to stop."""
    source = _save(tmp_path / "in.onnx", stamped=False)

    def analyze(done: OptimizationRound) -> Mapping[str, Any] | None:
        return {"transpose_elimination": True} if done.number == 1 else None

    loop = run_optimize_analyze_loop(source, tmp_path / "out.onnx", max_rounds=3, analyze=analyze)
    assert [(), ("transpose_elimination",), ("transpose_elimination",)] == [item.enabled for item in loop.rounds]
    assert [False, True, False] == [item.changed for item in loop.rounds]
    assert ["Mul", "Relu", "Mul"] == _operators(loop.file.model_path)
    with pytest.raises(UsageError, match="max_rounds 0"):
        run_optimize_analyze_loop(source, tmp_path / "other.onnx", max_rounds=0)


def test_loop_with_an_empty_first_round_writes_later_changes(tmp_path: Path) -> None:
    """The source is normalized, so only later rounds change the file; the changed file is compared."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    optimize_onnx(source, tmp_path / "plain.onnx")

    def analyze(done: OptimizationRound) -> Mapping[str, Any] | None:
        return {"level": "basic"} if done.number == 1 else None

    loop = run_optimize_analyze_loop(tmp_path / "plain.onnx", tmp_path / "out.onnx", analyze=analyze)
    assert ["Mul", "Relu", "Mul"] == _operators(loop.file.model_path)
    assert (False, True) == (loop.file.is_copy, "transpose_elimination" in loop.file.enabled)
    assert loop.file.verification is not None
    # If the analysis requests nothing either, no file is written anew.
    idle = run_optimize_analyze_loop(tmp_path / "plain.onnx", tmp_path / "idle.onnx", analyze=lambda _done: None)
    assert (True, ()) == (idle.file.is_copy, idle.file.enabled)


def test_analysis_that_returns_no_flags_is_refused(tmp_path: Path) -> None:
    """The message names the returned value."""
    source = _save(tmp_path / "in.onnx", stamped=False)
    analyze: Any = lambda _done: "full"  # noqa: E731
    with pytest.raises(UsageError, match="'full'"):
        run_optimize_analyze_loop(source, tmp_path / "out.onnx", analyze=analyze)


@pytest.mark.parametrize("flags", [{}, {"level": "full"}])
def test_truncated_data_file_is_refused(tmp_path: Path, flags: Mapping[str, Any]) -> None:
    """Otherwise a stamped file would be copied unread."""
    source = _save(tmp_path / "in.onnx", stamped=True, data=True)
    data = tmp_path / "in.onnx.data"
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"in\.onnx\.data .*'\w+' .* \d+ to \d+"):
        optimize_onnx(source, tmp_path / "out.onnx", **flags)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize(("stamped", "data"), [(True, False), (False, True)])
def test_format_too_new_for_onnx_runtime_is_lowered(tmp_path: Path, stamped: bool, data: bool) -> None:
    """The default IR version of onnx exceeds that of ONNX Runtime; the lowered file runs and is compared."""
    source = _save(tmp_path / "in.onnx", stamped=stamped, data=data)
    newest = newest_ir_version()
    model = onnx.load(source, load_external_data=False)
    model.ir_version = newest + 1
    source.write_bytes(model.SerializeToString())
    wishes: tuple[dict[str, Any], ...] = ({}, {"level": "full"})
    for flags in wishes:
        result = optimize_onnx(source, tmp_path / "out.onnx", overwrite=True, **flags)
        assert newest >= onnx.load(result.model_path).ir_version
        assert any(f"IR version {newest + 1} was lowered to {newest}" in note for note in result.notes)
        assert result.verification is not None
    assert newest + 1 == onnx.load(source, load_external_data=False).ir_version


def test_outputs_without_finite_values_are_no_evidence(tmp_path: Path) -> None:
    """NaN equals NaN, which proves nothing about the graph."""
    body = "m (float[2] x) => (float[2] y) <float[2] z = {0, 0}> { i = Div (z, z) a = Identity (x) y = Mul (a, i) }"
    result = optimize_onnx(_save(tmp_path / "in.onnx", stamped=False, body=body), tmp_path / "out.onnx")
    assert result.verification is not None
    assert not result.verification.is_verified
    assert "not checked:" in equality_words(result.verification)


def test_unknown_opset_is_refused_before_any_read(tmp_path: Path) -> None:
    """The hint has the newest opset that ONNX Runtime opens."""
    (tmp_path / "damaged.onnx").write_bytes(b"no model")
    with pytest.raises(UsageError, match=f"opset 99.*\n.*opset {newest_opset()} "):
        optimize_onnx(tmp_path / "damaged.onnx", tmp_path / "out.onnx", opset=99)


def test_failed_conversion_shows_no_foreign_source_path(tmp_path: Path) -> None:
    """The message has the reason, but not the source path of onnx's converter."""
    body = "m (float[2, 3] x, float[3] s) => (float[2, 3] y) { y = LayerNormalization (x, s) }"
    with pytest.raises(OptimizeError, match="opset 17 to 13") as raised:
        optimize_onnx(_save(tmp_path / "in.onnx", stamped=False, body=body), tmp_path / "out.onnx", opset=13)
    assert "--opset" not in raised.value.hint


def test_operators_the_execution_provider_lacks_are_named(tmp_path: Path) -> None:
    """The operators were in the source; optimizing for another provider does not remove them."""
    model = parse(
        "m (float[2, 4] x) => (float[2, 4] y) { y = com.microsoft.Gelu (x) }", domains=', "com.microsoft" : 1'
    )
    ir.save(model, tmp_path / "in.onnx")
    notes = {ep: optimize_onnx(tmp_path / "in.onnx", tmp_path / f"{ep}.onnx", ep=ep).notes for ep in ("qnn", "cpu")}
    assert any("Gelu" in note and "qnn" in note for note in notes["qnn"])
    assert () == notes["cpu"]


PERIODS = """m (float[N, time] x) => (float[N, P, 7] y) <int64[3] shape = {0, -1, 7}>
    { a = Identity (x) b = Reshape (a, shape) y = Relu (b) }"""
"""Accepts multiples of 7 only: no default size is one, and the refusal names it."""


@pytest.mark.parametrize("sizes", [{"time": 14}, {"x:1": 21, "N": 2}])
def test_stated_sizes_are_compared(sizes: dict[str, int], tmp_path: Path) -> None:
    """A size is given by name or by position; a size that the graph refuses is an error, with a hint."""
    source = _save(tmp_path / "in.onnx", stamped=False, body=PERIODS)
    with pytest.raises(StageError) as caught:
        optimize_onnx(source, tmp_path / "out.onnx", sizes={**sizes, "time": 15} if "time" in sizes else {"x:1": 15})
    assert "with sizes." in str(caught.value.hint)
    result = optimize_onnx(source, tmp_path / "out.onnx", sizes=sizes)
    assert result.verification is not None


def test_size_named_in_a_refusal_is_tried(tmp_path: Path) -> None:
    """ONNX Runtime's reason has the 7 of the reshape, and the result is compared at that size."""
    source = _save(tmp_path / "in.onnx", stamped=False, body=PERIODS)
    assert optimize_onnx(source, tmp_path / "out.onnx").verification is not None


NO_INPUTS = """m (seq(float[N, 4]) s) => (float[N, 8] y) <float[4, 8] w>
    { c = ConcatFromSequence <axis = 0> (s) y = MatMul (c, w) }"""


def test_result_without_inputs_is_written_unchecked(tmp_path: Path) -> None:
    """No values of a sequence are generated: the note says so, and the file is written if it opens."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> {NO_INPUTS}')
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 8), np.float32), "w"))
    onnx.save(model, tmp_path / "in.onnx")
    result = optimize_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx", level="full")
    assert result.verification is None
    assert any(note.startswith("Not checked: ") for note in result.notes)


def test_size_of_an_unknown_dimension_is_refused_with_the_known_dimensions(tmp_path: Path) -> None:
    """The hint lists each dimension with its positions."""
    source = _save(tmp_path / "in.onnx", stamped=False, body=PERIODS)
    with pytest.raises(UsageError, match="'x:2'") as caught:
        optimize_onnx(source, tmp_path / "out.onnx", sizes={"x:2": 7})
    assert "N (x:0), time (x:1)" in str(caught.value.hint)


_PRODUCT = """m (float[{rows}, 4, 3] x) => (float[{rows}, 4, 3] y) <float[3, 3] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9}},
    float[3] b = {{1, 2, 3}}> {{ p = MatMul (x, w) y = Add (p, b) }}"""


def test_capability_blocked_by_a_dynamic_size_has_a_note(tmp_path: Path) -> None:
    """Fixed sizes allow the fusion; a note on a capability without nodes says so."""
    notes = {}
    for rows in ("N", "2"):
        source = _save(tmp_path / f"{rows}.onnx", stamped=False, body=_PRODUCT.format(rows=rows))
        result = optimize_onnx(source, tmp_path / f"{rows}_out.onnx", matmul_add_fusion=True, layer_norm_fusion=True)
        notes[rows] = [note for note in result.notes if "changed nothing" in note]
        assert ("Gemm" in _operators(result.model_path)) == (rows == "2")
    prevented, absent = sorted(notes["N"], key=lambda note: "no nodes" in note)
    assert "matmul_add_fusion=True" in prevented
    assert "dynamic sizes (N) prevent it in 1 place" in prevented
    assert "layer_norm_fusion=True" in absent
    assert [absent] == notes["2"]


def test_level_notes_no_ineffective_capabilities(tmp_path: Path) -> None:
    """Only a capability enabled by name gets a note."""
    result = optimize_onnx(_save(tmp_path / "in.onnx", stamped=False), tmp_path / "out.onnx", level="full")
    assert not [note for note in result.notes if "changed nothing" in note]


@pytest.fixture(name="sources", scope="module")
def export_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of model → exported file."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 32), nn.LayerNorm(32)]
    exporter = HTPExporter(WinMLExportConfig(verify=False))
    exporter.export(nn.Sequential(*layers).eval(), folder / "cnn.onnx", {"input": torch.randn(1, 3, 16, 16)})
    exporter.export_checkpoint(ModelRequest(str(save_checkpoint("bert", folder / "bert"))), folder / "bert.onnx")
    return {kind: folder / f"{kind}.onnx" for kind in ("bert", "cnn")}


@pytest.mark.parametrize("kind", ["bert", "cnn"])
@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "fp16"}, {"precision": "int8", "mode": "qdq"}, {"precision": "int4"}],
    ids=["fp32", "fp16", "qdq", "int4"],
)
def test_second_optimization_changes_nothing(
    sources: dict[str, Path], tmp_path: Path, kind: str, options: dict[str, str]
) -> None:
    """The files are equal, byte by byte. A float16 graph with float32 outputs has the tolerance of float16."""
    source, once, twice = sources[kind], tmp_path / "once.onnx", tmp_path / "twice.onnx"
    if options:
        source = quantize_model(source, tmp_path / "source.onnx", verify=False, **options).model_path
    optimize_model(source, once, level="full", verify=options == {"precision": "fp16"})
    optimize_model(once, twice, level="full", verify=False)
    assert once.read_bytes() == twice.read_bytes()


def test_refused_values_name_the_option_for_others(tmp_path: Path) -> None:
    """Generated sizes are none that Resize accepts; the comparison on those of a user has no dataset."""
    body = """m (float[2, 3, 4, 4] x, int64[4] sizes) => (float[2, 3, a, b] y) {
        e = Resize <mode = "linear"> (x, , , sizes) y = Relu (e) }"""
    result = optimize_onnx(_save(tmp_path / "in.onnx", stamped=False, body=body), tmp_path / "out.onnx")
    assert result.verification is None
    (note,) = [note for note in result.notes if note.startswith("Not checked")]
    assert "--input-data" in note


def test_random_numbers_are_noted(tmp_path: Path) -> None:
    """Both files are compared with the same numbers; users run into others."""
    body = """m (float[4] x) => (float[4] y) {
        r = RandomNormalLike (x) a = RandomUniform <shape = [4]> () b = Add (x, r) y = Mul (a, b) }"""
    result = optimize_onnx(_save(tmp_path / "in.onnx", stamped=False, body=body), tmp_path / "out.onnx")
    assert result.verification is not None
    assert any("random numbers" in note for note in result.notes)
